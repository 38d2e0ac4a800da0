"""A function of blocks in pieces, cut where what a reduction leaves is to be combined before the function goes on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import tvm_ffi
from tvm import s_tir, tirx

from tvm_axe.analysis.blocks import statements
from tvm_axe.analysis.expressions import loads_in

__all__ = ["Piece", "pieces"]


class Piece(NamedTuple):
    """Some nests of a function, as a function.

    Attributes
    ----------
    func : PrimFunc
        Its parameters are what it reads and what it leaves.
    ins, outs : tuple[int, ...]
        Which buffers these are, by position among the parameters of the function and what it allocates.
    """

    func: tirx.PrimFunc
    ins: tuple[int, ...]
    outs: tuple[int, ...]


def pieces(func: tirx.PrimFunc, cuts: Collection[int]) -> list[Piece]:
    """Return a function in pieces, one behind the other.

    Parameters
    ----------
    func : PrimFunc
        Nests of blocks, in which each buffer is written by one block.
    cuts : Collection[int]
        The buffers behind whose last write a piece ends, by position among parameters and what is allocated.
    """
    root = func.body.block
    buffers = [*func.params, *root.alloc_buffers]
    nests = statements(root.body)
    read, written = ([_positions(found, buffers) for found in each] for each in zip(*map(_touched, nests)))
    ends = sorted({max(at for at, into in enumerate(written) if cut in into) + 1 for cut in cuts} | {len(nests)})
    found, begin = list[Piece](), 0
    for end in ends:
        here = range(begin, end)
        made = sorted(set().union(*(written[at] for at in here)))
        later = set().union(*(read[at] for at in range(end, len(nests))))
        ins = tuple(sorted(set().union(*(read[at] for at in here)) - set(made)))
        outs = tuple(at for at in made if at < len(func.params) or at in later)
        own = [buffers[at] for at in made if at not in outs]
        body = tirx.stmt_seq(*nests[begin:end])
        block = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=own)
        params = [buffers[at] for at in (*ins, *outs)]
        part = tirx.PrimFunc(params, s_tir.SBlockRealize([], True, block), func.ret_type, func.attrs)
        found.append(Piece(part, ins, outs))
        begin = end
    return found


def _touched(nest: tirx.Stmt) -> tuple[list[tirx.Buffer], list[tirx.Buffer]]:
    """Return the buffers that a nest loads from, and those that it stores into."""
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(nest, (tirx.BufferStore, stores.append))
    values = [part for store in stores for part in (store.value, *store.indices)]
    return [load.source for value in values for load in loads_in(value)], [store.buffer for store in stores]


def _positions(found: Sequence[tirx.Buffer], buffers: Sequence[tirx.Buffer]) -> set[int]:
    return {at for at, buffer in enumerate(buffers) if any(buffer.same_as(other) for other in found)}
