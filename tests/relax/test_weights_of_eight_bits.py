"""Products with weights of eight bits on a GPU: one kernel decodes them, integers and floats, however scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tvm
from packed_models import layer
from test_decoding_products import BOUND, in_blocks, kernels
from test_packed_shared import EVEN, MESHES, UNEVEN, parts
from test_packed_shared import compared as compared_on_mesh
from tvm import relax

import tvm_axe as axe
from tvm_axe.machines import builder, resolve_target
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.quantized import with_decoding_products

ROWS, N, K, GROUP = 5, 40, 128, 32
GPU = resolve_target("cuda:sm_90a")
op = relax.op

Emit = Callable[[relax.Expr], relax.Var]


class Form(NamedTuple):
    """How a weight comes: the model's type, its tensors, what makes the matrix (k, n) of them, and that in float64.

    `packed` names what doesn't lie as the kernel reads it, and `said` what the kernel is asked for.
    """

    dtype: str
    tensors: dict[str, tuple[tuple[int, ...], str]]
    decoded: Callable[..., relax.Expr]
    matrix: Callable[..., np.ndarray]
    packed: set[str]
    said: dict[str, Any]


def _groups(emit: Emit, value: relax.Expr) -> relax.Expr:
    return emit(op.repeat(value, GROUP, 1))


def _of_blocks(emit: Emit, weight: relax.Var, scale: relax.Var) -> relax.Expr:
    wide = _groups(emit, emit(op.repeat(scale, 8, 0)))
    return op.permute_dims(emit(op.astype(emit(op.multiply(emit(op.astype(weight, "float32")), wide)), "bfloat16")))


def _of_rows(emit: Emit, weight: relax.Var, scale: relax.Var) -> relax.Expr:
    return op.permute_dims(emit(op.multiply(emit(op.astype(weight, "float16")), scale)))


def _less(emit: Emit, weight: relax.Var, scale: relax.Var, zero: relax.Var) -> relax.Expr:
    wide, less = emit(op.astype(weight, "int32")), emit(op.astype(_groups(emit, zero), "int32"))
    number = emit(op.astype(emit(op.subtract(wide, less)), "float32"))
    return op.permute_dims(emit(op.astype(emit(op.multiply(number, _groups(emit, scale))), "bfloat16")))


def _across(emit: Emit, weight: relax.Var, scale: relax.Var) -> relax.Expr:
    less = emit(op.subtract(emit(op.astype(weight, "float16")), relax.const(128, "float16")))
    return op.multiply(less, scale)


def _of_all(emit: Emit, weight: relax.Var, scale: relax.Var) -> relax.Expr:
    return op.permute_dims(emit(op.multiply(emit(op.astype(weight, "bfloat16")), emit(op.astype(scale, "bfloat16")))))


FORMS = {
    "floats of blocks": Form(
        "bfloat16", {"weight": ((N, K), "float8_e4m3fn"), "scale": ((N // 8, K // GROUP), "float32")}, _of_blocks,
        lambda weight, scale: (weight * scale.repeat(8, 0).repeat(GROUP, 1)).T, {"scales"},
        {"weights": "float8_e4m3fn", "group": GROUP, "scale_dtype": "float32"},
    ),
    "integers of rows": Form(
        "float16", {"weight": ((N, K), "int8"), "scale": ((N, 1), "float16")}, _of_rows,
        lambda weight, scale: (weight * scale).T, {"scales"}, {"weights": "int8", "group": K},
    ),
    "integers less zeros": Form(
        "bfloat16",
        {"weight": ((N, K), "uint8"), "scale": ((N, K // GROUP), "float32"), "zero": ((N, K // GROUP), "uint8")}, _less,
        lambda weight, scale, zero: ((weight - zero.repeat(GROUP, 1)) * scale.repeat(GROUP, 1)).T, {"scales", "points"},
        {"weights": "uint8", "group": GROUP, "zeros": True, "scale_dtype": "float32"},
    ),
    "integers across": Form(
        "float16", {"weight": ((K, N), "uint8"), "scale": ((N,), "float16")}, _across,
        lambda weight, scale: (weight - 128) * scale, {"codes", "scales"},
        {"weights": "uint8", "group": K, "middle": 128},
    ),
    "floats of all": Form(
        "bfloat16", {"weight": ((N, K), "float8_e5m2"), "scale": ((), "float32")}, _of_all,
        lambda weight, scale: (weight * scale).T, {"scales"},
        {"weights": "float8_e5m2", "group": K, "scale_dtype": "float32"},
    ),
}  # fmt: skip


def model(name: str, rows: int | str = ROWS) -> tvm.IRModule:
    form, builder_ = FORMS[name], relax.BlockBuilder()
    count = rows if isinstance(rows, int) else tvm.tirx.Var(rows, "int64")
    x = relax.Var("x", relax.TensorType((count, K), form.dtype))
    given = [relax.Var(each, relax.TensorType(*kind)) for each, kind in form.tensors.items()]
    with builder_.function("main", [x, *given], attrs={"num_input": 1}):
        with builder_.dataflow():
            weight = builder_.emit(form.decoded(builder_.emit, *given))
            out = builder_.emit_output(op.matmul(x, weight))
        builder_.emit_func_output(out)
    return builder_.get()


def drawn(name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights by name, and the matrix (k, n) that they are, in float64."""
    rng, form, made = np.random.default_rng(3), FORMS[name], dict[str, np.ndarray]()
    for each, (shape, kind) in form.tensors.items():
        if each == "scale":
            made[each] = rng.uniform(0.05, 0.3, shape).astype(kind)
        elif kind.startswith("float"):
            made[each] = rng.standard_normal(shape).astype(getattr(ml_dtypes, kind))
        else:
            made[each] = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, shape).astype(kind)
    return made, form.matrix(*(each.astype("float64") for each in made.values()))


