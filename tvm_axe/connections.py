"""TCP connections: which addresses don't leave this machine, and how a peer that vanished is noticed."""

from __future__ import annotations

import ipaddress
import socket

from tvm_axe.errors import InputError

__all__ = ["is_loopback", "keep_alive", "listen"]

_IDLE, _BETWEEN, _PROBES = 3, 1, 4  # seconds until a silent connection is probed, and between probes; how many
_PORTS = 100  # that are tried, from the first one on


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine alone."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def keep_alive(connection: socket.socket, patience: float = _IDLE + _BETWEEN * _PROBES) -> None:
    """Have a peer that has vanished without a word be an error within so many seconds; small messages go at once."""
    probes = max(1, round((patience - _IDLE) / _BETWEEN))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _BETWEEN)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * patience))


def listen(host: str, port: int, tries: int = _PORTS) -> socket.socket:
    """Listen at the first of some ports, from `port` on, that nobody listens at; at any free one if it is 0.

    Raises
    ------
    InputError
        If there is none.
    """
    reason: OSError | None = None
    for tried in range(port, min(port + tries, 1 << 16)) if port else (0,):
        try:
            return socket.create_server((host, tried))
        except OSError as error:
            reason = error
    raise InputError(f"listen: nothing can listen at {host}, port {port}{' or the next ones' * (tries > 1)}: {reason}")
