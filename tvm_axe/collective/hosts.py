"""Starting the ranks of a job on several hosts from a command that is not one of them, as torchrun does."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tvm_axe.collective.dealing import Host, is_here, known_as, simulated
from tvm_axe.collective.reaching import check, command_on
from tvm_axe.collective.rendezvous import Variables
from tvm_axe.collective.start import is_rank
from tvm_axe.errors import InputError

__all__ = ["commands", "start_on_hosts"]

_PARTING = 5.0  # seconds that ranks may take to end when rank 0 has
_LOOK = 0.05


def commands(
    hosts: Sequence[Host], program: Sequence[str], port: int, job: str, launcher: str = "ssh"
) -> list[tuple[list[str], Mapping[str, str]]]:
    """Return what starts each rank, and the variables that it is told, if it is on this machine.

    A host that is named several times is as many hosts: a means of trying programs for several on one.
    """
    names = [host.name for host in hosts]
    everybody_here = all(map(is_here, names))
    first = known_as(names) if everybody_here or is_here(names[0]) else names[0]
    found: list[tuple[list[str], Mapping[str, str]]] = []
    for host in hosts:
        for local in range(host.ranks):
            variables = {
                "RANK": len(found),
                "WORLD_SIZE": sum(each.ranks for each in hosts),
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": host.ranks,
                "MASTER_ADDR": first,
                "MASTER_PORT": port,
                "TORCHELASTIC_RUN_ID": job,
            }
            told = {name: str(value) for name, value in variables.items()} | simulated(hosts)
            if is_here(host.name):
                found.append(([*program], told))
            else:
                found.append((command_on(host.name, program, told, launcher), {}))
    return found


def start_on_hosts(hosts: Sequence[Host], program: Sequence[str], launcher: str = "ssh") -> None:
    """Run a program in each rank and exit as rank 0 does; return if this process is a rank already.

    Parameters
    ----------
    hosts : sequence of Host
        Their names and their ranks, in the order of the mesh; on this machine ranks need no launcher.
    program : sequence of str
        The program and its arguments.
    launcher : str
        What takes the arguments that ``ssh`` takes.

    Raises
    ------
    InputError
        If a host isn't reached, or a rank can't be started.
    """
    if is_rank() or Variables.told() is not None:
        return
    check([host.name for host in hosts], program, launcher)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    sys.stdout.flush()
    # Ctrl-C goes to the whole job; how that ends is rank 0's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for rank, (command, told) in enumerate(commands(hosts, program, port, secrets.token_hex(8), launcher)):
            inward = None if rank == 0 else subprocess.DEVNULL
            try:
                ranks.append(subprocess.Popen(command, stdin=inward, env=os.environ | told, preexec_fn=_interruptible))
            except OSError as error:
                raise InputError(f"--hosts: {command[0]} can't be started: {error}") from None
        status = _status(ranks, hosts)
    finally:
        for process in ranks:
            process.kill()
    sys.exit(status)


def _interruptible() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _status(ranks: Sequence[subprocess.Popen[bytes]], hosts: Sequence[Host]) -> int:
    """Wait for rank 0, and a little for the others; returns its exit status, as a shell has it."""
    said = set[int]()
    names = [host.name for host in hosts for _ in range(host.ranks)]
    while ranks[0].poll() is None:
        for rank, process in enumerate(ranks):
            if process.poll() not in (None, 0) and rank not in said:
                said.add(rank)
                print(
                    f"tvm_axe: rank {rank} on {names[rank]} ended with exit status {process.returncode}",
                    file=sys.stderr,
                )
        time.sleep(_LOOK)
    deadline = time.monotonic() + _PARTING
    for process in ranks[1:]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    code = ranks[0].returncode
    return code if code >= 0 else 128 - code
