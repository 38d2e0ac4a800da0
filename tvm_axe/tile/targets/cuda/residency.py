"""How many blocks a multiprocessor runs at once, and what is left for each: registers and shared memory.

Source: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": a multiprocessor has
1 KiB of shared memory more than one block may use, and keeps as much for each block.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu
from tvm_axe.machines.cubins import Resources
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda import raster
from tvm_axe.tile.targets.cuda.plan import CudaPlan, gpu_of

MOST_REGISTERS = 255
"""The most registers of a thread, of 32 bits."""

STEP = 8
"""Registers are given to threads in multiples of so many, where several blocks share a multiprocessor's."""

MIN_BLOCKS = "tirx.launch_bounds_min_blocks_per_sm"
"""Upstream's attribute of how many blocks of a kernel the assembler lets a multiprocessor run at once."""

_RESERVED = 1 << 10  # bytes of shared memory
_WARP_REGISTERS = 256  # registers are given to warps in multiples of so many


@dataclass(frozen=True)
class Residency:
    """What each of the blocks has that a multiprocessor is to run at once.

    Attributes
    ----------
    blocks : int
        How many there are: 1 if the program doesn't say.
    annotated : bool
        Whether the program says so.
    registers : int
        The registers of a thread, if all threads of a block have as many.
    shared_bytes : int
        The most shared memory of a block, in bytes.
    alone : bool
        Whether there are no more blocks than multiprocessors, so that none runs two of them.
    """

    blocks: int
    annotated: bool
    registers: int
    shared_bytes: int
    alone: bool

    @property
    def share(self) -> str:
        """The shared memory of a block, in words."""
        apart = f", as blocks_per_sm={self.blocks} leaves it" if self.blocks > 1 else ""
        return f"{self.shared_bytes} bytes{apart}"


def blocks_per_processor(program: TileProgram) -> int:
    """How many blocks a multiprocessor is to run at once, as annotated, or 1."""
    blocks = program.options.get("blocks_per_sm", 1)
    assert isinstance(blocks, int), blocks
    return blocks


def registers_of_all(threads: int, blocks: int) -> int:
    """The registers of each thread where so many blocks of so many threads share them evenly."""
    each = Gpu.registers // (threads * blocks)
    return min(MOST_REGISTERS, each if blocks == 1 else each // STEP * STEP)


def decide_residency(program: TileProgram, gpu: Gpu, threads: int, decisions: Decisions) -> Residency:
    """Decide what a block of so many threads, of all roles, may have.

    Raises
    ------
    TileError
        A multiprocessor doesn't run as many blocks as annotated.
    """
    blocks, annotated = blocks_per_processor(program), "blocks_per_sm" in program.options
    most = min(gpu.resident_blocks, gpu.resident_threads // threads)
    if blocks > most:
        raise TileError(
            f"kernel: blocks_per_sm={blocks} of {threads} threads each; a multiprocessor runs {gpu.resident_blocks} "
            f"blocks and {gpu.resident_threads} threads at once, so valid is up to {most}"
        )
    shared = (gpu.shared_bytes + _RESERVED) // blocks - _RESERVED
    points = raster.points([extent for _, extent in program.grid])
    alone = isinstance(points, int) and points <= gpu.processors
    found = Residency(blocks, annotated, registers_of_all(threads, blocks), shared, alone)
    if annotated:
        decisions.add(
            "blocks",
            f"{blocks} a multiprocessor",
            f"as annotated: {shared} bytes of shared memory for each, {found.registers} registers for each thread",
        )
    return found


def describe(plan: CudaPlan, made: Resources) -> list[str]:
    """What a thread took, and how many blocks a multiprocessor runs then, and what keeps it from more.

    Source: NVIDIA, CUDA C++ Best Practices Guide, "Calculating Occupancy".
    """
    gpu, threads = gpu_of(plan.target), plan.block_threads
    of_warp = -(-32 * made.registers // _WARP_REGISTERS) * _WARP_REGISTERS
    room = {
        "registers": gpu.registers // (of_warp * -(-threads // 32)),
        "shared memory": (gpu.shared_bytes + _RESERVED) // (plan.shared_bytes + _RESERVED),
        "threads": gpu.resident_threads // threads,
        "blocks": gpu.resident_blocks,
    }
    blocks = min(room.values())
    least = " and ".join(what for what, count in room.items() if count == blocks)
    return [
        f"registers: {made.registers} of a thread as it begins  (as the assembler gave them)",
        f"occupancy: {blocks} {'block' if blocks == 1 else 'blocks'} of {threads} threads a multiprocessor, "
        f"{100 * blocks * threads // gpu.resident_threads}% of its threads  (as many as {least} allow)",
    ]


def find_slow(made: Resources) -> list[str]:
    """What of a thread is in memory that should be in registers, and what avoids that."""
    if not made.local_bytes:
        return []
    return [
        f"{made.local_bytes} bytes of local memory a thread: registers that are spilled, or local tiles at places that "
        "aren't constant; smaller fragments, a gemm of fewer columns or more threads avoid it"
    ]


def launch_bounds(residency: Residency) -> Any:
    """Where code is emitted for so many blocks a multiprocessor, of which the assembler is told if that is known.

    Else it spares registers, so that more blocks fit, by having one load wait for what another has brought.
    """
    if not (residency.annotated or residency.alone):
        return contextlib.nullcontext()
    return T.attr({MIN_BLOCKS: residency.blocks})
