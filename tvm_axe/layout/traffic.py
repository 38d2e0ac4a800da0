"""Traffic: how a collective divides its work among the devices of an axis, and what the busiest of them receives.

The planner, the lowering and the engines ask here, so that a byte is the same for all of them: one that a device
receives, of a value that somebody holds, padding left out. Of a sum a device receives each term that it adds, but its
own.
"""

from __future__ import annotations

__all__ = ["chunk", "received_of_all_reduce", "reduced_part"]

_GRAIN = 64  # elements; an all-reduce's parts are whole cache lines, so that no two workers write to one


def chunk(extent: int, parts: int, rank: int) -> slice:
    """Return the part of `range(extent)` that belongs to `rank`: ceil(extent / parts) each, the last ones clipped.

    >>> [chunk(10, 4, rank) for rank in range(4)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 9, None), slice(9, 10, None)]
    """
    size = -(-extent // parts)
    return slice(min(rank * size, extent), min((rank + 1) * size, extent))


def reduced_part(size: int, parts: int, rank: int) -> slice:
    """Return which of `size` elements `rank` adds up in an all-reduce, for everybody: whole cache lines."""
    lines = chunk(-(-size // _GRAIN), parts, rank)
    return slice(min(lines.start * _GRAIN, size), min(lines.stop * _GRAIN, size))


def received_of_all_reduce(size: int, parts: int) -> int:
    """Return how many elements the busiest of `parts` devices receives in an all-reduce of `size` elements.

    It takes its part's terms from the others, and then the others' parts, which they have added up.

    >>> received_of_all_reduce(1024, 4)
    1536
    """
    own = reduced_part(size, parts, 0)
    return (parts - 1) * (own.stop - own.start) + size - (own.stop - own.start)
