"""Attention is found in a model as importers write it, and computed by one kernel on either target.

A GPU's kernels are those of the CPU here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.relax.attended import with_attention
from tvm_axe.relax.attention import attentions
from tvm_axe.relax.fuse import fuse

TARGET = resolve_target("llvm", threads=2)
GPU = resolve_target("cuda:sm_90a")
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


def heads_last(emit, q, k, v):
    """[1, tokens, heads, dim], the keys transposed at once, as ONNX has it."""
    q, v = (emit(relax.op.permute_dims(each, [0, 2, 1, 3])) for each in (q, v))
    scores = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, [0, 2, 3, 1]))))
    scores = emit(relax.op.divide(scores, relax.const(DIM**0.5, "float32")))
    return emit(relax.op.matmul(emit(relax.op.nn.softmax(scores)), v))


def grouped(emit, q, k, v):
    """Each head of keys and values serves neighbouring heads of queries, as transformers has it."""
    batch, heads, tokens, dim = (int(extent) for extent in k.ty.shape)
    times = int(q.ty.shape[1]) // heads

    def repeated(value):
        wide = relax.op.broadcast_to(emit(relax.op.expand_dims(value, 2)), (batch, heads, times, tokens, dim))
        return emit(relax.op.reshape(emit(wide), (batch, heads * times, tokens, dim)))

    return plain(emit, q, repeated(k), repeated(v))


def merged(emit, q, k, v):
    """Two batches; the leading dimensions of the values and of the weights are one."""
    batch, heads, queries, keys, dim = 2, HEADS, QUERIES, KEYS, DIM
    scores = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
    weights = emit(relax.op.nn.softmax(emit(relax.op.multiply(scores, relax.const(dim**-0.5, "float32")))))
    weights = emit(relax.op.reshape(weights, (batch * heads, queries, keys)))
    return emit(relax.op.matmul(weights, emit(relax.op.reshape(v, (batch * heads, keys, dim)))))


TOKENS_FIRST = tuple((batch, tokens, heads, dim) for batch, heads, tokens, dim in SHAPES)


def operator(shapes=TOKENS_FIRST, **attributes):
    return lambda emit, q, k, v: emit(relax.op.nn.attention(q, k, v, **attributes)), shapes


FOUND = {
    "plain": (plain, SHAPES),
    "torch": (torchs, SHAPES),
    "another scale": (lambda *given: plain(*given, scale=0.7), SHAPES),
    "causal": (lambda *given: plain(*given, mask=LATER), SHAPES),
    "nothing masked": (lambda *given: plain(*given, mask=np.zeros_like(LATER)), SHAPES),
    "heads last": (heads_last, TOKENS_FIRST),
    "grouped": (grouped, ((2, 4, QUERIES, DIM), (2, 2, KEYS, DIM), (2, 2, KEYS, DIM))),
    "merged": (merged, tuple((2, *shape[1:]) for shape in SHAPES)),
    "operator": operator(causal_mask="BottomRight"),
    "operator, scaled": operator(tuple((2, *shape[1:]) for shape in TOKENS_FIRST), scale=0.4),
}
KNOWN = {"another scale": {"scale": 0.7}, "causal": {"mask": LATER}, "operator, scaled": {"scale": 0.4}}
KNOWN["operator"] = KNOWN["causal"]


def check(name, got, given):
    """The result is that of numpy; of tokens before heads where the model has these so."""
    q, k, v = (each.swapaxes(1, 2) if FOUND[name][1][0][1] == QUERIES else each for each in given)
    times = q.shape[1] // k.shape[1]
    want = expected(q, *(each.repeat(times, axis=1) for each in (k, v)), **KNOWN.get(name, {}))
    want = want.swapaxes(1, 2) if name.startswith("operator") else want
    assert np.abs(got.reshape(want.shape) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_is_one_kernel_and_right(name):
    mod = model(FOUND[name][0], *FOUND[name][1])
    text = with_attention(mod, TARGET)["main"].script()
    assert "call_tir(attention" in text and "softmax" not in text and "nn.attention" not in text
    given = arrays(*FOUND[name][1])
    check(name, axe.compile(mod, target=TARGET, work_dir=None)(*given), given)


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_is_one_kernel_and_right_for_a_gpu(name):
    mod = fuse(model(FOUND[name][0], *FOUND[name][1]), GPU)
    kernels = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert [str(func.attrs.get(KERNEL)) for func in kernels if func.attrs.get(KERNEL)] == ["attention"]
    rest = tvm.transform.Sequential(_tvm.relax_lowering(TARGET, "cpu"))
    machine = relax.VirtualMachine(builder.build_program(with_tile_kernels(mod, TARGET), TARGET, rest), tvm.cpu())
    given = arrays(*FOUND[name][1])
    check(name, machine["main"](*map(tvm.runtime.tensor, given)).numpy(), given)


def test_what_stands_around_is_looked_through():
    (grouped_one,) = attentions(model(FOUND["grouped"][0], *FOUND["grouped"][1])["main"]).values()
    assert grouped_one.problem["kv_heads"] == 2
    (last,) = attentions(model(FOUND["heads last"][0], *FOUND["heads last"][1])["main"]).values()
    assert [source.order for source in (last.q, last.k, last.v)] == ["t", "t", "t"]
    (merged_one,) = attentions(model(FOUND["merged"][0], *FOUND["merged"][1])["main"]).values()
    assert (merged_one.batch, merged_one.problem["heads"]) == (1, 2 * HEADS)


def test_one_query_reads_a_cache_on_a_gpu():
    shapes = ((2, 4, 1, 64), (2, 2, 50, 64), (2, 2, 50, 64))
    mod = fuse(model(grouped, *shapes), GPU)
    (func,) = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc) and f.attrs.get(KERNEL)]
    assert str(func.attrs[KERNEL]) == "decode_attention"
    assert float(func.attrs[f"{KERNEL}.scale"]) == pytest.approx(DIM**-0.5)


def test_products_that_broadcast_are_left_and_right():
    """Two batches of one head, by one batch of two heads: as many heads of each, and twice as many of the product."""
    shapes = ((2, 1, QUERIES, DIM), (1, 2, KEYS, DIM), (1, 2, KEYS, DIM))
    mod = model(plain, *shapes)
    assert not attentions(mod["main"])
    given = arrays(*shapes)
    want = expected(*given)
    assert np.abs(axe.compile(mod, target=TARGET, work_dir=None)(*given) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_no_kernel_takes_are_left_and_right(scale):
    def build(emit, q, k, v):
        return emit(relax.op.nn.attention(q, k, v, scale=scale))

    mod = model(build, *TOKENS_FIRST)
    assert "nn.attention" in with_attention(mod, TARGET)["main"].script()
    assert not any(func.attrs.get(KERNEL) for func in fuse(mod, GPU).functions.values() if func.attrs)
    given = arrays(*TOKENS_FIRST)
    got = axe.compile(mod, target=TARGET, work_dir=None)(*given)
    want = expected(*(each.swapaxes(1, 2) for each in given), scale=scale).swapaxes(1, 2)
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


def test_a_softmax_over_another_axis_is_no_attention():
    def build(emit, q, k, v):
        scores = emit(relax.op.matmul(q, emit(relax.op.permute_dims(k, [0, 1, 3, 2]))))
        return emit(relax.op.matmul(emit(relax.op.nn.softmax(scores, axis=2)), v))

    mod = model(build, *SHAPES)
    assert with_attention(mod, TARGET) is mod


SHARED = {
    "heads of groups": ("grouped", FOUND["grouped"][1], {"x0": 1}, 1),
    "batches": ("grouped", FOUND["grouped"][1], {"x0": 0}, 1),
    "keys of one head": ("grouped", ((1, 4, QUERIES, DIM), (1, 1, KEYS, DIM), (1, 1, KEYS, DIM)), {"x0": 1}, 1),
    "three heads": ("causal", SHAPES, {"x0": 1}, 1),  # of which both devices compute the second
    "queries": ("causal", SHAPES, {"x0": 2}, 0),
    "queries without a mask": ("plain", SHAPES, {"x0": 2, "x1": None, "x2": None}, 1),
    "keys": ("causal", SHAPES, {"x1": 2, "x2": 2}, 0),
    "columns of values": ("causal", SHAPES, {"x2": 3}, 0),
}


@pytest.mark.parametrize("case", SHARED)
def test_devices_share_what_is_found(case, workers):
    """By a kernel, if each has heads of its own, and as the blocks say otherwise."""
    name, shapes, pins, kernels = SHARED[case]
    exe = axe.compile(model(FOUND[name][0], *shapes), mesh={"tp": 2}, work_dir=None, pins=pins)
    found = [func for func in exe.module.functions.values() if isinstance(func, tirx.PrimFunc)]
    assert sum(KERNEL in (func.attrs or {}) for func in found) == kernels
    given = arrays(*shapes)
    check(name, exe.run(workers(2), *given), given)
