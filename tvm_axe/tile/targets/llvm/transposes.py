"""Packing across: a copy whose source is contiguous along one dimension and its target along another.

Squares of as many vectors as a vector has lanes are transposed in registers. Each of log2(lanes) steps exchanges,
between the vectors i and i + d, the lanes that differ in the bit d; that is one shuffle a vector and step, instead of a
load and an insertion for every element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T


def transpose(
    rows: int, columns: int, lanes: int, load: Callable[[Any, Any], Any], store: Callable[[Any, Any, Any], None]
) -> None:
    """Emit the transposition of all whole squares of a rows x columns matrix.

    Parameters
    ----------
    load : (row, column) -> the vector of `lanes` neighbours along the row
    store : (row, column, vector) of `lanes` neighbours down the column
    """
    with T.serial(rows // lanes) as down, T.serial(columns // lanes) as across:
        vectors = [T.Bind(load(down * lanes + lane, across * lanes)) for lane in range(lanes)]
        for lane, vector in enumerate(_exchanged(vectors, lanes)):
            store(down * lanes, across * lanes + lane, vector)


def _exchanged(vectors: Sequence[Any], lanes: int) -> list[Any]:
    found, distance = list(vectors), lanes // 2
    while distance:
        for i in range(lanes):
            if not i & distance:
                pair = [found[i], found[i + distance]]
                low = [lane if not lane & distance else lanes + lane - distance for lane in range(lanes)]
                high = [lane + distance if not lane & distance else lanes + lane for lane in range(lanes)]
                found[i], found[i + distance] = (T.Bind(T.Shuffle(pair, choice)) for choice in (low, high))
        distance //= 2
    return found
