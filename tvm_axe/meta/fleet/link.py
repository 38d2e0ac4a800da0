"""The process that holds a connection to a server: upstream's client waits in C++, without a limit, and dies with it.

It is a `tvm_axe.meta.measure.child.Child` of the job, which ends it when an answer takes too long. Its requests are:

    (WAIT, (host, port), key)     -> host, port and match of the server that the tracker gives it, whenever that is
    (CONNECT, host, port, match)  -> whether the server is one of upstream's own
    (ASK, text)                   -> a session's answer (`tvm_axe.meta.fleet.session`)

A server of upstream's knows no such requests: this process answers them itself then (`tvm_axe.meta.fleet.plain`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_axe import _tvm
from tvm_axe.connections import keep_alive
from tvm_axe.errors import TuneError
from tvm_axe.meta.fleet.tracker import ASK as FUNCTION
from tvm_axe.meta.measure.child import serve

__all__ = ["ASK", "CONNECT", "WAIT", "main"]

WAIT, CONNECT, ASK = "wait", "connect", "ask"

_TALK = 10.0  # seconds that a tracker may take for its first word
_GONE = 30.0  # seconds without a sign of a tracker after which there is none
_LONGEST = 1800  # seconds that one of upstream's servers, which may hang in a candidate, serves a job


class _Link:
    def __init__(self) -> None:
        self._ask: Callable[[str], str] | None = None

    def handle(self, request: tuple[Any, ...]) -> Any:
        kind, *arguments = request
        if kind == WAIT:
            return self._wait(*arguments)
        if kind == CONNECT:
            return self._connect(*arguments)
        if self._ask is None:
            raise TuneError("nothing is connected")
        (text,) = arguments
        return str(self._ask(text))

    def _wait(self, address: tuple[str, int], key: str) -> tuple[str, int, str]:
        tracker = _tvm.RpcTracker(address, _TALK)
        try:
            tracker.socket.settimeout(None)
            keep_alive(tracker.socket, _GONE)
            tracker.ask(key)
            return tracker.given()
        finally:
            tracker.close()

    def _connect(self, host: str, port: int, match: str) -> bool:
        session = _tvm.rpc_connect(host, port, match, _LONGEST)
        self._ask = _tvm.rpc_function(session, FUNCTION)
        if self._ask is not None:
            return False
        from tvm_axe.meta.fleet.plain import Plain  # builds candidates, and imports all that takes
        from tvm_axe.meta.fleet.session import Desk

        self._ask = Desk(Plain(session, f"{host}:{port}")).ask
        return True


def main(descriptors: Sequence[int]) -> None:
    """Hold a connection for a job."""
    serve(descriptors, _Link().handle)
