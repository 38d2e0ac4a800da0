"""Pieces: how the devices of mesh axes share a dimension or an iterator, each a contiguous part of it.

Devices that share n elements have ceil(n / devices) each, in order. Of several axes the first is the major one: a step
along it leaps over all the pieces of the others.

>>> pieces_of(10, ("x", "y"), Mesh({"x": 2, "y": 2}))
(('x', 6), ('y', 3))
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

import numpy as np
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer, detect_linear_equation

from tvm_axe.analysis.annotations import OVERLAP, RING
from tvm_axe.analysis.blocks import NestedBlock, covers, nested_blocks, ranges_of, stays_in
from tvm_axe.analysis.elements import one_to_one
from tvm_axe.analysis.expressions import uses, variables_of
from tvm_axe.analysis.sharing import bound_axis
from tvm_axe.analysis.values import LIMIT, points, values
from tvm_axe.layout import Mesh

__all__ = ["Pieces", "linear", "own_pieces", "pieces_of", "renumbered", "shared_pieces", "with_block", "within"]

Pieces = tuple[tuple[str, int], ...]
"""Mesh axes, the major one first, each with the elements from one of its devices' piece to the next one's."""


def pieces_of(extent: int, cut: Sequence[str], mesh: Mesh) -> Pieces:
    """What each axis of `cut` steps by in a dimension that they share, ceil(extent / devices) elements a device."""
    sizes = [mesh.axis_size(axis) for axis in cut]
    piece = -(-extent // prod(sizes))
    return tuple((axis, piece * prod(sizes[at + 1 :])) for at, axis in enumerate(cut))


def shared_pieces(some: Pieces, others: Pieces) -> int:
    """How many axes, from the major one on, step alike in both."""
    for count, (one, other) in enumerate(zip(some, others)):
        if one != other:
            return count
    return min(len(some), len(others))


def own_pieces(
    index: tirx.Expr,
    coordinates: Mapping[str, tirx.Var],
    device: Mapping[str, tirx.For],
    mesh: Mesh,
    analyzer: Analyzer,
) -> Pieces:
    """The axes whose devices' own pieces `index` stays in, pieces within pieces; none where it follows no device."""
    found: list[tuple[str, int]] = []
    rest = index
    for axis in device:
        if uses(rest, coordinates[axis]):
            step, without = linear(rest, coordinates[axis])
            if step is not None and step > 0:
                found.append((axis, step))
                rest = without
    found.sort(key=lambda each: -each[1])
    for count in range(len(found), 0, -1):
        pieces = tuple(found[:count])
        inside = index
        for axis, _ in pieces:
            inside = linear(inside, coordinates[axis])[1]
        nest = all(step >= inner * mesh.axis_size(axis) for (_, step), (axis, inner) in pairwise(pieces))
        if nest and within(inside, pieces[-1][1], analyzer):
            return pieces
    return ()


def linear(expr: tirx.Expr, var: tirx.Var) -> tuple[int | None, tirx.Expr]:
    """(coefficient of `var`, the rest) of a linear `expr`; (None, expr) of any other."""
    parts = detect_linear_equation(expr, [var])
    if len(parts) != 2 or not isinstance(parts[0], tirx.IntImm):
        return None, expr
    return int(parts[0]), parts[1]


def within(base: tirx.Expr, piece: int, analyzer: Analyzer) -> bool:
    """Whether `base` is known to be in ``[0, piece)``."""
    bounds = analyzer.const_int_bound(base)
    return bool(bounds.min_value >= 0 and bounds.max_value < piece)


# ---- Which device does which iterations ------------------------------------------------------------------------------


def renumbered(nest: tirx.Stmt, mesh: Mesh, cyclic: bool = False) -> tirx.Stmt:
    """Have devices share iterators in contiguous pieces where they do not: `nest`, or one that does the same.

    Who shares a loop that is shared already, 10 iterations over 2 devices and each one's 5 over 2 others, has pieces of
    3 and 2 and 3 and 2. In their order those are 3, 3, 3 and 1: the same iterations, other devices. ::

        v = i_0 * 5 + i_1 * 3 + i_2 where i_1 * 3 + i_2 < 5   ->   v = (i_0 * 2 + i_1) * 3 + i_2 where v < 10

    Only of a nest with one block, whose iterator is data-parallel and driven by loops of its own through each of its
    values once; and whose stores don't overwrite each other.

    Parameters
    ----------
    nest : Stmt
        Loops around blocks.
    mesh : Mesh
        The devices.
    cyclic : bool
        Whether to do it as well where one axis shares an iterator in other pieces, such as every other iteration.
    """
    blocks = nested_blocks(nest)
    if len(blocks) != 1 or not isinstance(blocks[0].block.body, tirx.BufferStore):
        return nest
    (block,) = blocks
    if any(key in loop.annotations for loop in block.loops for key in (OVERLAP, RING)):
        return nest  # chunks are in an order of their own
    bound, predicate = list(block.realize.iter_values), block.realize.predicate
    for at, iv in enumerate(block.block.iter_vars):
        found = _renumbered(block, at, predicate, mesh, cyclic)
        if found is not None and iv.iter_type == tirx.IterVar.DataPar:
            bound[at], predicate = found
    if predicate.same_as(block.realize.predicate):
        return nest
    spatial = {iv.var: int(iv.dom.extent) for iv in block.block.iter_vars if iv.iter_type == tirx.IterVar.DataPar}
    if not one_to_one(block.block.body, spatial):
        return nest
    return with_block(nest, block.realize, s_tir.SBlockRealize(bound, predicate, block.block))


