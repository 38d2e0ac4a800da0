"""Kernels compiled for this machine's CPU beside numpy in float64; ``tvm-axe kernels --check`` runs all cases."""

import numpy as np
import pytest

from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.check import checked

CASES = [
    ("matmul", 1), ("matmul", 2), ("matmul", 3), ("matmul", 8), ("split_k_matmul", 0), ("stream_k_matmul", 0),
    ("skinny_matmul", 1), ("batched_matmul", 0), ("grouped_matmul", 1), ("grouped_matmul", 4),
    ("gathered_matmul", 1), ("fp8_matmul", 1),
    ("attention_backward", 0), ("attention_backward", 2), ("attention_backward", 3), ("attention_backward", 4),
    ("attention_backward", 5), ("attention_backward", 8),
    ("block_scaled_matmul", 1), ("block_scaled_matmul", 2), ("block_scaled_matmul", 4),
    ("block_sparse_attention_backward", 1), ("block_sparse_attention_backward", 2),
    ("chunk_state", 1), ("chunk_state", 2), ("chunk_state", 3), ("chunk_scan", 1), ("chunk_scan", 2), ("chunk_scan", 3),
    ("w4a16_matmul", 1), ("w4a16_matmul", 2), ("w4a16_matmul", 3),
    *(("w8a16_matmul", index) for index in range(6)),
    ("w4a8_matmul", 1), ("w4a8_matmul", 2), ("w4a8_matmul", 3), ("w4a8_matmul", 4), ("w4a8_matmul", 5),
    ("w4a8_matmul", 6),
    ("attention", 0), ("attention", 2), ("attention", 9), ("attention", 10), ("attention", 11), ("packed_attention", 0),
    ("packed_attention", 3), ("block_sparse_attention", 1), ("block_sparse_attention", 2),
    ("block_sparse_attention", 3), ("decode_attention", 0), ("decode_attention", 5), ("decode_attention", 6),
    ("decode_attention", 7), ("decode_attention", 8), ("mla_decode", 0), ("mla_decode", 1), ("mla_decode", 2),
    *(("conv2d", index) for index in range(11)),
    ("rms_norm", 1), ("softmax", 3), ("topk_gating", 1), ("topk_gating", 2), ("topk_gating", 5), ("transpose", 1),
]  # fmt: skip


@pytest.mark.parametrize("name, index", CASES)
def test_kernel_on_cpu(name, index):
    kernel = KERNELS[name]
    row, fault = checked(kernel, kernel.cases[index], resolve_target("llvm"), np.random.default_rng([11, index]))
    assert not fault
    assert row.ok
