"""The tracker: upstream's, and what its summary says of a fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_axe import _tvm
from tvm_axe.connections import keep_alive, listen
from tvm_axe.errors import InputError

__all__ = ["ABOUT", "ASK", "run_tracker", "servers_of", "status", "tracker_summary"]

ASK = "tvm_axe.fleet.ask"
"""The function that a session has of this package: a request's text -> the answer's."""

ABOUT = "tvm_axe"
"""What a summary has of a server of this package: its name, its job, and what it has measured."""

_TALK = 2.0  # seconds that a tracker may take to answer
_GONE = 30.0  # seconds without a sign of a server, or a job, after which it is forgotten


def run_tracker(host: str, port: int, listening: Callable[[int], None]) -> None:
    """Be a tracker until the process ends.

    Parameters
    ----------
    host, port
        Where it listens; any free port if that is 0.
    listening
        Is told the port when it does.

    Raises
    ------
    InputError
        If it can't listen there, or tornado isn't installed.
    """
    listener = listen(host, port, tries=1)
    keep_alive(listener, _GONE)  # as those have it that it accepts
    listening(int(listener.getsockname()[1]))
    try:
        _tvm.rpc_tracker(listener)
    except ImportError as error:
        raise InputError(f"fleet tracker: {error.name} is missing: pip install tvm-axe[fleet]") from error


def tracker_summary(address: tuple[str, int]) -> dict[str, Any]:
    """What a tracker says of its servers.

    Raises
    ------
    OSError
        If there is no tracker there, or it doesn't answer.
    """
    tracker = _tvm.RpcTracker(address, _TALK)
    try:
        return tracker.summary()
    finally:
        tracker.close()


def servers_of(summary: dict[str, Any], key: str | None = None) -> list[dict[str, Any]]:
    """What the servers say of themselves in a tracker's summary, those of a key or all."""
    return [about for about in summary["server_info"] if key is None or about["key"] == f"server:{key}"]


def status(summary: dict[str, Any]) -> dict[str, Any]:
    """A tracker's summary in a form to be shown.

    Returns
    -------
    dict
        ``servers``: of each ``name``, ``key``, ``address``, ``state``, ``measured``, ``failed`` and ``scale``, by which
        its last job multiplied its times; None what upstream's own servers don't say. ``keys``: how many ``servers``
        there are of each, how many are ``free``, and how many requests are ``pending``.
    """
    servers = []
    for about in sorted(servers_of(summary), key=lambda about: (about["key"], about["addr"])):
        own = about.get(ABOUT, {})
        host, port = about["addr"]
        state = "upstream's" if not own else f"busy with job {own['job']}" if own["job"] else "free"
        servers.append(
            {
                "name": own.get("name"),
                "key": about["key"].removeprefix("server:"),
                "address": f"{host}:{port}",
                "state": state,
                **{name: own.get(name) for name in ("measured", "failed", "scale")},
            }
        )
    keys = {
        key: {"servers": len(servers_of(summary, key)), **queue}
        for key, queue in sorted(summary["queue_info"].items())
        if servers_of(summary, key) or queue["pending"]
    }
    return {"servers": servers, "keys": keys}
