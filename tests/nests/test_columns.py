"""Functions of columns: which they are, that every schedule computes the right thing and is replayed."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te, tirx, topi
from tvm.s_tir.meta_schedule.testing import te_workload

from tvm_axe.machines import resolve_target
from tvm_axe.nests.columns import column_schedules, find_columns


def _softmax_of(x: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


_OPERATORS = {
    "softmax": (relax.op.nn.softmax, _softmax_of),
    "log_softmax": (relax.op.nn.log_softmax, lambda x, axis: np.log(_softmax_of(x, axis))),
    "mean": (relax.op.mean, lambda x, axis: x.mean(axis=axis)),
    "max": (relax.op.max, lambda x, axis: x.max(axis=axis)),
}


@pytest.mark.parametrize("shape, axis", [((3, 13, 24), 1), ((11, 40), 0), ((2, 5, 3, 7), 1)], ids=str)
@pytest.mark.parametrize("name", _OPERATORS)
def test_every_schedule_is_right_and_replayed(error, legalized, name, shape, axis):
    build, want = _OPERATORS[name]
    func = legalized([shape], lambda _, x: build(x, axis))
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=2)
    changes = column_schedules(find_columns(s_tir.Schedule(func)), target)
    assert changes
    x = np.random.default_rng(0).standard_normal(shape, "float32")
    for change in changes:
        sch = s_tir.Schedule(func)
        change(sch)
        again = s_tir.Schedule(func)
        s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), again)
        tvm.ir.assert_structural_equal(again.mod, sch.mod)
        assert error(sch.mod, target, [x], want(x.astype("float64"), axis)) < 1e-6


def test_everything_about_a_part_is_in_one_nest_of_vectors(legalized):
    func = legalized([(3, 13, 64)], lambda _, x: relax.op.nn.softmax(x, 1))
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=2)
    sch = s_tir.Schedule(func)
    column_schedules(find_columns(sch), target)[0](sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    nests = [[sch.get(loop) for loop in sch.get_loops(block)] for block in blocks]
    assert {str(nest[0].loop_var.name) for nest in nests} == {str(nests[0][0].loop_var.name)}
    assert all((nest[-1].kind, int(nest[-1].extent)) == (tirx.ForKind.VECTORIZED, 32) for nest in nests)


def test_what_reduces_the_last_axis_or_has_few_columns_is_left_alone(matmul, legalized):
    x = te.placeholder((8, 64), name="x")
    others = [
        te.create_prim_func(te_workload.softmax_mn(8, 64)),
        te.create_prim_func([x, topi.nn.relu(x)]),
        matmul(8, 64, 64),
    ]
    for func in others:
        assert find_columns(s_tir.Schedule(func)) is None
    few = legalized([(8, 16, 3)], lambda _, x: relax.op.nn.softmax(x, 1))
    assert column_schedules(find_columns(s_tir.Schedule(few)), resolve_target("llvm", threads=2)) == []


def test_it_is_searched_before_upstreams_rules(legalized, designs):
    func = legalized([(3, 13, 24)], lambda _, x: relax.op.nn.softmax(x, 1))
    target = resolve_target("llvm", threads=2)
    spaces = designs(func, target)
    assert "meta_schedule.unroll" not in str(spaces[0].trace)
    assert "meta_schedule.unroll" in str(spaces[-1].trace)
