"""The collectives' arithmetic, all ranks in turn, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.collective import ops

RANKS = st.integers(1, 4)
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Slabs with room between them, as in a mesh tensor."""
    room = rng.standard_normal((shape[0], 3 * int(np.prod(shape[1:])) + 5))
    return np.lib.stride_tricks.as_strided(room, shape, (room.strides[0], *np.empty(shape[1:]).strides))


@given(RANKS, SHAPES | st.just(()), st.booleans(), st.integers(0, 100))
def test_all_reduce(n: int, shape: tuple[int, ...], in_place: bool, seed: int) -> None:
    source = draw(np.random.default_rng(seed), (n, *shape))
    expected = source.sum(axis=0)
    target = source if in_place else np.full_like(source, np.nan)
    for rank in range(n):
        ops.all_reduce(source, target, rank)
    for slab in target:
        np.testing.assert_allclose(slab, expected, rtol=1e-12, atol=1e-12)
        np.testing.assert_array_equal(slab, target[0])


@given(RANKS, SHAPES, st.data())
def test_reduce_scatter_then_all_gather(n: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    source = draw(np.random.default_rng(data.draw(st.integers(0, 100))), (n, *shape))
    rows = -(-shape[dim] // n)
    blocks = np.full((n, *shape[:dim], rows, *shape[dim + 1 :]), np.nan)
    for rank in range(n):
        ops.reduce_scatter(source, blocks[rank], dim, rank)
    joined = np.concatenate(list(blocks), axis=dim)
    inside, past = np.split(joined, [shape[dim]], axis=dim)
    np.testing.assert_allclose(inside, source.sum(axis=0), rtol=1e-12, atol=1e-12)
    assert np.isnan(past).all()
    target = draw(np.random.default_rng(0), (n, *shape))
    target[...] = np.nan
    for rank in range(n):
        ops.all_gather(blocks[rank], target, dim, rank)
    for slab in target:
        np.testing.assert_array_equal(slab, inside)


@settings(max_examples=10)
@given(st.integers(2, 3), st.integers(60_000, 200_000))
def test_all_reduce_of_many_blocks(n: int, size: int) -> None:
    source = np.random.default_rng(size).integers(-1000, 1000, (n, size))
    target = np.full_like(source, -1)
    for rank in range(n):
        ops.all_reduce(source, target, rank)
    np.testing.assert_array_equal(target, np.broadcast_to(source.sum(axis=0), source.shape))


def test_a_slab_that_is_not_dense_is_refused() -> None:
    target = np.zeros((2, 6, 4))[:, ::2]
    with pytest.raises(ValueError, match="a slab must be dense"):
        ops.all_reduce(np.zeros((2, 3, 4)), target, 0)
