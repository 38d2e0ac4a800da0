"""Which blocks are contractions, and the parts that their loops play.

    C[.., rows, .., j] += A[.., rows and reductions, ..] * W[.., reductions, .., j]

with the factors in either order. One operand, the weights W, is reused by the rows: matrix products, convolutions with
any strides, dilation and groups, capsules. A may have j too (depthwise convolutions), and may be zero at some points
(transposed convolutions: ``if_then_else((h + rh) % 2 == 0, A[..], 0)``). Where A has C's last dimension, as in
convolutions of [N, C, H, W], j is another: the output channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd

import numpy as np
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import alike, is_choice, is_zero, uses
from tvm_axe.analysis.patterns import is_move, is_pointwise
from tvm_axe.records.packing import layout_free

__all__ = [
    "Contraction",
    "Factor",
    "factors_of",
    "find_contractions",
    "is_own_nest",
    "is_plain_nest",
    "positions",
]


@dataclass(frozen=True)
class Contraction:
    """A contraction; its loops are named by their positions, outermost first.

    Attributes
    ----------
    block
        The block's name.
    extents
        Extent of each loop.
    iterators
        The loop of each of the block's iterators, in their order.
    vector
        The loop of j, which the generated code vectorises: C's last dimension, or a convolution's output
        channels where they come before the image's dimensions.
    rows
        Loops of C that A has and W hasn't, as C's dimensions are ordered.
    reductions
        Loops of the sum.
    batches, columns
        All other loops: those that A has, or no operand, and those that only W has.
    buffers
        Names of A, W and C.
    weights
        Position of W among the block's reads.
    weights_dim, weights_rank
        Which of how many dimensions of W is j; in a panel it is moved last.
    out_dim
        Which of C's dimensions is j; in registers it is moved last.
    windows
        Reductions that move A's rows: the loops over rows that each shares an index of A with.
    run
        A is the same for `run` values of j that follow each other from a multiple of `run`: a group's columns. 0 where
        A has j as its last dimension.
    phases
        Steps of A's zeros: where A is zero depends on these loops modulo that number.
    plain
        Whether every index is an iterator alone, so that `pad_einsum` can pad what a tile doesn't divide.
    bits
        Size of an element of C.
    computed
        Whether another block computes A, and doesn't only move it: padding, mostly.
    made
        Whether another block computes W, whose way of storing it is then free.
    free
        Whether W may be packed ahead of all calls: it is a parameter that the function lets be stored in another
        layout (`tvm_axe.records.packing`), or transposed from one, and nothing else reads that.
    open
        Loops whose extents aren't known until the function is called; `extents` has one of those that they may have
        (`tvm_axe.nests.ranges`).
    """

    block: str
    extents: tuple[int, ...]
    iterators: tuple[int, ...]
    vector: int
    rows: tuple[int, ...]
    reductions: tuple[int, ...]
    batches: tuple[int, ...]
    columns: tuple[int, ...]
    buffers: tuple[str, str, str]
    weights: int
    weights_dim: int
    weights_rank: int
    out_dim: int
    windows: dict[int, frozenset[int]]
    run: int
    phases: dict[int, int]
    plain: bool
    bits: int
    computed: bool = False
    made: bool = False
    free: bool = False
    open: frozenset[int] = frozenset()

    @property
    def width(self) -> int:
        """Extent of j."""
        return self.extents[self.vector]

    @property
    def transposed(self) -> bool:
        """Whether j isn't C's last dimension."""
        return self.out_dim != len(self.extents) - len(self.reductions) - 1


def find_contractions(sch: s_tir.Schedule) -> list[Contraction]:
    """The contractions among the blocks directly below the root of ``main``.

    A block counts if it is floating-point, its nest is perfect, serial, of constant extents and without a predicate,
    and every iterator is one loop.
    """
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return [found for found in (_match(sch, block) for block in blocks) if found is not None]


@dataclass(frozen=True)
class Factor:
    """An operand where it is read, and where it isn't zero (None: everywhere)."""

    load: ir.TensorLoad
    guard: tirx.Expr | None


