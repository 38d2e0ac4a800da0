"""Launching workers on a mesh.

>>> from tvm_axe.layout import Mesh
>>> with launch(Mesh({"tp": 2}), engine="threads") as workers:
...     x = workers.mesh_tensor((3,), "float32")
...     for device in range(2):
...         x.slab(device)[:] = device + 1
...     workers.all_reduce(x, x, "tp")
...     x.slab(0).tolist(), x.slab(1).tolist()
([3.0, 3.0, 3.0], [3.0, 3.0, 3.0])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_axe.collective import registry
from tvm_axe.collective.workers import Workers
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh


def launch(mesh: Mesh | Mapping[str, int], engine: str = "processes", timeout: float = 60.0, **options: Any) -> Workers:
    """Start a worker for each device of a mesh.

    There may be more workers than cores. Each gets max(1, cores // workers) threads for the parallel loops of its
    kernels.

    Parameters
    ----------
    mesh : Mesh or mapping
        The devices, such as ``{"tp": 2}``.
    engine : str
        ``"processes"``: one process a worker, except worker 0, which is a thread of this one. ``"threads"``: all are
        threads of this process, for debugging: Python code in them takes turns. ``"mpi"``: they are the ranks of the
        MPI job that this process is one of (``mpiexec -n 4 python script.py``), on one machine or on many. On rank 0,
        which is worker 0, this returns; on the others it serves rank 0's launches until rank 0 ends, and then ends the
        process. So all the ranks must come here, with the same mesh, and what the script does before, all of them do.
        ``"ranks"``: the same for ranks that torchrun's variables tell where to meet, by TCP, or that `mpiexec` started.
        ``"cuda"``: they are processes that each have a GPU, and see the others' memory; or, in a rank of a job, its
        ranks, on one host or several. `registry` has the engines, and takes others.
    timeout : float
        Seconds that a worker may be behind another, at a barrier or at the end of a command, before it is taken for
        hung. Not a limit to what all of them do together. With ``"mpi"`` also how far apart ranks may come here, which
        is allowed to be 5 s.

    **options
        What the engine takes beside. ``"cuda"``: `gpus`, the number of each device's GPU, the first ones if left out
        (devices may share one, to try a mesh on fewer GPUs); `processes`, False for threads of this process, for
        debuggers and sanitizers; `peers`, False to have no device see another's memory, as where GPUs aren't peers;
        `collectives`, what does them: ``"nccl"`` and ``"host"``, or one of `tvm_axe.collective.algorithms.Algorithm`.
        The others take nothing.

    Raises
    ------
    InputError
        For an unknown engine or option, a mesh with an order of its own, or a timeout that isn't positive. With
        ``"cuda"``, if there are too few GPUs. With ``"mpi"``,
        on every rank, if the ranks were launched with different meshes, or aren't as many as the mesh has devices.
    WorkerError
        If a worker doesn't start.
    """
    found = registry.find(engine)
    if not isinstance(mesh, Mesh | Mapping):
        raise InputError(f"launch: mesh must be a Mesh, such as Mesh({{'tp': 2}}), not {mesh!r}")
    mesh = Mesh.of(mesh)
    found.check(mesh)
    if not (isinstance(timeout, int | float) and timeout > 0):
        raise InputError(f"launch: timeout must be a positive number of seconds, not {timeout!r}")
    return Workers(mesh, found, found.launch(mesh, timeout, **options))
