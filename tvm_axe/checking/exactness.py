"""Which integers a function computes without rounding, in whatever order it sums.

Every value is bounded by what it may be at most, and by a power of two that it is a multiple of: of integers that is 1,
of what is halved 1/2. A type holds it exactly if the quotient of the two is at most 2 to the number of its significant
bits. A sum is bounded by the sum of its terms' bounds, so that each of its partial sums, of any of its terms, is held.
Division, roots and functions such as exp round, and so does a constant such as 0.1 in a product.
"""

from __future__ import annotations

from collections.abc import Callable
from math import frexp, inf, isinf, prod
from typing import NamedTuple

import ml_dtypes
import numpy as np
import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.expressions import is_choice, loads_in, uses
from tvm_axe.checking.comparing import is_float
from tvm_axe.checking.inputs import Indices

__all__ = ["exact_magnitude"]

_MAGNITUDES = (50, 20, 9, 5, 3, 2, 1)


class _Bound(NamedTuple):
    """At most `most`, and a multiple of `step`, a power of two; of zero and the infinities any."""

    most: float
    step: float


_ZERO = _Bound(0.0, inf)


class _Rounds(Exception):
    """A value that its type doesn't hold exactly, or of which that isn't known."""


def exact_magnitude(func: tirx.PrimFunc, indices: Indices) -> int | None:
    """The largest of a few magnitudes of integers that a function computes without rounding; None if there is none."""
    for magnitude in _MAGNITUDES:
        try:
            _Bounds(func, indices, magnitude).visit()
        except _Rounds:
            continue
        return magnitude
    return None


class _Bounds:
    """The bounds of a function's buffers, found in the order in which they are written."""

    def __init__(self, func: tirx.PrimFunc, indices: Indices, magnitude: int) -> None:
        self.func = func
        self.buffers: dict[tirx.Buffer, _Bound] = {
            param: _Bound(float(indices.most.get(param.name, magnitude)), 1.0) for param in func.params
        }
        self.iterators: dict[tirx.Var, int] = {}

    def visit(self) -> None:
        blocks: list[s_tir.SBlock] = []
        tvm_ffi.structural_walk(self.func.body, (s_tir.SBlock, blocks.append))
        for block in blocks:  # not in the walk, as an error would become another one there
            self._block(block)

    def _block(self, block: s_tir.SBlock) -> None:
        if isinstance(block.body, tirx.SeqStmt | tirx.For | s_tir.SBlockRealize):
            inner: list[s_tir.SBlock] = []
            tvm_ffi.structural_walk(block.body, (s_tir.SBlock, inner.append))
            if inner:
                return
        for iterator in block.iter_vars:
            if not isinstance(iterator.dom.extent, tirx.IntImm):
                raise _Rounds
            self.iterators[iterator.var] = int(iterator.dom.extent)
        terms = prod(int(it.dom.extent) for it in block.iter_vars if it.iter_type == tirx.IterVar.CommReduce)
        if block.init is not None:
            for store in _stores(block.init):
                value = store.value
                huge = isinstance(value, tirx.FloatImm | tirx.IntImm) and abs(float(value.value)) >= 2.0**15
                # What a maximum begins with is of no term, and gives way to the first.
                self.buffers[store.buffer] = _ZERO if huge else self._of(value)
        for store in _stores(block.body):
            before = self.buffers.get(store.buffer)
            found = self._stored(store, terms if block.init is not None else _times(block, store), before)
            if before is not None:
                found = _Bound(max(found.most, before.most), min(found.step, before.step))
            self.buffers[store.buffer] = found

    def _stored(self, store: tirx.BufferStore, terms: int, before: _Bound | None) -> _Bound:
        """The bound of what is stored, `terms` times over where it is added to what is there."""
        value = store.value
        if before is None or not _loads(value, store.buffer):
            return self._of(value)
        start, self.buffers[store.buffer] = before, _ZERO
        try:
            term = self._of(value)
        finally:
            self.buffers[store.buffer] = start
        if isinstance(value, tirx.Max | tirx.Min | tirx.Select) or is_choice(value):
            return _Bound(max(start.most, term.most), min(start.step, term.step))
        if not isinstance(value, tirx.Add | tirx.Sub):
            raise _Rounds
        return _held(_Bound(start.most + terms * term.most, min(start.step, term.step)), value)

    def _of(self, value: tirx.Expr) -> _Bound:
        for kinds, rule in _RULES:
            if isinstance(value, kinds):
                return rule(self, value)
        raise _Rounds

    def constant(self, value: tirx.FloatImm | tirx.IntImm) -> _Bound:
        number = float(value.value)
        if number == 0 or isinf(number):
            return _ZERO
        if is_float(np.dtype(str(value.ty.dtype))):
            number = float(np.asarray(number).astype(str(value.ty.dtype)))
        mantissa, exponent = frexp(abs(number))
        whole = int(mantissa * 2.0**53)
        return _Bound(abs(number), float(whole & -whole) * 2.0 ** (exponent - 53))

    def variable(self, value: tirx.Var) -> _Bound:
        if value not in self.iterators:
            raise _Rounds
        return _Bound(float(self.iterators[value] - 1), 1.0)

    def load(self, value: ir.TensorLoad) -> _Bound:
        if value.source not in self.buffers:
            raise _Rounds
        return self.buffers[value.source]

    def sum(self, value: tirx.Add | tirx.Sub) -> _Bound:
        a, b = self._of(value.a), self._of(value.b)
        return _held(_Bound(a.most + b.most, min(a.step, b.step)), value)

    def product(self, value: tirx.Mul) -> _Bound:
        a, b = self._of(value.a), self._of(value.b)
        if 0.0 in (a.most, b.most):
            return _ZERO
        return _held(_Bound(a.most * b.most, a.step * b.step), value)

    def either(self, value: tirx.Max | tirx.Min) -> _Bound:
        return _either(self._of(value.a), self._of(value.b))

    def select(self, value: tirx.Select) -> _Bound:
        return _either(self._of(value.true_value), self._of(value.false_value))

    def truth(self, value: tirx.Expr) -> _Bound:
        return _Bound(1.0, 1.0)

    def cast(self, value: tirx.Cast) -> _Bound:
        found = self._of(value.value)
        whole = not is_float(np.dtype(str(value.ty.dtype)))
        return _held(_Bound(found.most, max(found.step, 1.0) if whole else found.step), value)

    def quotient(self, value: tirx.FloorDiv) -> _Bound:
        return _Bound(self._of(value.a).most, 1.0)

    def remainder(self, value: tirx.FloorMod) -> _Bound:
        return _Bound(max(self._of(value.a).most, self._of(value.b).most), 1.0)

    def call(self, value: ir.Call) -> _Bound:
        if is_choice(value):
            return _either(self._of(value.args[1]), self._of(value.args[2]))
        if _is_call(value, "fabs") or _is_call(value, "abs"):
            return self._of(value.args[0])
        raise _Rounds


