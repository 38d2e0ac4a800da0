"""ONNX's own samples of its operators, those that upstream's importer makes something else of: right, or refused."""

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
helper, numpy_helper = onnx.helper, onnx.numpy_helper
FLOAT, INT32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
MICROSOFT = "com.microsoft"

WRONG = [
    "bitshift_left_int32_negative_shift", "isinf_negative", "isinf_positive", "layer_normalization_4d_axis1",
    "convtranspose_output_shape", "dropout_default_mask", "mod_float_edge_cases_fmod_0_float32",
    "nonmaxsuppression_suppress_by_IOU_and_scores", "resize_downsample_scales_linear", "reduce_max_empty_set",
    "resize_downsample_sizes_cubic_antialias", "resize_downsample_scales_cubic_A_n0p5_exclude_outside",
    "spacetodepth_crd_mode_example", "mvn",
]  # fmt: skip
"""Of which upstream's importer makes other numbers, another type or another shape, without a word."""
UNKNOWN = [
    "attention_3d_gqa_causal", "attention_4d_with_past_and_present_qk_matmul_bias", "constantofshape_int_zeros",
    "convinteger_with_padding", "dequantizelinear_blocked", "dequantizelinear_e4m3fn_float16",
    "eyelike_populate_off_main_diagonal", "identity", "lpnormalization_default",
    "onehot_with_axis", "pow_types_int32_float32", "qlinearconv", "quantizelinear_blocked_asymmetric",
    "quantizelinear_blocked_symmetric", "quantizelinear_e4m3fn", "quantizelinear_e5m2", "reduce_max_bool_inputs",
    "resize_upsample_sizes_nearest_axes_3_2", "rotary_embedding_interleaved", "shape_start_1_end_2",
    "tril_square_neg", "triu_pos",
]  # fmt: skip
"""Which it, or the compiler, refuses in words of its own."""
PLAIN = [
    "add_bcast", "conv_with_strides_padding", "dequantizelinear_axis", "dequantizelinear_e5m2", "gemm_all_attributes",
    "quantizelinear_axis", "softmax_axis_1",
]  # fmt: skip


@pytest.fixture(scope="module")
def samples() -> dict[str, Any]:
    from onnx.backend.test.loader import load_model_tests

    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {each.name.removeprefix("test_"): each for each in load_model_tests(kind="node")}


def with_constants(model: Any, arrays: list[Any]) -> tuple[Any, list[Any]]:
    """A sample whose numbers beside the data are initializers, as they are in models."""
    made, kept = onnx.ModelProto(), []
    made.CopyFrom(model)
    made.graph.ClearField("input")
    for at, (value, array) in enumerate(zip(model.graph.input, arrays, strict=True)):
        if at and array.ndim < 2 and array.size <= 8 and array.dtype.kind in "iubf":
            made.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            made.graph.input.append(value)
            kept.append(array)
    return made, kept


@pytest.mark.parametrize("name", [*WRONG, *UNKNOWN, *PLAIN])
def test_samples(samples: dict[str, Any], name: str) -> None:
    if name not in samples:
        pytest.skip(f"this onnx has no sample {name}")
    inputs, wanted = ([array_of(each) for each in group] for group in samples[name].data_sets[0])
    model, given = with_constants(samples[name].model, inputs)
    found = axe.compile(from_onnx(model), work_dir=None)(*given)
    for got, want in zip(found if isinstance(found, list | tuple) else [found], wanted, strict=True):
        got = np.asarray(got)
        assert got.shape == want.shape and got.dtype == want.dtype
        got, want = (each.astype("float64") if "float8" in str(each.dtype) else each for each in (got, want))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


def array_of(sample: Any) -> Any:
    """A sample's data; of types that numpy hasn't it is a message."""
    return numpy_helper.to_array(sample) if isinstance(sample, onnx.TensorProto) else sample


