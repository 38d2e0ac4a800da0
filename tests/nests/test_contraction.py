"""Which blocks are contractions, and the parts of their loops."""

from __future__ import annotations

import pytest
from tvm import s_tir, te
from tvm.s_tir.meta_schedule.testing import te_workload
from tvm.script import tirx as T

from tvm_axe.nests.contraction import find_contractions


@pytest.mark.parametrize(
    "name, rows, columns, run, phases, computed",
    [
        ("C2D", "nhw", "", 64, {}, True),
        ("GRP", "nhw", "", 32, {}, True),
        ("DEP", "nhw", "", 0, {}, True),
        ("T2D", "nhw", "", 256, {"h": 2, "w": 2, "rh": 2, "rw": 2}, True),
        ("GMM", "i", "", 128, {}, False),
    ],
)
def test_the_parts_of_convolutions_and_products(name, rows, columns, run, phases, computed):
    sch = s_tir.Schedule(te_workload.create_te_workload(name, 0))
    (match,) = find_contractions(sch)
    loops = [str(sch.get(loop).loop_var.name) for loop in sch.get_loops(sch.get_sblock(match.block))]
    assert "".join(loops[n] for n in match.rows) == rows
    assert "".join(loops[n] for n in match.columns) == columns
    assert {loops[n]: step for n, step in match.phases.items()} == phases
    assert (match.run, match.computed, match.plain) == (run, computed, name == "GMM")


def test_a_capsules_further_columns_are_no_rows():
    sch = s_tir.Schedule(te_workload.create_te_workload("CAP", 0))
    (match,) = find_contractions(sch)
    names = [str(sch.get(loop).loop_var.name) for loop in sch.get_loops(sch.get_sblock(match.block))]
    assert [names[n] for n in match.rows] == ["n", "h", "w", "cap_i"]
    assert [names[n] for n in match.columns] == ["cap_j"]


def test_weights_that_a_block_makes_are_known():
    (match,) = find_contractions(s_tir.Schedule(te_workload.create_te_workload("TBG", 0)))
    assert match.made
    assert match.buffers == ("query_T", "value_T", "C")


def test_weights_may_be_stored_by_columns():
    x, w = te.placeholder((8, 6), name="x"), te.placeholder((10, 6), name="w")
    k = te.reduce_axis((0, 6), name="k")
    y = te.compute((8, 10), lambda i, j: te.sum(x[i, k] * w[j, k], axis=k), name="y")
    (match,) = find_contractions(s_tir.Schedule(te.create_prim_func([x, w, y])))
    assert (match.weights_dim, match.weights_rank) == (0, 2)


@T.prim_func(s_tir=True)
def _guarded(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            T.where(i < 7)
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def _square(A: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * A[vk, vj]


@T.prim_func(s_tir=True)
def _integer(A: T.Buffer((8, 8), "int32"), B: T.Buffer((8, 8), "int32"), C: T.Buffer((8, 8), "int32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = 0
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def _mixed(A: T.Buffer((8, 16), "float32"), B: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk + vj] * B[vk, vj]


@T.prim_func(s_tir=True)
def _from_one(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(1)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@pytest.mark.parametrize("func", [_guarded, _square, _integer, _mixed, _from_one])
def test_other_patterns_are_none(func):
    assert find_contractions(s_tir.Schedule(func)) == []
