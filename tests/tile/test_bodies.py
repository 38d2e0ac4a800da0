"""Bodies of `parallel` with loops, and names that are given other values."""

import doctest

import numpy as np
from on_cpu import agree, normal, poison, run
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.tile import bodies


def test_examples():
    found = doctest.testmod(bodies)
    assert found.attempted and not found.failed


@T.prim_func
def smoothed(
    X: T.Buffer((2, 53, 24), "float32"), w: T.Buffer((24, 2, 2), "float32"), Y: T.Buffer((2, 50, 24), "float32")
):
    with tile.kernel(2, tile.cdiv(50, 16)) as (b, m):
        y = tile.fragment((16, 24), "float32")
        with tile.parallel(16, 24) as (i, c):
            total = T.float32(0)
            most = T.float32(-1)
            for k in range(2):
                for n in T.unroll(2):
                    t = T.min(m * 16 + i, 49) + 2 * k + n
                    term = X[b, t, c] * w[c, k, n]
                    most = T.max(most / T.float32(2), term)
                    total = total + most
                    total = total + term
            y[i, c] = total - most
        tile.copy(y, Y[b, m * 16, 0])


def test_loops_and_other_values_are_as_in_python():
    rng = np.random.default_rng(0)
    x, w = normal(rng, (2, 53, 24)), normal(rng, (24, 2, 2))
    agree(smoothed, x, w, poison((2, 50, 24)), bounds=(False,))
    total, most = np.zeros((2, 50, 24)), np.full((2, 50, 24), -1.0)
    for k, n in np.ndindex(2, 2):
        term = x[:, 2 * k + n : 2 * k + n + 50].astype("float64") * w[:, k, n]
        most = np.maximum(most / 2, term)
        total = total + most + term
    np.testing.assert_allclose(run(smoothed, x, w, poison((2, 50, 24)))[2], total - most, rtol=1e-4, atol=1e-5)


def test_planned_for_gpus():
    for target in ("cuda:sm_90a", "cuda:sm_80"):
        tile.lower(smoothed, target)


@T.prim_func
def followed(X: T.Buffer((77,), "float32"), at: T.Buffer((77,), "int32"), Y: T.Buffer((77,), "float32")):
    with tile.kernel(1):
        x = tile.fragment((77,), "float32")
        y = tile.fragment((77,), "float32")
        tile.copy(X, x)
        with tile.parallel(77) as i:
            m = x[i]
            for k in range(9):
                m = T.if_then_else(x[i] > m + T.cast(k - 5, "float32"), x[i], m / 2)
            y[i] = m
        tile.copy(y, Y)
        with tile.parallel(77) as i:  # point by point, as it is no place of a vector's
            m = Y[i]
            for k in range(9):
                m = T.if_then_else(at[i] > k, X[at[i] - k] - m, m * 0.5)
            y[i] = m
        tile.copy(y, Y)


def test_many_choices_that_follow_from_one_another():
    rng = np.random.default_rng(2)
    x, at = normal(rng, 77), rng.integers(0, 77, 77).astype("int32")
    agree(followed, x, at, poison(77), bounds=(False, True))
    wide = x.astype("float64")
    want = wide
    for k in range(9):
        want = np.where(wide > want + k - 5, wide, want / 2)
    for k in range(9):
        want = np.where(at > k, wide[np.maximum(at - k, 0)] - want, want * 0.5)
    np.testing.assert_allclose(run(followed, x, at, poison(77))[2], want, rtol=1e-4, atol=1e-5)