def test_types_of_four_bits_are_refused(samples: dict[str, Any]) -> None:
    with pytest.raises(
        axe.errors.InputError, match="DequantizeLinear isn't imported: a quantized type of int4; use one"
    ):
        from_onnx(samples["dequantizelinear_int4"].model)


@pytest.mark.parametrize("block_size", [0, 3])
@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_numbers_are_quantized_and_back(dtype: str, axis: int, block_size: int) -> None:
    """Ties go to the even number, what is beyond to the last one; a block at the end may be shorter."""
    rng, opset = np.random.default_rng(3), helper.make_opsetid("", 21)
    extent = (5, 7)[axis]
    x = (rng.integers(-600, 600, (5, 7)) / 2).astype("float32")
    few = [5, 7]
    few[axis] = -(-extent // block_size) if block_size else extent
    shape = tuple(few) if block_size else (extent,)
    scale = rng.choice([0.5, 1, 2], shape).astype("float32")
    limits = np.iinfo(dtype)
    zero = rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    told = {"axis": axis, **({"block_size": block_size} if block_size else {})}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"], **told),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"], **told),
    ]
    model = model_of(nodes, {"x": x}, {"scale": scale, "zero": zero})
    del model.opset_import[:]
    model.opset_import.append(opset)
    model.ir_version = 10

    def spread(each: Any) -> Any:
        wide = each.astype("float64")
        if block_size:
            return wide.repeat(block_size, axis)[:5, :7]
        return wide[:, None] if axis == 0 else wide

    whole = np.clip(np.rint(x / spread(scale)) + spread(zero), limits.min, limits.max)
    found = np.asarray(axe.compile(from_onnx(model), work_dir=None)(x))
    np.testing.assert_array_equal(found, (whole - spread(zero)) * spread(scale))


def model_of(nodes: list[Any], inputs: dict[str, Any], weights: dict[str, Any], kind: int = FLOAT) -> Any:
    """A model of nodes whose result is y; inputs are arrays, or a type and a shape."""
    told = {
        name: (helper.np_dtype_to_tensor_dtype(each.dtype), each.shape) if isinstance(each, np.ndarray) else each
        for name, each in inputs.items()
    }
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *each) for name, each in told.items()],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(np.asarray(each), name) for name, each in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)])
    model.ir_version = 8
    return model


def drawn(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


RESHAPED = [
    helper.make_node("Shape", ["x"], ["shape"]),
    helper.make_node("Gather", ["shape", "both"], ["taken"]),
    helper.make_node("Concat", ["taken", "last"], ["target"], axis=0),
    helper.make_node("Reshape", ["x", "target"], ["y"]),
]


def test_sizes_that_are_computed_stay_sizes() -> None:
    model = model_of(RESHAPED, {"x": (FLOAT, ["b", "n", 8])}, {"both": [1, 0], "last": [2, 4]})
    exe = axe.compile(from_onnx(model), work_dir=None)
    for shape in ((2, 3, 8), (1, 5, 8)):
        x = drawn(*shape)
        np.testing.assert_array_equal(np.asarray(exe(x)), x.reshape(shape[1], shape[0], 2, 4))


@pytest.mark.parametrize("known", [False, True])
def test_if_takes_one_of_its_branches(known: bool) -> None:
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node(operator, ["x"], [name])], name, [], [helper.make_tensor_value_info(name, FLOAT, None)]
        )
        for name, operator in (("then", "Neg"), ("else", "Relu"))
    }
    truth = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True)))
    first = helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0)
    nodes = [truth] if known else [first, helper.make_node("Greater", ["sum", "zero"], ["c"])]
    model = model_of(
        [*nodes, helper.make_node("If", ["c"], ["y"], **branches)], {"x": (FLOAT, [3, 4])}, {"zero": np.float32(0)}
    )
    exe = axe.compile(from_onnx(model), work_dir=None)
    for x in (np.abs(drawn(3, 4)), -np.abs(drawn(3, 4))):
        want = -x if known or x.sum() > 0 else np.maximum(x, 0)
        np.testing.assert_array_equal(np.asarray(exe(x)), want)


