"""Attention of unknown numbers of tokens on a CPU: one kernel, right at any number."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import IRModule, relax, tirx

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.relax.attended import with_attention

HEADS, DIM = 4, 16


def model(alike: bool, causal: bool, kv_heads: int, scale: float | None = None) -> IRModule:
    n = tirx.Var("n", "int64")
    m = n if alike else tirx.Var("m", "int64")
    sides = ((n, HEADS), (m, kv_heads), (m, kv_heads))
    given = [relax.Var(name, relax.TensorType((2, *side, DIM), "float32")) for name, side in zip("qkv", sides)]
    builder = relax.BlockBuilder()
    with builder.function("main", given):
        mask = "TopLeft" if causal else None
        builder.emit_func_output(builder.emit(relax.op.nn.attention(*given, scale=scale, causal_mask=mask)))
    return builder.get()


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool, scale: float) -> np.ndarray:
    q, k, v = (each.astype("float64").swapaxes(1, 2) for each in (q, k, v))
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.swapaxes(2, 3) * scale
    if causal:
        scores = np.where(np.tri(*scores.shape[2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


CASES = [(True, True, 4, None), (True, False, 2, 0.5), (False, False, 4, None)]


@pytest.mark.parametrize(("alike", "causal", "kv_heads", "scale"), CASES)
def test_one_kernel_is_right_at_any_length(alike, causal, kv_heads, scale):
    mod = model(alike, causal, kv_heads, scale)
    kernels = [
        f for f in with_attention(mod, resolve_target("llvm")).functions.values() if isinstance(f, tirx.PrimFunc)
    ]
    assert len(kernels) == 1
    exe, rng = axe.compile(mod, work_dir=None, keep=False), np.random.default_rng(0)
    for n, m in ((1, 70), (5, 3), (16, 129), (17, 1), (64, 64), (130, 200)):
        tokens = (n, n if alike else m, n if alike else m)
        given = [
            rng.standard_normal((2, each, heads, DIM)).astype("float32")
            for each, heads in zip(tokens, (HEADS, kv_heads, kv_heads))
        ]
        np.testing.assert_allclose(exe(*given), exact(*given, causal, scale or DIM**-0.5), rtol=2e-5, atol=2e-5)


def test_what_no_kernel_computes_is_left():
    """Causal attention of other numbers of keys, and a batch of unknown size."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    for batch, keys, mask in ((1, m, "BottomRight"), (m, n, None)):
        shapes = ((batch, n, HEADS, DIM), (batch, keys, HEADS, DIM), (batch, keys, HEADS, DIM))
        given = [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in zip("qkv", shapes)]
        builder = relax.BlockBuilder()
        with builder.function("main", given):
            builder.emit_func_output(builder.emit(relax.op.nn.attention(*given, causal_mask=mask)))
        mod = builder.get()
        assert with_attention(mod, resolve_target("llvm")) is mod
