"""Affine views: positions and where their dims end."""

import itertools

import pytest

from tvm_axe.stream import StreamError, View
from tvm_axe.stream.codec import decode


@pytest.mark.parametrize(
    "view", [View((3,), (2,)), View((2, 3), (0, 1)), View((2, 3, 4), (12, -4, 1), 8), View((1, 2), (5, 0), 7)]
)
def test_positions_and_stops_are_those_of_nested_loops(view):
    def at(index):
        return view.offset + sum(i * stride for i, stride in zip(index, view.strides))

    assert view.positions() == [at(index) for index in itertools.product(*map(range, view.shape))]
    assert view.last == max(view.positions())

    def nested(index):
        depth = len(index)
        return at(index) if depth == len(view.shape) else [nested((*index, i)) for i in range(view.shape[depth])]

    assert decode(zip(view.positions(), view.stops()), len(view.shape)) == nested(())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), ()), "shape and strides must be as long, at least 1, and the shape positive"),
        (((2, 3), (1,)), "shape and strides must be as long"),
        (((2, 0), (1, 1)), "the shape positive"),
        (((3,), (-1,), 1), "some positions are negative"),
    ],
)
def test_malformed_views(arguments, message):
    with pytest.raises(StreamError, match=message):
        View(*arguments)
