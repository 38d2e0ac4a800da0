"""Convolutions over the last two dimensions of images, by vectors along a row of the image.

    C[.., y, x] += A[.., y + ry, s * x + rx] * W[..]          # depthwise, or few output channels

with accumulators for several rows::

    for images and channels, pieces of rows (parallel):  # A is padded here, plane by plane
      for tiles of rows, parts of a row:
        for reductions:
          for rows (unrolled), x (vectorised):
            C_local[row, x] += A[.., row + ry, x + rx] * W[..]
        write the tile, through the pointwise blocks that follow

What register tiles (`tvm_axe.nests.registers`) can't do: they multiply vectors of output channels, and a
depthwise convolution has but one for each channel of A. A vector here is a whole row of the image or the largest part
that fits registers, of any length: LLVM cuts 56 elements into three vectors of 16 and one of 8. With a stride s, A's
copy has its columns sorted by their remainder modulo s, so that what is read together lies together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
from tvm import s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.sym import detect_linear_equation
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import uses
from tvm_axe.analysis.patterns import is_move, is_pointwise
from tvm_axe.machines.target import cores, vector_bits, vector_registers
from tvm_axe.nests.around import epilogue, inline_made, producer_of
from tvm_axe.nests.contraction import Factor, factors_of, is_plain_nest, positions
from tvm_axe.schedule import query

__all__ = ["Plane", "find_plane", "plane_schedules"]

_PIECES = 4  # of work for each core
_MAX_TILES = 1 << 20  # `sample_perfect_tile` wants a bound on its innermost factor; here any will do
_PART = 4  # vector registers that a part of a row fills at most
_NARROW = 128  # bits: the least that is worth a vector
_TILES = 4  # numbers of rows that are tried
_SUMS = 8  # registers for sums at best: LLVM unrolls the kernel's window, and keeps as much of the image in others


@dataclass(frozen=True)
class Plane:
    """A convolution of images; its loops are named by their positions, outermost first.

    Attributes
    ----------
    block
        The block's name.
    extents
        Extent of each loop.
    outer
        Loops of C's dimensions before the last two.
    y, x
        Loops of the last two.
    reductions
        Loops of the sum.
    data
        Name of A.
    operand
        Position of A among the block's reads.
    stride
        Step of A's columns.
    own
        Whether each of `outer` has planes of A of its own, as in a depthwise convolution.
    bits
        Size of an element of C.
    """

    block: str
    extents: tuple[int, ...]
    outer: tuple[int, ...]
    y: int
    x: int
    reductions: tuple[int, ...]
    data: str
    operand: int
    stride: int
    own: bool
    bits: int


def find_plane(sch: s_tir.Schedule) -> Plane | None:
    """The function ``main`` as a convolution of images, with what is pointwise before and behind it; else None."""
    sums = [block for block in sch.get_child_blocks(sch.get_sblock("root")) if not is_pointwise(sch.get(block))]
    match = _match(sch, sums[0]) if len(sums) == 1 else None
    if match is None:
        return None
    sch = sch.copy()
    inline_made(sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    block = sch.get_sblock(match.block)
    around = [producer_of(sch, block, match.data), *epilogue(sch, block)]
    taken = {match.block, *(query.name_of(sch, each) for each in around if each is not None)}
    return match if taken == {query.name_of(sch, each) for each in blocks} else None


def _match(sch: s_tir.Schedule, rv: SBlockRV) -> Plane | None:
    block, realize = sch.get(rv), _tvm.block_realize(sch, rv)
    loops = [sch.get(loop) for loop in sch.get_loops(rv)]
    factors = factors_of(block)
    if factors is None or not is_plain_nest(loops, realize):
        return None
    position = {
        iterator.var: next((n for n, loop in enumerate(loops) if loop.loop_var.same_as(value)), -1)
        for iterator, value in zip(block.iter_vars, realize.iter_values)
    }
    out = list(block.body.indices)
    if (
        sorted(position.values()) != list(range(len(loops)))
        or len(out) < 3
        or any(index not in position for index in out)
    ):
        return None
    extents = tuple(int(loop.extent) for loop in loops)
    for a, w in (factors, factors[::-1]):
        stride = _stride(a, w, out, position)
        reads = [region.source.same_as(a.load.source) for region in block.reads]
        if stride is None or True not in reads:
            continue
        outer = [index for index in out[:-2] if extents[position[index]] > 1]
        return Plane(
            block=str(block.name_hint),
            extents=extents,
            outer=tuple(position[index] for index in out[:-2]),
            y=position[out[-2]],
            x=position[out[-1]],
            reductions=tuple(position[it.var] for it in block.iter_vars if it.iter_type == tirx.IterVar.CommReduce),
            data=str(a.load.source.name),
            operand=reads.index(True),
            stride=stride,
            own=all(any(_coefficient(i, var) for i in a.load.indices[:-2]) for var in outer),
            bits=np.dtype(str(block.body.buffer.dtype)).itemsize * 8,
        )
    return None


def _stride(a: Factor, w: Factor, out: list[tirx.Var], position: dict[tirx.Var, int]) -> int | None:
    """The step of A's columns with C's, if A has the image's rows and columns and W hasn't."""
    y, x = out[-2:]
    if a.guard is not None or w.guard is not None or a.load.source.same_as(w.load.source):
        return None
    in_w = positions(w.load.indices, position)
    if len(a.load.indices) < 3 or in_w & {position[y], position[x]}:
        return None
    if any(uses(index, x) for index in a.load.indices[:-1]) or not uses(a.load.indices[-2], y):
        return None
    return _coefficient(a.load.indices[-1], x)


def _coefficient(index: tirx.Expr, var: tirx.Var) -> int | None:
    """The positive factor of `var` in a linear index; None of any other."""
    parts = detect_linear_equation(index, [var])
    factor = parts[0] if parts else None
    return int(factor) if isinstance(factor, tirx.IntImm) and int(factor) > 0 else None


def plane_schedules(match: Plane, target: Target) -> list[partial[None]]:
    """What makes a design space each of a convolution: a number of rows, the most promising first.

    Each schedules the function in place, by stock instructions only. None where a row is too short for vectors.
    """
    lanes = vector_bits(target) // match.bits
    width, height = match.extents[match.x], match.extents[match.y]
    part = max(n for n in range(1, _PART * lanes + 1) if width % n == 0)
    if part * match.bits < _NARROW:
        return []
    best = max(1, _SUMS // -(-part // lanes))
    divisors = [n for n in range(1, vector_registers(target) // -(-part // lanes)) if height % n == 0]
    rows = sorted(divisors, key=lambda n: (n > best, abs(n - best)))[:_TILES]
    return [partial(_schedule, match=match, target=target, rows=n, part=part) for n in rows]


def _schedule(sch: s_tir.Schedule, match: Plane, target: Target, rows: int, part: int) -> None:
    """Schedule the convolution as the module's header shows."""
    inline_made(sch)
    block = sch.get_sblock(match.block)
    data, store = _before(sch, block, match), _behind(sch, block)
    loops = sch.get_loops(block)
    tiles, row = sch.split(loops[match.y], [None, rows])
    parts, v = sch.split(loops[match.x], [None, part])
    pieces, tiles = _cut(sch, tiles, match, target)
    sums = [loops[n] for n in match.reductions]
    outer = [loops[n] for n in match.outer]
    sch.reorder(*outer, pieces, tiles, parts, *sums, row, v)
    piece = sch.fuse(*outer, pieces)
    if cores(target) > 1:
        sch.parallel(piece)
    if data is not None and match.own:
        sch.compute_at(data, piece, preserve_unit_loops=True)
    elif data is not None and cores(target) > 1:
        sch.parallel(sch.fuse(*sch.get_loops(data)[:-1]))
    if data is not None and match.stride > 1 and len(sch.get(data).iter_vars) < len(sch.get(data).body.indices):
        columns, remainder = sch.split(sch.get_loops(data)[-1], [None, match.stride])
        sch.reorder(remainder, columns)  # columns are written as they lie, which LLVM vectorises
    sch.reverse_compute_at(store, parts, preserve_unit_loops=True)
    *_, stored_row, stored_v = sch.get_loops(store)
    for loop in (row, stored_row):
        sch.unroll(loop)
    for loop in (v, stored_v):
        sch.vectorize(loop)
    sch.decompose_reduction(block, sums[0])


