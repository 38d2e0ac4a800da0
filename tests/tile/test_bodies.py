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
