"""What the devices of a mesh share of a block: its loops that are bound to mesh axes, and what follows from them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from tvm import s_tir, tirx

from tvm_axe.analysis.annotations import BIND, ROOT, layouts_of
from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.patterns import SPATIAL, is_copy
from tvm_axe.analysis.tree import BlockTree
from tvm_axe.layout import Mesh

__all__ = [
    "bound_axis",
    "bound_loops",
    "driven_by",
    "driving_loop",
    "gathered",
    "root_of",
    "sharded_dims",
    "sharded_over",
]


def bound_axis(loop: tirx.For) -> str | None:
    """Return the mesh axis that `loop` is bound to."""
    axis = loop.annotations.get(BIND)
    return None if axis is None else str(axis)


def root_of(block: s_tir.SBlock) -> int | None:
    """Return the coordinate of the one device that runs the cross-device reduction `block`, or None where all do."""
    root = block.annotations.get(ROOT)
    return None if root is None else int(str(root))


def driven_by(nest: NestedBlock, loop: tirx.For) -> list[tirx.IterVar]:
    """Return the block's iterators that `loop` drives, alone or with others."""
    return next((list(driven) for own, driven in zip(nest.loops, nest.driven) if own.same_as(loop)), [])


def driving_loop(nest: NestedBlock, iterator: tirx.Var) -> tirx.For | None:
    """Return the loop whose variable alone drives `iterator`, or None."""
    value = nest.bound[iterator]
    return next((loop for loop in nest.loops if loop.loop_var.same_as(value)), None)


def bound_loops(nest: NestedBlock, kind: int) -> dict[str, tirx.For]:
    """Return the block's mesh-bound loops that drive iterators of `kind` (SPATIAL or REDUCE), by mesh axis."""
    # A loop of extent 1 (an axis of one device) may drive nothing; it then counts as data-parallel.
    return {axis: loop for axis, loop, kinds in _bound(nest) if kind in kinds or (kind == SPATIAL and not kinds)}


@functools.lru_cache(maxsize=4096)
def _bound(nest: NestedBlock) -> tuple[tuple[str, tirx.For, frozenset[int]], ...]:
    """Return the block's mesh-bound loops, each with its axis and the kinds of the iterators that it drives."""
    axes = [bound_axis(loop) for loop in nest.loops]
    return tuple(
        (axis, loop, frozenset(int(iv.iter_type) for iv in driven))
        for axis, loop, driven in zip(axes, nest.loops, nest.driven)
        if axis is not None
    )


def sharded_dims(nest: NestedBlock) -> dict[str, int]:
    """Return the dimension of the block's result that each mesh axis shares, by axis."""
    return dict(_sharded_dims(nest))


@functools.lru_cache(maxsize=4096)
def _sharded_dims(nest: NestedBlock) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for axis, loop in bound_loops(nest, SPATIAL).items():
        for iv in driven_by(nest, loop):
            dims = [dim for dim, index in enumerate(nest.block.body.indices) if iv.var.same_as(index)]
            found.update({axis: dims[0]} if dims else {})
    return found


def sharded_over(tree: BlockTree, nest: NestedBlock, buffer: tirx.Buffer, mesh: Mesh) -> dict[str, int]:
    """Return the dimension of `buffer`, which the block reads, that each mesh axis shares, by axis.

    What its producer writes, or for an input what `with_layouts` declares.
    """
    for producer in tree.producers(nest):
        if producer.block.body.buffer.same_as(buffer):
            return sharded_dims(producer)
    for func in tree.functions:
        declared = layouts_of(func).get(buffer.name)
        if declared is not None and any(buffer.same_as(param) for param in func.params):
            shape = [int(extent) for extent in buffer.shape]
            return {axis: dim for dim, cut in enumerate(declared.cuts(shape, mesh)) for axis in cut}
    return {}


def gathered(tree: BlockTree, nest: NestedBlock) -> tuple[str, int] | None:
    """Return the mesh axis and the dimension that an all-gather gathers; None where the block is none.

    An all-gather is a copy of a buffer whose one producer shares it over an axis that the copy doesn't.
    """
    producers = tree.producers(nest)
    if not is_copy(nest.block) or len(producers) != 1:
        return None
    own = sharded_dims(nest)
    return next(((axis, dim) for axis, dim in sharded_dims(producers[0]).items() if axis not in own), None)
