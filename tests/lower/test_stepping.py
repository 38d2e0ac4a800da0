"""Loops that carry state from step to step, of which devices share a part: right, whatever part it is."""

import itertools

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.analysis.blocks import statements
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower.stepping import in_steps

STEPS, N = 3, 6


@T.prim_func(s_tir=True)
def stencil(X: T.Buffer((N,), "float32"), Y: T.Buffer((N,), "float32")):
    """A step reads its neighbours' elements of the one before."""
    U = T.sblock_alloc_buffer((STEPS + 1, N), "float32")
    for i in range(N):
        with T.sblock("first"):
            v = T.axis.spatial(N, i)
            U[0, v] = X[v]
    for t, i in T.grid(STEPS, N):
        with T.sblock("step"):
            s, v = T.axis.remap("SS", [t, i])
            U[s + 1, v] = U[s, v] + U[s, T.max(v - 1, 0)] - U[s, T.min(v + 1, N - 1)]
    for i in range(N):
        with T.sblock("last"):
            v = T.axis.spatial(N, i)
            Y[v] = U[STEPS, v]


@T.prim_func(s_tir=True)
def in_turn(X: T.Buffer((N,), "float32"), Y: T.Buffer((N,), "float32")):
    """Two buffers in turn."""
    U, V = T.sblock_alloc_buffer((N,), "float32"), T.sblock_alloc_buffer((N,), "float32")
    for i in range(N):
        with T.sblock("first"):
            v = T.axis.spatial(N, i)
            U[v] = X[v]
    for _ in range(STEPS):
        for i in range(N):
            with T.sblock("step"):
                v = T.axis.spatial(N, i)
                V[v] = U[v] + U[T.max(v - 1, 0)] - U[T.min(v + 1, N - 1)]
        for i in range(N):
            with T.sblock("back"):
                v = T.axis.spatial(N, i)
                U[v] = V[v]
    for i in range(N):
        with T.sblock("last"):
            v = T.axis.spatial(N, i)
            Y[v] = U[v]


@T.prim_func(s_tir=True)
def sums(X: T.Buffer((N,), "float32"), Y: T.Buffer((N,), "float32")):
    """A step sums over all of the one before, into the same buffer."""
    U = T.sblock_alloc_buffer((STEPS + 1, N), "float32")
    for i in range(N):
        with T.sblock("first"):
            v = T.axis.spatial(N, i)
            U[0, v] = X[v]
    for t, i, k in T.grid(STEPS, N, N):
        with T.sblock("step"):
            s, v, r = T.axis.remap("SSR", [t, i, k])
            with T.init():
                U[s + 1, v] = T.float32(0)
            U[s + 1, v] = U[s + 1, v] + T.cast(T.max(v - r, 0) % 3, "float32") * U[s, r]
    for i in range(N):
        with T.sblock("last"):
            v = T.axis.spatial(N, i)
            Y[v] = U[STEPS, v]


def neighbours(x: np.ndarray) -> np.ndarray:
    around = np.pad(x, 1, mode="edge")
    return x + around[:-2] - around[2:]


def triangle(x: np.ndarray) -> np.ndarray:
    return (np.maximum(np.subtract.outer(range(N), range(N)), 0) % 3) @ x


CASES = {
    f"{name} {', '.join(shared)}": (program, step, shared)
    for name, program, step, choices in (
        ("stencil", stencil, neighbours, [("first", "step", "last"), ("step",)]),
        ("in turn", in_turn, neighbours, [("first", "step", "back", "last"), ("step",), ("back",)]),
        ("sums", sums, triangle, [("first", "step", "last"), ("step",)]),
    )
    for shared in choices
}


@pytest.mark.parametrize("case", CASES)
def test_steps_that_exchange(launched, case):
    program, step, shared = CASES[case]
    sch = axe.Schedule(program, mesh=Mesh({"tp": 2}))
    for block in shared:
        sch.shard(block, "i", "tp")
    with pytest.raises(LowerError):
        axe.compile(sch, work_dir=None, redistribute="refuse")
    exe, workers = axe.compile(sch, work_dir=None), launched(sch.mesh)
    for x in np.random.default_rng(0).integers(-9, 9, (2, N)).astype("float32"):
        exe.run(workers, np.full_like(x, np.nan))
        *_, expected = itertools.accumulate(range(STEPS), lambda state, _: step(state), initial=x)
        np.testing.assert_array_equal(exe.run(workers, x), expected)


def test_what_is_no_loop_of_steps():
    """One that devices share, and one that a block sums over."""
    sch = axe.Schedule(sums, mesh=Mesh({"tp": 2}))
    t, i, k = sch.get_loops(sch.get_sblock("step"))
    sch.reorder(k, t, i)
    assert in_steps(statements(sch.mod["main"].body.block.body)[1]) is None
    sch = axe.Schedule(stencil, mesh=Mesh({"tp": 2}))
    sch.shard("first", "i", "tp")
    first, step, _ = statements(sch.mod["main"].body.block.body)
    assert in_steps(first) is None and len(in_steps(step)) == STEPS


