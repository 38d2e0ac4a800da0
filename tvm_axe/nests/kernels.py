"""Tile kernels as design spaces: the kernel is an annotation, its declared parameters are sampled.

Of a product of matrices with tiles of block_m x block_n x block_k::

    for io, jo:                                # the kernel's grid
      for ko, ii, ji, ki:
        C[i, j] += A[i, k] * B[k, j]           # annotated: axe.tile, axe.tile.block_m, ...
      for ii, ji:
        out[i, j] = f(C[i, j], ...)            # its epilogue, if there is one

The splits change nothing of what is compiled; they are what the cost model sees of the kernel.
"""

from __future__ import annotations

from tvm import s_tir
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV

from tvm_axe.schedule import query, tile_kernel
from tvm_axe.schedule.offers import Offer
from tvm_axe.schedule.tiles import product_at

__all__ = ["choose"]


def choose(sch: s_tir.Schedule, offer: Offer, sampled: bool) -> None:
    """Have the kernel compute its block of ``main``, with `sampled` parameters or the default ones.

    Half of the draws of a parameter are its default, which somebody has measured.
    """
    values: dict[str, int | ExprRV] = {}
    for name, (default, *others) in offer.space.items():
        if sampled and others:
            weights = [0.5, *[0.5 / len(others)] * len(others)]
            values[name] = sch.sample_categorical([default, *others], weights)
        else:
            values[name] = default
    block = sch.get_sblock(offer.block)
    inner = _split(sch, block, offer.kernel, values)
    if offer.epilogue is not None:
        loop = sch.get_loops(block)[0] if inner is None else inner
        sch.reverse_compute_at(sch.get_sblock(offer.epilogue), loop)
    tile_kernel(sch, block, offer.kernel, **values)


def _split(sch: s_tir.Schedule, block: SBlockRV, kernel: str, values: dict[str, int | ExprRV]) -> LoopRV | None:
    """Split a product's nest into the kernel's tiles, where each part is one loop; returns the grid's last loop."""
    product = product_at(sch, block, kernel)
    parts = product.tiled
    if not all(len(part) == 1 and name in values for name, part in parts.items()):
        return None
    loops = [query.loop_of(sch, block, part[0].var) for part in parts.values()]
    batch = [query.loop_of(sch, block, it.var) for it in product.batch]
    pairs = [sch.split(loop, [None, values[name]]) for name, loop in zip(parts, loops)]
    (io, ii), (jo, ji), (ko, ki) = pairs
    sch.reorder(*batch, io, jo, ko, ii, ji, ki)
    return jo
