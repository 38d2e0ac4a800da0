"""Every algorithm does every collective, in whatever order the devices get on between the meetings."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from algorithm_cases import Case, same, values
from hypothesis import given
from hypothesis import strategies as st

from tvm_axe.collective.algorithms import Algorithm, Phase, offered, phases
from tvm_axe.collective.cuda import moving
from tvm_axe.collective.cuda.source import DIMS, Box, Pieces
from tvm_axe.collective.ops import boxes, summed
from tvm_axe.collective.plan import VIEWS
from tvm_axe.errors import InputError

DTYPES = ["float32", "float16", "bfloat16", "int8", "float64", "bool"]
CASES = [(name, algorithm) for name in sorted(VIEWS) for algorithm in offered(name, in_place=False)]
SHAPES = st.lists(st.integers(1, 9), min_size=2, max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    shape = draw(SHAPES)
    dim, other = draw(st.permutations(range(len(shape))))[:2]
    return Case(name, shape, draw(st.integers(1, 4)), dim, other, draw(st.integers(-5, 5)))


def pieces(phase: Phase, source: np.ndarray, target: np.ndarray, name: str, rank: int) -> Iterator[None]:
    """Do a phase, a row at a time; it may be interrupted at each."""
    views = VIEWS[name]
    sides = [tensor if is_view else tensor[rank : rank + 1] for tensor, is_view in zip((source, target), views)]
    for move in phase.moves:
        terms = boxes(sides[1 if phase.onwards else 0], move.source, move.box)
        outs = boxes(sides[1], move.target, move.box)
        for row in range(move.box[0]):
            total = summed([term[row : row + 1].copy() for term in terms])
            yield
            for out in outs:
                out[row : row + 1] = total
                yield


def in_any_order(runs: list[Iterator[None]], random: np.random.Generator) -> None:
    """Have each run get on for as long as it can, a step at a time, one at random after the other."""
    while runs:
        at = int(random.integers(len(runs)))
        if next(runs[at], "done") == "done":
            runs.pop(at)


def run_of(case: Case, algorithm: Algorithm, source: np.ndarray, target: np.ndarray, rank: int) -> Iterator[None]:
    for phase in phases(case.name, algorithm, *case.shapes, case.numbers, case.parts, rank):
        yield from pieces(phase, source, target, case.name, rank)


def tensors(case: Case, dtype: str, seed: int, in_place: bool) -> tuple[np.ndarray, np.ndarray]:
    source, target = (values((case.parts, *shape), dtype, seed + i) for i, shape in enumerate(case.shapes))
    return source, source if in_place or case.name == "all_gather_in_place" else target


@pytest.mark.parametrize(("name", "algorithm"), CASES, ids=str)
@given(st.data())
def test_devices_may_get_on_in_any_order(name: str, algorithm: Algorithm, data: st.DataObject) -> None:
    case, dtype, seed = data.draw(cases(name)), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 99))
    in_place = name == "all_reduce" and algorithm in offered(name, True) and data.draw(st.booleans())
    source, target = tensors(case, dtype, seed, in_place)
    with np.errstate(all="ignore"):
        expected = case.expected(source.copy(), target)
        runs = [run_of(case, algorithm, source, target, rank) for rank in range(case.parts)]
        in_any_order(runs, np.random.default_rng(seed))
    same(target, expected)


def test_one_shot_in_place_would_be_wrong() -> None:
    """Which is why it isn't offered: a device overwrites what a peer still reads."""
    assert Algorithm.ONE_SHOT not in offered("all_reduce", in_place=True)
    case = Case("all_reduce", (9, 3), 3, 0, 1, 0)
    wrong = 0
    for seed in range(10):
        source, _ = tensors(case, "float32", seed, True)
        expected = case.expected(source.copy(), source)
        in_any_order(
            [run_of(case, Algorithm.ONE_SHOT, source, source, rank) for rank in range(3)], np.random.default_rng(seed)
        )
        wrong += not np.array_equal(source, expected, equal_nan=True)
    assert wrong


@pytest.mark.parametrize(("name", "algorithm"), CASES, ids=str)
@given(st.data())
def test_all_devices_have_the_same_phases(name: str, algorithm: Algorithm, data: st.DataObject) -> None:
    """So that they meet as often, in kernels of as many blocks."""
    case = data.draw(cases(name))
    kinds = {
        tuple(
            (phase.by_engine, phase.onwards)
            for phase in phases(name, algorithm, *case.shapes, case.numbers, case.parts, rank)
        )
        for rank in range(case.parts)
    }
    assert len(kinds) == 1


