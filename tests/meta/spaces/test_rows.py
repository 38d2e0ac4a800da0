"""Functions of rows: which they are, that every schedule computes the right thing and is replayed."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, topi
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing import te_workload

from tvm_axe.meta import resolve_target
from tvm_axe.meta.spaces.rows import find_rows, row_schedules


def _softmax(rows: int, columns: int):
    return te.create_prim_func(te_workload.softmax_mn(rows, columns))


def _row_sums(rows: int, columns: int):
    x = te.placeholder((rows, columns), name="x")
    k = te.reduce_axis((0, columns), name="k")
    return te.create_prim_func([x, te.compute((rows,), lambda i: te.sum(x[i, k], axis=k), name="y")])


def _norm(rows: int, columns: int):
    return te.create_prim_func(te_workload.norm_bmn(rows, 8, columns // 8))


def _softmax_of(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(
    "make, rows, columns, threads, want",
    [
        (_softmax, 8, 128, 2, _softmax_of),
        (_softmax, 7, 64, 2, _softmax_of),
        (_row_sums, 10, 256, 2, lambda x: x.sum(axis=1)),
        (_norm, 1, 1024, 2, lambda x: np.sqrt((x * x).sum(axis=1))),
        (_norm, 1, 256, 1, lambda x: np.sqrt((x * x).sum(axis=1))),
    ],
    ids=["softmax", "odd rows", "sums", "one norm", "one norm on one core"],
)
def test_every_schedule_is_right_and_replayed(error, make, rows, columns, threads, want):
    target = resolve_target("llvm", threads=threads)
    func = make(rows, columns)
    match = find_rows(s_tir.Schedule(func), target)
    assert match is not None
    changes = row_schedules(match, target)
    assert len(changes) > 1
    x = np.random.default_rng(0).standard_normal((rows, columns), "float32")
    shape = [int(extent) for extent in ms.arg_info.ArgInfo.from_prim_func(func)[0].shape]
    for n, change in enumerate(changes):
        sch = s_tir.Schedule(func)
        change(sch)
        again = s_tir.Schedule(func, seed=n + 1)
        s_tir.schedule.Trace(sch.trace.insts, {}).apply_to_schedule(again, remove_postproc=False)
        assert error(again.mod, target, [x.reshape(shape)], want(x.astype("float64"))) < 1e-6
        replayed = s_tir.Schedule(func)
        s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), replayed)
        tvm.ir.assert_structural_equal(replayed.mod, sch.mod)


def test_everything_about_a_row_is_in_one_nest():
    target = resolve_target("llvm", threads=2)
    func = _softmax(8, 64)
    sch = s_tir.Schedule(func)
    row_schedules(find_rows(sch, target), target)[0](sch)
    outermost = {
        str(sch.get(sch.get_loops(block)[0]).loop_var.name) for block in sch.get_child_blocks(sch.get_sblock("root"))
    }
    assert len(outermost) == 1


def test_what_has_no_whole_vectors_or_no_rows_is_left_alone(matmul):
    target = resolve_target("llvm", threads=2)
    x = te.placeholder((8, 64), name="x")
    elementwise = te.create_prim_func([x, topi.nn.relu(x)])
    columns = te.reduce_axis((0, 64), name="k")
    y = te.placeholder((64, 8), name="y")
    by_columns = te.create_prim_func([y, te.compute((8,), lambda i: te.sum(y[columns, i], axis=columns), name="z")])
    for func in (_softmax(8, 63), elementwise, by_columns, matmul(8, 64, 64)):
        assert find_rows(s_tir.Schedule(func), target) is None