LAYERS: dict[str, tuple[Any, tuple[str, ...], dict[str, Any], dict[str, Any]]] = {
    "SkipLayerNormalization": ({"x": drawn(2, 5, 16)}, ("x", "x", "g"), {"g": drawn(16)}, {"epsilon": 1e-5}),
    "QuickGelu": ({"x": drawn(2, 5, 16)}, ("x",), {}, {}),
    "Attention": (
        {"x": drawn(2, 5, 16), "m": np.array([[1, 1, 1, 0, 0], [1] * 5], "int32")}, ("x", "w", "b", "m"),
        {"w": drawn(16, 48) / 4, "b": drawn(48)}, {"num_heads": 4},
    ),
    "MultiHeadAttention": (
        {"x": drawn(2, 5, 16), "k": drawn(2, 7, 16)}, ("x", "k", "k", "b"), {"b": drawn(48)}, {"num_heads": 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("operator", LAYERS)
def test_layers_of_onnx_runtime(operator: str) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="it is the judge")
    inputs, names, weights, attributes = LAYERS[operator]
    model = model_of([helper.make_node(operator, names, ["y"], domain=MICROSOFT, **attributes)], inputs, weights)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, inputs)
    got = np.asarray(axe.compile(from_onnx(model), work_dir=None)(*inputs.values()))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operator, inside", [("Elu", 1.0), ("Celu", 0.5), ("Selu", 1.0)])
@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_small_numbers_keep_their_digits(operator: str, inside: float, kind: str) -> None:
    attributes = {} if operator == "Selu" else {"alpha": 2.0}
    x = -(10.0 ** np.arange(-7, 1)).astype(kind)
    node = helper.make_node(operator, ["x"], ["y"], **attributes)
    model = model_of([node], {"x": x}, {}, helper.np_dtype_to_tensor_dtype(x.dtype))
    factor = 1.67326319217681884765625 * 1.05070102214813232421875 if operator == "Selu" else 2.0
    got = np.asarray(axe.compile(from_onnx(model), work_dir=None)(x))
    assert got.dtype == x.dtype
    want = factor * np.expm1(x.astype("float64") * inside)
    rtol, atol = (1e-3, 6e-8) if kind == "float16" else (1e-6, 0)  # a half's least number is 6e-8
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("operator", ["ReduceMax", "ReduceMin", "ReduceLogSumExp"])
@pytest.mark.parametrize("attributes", [{"axes": [1]}, {"axes": [0, -1], "keepdims": 0}, {}])
def test_reductions_of_infinities(operator: str, attributes: dict[str, Any]) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="it is the judge")
    x = drawn(4, 5, 3)
    x[0], x[1], x[2, 0, 0], x[3, 1] = -np.inf, np.inf, -np.inf, np.inf
    model = model_of([helper.make_node(operator, ["x"], ["y"], **attributes)], {"x": x}, {})
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, {"x": x})
    got = np.asarray(axe.compile(from_onnx(model), work_dir=None)(x))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_powers_of_integers(kind: str) -> None:
    x, e = np.array([3, -2, 1, -1, 7, 2], kind), np.array([13, 5, -3, -4, 0, -1], kind)
    inputs = {"x": x, "e": e}
    model = model_of([helper.make_node("Pow", ["x", "e"], ["y"])], inputs, {}, helper.np_dtype_to_tensor_dtype(x.dtype))
    got = np.asarray(axe.compile(from_onnx(model), work_dir=None)(x, e))
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, np.trunc(x.astype("float64") ** e))


