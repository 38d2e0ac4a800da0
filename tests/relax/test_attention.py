"""Attention is found in a model as importers write it, and computed by one kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tvm import relax

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.relax.attention import with_attention

TARGET = resolve_target("llvm", threads=2)
HEADS, QUERIES, KEYS, DIM = 3, 33, 50, 24


def model(build, *shapes):
    """A model of parameters with these shapes."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(out)
    return builder.get()


def plain(emit, q, k, v, scale=None, mask=None):
    """[1, heads, tokens, dim], the scale on the scores."""
    scores = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
    scores = emit(relax.op.multiply(scores, relax.const(scale or DIM**-0.5, "float32")))
    if mask is not None:
        scores = emit(relax.op.add(scores, relax.const(mask)))
    return emit(relax.op.matmul(emit(relax.op.nn.softmax(scores)), v))


def torchs(emit, q, k, v):
    """What torch.export makes of scaled_dot_product_attention: a scale on either factor, heads merged, rows guarded."""
    root = relax.const(DIM**-0.25, "float32")
    q = emit(relax.op.reshape(emit(relax.op.multiply(q, root)), (HEADS, QUERIES, DIM)))
    k = emit(relax.op.multiply(emit(relax.op.permute_dims(k, [0, 1, 3, 2])), root))
    k = emit(relax.op.reshape(emit(relax.op.broadcast_to(k, (1, HEADS, DIM, KEYS))), (HEADS, DIM, KEYS)))
    scores = emit(relax.op.reshape(emit(relax.op.matmul(q, k)), (1, HEADS, QUERIES, KEYS)))
    weights = emit(relax.op.nn.softmax(scores))
    seen = emit(relax.op.logical_not(emit(relax.op.equal(scores, relax.const(-math.inf, "float32")))))
    seen = emit(relax.op.max(emit(relax.op.astype(seen, "int8")), axis=[-1], keepdims=True))
    empty = emit(relax.op.logical_not(emit(relax.op.astype(seen, "bool"))))
    zeros = emit(relax.op.full_like(weights, relax.const(0.0, "float32")))
    weights = emit(relax.op.reshape(emit(relax.op.where(empty, zeros, weights)), (HEADS, QUERIES, KEYS)))
    out = emit(relax.op.matmul(weights, emit(relax.op.reshape(v, (HEADS, KEYS, DIM)))))
    return emit(relax.op.reshape(out, (1, HEADS, QUERIES, DIM)))


def expected(q, k, v, scale=DIM**-0.5, mask=0.0):
    q, k, v = (each.astype("float64") for each in (q, k, v))
    scores = q @ k.swapaxes(-1, -2) * scale + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype="float32") for shape in shapes]


SHAPES = ((1, HEADS, QUERIES, DIM), (1, HEADS, KEYS, DIM), (1, HEADS, KEYS, DIM))
LATER = np.where(np.tri(QUERIES, KEYS, KEYS - QUERIES, dtype=bool), 0, -np.inf).astype("float32")
SOME = np.where(np.random.default_rng(1).random((QUERIES, KEYS)) < 0.5, 0, -1e9).astype("float32")


@pytest.mark.parametrize(
    ("build", "known"),
    [
        (plain, {}),
        (torchs, {}),
        (lambda *given: plain(*given, scale=0.7), {"scale": 0.7}),
        (lambda *given: plain(*given, mask=LATER), {"mask": LATER}),
        (lambda *given: plain(*given, mask=np.zeros_like(LATER)), {}),
    ],
    ids=["plain", "torch", "another scale", "causal", "nothing masked"],
)
def test_what_is_found_is_one_kernel_and_right(build, known):
    mod = model(build, *SHAPES)
    text = with_attention(mod, TARGET)["main"].script()
    assert "call_tir(attention" in text and "softmax" not in text
    given = arrays(*SHAPES)
    got = axe.compile(mod, target=TARGET, work_dir=None)(*given)
    want = expected(*given, **known)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_any_other_mask_is_left_and_right():
    mod = model(lambda *given: plain(*given, mask=SOME), *SHAPES)
    assert "softmax" in with_attention(mod, TARGET)["main"].script()
    given = arrays(*SHAPES)
    got = axe.compile(mod, target=TARGET, work_dir=None)(*given)
    want = expected(*given, mask=SOME.astype("float64"))
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_few_queries_are_left():
    mod = model(plain, (1, HEADS, 2, DIM), *SHAPES[1:])
    assert with_attention(mod, TARGET) is mod


def test_the_operator():
    mod = model(
        lambda emit, q, k, v: emit(relax.op.nn.attention(q, k, v, causal_mask="BottomRight")),
        (2, QUERIES, HEADS, DIM), (2, KEYS, HEADS, DIM), (2, KEYS, HEADS, DIM),
    )  # fmt: skip
    assert "nn.attention" not in with_attention(mod, TARGET)["main"].script()
    given = arrays((2, QUERIES, HEADS, DIM), (2, KEYS, HEADS, DIM), (2, KEYS, HEADS, DIM))
    got = axe.compile(mod, target=TARGET, work_dir=None)(*given)
    want = expected(*(each.swapaxes(1, 2) for each in given), mask=LATER).swapaxes(1, 2)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


def test_a_softmax_over_another_axis_is_no_attention():
    def build(emit, q, k, v):
        scores = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
        return emit(relax.op.matmul(emit(relax.op.nn.softmax(scores, axis=2)), v))

    mod = model(build, *SHAPES)
    assert with_attention(mod, TARGET) is mod
