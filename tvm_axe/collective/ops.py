"""The collectives of one worker, over the slabs of its group that it sees side by side. Nothing here waits.

In each of them a worker reads what the others wrote before a barrier and writes what they read after the next; between
the two, no two workers write the same element. `group` arrays have the group's axis as dimension 0, in the order of
the coordinates.
"""

from __future__ import annotations

import numpy as np

_BLOCK = 1 << 15  # elements summed at a time: what was summed is still in the cache when it is sent on


def chunk(extent: int, parts: int, rank: int) -> slice:
    """Return the part of `range(extent)` that belongs to `rank`: ceil(extent / parts) each, the last ones clipped.

    >>> [chunk(10, 4, rank) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    size = -(-extent // parts)
    return slice(min(rank * size, extent), min((rank + 1) * size, extent))


def all_reduce(source: np.ndarray, target: np.ndarray, rank: int) -> None:
    """Sum this worker's part of the flattened slabs of the group `source` and write it to each slab of `target`.

    `target` may be `source`: a part is read and written by one worker only.
    """
    parts = len(source)
    flat = [_flatten(source[peer, ...]) for peer in range(parts)]
    out = [_flatten(target[peer, ...]) for peer in range(parts)]
    mine = chunk(flat[0].size, parts, rank)
    others = [peer for peer in range(parts) if peer != rank]
    for start in range(mine.start, mine.stop, _BLOCK):
        block = slice(start, min(start + _BLOCK, mine.stop))
        total = out[rank][block]
        _sum([flat[peer][block] for peer in (rank, *others)], total)
        for peer in others:
            out[peer][block] = total


def reduce_scatter(source: np.ndarray, target: np.ndarray, dim: int, rank: int) -> None:
    """Sum this worker's block along `dim` of the slabs of the group `source` into its own slab `target`.

    The block has ceil(extent / size of the group) rows of `dim`; those past the extent are left as they are.
    """
    mine = chunk(source.shape[1 + dim], len(source), rank)
    _sum([_rows(slab, dim, mine) for slab in source], _rows(target, dim, slice(0, mine.stop - mine.start)))


def all_gather(source: np.ndarray, target: np.ndarray, dim: int, rank: int) -> None:
    """Write this worker's own block `source` to its place along `dim` in each slab of the group `target`.

    `source` has ceil(extent / size of the group) rows of `dim`; those past the extent are not copied.
    """
    mine = chunk(target.shape[1 + dim], len(target), rank)
    block = _rows(source, dim, slice(0, mine.stop - mine.start))
    for slab in target:
        _rows(slab, dim, mine)[...] = block


def _sum(terms: list[np.ndarray], total: np.ndarray) -> None:
    if len(terms) == 1:
        np.copyto(total, terms[0])
        return
    np.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        np.add(total, term, out=total)


def _rows(array: np.ndarray, dim: int, rows: slice) -> np.ndarray:
    return array[(slice(None),) * dim + (rows,)]


def _flatten(slab: np.ndarray) -> np.ndarray:
    if not slab.flags.c_contiguous:  # reshape would copy it, and what is written to the copy would be lost
        raise ValueError(f"a slab must be dense, not of strides {slab.strides} for shape {slab.shape}")
    return slab.reshape(-1)
