"""What a device stores it must own, or every holder gets it: a schedule is right on a mesh, or refused by lowering."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from small import numbers, run
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh

ROWS, COLUMNS = 8, 4
DEVICES = (2, 3, 4)


class Case(NamedTuple):
    """Where a block stores element (i, j) of an 8 x 4 matrix, and of how many schedules lowering takes it."""

    shape: tuple[int, ...]
    store: Callable[..., tuple]
    right: int
    """Of the loop of i or j shared by 2, 3 or 4 devices, and each dimension or none declared to lie in pieces."""
    cached: int | None
    """The same behind `cache_write`; None where upstream's would also copy what nothing was stored to."""


STORES = {
    "identity": Case((8, 4), lambda i, j: (i, j), 6, 6),
    "transposed": Case((4, 8), lambda i, j: (j, i), 6, 6),
    "reversed rows": Case((8, 4), lambda i, j: (7 - i, j), 3, 3),
    "reversed columns": Case((8, 4), lambda i, j: (i, 3 - j), 3, 3),
    "rolled rows": Case((8, 4), lambda i, j: ((i + 3) % 8, j), 3, 3),
    "rolled columns": Case((8, 4), lambda i, j: (i, (j + 1) % 4), 3, 3),
    "interleaved": Case((8, 4), lambda i, j: (i % 4 * 2 + i // 4, j), 3, 3),
    "xor": Case((8, 4), lambda i, j: (i ^ 5, j), 3, 3),
    "flattened": Case((32,), lambda i, j: (i * 4 + j,), 2, 2),
    "flattened by columns": Case((32,), lambda i, j: (j * 8 + i,), 2, 2),
    "unflattened": Case((2, 4, 4), lambda i, j: (i // 4, i % 4, j), 4, 4),
    "halves swapped": Case((8, 4), lambda i, j: ((i + 4) % 8, j), 3, 3),
    "below": Case((16, 4), lambda i, j: (i + 8, j), 3, 0),
    "beside": Case((8, 8), lambda i, j: (i, j + 4), 3, 0),
    "padded": Case((10, 6), lambda i, j: (i + 1, j + 1), 0, 0),
    "strided": Case((16, 4), lambda i, j: (i * 2, j), 6, None),
    "strided columns": Case((8, 9), lambda i, j: (i, j * 2 + 1), 3, None),
    "diagonal": Case((11, 4), lambda i, j: (i + j, j), 3, None),
    "skewed": Case((8, 4), lambda i, j: ((i + j) % 8, j), 3, 3),
    "one plane of three": Case((3, 8, 4), lambda i, j: (1, i, j), 6, None),
}


def program(case: Case) -> tirx.PrimFunc:
    store, shape = case.store, case.shape

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((ROWS, COLUMNS), "float32"), Y: T.Buffer(shape, "float32")):
        for i, j in T.grid(ROWS, COLUMNS):
            with T.sblock("put"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[store(vi, vj)] = X[vi, vj] * T.float32(2)

    return func


def stored(case: Case, X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """What the function leaves in Y."""
    Y = Y.copy()
    for i, j in np.ndindex(ROWS, COLUMNS):
        Y[case.store(i, j)] = X[i, j] * 2
    return Y


@pytest.mark.parametrize("name", STORES)
def test_stores(launched, name):
    """Into a parameter that every device holds or has declared pieces of; each dimension is declared once."""
    case, right = STORES[name], 0
    func = program(case)
    for declared in (None, *range(len(case.shape))):
        for loop, devices in product(range(2), DEVICES):
            mesh = Mesh({"x": devices})
            laid = Layout.sharded(case.shape, mesh, {} if declared is None else {declared: "x"})
            sch = axe.Schedule(axe.with_layouts(func, {"Y": laid}), mesh=mesh)
            sch.shard(sch.get_loops("put")[loop], "x")
            right += is_right(launched, sch, case)
    assert right == case.right


@pytest.mark.parametrize("name", [name for name, case in STORES.items() if case.cached is not None])
def test_cached_stores(launched, name):
    """Into a buffer of its own, which the devices share, and which is copied to the parameter."""
    case, right = STORES[name], 0
    func = program(case)
    for loop, devices in product(range(2), DEVICES):
        sch = axe.Schedule(func, mesh=Mesh({"x": devices}))
        sch.cache_write("put", 0, "global")
        sch.shard(sch.get_loops("put")[loop], "x")
        right += is_right(launched, sch, case)
    assert right == case.cached


def is_right(launched, sch: axe.Schedule, case: Case) -> bool:
    """False if lowering refuses the schedule, by name; true if it is right."""
    given = {"X": numbers((ROWS, COLUMNS), 1), "Y": numbers(case.shape, 1000)}
    expected = stored(case, given["X"], given["Y"])
    try:
        exe = axe.compile(sch, work_dir=None, redistribute="refuse")
    except LowerError as error:
        assert re.search(r"block '(put|Y_global)'.*'Y(_global)?'", str(error)), str(error)
        return False
    assert exe.inputs == (("X",) if (expected < 1000).all() else ("X", "Y"))
    np.testing.assert_array_equal(run(launched, exe, **given)["Y"], expected, err_msg=sch.mod.script())
    return True
