"""To and from the compiler's layouts and index maps, judged by the compiler's own application of them."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.tirx.layout import TileLayout

from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError, convert
from tvm_axe.layout.axes import MEMORY_AXES
from tvm_axe.layout.convert import from_index_map, from_tile_layout, to_index_map, to_tile_layout

quick = settings(derandomize=True, max_examples=80, deadline=None)
CHAINS = (["bx", "by", "wgid"], ["bz", "warpid"], ["wgid", "wid_in_wg"], ["wid_in_wg", "laneid"], ["cbz", "cby", "tx"])


@st.composite
def layouts(draw, replicas=2):
    axes = st.sampled_from([*draw(st.sampled_from(CHAINS)), *MEMORY_AXES])
    iters = st.builds(Iter, st.integers(1, 5), st.integers(-20, 20).filter(bool), axes)
    offset = draw(st.dictionaries(axes, st.integers(-(2**40), 2**40), max_size=2))
    return Layout(draw(st.lists(iters, max_size=4)), draw(st.lists(iters, max_size=replicas)), offset)


composed = st.builds(
    lambda fine, count, more, tile, inner: ComposeLayout(fine, count, count + more, tile, inner),
    *[st.integers(0, 4), st.integers(0, 3), st.integers(0, 2), layouts(), st.booleans()],
)


@quick
@given(st.one_of(layouts(), composed))
def test_tile_layouts_come_back_as_they_were(layout):
    assert from_tile_layout(to_tile_layout(layout)) == layout


def constants(places):
    return {str(axis): int(place) for axis, place in places.items() if int(place)}


@quick
@given(layouts(replicas=0))
def test_the_compiler_applies_a_tile_layout_as_we_do(layout):
    tile = to_tile_layout(layout)
    for x in range(0, layout.size(), max(1, layout.size() // 7)):
        (point,) = layout.apply(x)
        assert constants(tile.apply(x)) == dict(point)


def test_a_swizzle_is_the_compilers():
    shared = ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]"))
    tile = to_tile_layout(shared)
    for x in range(0, 512, 5):
        (point,) = shared.apply(x)
        assert constants(tile.apply(x)) == dict(point)


def test_symbolic_extents_cross_over():
    n = tirx.Var("n", "int32")
    layout = Layout([Iter(n, 4, "m"), Iter(4, 1, "m")])
    tile = to_tile_layout(layout)
    assert str(tile) == "T.TileLayout(T.S[(n, 4):(4, 1)])"
    assert from_tile_layout(tile) == layout


def test_one_step_of_stride_0_is_one_step():
    tile = TileLayout.from_iters([tirx.layout.Iter(1, 0, "m"), tirx.layout.Iter(4, 1, "m")])
    assert from_tile_layout(tile) == Layout.parse("S[(1, 4) : (1, 1)]")


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@st.composite
def placed_shapes(draw):
    """A shape, and a layout without replicas or negative positions on two axes, in which each dimension is cut."""
    shape = draw(shapes)
    shard = []
    for extent in shape:
        inner = draw(st.sampled_from([d for d in range(1, extent + 1) if extent % d == 0]))
        for part in (extent // inner, inner):
            shard.append(Iter(part, draw(st.integers(1, 30)), draw(st.sampled_from(["m", "laneid"]))))
    offset = draw(st.dictionaries(st.sampled_from(["m", "laneid"]), st.integers(0, 9), max_size=2))
    if draw(st.booleans()):
        shard = [it for it in shard if it.extent > 1]
    return Layout(shard, (), offset), shape


@quick
@given(placed_shapes())
def test_an_index_map_maps_as_the_layout_and_comes_back(case):
    layout, shape = case
    index_map = to_index_map(layout, shape, ("laneid", "m"))
    for index in np.ndindex(*shape):
        (point,) = layout.apply(*map(int, index), shape=shape)
        found = index_map.map_indices([tirx.IntImm("int64", int(i)) for i in index])
        assert [int(place) for place in found] == [point["laneid"], point["m"]]
    assert from_index_map(index_map, shape, ("laneid", "m")).equivalent(layout)


@st.composite
def maps(draw):
    """A shape, and a map that splits its indices, permutes the parts, and merges some neighbours."""
    shape = draw(shapes)
    splits = [draw(st.sampled_from([d for d in range(1, extent + 1) if extent % d == 0])) for extent in shape]
    order = draw(st.permutations(range(2 * len(shape))))
    merged = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))

    def mapping(*indices):
        parts = [part for i, d in zip(indices, splits) for part in (i // d, i % d)]
        extents = [part for n, d in zip(shape, splits) for part in (n // d, d)]
        finals = []
        for k, join in zip(order, merged):
            if join and finals:
                finals[-1] = finals[-1] * extents[k] + parts[k]
            else:
                finals.append(parts[k])
        return finals

    return shape, tirx.IndexMap.from_func(mapping, ndim=len(shape))


@quick
@given(maps())
def test_an_index_map_is_read_as_the_compiler_applies_it(case):
    shape, index_map = case
    layout = from_index_map(index_map, shape)
    buffer = [int(extent) for extent in index_map.map_shape(shape)]
    assert math.prod(buffer) == layout.size() == math.prod(shape)
    for index in np.ndindex(*shape):
        found = [int(i) for i in index_map.map_indices([tirx.IntImm("int64", int(i)) for i in index])]
        (point,) = layout.apply(*map(int, index), shape=shape)
        assert point["m"] == np.ravel_multi_index(found, buffer)


@pytest.mark.parametrize(
    ("function", "shape", "text"),
    [
        (lambda i, j: [j, i], (4, 8), "S[(4, 8) : (1, 4)]"),
        (lambda i, j: [(i * 8 + j) // 4, (i * 8 + j) % 4], (4, 8), "S[32 : 1]"),
        (lambda i: [i // 8 % 2, i // 16, i % 8], (32,), "S[(2, 2, 8) : (8, 16, 1)]"),
        (lambda i, j: [(j * 4 + i) // 8, (j * 4 + i) % 8], (4, 8), "S[(4, 8) : (1, 4)]"),
        (lambda i: [(i + i % 4) // 4, i % 4], (8,), "S[(2, 2, 2) : (4, 6, 1)]"),
        (lambda i: [i + i % 4], (8,), "S[(2, 4) : (4, 2)]"),
        (lambda i: [(i * 2 + 1) // 2], (8,), "S[8 : 1]"),
        (lambda i: [i % 2, (i - i % 2) // 2], (8,), "S[(4, 2) : (1, 4)]"),
        (lambda i: [7 - i], (8,), "S[8 : -1] + 7"),
        (lambda i, j: [i * 10 + j + 3], (4, 8), "S[(4, 8) : (10, 1)] + 3"),
        (lambda i, j: [i, j], (1, 8), "S[8 : 1]"),
    ],
)
def test_maps_by_hand(function, shape, text):
    index_map = tirx.IndexMap.from_func(function)
    layout = from_index_map(index_map, shape)
    assert str(layout) == text
    for index in np.ndindex(*shape):
        (point,) = layout.apply(*map(int, index), shape=shape)
        found = [int(i) for i in index_map.map_indices([tirx.IntImm("int64", int(i)) for i in index])]
        position = 0
        for place, extent in zip(found, _extents(index_map, shape)):
            position = position * extent + place
        assert point["m"] == position


def _extents(index_map, shape):
    """One more than the highest of each final index."""
    places = [
        [int(i) for i in index_map.map_indices([tirx.IntImm("int64", int(i)) for i in index])]
        for index in np.ndindex(*shape)
    ]
    return [max(column) + 1 for column in zip(*places)]


def test_a_swizzle_becomes_an_exclusive_or():
    shared = ComposeLayout(1, 2, 2, Layout.parse("S[(4, 8) : (8, 1)]"))
    index_map = to_index_map(shared, (4, 8), index_dtype="int32")
    for index in np.ndindex(4, 8):
        (point,) = shared.apply(*map(int, index), shape=(4, 8))
        (found,) = index_map.map_indices([int(i) for i in index])
        assert int(found) == point["m"]


def test_a_layout_across_dimensions_and_a_symbolic_shape():
    flat = to_index_map(Layout.parse("S[(3, 8) : (1, 3)]"), (4, 6))
    assert [int(i) for i in flat.map_indices([tirx.IntImm("int64", 3), tirx.IntImm("int64", 5)])] == [23]
    n = tirx.Var("n", "int64")
    tiles = to_index_map(Layout([Iter(n, 4, "m"), Iter(4, 1, "m")]), (n, 4))
    assert str(tiles.final_indices[0]) == "i0 * T.int64(4) + i1"


N = tirx.Var("n", "int32")


def _shuffled(i):
    return [tirx.bitwise_xor(i, i // 2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_tile_layout(Layout.parse("S[(2, 8) : (1@tp, 1)]")), "is on mesh axis 'tp'; project it"),
        (lambda: to_tile_layout(Layout.parse("S[(2, 8) : (1@bx, 1@tx)]")), "chain of scopes, .* has bx, tx"),
        (lambda: to_tile_layout(Layout.parse("S[(2, 8) : (1@tx, 1@laneid)]")), "chain of scopes, .* has tx, laneid"),
        (lambda: to_tile_layout(Layout.parse("S[(2, 8) : (1@wgid, 1@laneid)]")), "has wgid, laneid"),
        (lambda: from_tile_layout("S[4 : 1]"), "tile must be a TileLayout or a ComposeLayout"),
        (
            lambda: from_tile_layout(TileLayout.from_iters([tirx.layout.Iter(4, 0, "m")])),
            "an iter's stride must not be 0",
        ),
        (lambda: to_index_map(Layout.parse("S[8 : 1] + R[2 : 8]"), (8,)), "one place, and layout .* has replicas"),
        (lambda: to_index_map(Layout.parse("S[8 : 1@laneid]"), (8,)), "axes must have every axis .* 'laneid'"),
        (lambda: to_index_map(Layout.parse("S[8 : -1]"), (8,)), "goes below on axis 'm'"),
        (lambda: to_index_map(Layout.parse("S[8 : 1]"), (4,)), r"places 8 elements, unlike shape \(4,\)"),
        (lambda: to_index_map(Layout.parse("S[8 : 1]"), (8,), index_dtype="int8"), "index_dtype must be 'int32' or"),
        (lambda: to_index_map(Layout([Iter(N, 1, "m")]), (N,)), "n is of type int32, and its context of int64"),
        (lambda: to_index_map(Layout.parse("S[8 : 1]"), (8,), "m"), "axes must be a sequence of names"),
        (lambda: to_index_map(Layout.parse("S[8 : 1]"), (8,), ("m", "m")), "axes must be different"),
        (lambda: read(_shuffled, (8,)), "BitwiseXor in .*: a layout sums, splits and merges indices"),
        (lambda: read(lambda i: [i // 3], (8,)), r"division by 3 doesn't fall between digits .* from 0 to 7"),
        (lambda: read(lambda i: [(i + 1) // 2], (8,)), "division by 2 doesn't fall between digits"),
        (lambda: read(lambda i: [tirx.truncdiv(i - 4, 4) + 1, i % 4], (8,)), "divides towards zero .* as low as -4"),
        (lambda: read(lambda i: [i * i], (8,)), "multiplies indices"),
        (lambda: read(lambda i, j: [i // (j + 1), j], (8, 8)), "divides by"),
        (lambda: read(lambda i: [i // 2], (8,)), r"takes index 0 // 1 % 2 nowhere: elements share places"),
        (lambda: read(lambda i, j: [i], (8, 8)), r"takes index 1 // 1 % 8 nowhere"),
        (lambda: read(lambda i: [i // 2, i % 4], (8,), ("m", "laneid")), "to m and laneid, and an iter is on one axis"),
        (lambda: read(lambda i: [i // 2 + i % 3], (6,)), "parts of an index overlap, at multiples of 3 and of 2"),
        (lambda: read(lambda i: [i - 1], (8,)), "final index 0 goes below 0, to -1"),
        (lambda: read(lambda i: [i], (8, 8)), r"maps 1 indices, and shape \(8, 8\) has 2 dimensions"),
        (lambda: read(lambda i: [i], (8,), ("m", "laneid")), "has 1 final indices, and axes are 2"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


def read(function, shape, axes=None):
    return from_index_map(tirx.IndexMap.from_func(function), shape, axes)


def test_conversions_import_none_of_the_packages_they_convert_to():
    folder = Path(convert.__file__).parents[2]
    program = f"""
import sys, types
package = types.ModuleType("tvm_axe")  # in place of the package's own, which imports the compiler for the other folders
package.__path__ = [{str(folder)!r}]
sys.modules["tvm_axe"] = package
sys.modules.update(dict.fromkeys(["tvm", "tvm_ffi", "torch", "jax", "triton"]))
from tvm_axe.layout import Layout, Mesh, convert
print(convert.to_cute(Layout.parse("S[(4, 8) : (1, 4)]"), (4, 8)))
print(convert.to_partition_spec(Layout.sharded((8, 8), Mesh({{"tp": 2}}), {{1: "tp"}}), (8, 8), Mesh({{"tp": 2}})))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "(4,8):(1,4)\n(None, 'tp')\n", done.stderr
