"""Products with weights of four bits on a GPU: one kernel that decodes them, however a model has them packed."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.machines import resolve_target
from tvm_axe.relax.alone import compile_model
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.packing import packed_weights
from tvm_axe.relax.quantized import with_decoding_products

ROWS, N, K, GROUP = 5, 40, 128, 32
GPU = resolve_target("cuda:sm_90a")
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

Arrays = dict[str, np.ndarray]


class InWords(nn.Module):
    """Eight codes in each uint32 and a scale of a group, along k or, `across`, along n; 7 stands for zero."""

    def __init__(self, dtype: str, across: bool, rows: int | str) -> None:
        self.dtype, self.across, self.rows = dtype, across, rows
        self.packed = nn.Parameter((K // 8, N) if across else (N, K // 8), "uint32")
        self.scale = nn.Parameter((K // GROUP, N) if across else (N, K // GROUP), dtype)

    def main(self, x: nn.Tensor) -> nn.Tensor:
        def decoded(packed: te.Tensor, scale: te.Tensor) -> te.Tensor:
            def element(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
                at = i if self.across else j
                word = packed[i // 8, j] if self.across else packed[i, j // 8]
                code = tirx.bitwise_and(
                    tirx.shift_right(word, tirx.Cast("uint32", at % 8 * 4)), tirx.const(15, "uint32")
                )
                own = scale[i // GROUP, j] if self.across else scale[i, j // GROUP]
                return (tirx.Cast(self.dtype, code) - tirx.const(7, self.dtype)) * own

            return te.compute((K, N) if self.across else (N, K), element, name="decoded")

        weight = nn.op.tensor_expr_op(decoded, "decode", [self.packed, self.scale])
        return nn.op.matmul(x, weight if self.across else nn.op.permute_dims(weight))


def in_words(across: bool, rows: int | str = ROWS, dtype: str = "float16") -> tvm.IRModule:
    return InWords(dtype, across, rows).export_tvm({"main": {"x": nn.spec.Tensor([rows, K], dtype)}})[0]  # type: ignore[attr-defined]


def stacked(dtype: str = "bfloat16", points: bool = True, scales: str | None = None, rows: int = ROWS) -> tvm.IRModule:
    """Two codes in each byte, which PyTorch's operators shift, mask and stack, and zeros of groups."""
    builder = relax.BlockBuilder()
    op, kind = relax.op, relax.TensorType
    x, packed = relax.Var("x", kind((1, rows, K), dtype)), relax.Var("packed", kind((N, K // 2), "uint8"))
    scale, zero = (
        relax.Var(name, kind((N, K // GROUP), own)) for name, own in (("scale", scales or dtype), ("zero", "uint8"))
    )
    with builder.function("main", [x, packed, scale, *([zero] if points else [])], attrs={"num_input": 1}):
        with builder.dataflow():
            emit = builder.emit
            low = emit(op.bitwise_and(packed, relax.const(15, "uint8")))
            high = emit(op.right_shift(packed, relax.const(4, "uint8")))
            codes = emit(op.reshape(emit(op.stack([low, high], -1)), (N, K // GROUP, GROUP)))
            wide = emit(op.astype(codes, "int32"))
            if points:
                wide = emit(op.subtract(wide, emit(op.expand_dims(emit(op.astype(zero, "int32")), 2))))
            number = emit(op.astype(wide, scales or dtype))
            weight = emit(op.reshape(emit(op.multiply(number, emit(op.expand_dims(scale, 2)))), (N, K)))
            weight = emit(op.astype(weight, dtype))
            out = builder.emit_output(op.matmul(x, emit(op.permute_dims(weight))))
        builder.emit_func_output(out)
    return builder.get()


def interleaved() -> tvm.IRModule:
    """Eight codes in each int32 along n, in an order that a constant has, and zeros packed alike (AWQ)."""
    builder, op, kind = relax.BlockBuilder(), relax.op, relax.TensorType
    x = relax.Var("x", kind((ROWS, K), "float16"))
    packed, zeros = (
        relax.Var(name, kind((rows, N // 8), "int32")) for name, rows in (("packed", K), ("zeros", K // GROUP))
    )
    scale = relax.Var("scale", kind((K // GROUP, N), "float16"))
    with builder.function("main", [x, packed, scale, zeros], attrs={"num_input": 1}):
        with builder.dataflow():
            emit = builder.emit
            shifts = relax.const(np.array(ORDER, "int32").reshape(1, 1, 8) * 4)

            def codes(words: relax.Var, rows: int) -> relax.Var:
                shifted = emit(op.right_shift(emit(op.expand_dims(words, 2)), shifts))
                return emit(op.reshape(emit(op.bitwise_and(shifted, relax.const(15, "int32"))), (rows, N)))

            zero = emit(op.repeat(codes(zeros, K // GROUP), GROUP, 0))
            number = emit(op.astype(emit(op.subtract(codes(packed, K), zero)), "float16"))
            weight = emit(op.multiply(number, emit(op.repeat(scale, GROUP, 0))))
            out = builder.emit_output(op.matmul(x, weight))
        builder.emit_func_output(out)
    return builder.get()


def signed() -> tvm.IRModule:
    """Two codes from -8 to 7 in each byte, and one scale for each row."""
    builder, op, kind = relax.BlockBuilder(), relax.op, relax.TensorType
    x, packed = relax.Var("x", kind((ROWS, K), "float16")), relax.Var("packed", kind((N, K // 2), "int8"))
    scale = relax.Var("scale", kind((N, 1), "float16"))
    with builder.function("main", [x, packed, scale], attrs={"num_input": 1}):
        with builder.dataflow():
            emit, four = builder.emit, relax.const(4, "int8")
            low = emit(op.right_shift(emit(op.left_shift(packed, four)), four))
            codes = emit(op.reshape(emit(op.stack([low, emit(op.right_shift(packed, four))], -1)), (N, K)))
            weight = emit(op.multiply(emit(op.astype(codes, "float16")), scale))
            out = builder.emit_output(op.matmul(x, emit(op.permute_dims(weight))))
        builder.emit_func_output(out)
    return builder.get()


def of_words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    parts = [np.take(codes, range(n, codes.shape[axis], 8), axis).astype("uint32") for n in range(8)]
    words = sum(part << np.uint32(4 * own) for part, own in zip(parts, order))
    return np.asarray(words, "uint32")


def drawn(form: str, dtype: str) -> tuple[Arrays, np.ndarray]:
    """Weights by name, and the matrix (k, n) that they are, in float64."""
    rng = np.random.default_rng(3)
    codes = rng.integers(0, 16, (K, N))
    scale = rng.uniform(0.05, 0.3, (K // GROUP, N)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    zero = rng.integers(0, 16, (K // GROUP, N))
    wide = scale.astype("float64").repeat(GROUP, 0)
    if form == "along":
        return {"packed": of_words(codes.T, 1), "scale": scale.T.copy()}, (codes - 7) * wide
    if form == "across":
        return {"packed": of_words(codes, 0), "scale": scale}, (codes - 7) * wide
    less = (codes - zero.repeat(GROUP, 0)) * wide
    if form == "interleaved":
        words = [of_words(each, 1, ORDER).view("int32") for each in (codes, zero)]
        return {"packed": words[0], "scale": scale, "zeros": words[1]}, less
    if form == "signed":
        numbers = codes - 8
        low, high = (numbers[odd::2].T.astype("uint8") & 15 for odd in (0, 1))
        own = scale[:1].T.copy()
        return {"packed": (low | high << 4).view("int8"), "scale": own}, numbers * own.T.astype("float64")
    packed = (codes[::2] | codes[1::2] << 4).T.astype("uint8").copy()
    given = {"packed": packed, "scale": scale.T.copy(), "zero": zero.T.astype("uint8").copy()}
    return given, less


FORMS: dict[str, Any] = {
    "along": lambda: in_words(False), "across": lambda: in_words(True), "stacked": stacked,
    "interleaved": interleaved, "signed": signed,
}  # fmt: skip
DTYPES = {"stacked": "bfloat16"}
BOUND = {"float16": 2e-3, "bfloat16": 1e-2}
PACKED = {
    "along": {"scales"}, "across": {"codes"}, "stacked": {"scales", "points"}, "interleaved": {"codes", "points"},
    "signed": {"codes", "scales"},
}  # fmt: skip
"""What doesn't lie as the kernel reads it."""


def kernels(model: tvm.IRModule) -> list[str]:
    return [str(func.attrs[KERNEL]) for func in model.functions.values() if KERNEL in (func.attrs or {})]


def in_blocks(model: tvm.IRModule) -> tvm.IRModule:
    """The model, whose functions say nothing of kernels."""
    model = model.clone()
    for variable, func in model.functions_items():
        if KERNEL in (func.attrs or {}):
            for name in [str(key) for key in dict(func.attrs.items()) if str(key).startswith(KERNEL)]:
                func = func.without_attr(name)
            model[str(variable.name_hint)] = func
    return model


def compared(exe: Any, form: str, rows: int = ROWS) -> None:
    dtype = DTYPES.get(form, "float16")
    weights, matrix = drawn(form, dtype)
    x = np.random.default_rng(5).standard_normal((rows, K)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    with exe.load(weights) as session:
        got = session.main(x[None] if form == "stacked" else x).numpy().astype("float64").reshape(rows, N)
    want = x.astype("float64") @ matrix
    assert np.abs(got - want).max() / np.abs(want).max() < BOUND[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_it_is_one_kernel(form: str) -> None:
    """And what lies as the kernel reads it is not packed."""
    found = fuse(FORMS[form](), GPU)
    assert kernels(found) == ["w4a16_matmul"]
    names = {str(variable.name_hint) for variable in found.get_global_vars()}
    assert {name.removeprefix("packed_") for name in names if name.startswith("packed_")} == PACKED[form]
    assert not any("matmul" in name and name != "w4a16_matmul" for name in names)


@pytest.mark.parametrize("form", FORMS)
def test_the_kernel_is_right(form: str) -> None:
    """On a CPU, whose programs are the same."""
    model = with_decoding_products(FORMS[form](), GPU)
    assert kernels(model) == ["w4a16_matmul"]
    compared(axe.compile(model, work_dir=None), form)


@pytest.mark.parametrize("form", ["along", "interleaved"])
@pytest.mark.parametrize("pack_weights", [False, True])
def test_its_blocks_are_right(form: str, pack_weights: bool) -> None:
    """For whoever doesn't know the kernel."""
    model = in_blocks(with_decoding_products(FORMS[form](), GPU))
    assert not kernels(model)
    compared(axe.compile(model, work_dir=None, pack_weights=pack_weights), form)


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_of_any_number_of_rows(rows: int) -> None:
    model = with_decoding_products(in_words(False, "n"), GPU)
    assert kernels(model) == ["w4a16_matmul"]
    compared(axe.compile(model, work_dir=None), "along", rows)


@pytest.mark.parametrize("rows", [1, "n", 4100])
def test_cubins_are_made_and_shown(rows: int | str) -> None:
    exe = axe.compile(in_words(False, rows), target="cuda:sm_90a", work_dir=None)
    assert "  w4a16_matmul" in exe.show().splitlines()


@pytest.mark.gpu
def test_weights_that_are_decoded_once_are_right_on_a_gpu(cuda: Any) -> None:
    compared(axe.compile(in_words(False, 4100), target="cuda", work_dir=None), "along", 4100)


def test_what_is_packed_is_packed_once() -> None:
    """Where it is told to be, or made of constants."""
    exe = axe.compile(FORMS["interleaved"](), target="cuda:sm_90a", work_dir=None, pack_weights=True)
    (taken,) = packed_weights(exe.runnable).values()
    assert sorted((bool(name), names) for name, names in taken) == [
        (False, ("scale",)), (True, ("packed",)), (True, ("zeros",)),
    ]  # fmt: skip
    weights, _ = drawn("interleaved", "float16")
    bound = relax.transform.BindParams("main", weights)(FORMS["interleaved"]())
    assert not any(str(v.name_hint).startswith("packed_") for v in fuse(bound, GPU).get_global_vars())


def _tripled() -> tvm.IRModule:
    """Codes of five bits, of a word each six."""
    model = in_words(False)
    text = model.script(show_meta=True).replace("T.uint32(15)", "T.uint32(31)")
    return tvm.script.from_source(text)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (
            lambda: stacked(scales="float16"),
            "their scales are float16; of bfloat16, as the product is, or float32, they would be",
        ),
        (lambda: stacked("float32"), "the product is of float32, the kernel's of float16 or bfloat16"),
        (_tripled, "they are integers from 0 to 31; of 4 bits, 16 in a row, they would be"),
    ],
)
def test_what_isnt_one_kernel_is_said(model: Any, why: str) -> None:
    given = model()
    exe = axe.compile(given, target="cuda:sm_90a", work_dir=None)
    assert f"weights of 4 bits are decoded in memory; {why}" in exe.show()
    assert not kernels(fuse(given, GPU))


def test_a_cpu_goes_on_as_before() -> None:
    model = in_words(False)
    assert with_decoding_products(model, resolve_target("llvm")) is model
    compared(axe.compile(model, work_dir=None), "along")


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pack_weights", [False, True])
def test_on_a_gpu(form: str, pack_weights: bool, cuda: object) -> None:
    compared(axe.compile(FORMS[form](), target="cuda", work_dir=None, pack_weights=pack_weights), form)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 70])
def test_any_number_of_rows_on_a_gpu(rows: int, cuda: object) -> None:
    compared(axe.compile(in_words(False, "n"), target="cuda", work_dir=None), "along", rows)


def test_upstreams_machine_runs_it() -> None:
    """As an executable without a session."""
    vm = relax.VirtualMachine(compile_model(with_decoding_products(in_words(False), GPU), work_dir=None), tvm.cpu())
    weights, matrix = drawn("along", "float16")
    x = np.ones((ROWS, K), "float16")
    got = vm["main"](*map(tvm.runtime.tensor, (x, weights["packed"], weights["scale"]))).numpy().astype("float64")
    want = x.astype("float64") @ matrix
    assert np.abs(got - want).max() / np.abs(want).max() < BOUND["float16"]
