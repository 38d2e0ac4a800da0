"""axe.Schedule: upstream's schedule with a mesh and the communication primitives as methods."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.tirx import PrimFunc

from tvm_axe.analysis.tree import why_unschedulable
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import ComposeLayout, Layout, Mesh
from tvm_axe.notebook import preformatted
from tvm_axe.schedule import query
from tvm_axe.schedule.besides import beside
from tvm_axe.schedule.fusing import fuse_collective
from tvm_axe.schedule.memory import set_layout
from tvm_axe.schedule.naming import block_at, block_named, block_names, tell_apart
from tvm_axe.schedule.overlapping import overlap
from tvm_axe.schedule.redistributing import redistribute
from tvm_axe.schedule.reordering import reorder_collective
from tvm_axe.schedule.sending import send
from tvm_axe.schedule.sharding import all_reduce, shard
from tvm_axe.schedule.showing import described
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
    replays on a plain ``s_tir.Schedule``. Here a block may be given by its name, and where a loop is due a block and
    the name of its loop's variable: ``sch.shard("mm", "k", "tp")``.

    Parameters
    ----------
    mod : PrimFunc or IRModule
        An ordinary ``@T.prim_func(s_tir=True)``, or a module whose ``main`` is one.
    mesh : Mesh or mapping
        The devices that the function is scheduled for, such as ``{"tp": 2}``.
    **options : Any
        Further arguments of `s_tir.Schedule` (``seed``, ``debug_mask``, ...).

    Raises
    ------
    ScheduleError
        If `mod` is neither, or a function of it has nothing that could be scheduled; or if there is no mesh.
    """

    __slots__ = ("applied", "mesh", "origin", "renamed")

    mesh: Mesh
    origin: IRModule
    """The module before anything was scheduled: what the trace applies to."""
    applied: tuple[Applied, ...]
    """The methods below that were called, in order; what a trace brought in is in none."""
    renamed: frozenset[str]
    """The blocks' names that upstream doesn't know, or gave to several: those of which a block was told apart."""

    def __init__(
        self, mod: PrimFunc | IRModule, *, mesh: Mesh | Mapping[str, int] | None = None, **options: Any
    ) -> None:
        if not isinstance(mod, PrimFunc | IRModule):
            raise ScheduleError(
                f"Schedule: {mod!r}, a {type(mod).__name__}, can't be scheduled; valid is a function of TensorIR, "
                "@T.prim_func(s_tir=True), or a module whose main is one"
            )
        functions = [mod] if isinstance(mod, PrimFunc) else [func for _, func in mod.functions_items()]
        for func in functions:
            why = why_unschedulable(func) if isinstance(func, PrimFunc) else None
            if why is not None:
                raise ScheduleError(f"Schedule: {why}")
        if mesh is None:
            raise ScheduleError(
                'Schedule: name the mesh, for example mesh={"tp": 2}; a function for one device is scheduled by '
                "tvm.s_tir.Schedule"
            )
        super().__init__(mod, **options)
        self.mesh = Mesh.of(mesh)
        self.origin = self.mod
        self.applied = ()
        self.renamed = frozenset()

    def copy(self) -> Schedule:
        """Return a copy with its own state; the loops and blocks held of this one are valid in it."""
        copied = Schedule.__new__(Schedule)
        copied.__move_handle_from__(super().copy())
        copied.mesh = self.mesh
        copied.origin = self.origin
        copied.applied = self.applied
        copied.renamed = self.renamed
        return copied

    def get_sblock(self, name: str, func_name: str | None = None) -> SBlockRV:
        """Return the handle of the block of that name, as upstream's does; names are unique here."""
        # Once a block was told apart, those made of it have other names than where the trace is replayed, too.
        if not self.renamed or name not in block_names(self.mod):
            return super().get_sblock(name, func_name)
        return block_at(self, block_named(self.mod, name))

    def _repr_html_(self) -> str:
        return preformatted(described(self))

    def _block(self, block: SBlockRV | str, primitive: str) -> SBlockRV:
        return query.block_of(self, block, primitive)

    def _loop(
        self, primitive: str, first: LoopRV | SBlockRV | str, second: LoopRV | str, third: Any
    ) -> tuple[LoopRV, str, SBlockRV | None]:
        """Return the loop, the mesh axis and the block of (loop, axis, block or None) or of (block, loop, axis)."""
        if isinstance(first, LoopRV):
            if not isinstance(second, str):
                raise ScheduleError(f"{primitive}: a mesh axis is due behind the loop, not a {type(second).__name__}")
            return first, second, None if third is None else self._block(third, primitive)
        block = self._block(first, primitive)
        loops = query.loop_names(query.nest_of(self, block))
        if not isinstance(third, str):
            raise ScheduleError(
                f"{primitive}: block {query.name_of(self, block)!r} was given where a loop is due; valid is "
                f'{primitive}(block, loop, axis), with one of its loops {loops}: sch.{primitive}("'
                f'{query.name_of(self, block)}", "{loops.partition(",")[0]}", "{self.mesh.names[0]}")'
            )
        return query.loop_named(self, block, second, primitive), third, block

    @_documented_by(shard)
    def shard(
        self, loop: LoopRV | SBlockRV | str, axis: LoopRV | str, block: SBlockRV | str | None = None
    ) -> tuple[LoopRV, LoopRV] | tuple[SBlockRV, SBlockRV]:
        own, along, of = self._loop("shard", loop, axis, block)
        return shard(self, own, along, self.mesh, of)

    @_documented_by(all_reduce)
    def all_reduce(
        self, loop: LoopRV | SBlockRV | str, axis: LoopRV | str, block: SBlockRV | str | None = None
    ) -> SBlockRV:
        own, along, of = self._loop("all_reduce", loop, axis, block)
        return all_reduce(self, own, along, self.mesh, of)

    @_documented_by(split_collective)
    def split_collective(
        self, block: SBlockRV | str, dim: int = 0, root: int | None = None
    ) -> tuple[SBlockRV, SBlockRV]:
        return split_collective(self, self._block(block, "split_collective"), self.mesh, dim, root)

    @_documented_by(reorder_collective)
    def reorder_collective(self, gather: SBlockRV | str, consumers: Sequence[SBlockRV | str]) -> list[SBlockRV]:
        blocks = [self._block(consumer, "reorder_collective") for consumer in _several(consumers)]
        return reorder_collective(self, self._block(gather, "reorder_collective"), blocks, self.mesh)

    @_documented_by(as_slice)
    def as_slice(self, gather: SBlockRV | str) -> SBlockRV:
        return as_slice(self, self._block(gather, "as_slice"), self.mesh)

    @_documented_by(redistribute)
    def redistribute(self, block: SBlockRV | str, buffer: str, axis: str, dim: int | None = None) -> SBlockRV:
        return redistribute(self, self._block(block, "redistribute"), buffer, axis, self.mesh, dim)

    @_documented_by(send)
    def send(self, block: SBlockRV | str, axis: str) -> LoopRV:
        return send(self, self._block(block, "send"), axis, self.mesh)

    @_documented_by(fuse_collective)
    def fuse_collective(self, blocks: Sequence[SBlockRV | str]) -> LoopRV:
        return fuse_collective(self, [self._block(block, "fuse_collective") for block in _several(blocks)])

    @_documented_by(overlap)
    def overlap(self, blocks: Sequence[SBlockRV | str], axis: str, chunks: int | ExprRV) -> list[LoopRV]:
        return overlap(self, [self._block(block, "overlap") for block in _several(blocks)], axis, chunks, self.mesh)

    @_documented_by(beside)
    def beside(self, block: SBlockRV | str) -> None:
        beside(self, self._block(block, "beside"))

    @_documented_by(set_layout)
    def set_layout(self, buffer: str, layout: Layout | ComposeLayout | str, tile: Sequence[int] | None = None) -> None:
        set_layout(self, buffer, layout, tile)

    @_documented_by(tile_kernel)
    def tile_kernel(
        self, block: SBlockRV | str, kernel: str, epilogue: SBlockRV | str | None = None, **parameters: int | ExprRV
    ) -> None:
        behind = None if epilogue is None else self._block(epilogue, "tile_kernel")
        tile_kernel(self, self._block(block, "tile_kernel"), kernel, behind, **parameters)


