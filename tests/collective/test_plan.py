"""What each collective moves: every element that it owes is written, once, and nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_axe.collective.plan import VIEWS, chunk, plan
from tvm_axe.errors import InputError

SHAPES = st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple)


def case(name: str, shape: tuple[int, ...], parts: int, data: st.DataObject) -> tuple[tuple[int, ...], ...]:
    """Shapes of a slab of the source and of the target, and the other arguments, for tensors of a whole shape."""
    dim, other = data.draw(st.permutations(range(len(shape))))[:2]

    def block(dim: int) -> tuple[int, ...]:
        return (*shape[:dim], chunk(shape[dim], parts, 0).stop, *shape[dim + 1 :])

    return {
        "all_reduce": (shape, shape, ()),
        "reduce_scatter": (shape, block(dim), (dim,)),
        "all_gather": (block(dim), shape, (dim,)),
        "all_gather_in_place": (shape, shape, (dim,)),
        "all_to_all": (block(dim), block(other), (dim, other)),
        "send": (shape, shape, (data.draw(st.integers(-5, 5)),)),
        "reduce": (shape, shape, (parts - 1,)),
        "broadcast": (shape, shape, (0,)),
    }[name]


@given(st.sampled_from(sorted(VIEWS)), SHAPES, st.integers(1, 4), st.data())
def test_every_element_is_written_once(name: str, shape: tuple[int, ...], parts: int, data: st.DataObject) -> None:
    source, target, numbers = case(name, shape, parts, data)
    written = np.zeros((parts, *target), int)
    for rank in range(parts):
        for move in plan(name, source, target, numbers, parts, rank):
            for slab in move.target.slabs:
                owner = slab if VIEWS[name][1] else rank
                inside = tuple(slice(at, at + n) for at, n in zip(move.target.at, move.box))
                written[owner].reshape(move.target.shape)[inside] += 1
    expected = np.ones_like(written)
    if name == "reduce":
        expected[: parts - 1] = 0
    if name == "all_gather_in_place":  # the own block is there
        for rank in range(parts):
            expected[rank][(slice(None),) * numbers[0] + (chunk(shape[numbers[0]], parts, rank),)] = 0
    if name in ("reduce_scatter", "all_to_all"):  # what is past the extent isn't written
        dim = numbers[-1]
        for rank in range(parts):
            rows = chunk(shape[dim], parts, rank)
            expected[rank][(slice(None),) * dim + (slice(rows.stop - rows.start, None),)] = 0
    np.testing.assert_array_equal(written, expected)


@given(st.integers(1, 1000), st.integers(1, 5))
def test_parts_of_an_all_reduce_are_whole_cache_lines(size: int, parts: int) -> None:
    moves = [move for rank in range(parts) for move in plan("all_reduce", (size,), (size,), (), parts, rank)]
    assert all(move.source.at[0] % 64 == 0 for move in moves)
    assert sum(math.prod(move.box) for move in moves) == size


@pytest.mark.parametrize(
    ("name", "source", "target", "numbers"),
    [
        ("all_reduce", (4, 4), (4, 5), ()),
        ("reduce_scatter", (7, 4), (3, 4), (0,)),
        ("all_gather", (3, 4), (7, 4), (0,)),
        ("all_to_all", (2, 9), (4, 4), (0, 1)),
        ("all_to_all", (2, 9), (4, 5, 1), (0, 1)),
        ("send", (4,), (5,), (1,)),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    name: str, source: tuple[int, ...], target: tuple[int, ...], numbers: tuple[int, ...]
) -> None:
    with pytest.raises(InputError, match=rf"{name}: slabs of shapes .* don't fit each other on a mesh axis of 2"):
        plan(name, source, target, numbers, 2, 0)
