"""Which blocks are matmuls: ``C[.., i, j] += A[.., i, k] * B[.., k, j]`` in any order of loops and operands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from .. import _tvm
from ..errors import ScheduleError
from ..schedule.product import factors

__all__ = ["Matmul", "find_matmuls"]


@dataclass(frozen=True)
class Matmul:
    """A matmul-like block and the parts its loops and buffers play.

    Attributes
    ----------
    block
        The block's name.
    extents
        Extent of each loop, outermost first.
    row, column, reduce
        Positions of i, j and k among the loops; all the others are batches.
    iterators
        Position among the loops of each of the block's iterators, in their order.
    right
        Position of B among the block's reads.
    buffers
        Names of A, B and C.
    bits
        Size of an element of C.
    """

    block: str
    extents: tuple[int, ...]
    row: int
    column: int
    reduce: int
    iterators: tuple[int, ...]
    right: int
    buffers: tuple[str, str, str]
    bits: int


def find_matmuls(sch: s_tir.Schedule) -> list[Matmul]:
    """The matmuls among the blocks directly below the root of ``main``.

    A block counts if it is floating-point, its nest is perfect, serial, of constant extents and without a predicate,
    every iterator is one loop, and B's and C's last dimension is j, which the generated code vectorises.
    """
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    return [found for found in (_match(sch, block) for block in blocks) if found is not None]


def _match(sch: s_tir.Schedule, rv: SBlockRV) -> Matmul | None:
    block, realize = sch.get(rv), _tvm.block_realize(sch, rv)
    loops = [sch.get(loop) for loop in sch.get_loops(rv)]
    factors = _factors(block)
    if factors is None or not _is_plain(loops, realize):
        return None
    values = list(realize.iter_values)
    position = {
        iterator.var: next((n for n, loop in enumerate(loops) if loop.loop_var.same_as(value)), -1)
        for iterator, value in zip(block.iter_vars, values)
    }
    reductions = [position[it.var] for it in block.iter_vars if it.iter_type == tirx.IterVar.CommReduce]
    if len(reductions) != 1 or sorted(position.values()) != list(range(len(loops))):
        return None
    (k,) = reductions
    out = [position.get(index, -1) for index in block.body.indices]
    for a, b in (factors, factors[::-1]):
        left, right = ([position.get(index, -1) for index in factor.indices] for factor in (a, b))
        j = out[-1]
        rows = [n for n in out if n >= 0 and n in left and n not in right]
        if not rows or right[-1] != j or j in left or k not in left or k not in right or j < 0:
            continue
        reads = [region.source.name for region in block.reads]
        buffers = (a.source.name, b.source.name, block.body.buffer.name)
        if -1 in (*left, *right, *out) or len(set(buffers)) < 3 or not {*buffers[:2]} <= {*reads}:
            continue
        bits = np.dtype(str(block.body.buffer.dtype)).itemsize * 8
        extents = tuple(int(loop.extent) for loop in loops)
        iterators = tuple(position.values())
        return Matmul(block.name_hint, extents, rows[-1], j, k, iterators, reads.index(buffers[1]), buffers, bits)
    return None


def _factors(block: s_tir.SBlock) -> tuple[ir.TensorLoad, ir.TensorLoad] | None:
    """A and B where the body is ``C[..] = C[..] + A[..] * B[..]``, C starting from zero, in one floating-point type."""
    try:
        a, b = factors(block)
    except ScheduleError:
        return None
    dtype = str(block.body.buffer.dtype)
    return (a, b) if dtype in ("float32", "float64") and dtype == str(a.source.dtype) == str(b.source.dtype) else None


def _is_plain(loops: list[tirx.For], realize: s_tir.SBlockRealize) -> bool:
    """Whether the nest is perfect, serial and of constant extents from 0, and the block runs unconditionally."""
    inner = [*loops[1:], realize]
    return (
        bool(loops)
        and all(loop.body.same_as(body) for loop, body in zip(loops, inner))
        and all(loop.kind == tirx.ForKind.SERIAL and not loop.annotations for loop in loops)
        and all(isinstance(loop.extent, tirx.IntImm) and int(loop.min) == 0 for loop in loops)
        and isinstance(realize.predicate, tirx.IntImm)
        and bool(realize.predicate.value)
    )