def compared(exe: Any, name: str, rows: int = ROWS) -> None:
    dtype = FORMS[name].dtype
    weights, matrix = drawn(name)
    x = np.random.default_rng(5).standard_normal((rows, K)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    with exe.load(weights) as session:
        got = session.main(x).numpy().astype("float64")
    want = x.astype("float64") @ matrix
    assert np.abs(got - want).max() / np.abs(want).max() < BOUND[dtype]


@pytest.mark.parametrize("name", FORMS)
def test_it_is_one_kernel(name: str) -> None:
    """And what lies as the kernel reads it is not packed."""
    found = fuse(model(name), GPU)
    assert kernels(found) == ["w8a16_matmul"]
    names = {str(variable.name_hint) for variable in found.get_global_vars()}
    assert {each.removeprefix("packed_") for each in names if each.startswith("packed_")} == FORMS[name].packed
    assert not any("matmul" in each and each != "w8a16_matmul" for each in names)
    (attrs,) = (func.attrs for func in found.functions.values() if "axe.kernel" in (func.attrs or {}))
    said = {str(key).removeprefix("axe.kernel."): value for key, value in attrs.items()}
    wanted = FORMS[name].said
    assert {key: type(value)(said[key]) for key, value in wanted.items()} == wanted
    assert not {"zeros", "middle", "scale_dtype"}.difference(wanted).intersection(said)


@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_is_right(name: str) -> None:
    """On a CPU, whose programs are the same."""
    compared(axe.compile(with_decoding_products(model(name), GPU), work_dir=None), name)


@pytest.mark.parametrize("name", FORMS)
def test_its_blocks_are_right(name: str) -> None:
    """For whoever doesn't know the kernel."""
    blocks = in_blocks(with_decoding_products(model(name), GPU))
    assert not kernels(blocks)
    compared(axe.compile(blocks, work_dir=None), name)


@pytest.mark.parametrize("rows", [1, 300])
def test_of_any_number_of_rows(rows: int) -> None:
    compared(
        axe.compile(with_decoding_products(model("floats of blocks", "n"), GPU), work_dir=None),
        "floats of blocks",
        rows,
    )


@pytest.mark.parametrize("name", FORMS)
def test_cubins_are_made_and_shown(name: str) -> None:
    exe = axe.compile(model(name), target=GPU, work_dir=None)
    assert "  w8a16_matmul" in exe.show().splitlines()


def linear(form: str) -> tuple[tvm.IRModule, np.ndarray, np.ndarray]:
    """A layer as PyTorch exports it, an input, and what PyTorch makes of that; products are summed in float32."""
    torch = pytest.importorskip("torch", reason="it exports the model")
    from tvm.relax.frontend.torch import from_exported_program

    from tvm_axe.relax import torch_converters

    bias = torch.randn(N, dtype=torch.bfloat16) if "bias" in form else None
    integers = "int8" in form
    drawn = torch.randint(-128, 128, (N, K), dtype=torch.int8) if integers else torch.randn(N, K)
    weight = drawn if integers else drawn.to(torch.float8_e4m3fn)
    shape = (N // 8, K // GROUP) if "blocks" in form else (N,)
    scale = (torch.rand(shape) * 0.02 + 0.01).to(torch.float32 if "blocks" in form else torch.bfloat16)

    class Linear(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            if "behind" in form:
                return torch.nn.functional.linear(x, weight.to(x.dtype)) * scale
            wide = scale.repeat_interleave(8, 0).repeat_interleave(GROUP, 1) if "blocks" in form else scale[:, None]
            return torch.nn.functional.linear(x, (weight.to(wide.dtype) * wide).to(x.dtype), bias)

    module, x = Linear().eval(), torch.randn(2, ROWS, K, dtype=torch.bfloat16)
    exported = torch.export.export(module, (x,))
    imported = from_exported_program(exported, custom_convert_map=torch_converters())
    return imported, x.view(torch.int16).numpy().view(ml_dtypes.bfloat16), module(x).double().numpy()


@pytest.mark.parametrize("form", ["e4m3 of blocks", "e4m3 of blocks and bias", "int8 of rows", "int8, scaled behind"])
def test_layers_of_pytorch_are_the_kernel(form: str) -> None:
    imported, x, want = linear(form)
    for with_biases in (False, True):
        found = with_decoding_products(imported, GPU, with_biases)
        assert kernels(found) == ["w8a16_matmul"]
        for made in (found, in_blocks(found)):
            got = np.asarray(axe.compile(made, work_dir=None)(x)).astype("float64")
            assert np.abs(got - want).max() / np.abs(want).max() < BOUND["bfloat16"]
        (attrs,) = (func.attrs for func in found.functions.values() if "axe.kernel" in (func.attrs or {}))
        # Elsewhere nothing is between a product and its cast.
        assert ("axe.kernel.out_dtype" in attrs) == ("bias" in form and not with_biases)
        assert ("axe.kernel.bias" in attrs) == ("bias" in form and with_biases)
    names = {str(variable.name_hint) for variable in fuse(imported, GPU).get_global_vars()}
    assert not any("cast" in name or "add" in name for name in names)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_layers_of_onnx_are_the_kernel(dtype: str) -> None:
    """Weights as (k, n), and a scale and zero point for each column."""
    onnx = pytest.importorskip("onnx", reason="it describes the model")
    from tvm_axe.relax import from_onnx

    helper, rng, limits = onnx.helper, np.random.default_rng(4), np.iinfo(dtype)
    weight = rng.integers(limits.min, limits.max + 1, (K, N)).astype(dtype)
    scale, zero = (
        rng.uniform(0.01, 0.03, N).astype("float16"),
        rng.integers(limits.min, limits.max + 1, N).astype(dtype),
    )
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wide"], axis=1),
        helper.make_node("MatMul", ["x", "wide"], ["y"]),
    ]
    half = onnx.TensorProto.FLOAT16
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("x", half, [ROWS, K])],
        [helper.make_tensor_value_info("y", half, [ROWS, N])],
        [onnx.numpy_helper.from_array(each, name) for name, each in (("w", weight), ("s", scale), ("z", zero))],
    )  # fmt: skip
    found = with_decoding_products(
        from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])), GPU
    )
    assert kernels(found) == ["w8a16_matmul"]
    x = rng.standard_normal((ROWS, K)).astype("float16")
    want = x.astype("float64") @ ((weight.astype("float64") - zero) * scale)
    got = np.asarray(axe.compile(found, work_dir=None)(x)).astype("float64")
    assert np.abs(got - want).max() / np.abs(want).max() < BOUND["float16"]