ROIS = {"p": drawn(1, 1, 4, 4), "r": drawn(2, 4), "i": np.zeros(2, "int64")}


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (helper.make_node("Det", ["x"], ["y"], name="one"), r"aren't imported: Det \(node one\)"),
        (helper.make_node("Add", ["x", "x"], ["y"], domain="else.where"), r"else.where.Add \(node y\)"),
        (
            helper.make_node("Dropout", ["x", "half", "yes"], ["y"], name="drop"),
            "drop: Dropout isn't imported: it is for",
        ),
        (
            helper.make_node("LpNormalization", ["x"], ["y"], name="norm", slope=1.0),
            "norm: LpNormalization isn't imported",
        ),
    ],
)
def test_what_is_refused_is_named(node: Any, message: str) -> None:
    model = model_of([node], {"x": (FLOAT, [3, 3])}, {"half": np.float32(0.5), "yes": np.array(True), **ROIS})
    model.opset_import.append(helper.make_opsetid("else.where", 1))
    with pytest.raises(axe.InputError, match=message):
        from_onnx(model)


def test_largest_of_uint64_are_refused() -> None:
    node = helper.make_node("TopK", ["x", "k"], ["y", "i"], name="top")
    model = model_of([node], {"x": np.zeros((3, 5), "uint64")}, {"k": np.array([2])}, onnx.TensorProto.UINT64)
    with pytest.raises(axe.InputError, match="top: TopK isn't imported: upstream sorts no uint64; cast"):
        from_onnx(model)


def of_codes(codes: Any, bits: int) -> Any:
    """Codes along the last dimension as bytes, the first in the low bits."""
    if bits == 8:
        return codes.astype("uint8")
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)])
    return (padded[..., ::2] | padded[..., 1::2] << 4).astype("uint8")


@pytest.mark.parametrize("zeros", ["none", "codes", "floats"])
@pytest.mark.parametrize(("bits", "k"), [(4, 96), (4, 70), (8, 64)])
def test_products_of_packed_weights(bits: int, k: int, zeros: str) -> None:
    """ONNX Runtime's: codes in blocks of 32, of which the last may be a part."""
    rng, n, block = np.random.default_rng(5), 24, 32
    blocks = -(-k // block)
    codes = rng.integers(0, 1 << bits, (n, blocks, block))
    scales = rng.uniform(0.01, 0.1, (n, blocks)).astype("float32")
    zero = np.full((n, blocks), 1 << bits - 1)
    weights = {"b": of_codes(codes, bits), "scales": scales.reshape(-1)}
    if zeros != "none":
        zero = rng.integers(0, 1 << bits, (n, blocks))
        weights["zero"] = of_codes(zero, bits).reshape(-1) if zeros == "codes" else zero.astype("float32").reshape(-1)
    told = {"K": k, "N": n, "bits": bits, "block_size": block}
    node = helper.make_node("MatMulNBits", ["a", *weights], ["y"], domain=MICROSOFT, **told)
    a = drawn(2, 3, k)
    found = np.asarray(axe.compile(from_onnx(model_of([node], {"a": a}, weights)), work_dir=None)(a))
    matrix = ((codes - zero[..., None]) * scales[..., None].astype("float64")).reshape(n, -1)[:, :k]
    np.testing.assert_allclose(found, a.astype("float64") @ matrix.T, rtol=1e-4, atol=1e-4)


def test_what_of_packed_weights_is_refused() -> None:
    weights = {"b": np.zeros((4, 1, 16), "uint8"), "scales": np.ones(4, "float32")}
    for more, told, why in (
        ({"": None, "index": np.zeros(32, "int32")}, {"bits": 4}, "columns have groups by an index, g_idx"),
        ({}, {"bits": 2}, "weights of 2 bits; quantize them to 4 or 8 bits"),
    ):
        given = {**weights, **{name: each for name, each in more.items() if name}}
        node = helper.make_node(
            "MatMulNBits", ["a", *weights, *more], ["y"], domain=MICROSOFT, K=32, N=4, block_size=32, **told
        )
        with pytest.raises(axe.errors.InputError, match=why):
            from_onnx(model_of([node], {"a": (FLOAT, [2, 32])}, given))
