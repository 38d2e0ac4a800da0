"""How large the tiles of a matrix product are by default, and what else is worth trying."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.target import Target

from tvm_axe.defaults import VALUES
from tvm_axe.machines import Cpu, Gpu, machine_of
from tvm_axe.machines.register_tiles import half_cycles
from tvm_axe.tile.kernels.kernel import Knobs, Problem, choose, with_extents

_BLOCKS = {
    "mma": ((128, 256), (128, 128), (128, 64), (64, 64)),
    "fma": ((128, 128), (64, 128), (64, 64), (32, 64)),
}
_OPERAND = 48
"""What loading one row or column of operands costs, in elements of the product: the order of the blocks' speeds."""

_TERMS = 1024
"""Of so many terms a CPU's block of B, 512 KiB, stays in the second cache."""

_WORTH = 0.995
"""A CPU's block is of another width than usual if that takes less than so much of the time."""

_WGMMA = {
    (128, 256): (10.2, 10.2),
    (128, 224): (9.15, 9.75),
    (128, 192): (7.85, 7.85),
    (128, 160): (6.62, 8.1),
    (128, 128): (5.54, 5.54),
    (128, 96): (5.35, 6.1),
    (128, 64): (4.75, 4.75),
    (256, 128): (11.25, 11.25),
    (64, 256): (5.68, 5.68),
    (64, 224): (5.0, 6.4),
    (64, 192): (4.35, 4.35),
    (64, 160): (3.9, 5.1),
    (64, 128): (3.3, 3.3),
    (64, 96): (3.2, 4.4),
    (64, 64): (2.6, 2.6),
}
"""Nanoseconds that a wave of such blocks takes for each of k terms, where B lies as (n, k), and as (k, n).

Measured on an H200 with bfloat16 operands over products of 512 to 8,192 rows: medians, or more where they vary. Rows of
B in a block that are no whole panels of 128 bytes are read in halves, so that they cost more.
"""

_OUTSIDE = (2.0, 0.07)
"""Nanoseconds for each of k terms that a block takes at least with rows of B that are none, and more for each of these.

TMA makes zeros at a third of the rate at which it loads: of 640 columns in blocks of 64 x 192 those that have 64 take
6.6 ns, and of convolutions up to 11. Measured on an H200 (docs/results/2026-12-01-boxes-h200.md).
"""


def instructions(gpu: Gpu, dtype: str) -> Knobs:
    """Tensor cores take float32 as tf32 only where a gemm is annotated with them; it is exact otherwise."""
    return {"instruction": (gpu.tensor_cores if gpu.by_tensor_cores(dtype) else "fma",)} if dtype == "tf32" else {}


def matmul_knobs(target: Target, problem: Problem) -> Knobs:
    """Tiles of a product of (m, k) and (k, n).

    By default they are the block with the least time, by `gpu_block`, and on a CPU by `cpu_block`; of an unknown number
    of rows that of many.
    """
    problem = with_extents(problem, VALUES[-1])
    m, n, dtype = problem["m"], problem["n"], problem["dtype"]
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        assert isinstance(machine, Cpu), machine
        block_m, block_n, block_k = cpu_block(machine, problem)
        return {
            "block_m": choose(block_m, 64, 128, 256),
            "block_n": choose(block_n, 32, 64, 128, 256),
            "block_k": choose(block_k, 128, 256, 512),
        }
    block_m, block_n = gpu_block(machine, problem)
    taller = [rows for rows in (64, 128, 192, 256) if rows < m + 64]
    wider = [columns for columns in (32, 64, 96, 128, 160, 192, 224, 256) if columns < n + 32]
    wider += [columns for columns in _filling(machine, problem) if columns not in wider]
    return {
        "block_m": choose(block_m, *taller),
        "block_n": choose(block_n, *wider),
        "block_k": choose(_depth(machine, dtype, block_m, block_n), 32, 64, 128, 256),
        "stages": choose(0, 2, 3, 4, 5, 6),
        "swizzle": choose(16, 1, 4, 8, 32) if m > 64 else (16,),  # one row of tiles has one order
        **instructions(machine, dtype),
    }


