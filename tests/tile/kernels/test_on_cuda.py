"""Kernels for GPUs: each compiled to a binary where there is a compiler, and run where there is a GPU."""

import numpy as np
import pytest
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines import nvcc
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile import compile_all
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.check import checked, supported

CASES = [(kernel.name, index) for kernel in KERNELS.values() for index in range(len(kernel.cases))]
# One of each kernel, and of what differs in the code: exact float32, tensor cores, an edge that no copy engine takes.
HOPPER = [
    ("matmul", 1), ("matmul", 5), ("matmul", 7), ("matmul", 8), ("split_k_matmul", 1), ("stream_k_matmul", 1),
    ("skinny_matmul", 0), ("batched_matmul", 2), ("grouped_matmul", 1), ("grouped_matmul", 2),
    ("grouped_matmul", 4), ("gathered_matmul", 1), ("fp8_matmul", 0), ("attention", 0), ("attention", 2),
    ("attention", 10), ("attention", 13), ("packed_attention", 0), ("packed_attention", 3), ("decode_attention", 0),
    ("block_sparse_attention", 3), ("decode_attention", 6), ("rms_norm", 1), ("softmax", 4),
    ("topk_gating", 0), ("transpose", 1),
    ("w4a16_matmul", 0), ("w4a16_matmul", 2), ("w4a16_matmul", 3), ("w4a16_matmul", 6), ("w4a16_matmul", 7),
    *(("w8a16_matmul", index) for index in range(6)),
    ("w4a8_matmul", 1), ("w4a8_matmul", 2), ("w4a8_matmul", 4), ("w4a8_matmul", 6),
    ("attention_backward", 0), ("attention_backward", 2),
    ("attention_backward", 6), ("attention_backward", 7), ("attention_backward", 8), ("attention_backward", 9),
    ("block_sparse_attention_backward", 1), ("block_scaled_matmul", 0),
    ("chunk_state", 1), ("chunk_state", 3), ("chunk_scan", 1), ("chunk_scan", 2), ("chunk_scan", 3),
    ("mla_decode", 0), ("mla_decode", 2), *(("conv2d", index) for index in range(11)),
]  # fmt: skip
AMPERE = [
    ("matmul", 5), ("matmul", 7), ("grouped_matmul", 1), ("gathered_matmul", 3), ("attention", 2),
    ("decode_attention", 0), ("decode_attention", 5), ("decode_attention", 6), ("decode_attention", 7),
    ("topk_gating", 5), ("w4a16_matmul", 1), ("w4a16_matmul", 6), ("w8a16_matmul", 1), ("attention_backward", 2),
    ("attention_backward", 9), ("attention_backward", 10), ("chunk_state", 1), ("chunk_scan", 1),
    ("chunk_scan", 3), ("mla_decode", 0), ("mla_decode", 1),
    ("block_sparse_attention", 1), ("block_sparse_attention_backward", 0), ("w4a8_matmul", 0),
    *(("conv2d", index) for index in range(11)),
]  # fmt: skip
UNTRIED = [("matmul", 5), ("fp8_matmul", 0), ("attention", 2), ("rms_norm", 1), ("softmax", 4), ("topk_gating", 5)]
COMPILED = [
    (arch, *case)
    for arch, cases in (("sm_90a", HOPPER), ("sm_80", AMPERE), ("sm_89", UNTRIED), ("sm_100a", UNTRIED))
    for case in cases
]


@pytest.fixture(scope="module")
def compiler():
    try:
        return nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("arch, name, index", COMPILED)
def test_kernel_compiles_without_a_gpu(arch, name, index, compiler):
    target, kernel = Target({"kind": "cuda", "arch": arch}), KERNELS[name]
    for program in compile_all(kernel.recipe(target, kernel.cases[index]).programs, target):
        assert "__global__" in program.source


@pytest.mark.gpu
@pytest.mark.parametrize("name, index", CASES)
def test_kernel_on_the_gpu(name, index, cuda):
    kernel, target = KERNELS[name], resolve_target("cuda")
    problem = kernel.cases[index]
    if not supported(target, problem):
        pytest.skip(f"{target.attrs['arch']} has no instruction for {problem['dtype']}")
    row, fault = checked(kernel, problem, target, np.random.default_rng([13, index]))
    assert not fault
    assert row.ok


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name, problem",
    [
        ("block_scaled_matmul", {"m": 4096, "n": 4096, "k": 2048, "dtype": "float8_e4m3fn"}),
        ("w4a8_matmul", {"m": 2048, "n": 4096, "k": 2048, "group": 128, "dtype": "int8", "out_dtype": "bfloat16"}),
        ("w4a16_matmul", {"m": 2048, "n": 4096, "k": 2048, "group": 128, "dtype": "bfloat16"}),
        ("w8a16_matmul", {"m": 2048, "n": 4096, "k": 2048, "group": 128, "dtype": "bfloat16", "weights": "int8"}),
    ],
)
def test_scales_of_many_tiles_on_the_gpu(name, problem, cuda):
    """Stores of one warpgroup hold up what another reads, and slots are filled for the next tile meanwhile."""
    kernel, target = KERNELS[name], resolve_target("cuda")
    if not supported(target, problem):
        pytest.skip(f"{target.attrs['arch']} has no instruction for {problem['dtype']}")
    _, fault = checked(kernel, problem, target, np.random.default_rng())
    assert not fault
