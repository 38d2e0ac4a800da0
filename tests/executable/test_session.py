"""Sessions of models on one device: called by name, right, weights placed once, nothing lost when a call fails."""

from __future__ import annotations

import runpy
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.executable import Session, write_safetensors

EXAMPLE = Path(__file__).parents[2] / "examples" / "relax_session.py"


@pytest.fixture(scope="module")
def decoder() -> SimpleNamespace:
    """The example's decoder."""
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "packed"])
def exe(request: pytest.FixtureRequest, decoder: SimpleNamespace) -> axe.Executable:
    return axe.compile(decoder.export(), work_dir=None, pack_weights=request.param)


@pytest.fixture
def model(exe: axe.Executable, decoder: SimpleNamespace) -> Iterator[Session]:
    with exe.load(decoder.weights()) as session:
        yield session


@pytest.fixture(scope="module")
def prompt(decoder: SimpleNamespace) -> tuple[np.ndarray, ...]:
    ids = np.random.default_rng(5).integers(0, 64, (1, 7), dtype="int32")
    return (ids, *decoder.rotations(0, 7), decoder.causal(7))


def test_example(decoder: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert decoder.main() < 1e-6
    assert "copied for 7 calls: 1344 bytes, beside 78464 of weights once" in capsys.readouterr().out


def in_numpy(weights: dict[str, np.ndarray], ids: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The decoder's prefill in float64."""
    w = {name: array.astype("float64") for name, array in weights.items()}
    cos, sin, mask = (array.astype("float64") for array in others)

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    def rotated(x: np.ndarray) -> np.ndarray:
        half = x.shape[-1] // 2
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], -1) * sin

    x = w["embedding.weight"][ids[0]]
    for n in range(2):
        own = {name.removeprefix(f"layers.{n}."): array for name, array in w.items()}
        rows = (norm(x, own["norm1.weight"]) @ own["qkv.weight"].T).reshape(len(x), 8, 8)
        q, k, v = rotated(rows[:, :4]), rotated(rows[:, 4:6]), rows[:, 6:]
        k, v = k.repeat(2, 1), v.repeat(2, 1)
        scores = np.exp(np.einsum("qhd,khd->hqk", q, k) / 8**0.5 + mask)
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v)
        x = x + attended.reshape(len(x), 32) @ own["out.weight"].T
        gate, up = np.split(norm(x, own["norm2.weight"]) @ own["gate_up.weight"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ own["down.weight"].T
    return norm(x, w["norm.weight"]) @ w["head.weight"].T


def test_functions_are_right_and_results_stay_where_they_are(
    model: Session, decoder: SimpleNamespace, prompt: tuple[np.ndarray, ...]
) -> None:
    assert set(model.functions) == {"prefill", "decode"} and set(model.functions) <= set(dir(model))
    want = in_numpy(decoder.weights(), *prompt)
    placed = model.copied
    assert placed == sum(array.nbytes for array in decoder.weights().values())
    logits, *_ = model.prefill(*prompt)
    assert model.copied - placed == sum(array.nbytes for array in prompt)
    assert np.abs(np.asarray(logits)[0] - want).max() / np.abs(want).max() < 1e-5
    ids, cos, sin, mask = prompt
    _, *caches = model["prefill"](ids[:, :6], cos[:6], sin[:6], mask=mask[:6, :6])
    assert [cache.shape for cache in caches] == [(1, 6, 2, 8)] * 4 and caches[0].dtype == "float32"
    before = model.copied
    logits, *caches = model.decode(ids[:, 6:], cos[6:], sin[6:], *caches)
    assert model.copied - before == 4 + 32 + 32  # a token and its rotation; neither weights nor caches
    assert np.abs(logits.numpy()[0, 0] - want[-1]).max() / np.abs(want).max() < 1e-5
    np.testing.assert_array_equal(np.from_dlpack(caches[1]), caches[1].numpy())
    assert min(model.decode.time(ids[:, 6:], cos[6:], sin[6:], *caches, repeat=2)) > 0
    assert "prefill(ids: int32[1, n]" in model.show() and repr(caches[0]).startswith(
        "<float32[1, 7, 2, 8] in a session"
    )


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 4e-3), ("bfloat16", 3e-2)])
def test_types_of_half_the_width(decoder: SimpleNamespace, prompt: Any, dtype: str, bound: float) -> None:
    weights = {name: array.astype(dtype) for name, array in decoder.weights().items()}
    ids, *others = prompt
    others = [array.clip(-1e4, None).astype(dtype) for array in others]
    with axe.compile(decoder.export(dtype), work_dir=None).load(weights) as model:
        got = model.prefill(ids, *others)[0].numpy()[0].astype("float64")
    want = in_numpy(weights, ids, *others)
    assert np.abs(got - want).max() / np.abs(want).max() < bound


