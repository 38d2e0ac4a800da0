"""What the workers of a launch that live in one process have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tvm_axe.collective.across import Across, spanning_axes
from tvm_axe.collective.arena import Arena
from tvm_axe.collective.job import Job
from tvm_axe.collective.sync import Control
from tvm_axe.layout import Mesh


class Site:
    """The memory and the compiled programs of the workers of one launch that live in this process.

    Attributes
    ----------
    sharing : int
        How many workers share the cores.
    across : Across or None
        What this process's worker does with workers on other machines, if there are any.
    neighbours : tuple of tuple of int
        The workers whose devices see each other's memory.
    hosts : tuple of tuple of int
        The workers of each host.
    apart : frozenset of str
        The mesh axes along which there are devices that don't.
    alone : bool
        Whether only one worker lives in this process.
    """

    def __init__(
        self,
        mesh: Mesh,
        arena: Arena,
        timeout: float,
        cores: Sequence[int],
        job: Job | None = None,
        alone: bool = True,
        neighbours: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.mesh = mesh
        self.arena = arena
        self.timeout = timeout
        self.cores = tuple(cores)
        self.sharing = mesh.size if job is None else job.sharing()
        self.control = Control(arena.map, mesh.size, None if job is None else job.host)
        self.across: Across | None = None
        if job is not None and len(job.hosts) > 1:
            self.across = Across(job, mesh, self.control, timeout)
        if neighbours is None:
            neighbours = [range(mesh.size)] if job is None else job.hosts
        self.hosts = ((tuple(range(mesh.size)),)) if job is None else job.hosts
        self.neighbours = tuple(map(tuple, neighbours))
        self.apart = spanning_axes(mesh, self.neighbours)
        self.alone = alone
        self._executables: dict[int, Any] = {}
        self._compiling = threading.Lock()

    def executable(self, program: int, compile_it: Callable[[], Any]) -> Any:
        """Return the program's executable, compiled by the first worker here that asks for it."""
        with self._compiling:
            if program not in self._executables:
                self._executables[program] = compile_it()
            return self._executables[program]

    def compiled(self, program: int) -> Any:
        """Return the program's executable, which a worker here has asked for."""
        return self._executables[program]

    def unload(self, program: int) -> None:
        """Drop the program's executable."""
        with self._compiling:
            self._executables.pop(program, None)
