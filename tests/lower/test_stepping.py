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
