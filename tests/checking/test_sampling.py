"""A sample of a function's results is what the whole function computes of it, in fewer iterations."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.checking import sampling
from tvm_axe.checking.reference import Alone, Reference
from tvm_axe.checking.sampling import iterations, sampled
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh


@T.prim_func(s_tir=True)
def everything(
    X: T.Buffer((24, 20), "float32"),
    at: T.Buffer((24,), "int32"),
    cache: T.Buffer((40, 20), "float32"),
    Y: T.Buffer((20, 24), "float32"),
    Z: T.Buffer((24, 20), "float32"),
):
    """Neighbours within the border, rows by index, a sum of rows, a transposition, an update, a part of a cache."""
    H = T.sblock_alloc_buffer((24, 20))
    G = T.sblock_alloc_buffer((24, 20))
    s = T.sblock_alloc_buffer((24,))
    for i, j in T.grid(24, 20):
        with T.sblock("halo"):
            vi, vj = T.axis.remap("SS", [i, j])
            H[vi, vj] = X[vi, vj] + T.if_then_else(vi >= 1, X[vi - 1, vj], T.float32(0))
    for i, j in T.grid(24, 20):
        with T.sblock("gather"):
            vi, vj = T.axis.remap("SS", [i, j])
            G[vi, vj] = H[at[vi], 19 - vj]
    for i, j in T.grid(24, 20):
        with T.sblock("sum"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                s[vi] = T.float32(0)
            s[vi] = s[vi] + G[vi, vj]
    for i, j in T.grid(24, 20):
        with T.sblock("update"):
            vi, vj = T.axis.remap("SS", [i, j])
            Z[vi, vj] = Z[vi, vj] + G[vi, vj] * s[vi]
    for i, j in T.grid(20, 24):
        with T.sblock("turn"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = Z[vj, vi] + H[23 - vj, vi]
    for i, j in T.grid(24, 20):
        with T.sblock("append"):
            vi, vj = T.axis.remap("SS", [i, j])
            cache[vi + 3, vj] = Z[vi, vj]


@pytest.fixture
def small(monkeypatch):
    """What takes more than ten iterations takes long, and a sample may take this many."""

    def of(most: int, counts: tuple[int, ...] = (3, 2)) -> None:
        monkeypatch.setattr(sampling, "_LONG", 10)
        monkeypatch.setattr(sampling, "_MOST", most)
        monkeypatch.setattr(sampling, "_COUNTS", counts)

    return of


def arrays(func: tirx.PrimFunc) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kinds = {param.name: ([int(n) for n in param.shape], str(param.dtype)) for param in func.params}
    return {
        name: rng.integers(24, size=shape).astype(dtype)
        if dtype == "int32"
        else rng.standard_normal(shape).astype(dtype)
        for name, (shape, dtype) in kinds.items()
    }


def compared(func: tirx.PrimFunc, outputs: list[str]) -> float:
    """Compare a sample with the whole; returns the share of the iterations that it takes."""
    sample = sampled(func, outputs, np.random.default_rng(1))
    given = arrays(func)
    whole = Alone(func)(given)
    expected = Reference(func, sample)(given)
    for name in outputs:
        places = np.ix_(*sample.chosen[name])
        np.testing.assert_allclose(expected.arrays[name][places], whole[name][places], rtol=1e-4, atol=1e-4)
        judged = np.zeros(whole[name].shape, bool)
        judged[places] = True
        np.testing.assert_array_equal(judged, ~expected.unsure[name])
        assert sample.judged[name] == judged.sum() < judged.size
        assert not expected.fault(name, whole[name])
        wrong = whole[name].copy()
        wrong[tuple(dims[-1] for dims in sample.chosen[name])] += 50
        assert expected.fault(name, wrong)
    return iterations(sample.func) / iterations(func)


def test_a_sample_is_what_the_whole_is(small):
    small(10**9)
    assert compared(everything, ["Y"]) < 0.9
    assert compared(everything, ["cache", "Y", "Z"]) < 0.95
    assert compared(everything, ["Z"]) < 0.6


@pytest.mark.parametrize("name", ["block", "chain", "norm"])
def test_samples_of_programs(small, programs, name):
    small(10**9)
    func = getattr(programs, name)(24, 30, 16).func
    outputs = {"block": ["out"], "chain": ["first", "second", "third"], "norm": ["out"]}[name]
    assert compared(func, outputs) < 0.6


def test_check_takes_a_sample(small, programs):
    mesh = Mesh({"x": 2})
    sch = axe.Schedule(programs.block(24, 30, 16).func, mesh=mesh)
    _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    sch.split_collective(reduce)
    small(2000)
    report = axe.check(sch, seeds=1, work_dir=None)
    assert report.ok and report.ran == (f"the mesh {mesh}",) and report.judged == {"out": 9}
    assert str(report).endswith("; 9 elements of out compared")
    linear = tvm_ffi.structural_map(programs.block(24, 30, 16).func, (tirx.Max, lambda value: value.a))
    with pytest.raises(axe.CheckError, match="not looked for, as the reference is of a sample"):
        axe.check(sch, origin=linear, seeds=1, work_dir=None)


def test_what_is_made_of_everything_is_refused(small):
    @T.prim_func(s_tir=True)
    def total(X: T.Buffer((64, 64), "float32"), s: T.Buffer((1,), "float32")):
        for u, i, j in T.grid(1, 64, 64):
            with T.sblock("s"):
                vu, vi, vj = T.axis.remap("SRR", [u, i, j])
                with T.init():
                    s[vu] = T.float32(0)
                s[vu] = s[vu] + X[vi, vj]

    small(1000)
    with pytest.raises(InputError, match=r"still 4\.1e\+03 for 2 indices of each dimension"):
        axe.check(axe.Schedule(total, mesh=Mesh({"x": 2})), seeds=1, work_dir=None)


def test_small_functions_are_taken_whole(programs):
    assert sampled(programs.block(24, 30, 16).func, ["out"], np.random.default_rng(0)) is None
