"""Iterations, matrices and expressions, each by itself."""

import numpy as np
import pytest
from tvm import tirx

from tvm_axe.stream.tiled.boxes import Box, NoMatrix, matrix_of
from tvm_axe.stream.tiled.building import view_of
from tvm_axe.stream.tiled.expressions import Evaluator, unknown
from tvm_axe.stream.tiled.points import Points, Side
from tvm_axe.tile.regions import Region, Tile

I, J, K = (tirx.Var(name, "int32") for name in "ijk")


def nest(*loops):
    points = Points.outside({}, {})
    for var, start, extent in loops:
        points = points.inside(var, start, extent, str(var.name))
    return points


def test_iterations_in_order():
    points = nest((I, 0, 3), (J, I, 2 - I % 2), (K, 0, I))
    walked = [(i, j, k) for i in range(3) for j in range(i, i + 2 - i % 2) for k in range(i)]
    assert list(zip(*(points.at(var).tolist() for var in (I, J, K)))) == walked
    assert points.nested(points.at(K + 10 * J).tolist()) == [
        [[10 * j + k for k in range(i)] for j in range(i, i + 2 - i % 2)] for i in range(3)
    ]
    assert [str(dim) for dim in points.dims] == ["3", "~j", "~k"] and points.sizes is None
    assert nest((I, 0, 2), (J, 0, 3)).sizes == (2, 3)
    assert not points.always and nest((I, 0, 2), (J, 0, I + 1)).always


def test_sides_of_a_choice():
    whole = nest((I, 0, 3), (J, 0, 2))
    holds = whole.at(I * J >= 2)
    first, second = (whole.on(Side(whole, holds, each)) for each in (True, False))
    assert first.nested(first.at(I).tolist()) == [2] and second.nested(second.at(10 * I + J).tolist()) == [
        0,
        1,
        10,
        11,
        20,
    ]
    assert first.side.excludes(second.side) and not first.side.excludes(first.side) and not first.side.excludes(None)
    assert first.outer is None and [str(dim) for dim in second.dims] == ["5"]


def test_what_settles_expressions():
    points = nest((I, 0, 2))
    assert points.settles(I + 1) and not points.settles(J)
    assert points.along(I * 10 + K, K, 3).tolist() == [[0, 1, 2], [10, 11, 12]]


def test_views_are_found():
    points = nest((I, 0, 3), (J, 0, 4))
    view = view_of(points.at(5 + 7 * I), points)
    assert (view.shape, view.strides, view.offset) == ((3, 4), (7, 0), 5)
    assert view_of(points.at(I // 2), points) is None
    assert view_of(points.at(I * J), points) is None


def boxes(shape, extents, *starts, points=None):
    tensor = Tile(tirx.decl_buffer(shape, "float32", "X").data, "global", shape, "float32")
    return tensor, [Box(Region(tensor, start, extents), points or nest((I, 0, 2)), "here") for start in starts]


@pytest.mark.parametrize(
    ("shape", "extents", "start", "rows", "columns", "numbers"),
    [
        ((7, 10), (4, 4), (I * 4, 4), 8, 12, [1, 4]),
        ((10,), (4,), (I * 4,), 1, 12, [0, 1]),
        ((3, 7, 10), (1, 4, 16), (1, I * 4, 0), 24, 16, [2, 3]),
        # Heads behind tokens: a head's columns are beside each other.
        ((2, 7, 3, 10), (1, 4, 1, 10), (I, 4, 2, 0), 16, 30, [5, 11]),
    ],
)
def test_tensors_are_matrices(shape, extents, start, rows, columns, numbers):
    tensor, found = boxes(shape, extents, start)
    matrix = matrix_of(tensor, shape, found)
    assert (matrix.rows, matrix.columns, matrix.numbers(found[0]).tolist()) == (rows, columns, numbers)
    x = np.random.default_rng(0).standard_normal(shape)
    filled = matrix.filled(x)
    np.testing.assert_array_equal(matrix.cut(filled), x)
    tile, wide = matrix.tile(found[0]), np.pad(x, [(0, extent) for extent in extents])
    for i, number in enumerate(numbers):
        down, right = divmod(number, matrix.columns // tile.columns)
        at = filled[down * tile.rows :][: tile.rows, right * tile.columns :][:, : tile.columns]
        box = [int(Evaluator({I: i})(each)) for each in start]
        there = wide[tuple(slice(first, first + extent) for first, extent in zip(box, extents))]
        np.testing.assert_array_equal(at.ravel(), there.ravel())


def test_boxes_that_start_anywhere_have_elements():
    tensor, found = boxes((8, 8), (4, 4), (I * 5 + 1, 4))
    matrix = matrix_of(tensor, (8, 8), found)
    assert matrix.numbers(found[0]) is None and matrix.elements(found[0]).tolist() == [12, 52]
    assert (matrix.rows, matrix.columns) == (10, 8)  # the second box reaches two rows beyond the end


@pytest.mark.parametrize(
    ("shape", "extents", "starts", "message"),
    [
        ((8, 8), (4, 4), [(I * 8, 0)], "starts outside of the 8 elements along dimension 0"),
        ((8, 8), (4, 4), [(I - 1, 0)], "starts outside of the 8 elements along dimension 0"),
        ((4, 4, 4), (2, 2, 2), [(0, 0, 0)], "don't lie as rows of one length"),
    ],
)
def test_boxes_that_are_no_tiles(shape, extents, starts, message):
    tensor, found = boxes(shape, extents, *starts)
    with pytest.raises(NoMatrix, match=message):
        matrix_of(tensor, shape, found)


def test_expressions_are_of_their_types():
    x = tirx.Var("x", "float32")
    third = Evaluator({x: np.float32(1) / np.float32(3)})
    assert third(x * tirx.const(3, "float32")).dtype == "float32"
    assert third(tirx.Cast("float16", x)) == np.float16(1 / 3)
    assert Evaluator({I: 300})(tirx.Cast("int8", I)) == 44
    assert Evaluator({I: -7})(tirx.floordiv(I, 2)) == -4 and Evaluator({I: -7})(tirx.truncdiv(I, 2)) == -3
    assert Evaluator({x: np.float32([-1, 4])})(tirx.if_then_else(x > 0, tirx.sqrt(x), x)).tolist() == [-1, 2]
    assert third(tirx.reinterpret("int32", x)) == np.float32(1 / 3).view("int32")
    assert Evaluator({I: 0x3FC0})(tirx.reinterpret("bfloat16", tirx.Cast("uint16", I))) == 1.5
    assert unknown(tirx.exp(x)) is None and "axe_random" in unknown(tirx.call_extern("uint32", "axe_random", I))
