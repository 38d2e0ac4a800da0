"""Functions of rows: which they are, that every schedule computes the right thing and is replayed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, te, tirx, topi
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing import te_workload

from tvm_axe.machines import resolve_target
from tvm_axe.nests.rows import find_rows, row_schedules


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


def _moments(rows: int, columns: int):
    """Each element less its row's mean, over the root of the mean of squares: two sums by one block."""
    x = te.placeholder((rows, columns), name="x")
    k = te.reduce_axis((0, columns), name="k")
    zeros = lambda *dtypes: [tirx.const(0, dtype) for dtype in dtypes]  # noqa: E731
    both = te.comm_reducer(lambda a, b: [p + q for p, q in zip(a, b)], zeros)
    total, squares = te.compute((rows,), lambda i: both((x[i, k], x[i, k] * x[i, k]), axis=k), name="both")
    y = te.compute(x.shape, lambda i, j: (x[i, j] - total[i] / columns) * tirx.rsqrt(squares[i] / columns), name="y")
    return te.create_prim_func([x, y])


@pytest.mark.parametrize(
    "make, rows, columns, threads, want",
    [
        (_softmax, 8, 128, 2, _softmax_of),
        (_softmax, 7, 64, 2, _softmax_of),
        (_softmax, 1, 64, 2, _softmax_of),
        (_softmax, 6, 200, 2, _softmax_of),
        (
            _moments,
            6,
            160,
            2,
            lambda x: (x - x.mean(axis=1, keepdims=True)) / np.sqrt((x * x).mean(axis=1, keepdims=True)),
        ),
        (_row_sums, 10, 256, 2, lambda x: x.sum(axis=1)),
        (_norm, 1, 1024, 2, lambda x: np.sqrt((x * x).sum(axis=1))),
        (_norm, 1, 256, 1, lambda x: np.sqrt((x * x).sum(axis=1))),
    ],
    ids=[
        "softmax",
        "odd rows",
        "one row",
        "uneven columns",
        "two sums at once",
        "sums",
        "one norm",
        "one norm on one core",
    ],
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
        sch = _replayed(func, change)
        again = s_tir.Schedule(func, seed=n + 1)
        s_tir.schedule.Trace(sch.trace.insts, {}).apply_to_schedule(again, remove_postproc=False)
        assert error(again.mod, target, [x.reshape(shape)], want(x.astype("float64"))) < 1e-6


def _replayed(func: tirx.PrimFunc, change: Callable[[s_tir.Schedule], None]) -> s_tir.Schedule:
    """The schedule that a change makes, which stock makes of its trace as JSON too."""
    sch, again = s_tir.Schedule(func), s_tir.Schedule(func)
    change(sch)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), again)
    tvm.ir.assert_structural_equal(again.mod, sch.mod)
    return sch


def _rms_norm_of(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-5) * w


def _layer_norm_of(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5) * w + b


_NORMS = {
    "rms_norm": (lambda _, *args: relax.op.nn.rms_norm(*args, axes=[-1]), 1, _rms_norm_of),
    "layer_norm": (lambda _, *args: relax.op.nn.layer_norm(*args, axes=[-1]), 2, _layer_norm_of),
    "log_softmax": (lambda _, x: relax.op.nn.log_softmax(x), 0, lambda x: np.log(_softmax_of(x))),
}


@pytest.mark.parametrize("rows", [(1,), (7,), (2, 3)], ids=str)
@pytest.mark.parametrize("columns", [96, 200])
@pytest.mark.parametrize("name", _NORMS)
def test_norms_as_relax_legalizes_them(error, legalized, name, columns, rows):
    build, weights, want = _NORMS[name]
    if name == "log_softmax" and len(rows) > 1:
        rows = (6,)
    target = resolve_target("llvm", threads=2)
    func = legalized([(*rows, columns), *[(columns,)] * weights], build)
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, "float32") for shape in ((*rows, columns), *[(columns,)] * weights)]
    changes = row_schedules(find_rows(s_tir.Schedule(func), target), target)
    assert len(changes) > 1
    for change in changes:
        sch = _replayed(func, change)
        assert error(sch.mod, target, arrays, want(*(array.astype("float64") for array in arrays))) < 1e-6


def test_half_precision_is_reduced_in_vectors_of_single(error, legalized):
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=2)
    build, _, want = _NORMS["rms_norm"]
    func = legalized([(6, 64), (64,)], build, "float16")
    match = find_rows(s_tir.Schedule(func), target)
    assert match.lanes == 8
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((6, 64)).astype("float16"), rng.standard_normal(64).astype("float16")
    sch = _replayed(func, row_schedules(match, target)[0])
    assert error(sch.mod, target, [x, w], want(x.astype("float64"), w.astype("float64"))) < 1e-3


def test_what_is_cheap_is_in_no_buffer(legalized):
    target = resolve_target("llvm", threads=2)
    func = legalized([(8, 768), (768,)], _NORMS["rms_norm"][0])
    sch = s_tir.Schedule(func)
    match = find_rows(sch, target)
    assert match.inlined == ("T_cast", "T_multiply", "T_cast_1", "T_rms_norm")
    row_schedules(match, target)[0](sch)
    buffers = [tuple(map(int, buffer.shape)) for buffer in sch.get(sch.get_sblock("root")).alloc_buffers]
    assert buffers  # the sums and their partials
    assert all(shape[-1] < 768 for shape in buffers)


def test_all_of_a_row_but_the_last_vector_of_partials_is_vectorised(legalized):
    target = resolve_target("llvm", threads=2)
    func = legalized([(8, 192), (192,), (192,)], _NORMS["layer_norm"][0])
    sch = s_tir.Schedule(func)
    row_schedules(find_rows(sch, target), target)[0](sch)
    serial = set()
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if tirx.ForKind.VECTORIZED not in [sch.get(loop).kind for loop in sch.get_loops(block)]:
            serial.add(str(sch.get(block).name_hint))
    assert serial == {"x0_sum", "x0_mean", "x0_var_sum"}


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
