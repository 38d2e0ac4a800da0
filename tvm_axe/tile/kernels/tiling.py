"""How large the tiles of a matrix product are by default, and what else is worth trying."""

from __future__ import annotations

import math

from tvm.target import Target

from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.kernel import Knobs, Problem, choose

_BLOCKS = {
    "wgmma": (*((128, n) for n in (256, 224, 192, 128, 64)), (256, 128), (64, 128), (64, 96), (64, 64)),
    "mma": ((128, 256), (128, 128), (128, 64), (64, 64)),
    "fma": ((128, 128), (64, 128), (64, 64), (32, 64)),
}
_OPERAND = 48
"""What loading one row or column of operands costs, in elements of the product: the order of the blocks' speeds."""


def instructions(gpu: Gpu, dtype: str) -> Knobs:
    """Tensor cores take float32 as tf32 only where a gemm is annotated with them; it is exact otherwise."""
    return {"instruction": (gpu.tensor_cores if gpu.by_tensor_cores(dtype) else "fma",)} if dtype == "tf32" else {}


def matmul_knobs(target: Target, problem: Problem) -> Knobs:
    """Tiles of a product of (m, k) and (k, n).

    On a GPU the default is the block with the least time: waves of blocks over the multiprocessors, each as long as its
    tile takes. On a CPU as many rows as there are, and columns whose part of B stays in a core's second cache.
    """
    m, n, dtype = problem["m"], problem["n"], problem["dtype"]
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        # Rows of A are read in place, so that rows that no tile divides cost nothing; B is packed a block at a time.
        rows = min(m, 512)
        blocks = math.ceil(m / rows) * math.ceil(n / 128) * problem.get("batch", 1)
        return {
            "block_m": choose(rows, 64, 128, 256),
            "block_n": choose(128 if blocks >= 2 * machine.processors else 64, 32, 64, 128, 256),
            "block_k": choose(256, 128, 512),
        }
    block_m, block_n = gpu_block(machine, m * problem.get("batch", 1), n, dtype)
    taller = [rows for rows in (64, 128, 192, 256) if rows < m + 64]
    wider = [columns for columns in (32, 64, 96, 128, 160, 192, 224, 256) if columns < n + 32]
    wider += [columns for columns in _filling(machine, problem) if columns not in wider]
    return {
        "block_m": choose(block_m, *taller),
        "block_n": choose(block_n, *wider),
        "block_k": choose(_depth(machine, dtype, block_m), 32, 64, 128, 256),
        "stages": choose(0, 2, 3, 4, 5, 6),
        "swizzle": choose(16, 1, 4, 8, 32) if m > 64 else (16,),  # one row of tiles has one order
        **instructions(machine, dtype),
    }


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


def gpu_block(gpu: Gpu, m: int, n: int, dtype: str) -> tuple[int, int]:
    """The block with the least estimated time."""
    kind = gpu.tensor_cores if gpu.by_tensor_cores(dtype) else "fma"

    def time(block: tuple[int, int]) -> float:
        rows, columns = block
        waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / gpu.processors)
        return waves * (rows * columns + _OPERAND * (rows + columns))

    return min(_BLOCKS[kind], key=time)


def _depth(gpu: Gpu, dtype: str, rows: int) -> int:
    """Steps along k: 128 bytes for wgmma, the widest swizzle; less where registers or shared memory are fewer.

    Twice as deep with 64 rows of 16-bit operands, of which more slots would fit than circular buffers have.
    """
    if dtype == "float32":
        return 16
    if gpu.tensor_cores != "wgmma":
        return 16 if dtype == "tf32" else 32
    return {"tf32": 32, "float8_e4m3fn": 128}.get(dtype, 128 if rows == 64 else 64)
