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

from dataclasses import dataclass

from tvm import s_tir
from tvm.s_tir.schedule import ExprRV, LoopRV, SBlockRV
from tvm.target import Target

from tvm_axe.analysis.patterns import is_pointwise, loads_of
from tvm_axe.errors import ScheduleError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.schedule import query, tile_kernel
from tvm_axe.schedule.product import Product
from tvm_axe.schedule.tiles import PRODUCTS, kernel_for, problem_of, product_at
from tvm_axe.tile.kernels.kernel import Knobs, Problem

__all__ = ["Offer", "choose", "offers"]

_ON_CPU = ("matmul", "batched_matmul")  # the others spread one product's work over more blocks than it has tiles


@dataclass(frozen=True)
class Offer:
    """A kernel that computes a block.

    Attributes
    ----------
    block, kernel
        Their names.
    epilogue
        The pointwise block that alone reads the product, by name; None if there is none.
    problem
        What the kernel is asked for.
    space
        The kernel's parameters with their candidates, the default first.
    """

    block: str
    kernel: str
    epilogue: str | None
    problem: Problem
    space: Knobs


def offers(sch: s_tir.Schedule, target: Target) -> list[Offer]:
    """What tile kernels can compute of the blocks directly below the root of ``main``."""
    found = []
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        name = query.name_of(sch, block)
        for kernel in PRODUCTS if isinstance(machine_of(target), Gpu) else _ON_CPU:
            try:
                product = product_at(sch, block)
                epilogue = _epilogue(sch, block, product)
                out = product.c if epilogue is None else sch.get(sch.get_sblock(epilogue)).body.buffer
                problem = problem_of(kernel_for(kernel), product, str(out.dtype))
            except ScheduleError:
                continue
            found.append(Offer(name, kernel, epilogue, problem, kernel_for(kernel).parameters(target, problem)))
    return found


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
    inner = _split(sch, block, values)
    if offer.epilogue is not None:
        loop = sch.get_loops(block)[0] if inner is None else inner
        sch.reverse_compute_at(sch.get_sblock(offer.epilogue), loop)
    tile_kernel(sch, block, offer.kernel, **values)


def _split(sch: s_tir.Schedule, block: SBlockRV, values: dict[str, int | ExprRV]) -> LoopRV | None:
    """Split a product's nest into the kernel's tiles, where each part is one loop; returns the grid's last loop."""
    product = product_at(sch, block)
    parts = {"block_m": product.rows, "block_n": product.columns, "block_k": product.reduction}
    if not all(len(part) == 1 and name in values for name, part in parts.items()):
        return None
    loops = [query.loop_of(sch, block, part[0].var) for part in parts.values()]
    batch = [query.loop_of(sch, block, it.var) for it in product.batch]
    pairs = [sch.split(loop, [None, values[name]]) for name, loop in zip(parts, loops)]
    (io, ii), (jo, ji), (ko, ki) = pairs
    sch.reorder(*batch, io, jo, ko, ii, ji, ki)
    return jo


def _epilogue(sch: s_tir.Schedule, block: SBlockRV, product: Product) -> str | None:
    """The pointwise block that alone reads the product, at the point that it writes."""
    readers = sch.get_consumers(block)
    if len(readers) != 1 or query.is_parameter(sch, product.c):
        return None
    if len(sch.get_producers(readers[0])) != 1:  # `reverse_compute_at` wants all of them in the nest
        return None
    stmt = sch.get(readers[0])
    indices = list(stmt.body.indices)
    pointwise = is_pointwise(stmt)
    same = all(
        len(load.indices) == len(indices) and all(a.same_as(b) for a, b in zip(load.indices, indices))
        for load in loads_of(stmt, product.c)
    )
    return str(stmt.name_hint) if pointwise and same else None
