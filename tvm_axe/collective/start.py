"""Starting the ranks of an MPI job from a command that is not one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from tvm_axe.collective.dealing import Host, known_as, simulated
from tvm_axe.collective.ranks import RANKS_PER_HOST
from tvm_axe.collective.reaching import PASSED, check, launcher_of
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

# What the process managers of MPICH and those made from it, of Open MPI and of PALS tell a rank.
_RANK = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID")
_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "PALS_SIZE")

# MPICH's mpiexec tells the other ranks of a death by SIGUSR1, which would end them. And it ORs the ranks' statuses: one
# that died of SIGINT (2) and one that was killed (9) come out as a segmentation fault (11). So a shell waits for each
# rank, whatever comes, and says how rank 0 ended, and nothing of the others.
_SHELL = "trap '' USR1; trap : INT; \"$@\"; "
_HIDDEN = _SHELL + "exit 0"
_SHOWN = _SHELL + "code=$?; [ $code -le 128 ] || [ $code -eq 130 ] || kill -$((code - 128)) $$; exit $code"


def is_rank() -> bool:
    """Whether this process is a rank of an MPI job."""
    return any(name in os.environ for name in _RANK)


def ranks() -> int:
    """Return how many ranks the MPI job has that this process is one of; 1 if that isn't known, or it is none."""
    for name in _SIZE:
        if is_rank() and os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 1


def mpiexec() -> str:
    """Return the path of the mpiexec of this Python environment, else of the first on the path.

    Raises
    ------
    InputError
        If there is none.
    """
    own = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    found = own if os.access(own, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise InputError("engine 'mpi' needs mpiexec, and there is none: pip install tvm-axe[mpi]")
    return found


def ranks_command(
    count: int, program: Sequence[str], hosts: Sequence[Host] = (), launcher: str | None = None
) -> list[str]:
    """Return the command that starts a program with its arguments as each of `count` ranks.

    It runs the mpiexec of this Python environment, else the first on the path. If it is MPICH's, it is kept from ending
    the job as soon as a rank dies, so that rank 0 can say which one did; the ranks end by themselves. It takes an
    option for that, and shells between it and the ranks.

    Parameters
    ----------
    count : int
        How many.
    program : sequence of str
        The program and its arguments.
    hosts : sequence of Host
        Where they are started, one host after the other; on this machine if left out.
    launcher : str, optional
        What mpiexec takes in the place of ``ssh``; what it would take by itself if left out.

    Raises
    ------
    InputError
        If there is none, or it is another than MPICH's or Open MPI's and there are hosts.
    """
    found = mpiexec()
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    listed = ",".join(f"{host.name}:{host.ranks}" for host in hosts)
    if "HYDRA" not in version:
        return [found, *_elsewhere(found, version, listed, launcher), "-n", str(count), *program]
    shown, hidden = (["/bin/sh", "-c", shell, "sh", *program] for shell in (_SHOWN, _HIDDEN))
    others = [":", "-n", str(count - 1), *hidden] if count > 1 else []
    where: list[str] = []
    if hosts:
        # Hosts connect to this one by a name that the user has said of it; its own may be none that they know.
        where = ["-hosts", listed, "-localhost", known_as([host.name for host in hosts])]
        where += ["-launcher", "ssh", "-launcher-exec", launcher] if launcher is not None else []
    return [found, "-disable-auto-cleanup", *where, "-n", "1", *shown, *others]


def _elsewhere(found: str, version: str, listed: str, launcher: str | None) -> list[str]:
    """What tells Open MPI's mpiexec of hosts."""
    if not listed:
        return []
    if "Open MPI" not in version:
        said = version.strip().partition("\n")[0] or "it doesn't say what it is"
        raise InputError(
            f"--hosts: {found} is neither MPICH's mpiexec nor Open MPI's ({said}): start the ranks by it yourself, as "
            "in mpiexec ... tvm-axe run ... without --hosts, or pip install tvm-axe[mpi]"
        )
    passed = [part for name in (*PASSED, RANKS_PER_HOST) if name in os.environ for part in ("-x", name)]
    agent = ["--mca", "plm_rsh_agent", launcher] if launcher is not None else []
    return ["--host", listed, *agent, *passed]


def check_count(mesh: Mesh, count: int | None) -> None:
    """Refuse a number of ranks, if it is given, that isn't the mesh's devices'.

    Raises
    ------
    InputError
        If it isn't.
    """
    if count not in (None, mesh.size):
        raise InputError(f"-n {count}: mesh {mesh} has {mesh.size} devices, and there is one rank a device")


def start_ranks(
    mesh: Mesh, count: int | None, program: Sequence[str], hosts: Sequence[Host] = (), launcher: str | None = None
) -> None:
    """Become mpiexec, which runs a program in each rank; return if this process is a rank already.

    Parameters
    ----------
    mesh : Mesh
        What the ranks will launch.
    count : int or None
        The number of ranks; as many as the mesh has devices if left out.
    program, hosts, launcher
        What `ranks_command` takes.

    Raises
    ------
    InputError
        If there is no mpiexec, or it would start another number of ranks than the mesh has devices, or a host isn't
        reached.
    """
    check_count(mesh, count)
    if not is_rank():
        os.environ.update(simulated(hosts))
        command = ranks_command(mesh.size, program, hosts, launcher)
        if launcher is not None or os.environ.get("HYDRA_LAUNCHER", "ssh") == "ssh":
            check([host.name for host in hosts], program, launcher_of(launcher))
        sys.stdout.flush()
        os.execv(command[0], command)
