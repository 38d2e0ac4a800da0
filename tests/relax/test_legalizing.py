"""Operators that aren't made functions as upstream makes them: finite and exact where upstream's aren't, or fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.relax import op

import tvm_axe as axe
from tvm_axe._tvm import legalize_ops

LARGE = [0, 1e-6, -1e-3, 0.9, -1.1, 3, 11, -20, 88.9, -89, 300, -1e4, np.inf, -np.inf, np.nan, 0.5]
OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "log_add_exp": (op.log_add_exp, np.logaddexp),
    "sinh": (lambda x, _: op.sinh(x), lambda x, _: np.sinh(x)),
    "cosh": (lambda x, _: op.cosh(x), lambda x, _: np.cosh(x)),
}


def model(make: Callable[..., Any], dtype: str) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType(shape, dtype)) for name, shape in (("x", (4, 16)), ("y", (4, 1))))
    with builder.function("main", [x, y]):
        with builder.dataflow():
            out = builder.emit_output(make(x, y))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 5e-7), ("float64", 1e-14), ("bfloat16", 8e-3)])
@pytest.mark.parametrize("name", OPERATORS)
def test_of_any_size(workers: Any, name: str, dtype: str, bound: float) -> None:
    """What is infinite is so in float64, too; what is small is right relative to itself."""
    make, wanted = OPERATORS[name]
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.array([LARGE] * 4).astype(kind)
    y = np.array([[0.25], [np.inf], [-np.inf], [-300]]).astype(kind)
    with np.errstate(all="ignore"):
        want = wanted(x.astype("float64"), y.astype("float64")).astype(kind).astype("float64")
    found = {"one device": np.asarray(axe.compile(model(make, dtype), work_dir=None)(x, y))}
    if dtype == "float32":
        exe = axe.compile(model(make, dtype), mesh={"tp": 2}, work_dir=None)
        found["a mesh"] = np.asarray(exe.run(workers(2), x, y))
    for where, got in found.items():
        assert got.dtype == kind, where
        np.testing.assert_allclose(got.astype("float64"), want, rtol=bound, atol=0, err_msg=where)


@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "minimum"])
def test_truth_values(workers: Any, name: str) -> None:
    """As PyTorch has sums and products of masks; upstream makes no code of them for CPUs."""
    x, y = np.random.default_rng(0).random((4, 16)) < 0.5, np.array([[True], [False], [True], [False]])
    want = x | y if name in ("add", "maximum") else x & y
    made = model(getattr(op, name), "bool")
    assert np.array_equal(axe.compile(made, work_dir=None)(x, y), want)
    assert np.array_equal(axe.compile(made, mesh={"tp": 2}, work_dir=None).run(workers(2), x, y), want)


@pytest.mark.parametrize("shape", [(1, 0, 3), (2, 0), (0, 5)])
def test_of_nothing(shape: tuple[int, ...]) -> None:
    """Tensors without elements are none, and their sums zeros."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.exp(x))
            out = builder.emit_output(relax.Tuple([y, builder.emit(op.sum(y, 0)), builder.emit(op.nn.softmax(y))]))
        builder.emit_func_output(out)
    exe = axe.compile(builder.get(), work_dir=None)
    y, total, shares = (np.asarray(each) for each in exe(np.zeros(shape, "float32")))
    assert y.shape == shares.shape == shape and np.array_equal(total, np.zeros(shape[1:]))


@pytest.mark.parametrize("rows", [3, tirx.Var("n", "int64")])
@pytest.mark.parametrize(("places", "axis"), [(-1, 1), ([0, -2], 0), ([[-1, 2]], 1)])
def test_negative_places(workers: Any, places: Any, axis: int, rows: int | tirx.Var) -> None:
    """Importers have ``x[:, -1]`` as a constant to be taken, for which upstream reads what lies in front."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, rows, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(op.take(x, relax.const(np.array(places), "int64"), axis))
        builder.emit_func_output(out)
    given = np.random.default_rng(0).standard_normal((3, 3, 8), dtype="float32")
    want = np.take(given, places, axis)
    assert np.array_equal(axe.compile(builder.get(), work_dir=None)(given), want)
    assert np.array_equal(axe.compile(builder.get(), mesh={"tp": 2}, work_dir=None).run(workers(2), given), want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "uint8"])
@pytest.mark.parametrize("name", ["max", "min"])
def test_extremes_begin_from_infinities(workers: Any, name: str, dtype: str) -> None:
    """Of rows, columns and all, in vectors and apart; of integers they begin as they did."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.default_rng(0).integers(0, 100, (24, 256)).astype(kind)
    if "float" in dtype:
        x[:20] = x[:, :96] = -np.inf if name == "max" else np.inf
        x[:, 3] = x[20] = -x[0, 0]
    cases = [(axis, keepdims) for axis in (1, 0, -1, (0, 1), None) for keepdims in (False, True)]
    builder = relax.BlockBuilder()
    given = relax.Var("x", relax.TensorType(x.shape, dtype))
    with builder.function("main", [given]):
        with builder.dataflow():
            made = [
                builder.emit(getattr(op, name)(given, [*axis] if isinstance(axis, tuple) else axis, keepdims))
                for axis, keepdims in cases
            ]
            out = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(out)
    alone = axe.compile(builder.get(), work_dir=None)
    apart = axe.compile(builder.get(), mesh={"tp": 2}, work_dir=None)
    for values in (x, np.full_like(x, x[0, 0])):
        want = [getattr(np, name)(values, axis, keepdims=keepdims) for axis, keepdims in cases]
        for results in (alone(values), apart.run(workers(2), values)):
            for got, wanted in zip(results, want, strict=True):
                np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize("operator", [tirx.Max, tirx.Min])
def test_partial_extremes_begin_so_too(operator: Any) -> None:
    name = operator.__name__.lower()
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 64), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(getattr(op, name)(x, 1))
        builder.emit_func_output(out)
    sch = s_tir.Schedule(legalize_ops()(builder.get())[name])
    block = sch.get_sblock("x_red")
    _, lane = sch.split(sch.get_loops(block)[-1], [None, 16])
    partial = sch.get(sch.rfactor(lane, 1))
    assert abs(partial.init.value.value) == np.inf and isinstance(partial.body.value, operator)
