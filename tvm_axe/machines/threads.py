"""Loops of functions that nobody scheduled for a GPU become blocks and threads.

Sums of which one term counts are that term (`tvm_axe.machines.picking`), and blocks go into those that read them where
that costs nothing (`tvm_axe.machines.inlining`). Each iteration of the loops that a nest's blocks share is a thread's,
if no block is reduced over them; what is in a nest beside such loops becomes kernels of its own, one after the other.
Of a nest of one block a thread has several elements that are beside each other, and adds up in registers
(`tvm_axe.machines.lanes`). A reduction to few elements is done by the threads of a block together. That is right for
every function and fast for those that do as much for each element as for any other; for the rest there are tile kernels
and tuning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.annotations import ALIGNED
from tvm_axe.analysis.blocks import nested_blocks, statements
from tvm_axe.analysis.expressions import substitute, uses, variables_of
from tvm_axe.analysis.patterns import REDUCE, is_extreme, is_sum
from tvm_axe.analysis.tree import has_threads, with_functions
from tvm_axe.errors import LowerError
from tvm_axe.machines.inlining import inlined
from tvm_axe.machines.lanes import VECTOR, of_thread
from tvm_axe.machines.picking import picked

__all__ = ["with_threads"]

_BOUND = 256  # threads of a block
_TOGETHER = 512  # threads of a block that reduce one element together
_FEW = 1 << 14  # elements; fewer than these leave a GPU's processors idle where each is reduced by one thread
_LONG = 64  # terms; reducing fewer isn't worth the threads of a block
_SHUFFLED = ("float32", "float64", "int32")
_LARGEST = (1 << 31) - (1 << 11)  # what a thread's number may be, in 32 bits


def with_threads(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with blocks and threads for the functions of blocks that have none.

    Raises
    ------
    LowerError
        If a nest has a symbolic extent, or more iterations than a GPU has numbers for, or reads in one block what a
        later block of an earlier iteration writes.
    """
    bound = {
        variable: _Binder(inlined(picked(func)), str(variable.name_hint)).function()
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and isinstance(func.body, s_tir.SBlockRealize) and not has_threads(func)
    }
    return with_functions(mod, bound)


@dataclass(frozen=True)
class _Nest:
    """Loops, outermost first, and what is in them; the loops that no block of it is reduced over are `shared`."""

    loops: tuple[tirx.For, ...]
    body: tuple[tirx.Stmt, ...]

    @property
    def shared(self) -> list[tirx.For]:
        reduced = {var for part in self.body for var in _reduced(part)}
        return [loop for loop in self.loops if loop.loop_var not in reduced]


def _reduced(stmt: tirx.Stmt) -> set[tirx.Var]:
    """The variables that blocks of a statement are reduced over."""
    found: set[tirx.Var] = set()
    for nested in nested_blocks(stmt):
        for iterator, value in zip(nested.block.iter_vars, nested.realize.iter_values):
            if iterator.iter_type == REDUCE:
                found |= variables_of(value)
    return found


