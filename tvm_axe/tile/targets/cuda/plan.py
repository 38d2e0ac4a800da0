"""What the plans of both models of a CUDA block have."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.plans import Plan
from tvm_axe.tile.profiling import Samples
from tvm_axe.tile.targets.cuda.grid import Grid


@dataclass(frozen=True, eq=False, kw_only=True)
class CudaPlan(Plan):
    """A plan for a CUDA target.

    Attributes
    ----------
    grid : Grid
        The order in which blocks take the grid's points.
    samples : Samples or None
        Where the kernel writes down its waits; None of one that isn't profiled.
    """

    grid: Grid
    samples: Samples | None

    @property
    @abstractmethod
    def roles(self) -> tuple[str, ...]:
        """Who waits in a block, by numbers that the code knows."""

    @property
    @abstractmethod
    def block_threads(self) -> int:
        """The threads of a block, of all roles."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """The shared memory of a block."""

    @property
    def overlaps(self) -> bool:
        return self.grid.overlaps

    @property
    def resident(self) -> int | None:
        blocks = self.grid.blocks
        return blocks if self.grid.persistent and isinstance(blocks, int) else None

    def await_previous(self) -> None:
        """Emit the wait for the kernel before, which must precede the first access to global memory.

        Nothing lets the next kernel start before this one's last block ends (``griddepcontrol.launch_dependents``): its
        blocks would crowd on the multiprocessors that are free first, and be as far from memory as that happens to be.

        Source: PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
        """
        if self.overlaps:
            T.evaluate(T.ptx.griddepcontrol.wait())


def gpu_of(target: Target) -> Gpu:
    """The GPU that a CUDA target is."""
    machine = machine_of(target)
    assert isinstance(machine, Gpu), machine
    return machine
