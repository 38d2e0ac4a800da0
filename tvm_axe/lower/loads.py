"""What blocks read of a buffer that they write: the element at hand, or others, which a copy may have."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import NestedBlock, element, is_at_hand, reads_of
from tvm_axe.analysis.elements import Elements, elements
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.lower.pieces import with_block

__all__ = ["reading", "reads_beside", "running"]


def reads_beside(blocks: Sequence[NestedBlock], buffer: tirx.Buffer) -> list[ir.TensorLoad] | None:
    """What blocks read of a buffer that they write, but for the element at hand; None where they may write it, too."""
    shape = [int(extent) for extent in buffer.shape]
    read, written, loads = list[Elements | None](), list[Elements | None](), list[ir.TensorLoad]()
    for block in blocks:
        store = block.block.body
        extents = {iv.var: int(iv.dom.extent) for iv in block.block.iter_vars}
        if store.buffer.same_as(buffer):
            written.append(elements(list(store.indices), extents, shape, None))
        own = [load for load in loads_in(store) if load.source.same_as(buffer) and not is_at_hand(load, store)]
        read += [elements(list(load.indices), extents, shape, None) for load in own]
        loads += own
    known = [mask.whole() for mask in (*read, *written) if mask is not None]
    if len(known) < len(read) + len(written):
        return None
    reads, writes = known[: len(read)], known[len(read) :]
    return None if any((one & other).any() for one in reads for other in writes) else loads


def reading(nest: tirx.Stmt, blocks: Sequence[NestedBlock], of: tirx.Buffer, copy: tirx.Buffer) -> tirx.Stmt:
    """The nest with what it reads of a buffer, but for the element at hand, read of a copy."""
    for block in blocks:
        if not any(region.source.same_as(of) for region in reads_of(block.block)):
            continue
        statement, store = block.block, block.block.body
        body = _tvm.structural_map(store, (ir.TensorLoad, functools.partial(_load_of, of, copy, store)))
        regions = [region for region in statement.reads if not region.source.same_as(of)]
        regions += [element(load.source, load.indices) for load in loads_in(body) if load.source.same_as(copy)]
        regions += [element(of, store.indices)] if any(is_at_hand(load, store) for load in loads_in(store)) else []
        changed = s_tir.SBlock(
            statement.iter_vars, regions, statement.writes, statement.name_hint, body, statement.init,
            annotations=dict(statement.annotations),
        )  # fmt: skip
        nest = with_block(nest, block.realize, s_tir.SBlockRealize(
            block.realize.iter_values, block.realize.predicate, changed
        ))  # fmt: skip
    return nest


def _load_of(of: tirx.Buffer, copy: tirx.Buffer, store: tirx.BufferStore, load: ir.TensorLoad) -> ir.TensorLoad:
    other = load.source.same_as(of) and not is_at_hand(load, store)
    return tirx.BufferLoad(copy, load.indices) if other else load


def running(store: tirx.BufferStore, apart: tirx.Buffer, at: Sequence[tirx.Var]) -> tirx.Expr:
    """A reduction's value with its running one read where it is kept now."""
    return _tvm.structural_map(
        store.value,
        (ir.TensorLoad, lambda load: tirx.BufferLoad(apart, list(at)) if is_at_hand(load, store) else load),
    )
