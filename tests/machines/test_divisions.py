"""Divisions of integers, rounded down or toward zero, of what loops count, in vectors and not: beside numpy's."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe.machines.vector_math import PIPELINE

COUNT, ROWS = 60, 6
PROGRAM = """@T.prim_func(s_tir=True)
def main(A: T.Buffer((ROWS, LANES), "TYPE"), B: T.Buffer((COUNT, ROWS, LANES), "TYPE")):
    T.func_attr({"global_symbol": "main"})
    for i in range(T.TYPE(ROWS)):
        for j in LOOP(T.TYPE(LANES)):
"""


def drawn(rng: random.Random) -> str:
    """A division of a sum of the loops' variables, and perhaps one of that."""
    step, start = rng.choice((1, -1, 2, -2, 3, -5, 7, -8)), rng.choice((0, 1, 5, 16, 50, -3, -50, 1000003, -64))
    value = rng.choice((f"(j * K({step}) + K({start}))", f"(K({start}) - j)"))
    value += rng.choice(("", " + i * K(8)", " + i * K(16)", " - i * K(7)"))
    value = rng.choice((value, value, f"T.max({value}, K({rng.choice((0, 5, -9))}))", f"{value} + A[i, j]"))
    names, divisor = ("floordiv", "floormod", "truncdiv", "truncmod"), rng.choice((2, 3, 4, 5, 7, 8, 16, -3, -4))
    value = f"T.{rng.choice(names)}({value}, K({divisor}))"
    if rng.random() < 0.5:
        value = rng.choice((f"{value} + K({rng.choice((0, 3, -2))})", f"K({rng.choice((0, -4))}) - {value}"))
        value = f"T.{rng.choice(names)}({value}, K({rng.choice((2, 3, 4, -2, -8))}))"
    return value


def quotient(a: np.ndarray, b: int) -> np.ndarray:
    up = (a % b != 0) & ((a < 0) != (b < 0))
    return a // b + up


NUMPYS = SimpleNamespace(
    floordiv=np.floor_divide,
    floormod=np.mod,
    truncdiv=quotient,
    truncmod=lambda a, b: a - quotient(a, b) * b,
    max=np.maximum,
)


def compare(values: list[str], given: np.ndarray, loop: str) -> None:
    """The kernel of all these beside numpy, of whole numbers that are wide enough."""
    count, (rows, lanes), dtype = len(values), given.shape, str(given.dtype)
    text = PROGRAM.replace("COUNT", str(count)).replace("ROWS", str(rows)).replace("LANES", str(lanes))
    text = text.replace("TYPE", dtype).replace("LOOP", loop)
    text += "".join(
        f"            B[{n}, i, j] = {value.replace('K(', f'T.{dtype}(')}\n" for n, value in enumerate(values)
    )
    made = tvm.runtime.tensor(np.full((count, rows, lanes), 77, dtype))
    kernel = tvm.compile(tvm.script.from_source(text, {"T": T}), "llvm", tir_pipeline=PIPELINE)["main"]
    kernel(tvm.runtime.tensor(given), made)
    i, j = np.meshgrid(np.arange(rows), np.arange(lanes), indexing="ij")
    for value, found in zip(values, made.numpy(), strict=True):
        value = value.replace("A[i, j]", "given")
        wanted = eval(value, {"T": NUMPYS, "K": int, "i": i, "j": j, "given": given.astype("int64")})
        np.testing.assert_array_equal(found, wanted, err_msg=value)


LOOPS = pytest.mark.parametrize("loop", ["range", "T.vectorized"])


@LOOPS
@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_divisions_are_numpys(lanes: int, dtype: str, loop: str) -> None:
    values = [drawn(random.Random(f"{lanes} {dtype} {number}")) for number in range(COUNT)]
    compare(values, np.random.default_rng().integers(-100, 100, (ROWS, lanes)).astype(dtype), loop)


REMAINDERS = ("T.floormod({}, K(-4))", "K(0) - T.floormod({}, K(4))", "T.floormod(T.floormod({}, K(16)), K(-4))")
DIVIDENDS = ("A[i, j]", "(K(3) - j)", "(j * K(-1)) + i * K(8)", "(K(0) - A[i, j])")


@LOOPS
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_quotients_of_remainders(dtype: str, loop: str) -> None:
    """Of which upstream makes remainders of quotients, by negative numbers, too, that nobody wrote."""
    values = [
        f"T.floordiv({remainder.format(value)}, K({divisor}))"
        for remainder in REMAINDERS
        for value in DIVIDENDS
        for divisor in (2, 4, -2, -4)
    ]
    compare(values, np.random.default_rng(0).integers(-100, 100, (ROWS, 16)).astype(dtype), loop)


@LOOPS
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_divisions_of_the_least_number(dtype: str, loop: str) -> None:
    """Whose opposite the type doesn't have."""
    info = np.iinfo(dtype)
    ends = [*range(info.min, info.min + 8), *range(info.max - 7, info.max + 1)]
    names, divisors = ("floordiv", "floormod", "truncmod"), (2, 3, 8, -2, -3, -8)
    values = [f"T.{name}(A[i, j], K({divisor}))" for name in names for divisor in divisors]
    compare(values, np.array([ends], dtype), loop)