class _Binder:
    def __init__(self, func: tirx.PrimFunc, name: str) -> None:
        self.func, self.name = func, name
        self._local: list[tirx.Buffer] = []
        self._vectors: set[tirx.Buffer] = set()

    def function(self) -> tirx.PrimFunc:
        """The function with a kernel for each nest."""
        root = self.func.body.block
        nests = [nest for stmt in statements(root.body) for nest in self._apart(stmt, ())]
        kernels = [self._kernel(nest) for nest in nests]
        # What one thread alone writes and reads is its own.
        private = {}
        for buffer in root.alloc_buffers:
            users = [kernel for kernel in kernels if uses(kernel, buffer)]
            if len(users) == 1:
                private[buffer] = tirx.decl_buffer(
                    list(buffer.shape), buffer.dtype, buffer.name, scope="local", layout=None
                )
        body: tirx.Stmt = kernels[0] if len(kernels) == 1 else tirx.SeqStmt(kernels)
        body = substitute(body, private)
        allocated = [*(private.get(buffer, buffer) for buffer in root.alloc_buffers), *self._local]
        block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=allocated)
        func = tirx.PrimFunc(self.func.params, s_tir.SBlockRealize([], True, block), self.func.ret_type)
        func = s_tir.renew_defs(func.with_attrs(dict(self.func.attrs.items())))
        touched = [param for param in self.func.params if param in self._vectors]
        return func.with_attrs({f"{ALIGNED}.{param.name}": VECTOR for param in touched})

    def _apart(self, stmt: tirx.Stmt, outer: tuple[tirx.For, ...]) -> list[_Nest]:
        """What is in a statement as nests: of the parts of one whose loops some are reduced over, each has its own."""
        loops = list(outer)
        while isinstance(stmt, tirx.For):
            loops.append(stmt)
            stmt = stmt.body
        parts = statements(stmt)
        if len(parts) == 1:
            return [_Nest(tuple(loops), tuple(parts))]
        found: list[_Nest] = []
        together: list[tirx.Stmt] = []
        for part in parts:
            if any(loop.loop_var in _reduced(part) for loop in loops):
                found += [_Nest(tuple(loops), tuple(together))] if together else []
                together = []
                found += self._apart(part, tuple(loops))
            else:
                together.append(part)
        found += [_Nest(tuple(loops), tuple(together))] if together else []
        if len(found) > 1:
            self._check_order(parts)
        return found

    def _check_order(self, parts: Sequence[tirx.Stmt]) -> None:
        """Check that no part reads what a later one writes: apart, it would read what was there before."""
        for at, part in enumerate(parts):
            for nested in nested_blocks(part):
                for region in nested.block.reads:
                    later = [each for other in parts[at + 1 :] for each in nested_blocks(other)]
                    if any(write.source.same_as(region.source) for each in later for write in each.block.writes):
                        raise LowerError(
                            f"{self.name}: block {nested.block.name_hint!r} reads {region.source.name!r}, which a "
                            "later block of the same loops writes; keep them apart, or bind the loops to threads"
                        )

    def _kernel(self, nest: _Nest) -> tirx.Stmt:
        unknown = [loop for loop in nest.loops if not isinstance(loop.extent, tirx.IntImm)]
        if unknown:
            raise LowerError(
                f"{self.name}: the loop over {unknown[0].loop_var.name} has the extent {unknown[0].extent}, which is "
                "known when it is called, and no rule for GPUs takes its blocks; have each block in a nest of its own, "
                "or bind the loops to threads"
            )
        while (wider := _widened(nest)) is not None:
            nest = wider
        shared = nest.shared
        inner = [loop for loop in nest.loops if not any(loop.same_as(other) for other in shared)]
        total = math.prod(int(loop.extent) for loop in shared)
        terms = math.prod(int(loop.extent) for loop in inner)
        if max(total, terms) > _LARGEST:
            raise LowerError(
                f"{self.name}: a nest of {max(total, terms)} iterations, more than fit into 31 bits; split it into "
                "several, or bind its loops to threads"
            )
        (only, *others) = [each for part in nest.body for each in nested_blocks(part)]
        alone = not others and isinstance(nest.body[0], s_tir.SBlockRealize) and _joins(only.block)
        if alone and total < _FEW and terms >= _LONG:
            return _together(nest, shared, inner, total, terms)
        own = None if others else of_thread(shared, inner, only)
        if own is not None:
            self._local += own.local
            self._vectors |= own.vectors
            shared, total = list(own.loops), math.prod(int(loop.extent) for loop in own.loops)
        block, thread = tirx.Var("block", "int32"), tirx.Var("thread", "int32")
        threads = min(_BOUND, total)
        at = block * threads + thread
        values = _numbers(shared, at)
        ranges = {block: ir.Range(0, -(-total // threads)), thread: ir.Range(0, threads)}
        inside = at < total if total % threads else None
        if own is None:
            body = _restricted(_nested(inner, nest.body), values, inside)
        else:
            body = substitute(own.body, values)
            body = body if inside is None else tirx.IfThenElse(inside, body, None)
        return _bound(block, ranges, "blockIdx.x", _bound(thread, ranges, "threadIdx.x", body))


def _widened(nest: _Nest) -> _Nest | None:
    """The nest with one more loop that its parts share, the innermost one of each; None if they can't.

    Then what one part leaves to another is an element of each thread instead of a row, and threads beside each other
    have elements beside each other.
    """
    chains = [_chain(part) for part in nest.body]
    if len(chains) < 2 or not all(chains):
        return None
    found = []
    for chain in chains:
        assert chain is not None  # all are there
        loops, realize = chain
        reduced = _reduced(realize)
        free = [loop for loop in loops if loop.loop_var not in reduced]
        if not free:
            return None
        found.append(free[-1])
    if len({int(loop.extent) for loop in found}) > 1:
        return None
    var = tirx.Var(found[0].loop_var.name, "int32")
    parts = []
    for (loops, realize), taken in zip(filter(None, chains), found):
        inner = _restricted(realize, {taken.loop_var: var}, None)
        parts.append(_nested([loop for loop in loops if loop is not taken], [inner]))
    if not _are_apart(parts, var):
        return None
    loop = tirx.For(var, 0, found[0].extent, tirx.ForKind.SERIAL, parts[0])
    return _Nest((*nest.loops, loop), tuple(parts))


def _chain(stmt: tirx.Stmt) -> tuple[list[tirx.For], s_tir.SBlockRealize] | None:
    """The loops of a statement and the one block in them, if there is no more."""
    loops: list[tirx.For] = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    return (loops, stmt) if isinstance(stmt, s_tir.SBlockRealize) else None


def _are_apart(parts: Sequence[tirx.Stmt], var: tirx.Var) -> bool:
    """Whether what one part writes and another touches is, in each, an element of the iteration of `var` alone."""
    touched: dict[tirx.Buffer, list[tuple[int, bool, tuple[tirx.Expr, ...]]]] = {}
    for at, part in enumerate(parts):
        for nested in nested_blocks(part):
            block = nested.block
            for regions, is_write in ((block.reads, False), (block.writes, True)):
                for region in regions:
                    extents = [span.extent for span in region.region]
                    if not all(isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in extents):
                        return False
                    index = tuple(substitute(span.min, nested.bound) for span in region.region)
                    touched.setdefault(region.source, []).append((at, is_write, index))
    analyzer = Analyzer()
    for uses_of in touched.values():
        among = {at for at, _, _ in uses_of}
        if len(among) == 1 or not any(is_write for _, is_write, _ in uses_of):
            continue
        first = uses_of[0][2]
        if not uses(first, var):
            return False
        for _, _, index in uses_of[1:]:
            if not all(analyzer.can_prove_equal(one, other) for one, other in zip(first, index)):
                return False
    return True


def _together(nest: _Nest, shared: Sequence[tirx.For], inner: Sequence[tirx.For], total: int, terms: int) -> tirx.Stmt:
    """The kernel in which the threads of a block join the terms of an element.

    Its loops have the type of those of the terms: upstream takes a thread for one of a sum where a block's iterator is
    made of its number alone, and behind a cast each thread would store a sum of its own.
    """
    kind = str(inner[0].loop_var.ty.dtype)
    block, thread, turn = (tirx.Var(name, kind) for name in ("block", "thread", "turn"))
    threads = min(_TOGETHER, 1 << (terms - 1).bit_length())
    turns = -(-terms // threads)
    at = turn * threads + thread
    ranges = {block: ir.Range(0, total), thread: ir.Range(0, threads)}
    values = _numbers(shared, block) | _numbers(inner, at)
    body = _restricted(_nested([], nest.body), values, at < terms if terms % threads else None)
    first, last = tirx.const(0, kind), tirx.const(turns, kind)
    summing = tirx.For(turn, first, last, tirx.ForKind.SERIAL, _bound(thread, ranges, "threadIdx.x", body))
    return _bound(block, ranges, "blockIdx.x", summing)


def _joins(block: s_tir.SBlock) -> bool:
    """Whether a block is a sum, a maximum or a minimum, of a type that the threads of a warp can shuffle."""
    return (is_sum(block) or is_extreme(block)) and str(block.body.buffer.dtype) in _SHUFFLED


def _nested(loops: Sequence[tirx.For], body: Sequence[tirx.Stmt]) -> tirx.Stmt:
    """The statements in plain loops."""
    inner: tirx.Stmt = body[0] if len(body) == 1 else tirx.SeqStmt(list(body))
    for loop in reversed(loops):
        inner = tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, inner)
    return inner


def _numbers(loops: Sequence[tirx.For], at: tirx.Expr) -> dict[tirx.Var, tirx.Expr]:
    """What the loops' variables are in the iteration of that number, the last loop the fastest."""
    found: dict[tirx.Var, tirx.Expr] = {}
    step = 1
    for number, loop in enumerate(reversed(loops)):
        extent = int(loop.extent)
        value = at // step if step > 1 else at
        value = value if number == len(loops) - 1 else value % extent
        kind = str(loop.loop_var.ty.dtype)  # of loops over what Relax has made, int64
        found[loop.loop_var] = value if kind == str(at.ty) else tirx.Cast(kind, value)
        step *= extent
    return found


def _restricted(stmt: tirx.Stmt, values: Mapping[tirx.Var, tirx.Expr], condition: tirx.Expr | None) -> tirx.Stmt:
    """The statement at these values of variables, its blocks run under a condition."""
    at = {
        var: value if str(value.ty) == str(var.ty) else tirx.Cast(str(var.ty), value) for var, value in values.items()
    }

    def visit(part: tirx.Stmt) -> tirx.Stmt:
        if isinstance(part, tirx.For):
            return tirx.For(part.loop_var, part.min, part.extent, tirx.ForKind.SERIAL, visit(part.body))
        if isinstance(part, tirx.SeqStmt):
            return tirx.SeqStmt([visit(each) for each in part.seq])
        bound = [substitute(value, at) for value in part.iter_values]
        predicate = substitute(part.predicate, at)
        if condition is not None:
            plain = isinstance(predicate, tirx.IntImm)
            predicate = condition if plain else tirx.all(condition, predicate)
        return s_tir.SBlockRealize(bound, predicate, part.block)

    return visit(stmt)


def _bound(var: tirx.Var, ranges: Mapping[tirx.Var, ir.Range], tag: str, body: tirx.Stmt) -> tirx.Stmt:
    kind = str(var.ty)
    first, extent = tirx.const(0, kind), tirx.const(int(ranges[var].extent), kind)
    thread = tirx.IterVar(ir.Range(first, extent), tirx.Var(tag, kind), tirx.IterVar.ThreadIndex, tag)
    return tirx.For(var, first, extent, tirx.ForKind.THREAD_BINDING, body, thread_binding=thread)
