"""exp, erf and tanh of vectors are correct to a unit or two in the last place, everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm import s_tir
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.machines import vector_math
from tvm_axe.machines.target import resolve_target

_COUNT = 1 << 16
_SPECIAL = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 88.72283, 88.72284, -87.33655, -103.97, -104.0], "float32")


@T.prim_func(s_tir=True)
def _exp(x: T.Buffer((_COUNT,), "float32"), y: T.Buffer((_COUNT,), "float32")):
    for i in range(_COUNT):
        with T.sblock("y"):
            vi = T.axis.spatial(_COUNT, i)
            y[vi] = T.exp(x[vi])


def _run(lanes: int, x: np.ndarray, func: tvm.tirx.PrimFunc = _exp) -> tuple[np.ndarray, str]:
    sch = s_tir.Schedule(func)
    if lanes > 1:
        sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, lanes])[1])
    built = tvm.compile(sch.mod, target=resolve_target("llvm", threads=1), tir_pipeline=vector_math.PIPELINE)
    arguments = [tvm.runtime.tensor(a) for a in (x, np.zeros_like(x))]
    built["main"](*arguments)
    return arguments[1].numpy(), built.mod.inspect_source("ll")


def test_vectors_are_correct_to_one_unit_in_the_last_place():
    x = np.linspace(-110, 95, _COUNT).astype("float32")
    x[: len(_SPECIAL)] = _SPECIAL
    got, code = _run(16, x)
    with np.errstate(over="ignore"):
        want = np.exp(x.astype("float64")).astype("float32")
    assert np.isnan(got[0])
    units = np.abs(got.view("int32").astype("int64") - want.view("int32").astype("int64"))[1:]
    assert units.max() <= 1
    assert "llvm.exp" not in code


def test_single_numbers_are_left_to_libm():
    _, code = _run(1, np.zeros(_COUNT, "float32"))
    assert "llvm.exp" in code


def test_the_expression_keeps_the_number_of_lanes():
    for lanes in (4, 8, 16):
        x = tvm.tirx.Var("x", f"float32x{lanes}")
        assert str(vector_math.vector_exp(x).ty) == f"float32x{lanes}"


def test_all_that_is_made_of_exp_has_it():
    @T.prim_func(s_tir=True)
    def tanh(x: T.Buffer((_COUNT,), "float32"), y: T.Buffer((_COUNT,), "float32")):
        for i in range(_COUNT):
            with T.sblock("y"):
                vi = T.axis.spatial(_COUNT, i)
                y[vi] = T.tanh(x[vi])

    x = np.linspace(-12, 12, _COUNT).astype("float32")
    got, code = _run(16, x, tanh)
    assert "llvm.exp" not in code
    np.testing.assert_allclose(got, np.tanh(x.astype("float64")), atol=2e-7)


def test_every_worker_has_it():
    """A worker in a process of its own computes the bits that one in this process does."""
    mesh = axe.Mesh({"tp": 2})
    sch = axe.Schedule(axe.with_layouts(_exp, {"y": axe.Layout.sharded((_COUNT,), mesh, {0: "tp"})}), mesh=mesh)
    outer, inner = sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 16])
    sch.vectorize(inner)
    sch.shard(outer, "tp")
    exe = axe.compile(sch, work_dir=None)
    x = np.linspace(-90, 90, _COUNT // 2).astype("float32")
    with axe.launch(mesh) as workers:
        got = np.asarray(exe.run(workers, np.concatenate([x, x])))
    np.testing.assert_array_equal(got[: len(x)], got[len(x) :])


def _units(func: tvm.tirx.PrimFunc, exact: Callable[[np.ndarray], np.ndarray]) -> tuple[int, np.ndarray, str]:
    """The largest error in units of the last place, of a function that is odd and 1 at the end; special values."""
    quarter = _COUNT // 4
    x = np.concatenate(
        [np.linspace(-7, 7, 2 * quarter), np.geomspace(1e-40, 20, quarter), -np.geomspace(1e-40, 20, quarter)]
    )
    x = x.astype("float32")
    x[:6] = np.nan, np.inf, -np.inf, 0.0, 1e30, -1e30
    got, code = _run(16, x, func)
    want = exact(x.astype("float64")).astype("float32")
    units = np.abs(got.view("int32").astype("int64") - want.view("int32").astype("int64"))[6:]
    return int(units.max()), got[:6], code


def test_erf_of_vectors_is_arithmetic():
    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((_COUNT,), "float32"), y: T.Buffer((_COUNT,), "float32")):
        for i in range(_COUNT):
            with T.sblock("y"):
                vi = T.axis.spatial(_COUNT, i)
                y[vi] = T.erf(x[vi])

    units, special, code = _units(func, np.vectorize(math.erf))
    assert units <= 2 and "erff" not in code and "llvm.exp" not in code
    np.testing.assert_array_equal(special, [np.nan, 1, -1, 0, 1, -1])


def test_tanh_of_vectors_keeps_its_digits():
    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((_COUNT,), "float32"), y: T.Buffer((_COUNT,), "float32")):
        for i in range(_COUNT):
            with T.sblock("y"):
                vi = T.axis.spatial(_COUNT, i)
                y[vi] = T.tanh(x[vi])

    units, special, code = _units(func, np.tanh)
    assert units <= 2 and "tanhf" not in code and "llvm.exp" not in code
    np.testing.assert_array_equal(special, [np.nan, 1, -1, 0, 1, -1])
