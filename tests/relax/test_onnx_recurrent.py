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
STEPS, BATCH, WIDTH, HIDDEN = 2, 3, 4, 6
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
LENGTHS = np.array([2, 1, 2], "int32")


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
    "lstm_batchwise", "lstm_with_peepholes", "gru_batchwise", "gru_seq_length", "simple_rnn_bidirectional",
    "rnn_seq_length", "scan_sum", "scan9_multi_state", "scan9_scalar", "loop11",
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
        if array.ndim < 2 and (array.dtype.kind == "b" or (name == "loop11" and array.dtype == "int64")):
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            model.graph.input.append(value)
            given.append(array)
    found = axe.compile(from_onnx(model), work_dir=None)(*given)
    for got, want in zip(found if isinstance(found, list | tuple) else [found], wanted, strict=True):
        got = np.asarray(got)
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lengths that are an input": ("LSTM", {"given": True, "direction": "bidirectional"}),
    "lengths of GRU": ("GRU", {"given": True, "direction": "reverse"}),
    "lengths of RNN": ("RNN", {"given": True, "direction": "bidirectional"}),
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
    "no steps of a sequence": ("LSTM", {"lengths": np.array([0, 2, 1], "int32"), "direction": "bidirectional"}),
    "all steps": ("GRU", {"lengths": np.array([2, 2, 2], "int32")}),
    "activations": (
        "LSTM",
        {
            "activations": ["HardSigmoid", "LeakyRelu", "ScaledTanh", "Sigmoid", "Affine", "Softsign"],
            "activation_alpha": [0.3, 0.2, 1.5, 0.5], "activation_beta": [0.4, 0.7, 0.1],
            "direction": "bidirectional",
        },
    ),
    "other activations": (
        "GRU",
        {
            "activations": ["Softplus", "ThresholdedRelu", "Relu", "Elu"], "activation_alpha": [0.3, 0.7],
            "direction": "bidirectional", "inputs": "B",
        },
    ),
    "activations without alpha": (
        "GRU", {"activations": ["HardSigmoid", "LeakyRelu", "Tanh", "Elu"], "direction": "bidirectional"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    operator, given = VARIANTS[name]
    compare(*layer(operator, **given))


# ---- Loops


def graph_of(nodes: list[Any], inputs: dict[str, tuple[int, Any]], outputs: dict[str, int]) -> Any:
    return helper.make_graph(
        nodes,
        "body",
        [helper.make_tensor_value_info(name, *each) for name, each in inputs.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
    )


def body_of_loop(condition: Any) -> Any:
    """h is tanh(h w + row of x), whose rows are taken by the trip; the product is stacked, too."""
    nodes = [
        condition,
        helper.make_node("Gather", ["x", "i"], ["row"], axis=0),
        helper.make_node("MatMul", ["h", "w"], ["product"]),
        helper.make_node("Add", ["product", "row"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["next"]),
    ]
    inputs = {"i": (INT64, []), "going": (BOOL, []), "h": (FLOAT, [2, 4])}
    return graph_of(nodes, inputs, {"still": BOOL, "next": FLOAT, "product": FLOAT})


def model_of_loop(condition: Any, trips: Any) -> tuple[Any, dict[str, Any]]:
    """Of so many trips, or of a number that is an input."""
    data = {"x": drawn(5, 2, 4), "h0": drawn(2, 4), "limit": np.array(2)}
    weights = {"w": drawn(4, 4), "yes": np.array(True)}
    if trips is None:
        data["trips"] = np.array(3)
    else:
        weights["trips"] = trips
    node = helper.make_node(
        "Loop", ["trips", "yes", "h0"], ["last", "products"], name="turns", body=body_of_loop(condition)
    )
    return model_of([node], data, weights, {"last": FLOAT, "products": FLOAT}), data


HANDED_ON = helper.make_node("Identity", ["going"], ["still"])


@pytest.mark.parametrize("ended", [False, True])
def test_loop(ended: bool) -> None:
    condition = helper.make_node("Less", ["i", "one"], ["still"]) if ended else HANDED_ON
    model, data = model_of_loop(condition, np.array(4))
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
    compare(model, data)


def test_layers_that_torch_exports() -> None:
    torch = pytest.importorskip("torch", reason="it exports the model")
    lstm = torch.nn.LSTM(WIDTH, HIDDEN, bidirectional=True, batch_first=True).eval()
    stored, x = io.BytesIO(), torch.from_numpy(drawn(BATCH, STEPS, WIDTH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            lstm, (x,), stored, dynamo=False, opset_version=17, input_names=["x"], dynamic_axes={"x": {0: "batch"}}
        )
    exe = axe.compile(from_onnx(onnx.load_from_string(stored.getvalue())), work_dir=None)
    for each in (x, x[:2]):
        output, states = lstm(each)
        for got, want in zip(exe(each.numpy()), (output, *states), strict=True):
            np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("axes", [(0, 0), (1, 2)])
@pytest.mark.parametrize("turned", [0, 1])
def test_scan(axes: tuple[int, int], turned: int) -> None:
    nodes = [
        helper.make_node("MatMul", ["h", "w"], ["product"]),
        helper.make_node("Mul", ["one", "two"], ["both"]),
        helper.make_node("Add", ["product", "both"], ["sum"]),
        helper.make_node("Tanh", ["sum"], ["next"]),
        helper.make_node("Neg", ["next"], ["turned"]),
    ]
    each = (FLOAT, [2, 4])
    body = graph_of(nodes, {"h": each, "one": each, "two": each}, {"next": FLOAT, "both": FLOAT, "turned": FLOAT})
    data = {
        "h0": drawn(2, 4),
        "a": np.moveaxis(drawn(3, 2, 4), 0, axes[0]),
        "b": np.moveaxis(drawn(3, 2, 4), 0, axes[1]),
    }
    node = helper.make_node(
        "Scan", ["h0", "a", "b"], ["last", "products", "turns"], body=body, num_scan_inputs=2,
        scan_input_axes=[axes[0], axes[1] - 3], scan_input_directions=[turned, 0], scan_output_axes=[0, axes[1]],
        scan_output_directions=[0, turned],
    )  # fmt: skip
    outputs = dict.fromkeys(["last", "products", "turns"], FLOAT)
    compare(model_of([node], data, {"w": drawn(4, 4)}, outputs), data)


# ---- What is refused


def test_steps_that_are_not_known_are_refused() -> None:
    for operator in GATES:
        model, _ = layer(operator, inputs="B")
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
        with pytest.raises(axe.InputError, match=f"{operator} isn't imported: it runs n steps.*known number of steps"):
            from_onnx(model)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"activations": ["Sine"]}, "Sine isn't an activation"),
        ({"activations": ["Affine"]}, "Affine has no alpha or no beta"),
        ({"activations": ["Tanh", "Tanh"]}, "it has 2 activations; give 1"),
    ],
)
def test_activations_that_are_not_known_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(axe.InputError, match=message):
        from_onnx(layer("RNN", **more)[0])


def test_loops_of_unknown_trips_are_refused() -> None:
    model, _ = model_of_loop(HANDED_ON, None)
    with pytest.raises(axe.InputError, match="turns: Loop isn't imported: its trip count isn't a constant; give"):
        from_onnx(model)
    computed = helper.make_node("Less", ["i", "limit"], ["still"])
    with pytest.raises(axe.InputError, match="turns: Loop isn't imported: its condition is computed by the body"):
        from_onnx(model_of_loop(computed, np.array(3))[0])
    with pytest.raises(axe.InputError, match="turns: Loop isn't imported: it runs more than 4096 trips"):
        from_onnx(model_of_loop(HANDED_ON, np.array(2**62))[0])
