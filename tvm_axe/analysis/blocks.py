"""Blocks with the loops around them, as they stand in a function."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer, IterMark, IterSumExpr

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import alike, is_zero, loads_in, variables_of
from tvm_axe.analysis.sizes import are_same
from tvm_axe.analysis.values import points, values

__all__ = [
    "NestedBlock",
    "all_blocks",
    "covers",
    "element",
    "is_at_hand",
    "nested_blocks",
    "ranges_of",
    "reads_of",
    "says_what_it_touches",
    "statements",
    "stays_in",
    "unused_name",
]


@dataclass(frozen=True, eq=False)
class NestedBlock:
    """A block, and the loops around it, outermost first."""

    realize: s_tir.SBlockRealize
    loops: tuple[tirx.For, ...]

    @functools.cached_property
    def block(self) -> s_tir.SBlock:
        return self.realize.block

    @functools.cached_property
    def bound(self) -> dict[tirx.Var, tirx.Expr]:
        """What the block's iterators are bound to, in loop variables."""
        return {iv.var: value for iv, value in zip(self.block.iter_vars, self.realize.iter_values)}

    @functools.cached_property
    def driven(self) -> tuple[tuple[tirx.IterVar, ...], ...]:
        """The block's iterators that each of its loops drives, alone or with others."""
        drivers = [(iv, variables_of(self.bound[iv.var])) for iv in self.block.iter_vars]
        return tuple(tuple(iv for iv, found in drivers if loop.loop_var in found) for loop in self.loops)

    @functools.cached_property
    def mask(self) -> tirx.Expr | None:
        """The condition under which an iteration of the loops runs the block, or None if all do."""
        condition = self.realize.predicate
        return None if isinstance(condition, tirx.IntImm) and condition.value else condition


def statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """Return the statements of a sequence, or the one that there is."""
    return list(stmt.seq) if isinstance(stmt, tirx.SeqStmt) else [stmt]


def nested_blocks(stmt: tirx.Stmt) -> list[NestedBlock]:
    """Return the blocks of a nest in order, the outermost ones only."""
    found: list[NestedBlock] = []

    def visit(part: tirx.Stmt, loops: tuple[tirx.For, ...]) -> None:
        if isinstance(part, tirx.For):
            visit(part.body, (*loops, part))
        elif isinstance(part, tirx.SeqStmt):
            for inner in part.seq:
                visit(inner, loops)
        elif isinstance(part, s_tir.SBlockRealize):
            found.append(NestedBlock(part, loops))

    visit(stmt, ())
    return found


