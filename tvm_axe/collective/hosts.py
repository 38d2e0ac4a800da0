"""Starting the ranks of a job on several hosts from a command that is not one of them, as torchrun does."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from tvm_axe.collective.rendezvous import Variables
from tvm_axe.collective.start import is_rank
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

__all__ = ["commands", "start_on_hosts"]

_PARTING = 5.0  # seconds that ranks may take to end when rank 0 has
_LOOK = 0.05
_PASSED = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")  # variables that ranks on other hosts are told, beside the job's


def commands(
    hosts: Sequence[str], mesh: Mesh, program: Sequence[str], port: int, job: str
) -> list[tuple[list[str], Mapping[str, str]]]:
    """Return what starts each rank, and the variables that it is told, if it is on this machine.

    A host that is named several times is as many hosts: a means of trying programs for several on one.

    Raises
    ------
    InputError
        If the mesh can't be dealt out to the hosts evenly.
    """
    if not hosts or mesh.size % len(hosts):
        raise InputError(f"--hosts: mesh {mesh} has {mesh.size} devices, which {len(hosts)} hosts can't share evenly")
    each = mesh.size // len(hosts)
    everybody_here = all(map(_is_here, hosts))
    first = "127.0.0.1" if everybody_here else socket.getfqdn() if _is_here(hosts[0]) else hosts[0]
    found: list[tuple[list[str], Mapping[str, str]]] = []
    for rank in range(mesh.size):
        host = hosts[rank // each]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": mesh.size,
            "LOCAL_RANK": rank % each,
            "LOCAL_WORLD_SIZE": each,
            "MASTER_ADDR": first,
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": job,
        }
        if len(set(hosts)) < len(hosts):
            variables["TVM_AXE_RANKS_PER_HOST"] = each
        told = {name: str(value) for name, value in variables.items()}
        if _is_here(host):
            found.append(([*program], told))
            continue
        told |= {name: os.environ[name] for name in _PASSED if name in os.environ}
        line = shlex.join(["env", *(f"{name}={value}" for name, value in told.items()), *program])
        found.append((["ssh", "-o", "BatchMode=yes", host, f"cd {shlex.quote(os.getcwd())} && exec {line}"], {}))
    return found


def start_on_hosts(hosts: Sequence[str], mesh: Mesh, program: Sequence[str]) -> None:
    """Run a program in each rank and exit as rank 0 does; return if this process is a rank already.

    On other hosts it is started through ``ssh``, in the same directory, with the same paths.

    Parameters
    ----------
    hosts : sequence of str
        Their names, as ``ssh`` knows them; those of this machine need none.
    mesh : Mesh
        What the ranks will launch; as many on each host, in their order.
    program : sequence of str
        The program and its arguments.

    Raises
    ------
    InputError
        If the mesh can't be dealt out to the hosts evenly, or a rank can't be started.
    """
    if is_rank() or Variables.told() is not None:
        return
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    ranks: list[subprocess.Popen[bytes]] = []
    sys.stdout.flush()
    # Ctrl-C goes to the whole job; how that ends is rank 0's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for rank, (command, told) in enumerate(commands(hosts, mesh, program, port, secrets.token_hex(8))):
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


def _status(ranks: Sequence[subprocess.Popen[bytes]], hosts: Sequence[str]) -> int:
    """Wait for rank 0, and a little for the others; returns its exit status, as a shell has it."""
    said = set[int]()
    while ranks[0].poll() is None:
        for rank, process in enumerate(ranks):
            if process.poll() not in (None, 0) and rank not in said:
                said.add(rank)
                host = hosts[rank * len(hosts) // len(ranks)]
                print(f"tvm_axe: rank {rank} on {host} ended with exit status {process.returncode}", file=sys.stderr)
        time.sleep(_LOOK)
    deadline = time.monotonic() + _PARTING
    for process in ranks[1:]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    code = ranks[0].returncode
    return code if code >= 0 else 128 - code


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())
