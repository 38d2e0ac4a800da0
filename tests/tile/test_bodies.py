"""Bodies of `parallel` with loops, and names that are given other values."""

import numpy as np
import on_host
import pytest
from on_cpu import agree, normal, poison, run
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache


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


@T.prim_func
def stepped(X: T.Buffer((53,), "int32"), D: T.Buffer((53,), "int32"), Y: T.Buffer((2, 53), "int32")):
    with tile.kernel(1, threads=32):
        x = tile.fragment((53,), "int32")
        y = tile.fragment((53,), "int32")
        n = tile.fragment((53,), "int32")
        tile.copy(X, x)
        tile.fill(y, 9)
        with tile.parallel(53) as i:
            t = x[i]
            count = T.int32(0)
            seen = False
            for k in range(5):
                if t % 2 == 0:
                    t = t // 2
                else:
                    if t > 1 and not seen:
                        t = t * 3 + 1
                        count += 1
                        if count > 1:
                            seen = True
                            y[i] = k
            if y[i] < 4:
                y[i] = y[i] + 5  # the condition is of what was there before
                count = count + 100
            elif i > 0:
                left = X[i - 1]  # which the first point doesn't have
                count = count - left
            if D[i] != 0:
                count = count + t // D[i]
            n[i] = count
        tile.copy(y, Y[0, 0])
        tile.copy(n, Y[1, 0])


def stepped_in_python(x: np.ndarray, d: np.ndarray) -> np.ndarray:
    found = []
    for i, t in enumerate(x.tolist()):
        y, count, seen = 9, 0, False
        for k in range(5):
            if t % 2 == 0:
                t = t // 2
            elif t > 1 and not seen:
                t, count = t * 3 + 1, count + 1
                if count > 1:
                    seen, y = True, k
        if y < 4:
            y, count = y + 5, count + 100
        elif i > 0:
            count -= int(x[i - 1])
        found.append((y, count + (t // int(d[i]) if d[i] else 0)))
    return np.array(found).T


def test_values_that_names_are_given_under_conditions(tmp_path):
    rng = np.random.default_rng(3)
    x, d = (rng.integers(low, 40, 53).astype("int32") for low in (-9, 0))
    d[::5] = 0
    want, y = stepped_in_python(x, d), np.full((2, 53), 7777, "int32")
    agree(stepped, x, d, y)
    np.testing.assert_array_equal(run(stepped, x, d, y)[2], want)
    source = tile.compile(stepped, "cuda:sm_80", Cache(tmp_path)).source
    on_host.run(source, 1, {"X": x, "D": d, "Y": y}, tmp_path)
    np.testing.assert_array_equal(y, want)


def test_a_name_without_a_value_is_refused():
    @T.prim_func
    def func(X: T.Buffer((16,), "int32"), Y: T.Buffer((16,), "int32")):
        with tile.kernel(1), tile.parallel(16) as i:
            t = T.alloc_buffer((1,), "int32", scope="local")
            Y[i] = t[0] + X[i]

    with pytest.raises(TileError, match="parallel: t has no value where it is read"):
        tile.read(func)
