"""What tile kernels can compute of a function's blocks, and which of them a target takes if nobody chooses.

The design spaces of tuning sample the parameters of these (`tvm_axe.nests.kernels`); a function that nobody has
scheduled takes the default ones (`tvm_axe.lower.tiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV
from tvm.target import Target

from tvm_axe.analysis.patterns import goes_on_with
from tvm_axe.errors import ScheduleError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.schedule import query
from tvm_axe.schedule.tiles import GATHERED, PRODUCTS, SUMS, AnyProduct, kernel_for, problem_of, product_at
from tvm_axe.tile.kernels import matmul_for
from tvm_axe.tile.kernels.einsum import Operands
from tvm_axe.tile.kernels.kernel import Knobs, Problem, has_variables, with_extents

__all__ = ["Offer", "is_worth", "offers", "preferred"]

_ON_CPU = ("matmul", "batched_matmul")  # the others spread one product's work over more blocks than it has tiles


@dataclass(frozen=True)
class Offer:
    """A kernel that computes a block.

    Attributes
    ----------
    block, kernel : str
        Their names.
    epilogue : str or None
        The pointwise block that alone reads the product, by name; None if there is none.
    problem : Problem
        What the kernel is asked for.
    rows : int or None
        How many rows the parameters are for, where the problem has a variable for it; None where all is known.
    space : Knobs
        The kernel's parameters with their candidates, the default first.
    """

    block: str
    kernel: str
    epilogue: str | None
    problem: Problem
    rows: int | None
    space: Knobs

    @property
    def known(self) -> Problem:
        """The problem that the parameters are for."""
        return self.problem if self.rows is None else with_extents(self.problem, self.rows)

    @property
    def parameters(self) -> dict[str, int]:
        """The parameters that have to be said: none where they are the problem's defaults."""
        if self.rows is None:
            return {}
        return {name: each[0] for name, each in self.space.items() if isinstance(each[0], int)}


def offers(sch: s_tir.Schedule, target: Target, rows: int | None = None) -> list[Offer]:
    """Return what tile kernels can compute of the blocks directly below the root of ``main``.

    Products of an unknown number of rows are among them if `rows` says how many parameters are to be for.
    """
    gpu = isinstance(machine_of(target), Gpu)
    found: list[Offer] = []
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        own = [_offer(sch, block, kernel, target, rows) for kernel in (PRODUCTS if gpu else _ON_CPU)]
        if gpu and not any(own):
            own = [_offer(sch, block, kernel, target, rows) for kernel in (SUMS, GATHERED)]
        found += [offer for offer in own if offer is not None]
    return found


def _offer(sch: s_tir.Schedule, block: SBlockRV, kernel: str, target: Target, rows: int | None) -> Offer | None:
    """Return the kernel for the block; None if it doesn't compute that."""
    try:
        product = product_at(sch, block, kernel)
        epilogue = _epilogue(sch, block, product)
        out = product.c if epilogue is None else sch.get(sch.get_sblock(epilogue)).body.buffer
        problem = problem_of(kernel_for(kernel), product, str(out.dtype))
    except ScheduleError:
        return None
    if not has_variables(problem):
        rows = None
    elif rows is None:
        return None
    space = kernel_for(kernel).parameters(target, problem if rows is None else with_extents(problem, rows))
    return Offer(query.name_of(sch, block), kernel, epilogue, problem, rows, space)


def preferred(offered: Sequence[Offer], target: Target) -> list[Offer]:
    """Return the offers, of each block the best default for its problem first."""
    return sorted(offered, key=lambda offer: offer.kernel != _default(offer, target))


def is_worth(offer: Offer) -> bool:
    """Return whether there are rows and columns for tiles: without, threads do as well that take an element each."""
    if offer.kernel == SUMS:
        operands = Operands.parse(*(str(offer.problem[name]) for name in "abc"))
        return all(operands.extents[index] > 1 for index in (operands.row, operands.column))
    if offer.kernel == GATHERED:
        return bool(offer.problem["n"] > 1)
    return offer.kernel == "skinny_matmul" or min(offer.known["m"], offer.known["n"]) > 1


def _default(offer: Offer, target: Target) -> str:
    """Return the kernel that is the default for the problem, where it takes B by columns."""
    by_columns = offer.kernel not in (SUMS, GATHERED) and offer.problem.get("transpose_b", True)
    return matmul_for(target, offer.known).name if by_columns else offer.kernel


def _epilogue(sch: s_tir.Schedule, block: SBlockRV, product: AnyProduct) -> str | None:
    """Return the pointwise block that alone reads the product, at the point that it writes."""
    readers = sch.get_consumers(block)
    if len(readers) != 1 or query.is_parameter(sch, product.c):
        return None
    if len(sch.get_producers(readers[0])) != 1:  # `reverse_compute_at` wants all of them in the nest
        return None
    stmt = sch.get(readers[0])
    return str(stmt.name_hint) if goes_on_with(stmt, product.c) else None
