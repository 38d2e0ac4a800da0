"""Places of elements in the CUDA source of tile programs, which the host runs: CI sees whether they are right."""

import random
from pathlib import Path

import numpy as np
import pytest
import tvm
from interpreter import interpret
from on_host import run
from random_indices import random_index
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.machines.cache import Cache

ROWS, COLUMNS, BLOCKS = 16, 24, 2
POINTS, DIVISORS = ("i", "j", "j", "b"), (2, 3, 4, 6, 8, 24)  # a point's variables i and j, and a block's b


@T.prim_func
def summed(
    X: T.Buffer((32, 24), "float32"),
    P: T.Buffer((24,), "int32"),
    Y: T.Buffer((32, 24), "float32"),
    H: T.Buffer((4,), "int32"),
):
    with tile.kernel(2, threads=64) as b:
        x = tile.shared((16, 24), "float32")
        y = tile.fragment((16, 24), "float32")
        z = tile.fragment((16, 24), "float32")
        total = tile.fragment((24,), "float32")
        tile.copy(X[b * 16, 0], x)
        tile.copy(x, y)
        tile.sum(y, total, axis=0)
        with tile.parallel(16, 24) as (i, j):
            z[i, j] = x[(i + 3) % 16, (j + 13) % 24] + y[15 - i, j] + total[(j + 5) % 24]
        tile.copy(z, Y[b * 16, 0])
        with tile.parallel(24) as j:
            tile.atomic_add(1, H[P[j] % 4])


@T.prim_func
def uneven(
    X: T.Buffer((10, 77), "int32"),
    W: T.Buffer((77,), "int32"),
    Y: T.Buffer((10, 77), "int32"),
    Z: T.Buffer((10, 77), "int32"),
    S: T.Buffer((10,), "int32"),
    C: T.Buffer((2, 77), "int32"),
    K: T.Buffer((10, 3), "int32"),
    A: T.Buffer((2, 2), "int32"),
):
    with tile.kernel(2, threads=64) as b:
        x = tile.fragment((5, 77), "int32")
        w = tile.fragment((77,), "int32")
        y = tile.fragment((5, 77), "int32")
        z = tile.fragment((5, 77), "int32")
        most = tile.fragment((5,), "int32")
        s = tile.fragment((5,), "int32")
        c = tile.fragment((77,), "int32")
        k = tile.fragment((5, 3), "int32")
        a = tile.fragment((2,), "int32")
        tile.copy(X[b * 5, 0], x)
        tile.copy(W, w)
        tile.max(x, most)
        tile.top_k(x, k)
        tile.sum(x, c, axis=0)
        tile.min(x[1:3, 1:77], a)
        tile.cumsum(x, y)
        tile.sort(x, z)
        with tile.parallel(5, 77) as (i, j):
            x[i, j] = most[i] - x[i, j] + w[j]
        tile.sum(x, s)
        with tile.parallel(5, 77) as (i, j):
            y[i, j] = y[i, j] + x[i, 76 - j] + s[i]
        tile.copy(y, Y[b * 5, 0])
        tile.copy(z, Z[b * 5, 0])
        tile.copy(s, S[b * 5])
        tile.copy(c, C[b, 0])
        tile.copy(k, K[b * 5, 0])
        tile.copy(a, A[b, 0])


def drawn(seed: int) -> tirx.PrimFunc:
    """Gathers at random places of a tensor and of a tile, each along another fragment's or tensor's points."""
    rng, outputs, bodies = random.Random(seed), [], []
    for at in range(8):
        m, n = rng.choice([(4, 24), (8, 12), (16, 16), (5, 7), (32, 8)])
        row, column = (random_index(rng, rng.randint(1, 3), POINTS, range(1, 25), DIVISORS) for _ in range(2))
        outputs.append(f"    Y{at}: T.Buffer(({BLOCKS}, {m}, {n}), 'int32'),")
        place = f"[({row}) % {ROWS}, ({column}) % {COLUMNS}]"
        bodies += [f"        with tile.parallel({m}, {n}) as (i, j):"]
        bodies += [f"            Y{at}[b, i, j] = {rng.choice(['X', 'x'])}{place}"]
    lines = ["@T.prim_func", "def gathered(", f"    X: T.Buffer(({ROWS}, {COLUMNS}), 'int32'),", *outputs, "):"]
    lines += [f"    with tile.kernel({BLOCKS}, threads={rng.choice([32, 64])}) as b:"]
    lines += [f"        x = tile.shared(({ROWS}, {COLUMNS}), 'int32')", "        tile.copy(X, x)", *bodies]
    return tvm.script.from_source("\n".join(lines), {"T": T, "tile": tile})


@pytest.mark.parametrize("func", [summed, uneven, 3, 22], ids=["summed", "uneven", "3", "22"])
def test_elements_are_those_that_are_asked_for(func: tirx.PrimFunc | int, tmp_path: Path) -> None:
    """And sums over threads are right; integers, also in float32, so that every bit counts."""
    program = tile.read(drawn(func) if isinstance(func, int) else func)
    rng, arrays = np.random.default_rng(0), dict[str, np.ndarray]()
    for each in program.params:
        shape, dtype = [int(extent) for extent in each.shape], each.dtype
        begin = 0 if each.name == "H" else 7777  # of what is counted, and of what is stored
        array = rng.integers(0, 100, shape) if each.name[0] in "XPW" else np.full(shape, begin)
        arrays[each.name] = array.astype(dtype)
    want = interpret(program, *arrays.values())
    run(tile.compile(program, "cuda:sm_80", Cache(tmp_path / "kept")).source, BLOCKS, arrays, tmp_path)
    for (name, found), expected in zip(arrays.items(), want, strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)