def test_all_that_is_wrong_with_inputs_is_listed(model: Session, prompt: tuple[np.ndarray, ...]) -> None:
    ids, cos, sin, mask = prompt
    before = model.copied
    with pytest.raises(axe.InputError) as raised:
        model.prefill(ids.astype("int64"), cos[1:], sin[:, 0], [1.0])
    for problem in (
        "prefill takes ids: int32[1, n], cos: float32[n, 1, 8]",
        "  ids is int32; got an array of int64",
        "  sin has the shape (n, 1, 8); got an array of (7, 8)",
        "  mask must be a numpy array; got list",
    ):
        assert problem in str(raised.value)
    with pytest.raises(axe.InputError, match="cos's dimension 0, n, is 6, and ids's dimension 1 is 7"):
        model.prefill(ids, cos[1:], sin, mask)
    with pytest.raises(axe.InputError, match="'mask' is missing"):
        model.prefill(ids, cos, sin)
    with pytest.raises(axe.InputError, match="'cos' is given twice"):
        model.prefill(ids, cos, sin, mask, cos=cos)
    with pytest.raises(axe.LowerError, match="model has no function 'forward'; it has "):
        model["forward"]
    with pytest.raises(AttributeError, match="a session of model has no 'forward'; its functions are "):
        model.forward()
    assert model.copied == before


def test_a_call_that_fails_loses_nothing(exe: axe.Executable, model: Session, prompt: tuple[np.ndarray, ...]) -> None:
    want, cache, *_ = model.prefill(*prompt)
    with pytest.raises(axe.InputError, match=r"another; np\.asarray"), exe.load(_weights(model)) as other:
        other.decode(prompt[0][:, :1], prompt[1][:1], prompt[2][:1], cache, cache, cache, cache)
    got, *_ = model.prefill(*prompt)
    np.testing.assert_array_equal(got.numpy(), want.numpy())


def _weights(model: Session) -> dict[str, np.ndarray]:
    return runpy.run_path(str(EXAMPLE))["weights"]()


def test_threads_call_one_after_the_other(model: Session, prompt: tuple[np.ndarray, ...]) -> None:
    want = np.asarray(model.prefill(*prompt)[0])
    wrong: list[object] = []

    def call() -> None:
        try:
            wrong.extend(0 for _ in range(20) if not np.array_equal(model.prefill(*prompt)[0], want))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_closed_session(exe: axe.Executable, decoder: SimpleNamespace, prompt: tuple[np.ndarray, ...]) -> None:
    model = exe.load(decoder.weights())
    logits, *_ = model.prefill(*prompt)
    model.close()
    model.close()
    for use in (logits.numpy, lambda: model.prefill(*prompt), lambda: np.from_dlpack(logits)):
        with pytest.raises(axe.LowerError, match="the session of model is closed; load the model again"):
            use()
    assert repr(model) == f"<a closed session of model: {', '.join(model.functions)}; 15 weights>"


def test_what_is_saved_is_loaded(exe: axe.Executable, decoder: SimpleNamespace, tmp_path: Path, prompt: Any) -> None:
    exe.save(tmp_path / "model.axe")
    write_safetensors(tmp_path / "model.safetensors", decoder.weights())
    with axe.Executable.load(tmp_path / "model.axe").load(tmp_path / "model.safetensors") as model:
        got = model.prefill(*prompt)[0].numpy()
    want = in_numpy(decoder.weights(), *prompt)
    assert np.abs(got[0] - want).max() / np.abs(want).max() < 1e-5


# ---- Weights ---------------------------------------------------------------------------------------------------------


