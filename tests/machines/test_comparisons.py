"""Comparisons of floats, one of which may be NaN, beside Python's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.machines.maxima import PLAIN
from tvm_axe.machines.vector_math import PIPELINE

PROGRAM = """@T.prim_func(s_tir=True)
def main(x: T.Buffer((32,), "DTYPE"), y: T.Buffer((32,), "DTYPE"), z: T.Buffer((COUNT, 32), "int32")):
    T.func_attr({"global_symbol": "main"})
    for i in LOOP(32):
"""
SIGNS = ("<", "<=", ">", ">=", "==", "!=")
PAIRS = [f"x[i] {sign} {other}" for sign in SIGNS for other in ("y[i]", "x[i]")]
FORMS = ("{}", "no({})", "no(no({}))", "both({}, y[i] < one)", "no(both({}, y[i] < one))", "no(either({}, y[i] < one))")
CASES = [form.format(pair) for pair, form in itertools.product(PAIRS, FORMS)]
IN_TIR = {"no": "T.Not", "both": "T.And", "either": "T.Or"}


def written(dtype: str, loop: str) -> str:
    lines = [PROGRAM.replace("DTYPE", dtype).replace("COUNT", str(len(CASES))).replace("LOOP", loop)]
    for number, case in enumerate(CASES):
        for name, call in IN_TIR.items():
            case = case.replace(f"{name}(", f"{call}(")
        case = case.replace("one", f"T.{dtype}(1)")
        lines.append(f"        z[{number}, i] = T.Select({case}, 1, 0)\n")
    return "".join(lines)


@pytest.mark.parametrize("pipeline", [PLAIN, PIPELINE])
@pytest.mark.parametrize("loop", ["range", "T.vectorized"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_comparisons_are_those_of_ieee_754(dtype: str, loop: str, pipeline: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.choice([np.nan, np.inf, -np.inf, 1, 0, -1], 32).astype(dtype) for _ in range(2))
    z = tvm.runtime.tensor(np.full((len(CASES), 32), 7, "int32"))
    func = tvm.script.from_source(written(dtype, loop), {"T": T})
    tvm.compile(func, "llvm", tir_pipeline=pipeline)["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), z)
    words = {
        "no": lambda a: not a, "both": lambda a, b: a and b, "either": lambda a, b: a or b, "one": 1, "x": x, "y": y
    }  # fmt: skip
    for case, found in zip(CASES, z.numpy(), strict=True):
        assert found.tolist() == [int(eval(case, {**words, "i": i})) for i in range(32)], case


@pytest.mark.parametrize("loop", ["range", "T.vectorized"])
def test_a_difference_from_itself_is_zero_of_numbers(loop: str) -> None:
    text = (
        PROGRAM.replace("DTYPE", "float32").replace("COUNT", "1").replace('"int32"', '"float32"').replace("LOOP", loop)
    )
    func = tvm.script.from_source(text + "        z[0, i] = x[i] * y[i] - x[i] * y[i]\n", {"T": T})
    rng = np.random.default_rng(0)
    x, y = (rng.choice([np.nan, np.inf, -np.inf, 1, 0, -1], 32).astype("float32") for _ in range(2))
    z = tvm.runtime.tensor(np.full((1, 32), 7, "float32"))
    tvm.compile(func, "llvm", tir_pipeline=PIPELINE)["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y), z)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(z.numpy()[0], x * y - x * y)


WITH_ZERO = {
    "sum": lambda x, zero: tirx.Add(x, zero),
    "sum of": lambda x, zero: tirx.Add(zero, x),
    "difference": lambda x, zero: tirx.Sub(x, zero),
    "difference from": lambda x, zero: tirx.Sub(zero, x),
    "product": lambda x, zero: tirx.Mul(x, zero),
    "product of": lambda x, zero: tirx.Mul(zero, x),
    "quotient": lambda x, zero: tirx.Div(x, zero),
    "quotient of": lambda x, zero: tirx.Div(zero, x),
}
"""What passes make of values that turn out to be zero; what is written so is folded when it is written."""
OF_NUMPY = {"sum": np.add, "difference": np.subtract, "product": np.multiply, "quotient": np.divide}


@pytest.mark.parametrize("pipeline", [PLAIN, PIPELINE])
@pytest.mark.parametrize("kind", [tirx.ForKind.SERIAL, tirx.ForKind.VECTORIZED])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_what_is_computed_with_zero(dtype: str, kind: int, pipeline: str) -> None:
    """NaN, infinities and signs are those of IEEE 754."""
    cases = [(name, zero) for name in WITH_ZERO for zero in (0.0, -0.0)]
    given = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2.5])
    x, z = tirx.decl_buffer((8,), dtype, "x"), tirx.decl_buffer((len(cases), 8), dtype, "z")
    i = tirx.Var("i", "int32")
    stores = [
        tirx.BufferStore(z, WITH_ZERO[name](x[i], tirx.const(zero, dtype)), [n, i])
        for n, (name, zero) in enumerate(cases)
    ]
    func = tirx.PrimFunc([x, z], tirx.For(i, 0, 8, kind, tirx.SeqStmt(stores)))
    func = func.with_attrs({"global_symbol": "main", "s_tir": True})
    found = tvm.runtime.tensor(np.full((len(cases), 8), 7, dtype))
    tvm.compile(func, "llvm", tir_pipeline=pipeline)["main"](tvm.runtime.tensor(given.astype(dtype)), found)
    for (name, zero), row in zip(cases, found.numpy().astype("float64"), strict=True):
        operands = (zero, given) if name.split()[-1] in ("of", "from") else (given, zero)
        with np.errstate(all="ignore"):
            wanted = OF_NUMPY[name.split()[0]](*operands)
        np.testing.assert_array_equal(row, wanted, err_msg=f"{name} {zero}")
        number = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(row[number]), np.signbit(wanted[number]), err_msg=f"{name} {zero}")
