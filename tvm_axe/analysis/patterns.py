"""What a block computes: the pattern of its body, and what it loads."""

from __future__ import annotations

import enum
import functools
import math

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.expressions import alike, is_zero, loads_in, substitute

__all__ = [
    "REDUCE",
    "SPATIAL",
    "Pattern",
    "added",
    "factors_of",
    "folded",
    "goes_on_with",
    "is_copy",
    "is_extreme",
    "is_move",
    "is_pointwise",
    "is_product",
    "is_sum",
    "iterator_at",
    "loads_multiplied",
    "loads_of",
    "pattern_of",
    "shift_of",
    "stays_small",
    "summed",
]

SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce
"""The kinds of iterators: of elements of the result, and of terms that one element is made of."""

_LARGEST = 4096  # expressions in a block's body


class Pattern(enum.Enum):
    """What a block computes, as far as rules tell blocks apart by it."""

    COPY = "copy"
    """``B[v...] = A[v...]``, with the same indices."""
    POINTWISE = "pointwise"
    """Any other store of one element for each value of the iterators, none of which is a reduction's; no init."""
    CONTRACTION = "contraction"
    """A sum of products of elements of two buffers, each of which may be cast: ``C[..] = C[..] + A[..] * B[..]``."""
    REDUCTION = "reduction"
    """Any other block with an init: a sum, a maximum, a sum of squares."""
    OPAQUE = "opaque"
    """Anything else: several stores, a loop, an update in place over a reduction's iterators."""


@functools.lru_cache(maxsize=4096)
def pattern_of(block: s_tir.SBlock) -> Pattern:
    """Return what the block computes."""
    store = block.body
    if block.init is not None:
        return Pattern.CONTRACTION if _sums_products(store) else Pattern.REDUCTION
    if not isinstance(store, tirx.BufferStore) or any(iv.iter_type != SPATIAL for iv in block.iter_vars):
        return Pattern.OPAQUE
    load = store.value
    if isinstance(load, ir.TensorLoad) and alike(store.indices, load.indices):
        return Pattern.COPY
    return Pattern.POINTWISE


def _uncast(value: tirx.Expr) -> tirx.Expr:
    return value.value if isinstance(value, tirx.Cast) else value


def _sums_products(body: tirx.Stmt) -> bool:
    found: list[bool] = []
    if isinstance(body, tirx.BufferStore) and not isinstance(_uncast(body.value), tirx.Add):
        return False

    def on_product(product: tirx.Mul) -> None:
        factors = [_uncast(factor) for factor in (product.a, product.b)]
        loads = all(isinstance(factor, ir.TensorLoad) for factor in factors)
        found.append(loads and not factors[0].source.same_as(factors[1].source))

    tvm_ffi.structural_walk(body, (tirx.Mul, on_product))
    return any(found)


def factors_of(block: s_tir.SBlock) -> tuple[ir.TensorLoad, ir.TensorLoad] | None:
    """Return A and B of ``C[..] = C[..] + A[..] * B[..]``, where both may be cast and C starts from zero, or None."""
    term = added(block)
    return None if term is None else loads_multiplied(term, block.body.buffer)


def added(block: s_tir.SBlock) -> tirx.Expr | None:
    """Return x of ``C[..] = C[..] + x``, where C starts from zero, or None."""
    return joined(block, tirx.Add) if _starts_from_zero(block) else None


def joined(block: s_tir.SBlock, operator: type[tirx.Expr]) -> tirx.Expr | None:
    """Return x of ``C[..] = C[..] op x``, whatever C starts from, of an op that commutes such as tirx.Max; or None."""
    store = block.body
    if not all(isinstance(each, tirx.BufferStore) for each in (block.init, store)):
        return None
    if not isinstance(store.value, operator):
        return None
    for own, other in ((store.value.a, store.value.b), (store.value.b, store.value.a)):
        if isinstance(own, ir.TensorLoad) and own.source.same_as(store.buffer):
            return other if alike(own.indices, store.indices) else None
    return None


def loads_multiplied(term: tirx.Expr, written: tirx.Buffer) -> tuple[ir.TensorLoad, ir.TensorLoad] | None:
    """Return A and B of ``A[..] * B[..]``, where both may be cast and neither is what is written, or None."""
    if not isinstance(term, tirx.Mul):
        return None
    loads = _uncast(term.a), _uncast(term.b)
    others = all(isinstance(load, ir.TensorLoad) and not load.source.same_as(written) for load in loads)
    return loads if others else None


def _starts_from_zero(block: s_tir.SBlock) -> bool:
    return isinstance(block.init, tirx.BufferStore) and is_zero(block.init.value)


def is_sum(block: s_tir.SBlock) -> bool:
    """Return whether the block's body is ``C[..] = C[..] + x[..]`` with a zero init and nothing else."""
    store = block.body
    if not isinstance(store, tirx.BufferStore):
        return False
    terms = [store.value.a, store.value.b] if isinstance(store.value, tirx.Add) else []
    own = [t for t in terms if isinstance(t, ir.TensorLoad) and t.source.same_as(store.buffer)]
    return bool(_starts_from_zero(block) and len(own) == 1 and all(isinstance(t, ir.TensorLoad) for t in terms))


