"""Functions of symbolic extents on a CPU that have nothing to store.

Blocks that aren't of loops' iterators, such as those of upstream's running sums, store a first element whether there is
one or not. So a function with such a block returns where all that it stores to is empty.
"""

from __future__ import annotations

import functools

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.sizes import unknown_extents
from tvm_axe.machines.registry import backend_of

__all__ = ["nothing_to_store"]

_READS = 2  # upstream's number of the effect of calls that read what others may change


@tirx.transform.prim_func_pass(opt_level=0)
def nothing_to_store(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that has a function of blocks for the host do nothing where there is nothing that it stores."""
    target = func.attrs.get("target") if func.attrs else None
    if (target is not None and not backend_of(target).on_host) or not unknown_extents(func):
        return func
    if not isinstance(func.body, s_tir.SBlockRealize):
        return func
    # Nests of loops aren't guarded: upstream would take extents for positive in one pass, and forget it in the next.
    counts = _stored(func) if _is_opaque(func) else None
    if counts is None:
        return func
    some = functools.reduce(tirx.Or, (count > 0 for count in counts))
    root = func.body.block
    whole = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, tirx.IfThenElse(some, root.body, None), root.init,
        root.alloc_buffers, root.match_buffers, root.annotations,
    )  # fmt: skip
    return func.with_body(s_tir.SBlockRealize(func.body.iter_values, func.body.predicate, whole))


def _is_opaque(func: tirx.PrimFunc) -> bool:
    """Whether a block stores that has no iterators."""
    blocks = [block for block in all_blocks(func.body) if not all_blocks(block.body)]
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk([block.body for block in blocks if not block.iter_vars], (tirx.BufferStore, stores.append))
    return bool(stores)


def _stored(func: tirx.PrimFunc) -> list[tirx.Expr] | None:
    """How many elements each parameter has that is stored to; None if one has some anyway, or it isn't known which."""
    stores: list[tirx.BufferStore] = []
    calls: list[ir.Call] = []
    tvm_ffi.structural_walk(func.body, [(tirx.BufferStore, stores.append), (ir.Call, calls.append)])
    params = {param for param in func.params if tirx.is_buffer_var(param)}
    written = {store.buffer for store in stores} & params
    if not written or any(map(_may_store, calls)):
        return None
    counts = [functools.reduce(lambda a, b: a * b, buffer.shape) for buffer in written if len(buffer.shape)]
    known = len(counts) < len(written) or any(isinstance(count, tirx.IntImm) for count in counts)
    return None if known else counts


def _may_store(call: ir.Call) -> bool:
    """Whether a call may do more than give a value."""
    effect = call.op.get_attr("TCallEffectKind") if isinstance(call.op, ir.Op) else None
    return effect is None or int(effect) > _READS