def _named_apart(primitive: Callable[P, T]) -> Callable[P, T]:
    """Let blocks that one of upstream's primitives makes have names of their own."""

    @functools.wraps(primitive)
    def named(*args: P.args, **kwargs: P.kwargs) -> T:
        sch = args[0]
        assert isinstance(sch, Schedule)
        before = sch.mod
        result = primitive(*args, **kwargs)
        names = block_names(sch.mod)
        if len(set(names)) < len(names):
            sch.renamed |= tell_apart(sch, before)
        return result

    return named


for _primitive in (
    "blockize", "cache_index", "cache_inplace", "cache_read", "cache_write", "decompose_padding",
    "decompose_reduction", "fuse_reduction_epilogue", "loop_partition", "merge", "pad_einsum", "read_at", "reindex",
    "reindex_cache_read", "reindex_cache_write", "rfactor", "rolling_buffer", "tensorize", "transform_block_layout",
    "transform_layout", "write_at",
):  # fmt: skip
    setattr(Schedule, _primitive, _named_apart(getattr(s_tir.Schedule, _primitive)))


def _several(blocks: Sequence[SBlockRV | str]) -> Sequence[SBlockRV | str]:
    """Return the blocks; one name alone is one block."""
    return [blocks] if isinstance(blocks, str | SBlockRV) else blocks
