"""What an engine is: a way to have workers on the devices of a mesh."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tvm
from tvm.target import Target

from tvm_axe.errors import InputError
from tvm_axe.layout import Link, Mesh

if TYPE_CHECKING:
    from tvm_axe.collective.choice import Machine, Table
    from tvm_axe.collective.measuring import Time
    from tvm_axe.collective.session import Session


class Finding(NamedTuple):
    """Something that an engine needs or uses, as it was found on this machine."""

    what: str
    state: str
    """What there is of it."""
    remedy: str | None = None
    """What would help, where there is too little for the engine to be launched."""


class Measured(NamedTuple):
    """What was measured of the collectives of a machine."""

    machine: Machine
    table: Table
    times: Sequence[Time]


class Rates(NamedTuple):
    """How fast devices are, well enough to tell which schedules are not worth measuring."""

    link: Link
    """Between two of them."""
    memory: float
    """Bytes/s that one reads or writes of its own memory."""
    operations: float
    """Multiplications and additions a second in a tuned product."""


HOST = Rates(Link(latency=10e-6, bandwidth=10e9), memory=10e9, operations=1e11)
"""Worker processes of one machine: what waking a sleeper takes, and the memory bandwidth that a core sees."""


class Engine(ABC):
    """A way to have workers on the devices of a mesh; `axe.launch` finds it by its name, see `registry`.

    An engine has no state of its own: it may be asked for any number of launches, at once if what it starts admits
    that. These hold for all engines, so that what runs on workers needn't know which one it is:

    - Worker r is the device r of the mesh, row-major.
    - A mesh tensor's slab is where the engine's devices compute (`device_type`), zeros at first, and lies at the same
      distance from the next device's on each machine. Kernels may index the slabs along each axis for which
      `Session.is_apart` is false; collectives work along every axis.
    - Commands run on all the workers, in the order given. `Session.run` returns when all have finished, and raises a
      `WorkerError` that names the worker when one fails, dies (within a second) or falls behind (within `timeout`).
    - What was written before a barrier is seen after it, by every worker.
    - When a session is closed, by the caller, by a fault or by the end of this process, whichever way that ends, no
      process and no named memory is left.

    Attributes
    ----------
    name : str
        What it is registered by.
    device_type : str
        What the devices are, by DLPack's name: ``"cpu"`` or ``"cuda"``. Slabs are in their memory, and programs are
        compiled for them.
    rates : Rates
        How fast they are, about.
    has_ranks : bool
        Whether its workers are the processes of a job that runs the caller's program in each of them, which has to be
        started as such a job (`start.start_ranks`), instead of being started by `launch`.
    packages : tuple of str
        Distributions that it needs beside this package's own, of one version on all hosts of a job.
    """

    name: str
    device_type: str = "cpu"
    rates: Rates = HOST
    has_ranks: bool = False
    packages: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """What programs are compiled for that are to run on its devices, unless one says more."""
        return "llvm" if self.device_type == "cpu" else self.device_type

    def check(self, mesh: Mesh) -> None:
        """Refuse a mesh that the engine can't launch.

        Raises
        ------
        InputError
            If the mesh has an order of its own.
        """
        if not mesh.is_row_major:
            raise InputError(
                f"launch: workers of one machine are numbered row-major; leave the order of mesh {mesh} out"
            )

    def matches(self, target: Target) -> bool:
        """Whether programs compiled for a target run on the engine's devices."""
        return target.get_target_device_type() == tvm.device(self.device_type).dlpack_device_type()

    def options(self, given: Mapping[str, Any], *known: str) -> list[Any]:
        """Return the options of these names, None for those that aren't given.

        Raises
        ------
        InputError
            If one is given that isn't among them.
        """
        unknown = sorted(set(given).difference(known))
        if unknown:
            valid = f"valid: {', '.join(known)}" if known else "it has none"
            raise InputError(f"launch: engine {self.name!r} has no option {unknown[0]!r}; {valid}")
        return [given.get(name) for name in known]

    def table(self, devices: int) -> Table | None:
        """Return which algorithms a launch of so many devices takes for collectives, where there is a choice."""
        return None

    def findings(self) -> list[Finding]:
        """Return what there is on this machine of what the engine needs; starts nothing and raises nothing of it."""
        cores = len(os.sched_getaffinity(0))
        return [Finding("cores", f"{cores} that this process may run on")]

    def measure(self, tell: Callable[[str], object]) -> list[Measured]:
        """Measure which algorithms its collectives are to be done by here, on each number of devices.

        Parameters
        ----------
        tell : callable
            What is told what is done, in a line.

        Raises
        ------
        InputError
            If it has no choice of algorithms, or too few devices.
        """
        raise InputError(f"doctor: engine {self.name!r} does each collective in one way; there is nothing to measure")

    @abstractmethod
    def launch(self, mesh: Mesh, timeout: float, **options: Any) -> Session:
        """Start a worker for each device of a mesh that `check` admits.

        Parameters
        ----------
        mesh : Mesh
            The devices.
        timeout : float
            Seconds that a worker may be behind another; positive.
        **options
            What else the engine lets one choose (`options`).

        Raises
        ------
        InputError
            If the mesh doesn't fit what is there, or the engine has no such option.
        WorkerError
            If a worker didn't start; then none is left.
        """
