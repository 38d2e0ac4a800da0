"""What a block computes: the pattern of its body, and what it loads."""

from __future__ import annotations

import functools

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.expressions import substitute

__all__ = ["REDUCE", "SPATIAL", "is_copy", "is_product", "is_sum", "iterator_at", "loads_of", "shift_of", "summed"]

SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce
"""The kinds of iterators: of elements of the result, and of terms that one element is made of."""


def is_sum(block: s_tir.SBlock) -> bool:
    """Return whether the block's body is ``C[..] = C[..] + x[..]`` with a zero init and nothing else."""
    store, init = block.body, block.init
    if not isinstance(store, tirx.BufferStore) or not isinstance(init, tirx.BufferStore):
        return False
    zero = isinstance(init.value, tirx.FloatImm | tirx.IntImm) and init.value.value == 0
    terms = [store.value.a, store.value.b] if isinstance(store.value, tirx.Add) else []
    own = [t for t in terms if isinstance(t, ir.TensorLoad) and t.source.same_as(store.buffer)]
    return bool(zero and len(own) == 1 and all(isinstance(t, ir.TensorLoad) for t in terms))


def summed(block: s_tir.SBlock) -> ir.TensorLoad | None:
    """Return the load x[..] of a block that is ``C[..] = C[..] + x[..]``, or that with a cast of it; else None."""
    store = block.body
    if block.init is None or not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    terms = [term.value if isinstance(term, tirx.Cast) else term for term in (store.value.a, store.value.b)]
    if not all(isinstance(term, ir.TensorLoad) for term in terms):
        return None
    others = [term for term in terms if not term.source.same_as(store.buffer)]
    return others[0] if len(others) == 1 else None


def is_product(block: s_tir.SBlock) -> bool:
    """Return whether the block sums products of two buffers' elements, as a matmul does."""
    found: list[bool] = []

    def on_product(product: tirx.Mul) -> None:
        loads = all(isinstance(factor, ir.TensorLoad) for factor in (product.a, product.b))
        found.append(loads and not product.a.source.same_as(product.b.source))

    if block.init is not None:
        tvm_ffi.structural_walk(block.body, (tirx.Mul, on_product))
    return any(found)


def is_copy(block: s_tir.SBlock) -> bool:
    """Return whether the block's body is ``B[v...] = A[v...]``: the same elements of another buffer."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, ir.TensorLoad) or block.init:
        return False
    return bool(tvm_ffi.structural_equal(list(store.indices), list(store.value.indices)))


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
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(block.body, (ir.TensorLoad, found.append))
    return tuple(found)
