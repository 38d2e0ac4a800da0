"""The kernels, by name, whether a target runs one, and which of them multiplies matrices of a shape."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import MappingProxyType

from tvm import tirx
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile import lowering
from tvm_axe.tile.kernels.attention import ATTENTION
from tvm_axe.tile.kernels.attention_backward import ATTENTION_BACKWARD
from tvm_axe.tile.kernels.block_scaled import BLOCK_SCALED_MATMUL
from tvm_axe.tile.kernels.block_sparse import BLOCK_SPARSE_ATTENTION
from tvm_axe.tile.kernels.block_sparse_backward import BLOCK_SPARSE_ATTENTION_BACKWARD
from tvm_axe.tile.kernels.chunked import CHUNK_SCAN, CHUNK_STATE
from tvm_axe.tile.kernels.convolution import CONV2D
from tvm_axe.tile.kernels.decode import DECODE_ATTENTION
from tvm_axe.tile.kernels.dequantized import W4A16_MATMUL, W8A16_MATMUL
from tvm_axe.tile.kernels.einsum import EINSUM
from tvm_axe.tile.kernels.gathered import GATHERED_MATMUL
from tvm_axe.tile.kernels.gating import TOPK_GATING
from tvm_axe.tile.kernels.gemm import BATCHED_MATMUL, FP8_MATMUL, MATMUL
from tvm_axe.tile.kernels.grouped import GROUPED_MATMUL
from tvm_axe.tile.kernels.kernel import Kernel, Problem
from tvm_axe.tile.kernels.latent import MLA_DECODE
from tvm_axe.tile.kernels.packed import PACKED_ATTENTION
from tvm_axe.tile.kernels.quantized import W4A8_MATMUL
from tvm_axe.tile.kernels.rows import LAYER_NORM, RMS_NORM, SOFTMAX
from tvm_axe.tile.kernels.skinny import SKINNY_MATMUL
from tvm_axe.tile.kernels.splitting import SPLIT_K_MATMUL, STREAM_K_MATMUL
from tvm_axe.tile.kernels.tiling import gpu_block
from tvm_axe.tile.kernels.transpose import TRANSPOSE

_ALL = (
    MATMUL, SPLIT_K_MATMUL, STREAM_K_MATMUL, SKINNY_MATMUL, BATCHED_MATMUL, GROUPED_MATMUL, GATHERED_MATMUL, FP8_MATMUL,
    BLOCK_SCALED_MATMUL, W4A16_MATMUL, W8A16_MATMUL, W4A8_MATMUL, EINSUM, ATTENTION, ATTENTION_BACKWARD,
    PACKED_ATTENTION, BLOCK_SPARSE_ATTENTION, BLOCK_SPARSE_ATTENTION_BACKWARD, DECODE_ATTENTION, MLA_DECODE,
    CHUNK_STATE, CHUNK_SCAN, CONV2D, RMS_NORM, LAYER_NORM, SOFTMAX, TOPK_GATING, TRANSPOSE,
)  # fmt: skip

KERNELS: Mapping[str, Kernel] = MappingProxyType({kernel.name: kernel for kernel in _ALL})


def compiles(name: str, target: Target, problem: Problem, parameters: Mapping[str, int] = MappingProxyType({})) -> bool:
    """Whether a kernel can be compiled for a target with its defaults, but for the parameters that are given.

    A model asks the same of each of its layers, so what was answered is remembered. Extents that aren't known are
    variables, of one name where they are one.
    """
    asked = json.dumps(problem, default=lambda extent: {"extent": str(extent.name)})
    return _compiles(name, str(target), asked, tuple(parameters.items()))


@functools.lru_cache(maxsize=4096)
def _compiles(name: str, target: str, problem: str, given: tuple[tuple[str, int], ...]) -> bool:
    resolved, asked, kernel = Target(json.loads(target)), json.loads(problem), KERNELS[name]
    names = {value["extent"] for value in asked.values() if isinstance(value, dict)}
    extents = {each: tirx.Var(each, "int64") for each in names}
    asked = {key: extents[value["extent"]] if isinstance(value, dict) else value for key, value in asked.items()}
    fewer = kernel.fewer(resolved, asked) if extents else None
    try:
        for parameters in (dict(given), *([fewer.parameters] if fewer is not None else [])):
            for program in kernel.recipe(resolved, asked, **parameters).programs:
                lowering.plan(program, resolved)
    except TileError:
        return False
    return True


def matmul_for(target: Target, problem: Problem) -> Kernel:
    """The kernel for a product A B^T of one dtype: its tiles transposed for few rows, its sums split for few tiles."""
    gpu = machine_of(target)
    if not isinstance(gpu, Gpu):
        return MATMUL
    if problem["m"] <= 64:
        return SKINNY_MATMUL
    block_m, block_n = gpu_block(gpu, problem)
    tiles = -(-problem["m"] // block_m) * -(-problem["n"] // block_n)
    return SPLIT_K_MATMUL if 2 * tiles <= gpu.processors and problem["k"] >= 2048 else MATMUL