def _before(sch: s_tir.Schedule, block: SBlockRV, match: Plane) -> SBlockRV | None:
    """The block that makes A as it is read: padded, its columns sorted by their remainder; None of A as it lies."""
    data = producer_of(sch, block, match.data)
    if data is not None and is_move(sch.get(data)):
        sch.compute_inline(data)
        data = None
    if match.stride == 1:
        return data
    if data is None:
        data = sch.cache_read(block, match.operand, "global")
    stride = match.stride
    sch.transform_layout(data, ("write", 0), lambda *dims: [*dims[:-1], dims[-1] % stride, dims[-1] // stride], 0.0)
    return data


def _behind(sch: s_tir.Schedule, block: SBlockRV) -> SBlockRV:
    """The block that writes C from registers: the last of the pointwise ones behind, or a copy."""
    after = epilogue(sch, block)
    if not after:
        return sch.cache_write(block, 0, "local")
    sch.set_scope(block, 0, "local")
    for pointwise in after[:-1]:
        sch.compute_inline(pointwise)
    return after[-1]


def _cut(sch: s_tir.Schedule, tiles: LoopRV, match: Plane, target: Target) -> list[LoopRV]:
    """Cut the tiles of rows into pieces by a sample, to begin with a few pieces of work for each core."""
    count = int(sch.get(tiles).extent)
    wanted = -(-_PIECES * cores(target) // prod(match.extents[n] for n in match.outer))
    pieces = next(n for n in range(1, count + 1) if count % n == 0 and (n >= wanted or n == count))
    decision = [pieces, count // pieces]
    return list(sch.split(tiles, sch.sample_perfect_tile(tiles, 2, _MAX_TILES, decision=decision)))
