"""Indices that are data: stores whose points nothing else tells apart."""

import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError

DATA = {
    "histogram": ("h[at[i]] = h[at[i]] + 1", "is data"),
    "by a name": ("x = at[i]\nh[x] = 1", "is data"),
    "where another holds": ("if at[i] > 3:\n    h[at[i]] = 1", "is data"),
    "not all of the point": ("o[at[i], i // 2] = 1", "at i=0 and at i=1"),
}
"""Stores whose points data alone tell apart, and what is said of them."""


def by_data(stores: str, more: str = "") -> tirx.PrimFunc:
    lines = "".join(f"            {line}\n" for line in stores.split("\n"))
    source = f"""@T.prim_func
def func(h: T.Buffer((8,), "int32"), o: T.Buffer((8, 8), "int32"), at: T.Buffer((8,), "int32"), k: T.int32):
    with tile.kernel(1) as m:
        with tile.parallel(8{more}) as i:
{lines}"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


@pytest.mark.parametrize("name", DATA)
def test_data_are_not_distinct_unless_the_author_says_so(name):
    stores, says = DATA[name]
    with pytest.raises(TileError, match=says) as refusal:
        tile.read(by_data(stores))
    assert all(valid in str(refusal.value) for valid in ("tile.atomic_add", "distinct=True", "a loop"))
    tile.read(by_data(stores, more=", distinct=True"))


@pytest.mark.parametrize(
    "stores", ["h[at[m] + i] = 1", "h[k + i] = 1", "o[at[i], 7 - i] = 1", "if i == 3:\n    h[at[i]] = 1"]
)
def test_points_told_apart_beside_the_data(stores):
    tile.read(by_data(stores))


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "bool"])
def test_places_that_are_data_of_few_bits(dtype):
    @T.prim_func
    def func(X: T.Buffer((64,), dtype), k: T.int32, H: T.Buffer((256,), "int32")):
        with tile.kernel(1):
            h = tile.shared((256,), "int32")
            tile.fill(h, 0)
            with tile.parallel(64) as i:
                tile.atomic_add(1, h[T.cast(X[i], "int32") + 128])
            with tile.parallel(64) as i:
                h[T.cast(X[k], "int32") * 64 + i] = i
            tile.copy(h, H)

    tile.read(func)
