"""Fragments of which threads need what others hold: they go through shared memory, and the result is numpy's."""

import numpy as np
import pytest
from on_cpu import agree, normal, poison
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.layout import Layout
from tvm_axe.machines.cache import Cache


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


@T.prim_func
def uneven(X: T.Buffer((6, 777), "float32"), Y: T.Buffer((6, 777), "float32"), first: T.Buffer((6, 3), "int32")):
    with tile.kernel(2) as b:  # rows that no threads divide, which hold them as if they were longer
        x = tile.fragment((3, 777), "float32")
        most = tile.fragment((3,), "float32")
        total = tile.fragment((3,), "float32")
        at = tile.fragment((3, 3), "int32")
        tile.copy(X[b * 3, 0], x)
        tile.max(x, most)
        tile.top_k(x, None, at)
        with tile.parallel(3, 777) as (i, j):
            x[i, j] = T.exp(x[i, j] - most[i])
        tile.sum(x, total)
        with tile.parallel(3, 777) as (i, j):
            x[i, j] = x[i, j] / total[i]
        tile.copy(x, Y[b * 3, 0])
        tile.copy(at, first[b * 3, 0])


def given(rng):
    """Of each program: its arguments, and what is expected of some of them, by position."""
    x, y, z, rows = (normal(rng, shape) for shape in ((32, 32), 40, (2, 32, 16), (6, 777)))
    at, count = rng.permutation(40).astype("int32"), rng.integers(0, 99, 64).astype("int32")
    shifted, points = np.zeros(40), np.arange(39)
    shifted[at[:39]] = np.where(points > 3, y[points - 1], y[0])
    sums = z.astype("float64").sum(axis=2)
    for k in range(31):
        sums[:, k + 1] -= sums[:, k] * 0.5
    exps = np.exp(rows.astype("float64") - rows.max(axis=1, keepdims=True))
    softmax, largest = exps / exps.sum(axis=1, keepdims=True), np.argsort(-rows, axis=1)[:, :3]
    return {
        crossed: ([x, poison((32, 32))], {1: x + x.T}),
        gathered: ([y, at, poison(40)], {2: shifted}),
        solved: ([z, poison((2, 32)), poison(2)], {1: sums, 2: sums[:, 31] + z[:, 19, :8].max(axis=1)}),
        counted: ([count, np.zeros(4, "int32")], {1: np.bincount(count % 4, minlength=4)}),
        uneven: ([rows, poison((6, 777)), np.full((6, 3), 7, "int32")], {1: softmax, 2: largest}),
    }


PROGRAMS = (crossed, gathered, solved, counted, uneven)


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
    assert "as if it were [3, 896]" in found[uneven] and "through" not in found[uneven]
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
