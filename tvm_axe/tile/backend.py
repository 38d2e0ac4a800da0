"""A back end that tile programs run on: it decides about a program, and writes the function that upstream compiles."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from tvm import tirx
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines import Backend, Built, find_backend
from tvm_axe.machines.registry import Registration, described, registered
from tvm_axe.tile.plans import Plan
from tvm_axe.tile.profiling import Samples
from tvm_axe.tile.program import TileProgram

__all__ = ["TileBackend", "tile_backend_of", "tile_targets"]


@dataclass(frozen=True, kw_only=True)
class TileBackend(Backend):
    """How tile programs are lowered for one kind of target.

    Attributes
    ----------
    joins_blocks : bool
        Whether what it writes may stand in one function with scheduled blocks, which upstream compiles with it.
    by_default : bool
        Whether products that nobody scheduled and no record is of are computed by tile kernels.
    untried : bool
        Whether tile programs have been compiled for such a device, and never run on one; `explain` says so.
    """

    joins_blocks: bool
    by_default: bool = False
    untried: bool = False

    @property
    def pairs(self) -> bool:
        """Whether a product and the collective that it overlaps are one kernel beside copies (`tvm_axe.lower.pairs`).

        Devices then have copy engines, and loads of kernels that wait run ahead of what the waits aren't for.
        """
        return False

    @property
    def meets(self) -> bool:
        """Whether a kernel's blocks may wait for those of peers, as devices run theirs beside each other.

        A sum over devices of a few rows is then one kernel with what follows (`tvm_axe.lower.rows`).
        """
        return False

    @abstractmethod
    def plan(self, program: TileProgram, target: Target) -> Plan:
        """Decide everything about a program: layouts, threads, instructions, stages.

        Raises
        ------
        TileError
            The target cannot run it.
        """

    def compiled(self, plan: Plan, built: Built) -> list[str]:
        """What the compiler made of a program, a line each, if that is known of such a target."""
        return []

    def slow(self, plan: Plan, built: Built) -> list[str]:
        """What of that is slower than it need be, and what would avoid it, a sentence each."""
        return []

    def sampled(self, plan: Plan, blocks: int, most: int) -> tuple[tirx.PrimFunc, Samples]:
        """The function that `emit` writes, which writes down its waits, too, in one more parameter, the last.

        Raises
        ------
        TileError
            Kernels of such a target don't, or this program's don't.
        """
        raise TileError(f"profile: {self.name} kernels don't write down when they wait; valid are targets of cuda")

    @abstractmethod
    def emit(self, plan: Plan, apart: int = 1) -> tirx.PrimFunc:
        """Write the function that `build` compiles, as `plan` decided, for peers whose slabs are so many apart."""


def tile_backend_of(target: Target) -> TileBackend:
    """The back end for a target.

    Raises
    ------
    TileError
        None is registered for it, or tile programs don't run on that one.
    """
    found = find_backend(target)
    if isinstance(found, TileBackend):
        return found
    able = _able()
    valid = [":".join((own.kind, *own.attributes.values())) for own in able]
    raise TileError(f"target {described(target)}: tile programs run on none such; valid are {', '.join(valid)}")


def tile_targets() -> list[Target]:
    """A plain target of each back end that tile programs have been run on."""
    able = [(registration, registration.load()) for registration in _able()]
    return [own.target() for own, backend in able if isinstance(backend, TileBackend) and not backend.untried]


def _able() -> list[Registration]:
    return [registration for registration in registered() if isinstance(registration.load(), TileBackend)]