def cpu_block(cpu: Cpu, problem: Problem) -> tuple[int, int, int]:
    """Rows, columns and terms of a CPU's block: as many rows as there are, some 128 columns, and all terms, if few.

    Rows of A are read in place, so that rows that no tile divides cost nothing. B is packed a block at a time, whose
    part stays in a core's second cache. Columns that fill up the last block's vectors are computed, too, so of a few
    widths it is the one with which the core that has most takes the least time. Sums of all terms are stored once; of
    more terms than `_TERMS` they are added up in even parts.
    """
    m, n, k = problem["m"], problem["n"], problem["k"]
    lanes, rows = cpu.lanes("float32"), min(m, 512)
    parts = 1 if k <= _TERMS else round(k / 256)

    def blocks(columns: int) -> int:
        return math.ceil(m / rows) * math.ceil(n / columns) * problem.get("batch", 1)

    def most(columns: int) -> int:
        return math.ceil(blocks(columns) / cpu.processors) * half_cycles(rows, columns, lanes, cpu.vector_registers)

    usual = 128 if blocks(128) >= 2 * cpu.processors else 64
    least = min(range(usual * 3 // 4, usual * 9 // 8 + 1, lanes), key=most)
    return rows, least if most(least) < _WORTH * most(usual) else usual, math.ceil(k / parts)


def _filling(gpu: Gpu, problem: Problem) -> list[int]:
    """The columns of tiles of 64 or 128 rows that make one or two waves of blocks as full as they can be.

    Only for wgmma, which takes any multiple of 8.
    """
    m, n = problem["m"] * problem.get("batch", 1), problem["n"]
    if gpu.tensor_cores != "wgmma" or problem["dtype"] == "float32":
        return []
    found = []
    for rows, waves in ((64, 1), (128, 1), (64, 2), (128, 2)):
        across = waves * gpu.processors // math.ceil(m / rows)
        columns = 8 * math.ceil(n / (8 * across)) if across else 0
        if 32 <= columns <= 256 and columns not in found:
            found.append(columns)
    return found


def gpu_block(gpu: Gpu, problem: Problem) -> tuple[int, int]:
    """The block with the least time: waves of blocks over the multiprocessors, each as long as its tile takes."""
    dtype = problem["dtype"]
    kind = gpu.tensor_cores if gpu.by_tensor_cores(dtype) else "fma"
    if kind == "wgmma":
        return min(_WGMMA, key=lambda block: _term_of(gpu, problem, block))
    return min(
        _BLOCKS[kind], key=lambda block: _waves(gpu, problem, block) * (math.prod(block) + _OPERAND * sum(block))
    )


def wgmma_block(gpu: Gpu, rows_of: Callable[[int], int], n: int) -> tuple[int, int]:
    """The block of warpgroups with the least time, where so many rows are computed of blocks of as many rows each."""
    return min(_WGMMA, key=lambda block: _term_of(gpu, {"m": rows_of(block[0]), "n": n}, block))


def time_of(gpu: Gpu, problem: Problem) -> float:
    """Seconds that a product of 16-bit floats takes by wgmma, as the blocks do that were measured."""
    return 1e-9 * problem["k"] * min(_term_of(gpu, problem, block) for block in _WGMMA)


def _term_of(gpu: Gpu, problem: Problem, block: tuple[int, int]) -> float:
    """Nanoseconds that all waves of blocks take for each of k terms, the last of which has the blocks at the edge."""
    by_rows, by_columns = _WGMMA[block]
    if not problem.get("transpose_b", True):
        return _waves(gpu, problem, block) * by_columns
    outside = -problem["n"] % block[1]
    last = max(by_rows, _OUTSIDE[0] + _OUTSIDE[1] * outside) if outside else by_rows
    return (_waves(gpu, problem, block) - 1) * by_rows + last


def _waves(gpu: Gpu, problem: Problem, block: tuple[int, int]) -> int:
    rows, columns = block
    m = problem["m"] * problem.get("batch", 1)
    return math.ceil(math.ceil(m / rows) * math.ceil(problem["n"] / columns) / gpu.processors)


def _depth(gpu: Gpu, dtype: str, rows: int, columns: int) -> int:
    """Steps along k: 128 bytes for wgmma, the widest swizzle; less where registers or shared memory are fewer.

    Twice as deep with tiles of 64 rows and at most 128 columns of 16-bit operands, of which more slots would fit than
    circular buffers have.
    """
    if dtype == "float32":
        return 16
    if gpu.tensor_cores != "wgmma":
        return 16 if dtype == "tf32" else 32
    return {"tf32": 32, "float8_e4m3fn": 128}.get(dtype, 128 if rows == 64 and columns <= 128 else 64)
