"""axe.Schedule: upstream's schedule with a mesh and the communication primitives as methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class Schedule(s_tir.Schedule):
    """An `s_tir.Schedule` of one function over whole tensors, and the mesh that it is scheduled for.

    Every upstream primitive is there as it is; the communication primitives are this package's functions of the same
    name, and record stock instructions only, so that ``sch.trace`` replays on a plain ``s_tir.Schedule``.

    Parameters
    ----------
    mod : PrimFunc | IRModule
        An ordinary ``@T.prim_func(s_tir=True)``, or a module whose ``main`` is one.
    mesh : Mesh
        The devices.
    **options
        Passed on to `s_tir.Schedule` (``seed``, ``debug_mask``, ...).
    """

    __slots__ = ("mesh", "origin")

    mesh: Mesh
    origin: IRModule
    """The module before anything was scheduled: what the trace applies to."""

    def __init__(self, mod: PrimFunc | IRModule, *, mesh: Mesh, **options: Any) -> None:
        super().__init__(mod, **options)
        self.mesh = mesh
        self.origin = self.mod

    def copy(self) -> Schedule:
        """A copy with its own state; the loops and blocks held of this one are valid in it."""
        copied = Schedule.__new__(Schedule)
        copied.__move_handle_from__(super().copy())
        copied.mesh = self.mesh
        copied.origin = self.origin
        return copied

    def shard(
        self, loop: LoopRV, axis: str, block: SBlockRV | None = None
    ) -> tuple[LoopRV, LoopRV] | tuple[SBlockRV, SBlockRV]:
        """Share a loop between the devices of a mesh axis: see `tvm_axe.schedule.shard`."""
        return shard(self, loop, axis, self.mesh, block)

    def all_reduce(self, loop: LoopRV, axis: str) -> SBlockRV:
        """A sum of one term a device: see `tvm_axe.schedule.all_reduce`."""
        return all_reduce(self, loop, axis, self.mesh)

    def split_collective(self, block: SBlockRV, dim: int = 0, root: int | None = None) -> tuple[SBlockRV, SBlockRV]:
        """All-reduce to reduce-scatter and all-gather, or reduce and broadcast: see `split_collective`."""
        return split_collective(self, block, self.mesh, dim, root)

    def reorder_collective(self, gather: SBlockRV, consumers: Sequence[SBlockRV]) -> list[SBlockRV]:
        """Move an all-gather behind its consumers: see `tvm_axe.schedule.reorder_collective`."""
        return reorder_collective(self, gather, consumers, self.mesh)

    def as_slice(self, gather: SBlockRV) -> SBlockRV:
        """Leave a state tensor sharded for good: see `tvm_axe.schedule.as_slice`."""
        return as_slice(self, gather, self.mesh)

    def redistribute(self, block: SBlockRV, buffer: str, axis: str, dim: int | None = None) -> SBlockRV:
        """Read a buffer whole, or sharded on another dimension: see `tvm_axe.schedule.redistribute`."""
        return redistribute(self, block, buffer, axis, self.mesh, dim)

    def send(self, block: SBlockRV, axis: str) -> LoopRV:
        """Point to point along a pipeline axis: see `tvm_axe.schedule.send`."""
        return send(self, block, axis, self.mesh)

    def fuse_collective(self, blocks: Sequence[SBlockRV]) -> LoopRV:
        """One kernel out of a chain of blocks: see `tvm_axe.schedule.fuse_collective`."""
        return fuse_collective(self, blocks)

    def overlap(self, blocks: Sequence[SBlockRV], axis: str, chunks: int | ExprRV) -> list[LoopRV]:
        """Run stages chunk by chunk, one beside the other: see `tvm_axe.schedule.overlap`."""
        return overlap(self, blocks, axis, chunks, self.mesh)

    def set_layout(self, buffer: str, layout: Layout | ComposeLayout | str, tile: Sequence[int] | None = None) -> None:
        """Have a buffer's elements lie in memory as a layout says: see `tvm_axe.schedule.set_layout`."""
        set_layout(self, buffer, layout, tile)

    def tile_kernel(
        self, block: SBlockRV, kernel: str, epilogue: SBlockRV | None = None, **parameters: int | ExprRV
    ) -> None:
        """Have a tile kernel compute a block: see `tvm_axe.schedule.tile_kernel`."""
        tile_kernel(self, block, kernel, epilogue, **parameters)