def all_blocks(part: object) -> list[s_tir.SBlock]:
    """Return the blocks of a function or statement in order, also those inside others and below conditions."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(part, (s_tir.SBlock, found.append))
    return found


def element(buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> ir.TensorRegion:
    """Return the region of one element, as a block says what it reads and writes."""
    return tirx.BufferRegion(buffer, [ir.Range.from_min_extent(index, 1) for index in indices])


def is_at_hand(load: ir.TensorLoad, store: tirx.BufferStore) -> bool:
    """Return whether a load is of the element that is stored to."""
    return bool(load.source.same_as(store.buffer)) and alike(load.indices, store.indices)


def reads_of(block: s_tir.SBlock) -> list[ir.TensorRegion]:
    """Return what a block reads: its regions, and of a reduction what it loads of its own result but the running value.

    Upstream leaves all of the result out of a reduction's regions, also elements that it does not sum into, as in
    ``U[1, i] += A[i, k] * U[0, k]``.
    """
    if block.init is None or not isinstance(block.body, tirx.BufferStore):
        return list(block.reads)
    store = block.body
    others = [load for load in loads_in(store) if load.source.same_as(store.buffer) and not is_at_hand(load, store)]
    said = [region for region in block.reads if others and region.source.same_as(store.buffer)]
    return [*block.reads, *(element(load.source, load.indices) for load in others if not said)]


def says_what_it_touches(block: s_tir.SBlock) -> bool:
    """Return whether all that a block loads and stores, but for memory of its own, is of tensors in its regions.

    Blocks of ``te.extern``, as of upstream's sorting and suppression of boxes, have no regions, so primitives don't see
    that they read and write what others do.
    """
    said = {region.source for region in (*block.reads, *block.writes)}
    touched = {load.source for load in loads_in(block)}
    tvm_ffi.structural_walk(block, (tirx.BufferStore, lambda store: touched.add(store.buffer)))
    tvm_ffi.structural_walk(block, (tirx.AllocBuffer, lambda made: said.add(made.buffer)))
    return touched <= said


def covers(realize: s_tir.SBlockRealize, loops: Sequence[tirx.For]) -> bool:
    """Return whether `loops` run through all of the iterators' domains, and a mask, if any, cuts only what is beyond.

    False also where that can't be seen, as of a mask that relates two iterators.
    """
    if _are_loops(realize, loops):  # of whatever extents
        return True
    found = _tvm.iter_map(list(realize.iter_values), ranges_of(loops), realize.predicate)
    if len(found) != len(realize.block.iter_vars):
        return False
    for iv, total in zip(realize.block.iter_vars, found):
        if not all(isinstance(split.extent, tirx.IntImm) for split in total.args):  # a device's share of an uneven one
            return False
        if not isinstance(total.base, tirx.IntImm):  # of a loop that isn't one of these
            return False
        if not all(_leaps(split.source) for split in total.args):
            return False
        extents = [int(split.extent) for split in total.args if int(split.scale) == 1]
        if int(total.base) != 0 or len(extents) != len(total.args) or (extents or [1]) != [int(iv.dom.extent)]:
            return False
    return True


def _are_loops(realize: s_tir.SBlockRealize, loops: Sequence[tirx.For]) -> bool:
    """Return whether each iterator is all of a loop by itself, or has one value."""
    left = {loop.loop_var: loop for loop in loops}
    for iv, value in zip(realize.block.iter_vars, realize.iter_values):
        loop = left.pop(value, None) if isinstance(value, tirx.Var) else None
        if not is_zero(iv.dom.min) or not is_zero(value if loop is None else loop.min):
            return False
        if not are_same([iv.dom.extent], [1 if loop is None else loop.extent]):
            return False
    return isinstance(realize.predicate, tirx.IntImm) and bool(realize.predicate)


def _leaps(mark: IterMark) -> bool:
    """Return whether each part of a sum steps over all that the smaller ones reach; upstream asks that of no mask."""
    if not isinstance(mark.source, IterSumExpr):
        return True
    reach = 1
    for split in sorted(mark.source.args, key=lambda part: int(part.scale)):
        if isinstance(mark.extent, tirx.IntImm) and int(split.scale) >= int(mark.extent):
            continue  # the mask leaves it no step
        if int(split.scale) < reach or not _leaps(split.source):
            return False
        reach = int(split.scale) * int(split.extent)
    return True


def stays_in(
    value: tirx.Expr, domain: ir.Range, ranges: Mapping[tirx.Var, ir.Range], condition: tirx.Expr | None = None
) -> bool:
    """Return whether `value` is in `domain` for all the numbers of its variables for which `condition` holds.

    False also where that can't be seen.
    """
    holding: tirx.Expr = tirx.IntImm("bool", 1) if condition is None else condition
    analyzer = Analyzer()
    for var, span in ranges.items():
        analyzer.bind(var, span)
    begin, end = domain.min, domain.min + domain.extent
    with analyzer.constraint_scope(holding):
        if analyzer.can_prove(value >= begin) and analyzer.can_prove(value < end):
            return True
    known = [span for span in ranges.values() if isinstance(span.min, tirx.IntImm) and int(span.min) == 0]
    if len(known) != len(ranges) or not all(isinstance(span.extent, tirx.IntImm) for span in known):
        return False
    at = points([value, holding], {var: int(span.extent) for var, span in ranges.items()})
    if at is None:
        return False
    found, holds, first, last = (values(part, at) for part in (value, holding, begin, end))
    if found is None or holds is None or first is None or last is None:
        return False
    return bool(np.all((first <= found) & (found < last) | ~holds.astype(bool)))


def unused_name(name: str, taken: Collection[str]) -> str:
    """Return a name, or if it is taken the same with the first number behind it that isn't."""
    found, number = name, 0
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def ranges_of(loops: Sequence[tirx.For]) -> dict[tirx.Var, ir.Range]:
    """Return what the variables of `loops` run over."""
    return {loop.loop_var: ir.Range.from_min_extent(loop.min, loop.extent) for loop in loops}
