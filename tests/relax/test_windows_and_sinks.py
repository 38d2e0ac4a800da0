"""Attention with sliding windows and sinks, as models write them out: one kernel, right at any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import IRModule, relax, tirx
from written_attention import DIM, HEADS, Case, added, chosen, distance, kernels, number, op, scores_of, shape

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.relax.attention import attentions
from tvm_axe.relax.fuse import fuse

CPU, WINDOW = resolve_target("llvm"), 37


def weighed(emit: Any, scores: Any, v: Any) -> Any:
    return emit(op.matmul(emit(op.nn.softmax(scores)), v))


def by_and(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """As transformers has it: keys up to the query's own, and behind those before the window."""
    scores = scores_of(emit, q, k)
    far = distance(emit, scores)
    seen = emit(op.less_equal(far, relax.const(0, "int64")))
    near = emit(op.greater(far, relax.const(-WINDOW, "int64")))
    mask = emit(op.where(emit(op.logical_and(seen, near)), number(0.0, scores), number(-np.inf, scores)))
    return weighed(emit, emit(op.add(scores, mask)), v)


def by_or(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """Scores of what isn't seen are replaced."""
    scores = scores_of(emit, q, k)
    far = distance(emit, scores)
    later = emit(op.greater(far, relax.const(0, "int64")))
    passed = emit(op.less_equal(far, relax.const(-WINDOW, "int64")))
    hidden = emit(op.logical_or(later, passed))
    return weighed(emit, emit(op.where(hidden, number(-np.inf, scores), scores)), v)


def by_triangles(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """What a lower triangle leaves of an upper one, as masks of older models are."""
    scores = scores_of(emit, q, k)
    queries, keys = shape(scores)[-2:]
    ones = emit(op.broadcast_to(relax.const(np.ones((1,), str(scores.ty.dtype))), (queries, keys)))
    shift = keys - queries
    band = emit(op.triu(emit(op.tril(ones, shift)), shift - (WINDOW - 1)))
    hidden = emit(op.equal(band, number(0.0, scores)))
    mask = emit(op.where(hidden, number(-np.inf, scores), number(0.0, scores)))
    return weighed(emit, emit(op.add(scores, mask)), v)


def exact(arrays: list[np.ndarray], sinks: np.ndarray | None = None, window: int | None = WINDOW) -> np.ndarray:
    """In float64, causal."""
    q, *parts = (each.astype("float64").swapaxes(1, 2) for each in arrays)
    k, v = (np.concatenate(parts[at::2], 2) for at in (0, 1))
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], 1) for each in (k, v))
    scores = q @ k.swapaxes(2, 3) * q.shape[3] ** -0.5
    rows, columns = np.indices(scores.shape[2:])
    before = rows + scores.shape[3] - scores.shape[2] - columns
    scores = np.where((before >= 0) & (before < (window or 1 << 40)), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype("float64").reshape(1, -1, 1, 1) - top)
    return (weights / total @ v).swapaxes(1, 2)


WINDOWS = {
    "and": Case(by_and, True), "or": Case(by_or, True), "triangles": Case(by_triangles, True),
    "and, behind a cache": Case(by_and, True, others="before"),
}  # fmt: skip
SIZES = ((1, 1, 70), (2, 5, 3), (2, 64, 64), (1, 130, 200))
"""A batch, how many tokens there are, and how many others."""


@pytest.mark.parametrize("name", WINDOWS)
def test_every_window_is_found(name: str) -> None:
    for batch, tokens in ((None, None), (2, None), (None, 80), (2, 80)):
        (match,) = attentions(WINDOWS[name].model(batch, tokens=tokens)["main"]).values()
        assert match.mask == (True, WINDOW) and match.scale is None


@pytest.mark.parametrize("name", ["or", "and, behind a cache"])
def test_one_kernel_is_right_at_any_length(name: str) -> None:
    case = WINDOWS[name]
    exe = axe.compile(case.model(None), work_dir=None, keep=False)
    assert len(kernels(exe.module)) == 1 and "softmax" not in exe.module.script()
    for sizes in SIZES:
        given = case.arrays(*sizes)
        np.testing.assert_allclose(exe(*given), exact(given), rtol=2e-5, atol=2e-5)


