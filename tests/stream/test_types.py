"""Dims, tiles and stream types."""

import pytest
import sympy

from tvm_axe.layout import Layout
from tvm_axe.stream import Buffer, Dim, Scalar, Selector, StreamError, StreamType, Tile, Tuple, ragged, symbol
from tvm_axe.stream.types import as_dims, count, data_differ, differ, merged, shapes_differ

B, L = symbol("B"), symbol("L")


def test_a_ragged_dim_absorbs_the_dims_outside_of_it():
    assert count(as_dims((B, ragged("L"), 4))) == 4 * L
    assert count(as_dims((B, 3, 4))) == 12 * B
    inner = merged(as_dims((ragged("L"), 4)), outermost=False)
    assert inner.ragged and inner.size == 4 * L
    whole = merged(as_dims((B, ragged("L"))), outermost=True)
    assert not whole.ragged and whole.size == L


def test_types_count_elements_and_bytes():
    stream = StreamType((B, 3), Tile(2, 8, "bfloat16"))
    assert (stream.rank, stream.count, stream.bytes) == (2, 3 * B, 96 * B)
    assert StreamType((4,), Buffer(Tile(2, 8), (5,))).bytes == 4 * 5 * 64
    assert StreamType((B,), Buffer(Tile(2, 8), (ragged("L"),))).bytes == 64 * L
    assert Tuple((Scalar(), Selector(9))).bytes == 8 + 2


def test_types_read_as_they_are_written():
    assert str(StreamType((B, ragged("L")), Tile(symbol("R"), 8, "float16"))) == "[B, ~L] of Tile(R, 8, float16)"
    assert str(StreamType((2,), Tuple((Selector(3), Buffer(Tile(1, 2), (4,)))))) == (
        "[2] of Tuple(Selector(3), Buffer([4] of Tile(1, 2, float32)))"
    )


def test_what_can_be_told_to_differ():
    assert differ(2, 3) and differ(B, B + 1) and not differ(B, L) and not differ(B + B, 2 * B)
    assert shapes_differ(as_dims((2, 3)), as_dims((2, 4))) and not shapes_differ(as_dims((2, B)), as_dims((2, 4)))
    assert shapes_differ(as_dims((2,)), as_dims((2, 1)))
    assert data_differ(Tile(2, 4), Tile(2, 4, "float16")) and not data_differ(Tile(B, 4), Tile(2, 4))
    assert data_differ(Tuple((Tile(2, 4),)), Tuple((Tile(2, 3),))) and data_differ(Scalar(), Selector(1))
    assert data_differ(Buffer(Tile(2, 4), (3,)), Buffer(Tile(2, 4), (4,)))


def test_tiles_carry_layouts():
    layout = Layout.parse("S[(4, 8) : (8, 1)]")
    assert Tile(4, 8, layout=layout).layout is layout
    with pytest.raises(StreamError, match=r"Tile\(4, 4, float32\): layout .* doesn't place 16 elements"):
        Tile(4, 4, layout=layout)
    with pytest.raises(StreamError, match="a layout needs static rows and columns"):
        Tile(B, 8, layout=layout)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dim(-1), "dim must be a whole number from 0 on"),
        (lambda: Dim(3, ragged=True), "a ragged dim takes a symbol"),
        (lambda: Tile("4", 4), "rows must be a whole number"),
        (lambda: Selector(0), "outputs must be a whole number from 1 on"),
        (lambda: StreamType((), Tile(1, 1)), "needs a shape of at least one dim"),
        (lambda: StreamType((ragged("L"),), Tile(1, 1)), "the outermost dim has one size"),
    ],
)
def test_malformed_types(make, message):
    with pytest.raises(StreamError, match=message):
        make()


def test_sizes_are_plain_numbers_where_they_are_known():
    assert Dim(sympy.Integer(3)).static and not Dim(B).static