# ---- Less than all ---------------------------------------------------------------------------------------------------


@T.prim_func(s_tir=True)
def waves(X: T.Buffer((12,), "float32"), Y: T.Buffer((12,), "float32")):
    """A step reads its neighbours of the one before, as a sum, and its own element of the one before that."""
    U, V = T.sblock_alloc_buffer((6, 12), "float32"), T.sblock_alloc_buffer((4, 12), "float32")
    for t, i in T.grid(2, 12):
        with T.sblock("first"):
            s, v = T.axis.remap("SS", [t, i])
            U[s, v] = X[v]
    for t in range(4):
        for i, k in T.grid(12, 3):
            with T.sblock("sum"):
                s, v, r = T.axis.remap("SSR", [t, i, k])
                with T.init():
                    V[s, v] = T.float32(0)
                V[s, v] = V[s, v] + T.cast(r + 1, "float32") * U[s + 1, T.max(T.min(v + r - 1, 11), 0)]
        for i in range(12):
            with T.sblock("step"):
                s, v = T.axis.remap("SS", [t, i])
                U[s + 2, v] = V[s, v] - U[s, v] - U[s + 1, T.min(v + 1, 11)]
    for i in range(12):
        with T.sblock("last"):
            v = T.axis.spatial(12, i)
            Y[v] = U[5, v]


@pytest.mark.parametrize("devices", [2, 3])
def test_a_step_that_reads_neighbours_is_sent_these_alone(launched, devices):
    sch = axe.Schedule(waves, mesh=Mesh({"tp": devices}))
    for block in ("first", "sum", "step", "last"):
        sch.shard(block, "i", "tp")
    exe = axe.compile(sch, work_dir=None)
    borders = 4 if devices == 2 else 8  # of the device that has most neighbours
    assert exe.show().count(f"halo U for sum_3: {borders} bytes") == 1 and "gather U" not in exe.show()
    before, x = np.random.default_rng(0).integers(-9, 9, (2, 12)).astype("float32")
    exe.run(launched(sch.mesh), before)
    before = now = x
    for _ in range(4):
        around = np.pad(now, 1, mode="edge")
        before, now = now, around[:-2] + 2 * now + 3 * around[2:] - before - around[2:]
    np.testing.assert_array_equal(exe.run(launched(sch.mesh), x), now)


# ---- State in a result -----------------------------------------------------------------------------------------------


@T.prim_func(s_tir=True)
def running(X: T.Buffer((4, 7), "float32"), Y: T.Buffer((4, 7), "float32")):
    for t, i in T.grid(4, 7):
        with T.sblock("step"):
            s, v = T.axis.remap("SS", [t, i])
            Y[s, v] = T.if_then_else(s > 0, Y[T.max(s - 1, 0), v], T.float32(0)) + X[s, v]


@T.prim_func(s_tir=True)
def decaying(X: T.Buffer((4, 7), "float32"), Y: T.Buffer((7,), "float32")):
    for t, i in T.grid(4, 7):
        with T.sblock("step"):
            s, v = T.axis.remap("SS", [t, i])
            Y[v] = T.float32(2) * Y[v] + X[s, v]


@pytest.mark.parametrize("program", [running, decaying], ids=["all steps", "the last one"])
def test_a_result_that_carries_state(launched, program):
    """It lies on the device that computes it, and is gathered once."""
    sch = axe.Schedule(program, mesh=Mesh({"tp": 2}))
    sch.shard("step", "i", "tp")
    exe, workers = axe.compile(sch, work_dir=None), launched(sch.mesh)
    assert [stage.kind for stage in exe.stages] == ["local", "local", "all-gather"]
    shape = (4, 7) if program is running else (7,)
    for x in np.random.default_rng(0).integers(-9, 9, (2, 4, 7)).astype("float32"):
        given = np.random.default_rng(1).integers(-9, 9, shape).astype("float32")
        *_, last = itertools.accumulate(x, lambda state, row: 2 * state + row, initial=given)
        expected = np.cumsum(x, axis=0) if program is running else last
        np.testing.assert_array_equal(exe.run(workers, x, given), expected)


@pytest.mark.parametrize("declared", [False, True])
def test_steps_that_devices_share_are_refused(declared):
    mesh = Mesh({"tp": 2})
    func = axe.with_layouts(running, {"Y": axe.Layout.sharded((4, 7), mesh, {0: "tp"})}) if declared else running
    sch = axe.Schedule(func, mesh=mesh)
    sch.shard("step", "t", "tp")
    with pytest.raises(
        LowerError, match=r"block 'step' .* that other iterations write, .* share a loop whose iterations"
    ):
        axe.compile(sch, work_dir=None)
