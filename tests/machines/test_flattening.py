"""Addresses of elements at sums that are divided, which upstream's flattening simplifies wrongly by itself."""

import random

import numpy as np
import pytest
import tvm
from random_indices import random_index
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm  # it has upstream's flattening keep such sums
from tvm_axe.analysis.elements import elements

COUNT = 12
LOOPS = ("t", "t", "v")  # their variables, below 24 and below 4
DIVISORS = (2, 3, 4, 6, 24)
ADDED = (1, 3, 5, 13, 18, "n")  # a parameter, n, too


def source(rows: list[str], columns: list[str]) -> str:
    """A function that gathers by each pair of indices."""
    gathers = [
        f"            Y[{at}, t, v] = X[{row} % 4, {column} % 24]"
        for at, (row, column) in enumerate(zip(rows, columns, strict=True))
    ]
    return "\n".join(
        [
            "@T.prim_func(s_tir=True)",
            f"def gather(X: T.Buffer((4, 24), 'float32'), n: T.int32, Y: T.Buffer(({len(rows)}, 24, 4), 'float32')):",
            "    for t in range(24):",
            "        for v in range(4):",
            *gathers,
        ]
    )


def error(func: tirx.PrimFunc, rows: list[str], columns: list[str]) -> float:
    """The largest difference from what numpy gathers."""
    x, n = np.arange(96, dtype="float32").reshape(4, 24), 5
    names = {
        "t": np.arange(24)[:, None] + np.zeros((1, 4), "int64"),
        "v": np.arange(4) + np.zeros((24, 1), "int64"),
        "n": n,
    }
    want = np.stack([x[eval(f"{row} % 4", names), eval(f"{column} % 24", names)] for row, column in zip(rows, columns)])
    out = tvm.runtime.tensor(np.full_like(want, np.nan))
    tvm.compile(func, "llvm")(tvm.runtime.tensor(x), n, out)
    return float(np.abs(out.numpy() - want).max())


KNOWN = (["(t // 6 + 3)", "(t + 5) // 4", "(t + n)"], ["(t % 6 * 4 + v + 13)", "(t + 5) // 2 % 3", "(t + n)"])


@pytest.mark.parametrize("seed", [None, 6, 23])
def test_elements_are_those_that_are_asked_for(seed: int | None) -> None:
    rng = random.Random(seed)
    drawn = [
        [random_index(rng, rng.randint(1, 4), LOOPS, ADDED, (2, 3, 4, 6, 24)) for _ in range(COUNT)] for _ in range(2)
    ]
    rows, columns = KNOWN if seed is None else drawn
    func = tvm.script.from_source(source(rows, columns), {"T": T})
    assert error(func, rows, columns) == 0


def test_what_is_shown_again_is_as_it_was() -> None:
    """A sum that a loop runs through in order is one address, as before."""

    @T.prim_func(s_tir=True)
    def part(X: T.Buffer((16, 8), "float32"), Y: T.Buffer((64,), "float32")):
        for i in range(64):
            Y[i] = X[(i + 24) // 8, (i + 24) % 8]

    mod = tirx.transform.FlattenBuffer()(tvm.IRModule({"part": part}))
    assert "X_1[i + 24]" in mod.script() and "&" not in mod.script() and _tvm.keep_sums() is None


@pytest.mark.parametrize("index", ["(v + 4) // 4 % 2", "(t // 3 + 9) % 12", "(v + 20) // 4 % 2"])
def test_who_asks_for_a_map_of_such_a_sum_gets_none(index: str) -> None:
    """Upstream's says that all numbers below the divisor are met, and then a buffer would be taken for all written."""
    names = {"t": tirx.Var("t", "int32"), "v": tirx.Var("v", "int32")}
    extents = {names["t"]: 24, names["v"]: 4}
    reached = elements([eval(index, names)], extents, [int(index.rpartition("%")[2])], None)
    assert reached is not None and not reached.everything