def _match(sch: s_tir.Schedule, rv: SBlockRV) -> Contraction | None:
    block, realize = sch.get(rv), _tvm.block_realize(sch, rv)
    loops = [sch.get(loop) for loop in sch.get_loops(rv)]
    factors = factors_of(block)
    if factors is None or not is_plain_nest(loops, realize):
        return None
    position = {
        iterator.var: next((n for n, loop in enumerate(loops) if loop.loop_var.same_as(value)), -1)
        for iterator, value in zip(block.iter_vars, realize.iter_values)
    }
    if sorted(position.values()) != list(range(len(loops))):
        return None
    out = list(block.body.indices)
    if not out or any(index not in position for index in out):
        return None
    producers = {str(sch.get(b).writes[0].source.name): sch.get(b) for b in sch.get_producers(rv)}
    # C's last dimension is the best for j: what is in registers is then stored as it is.
    for j, (a, w) in product([out[-1], *out[:-1]], (factors, factors[::-1])):
        found = _parts(block, position, tuple(int(loop.extent) for loop in loops), a, w, j)
        if found is not None:
            before = producers.get(found.buffers[0])
            computed = before is not None and is_pointwise(before) and not is_move(before)
            made = producers.get(found.buffers[1])
            free = _is_free(sch, w.load.source if made is None else made)
            return replace(found, computed=computed, made=made is not None, free=free)
    return None


