"""What streams have nothing for is refused by the line of a tile program, with what would work."""

import re

import numpy as np
import pytest
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.stream import Accelerator, StreamError, from_tile


@T.prim_func
def draws(Y: T.Buffer((4, 64), "float32")):
    with tile.kernel(4) as i:
        y = tile.fragment((1, 64), "float32")
        with tile.parallel(1, 64) as (r, c):
            y[r, c] = tile.random(7, i * 64 + c)
        tile.copy(y, Y[i, 0])


@T.prim_func
def waits(X: T.Buffer((4, 64), "float32"), ready: T.Buffer((4,), "int32"), Y: T.Buffer((4, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((1, 64), "float32")
        tile.wait(ready[i], 1)
        tile.copy(X[i, 0], x)
        tile.copy(x, Y[i, 0])


@T.prim_func
def ends(X: T.Buffer((4, 8, 64), "float32"), stop: T.Buffer((4,), "int32"), Y: T.Buffer((4, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((1, 64), "float32")
        at = tile.local((1,), "int32")
        tile.fill(x, 0)
        at[0] = 0
        while at[0] < stop[i]:
            with tile.parallel(1, 64) as (r, c):
                x[r, c] = x[r, c] + X[i, 0, c]
            at[0] = at[0] + 1
        tile.copy(x, Y[i, 0])


@T.prim_func
def adds(X: T.Buffer((4, 64), "float32"), Y: T.Buffer((1, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((1, 64), "float32")
        tile.copy(X[i, 0], x)
        tile.copy(x, Y[0, 0], atomic="add")


@T.prim_func
def gathers(X: T.Buffer((64, 64), "float32"), at: T.Buffer((8,), "int32"), Y: T.Buffer((8, 64), "float32")):
    with tile.kernel(1) as i:
        y = tile.fragment((8, 64), "float32")
        with tile.parallel(8, 64) as (r, c):
            y[r, c] = X[at[r], c]
        tile.copy(y, Y[i, 0])


@T.prim_func
def begins(X: T.Buffer((8, 64), "float32"), rows: T.Buffer((4,), "int32"), Y: T.Buffer((4, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((1, 64), "float32")
        tile.copy(X[rows[i], 0], x)
        tile.copy(x, Y[i, 0])


@T.prim_func
def rewrites(X: T.Buffer((8, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((2, 64), "float32")
        tile.copy(X[i * 2, 0], x)
        tile.copy(x, X[i * 2, 0])


@T.prim_func
def scatters(X: T.Buffer((8, 64), "float32"), Y: T.Buffer((8, 64), "float32")):
    with tile.kernel(2) as i:
        x = tile.fragment((4, 64), "float32")
        tile.copy(X[i * 4, 0], x)
        with tile.parallel(4, 64) as (r, c):
            if x[r, c] > T.float32(0):
                Y[i * 4 + r, c] = x[r, c]


@T.prim_func
def leaves(X: T.Buffer((8, 64), "float32"), Y: T.Buffer((4, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((1, 64), "float32")
        y = tile.fragment((1, 64), "float32")
        tile.fill(y, 0)
        if i < 3:
            for k in range(2):
                tile.copy(X[i * 2 + k, 0], x)
                with tile.parallel(1, 64) as (r, c):
                    y[r, c] = y[r, c] + x[r, c]
        tile.copy(y, Y[i, 0])


@T.prim_func
def twice(X: T.Buffer((8, 64), "float32"), Y: T.Buffer((8, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((1, 64), "float32")
        tile.copy(X[i * 2 + 1, 0], x)
        tile.copy(x, Y[i * 2 + 1, 0])
        tile.copy(X[i * 2, 0], x)
        tile.copy(x, Y[i * 2, 0])


@T.prim_func
def between(X: T.Buffer((4, 64), "float32"), Y: T.Buffer((1, 64), "float32")):
    with tile.kernel(1) as i:
        x = tile.fragment((1, 64), "float32")
        y = tile.fragment((1, 64), "float32")
        tile.fill(y, 0)
        for a in range(2):
            for b in range(2):
                tile.copy(X[a * 2 + b, 0], x)
                with tile.parallel(1, 64) as (r, c):
                    y[r, c] = y[r, c] + x[r, c]
            with tile.parallel(1, 64) as (r, c):
                y[r, c] = y[r, c] * T.float32(2)
        tile.copy(y, Y[i, 0])


@pytest.mark.parametrize(
    ("program", "line", "why"),
    [
        (draws, "with tile.parallel(1, 64) as (r, c):", "compute it before, and pass a tensor"),
        (waits, "tile.wait(ready[i], 1)", "let one block do what comes before, in a loop"),
        (adds, 'tile.copy(x, Y[0, 0], atomic="add")', "sum in a tile, over a loop of the block"),
        (gathers, "with tile.parallel(8, 64) as (r, c):", "copy a box, and choose among its elements"),
        (begins, "tile.copy(X[rows[i], 0], x)", "pass the tensors that say so in `given`"),
        (rewrites, "tile.copy(X[i * 2, 0], x)", "store to another tensor"),
        (scatters, "with tile.parallel(4, 64) as (r, c):", "store all of a box"),
        (leaves, "if i < 3:", "put what reads it into the branch"),
        (twice, "tile.copy(x, Y[i * 2, 0])", "store each tensor once"),
        (between, "for b in range(2):", "let one loop hand it on"),
    ],
    ids=lambda each: str(each.attrs["global_symbol"]) if hasattr(each, "attrs") else None,
)
def test_refusals_name_the_line_and_the_remedy(program, line, why):
    with pytest.raises(StreamError) as refused:
        from_tile(program, Accelerator())
    message = str(refused.value)
    number = int(re.search(r"test_refused.py, line (\d+): ", message)[1])
    with open(__file__, encoding="utf-8") as source:
        assert source.read().splitlines()[number - 1].strip() == line
    assert why in message


def test_a_loop_that_ends_early_is_refused_near_its_line():
    """It is read as other statements than were written, so that the first in it is named."""
    with pytest.raises(StreamError, match=r"refused.py, near line \d+: while ended == 0: .* run to the end") as refused:
        from_tile(ends, Accelerator())
    with open(__file__, encoding="utf-8") as source:
        number = int(re.search(r"line (\d+)", str(refused.value))[1])
        assert source.read().splitlines()[number - 2].strip() == "while at[0] < stop[i]:"


def test_arrays_that_do_not_fit():
    streams = from_tile(rows_of_two, Accelerator())
    with pytest.raises(StreamError, match=r"tensor 'X' is of shape \(8, 64\), and gets an array of \(64, 8\)"):
        streams.run({"X": np.zeros((64, 8), "float32")})
    with pytest.raises(StreamError, match="moves no tensor 'Z'; there are X, Y"):
        streams.run({"Z": np.zeros((64, 8), "float32")})


@T.prim_func
def rows_of_two(X: T.Buffer((8, 64), "float32"), Y: T.Buffer((8, 64), "float32")):
    with tile.kernel(4) as i:
        x = tile.fragment((2, 64), "float32")
        tile.copy(X[i * 2, 0], x)
        tile.copy(x, Y[i * 2, 0])