# ---- What a GPU is told: its kernels' arguments, done here -----------------------------------------------------------


def bytes_at(place: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(place))


def elements(box: Box, word: int) -> Iterator[tuple[int, int]]:
    """The bytes from the start at which each word of a box is, in the source and in the target."""
    for index in itertools.product(*(range(box.extent[dim]) for dim in range(DIMS))):
        source = sum(at * box.source_step[dim] for dim, at in enumerate(index))
        target = sum(at * box.target_step[dim] for dim, at in enumerate(index))
        for at in range(box.run):
            yield (source + at) * word, (target + at) * word


def do(work: moving._Kernel | moving._Copy, dtype: np.dtype) -> None:
    """What a kernel or a copy engine does."""
    if isinstance(work, moving._Copy):
        for row in range(work.rows):
            source, target = (place + row * work.pitches[i] for i, place in enumerate((work.source, work.target)))
            bytes_at(target, work.nbytes)[:] = bytes_at(source, work.nbytes)
        return
    word = int(work.name.rsplit("_", 1)[1]) * (1 if isinstance(work.moved, Pieces) else dtype.itemsize)
    assert word <= 16
    if isinstance(work.moved, Pieces):
        for piece in work.moved.piece[: work.moved.count]:
            assert piece.source % word == piece.target % word == 0
            assert piece.box.total == piece.box.run * math.prod(piece.box.extent)
            for source, target in elements(piece.box, word):
                bytes_at(piece.target + target, word)[:] = bytes_at(piece.source + source, word)
        return
    moved = work.moved
    assert moved.box.total == moved.box.run * math.prod(moved.box.extent)
    for source, target in elements(moved.box, word):
        terms = [bytes_at(place + source, word).view(dtype) for place in moved.source[: moved.sources]]
        total = summed(terms)
        for place in moved.target[: moved.targets]:
            assert place % word == 0
            bytes_at(place + target, word).view(dtype)[:] = total


def side(tensor: np.ndarray, is_view: bool, rank: int, dtype: str) -> moving.Side:
    slabs = tensor if is_view else tensor[rank : rank + 1]
    return moving.Side(tuple(slab.ctypes.data for slab in slabs), tensor.shape[1:], dtype)


@pytest.mark.parametrize(("name", "algorithm"), CASES, ids=str)
@given(st.data())
def test_what_a_gpu_is_told_does_it(name: str, algorithm: Algorithm, data: st.DataObject) -> None:
    case, dtype, seed = data.draw(cases(name)), data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(0, 99))
    source, target = tensors(case, dtype, seed, False)
    with np.errstate(all="ignore"):
        expected = case.expected(source.copy(), target)
        for rank in range(case.parts):
            one, other = (side(tensor, is_view, rank, dtype) for tensor, is_view in zip((source, target), VIEWS[name]))
            for phase in phases(name, algorithm, *case.shapes, case.numbers, case.parts, rank):
                for work in list(moving._works(phase, other if phase.onwards else one, other)):
                    do(work, source.dtype)
    same(target, expected)


def test_many_dimensions_take_several_boxes() -> None:
    """A kernel has four dimensions for runs; what is beyond them is told one index at a time."""
    case = Case("all_gather", (2, 3, 2, 2, 3, 2, 4), 2, 6, 0, 0)
    for algorithm in (Algorithm.ONE_SHOT, Algorithm.COPY_ENGINE):
        source, target = tensors(case, "float32", 1, False)
        expected = case.expected(source, target)
        for rank in range(2):
            one, other = side(source, False, rank, "float32"), side(target, True, rank, "float32")
            (phase,) = phases("all_gather", algorithm, *case.shapes, case.numbers, 2, rank)
            works = list(moving._works(phase, one, other))
            assert sum(work.moved.count if isinstance(work, moving._Kernel) else 1 for work in works) > 2
            for work in works:
                do(work, source.dtype)
        same(target, expected)


def test_what_is_not_offered_is_refused() -> None:
    with pytest.raises(InputError, match=r"reduce: there is no algorithm copy-engine for it; valid: one-shot"):
        phases("reduce", Algorithm.COPY_ENGINE, (4,), (4,), (0,), 2, 0)
    with pytest.raises(
        InputError, match=r"no algorithm is called 'ring'; valid: one-shot, two-shot, two-step, copy-engine"
    ):
        Algorithm.of("ring")
