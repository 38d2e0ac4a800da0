"""Which parameters a caller gives, and which it gets back.

A parameter that is written is an output. It is one alone, of which nothing comes in, where it is seen to be written
whole before anything of it is read; any other is an input, too: what is left of it is what was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.blocks import NestedBlock, all_blocks, covers, nested_blocks, reads_of, statements
from tvm_axe.analysis.elements import Elements, cover, elements
from tvm_axe.analysis.expressions import substitute
from tvm_axe.analysis.order import reads_what_is_written
from tvm_axe.analysis.values import LIMIT

__all__ = ["Direction", "directions", "reached"]


class Direction(NamedTuple):
    """Whether a parameter is given, and whether it is left with a result."""

    is_input: bool
    is_output: bool


class _Nest(NamedTuple):
    """A nest: its blocks, each with what it reads; those below something else than loops; and what is stored to."""

    blocks: list[tuple[NestedBlock, list[ir.TensorRegion]]]
    below: list[s_tir.SBlock]
    stored: list[tirx.Buffer]

    @staticmethod
    def of(nest: tirx.Stmt) -> _Nest:
        """Return what there is to be known of a nest."""
        blocks = nested_blocks(nest)
        seen = [inner for block in blocks for inner in all_blocks(block.block)]
        below = [block for block in all_blocks(nest) if not any(block.same_as(other) for other in seen)]
        stored: list[tirx.BufferStore] = []
        tvm_ffi.structural_walk(nest, (tirx.BufferStore, stored.append))
        return _Nest([(block, reads_of(block.block)) for block in blocks], below, [store.buffer for store in stored])

    def touched(self) -> set[tirx.Buffer]:
        """Return the buffers that it reads or writes, as far as it says so."""
        regions = [region for block, reads in self.blocks for region in (*reads, *block.block.writes)]
        regions += [region for block in self.below for region in (*block.reads, *block.writes)]
        return {*self.stored, *(region.source for region in regions)}


def directions(func: tirx.PrimFunc) -> tuple[Direction, ...]:
    """Return the direction of each parameter of a function of blocks, in order."""
    nests: dict[tirx.Buffer, list[_Nest]] = defaultdict(list)  # a function may have as many nests as parameters
    for nest in map(_Nest.of, statements(func.body.block.body)):
        for buffer in nest.touched():
            nests[buffer].append(nest)
    return tuple(_direction(param, nests[param]) for param in func.params)


def _direction(param: tirx.Buffer, nests: Sequence[_Nest]) -> Direction:
    shape = [int(extent) for extent in param.shape]
    is_output, is_read, written = False, False, list[Elements]()
    for nest in nests:
        writers, parts = list[NestedBlock](), list[Elements | None]()
        for block, reads in nest.blocks:
            read = _touches(reads, param)
            if read and not is_read:
                done = any(reads_what_is_written(writer, block, param) for writer in writers)
                is_read = not done and not _are_among([reached(block, each, shape) for each in read], shape, written)
            if _touches(block.block.writes, param):
                writers.append(block)
                parts += [reached(block, region, shape) for region in _touches(block.block.writes, param)]
        # What stands below something else than loops may not run; what is inside of another block is the other's.
        is_read |= any(_touches(block.reads, param) for block in nest.below) and not cover(shape, written)
        is_output |= bool(writers) or any(_touches(block.writes, param) for block in nest.below)
        is_output = is_output or any(
            buffer.same_as(param) for buffer in nest.stored
        )  # of blocks that don't say so, as importers' scatters
        written += [part for part in parts if part is not None]
    return Direction(is_read or not cover(shape, written), is_output)


def _are_among(read: Sequence[Elements | None], shape: Sequence[int], written: Sequence[Elements]) -> bool:
    """Return whether all that is read has been written; False also where that can't be seen."""
    if cover(shape, written):
        return True
    if not written or any(part is None for part in read) or prod(shape) > LIMIT:
        return False
    there = np.logical_or.reduce([part.whole() for part in written])
    return not any((part.whole() & ~there).any() for part in read if part is not None)


def _touches(regions: Sequence[ir.TensorRegion], param: tirx.Buffer) -> list[ir.TensorRegion]:
    return [region for region in regions if region.source.same_as(param)]


def reached(block: NestedBlock, region: ir.TensorRegion, shape: Sequence[int]) -> Elements | None:
    """Return the elements that a block's region is over all its iterations, or None where that can't be seen."""
    extents: dict[tirx.Var, int] = {}
    indices, condition = [], None
    for span in region.region:
        if not isinstance(span.extent, tirx.IntImm):
            return None
        inside = tirx.Var("inside", "int32")
        if int(span.extent) > 1:
            extents[inside] = int(span.extent)
        indices.append(span.min + inside if int(span.extent) > 1 else span.min)
    if covers(block.realize, block.loops):
        extents |= {iv.var: int(iv.dom.extent) for iv in block.block.iter_vars}
    else:
        indices, condition = [substitute(index, block.bound) for index in indices], block.realize.predicate
        extents |= {loop.loop_var: int(loop.extent) for loop in block.loops}
    return elements(indices, extents, shape, condition)
