"""Upstream's RPC: what a tracker is told and tells, what serves a connection, and sessions with servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

from tvm.rpc import RPCSession, base, client
from tvm.rpc import _ffi_api as _rpc_ffi

for _name in ("RPCServer", "RPCTracker"):  # upstream prints to stderr whatever it does
    logging.getLogger(_name).setLevel(logging.ERROR)


class RpcTracker:
    """A connection to a tracker; every call waits as long as the socket's time limit says.

    Raises
    ------
    OSError
        If nobody listens there, who does is no tracker, or it doesn't answer in time; also from each call.
    """

    def __init__(self, address: tuple[str, int], seconds: float | None) -> None:
        self.socket = socket.create_connection(address, seconds)
        try:
            self.socket.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
            (magic,) = struct.unpack("<i", base.recvall(self.socket, 4))
            if magic != base.RPC_TRACKER_MAGIC:
                raise OSError("who listens there is no tracker")
        except BaseException:
            self.socket.close()
            raise

    def tell(self, about: dict[str, Any]) -> None:
        """Say of a server what `summary` is to have of it: its ``key``, behind ``server:``, its ``addr``, and more."""
        self._say(base.TrackerCode.UPDATE_INFO, about)

    def offer(self, key: str, port: int, match: str, host: str | None) -> None:
        """Put a server into the queue of those that are free; who gets it is told `match`."""
        self._say(base.TrackerCode.PUT, key, (port, match), host)

    def offered(self) -> list[str]:
        """The matches of this connection's servers that nobody was given yet."""
        return [str(match) for match in self._ask(base.TrackerCode.GET_PENDING_MATCHKEYS)]

    def ask(self, key: str) -> None:
        """Ask for a server; `given` waits for it."""
        base.sendjson(self.socket, [base.TrackerCode.REQUEST, key, "", 1])

    def given(self) -> tuple[str, int, str]:
        """The host, the port and the match of the server that was asked for."""
        host, port, match = _told(base.recvjson(self.socket))
        return str(host), int(port), str(match)

    def summary(self) -> dict[str, Any]:
        """``server_info``, what each server has said of itself, and ``queue_info``, how many of a key are free."""
        return dict(_told(self._ask(base.TrackerCode.SUMMARY)))

    def close(self) -> None:
        """End the connection; what was offered is no longer."""
        self.socket.close()

    def _ask(self, *request: Any) -> Any:
        base.sendjson(self.socket, list(request))
        return base.recvjson(self.socket)

    def _say(self, *request: Any) -> None:
        if self._ask(*request) != base.TrackerCode.SUCCESS:
            raise OSError("the tracker refused what it was told")


def _told(answer: Any) -> Any:
    """What a tracker says beside that it does what it was asked for."""
    status, told = answer
    if status != base.TrackerCode.SUCCESS:
        raise OSError(f"the tracker refused: {told}")
    return told


def rpc_match(key: str) -> str:
    """Draw what a client must say to a server of a key to be the one that a tracker sent."""
    return str(base.random_key(key))


def rpc_greet(connection: socket.socket, key: str, match: str) -> bool:
    """As a server, hear who has connected; whether it is the client that a tracker sent."""
    (magic,) = struct.unpack("<i", base.recvall(connection, 4))
    if magic != base.RPC_MAGIC:
        return False
    (length,) = struct.unpack("<i", base.recvall(connection, 4))
    if not 0 < length < 1 << 12:
        return False
    said = base.recvall(connection, length).decode(errors="replace").split()
    if not said or said[0] != f"client:{match}":
        connection.sendall(struct.pack("<i", base.RPC_CODE_MISMATCH))
        return False
    name = f"server:{key}".encode()
    connection.sendall(struct.pack("<ii", base.RPC_CODE_SUCCESS, len(name)) + name)
    return True


def rpc_serve(descriptor: int) -> None:
    """Do what the client at the other end of a socket asks for, until it goes."""
    _rpc_ffi.ServerLoop(descriptor)


def rpc_connect(host: str, port: int, match: str, seconds: int) -> RPCSession:
    """A session with a server, which an upstream server ends after so many seconds; 0: it may last."""
    return client.connect(host, port, match, session_timeout=seconds)


def rpc_function(session: RPCSession, name: str) -> Callable[..., Any] | None:
    """A function that the server has by a name; None if it has no such."""
    with contextlib.suppress(AttributeError, RuntimeError, ValueError):
        return session.get_function(name)
    return None


def rpc_tracker(listener: socket.socket) -> None:
    """Be a tracker, until the process ends.

    Raises
    ------
    ImportError
        If tornado isn't there.
    """
    from tvm.rpc import tracker  # which needs tornado

    asyncio.set_event_loop(asyncio.new_event_loop())
    tracker.TrackerServerHandler(listener, base.random_key("tracker")).run()
