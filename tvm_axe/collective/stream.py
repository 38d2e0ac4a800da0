"""Streaming stores for kernels that leave large results behind: a fused kernel's copies to its own slab and its peers'.

What `kernels` does for a collective, for whatever a program brings: an innermost loop that copies a row to a large
argument writes it a line at a time, past the caches. Whoever reads it next reads it from memory in any case.
"""

from __future__ import annotations

import math

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.collective.kernels import LINE, STREAM, STREAM_LINE
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.layout.shapes import dense_strides


def stream_copies(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` with streaming stores where it copies rows to an argument of `STREAM` bytes or more."""
    arguments = [param for param in func.params if tirx.is_buffer_var(param)]
    found: list[tirx.For] = []

    def on_loop(loop: tirx.For) -> tirx.Stmt:
        line = _lines(loop, arguments)
        if line is None:
            return loop
        found.append(loop)
        return line

    body = _tvm.structural_map(func.body, (tirx.For, on_loop))
    if not found or not isinstance(body, s_tir.SBlockRealize):
        return func
    root = body.block
    # They aren't ordered with other stores, and who sees this worker arrive shall see them.
    fence = tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.x86.sse.sfence"))
    inner = tirx.AttrStmt(
        tirx.IntImm("int32", 0), "pragma_import_llvm", ir.StringImm(STREAM_LINE), tirx.SeqStmt([root.body, fence])
    )
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, inner, root.init, root.alloc_buffers,
        root.match_buffers, root.annotations,
    )  # fmt: skip
    return tirx.PrimFunc(func.params, s_tir.SBlockRealize([], True, block), attrs=func.attrs)


def _lines(loop: tirx.For, arguments: list[tirx.Buffer]) -> tirx.Stmt | None:
    """The loop over a row's lines in place of the loop over its elements, if it is a copy that may be streamed."""
    realize = loop.body
    if loop.kind != tirx.ForKind.SERIAL or not isinstance(realize, s_tir.SBlockRealize):
        return None
    block, store = realize.block, realize.block.body
    always = isinstance(realize.predicate, tirx.IntImm) and bool(realize.predicate.value)
    if not always or block.init is not None or not isinstance(store, tirx.BufferStore):
        return None
    load = store.value
    if not isinstance(load, ir.TensorLoad) or not any(store.buffer.same_as(buffer) for buffer in arguments):
        return None
    driven = [iv for iv, value in zip(block.iter_vars, realize.iter_values) if value.same_as(loop.loop_var)]
    if len(driven) != 1 or not _is_row(store.indices, driven[0].var) or not _is_row(load.indices, driven[0].var):
        return None
    lanes = LINE // check_dtype(str(store.buffer.dtype)).itemsize
    counted = [loop.extent, driven[0].dom.extent, *store.buffer.shape, *store.buffer.strides]
    if not all(isinstance(each, tirx.IntImm) for each in counted):
        return None  # how many there are is said by a call
    extent = int(loop.extent)
    if extent % lanes or int(driven[0].dom.extent) != extent or not _is_large_and_aligned(store.buffer, lanes):
        return None
    line = tirx.Var(loop.loop_var.name, loop.loop_var.ty)
    row = tirx.IterVar(
        ir.Range(0, extent // lanes), tirx.Var(driven[0].var.name, driven[0].var.ty), driven[0].iter_type
    )
    start = row.var * lanes
    source = tirx.BufferLoad(load.source, [*list(load.indices)[:-1], tirx.Ramp(start, 1, lanes)])
    target = tirx.address_of(tirx.BufferLoad(store.buffer, [*list(store.indices)[:-1], start]))
    call = tirx.call_extern("void", "axe_stream_line", target, tirx.reinterpret(f"int8x{LINE}", source))
    inner = s_tir.SBlock(
        [row if iv.same_as(driven[0]) else iv for iv in block.iter_vars],
        [_region(load.source, load.indices, start, lanes)],
        [_region(store.buffer, store.indices, start, lanes)],
        block.name_hint, tirx.Evaluate(call),
    )  # fmt: skip
    values = [line if value.same_as(loop.loop_var) else value for value in realize.iter_values]
    return tirx.For(line, 0, extent // lanes, loop.kind, s_tir.SBlockRealize(values, realize.predicate, inner))


def _is_row(indices: list[tirx.Expr], var: tirx.Var) -> bool:
    """Whether `var` alone is the last index, and in no other."""
    used: list[bool] = []
    others = list(indices)[:-1]
    tvm_ffi.structural_walk(others, (tirx.Var, lambda other: used.append(True) if other.same_as(var) else None))
    return bool(len(indices)) and indices[-1].same_as(var) and not used


def _is_large_and_aligned(buffer: tirx.Buffer, lanes: int) -> bool:
    """Whether a buffer is worth streaming to, and its rows begin where lines do; mesh tensors begin where pages do."""
    shape = [int(extent) for extent in buffer.shape]
    strides = [int(step) for step in buffer.strides] or list(dense_strides(shape))
    nbytes = math.prod(shape) * check_dtype(str(buffer.dtype)).itemsize
    return nbytes >= STREAM and strides[-1] == 1 and all(step % lanes == 0 for step in strides[:-1])


def _region(buffer: tirx.Buffer, indices: list[tirx.Expr], start: tirx.Expr, lanes: int) -> ir.TensorRegion:
    points = [ir.Range.from_min_extent(index, 1) for index in list(indices)[:-1]]
    return tirx.BufferRegion(buffer, [*points, ir.Range.from_min_extent(start, lanes)])
