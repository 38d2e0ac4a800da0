"""ONNX's recurrent layers and loops of a known number of steps, beside ONNX Runtime and ONNX's own samples."""

from __future__ import annotations

import contextlib
import io
import warnings
from typing import Any

import numpy as np
import pytest

import tvm_axe as axe
from tvm_axe.relax import from_onnx

onnx = pytest.importorskip("onnx", reason="its samples are the judge")
runtime = pytest.importorskip("onnxruntime", reason="it is the judge")
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT, INT32, INT64, BOOL = (getattr(onnx.TensorProto, each) for each in ("FLOAT", "INT32", "INT64", "BOOL"))
STEPS, BATCH, WIDTH, HIDDEN = 5, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LENGTHS = np.array([5, 2, 3], "int32")


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng([len(shape), *shape, seed]).standard_normal(shape).astype("float32")


def told(name: str, array: Any) -> Any:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def model_of(nodes: list[Any], inputs: dict[str, Any], weights: dict[str, Any], outputs: dict[str, int]) -> Any:
    graph = helper.make_graph(
        nodes,
        "graph",
        [told(name, each) if isinstance(each, np.ndarray) else each for name, each in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compare(model: Any, inputs: dict[str, Any], rtol: float = 1e-5, atol: float = 2e-6) -> None:
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = session.run(None, inputs)
    found = axe.compile(from_onnx(model), work_dir=None)(*inputs.values())
    for got, want in zip(found if isinstance(found, list | tuple) else [found], wanted, strict=True):
        got = np.asarray(got)
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def layer(
    operator: str, inputs: str = "BLHCP", outputs: str = "YHC", lengths: Any = LENGTHS, given: bool = False,
    **attributes: Any,
) -> tuple[Any, dict[str, Any]]:  # fmt: skip
    """A model of one layer, and its inputs: B, sequence_lens, initial_h, initial_c and P by their letters."""
    ways = 2 if attributes.get("direction") == "bidirectional" else 1
    gates, swapped = GATES[operator], bool(attributes.get("layout"))
    data = {"X": drawn(*((BATCH, STEPS) if swapped else (STEPS, BATCH)), WIDTH)}
    state = (BATCH, ways, HIDDEN) if swapped else (ways, BATCH, HIDDEN)
    every = {"B": drawn(ways, 2 * gates * HIDDEN), "L": lengths, "H": drawn(*state), "C": drawn(*state, seed=1)}
    every["P"] = drawn(ways, 3 * HIDDEN)
    weights = {"W": drawn(ways, gates * HIDDEN, WIDTH) / 2, "R": drawn(ways, gates * HIDDEN, HIDDEN) / 2}
    names = ["X", "W", "R"]
    for letter in "BLHCP"[: 5 if operator == "LSTM" else 3]:
        names.append(letter if letter in inputs else "")
        if letter in inputs:
            (data if letter in "HC" or (letter == "L" and given) else weights)[letter] = every[letter]
    asked = [f"out{each}" if each in outputs else "" for each in "YHC"[: 3 if operator == "LSTM" else 2]]
    node = helper.make_node(operator, names, asked, hidden_size=HIDDEN, **attributes)
    return model_of([node], data, weights, dict.fromkeys(filter(None, asked), FLOAT)), data


@pytest.fixture(scope="module")
def samples() -> dict[str, Any]:
    from onnx.backend.test.loader import load_model_tests

    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {each.name.removeprefix("test_"): each for each in load_model_tests(kind="node")}


SAMPLES = [
    *(f"{layer}_{way}" for layer in ("lstm", "gru", "simple_rnn") for way in ("defaults", "with_initial_bias")),
    *(f"{layer}_{way}" for layer in ("lstm", "gru", "simple_rnn") for way in ("batchwise", "reverse", "bidirectional")),
    "lstm_with_peepholes", "gru_seq_length", "rnn_seq_length", "scan_sum", "scan9_sum", "scan9_multi_state",
    "scan9_scalar", "loop11",
]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(samples: dict[str, Any], name: str) -> None:
    if name not in samples:
        pytest.skip(f"this onnx has no sample {name}")
    inputs, wanted = samples[name].data_sets[0]
    model, given = onnx.ModelProto(), []
    model.CopyFrom(samples[name].model)
    model.graph.ClearField("input")
    for value, array in zip(samples[name].model.graph.input, inputs, strict=True):
        if array.ndim < 2 and (array.dtype.kind == "b" or name == "loop11" and array.dtype == "int64"):
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            model.graph.input.append(value)
            given.append(array)
    found = axe.compile(from_onnx(model), work_dir=None)(*given)
    for got, want in zip(found if isinstance(found, list | tuple) else [found], wanted, strict=True):
        got = np.asarray(got)
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("operator", GATES)
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("given", [False, True])
def test_layers(operator: str, direction: str, given: bool) -> None:
    compare(*layer(operator, given=given, direction=direction))


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no inputs left over": ("LSTM", {"inputs": ""}),
    "no biases": ("GRU", {"inputs": "", "linear_before_reset": 1}),
    "linear before reset": ("GRU", {"linear_before_reset": 1, "direction": "bidirectional"}),
    "last states": ("LSTM", {"outputs": "C", "direction": "bidirectional"}),
    "a last state": ("GRU", {"outputs": "H"}),
    "outputs": ("RNN", {"outputs": "Y"}),
    "forget": ("LSTM", {"input_forget": 1, "inputs": "BH"}),
    "clip": ("LSTM", {"clip": 0.5}),
    "clip of GRU": ("GRU", {"clip": 0.5}),
    "clip of linear before reset": ("GRU", {"clip": 0.5, "linear_before_reset": 1}),
    "clip of RNN": ("RNN", {"clip": 0.5}),
    "no steps of a sequence": ("LSTM", {"lengths": np.array([0, 5, 1], "int32"), "direction": "bidirectional"}),
    "all steps": ("GRU", {"lengths": np.array([5, 5, 5], "int32")}),
    "activations": (
        "LSTM",
        {
            "activations": ["HardSigmoid", "LeakyRelu", "ScaledTanh"], "activation_alpha": [0.3, 0.2, 1.5],
            "activation_beta": [0.4, 0.7],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    operator, given = VARIANTS[name]
    compare(*layer(operator, **given))


ACTIVATIONS: dict[str, tuple[list[float], list[float]]] = {
    "Relu": ([], []), "Affine": ([0.5], [0.1]), "LeakyRelu": ([0.2], []), "ThresholdedRelu": ([0.3], []),
    "ScaledTanh": ([1.5], [0.6]), "HardSigmoid": ([0.3], [0.4]), "Elu": ([0.7], []), "Softsign": ([], []),
    "Softplus": ([], []), "Sigmoid": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("defaults", [True, False])
def test_activations(name: str, defaults: bool) -> None:
    alpha, beta = ACTIVATIONS[name]
    if defaults and not alpha:
        pytest.skip("it has no alpha")
    more = {} if defaults else {"activation_alpha": alpha, "activation_beta": beta}
    compare(*layer("RNN", activations=[name], **{key: value for key, value in more.items() if value}))
