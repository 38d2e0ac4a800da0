"""Being a worker, alone in a process that was started for it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from tvm_axe import _tvm
from tvm_axe.collective.arena import Arena
from tvm_axe.collective.calls import WORKERS
from tvm_axe.collective.forked import speak
from tvm_axe.collective.site import Site
from tvm_axe.collective.worker import Worker
from tvm_axe.layout import Mesh


def serve(
    descriptors: Sequence[int],
    launch: str,
    rank: int,
    axes: dict[str, int],
    memory: int,
    timeout: float,
    cores: list[int],
) -> None:
    """Be worker `rank` of a launch, alone in this process, until the controller closes it.

    Parameters
    ----------
    descriptors : sequence of int
        The arena's file, the descriptors to read commands from and to write to, and the one for standard error, if
        there is any, once this worker is up; until then what it says there is kept in a file.
    launch : str
        The launch's name.
    axes : dict
        The mesh.
    memory : int
        The size of the arena in bytes.
    timeout : float
        Seconds to wait at a barrier.
    cores : list of int
        The cores that the launch may use.
    """
    # Who stops a job by hand sends Ctrl-C's signal to all of it; the controller decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setaffinity(0, cores)
    arena, read, write, *errors = descriptors
    mesh = Mesh(axes)
    WORKERS[launch, rank] = Worker(Site(mesh, Arena(arena, memory), timeout, cores), rank)
    speak(errors)
    _tvm.disco_serve(rank, mesh.size, read, write)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # there is nothing to save, and taking the compiler down takes longer than the rest of closing
