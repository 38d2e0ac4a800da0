"""The shared memory's allocator, against a list of what is in use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.collective.arena import PAGE, Arena
from tvm_axe.errors import WorkerError


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE)), max_size=30))
def test_live_allocations_are_apart_and_begin_as_zeros(steps: list[tuple[bool, int]]) -> None:
    arena = Arena.create()
    live: list[tuple[int, np.ndarray]] = []
    for i, (allocate, number) in enumerate(steps):
        if allocate or not live:
            offset = arena.allocate(number)
            assert offset % PAGE == 0
            array = np.ndarray((number,), "uint8", buffer=arena.map, offset=offset)
            assert not array.any()
            array[:] = i + 1
            live.append((offset, array))
        else:
            arena.free(live.pop(number % len(live))[0])
        for _, array in live:
            assert (array == array[:1]).all()
    values = [int(array[0]) for _, array in live if array.size]
    assert len(set(values)) == len(values)
    for offset, _ in live:
        arena.free(offset)
    assert arena.allocate(arena.size // 4096) == 0  # what was freed is one hole again
    arena.close()


def test_views_outlive_the_arena(arena: Arena) -> None:
    other = Arena.create()
    array = np.ndarray((8,), "float32", buffer=other.map, offset=other.allocate(32))
    array[:] = 7
    other.close()
    assert array.tolist() == [7.0] * 8


def test_no_space_is_an_error_that_says_so(arena: Arena) -> None:
    arena.allocate(10 * PAGE)
    with pytest.raises(
        WorkerError, match=rf"no shared memory for {arena.size >> 10} KiB more \(in use: {10 * PAGE >> 10} KiB"
    ):
        arena.allocate(arena.size)


def test_no_space_for_the_pages_leaves_the_arena_as_it_was(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", no_space)
        with pytest.raises(WorkerError, match="No space left on device"):
            arena.allocate(PAGE)
    assert arena.allocate(PAGE) == 0
