"""Fragments of which threads need what others hold: they go through shared memory, and the result is numpy's."""

import numpy as np
import pytest
from on_cpu import agree, normal, poison
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.layout import Layout
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.targets.cuda.fragments.infer import find_shared_out_badly


@T.prim_func
def crossed(X: T.Buffer((32, 32), "float32"), Y: T.Buffer((32, 32), "float32")):
    with tile.kernel(1, threads=64):
        x = tile.fragment((32, 32), "float32")
        y = tile.fragment((32, 32), "float32")
        tile.copy(X, x)
        with tile.parallel(32, 32) as (i, j):
            y[i, j] = x[j, i] + x[i, j]
        tile.copy(y, Y)


@T.prim_func
def gathered(X: T.Buffer((40,), "float32"), at: T.Buffer((40,), "int32"), Y: T.Buffer((40,), "float32")):
    with tile.kernel(1):
        x = tile.fragment((40,), "float32")
        y = tile.fragment((40,), "float32")
        tile.copy(X, x)
        tile.fill(y, 0)
        with tile.parallel(39, distinct=True) as i:  # a shift under a condition, stored at a place that is data
            y[at[i]] = T.if_then_else(i > 3, x[i - 1], x[0])
        tile.copy(y, Y)


@T.prim_func
def solved(X: T.Buffer((2, 32, 16), "float32"), Y: T.Buffer((2, 32), "float32"), last: T.Buffer((2,), "float32")):
    with tile.kernel(2) as b:
        x = tile.fragment((32, 16), "float32")
        y = tile.fragment((32,), "float32", layout=Layout.parse("S[32 : 1@tx] + R[4 : 32@tx]"))
        part = tile.fragment((16,), "float32")
        tile.copy(X[b, 0, 0], x)
        tile.sum(x, y)  # by threads that don't hold it
        tile.max(x[16:32, 0:8], part)
        for k in range(31):
            y[k + 1] = y[k + 1] - y[k] * 0.5  # one element, outside of `parallel`
        last[b] = y[31] + part[3]
        tile.copy(y, Y[b, 0])


@T.prim_func
def counted(X: T.Buffer((64,), "int32"), counts: T.Buffer((4,), "int32")):
    with tile.kernel(64) as b:
        tile.atomic_add(1, counts[X[b] % 4])


def given(rng):
    """Of each program: its arguments, and what is expected of some of them, by position."""
    x, y, z = (normal(rng, shape) for shape in ((32, 32), 40, (2, 32, 16)))
    at, count = rng.permutation(40).astype("int32"), rng.integers(0, 99, 64).astype("int32")
    shifted, points = np.zeros(40), np.arange(39)
    shifted[at[:39]] = np.where(points > 3, y[points - 1], y[0])
    sums = z.astype("float64").sum(axis=2)
    for k in range(31):
        sums[:, k + 1] -= sums[:, k] * 0.5
    return {
        crossed: ([x, poison((32, 32))], {1: x + x.T}),
        gathered: ([y, at, poison(40)], {2: shifted}),
        solved: ([z, poison((2, 32)), poison(2)], {1: sums, 2: sums[:, 31] + z[:, 19, :8].max(axis=1)}),
        counted: ([count, np.zeros(4, "int32")], {1: np.bincount(count % 4, minlength=4)}),
    }


PROGRAMS = (crossed, gathered, solved, counted)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.attrs["global_symbol"])
def test_on_a_cpu_and_in_the_interpreter(program):
    arrays, _ = given(np.random.default_rng(0))[program]
    agree(program, *arrays, bounds=(False,))


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_planned_and_explained(target):
    found = {program: tile.plan(program, target).explain() for program in PROGRAMS}
    assert "parallel 32 x 32 into y: x through 4096 bytes of shared memory" in found[crossed]
    assert "parallel 39 into y: x through 160 bytes" in found[gathered]
    assert "parallel 39 into y: y through 160 bytes" in found[gathered]
    assert "parallel 1 into y: y through 128 bytes" in found[solved]
    for program in PROGRAMS:
        tile.lower(program, target)


def test_what_threads_hold_stays_in_registers():
    @T.prim_func
    def halves(X: T.Buffer((32, 64), "float32"), Y: T.Buffer((32, 64), "float32")):
        with tile.kernel(1):
            x = tile.fragment((32, 64), "float32")
            row = tile.fragment((32,), "float32")
            tile.copy(X, x)
            tile.sum(x, row)
            with tile.parallel(32, 64) as (i, j):
                x[i, j] = x[i, j] / row[i]
            tile.copy(x, Y)

    assert "through" not in tile.plan(halves, "cuda:sm_80").explain()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.attrs["global_symbol"])
def test_on_a_gpu(cuda, tmp_path, program):
    arrays, expected = given(np.random.default_rng(1))[program]
    tile.compile(program, "cuda", Cache(tmp_path))(*arrays)
    for position, want in expected.items():
        np.testing.assert_allclose(arrays[position], want, rtol=1e-5, atol=1e-5)


def test_few_threads_that_have_elements_of_their_own_are_named():
    def found(width):
        @T.prim_func
        def copied(X: T.Buffer((8, width), "float32"), Y: T.Buffer((8, width), "float32")):
            with tile.kernel(8, threads=128) as r:
                x = tile.fragment((width,), "float32")
                tile.copy(X[r, 0], x)
                tile.copy(x, Y[r, 0])

        plan = tile.plan(copied, "cuda:sm_80")
        return find_shared_out_badly(plan.fragments, plan.threads)

    (said,) = found(1000)
    assert "is held by 8 threads of 128" in said and "1024 columns avoid it" in said
    assert not found(1024) and not found(96)
