"""W in panels: columns that lie together for all terms of their sums, in one piece of memory.

A panel of a tile's columns is packed by each thread that is about to use it, into a buffer of its own. Or all of W is
packed ahead, by a block that can be split off (`tvm_axe.records.packing`) and packs a model's weights once. Then a
panel is one vector wide, and a tile reads as many as it has vectors, so that W is the same for tiles of any size::

    for dims of W:                                        # annotated: meta_schedule.layout_rewrite_preproc
      W_global[column // width, .., column % width] = W[.., column, ..]
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.nests.contraction import Contraction
from tvm_axe.records.packing import PREPROC

__all__ = ["copy_ahead", "copy_in_nest", "moved_last", "pack_ahead"]


def copy_in_nest(sch: s_tir.Schedule, match: Contraction, block: SBlockRV, padded: bool) -> SBlockRV:
    """Copy W, which was `padded` or not, with its columns last; the block is for each thread to do its part of."""
    # Padding is a copy already.
    copy = sch.get_sblock(f"{match.buffers[1]}_pad") if padded else sch.cache_read(block, match.weights, "global")
    if match.weights_dim != match.weights_rank - 1:
        sch.transform_layout(copy, ("write", 0), lambda *dims: moved_last(dims, match.weights_dim))
    return copy


def copy_ahead(sch: s_tir.Schedule, match: Contraction, block: SBlockRV, width: int | None) -> SBlockRV:
    """Copy W before all else, where it is to be padded into a buffer with room for whole panels of `width` columns.

    Upstream's search takes such a block for granted to copy and do nothing more, so it cannot fill what is beyond W
    with zeros. That is never written; it is multiplied into columns of C that are never read.
    """
    copy = sch.cache_read(block, match.weights, "global")
    if width is not None:
        sch.transform_layout(copy, ("write", 0), _cut(match, width), assume_injective_transform=True)

        def back(panel: tirx.Var, *dims: tirx.Var) -> list[tirx.Expr]:
            rest = list(dims[:-1])
            rest.insert(match.weights_dim, panel * width + dims[-1])
            return rest

        sch.transform_layout(copy, ("write", 0), back)
    return copy


def pack_ahead(sch: s_tir.Schedule, match: Contraction, copy: SBlockRV, width: int, padded: bool) -> None:
    """Make what `copy_ahead` made pack panels of `width` columns; in between, W was `padded` or not."""
    if padded:  # which copies each column to where it is
        sch.compute_inline(sch.get_sblock(f"{sch.get(copy).body.buffer.name}_pad"))
    sch.transform_layout(copy, ("write", 0), _cut(match, width))
    sch.annotate(copy, PREPROC, True)


def moved_last(dims: tuple[tirx.Var, ...], moved: int) -> list[tirx.Var]:
    """Dimensions with one of them moved last."""
    return [*(dim for n, dim in enumerate(dims) if n != moved), dims[moved]]


def _cut(match: Contraction, width: int) -> Callable[..., list[tirx.Expr]]:
    """The map of W's dimensions to panels of `width` columns."""

    def cut(*dims: tirx.Var) -> list[tirx.Expr]:
        *rest, column = moved_last(dims, match.weights_dim)
        return [column // width, *rest, column % width]

    return cut
