"""Warps, lanes and warpgroups as the threads that they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_axe.layout.iters import Iter

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout

_THREADS = {"laneid": 1, "warpid": 32, "tid_in_wg": 1, "wid_in_wg": 32, "wgid": 128}
"""Threads of a block from one position on an axis to the next."""


def on_threads(layout: Layout) -> Layout:
    """Return the layout with warps, lanes and warpgroups as the threads ``tx`` of a block.

    Law: ``layout.on_threads().apply(x)`` are the points of ``layout.apply(x)`` with ``tx + laneid + 32 * warpid +
    tid_in_wg + 32 * wid_in_wg + 128 * wgid`` on axis ``tx``, and none of the other five.

    So layouts that name threads in different ways can be compared:

    >>> warps = Layout.parse("S[(4, 32, 2) : (1@warpid, 1@laneid, 1)]")
    >>> threads = Layout.parse("S[(128, 2) : (1@tx, 1)]")
    >>> warps.equivalent(threads), warps.on_threads().equivalent(threads)
    (False, True)
    """

    def moved(iters: tuple[Iter, ...]) -> tuple[Iter, ...]:
        return tuple(
            Iter(it.extent, it.stride * _THREADS[it.axis], "tx") if it.axis in _THREADS else it for it in iters
        )

    offset = {axis: amount for axis, amount in layout.O.items() if axis not in _THREADS}
    offset["tx"] = layout.O["tx"] + sum(layout.O[axis] * threads for axis, threads in _THREADS.items())
    return layout._like(moved(layout.D), moved(layout.R), offset)