def is_extreme(block: s_tir.SBlock) -> bool:
    """Return whether the block's body is ``C[..] = max(C[..], x)``, or min, whose init is short of all numbers."""
    if not isinstance(block.init, tirx.BufferStore) or not isinstance(block.body, tirx.BufferStore):
        return False
    begun, dtype = block.init.value, str(block.body.buffer.dtype)
    if not isinstance(begun, tirx.IntImm | tirx.FloatImm):
        return False
    beginnings = ((tirx.Max, tirx.min_value(dtype), -math.inf), (tirx.Min, tirx.max_value(dtype), math.inf))
    return any(
        joined(block, kind) is not None and begun.value in (finite.value, infinite)
        for kind, finite, infinite in beginnings
    )


def folded(block: s_tir.SBlock) -> ir.TensorLoad | None:
    """Return the load x[..] of a block that is ``C[..] = C[..] op x[..]``, or that with a cast of it; else None.

    The op is a sum, product, maximum or minimum, whose terms may be taken in any order.
    """
    store = block.body
    if block.init is None or not isinstance(store, tirx.BufferStore):
        return None
    if not isinstance(store.value, tirx.Add | tirx.Mul | tirx.Max | tirx.Min):
        return None
    terms = [_uncast(term) for term in (store.value.a, store.value.b)]
    if not all(isinstance(term, ir.TensorLoad) for term in terms):
        return None
    others = [term for term in terms if not term.source.same_as(store.buffer)]
    running = [term for term in terms if term.source.same_as(store.buffer) and alike(term.indices, store.indices)]
    return others[0] if len(others) == len(running) == 1 else None


def summed(block: s_tir.SBlock) -> ir.TensorLoad | None:
    """Return the load x[..] of a block that is ``C[..] = C[..] + x[..]``, or that with a cast of it; else None."""
    load = folded(block)
    return load if load is not None and isinstance(block.body.value, tirx.Add) else None


def is_product(block: s_tir.SBlock) -> bool:
    """Return whether the block is a contraction: a matmul, a convolution."""
    return pattern_of(block) is Pattern.CONTRACTION


def is_copy(block: s_tir.SBlock) -> bool:
    """Return whether the block's body is ``B[v...] = A[v...]``: the same elements of another buffer."""
    return pattern_of(block) is Pattern.COPY


def is_move(block: s_tir.SBlock) -> bool:
    """Return whether the block only moves elements of a buffer: a copy, a transpose, a slice."""
    return is_pointwise(block) and isinstance(block.body.value, ir.TensorLoad)


def is_pointwise(block: s_tir.SBlock) -> bool:
    """Return whether the block computes each element of its one buffer once, by itself; a copy does, too."""
    return pattern_of(block) in (Pattern.COPY, Pattern.POINTWISE)


def goes_on_with(block: s_tir.SBlock, buffer: tirx.Buffer) -> bool:
    """Return whether a block is pointwise and goes on with each element of a buffer, which it reads there alone.

    A padding or a concatenation behind what it begins with reads it so too, but has more elements.
    """
    return (
        is_pointwise(block)
        and alike(block.body.buffer.shape, buffer.shape)
        and all(alike(load.indices, block.body.indices) for load in loads_of(block, buffer))
    )


def stays_small(block: s_tir.SBlock, reader: s_tir.SBlock) -> bool:
    """Return whether a reader with a pointwise block inlined is an expression that passes can walk through.

    They walk a tree: of blocks that each read the one before twice, it doubles with each that is inlined.
    """
    loads = len(loads_of(reader, block.body.buffer))
    return _size(reader) + loads * _size(block) <= _LARGEST


@functools.lru_cache(maxsize=1024)
def _size(block: s_tir.SBlock) -> int:
    """Return the number of expressions in a block's body, each counted as often as it occurs."""
    count = 0

    def on_expr(_: tirx.Expr) -> None:
        nonlocal count
        count += 1

    tvm_ffi.structural_walk(block.body, (tirx.Expr, on_expr))
    return count


def shift_of(block: s_tir.SBlock) -> int | None:
    """Return the places that ``Z[s, ...] = C[(s + k) % P, ...]`` moves what it copies along dimension 0; else None.

    ``Z[s] = C[(s + P - 1) % P]`` moves everything by 1, to the next place.
    """
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, ir.TensorLoad) or block.init:
        return None
    written, read = list(store.indices), list(store.value.indices)
    leading = block.iter_vars[0] if block.iter_vars else None
    if leading is None or len(written) != len(read) or not written or not written[0].same_as(leading.var):
        return None
    if len(written) > 1 and not tvm_ffi.structural_equal(written[1:], read[1:]):
        return None
    size = int(leading.dom.extent)
    places = [Analyzer().simplify(substitute(read[0], {leading.var: tirx.IntImm("int32", s)})) for s in range(size)]
    if not all(isinstance(place, tirx.IntImm) for place in places) or int(store.value.source.shape[0]) != size:
        return None
    shift = -int(places[0]) % size
    return shift if all(int(place) == (s - shift) % size for s, place in enumerate(places)) else None


def iterator_at(block: s_tir.SBlock, indices: object, dim: int) -> tirx.Var | None:
    """Return the iterator that alone is `indices[dim]`, or None."""
    for iv in block.iter_vars:
        if iv.var.same_as(indices[dim]):  # type: ignore[index]
            return iv.var
    return None


def loads_of(block: s_tir.SBlock, buffer: tirx.Buffer) -> list[ir.TensorLoad]:
    """Return every load of `buffer` in the block's body."""
    return [load for load in _loads(block) if load.source.same_as(buffer)]


@functools.lru_cache(maxsize=1024)
def _loads(block: s_tir.SBlock) -> tuple[ir.TensorLoad, ...]:
    return tuple(loads_in(block.body))