def with_block(stmt: tirx.Stmt, old: s_tir.SBlockRealize, new: s_tir.SBlockRealize) -> tirx.Stmt:
    """Return a nest with another block in the place of one."""
    if isinstance(stmt, tirx.For):
        body = with_block(stmt.body, old, new)
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, stmt.thread_binding, stmt.annotations)
    if isinstance(stmt, tirx.SeqStmt):
        return tirx.SeqStmt([with_block(part, old, new) for part in stmt.seq])
    return new if stmt.same_as(old) else stmt


def _renumbered(
    block: NestedBlock, at: int, predicate: tirx.Expr, mesh: Mesh, cyclic: bool
) -> tuple[tirx.Expr, tirx.Expr] | None:
    """What iterator `at` is to be bound to, and the block's mask then; None if it is well as it is, or can't be."""
    value, extent = block.realize.iter_values[at], int(block.block.iter_vars[at].dom.extent)
    steps: list[tuple[int, tirx.For]] = []
    for loop in block.loops:
        if uses(value, loop.loop_var):
            step, _ = linear(value, loop.loop_var)
            if step is None or step < 1 or not isinstance(loop.extent, tirx.IntImm):
                return None
            steps.append((step, loop))
    steps.sort(key=lambda each: -each[0])
    devices = [(step, loop) for step, loop in steps if bound_axis(loop) in mesh.names and int(loop.extent) > 1]
    others = [loop for _, loop in steps if not any(loop.same_as(device) for _, device in devices)]
    axes = [str(bound_axis(loop)) for _, loop in devices]
    if any(int(loop.extent) != mesh.axis_size(axis) for axis, (_, loop) in zip(axes, devices)):
        return None
    if not cyclic and (len(devices) < 2 or steps[: len(devices)] != devices):
        return None
    pieces = pieces_of(extent, axes, mesh)
    ranges = ranges_of(block.loops)
    place = functools.reduce(lambda to, loop: to * loop.extent + loop.loop_var, others, _ZERO)
    if not devices or (
        pieces == tuple((axis, step) for axis, (step, _) in zip(axes, devices))
        and stays_in(_without(value, [loop for _, loop in devices]), ir.Range(0, pieces[-1][1]), ranges, predicate)
    ):
        return None
    own, rest = _parted(predicate, {loop.loop_var for _, loop in steps})
    elsewhere = [other for number, other in enumerate(block.realize.iter_values) if number != at]
    if rest is None or any(uses([*elsewhere, *rest], loop.loop_var) for _, loop in steps):
        return None
    if not _each_once(value, own, extent, {loop.loop_var: int(loop.extent) for _, loop in steps}, block):
        return None
    piece = pieces[-1][1]
    new = functools.reduce(
        operator.add, [*(loop.loop_var * step for (_, loop), (_, step) in zip(devices, pieces)), place]
    )
    masks = [place < piece] if prod(int(loop.extent) for loop in others) > piece else []
    masks += [new < extent] if pieces[0][1] * mesh.axis_size(axes[0]) > extent else []
    return new, functools.reduce(tirx.all, [*rest, *masks], _TRUE)


_ZERO, _TRUE = tirx.IntImm("int32", 0), tirx.IntImm("bool", 1)


def _without(value: tirx.Expr, loops: Sequence[tirx.For]) -> tirx.Expr:
    """What is left of a linear `value` without the variables of `loops`."""
    return functools.reduce(lambda left, loop: linear(left, loop.loop_var)[1], loops, value)


def _parted(predicate: tirx.Expr, own: set[tirx.Var]) -> tuple[list[tirx.Expr], list[tirx.Expr] | None]:
    """The parts of a mask that are in variables of `own`, and those in others; None if one is in both."""
    parts, mine, rest = [predicate], list[tirx.Expr](), list[tirx.Expr]()
    while parts:
        part = parts.pop()
        if isinstance(part, tirx.And):
            parts += [part.b, part.a]
        elif variables_of(part) <= own:
            mine.append(part)
        elif variables_of(part) & own:
            return [], None
        else:
            rest.append(part)
    return mine, rest


def _each_once(
    value: tirx.Expr, masks: Sequence[tirx.Expr], extent: int, extents: Mapping[tirx.Var, int], block: NestedBlock
) -> bool:
    """Whether `value` takes each number below `extent` once, where `masks` hold."""
    at = points([value, *masks], extents)
    if at is None or extent > LIMIT or set(at) != set(extents):
        return covers(block.realize, block.loops)
    found = [values(part, at) for part in (value, *masks)]
    if any(part is None for part in found):
        return False
    numbers, *holding = np.broadcast_arrays(*found, *at.values())[: len(found)]  # type: ignore[arg-type]
    taken = numbers[np.logical_and.reduce([np.ones(numbers.shape, bool), *holding])]
    counts = np.bincount(taken[(taken >= 0) & (taken < extent)], minlength=extent)
    return len(taken) == extent and bool((counts == 1).all())