_Rule = Callable[[_Bounds, tirx.Expr], _Bound]
_RULES: tuple[tuple[type | tuple[type, ...], _Rule], ...] = (
    ((tirx.FloatImm, tirx.IntImm), _Bounds.constant),
    (tirx.Var, _Bounds.variable),
    (ir.TensorLoad, _Bounds.load),
    ((tirx.Add, tirx.Sub), _Bounds.sum),
    (tirx.Mul, _Bounds.product),
    ((tirx.Max, tirx.Min), _Bounds.either),
    (tirx.Select, _Bounds.select),
    (tirx.Cast, _Bounds.cast),
    (tirx.FloorDiv, _Bounds.quotient),
    (tirx.FloorMod, _Bounds.remainder),
    ((tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or, tirx.Not), _Bounds.truth),
    (ir.Call, _Bounds.call),
)


def _either(a: _Bound, b: _Bound) -> _Bound:
    return _Bound(max(a.most, b.most), min(a.step, b.step))


def _held(bound: _Bound, value: tirx.Expr) -> _Bound:
    """The bound, if the value's type holds all that is within it."""
    dtype = np.dtype(str(value.ty.dtype))
    if dtype.kind == "b":
        return bound
    if not is_float(dtype):
        if bound.most > np.iinfo(dtype).max:
            raise _Rounds
        return bound
    kind = ml_dtypes.finfo(dtype)
    smallest, largest, significant = float(kind.smallest_subnormal), float(kind.max), kind.nmant + 1
    if bound.most > largest or bound.step < smallest or bound.most > bound.step * 2.0**significant:
        raise _Rounds
    return bound


def _stores(statement: tirx.Stmt) -> list[tirx.BufferStore]:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(statement, (tirx.BufferStore, found.append))
    return found


def _times(block: s_tir.SBlock, store: tirx.BufferStore) -> int:
    """How often a block stores to one element."""
    indices = list(store.indices)
    return prod(int(it.dom.extent) for it in block.iter_vars if not uses(indices, it.var))


def _loads(value: tirx.Expr, buffer: tirx.Buffer) -> bool:
    return any(load.source.same_as(buffer) for load in loads_in(value))


def _is_call(value: tirx.Expr, name: str) -> bool:
    return isinstance(value, ir.Call) and isinstance(value.op, ir.Op) and str(value.op.name).endswith(f".{name}")
