"""Products by ``wgmma`` of tiles that threads load: those whose rows are gathered, which no box of TMA's is.

All warps load and all warpgroups multiply. A product is under way while the threads start the loads of a later
iteration, and is waited for before the next barrier, or before what touches its accumulator.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", and "Async proxy", for the fence between what
threads write and what the instruction reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.layout import Layout
from tvm_axe.machines.registry import described
from tvm_axe.tile.nodes import Gemm, Parallel
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda.instructions import wgmma
from tvm_axe.tile.targets.cuda.plan import gpu_of
from tvm_axe.tile.targets.cuda.uniform.gathers import gather_of


@dataclass(frozen=True)
class Warpgroups:
    """How warpgroups stand over a product: `down` of them along its rows, `across` along its columns; one is 1."""

    down: int
    across: int

    def accumulator(self, gemm: Gemm) -> Layout:
        """Where the accumulator's elements are, over threads and registers."""
        m, n, _ = gemm.shape
        return wgmma.accumulator(m, n, self.down * self.across, self.across)

    def registers(self, gemm: Gemm) -> Any:
        """The accumulator of one warpgroup, as upstream's primitive takes it."""
        m, n, _ = gemm.shape
        shape = (m // self.down, n // self.across)
        return T.alloc_buffer(shape, gemm.c.tile.dtype, scope="local", layout=wgmma.warpgroup_fragment(*shape))


def obstacle(gemm: Gemm, target: Target, threads: int) -> str | None:
    """Why so many threads that load can't do a product by the instruction; None if they can."""
    if gpu_of(target).tensor_cores != "wgmma":
        return f"{described(target)} has no asynchronous products"
    if gemm.a.tile.scope != "shared":
        return f"{gemm.a.tile.name} is in registers, from which only a specialized kernel takes it"
    why = wgmma.obstacle(gemm)
    if why is None and _arranged(gemm, threads) is None:
        m, n, _ = gemm.shape
        why = f"{m} x {n} elements fall into no equal shares for the warpgroups, of {wgmma.WARPGROUP} threads, "
        why += f"of {threads} threads"
    return why


def arrange(gemm: Gemm, threads: int) -> Warpgroups:
    """How the warpgroups of so many threads stand over a product that they can do."""
    found = _arranged(gemm, threads)
    assert found is not None, gemm
    return found


def _arranged(gemm: Gemm, threads: int) -> Warpgroups | None:
    count, rest = divmod(threads, wgmma.WARPGROUP)
    if rest:
        return None
    if gemm.shape[0] % (count * wgmma.ROWS) == 0:
        return Warpgroups(count, 1)
    return Warpgroups(1, count) if wgmma.shares_columns(gemm, count) else None


def is_gathered(program: TileProgram, gemm: Gemm) -> bool:
    """Whether an operand of a product is gathered."""
    operands = (gemm.a.tile, gemm.b.tile)
    gathers = (node for node in program.nodes() if isinstance(node, Parallel) and gather_of(node) is not None)
    return any(tile in operands for gather in gathers for tile in gather.writes)