def test_a_window_of_all_keys_is_none() -> None:
    (match,) = attentions(WINDOWS["and"].model(2, tokens=WINDOW)["main"]).values()
    assert match.mask == (True, None)


def holed(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """Causal, without one key behind each query."""
    scores = scores_of(emit, q, k)
    far = distance(emit, scores)
    later = emit(op.greater(far, relax.const(0, "int64")))
    hole = emit(op.equal(far, relax.const(-WINDOW, "int64")))
    return weighed(emit, emit(op.where(emit(op.logical_or(later, hole)), number(-np.inf, scores), scores)), v)


def both_ways(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """A window around each query."""
    scores = scores_of(emit, q, k)
    far = distance(emit, scores)
    hidden = emit(
        op.logical_or(emit(op.greater(far, relax.const(9, "int64"))), emit(op.less(far, relax.const(-9, "int64"))))
    )
    return weighed(emit, emit(op.where(hidden, number(-np.inf, scores), scores)), v)


@pytest.mark.parametrize("build", [holed, both_ways])
@pytest.mark.parametrize("tokens", [None, 80])
def test_any_other_mask_is_none(build: Any, tokens: int | None) -> None:
    assert not attentions(Case(build).model(None, tokens=tokens)["main"])


@pytest.mark.parametrize("causal", [False, True])
def test_an_operators_bias_that_is_a_mask_is_one(causal: bool) -> None:
    """As torch.export has scaled_dot_product_attention of a mask."""
    n, dtype = 80, "float32"
    params = [relax.Var(name, relax.TensorType((2, n, HEADS, DIM), dtype)) for name in "qkv"]
    before = np.subtract.outer(np.arange(n), np.arange(n))
    hidden = (before < 0) | (before >= WINDOW) if causal else np.zeros((n, n), bool)
    bias = relax.const(np.where(hidden, -np.inf, 0).astype(dtype).reshape(1, 1, n, n))
    made = relax.BlockBuilder()
    with made.function("main", params):
        with made.dataflow():
            out = made.emit_output(op.nn.attention(*params, bias=bias))
        made.emit_func_output(out)
    (match,) = attentions(made.get()["main"]).values()
    assert match.mask == ((True, WINDOW) if causal else (False, None))
    exe = axe.compile(made.get(), work_dir=None, keep=False)
    assert len(kernels(exe.module)) == 1
    given = [np.random.default_rng(1).standard_normal((2, n, HEADS, DIM)).astype(dtype) for _ in params]
    if causal:
        np.testing.assert_allclose(exe(*given), exact(given), rtol=2e-5, atol=2e-5)


class Sunk(Case):
    """Attention with sinks as gpt-oss has it, of a window or causal."""

    def __init__(self, build: Any, wide: bool = False, **options: Any) -> None:
        super().__init__(build, True, **options)
        self.wide = wide

    def model(self, batch: int | None, dtype: str = "float32", tokens: int | None = None, dim: int = DIM) -> IRModule:
        sinks = relax.Var("sinks", relax.TensorType((HEADS,), dtype))
        b = batch or tirx.Var("b", "int64")
        n, p = tokens or tirx.Var("n", "int64"), tirx.Var("p", "int64")
        keys = {"none": [n], "before": [p, n]}[self.others]
        shapes = [(n, HEADS), *((each, self.kv_heads) for each in keys for _ in "kv")]
        params = [relax.Var(f"x{at}", relax.TensorType((b, *of, dim), dtype)) for at, of in enumerate(shapes)]
        made = relax.BlockBuilder()
        emit = made.emit
        with made.function("main", [*params, sinks]):
            with made.dataflow():
                q, *parts = (emit(op.permute_dims(each, [0, 2, 1, 3])) for each in params)
                k, v = parts[:2]
                if len(parts) > 2:
                    k, v = (emit(op.concat([parts[at], parts[at + 2]], 2)) for at in (0, 1))
                out = emit(op.permute_dims(self.sunk(emit, q, k, v, sinks), [0, 2, 1, 3]))
                out = made.emit_output(out)
            made.emit_func_output(out)
        return made.get()

    def sunk(self, emit: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
        if self.kv_heads < HEADS:
            k, v = (emit(op.repeat(each, HEADS // self.kv_heads, 1)) for each in (k, v))
        masked = self.build(emit, q, k)
        batch, heads, queries, keys = shape(masked)
        sink = emit(op.broadcast_to(emit(op.reshape(sinks, (1, HEADS, 1, 1))), (batch, heads, queries, 1)))
        combined = emit(op.concat([masked, sink], -1))
        combined = emit(op.subtract(combined, emit(op.max(combined, -1, keepdims=True))))
        if self.wide:
            combined = emit(op.astype(combined, "float32"))
        weights = emit(op.nn.softmax(combined))
        if self.wide:
            weights = emit(op.astype(weights, str(v.ty.dtype)))
        kept = emit(op.strided_slice(weights, [3], [0], [keys]))
        return emit(op.matmul(kept, v))


def windowed(emit: Any, q: Any, k: Any) -> Any:
    scores = scores_of(emit, q, k)
    far = distance(emit, scores)
    seen = emit(op.less_equal(far, relax.const(0, "int64")))
    near = emit(op.greater(far, relax.const(-WINDOW, "int64")))
    mask = emit(op.where(emit(op.logical_and(seen, near)), number(0.0, scores), number(-np.inf, scores)))
    return emit(op.add(scores, mask))


def causally(emit: Any, q: Any, k: Any) -> Any:
    scores = scores_of(emit, q, k)
    seen = emit(op.less_equal(distance(emit, scores), relax.const(0, "int64")))
    mask = emit(op.where(seen, number(0.0, scores), number(-np.inf, scores)))
    return emit(op.add(scores, mask))


SINKS = {
    "window": (Sunk(windowed, kv_heads=2), WINDOW),
    "causal": (Sunk(causally, kv_heads=2), None),
    "behind a cache": (Sunk(windowed, others="before"), WINDOW),
    "in float32": (Sunk(windowed, wide=True, kv_heads=2), WINDOW),
}


def sunk_arrays(case: Sunk, sizes: tuple[int, int, int], dtype: str = "float32", dim: int = DIM) -> list[np.ndarray]:
    sinks = np.random.default_rng(2).uniform(-3, 6, HEADS).astype(dtype)
    return [*case.arrays(*sizes, dtype, dim), sinks]


@pytest.mark.parametrize("name", ["window", "causal", "behind a cache"])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 80), (None, None)])
def test_sinks_are_found_and_right(name: str, batch: int | None, tokens: int | None) -> None:
    case, window = SINKS[name]
    if tokens is not None and case.others == "before":
        tokens = None
    model = case.model(batch, tokens=tokens)
    (match,) = attentions(model["main"]).values()
    assert match.mask == (True, window) and match.sinks is not None
    exe = axe.compile(model, work_dir=None, keep=False)
    assert len(kernels(exe.module)) == 1 and "softmax" not in exe.module.script()
    for sizes in SIZES:
        given = sunk_arrays(case, (batch or sizes[0], tokens or sizes[1], sizes[2]))
        np.testing.assert_allclose(exe(*given), exact(given[:-1], given[-1], window), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "batch", "tokens"), [("window", 2, 80), ("causal", None, None)])
def test_on_a_mesh_devices_have_the_sinks_of_their_heads(
    name: str, batch: int | None, tokens: int | None, workers: Any
) -> None:
    case, window = SINKS[name]
    exe = axe.compile(case.model(batch, tokens=tokens), mesh={"tp": 2}, work_dir=None, keep=False)
    (func,) = kernels(exe.module)
    assert str(func.attrs[KERNEL]) == "attention"
    for sizes in SIZES:
        given = sunk_arrays(case, (batch or sizes[0], tokens or sizes[1], sizes[2]))
        found = np.asarray(exe.run(workers(2), *given))
        np.testing.assert_allclose(found, exact(given[:-1], given[-1], window), rtol=2e-5, atol=2e-5)


def compiled_for_both(mod: IRModule, gpu: Any) -> relax.VirtualMachine:
    """What the model is on a CPU by the same kernel, of which a cubin was made."""
    lowered = with_tile_kernels(mod, gpu)
    (kernel,) = [f for v, f in lowered.functions_items() if "attention" in str(v.name_hint)]
    builder.build_kernels(IRModule({"attention": kernel.with_attr("global_symbol", "attention")}), gpu)
    rest = tvm.transform.Sequential(_tvm.relax_lowering(CPU, "cpu"))
    return relax.VirtualMachine(builder.build_program(with_tile_kernels(mod, CPU), CPU, rest), tvm.cpu())


@pytest.mark.parametrize("name", SINKS)
@pytest.mark.parametrize(("batch", "tokens"), [(2, 70), (2, None)])
def test_one_kernel_for_a_gpu(name: str, batch: int, tokens: int | None) -> None:
    """Compiled for it; here it is right on a CPU."""
    (case, window), gpu = SINKS[name], resolve_target("cuda:sm_90a")
    if tokens is not None and case.others == "before":
        pytest.skip("its keys are never all known")
    mod = fuse(case.model(batch, "float16", tokens, 64), gpu)
    names = [str(f.attrs[KERNEL]) for f in mod.functions.values() if KERNEL in (f.attrs or {})]
    assert names == ["attention"] and "softmax" not in mod.script()
    machine = compiled_for_both(mod, gpu)
    for sizes in SIZES:
        given = sunk_arrays(case, (batch, tokens or sizes[1], sizes[2]), "float16", 64)
        want = exact(given[:-1], given[-1], window)
        found = machine["main"](*map(tvm.runtime.tensor, given)).numpy()
        assert np.linalg.norm(found - want) / np.linalg.norm(want) < 2e-3


@pytest.mark.parametrize("build", [windowed, causally])
def test_one_query_is_decoding(build: Any) -> None:
    """Over a cache whose heads come first."""
    batch, keys, dim, gpu = 2, 90, 64, resolve_target("cuda:sm_90a")
    shapes = [(batch, HEADS, 1, dim), *[(batch, HEADS, keys, dim)] * 2, (HEADS,)]
    params = [relax.Var(f"x{at}", relax.TensorType(own, "float16")) for at, own in enumerate(shapes)]
    made = relax.BlockBuilder()
    with made.function("main", params):
        with made.dataflow():
            out = made.emit_output(Sunk(build).sunk(made.emit, *params))
        made.emit_func_output(out)
    mod = fuse(made.get(), gpu)
    assert [str(f.attrs[KERNEL]) for f in mod.functions.values() if KERNEL in (f.attrs or {})] == ["decode_attention"]
    rng = np.random.default_rng(4)
    given = [rng.standard_normal(own).astype("float16") for own in shapes]
    found = compiled_for_both(mod, gpu)["main"](*map(tvm.runtime.tensor, given)).numpy()
    window = WINDOW if build is windowed else None
    want = exact([each.swapaxes(1, 2) for each in given[:3]], given[3], window).swapaxes(1, 2)
    assert np.linalg.norm(found - want) / np.linalg.norm(want) < 2e-3


def test_what_keeps_another_score_is_no_sink() -> None:
    """The first of each row is left out, not the last."""

    class Other(Sunk):
        def sunk(self, emit: Any, q: Any, k: Any, v: Any, sinks: Any) -> Any:
            masked = self.build(emit, q, k)
            batch, heads, queries, keys = shape(masked)
            sink = emit(op.broadcast_to(emit(op.reshape(sinks, (1, HEADS, 1, 1))), (batch, heads, queries, 1)))
            weights = emit(op.nn.softmax(emit(op.concat([masked, sink], -1))))
            return emit(op.matmul(emit(op.strided_slice(weights, [3], [1], [keys + 1])), v))

    assert not attentions(Other(windowed).model(2, tokens=80)["main"])


def test_plain_causal_masks_have_no_window() -> None:
    for build in (chosen, added):
        (match,) = attentions(Case(build, True).model(None)["main"]).values()
        assert match.mask == (True, None) and match.sinks is None
