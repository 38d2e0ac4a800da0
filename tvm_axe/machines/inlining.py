"""Blocks of functions that nobody scheduled go into the blocks that read them, so that less goes through memory.

Each of a GPU's kernels reads its operands from memory and writes its result there: of a chain of blocks that compute
elements, one kernel is left.
"""

from __future__ import annotations

import contextlib
import math

import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import nested_blocks, says_what_it_touches, statements
from tvm_axe.analysis.patterns import Pattern, is_pointwise, loads_of, pattern_of, stays_small
from tvm_axe.analysis.tree import why_unschedulable

__all__ = ["inlined"]

_READ = 4  # how often a block may load elements of another one that goes into it: what it loads is loaded as often


def inlined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return the function with pointwise blocks inlined, where that computes no element more often than it is read.

    A block goes into its readers if each is pointwise, too, or a sum that reads every element once. A function whose
    nests hold several blocks is somebody's schedule and stays as it is.

    Parameters
    ----------
    func : PrimFunc
        A function of blocks.
    """
    if why_unschedulable(func) is not None:
        return func
    nests = [nested_blocks(nest) for nest in statements(func.body.block.body)]
    if any(len(blocks) != 1 or not says_what_it_touches(blocks[0].block) for blocks in nests):
        return func
    sch = s_tir.Schedule(tvm.IRModule({"main": s_tir.renew_defs(func)}))
    root = sch.get_sblock("root")
    writers: dict[tirx.Buffer, int] = {}
    for block in sch.get_child_blocks(root):
        for region in sch.get(block).writes:
            writers[region.source] = writers.get(region.source, 0) + 1
    allocated = {*sch.get(root).alloc_buffers}
    done = False
    for block in sch.get_child_blocks(root):
        stmt = sch.get(block)
        # What is read must be the same later on, where the readers are.
        fixed = all(writers.get(region.source, 0) <= (region.source in allocated) for region in stmt.reads)
        if fixed and is_pointwise(stmt) and _fits(sch, stmt, sch.get_consumers(block)):
            with contextlib.suppress(*_tvm.UPSTREAM_ERRORS):  # of indices that it can't turn around
                sch.compute_inline(block)
                done = True
    return sch.mod["main"].with_attrs(dict(func.attrs.items())) if done else func


def _fits(sch: s_tir.Schedule, block: s_tir.SBlock, readers: list[SBlockRV]) -> bool:
    """Whether all readers of what a block writes may compute it for themselves."""
    buffer = block.body.buffer
    size = math.prod(int(extent) for extent in buffer.shape)
    for reader in readers:
        stmt = sch.get(reader)
        if pattern_of(stmt) is Pattern.OPAQUE or len(loads_of(stmt, buffer)) > _READ or not stays_small(block, stmt):
            return False
        if stmt.init is not None and math.prod(int(it.dom.extent) for it in stmt.iter_vars) > size:
            return False
    return bool(readers)
