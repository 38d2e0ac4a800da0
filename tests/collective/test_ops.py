"""The collectives with numpy, all ranks in turn, against what they mean."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.collective import ops
from tvm_axe.collective.plan import chunk

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
        ops.collective("all_reduce", source, target, rank=rank)
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
        ops.collective("reduce_scatter", source, blocks[rank], dim, rank=rank)
    joined = np.concatenate(list(blocks), axis=dim)
    inside, past = np.split(joined, [shape[dim]], axis=dim)
    np.testing.assert_allclose(inside, source.sum(axis=0), rtol=1e-12, atol=1e-12)
    assert np.isnan(past).all()
    target = draw(np.random.default_rng(0), (n, *shape))
    target[...] = np.nan
    for rank in range(n):
        ops.collective("all_gather", blocks[rank], target, dim, rank=rank)
    for slab in target:
        np.testing.assert_array_equal(slab, inside)
    target[...] = np.nan
    for rank in range(n):
        own = (slice(None),) * dim + (chunk(shape[dim], n, rank),)
        target[rank][own] = inside[own]
    for rank in range(n):
        ops.collective("all_gather_in_place", target, target, dim, rank=rank)
    for slab in target:
        np.testing.assert_array_equal(slab, inside)


@given(RANKS, st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple), st.data())
def test_all_to_all(n: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    """A whole tensor, sharded along one dim, is sharded along another."""
    gathered, scattered = data.draw(st.permutations(range(len(shape))))[:2]
    whole = np.random.default_rng(data.draw(st.integers(0, 100))).standard_normal(shape)

    def sharded(dim: int) -> np.ndarray:
        """The slabs of `whole`; what is past its extent is NaN."""
        rows = -(-shape[dim] // n)
        slabs = np.full((n, *shape[:dim], rows, *shape[dim + 1 :]), np.nan)
        for rank in range(n):
            part = chunk(shape[dim], n, rank)
            index = (slice(None),) * dim
            slabs[rank][(*index, slice(part.stop - part.start))] = whole[(*index, part)]
        return slabs

    source, target = sharded(gathered), np.full_like(sharded(scattered), np.nan)
    for rank in range(n):
        ops.collective("all_to_all", source, target[rank], gathered, scattered, rank=rank)
    np.testing.assert_array_equal(target, sharded(scattered))


@given(RANKS, SHAPES | st.just(()), st.integers(-5, 5), st.integers(0, 100))
def test_send_reduce_and_broadcast(n: int, shape: tuple[int, ...], shift: int, seed: int) -> None:
    source = draw(np.random.default_rng(seed), (n, *shape))
    root = seed % n
    sent, reduced, broadcast = (np.full((n, *shape), np.nan) for _ in range(3))
    for rank in range(n):
        ops.collective("send", source, sent[rank, ...], shift, rank=rank)
        ops.collective("reduce", source, reduced[rank, ...], root, rank=rank)
        ops.collective("broadcast", source, broadcast[rank, ...], root, rank=rank)
    for rank in range(n):
        np.testing.assert_array_equal(sent[(rank + shift) % n], source[rank])
        np.testing.assert_array_equal(broadcast[rank], source[root])
        assert rank == root or np.isnan(reduced[rank]).all()
    np.testing.assert_allclose(reduced[root], source.sum(axis=0), rtol=1e-12, atol=1e-12)


@settings(max_examples=10)
@given(st.integers(2, 3), st.integers(60_000, 200_000))
def test_all_reduce_of_many_blocks(n: int, size: int) -> None:
    source = np.random.default_rng(size).integers(-1000, 1000, (n, size))
    target = np.full_like(source, -1)
    for rank in range(n):
        ops.collective("all_reduce", source, target, rank=rank)
    np.testing.assert_array_equal(target, np.broadcast_to(source.sum(axis=0), source.shape))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_small_floats_are_rounded_once(dtype: type) -> None:
    """One and many terms that each are lost when added to it, but not together."""
    tiny = np.finfo(np.float16).eps / 4 if dtype is np.float16 else float(ml_dtypes.finfo(dtype).eps) / 4
    source = np.array([[1.0]] + [[tiny]] * 4).astype(dtype)
    target = np.zeros((5, 1), dtype)
    ops.collective("reduce", source, target[0], 0, rank=0)
    assert float(target[0, 0]) == 1 + 4 * tiny
    assert sum(source[1:, 0], start=source[0, 0]) == 1


def test_a_slab_that_is_not_dense_is_refused() -> None:
    target = np.zeros((2, 6, 4))[:, ::2]
    with pytest.raises(ValueError, match="a slab must be dense"):
        ops.collective("all_reduce", np.zeros((2, 3, 4)), target, rank=0)