def _is_free(sch: s_tir.Schedule, made: tirx.Buffer | s_tir.SBlock) -> bool:
    """Whether a buffer is a parameter that may be packed, or a block transposes one, and nothing else reads it."""
    func = sch.mod["main"]
    if isinstance(made, s_tir.SBlock):
        variables = {it.var for it in made.iter_vars}
        if not is_move(made) or any(index not in variables for index in made.body.value.indices):
            return False
        made = made.body.value.source
    blocks = [sch.get(block) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    readers = [block for block in blocks if any(region.source.same_as(made) for region in block.reads)]
    return len(readers) == 1 and any(func.params[n].same_as(made) for n in layout_free(func))


def _parts(
    block: s_tir.SBlock,
    position: dict[tirx.Var, int],
    extents: tuple[int, ...],
    a: Factor,
    w: Factor,
    j: tirx.Var,
) -> Contraction | None:
    """The contraction with these operands as A and W and this iterator as j, if it is one."""
    store = block.body
    names = (str(a.load.source.name), str(w.load.source.name), str(store.buffer.name))
    reads = [str(region.source.name) for region in block.reads]
    if w.guard is not None or len({*names}) < 3 or not {*names[:2]} <= {*reads}:
        return None
    in_a, in_w = (positions(factor.load.indices, position) for factor in (a, w))
    dims = [n for n, index in enumerate(w.load.indices) if index.same_as(j)]
    run = _run(a.load, j, extents[position[j]])
    if len(dims) != 1 or run is None or _occurrences(w.load.indices, j) != 1:
        return None
    out = [position[index] for index in store.indices]
    rows = tuple(n for n in out if n != position[j] and n in in_a and n not in in_w)
    reductions = tuple(position[it.var] for it in block.iter_vars if it.iter_type == tirx.IterVar.CommReduce)
    phases = _phases(a.guard, position, extents)
    spatial = {position[it.var] for it in block.iter_vars if it.iter_type == tirx.IterVar.DataPar}
    if (
        not rows
        or out[-1] not in (position[j], *rows)
        or not reductions
        or {*out} != spatial
        or phases is None
        or (run == 0 and dims[0] != len(w.load.indices) - 1)
    ):
        return None
    rest = [n for n in range(len(extents)) if n not in (position[j], *rows, *reductions)]
    return Contraction(
        block=str(block.name_hint),
        extents=extents,
        iterators=tuple(position.values()),
        vector=position[j],
        rows=rows,
        reductions=reductions,
        batches=tuple(n for n in rest if n in in_a or n not in in_w),
        columns=tuple(n for n in rest if n in in_w and n not in in_a),
        buffers=names,
        weights=reads.index(names[1]),
        weights_dim=dims[0],
        weights_rank=len(w.load.indices),
        out_dim=out.index(position[j]),
        windows=_windows(a.load, position, rows, reductions),
        run=run,
        phases=phases,
        plain=run == extents[position[j]]
        and out[-1] == position[j]
        and all(i in position for f in (a, w) for i in f.load.indices)
        and all(str(f.load.source.dtype) == str(store.buffer.dtype) for f in (a, w)),
        bits=np.dtype(str(store.buffer.dtype)).itemsize * 8,
    )


def factors_of(block: s_tir.SBlock) -> tuple[Factor, Factor] | None:
    """The operands where the body is ``C[..] = C[..] + A[..] * B[..]`` in a floating-point type, C starting from 0."""
    store, init = block.body, block.init
    if not isinstance(store, tirx.BufferStore) or not isinstance(init, tirx.BufferStore) or not is_zero(init.value):
        return None
    terms = [store.value.a, store.value.b] if isinstance(store.value, tirx.Add) else []
    own = [t for t in terms if isinstance(t, ir.TensorLoad) and t.source.same_as(store.buffer)]
    products = [t for t in terms if isinstance(t, tirx.Mul)]
    if str(store.buffer.dtype) not in ("float32", "float64") or not (own and products):
        return None
    if not alike(own[0].indices, store.indices):
        return None
    found = [_factor(term) for term in (products[0].a, products[0].b)]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def _factor(term: tirx.Expr) -> Factor | None:
    if isinstance(term, tirx.Cast):
        term = term.value
    guard = None
    if is_choice(term) and is_zero(term.args[2]):
        guard, term = term.args[0], term.args[1]
    return Factor(term, guard) if isinstance(term, ir.TensorLoad) and "float" in str(term.source.dtype) else None


def positions(indices: Sequence[tirx.Expr], position: dict[tirx.Var, int]) -> set[int]:
    """The loops that occur in an operand's indices."""
    return {n for var, n in position.items() if any(uses(index, var) for index in indices)}


def _windows(
    a: ir.TensorLoad, position: dict[tirx.Var, int], rows: tuple[int, ...], reductions: tuple[int, ...]
) -> dict[int, frozenset[int]]:
    """The loops over rows that each reduction shares an index of A with."""
    found: dict[int, frozenset[int]] = {}
    for index in a.indices:
        loops = positions([index], position)
        for n in loops & {*reductions}:
            found[n] = found.get(n, frozenset()) | (loops & {*rows})
    return found


def _run(a: ir.TensorLoad, j: tirx.Var, columns: int) -> int | None:
    """How many values of j read the same of A; 0 if j is its last dimension, None if it is mixed into another."""
    if a.indices[-1].same_as(j) and not any(uses(index, j) for index in a.indices[:-1]):
        return 0
    steps: list[int] = []
    for index in a.indices:
        tvm_ffi.structural_walk(index, (tirx.FloorDiv, lambda node: steps.extend(_divisor(node, j))))
    return gcd(columns, *steps) if _occurrences(a.indices, j) == len(steps) else None


def _divisor(node: tirx.FloorDiv, var: tirx.Var) -> list[int]:
    return [int(node.b)] if node.a.same_as(var) and isinstance(node.b, tirx.IntImm) else []


def _occurrences(indices: Sequence[tirx.Expr], var: tirx.Var) -> int:
    found: list[tirx.Var] = []
    for index in indices:
        tvm_ffi.structural_walk(index, (tirx.Var, lambda v: found.append(v) if v.same_as(var) else None))
    return len(found)


def _phases(guard: tirx.Expr | None, position: dict[tirx.Var, int], extents: tuple[int, ...]) -> dict[int, int] | None:
    """The step of each loop that a guard takes modulo a constant; None where a loop isn't a multiple of its step.

    None also of a guard without remainders, as of padding that was inlined: that is for a block of its own.
    """
    phases: dict[int, int] = {}

    def on_remainder(node: tirx.FloorMod) -> None:
        phases.update({n: int(node.b) for var, n in position.items() if uses(node.a, var)})

    if guard is not None:
        tvm_ffi.structural_walk(guard, (tirx.FloorMod, on_remainder))
        if not phases or any(extents[n] % step for n, step in phases.items()):
            return None
    return phases


def is_plain_nest(loops: list[tirx.For], realize: s_tir.SBlockRealize) -> bool:
    """Whether the nest is perfect, serial and of constant extents from 0, and the block runs unconditionally."""
    inner = [*loops[1:], realize]
    return (
        bool(loops)
        and all(loop.body.same_as(body) for loop, body in zip(loops, inner))
        and all(loop.kind == tirx.ForKind.SERIAL and not loop.annotations for loop in loops)
        and all(isinstance(loop.extent, tirx.IntImm) and int(loop.min) == 0 for loop in loops)
        and isinstance(realize.predicate, tirx.IntImm)
        and bool(realize.predicate.value)
    )


def is_own_nest(loops: Sequence[tirx.For], realize: s_tir.SBlockRealize) -> bool:
    """Whether the nest is as it was written: perfect, serial, from 0, each loop one of the block's iterators.

    Extents may be symbolic. That of a block without loops is, too.
    """
    inner = [*loops[1:], realize]
    return (
        all(loop.body.same_as(body) for loop, body in zip(loops, inner))
        and all(loop.kind == tirx.ForKind.SERIAL and not loop.annotations for loop in loops)
        and all(isinstance(loop.min, tirx.IntImm) and int(loop.min) == 0 for loop in loops)
        and isinstance(realize.predicate, tirx.IntImm)
        and bool(realize.predicate.value)
        and len(loops) == len(realize.iter_values)
        and all(loop.loop_var.same_as(value) for loop, value in zip(loops, realize.iter_values))
    )