def test_all_that_is_wrong_with_weights_is_listed(exe: axe.Executable, decoder: SimpleNamespace) -> None:
    weights = decoder.weights()
    weights["more"] = weights.pop("norm.weight")
    weights["head.weight"] = weights["head.weight"].T
    weights["layers.0.out.weight"] = weights["layers.0.out.weight"].astype("float16")
    weights["layers_1.out_weight"] = weights.pop("layers.1.out.weight")  # which is meant
    with pytest.raises(axe.InputError) as raised:
        exe.load(weights)
    assert str(raised.value).splitlines()[1:] == [
        "  layers.0.out.weight is float32; got an array of float16",
        "  norm.weight: float32[32] is missing",
        "  head.weight has the shape (64, 32); got an array of (32, 64)",
        "  'more' is given, and no function takes such a weight: leave it out",
    ]
    with pytest.raises(
        axe.InputError, match=r"embedding\.weight could be any of 'embedding_weight', 'Embedding.weight'"
    ):
        exe.load({"embedding_weight": weights["more"], "Embedding.weight": weights["more"]})
    with pytest.raises(axe.InputError, match="15 weights are taken and 0 given"):
        exe.load()
    with pytest.raises(axe.InputError, match="params is int; valid are arrays by name"):
        exe.load(3)


def test_weights_in_order(exe: axe.Executable, decoder: SimpleNamespace, prompt: tuple[np.ndarray, ...]) -> None:
    weights = decoder.weights()
    with exe.load(list(weights.values())) as model, exe.load(weights) as named:
        np.testing.assert_array_equal(model.prefill(*prompt)[0], named.prefill(*prompt)[0])


@I.ir_module
class Several:
    """Parameters of all kinds, weights among inputs, and results of all kinds."""

    @R.function
    def main(
        x: R.Tensor(("n",), "float32"),
        w: R.Tensor((3,), "float32"),
        pair: R.Tuple(R.Tensor(("n",), "float32"), R.Tuple(R.Tensor((), "float32"))),
        extents: R.Shape(["m", 2]),
        number: R.Prim("int64"),
        other: R.Object,
    ) -> R.Tuple(R.Tensor, R.Tuple(R.Tensor, R.Object), R.Shape):
        m = T.int64()
        first = R.add(R.multiply(x, pair[0]), pair[1][0])
        with_weight = R.add(first, R.sum(w))
        ones = R.ones(R.shape([m, 2]), "float32")
        return (with_weight, (ones, other), R.shape([m, 2]))


def test_arguments_and_results_of_all_kinds() -> None:
    x = np.arange(4, dtype="float32")
    with axe.compile(Several, work_dir=None).load({"w": np.ones(3, "float32")}) as model:
        assert model.main.inputs == ("x", "pair", "extents", "number", "other")
        first, (ones, other), extents = model.main(x, (x, [np.float32(2)]), (3, 2), 7, tvm.runtime.tensor(x))
        np.testing.assert_array_equal(first, x * x + 5)
        assert ones.shape == (3, 2) and tuple(extents) == (3, 2)
        again, *_ = model.main(first, (x, [np.float32(0)]), extents, number=np.int64(1), other=other)
        np.testing.assert_array_equal(again, (x * x + 5) * x + 3)
        with pytest.raises(axe.InputError) as raised:
            model.main(x, (x,), (3, 3), "seven", other)
        for problem in (
            "pair is a sequence of 2; got 1 values", "extents has the shape (m, 2); got (3, 3)",
            "number is a number; got str",
        ):  # fmt: skip
            assert problem in str(raised.value)


def test_only_models_are_loaded(decoder: SimpleNamespace, exe: axe.Executable) -> None:
    @T.prim_func(s_tir=True)
    def copy(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("copy"):
                vi = T.axis.spatial(4, i)
                B[vi] = A[vi]

    with pytest.raises(
        axe.LowerError,
        match=r"copy: load\(params\) is of a Relax model, and this is a function ",
    ):
        axe.compile(copy, work_dir=None).load({})
    with pytest.raises(axe.LowerError, match="runs in this process, without workers"):
        exe.load(decoder.weights(), workers=object())
    with pytest.raises(axe.LowerError, match="load takes workers, if there are any, and params; got 2 values more"):
        exe.load(decoder.weights(), {})
