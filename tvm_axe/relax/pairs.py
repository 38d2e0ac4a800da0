"""Which matmuls share a mesh axis: one cut by columns, the next that reads it by rows, with no communication between.

For ``H = f(X W + b)`` and ``Y = H V`` a device that holds some columns of W, and of b, computes these columns of H.
They meet the same rows of V, and what the device gets is its term of Y: one sum over the devices ends the pair.
(Megatron-LM, section 3; CoCoNet's model-parallel block is what follows the second matmul.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.expressions import uses
from tvm_axe.analysis.patterns import REDUCE, is_pointwise, iterator_at, loads_of
from tvm_axe.schedule import query


@dataclass(frozen=True)
class Pair:
    """Matmuls that are cut alike.

    Attributes
    ----------
    columns : Mapping[str, int]
        The blocks that compute columns, in program order: the first matmul (or several, as in a gated layer) and the
        pointwise blocks after it, each with the position among its iterators of the one that is cut.
    rows : str
        The matmul whose reduction runs over these columns.
    reduction : int
        The position of that iterator.
    """

    columns: Mapping[str, int]
    rows: str
    reduction: int


def find_pairs(sch: s_tir.Schedule) -> list[Pair]:
    """The pairs in ``main``, in program order; each matmul is in one at most, taken by the first that can have it."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    pairs: list[Pair] = []
    taken: set[str] = set()
    for index, block in enumerate(blocks):
        name, reduction = query.name_of(sch, block), _matmul_reduction(sch, block)
        if reduction is None or name in taken:
            continue
        columns = _columns(sch, blocks[:index], block, reduction, taken)
        if any(not is_pointwise(sch.get(sch.get_sblock(column))) for column in columns):
            pairs.append(Pair(columns, name, reduction))
            taken |= {name, *columns}
    return pairs


def _columns(
    sch: s_tir.Schedule, before: list[SBlockRV], rows: SBlockRV, reduction: int, taken: set[str]
) -> dict[str, int]:
    """The blocks whose results are read along the iterator at `reduction` of `rows` and in no other way."""
    cut = {query.name_of(sch, rows): reduction}
    for block in reversed(before):
        name = query.name_of(sch, block)
        if name in taken or not (is_pointwise(sch.get(block)) or _matmul_reduction(sch, block) is not None):
            continue
        position = _iterator_along(sch, block, _dimension_read(sch, block, cut))
        if position is not None:
            cut[name] = position
    order = [query.name_of(sch, block) for block in before]
    return {name: cut[name] for name in order if name in cut}


def _iterator_along(sch: s_tir.Schedule, block: SBlockRV, dim: int | None) -> int | None:
    """The position of the iterator that one loop drives over all of dimension `dim` of `block`'s result."""
    stmt = sch.get(block)
    iterator = None if dim is None else iterator_at(stmt, stmt.body.indices, dim)
    if iterator is None or query.loop_of(sch, block, iterator) is None:
        return None
    position = next(n for n, iv in enumerate(stmt.iter_vars) if iv.var.same_as(iterator))
    whole = int(stmt.iter_vars[position].dom.extent) == int(stmt.body.buffer.shape[dim])
    return position if whole else None


def _dimension_read(sch: s_tir.Schedule, block: SBlockRV, cut: Mapping[str, int]) -> int | None:
    """The one dimension of `block`'s result along which all that read it are cut; None if it is live otherwise."""
    buffer = sch.get(block).body.buffer
    readers = sch.get_consumers(block)
    dims: set[int | None] = set() if readers and _is_intermediate(sch, buffer) else {None}
    for reader in readers:
        stmt, position = sch.get(reader), cut.get(query.name_of(sch, reader))
        for load in loads_of(stmt, buffer):
            if position is None:
                return None
            var = stmt.iter_vars[position].var
            along = [dim for dim, index in enumerate(load.indices) if uses(index, var)]
            dims.add(along[0] if len(along) == 1 and load.indices[along[0]].same_as(var) else None)
    return dims.pop() if len(dims) == 1 else None


def _is_intermediate(sch: s_tir.Schedule, buffer: tirx.Buffer) -> bool:
    return any(buffer.same_as(own) for own in sch.get(sch.get_sblock("root")).alloc_buffers)


def _matmul_reduction(sch: s_tir.Schedule, block: SBlockRV) -> int | None:
    """The position of `block`'s reduction if it multiplies by a parameter and sums the products over one loop."""
    stmt = sch.get(block)
    store, init = stmt.body, stmt.init
    if not isinstance(store, tirx.BufferStore) or not isinstance(init, tirx.BufferStore):
        return None
    terms = [store.value.a, store.value.b] if isinstance(store.value, tirx.Add) else []
    products = [term for term in terms if isinstance(term, tirx.Mul)]
    own = [term for term in terms if isinstance(term, ir.TensorLoad) and term.source.same_as(store.buffer)]
    if len(products) != 1 or len(own) != 1:
        return None
    factors = [_uncast(factor) for factor in (products[0].a, products[0].b)]
    found = [n for n, iv in enumerate(stmt.iter_vars) if iv.iter_type == REDUCE]
    params = sch.mod["main"].params
    weights = [f for f in factors if isinstance(f, ir.TensorLoad) and any(f.source.same_as(p) for p in params)]
    if not weights or len(found) != 1 or query.loop_of(sch, block, stmt.iter_vars[found[0]].var) is None:
        return None
    return found[0]


def _uncast(expr: tirx.Expr) -> tirx.Expr:
    """Without the conversion to the accumulator's type."""
    return expr.value if isinstance(expr, tirx.Cast) else expr
