"""How the ranks of a job are dealt out to the hosts that ``--hosts`` names, and who this machine is among them."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Sequence
from typing import NamedTuple

from tvm_axe.collective.ranks import RANKS_PER_HOST
from tvm_axe.connections import is_loopback
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

__all__ = ["Host", "deal", "is_here", "known_as", "named", "simulated"]


class Host(NamedTuple):
    """A host, and how many of a job's ranks are its, one after another.

    Attributes
    ----------
    name : str
        Its name, as what starts commands there knows it.
    ranks : int
        How many.
    """

    name: str
    ranks: int


def named(host: str) -> str:
    """Return the name in what ``--hosts`` has of a host, which may be followed by how many ranks are its.

    Raises
    ------
    InputError
        If it has none, or one that would be taken for an option.
    """
    name = host.partition(":")[0].strip()
    if not name or name.startswith("-"):
        raise InputError(f"--hosts: {host!r} names no host; as in --hosts a,b, or a:3,b:1 with the ranks of each")
    return name


def deal(hosts: Sequence[str], mesh: Mesh) -> tuple[Host, ...]:
    """Return how many of a mesh's devices are each host's, in their order.

    They are as many each, or as many as stands behind the names, where one that has no number has one.

    Raises
    ------
    InputError
        If they are not as many as the mesh has devices, or a host isn't named.

    Examples
    --------
    >>> deal(["a", "b"], Mesh({"dp": 2, "tp": 2}))
    (Host(name='a', ranks=2), Host(name='b', ranks=2))
    >>> deal(["a:3", "b"], Mesh({"tp": 4}))
    (Host(name='a', ranks=3), Host(name='b', ranks=1))
    """
    names = [named(host) for host in hosts]
    if not any(":" in host for host in hosts):
        if not hosts or mesh.size % len(hosts):
            there = f"--hosts: mesh {mesh} has {mesh.size} devices, which {len(hosts)} hosts can't share evenly"
            raise InputError(f"{there}; a:3,b:1 says how many are whose")
        return tuple(Host(name, mesh.size // len(hosts)) for name in names)
    dealt = tuple(Host(name, _count(host)) for name, host in zip(names, hosts))
    total = sum(host.ranks for host in dealt)
    if total != mesh.size:
        raise InputError(f"--hosts: mesh {mesh} has {mesh.size} devices, and {','.join(hosts)} has {total} ranks")
    if len(set(names)) < len(names) and len({host.ranks for host in dealt}) > 1:
        raise InputError(f"--hosts: {','.join(hosts)} names a host twice, and then all have as many ranks")
    return dealt


def _count(host: str) -> int:
    text = host.partition(":")[2] if ":" in host else "1"
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--hosts: {host!r} must have a number of ranks behind the colon")
    return int(text)


def simulated(hosts: Sequence[Host]) -> dict[str, str]:
    """Return the variables that have ranks take a host that is named several times for as many hosts.

    >>> simulated(deal(["localhost", "localhost"], Mesh({"tp": 4})))
    {'TVM_AXE_RANKS_PER_HOST': '2'}
    """
    names = [host.name for host in hosts]
    return {RANKS_PER_HOST: str(hosts[0].ranks)} if len(set(names)) < len(names) else {}


@functools.cache
def is_here(host: str) -> bool:
    """Whether a name is this machine's: its own, or one of an address that is."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # which only addresses of this machine can be
                return True
    return False


def known_as(hosts: Sequence[str]) -> str:
    """Return by what these hosts reach this machine: its name among them, else its address on the way to another."""
    others = [host for host in hosts if not is_here(host)]
    if not others:
        return "127.0.0.1"
    for host in hosts:
        if is_here(host) and not is_loopback(host):
            return host
    for host in others:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # which sends nothing
            return str(probe.getsockname()[0])
    return socket.getfqdn()