@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_onnx_runtime_are_kernels(bits: int) -> None:
    onnx = pytest.importorskip("onnx", reason="it describes the model")
    from tvm_axe.relax import from_onnx

    helper, rng, blocks, half = onnx.helper, np.random.default_rng(6), K // GROUP, onnx.TensorProto.FLOAT16
    b = rng.integers(0, 256, (N, blocks, GROUP * bits // 8)).astype("uint8")
    scales, zero = rng.uniform(0.01, 0.03, N * blocks).astype("float16"), rng.integers(0, 256, (N, blocks * bits // 8))
    tensors = {"b": b, "s": scales, "z": zero.astype("uint8").reshape(-1)}
    told = {"K": K, "N": N, "bits": bits, "block_size": GROUP}
    graph = helper.make_graph(
        [helper.make_node("MatMulNBits", ["x", *tensors], ["y"], domain="com.microsoft", **told)], "graph",
        [helper.make_tensor_value_info("x", half, [ROWS, K])], [helper.make_tensor_value_info("y", half, [ROWS, N])],
        [onnx.numpy_helper.from_array(each, name) for name, each in tensors.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    found = with_decoding_products(from_onnx(helper.make_model(graph, opset_imports=opsets)), GPU)
    assert kernels(found) == [f"w{bits}a16_matmul"]

    def codes(packed: np.ndarray) -> np.ndarray:
        return packed if bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)

    number = codes(b).astype("float64") - codes(zero)[..., None]
    matrix = (number * scales.reshape(N, blocks, 1)).reshape(N, K)
    x = rng.standard_normal((ROWS, K)).astype("float16")
    got = np.asarray(axe.compile(found, work_dir=None)(x)).astype("float64")
    want = x.astype("float64") @ matrix.T
    assert np.abs(got - want).max() / np.abs(want).max() < BOUND["float16"]


def _rounded() -> tvm.IRModule:
    """Scales that are rounded to floats of eight bits before they are used."""
    text = model("integers of rows").script(show_meta=True)
    scale = 'R.astype(scale, dtype="float8_e4m3fn")'
    assert "R.multiply(lv, scale)" in text
    return tvm.script.from_source(
        text.replace("R.multiply(lv, scale)", f'R.multiply(lv, R.astype({scale}, dtype="float16"))')
    )


def test_scales_of_eight_bits_stay_rounded() -> None:
    """Their digits are few, so that what rounds them is not left out: no kernel has such."""
    exe = axe.compile(_rounded(), target=GPU, work_dir=None)
    assert "weights of 8 bits are decoded in memory; they aren't numbers times scales" in exe.show()


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", ["fp8 of all", "fp8 of rows", "fp8 of blocks"])
def test_each_device_multiplies_by_the_kernel(form: str, mesh: str, workers: Any) -> None:
    """On a CPU, whose programs are the same."""
    over = axe.Mesh(MESHES[mesh])
    for inner in (EVEN, UNEVEN):
        shared = with_decoding_products(layer(form, inner, "float16"), GPU)
        exe = axe.compile(shared, mesh=over, work_dir=None, keep=False)
        assert "100% of the products' operations are shared" in exe.show()
        assert parts(exe, over.size) < 1 + 0.05 * over.size
        assert 1 <= len(kernels(exe.shared.module)) <= 3
        compared_on_mesh(exe, workers(over), form, inner, "float16")


@pytest.mark.parametrize("form", ["fp8 of rows", "fp8 of blocks"])
def test_a_gpus_share_is_the_kernel(form: str) -> None:
    exe: Any = axe.compile(layer(form, EVEN, "bfloat16"), mesh={"tp": 2}, target=GPU, work_dir=None, keep=False)
    assert set(kernels(exe.shared.module)) == {"w8a16_matmul"}
    assert not any("NT_matmul" in str(variable.name_hint) for variable in exe.runnable.get_global_vars())
    builder.build_program(exe.runnable, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("pack_weights", [False, True])
def test_on_a_gpu(name: str, pack_weights: bool, cuda: object) -> None:
    compared(axe.compile(model(name), target="cuda", work_dir=None, pack_weights=pack_weights), name)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("form", "devices", "inner"), [("fp8 of rows", 2, EVEN), ("fp8 of blocks", 3, UNEVEN)])
def test_on_gpus(form: str, devices: int, inner: int, packed: bool, on_gpus: Any) -> None:
    exe: Any = axe.compile(
        layer(form, inner, "float16"), mesh={"tp": devices}, target="cuda", work_dir=None, pack_weights=packed
    )
    with axe.launch(exe.mesh, engine="cuda", **on_gpus(devices)) as of_gpus:
        compared_on_mesh(exe, of_gpus, form, inner, "float16")
