"""axe.Schedule: upstream's schedule with a mesh and the communication primitives as methods."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.tirx import PrimFunc

from tvm_axe.layout import ComposeLayout, Layout, Mesh
from tvm_axe.schedule.fusing import fuse_collective
from tvm_axe.schedule.memory import set_layout
from tvm_axe.schedule.overlapping import overlap
from tvm_axe.schedule.redistributing import redistribute
from tvm_axe.schedule.reordering import reorder_collective
from tvm_axe.schedule.sending import send
from tvm_axe.schedule.sharding import all_reduce, shard
from tvm_axe.schedule.slicing import as_slice
from tvm_axe.schedule.splitting import split_collective
from tvm_axe.schedule.tiles import tile_kernel

P = ParamSpec("P")
T = TypeVar("T")


def _documented_by(primitive: Callable[..., object]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Give a method the docstring of the function that it calls, less the parameters that a `Schedule` has itself.

    The schedule also keeps in mind which instructions of its trace are the primitive's.
    """

    def document(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def recorded(*args: P.args, **kwargs: P.kwargs) -> T:
            sch = args[0]
            assert isinstance(sch, Schedule)
            first = len(sch.trace.insts)
            result = method(*args, **kwargs)
            sch.applied = (*sch.applied, Applied(method.__name__, first, len(sch.trace.insts)))
            return result

        recorded.__doc__ = re.sub(
            r"^(sch|mesh) : .*\n(?: +.*\n)+", "", inspect.getdoc(primitive) or "", flags=re.MULTILINE
        )
        return recorded

    return document


class Applied(NamedTuple):
    """A primitive of this package that was applied: its name, and where its instructions begin and end in the trace."""

    name: str
    first: int
    end: int


class Schedule(s_tir.Schedule):
    """An `s_tir.Schedule` of one function over whole tensors, and the mesh that it is scheduled for.

    Every upstream primitive is there as it is. The communication primitives are the functions of `tvm_axe.schedule` of
    the same name, applied to this schedule and its mesh; they record stock instructions only, so that ``sch.trace``
    replays on a plain ``s_tir.Schedule``.

    Parameters
    ----------
    mod : PrimFunc or IRModule
        An ordinary ``@T.prim_func(s_tir=True)``, or a module whose ``main`` is one.
    mesh : Mesh
        The devices that the function is scheduled for.
    **options : Any
        Further arguments of `s_tir.Schedule` (``seed``, ``debug_mask``, ...).
    """

    __slots__ = ("applied", "mesh", "origin")

    mesh: Mesh
    origin: IRModule
    """The module before anything was scheduled: what the trace applies to."""
    applied: tuple[Applied, ...]
    """The methods below that were called, in order; what a trace brought in is in none."""

    def __init__(self, mod: PrimFunc | IRModule, *, mesh: Mesh, **options: Any) -> None:
        super().__init__(mod, **options)
        self.mesh = mesh
        self.origin = self.mod
        self.applied = ()

    def copy(self) -> Schedule:
        """Return a copy with its own state; the loops and blocks held of this one are valid in it."""
        copied = Schedule.__new__(Schedule)
        copied.__move_handle_from__(super().copy())
        copied.mesh = self.mesh
        copied.origin = self.origin
        copied.applied = self.applied
        return copied

    @_documented_by(shard)
    def shard(
        self, loop: LoopRV, axis: str, block: SBlockRV | None = None
    ) -> tuple[LoopRV, LoopRV] | tuple[SBlockRV, SBlockRV]:
        return shard(self, loop, axis, self.mesh, block)

    @_documented_by(all_reduce)
    def all_reduce(self, loop: LoopRV, axis: str) -> SBlockRV:
        return all_reduce(self, loop, axis, self.mesh)

    @_documented_by(split_collective)
    def split_collective(self, block: SBlockRV, dim: int = 0, root: int | None = None) -> tuple[SBlockRV, SBlockRV]:
        return split_collective(self, block, self.mesh, dim, root)

    @_documented_by(reorder_collective)
    def reorder_collective(self, gather: SBlockRV, consumers: Sequence[SBlockRV]) -> list[SBlockRV]:
        return reorder_collective(self, gather, consumers, self.mesh)

    @_documented_by(as_slice)
    def as_slice(self, gather: SBlockRV) -> SBlockRV:
        return as_slice(self, gather, self.mesh)

    @_documented_by(redistribute)
    def redistribute(self, block: SBlockRV, buffer: str, axis: str, dim: int | None = None) -> SBlockRV:
        return redistribute(self, block, buffer, axis, self.mesh, dim)

    @_documented_by(send)
    def send(self, block: SBlockRV, axis: str) -> LoopRV:
        return send(self, block, axis, self.mesh)

    @_documented_by(fuse_collective)
    def fuse_collective(self, blocks: Sequence[SBlockRV]) -> LoopRV:
        return fuse_collective(self, blocks)

    @_documented_by(overlap)
    def overlap(self, blocks: Sequence[SBlockRV], axis: str, chunks: int | ExprRV) -> list[LoopRV]:
        return overlap(self, blocks, axis, chunks, self.mesh)

    @_documented_by(set_layout)
    def set_layout(self, buffer: str, layout: Layout | ComposeLayout | str, tile: Sequence[int] | None = None) -> None:
        set_layout(self, buffer, layout, tile)

    @_documented_by(tile_kernel)
    def tile_kernel(
        self, block: SBlockRV, kernel: str, epilogue: SBlockRV | None = None, **parameters: int | ExprRV
    ) -> None:
        tile_kernel(self, block, kernel, epilogue, **parameters)
