"""Exchanges of GPUs without one: their kernel's steps on the host, in random order, and mistakes that are caught."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.collective.algorithms import Algorithm, phases
from tvm_axe.collective.cuda import meeting
from tvm_axe.collective.cuda.exchange import Exchange
from tvm_axe.collective.cuda.meeting import Meeting
from tvm_axe.collective.cuda.moving import Mover, Side
from tvm_axe.collective.cuda.source import Around, kernels
from tvm_axe.collective.merging import Held

VECTOR = 16  # bytes
PATIENCE = 100_000  # steps, by which devices that don't get on are given up


def met(devices: int, rank: int = 0) -> Meeting:
    """A device's meetings, without a GPU."""
    made: Meeting = object.__new__(Meeting)
    made.rank, made.devices = rank, devices
    made._slabs = made._distance = made._limit = made._report = 0
    return made


class Staging:
    """What a device's peers write: words that say what they are of, by place; and each block's words."""

    def __init__(self) -> None:
        self.words: dict[int, tuple[int, int]] = {}  # of four bytes: the data, and what would be read for a mark
        self.sent: dict[tuple[int, int], int] = {}
        self.number: dict[int, int] = {}


def block(
    which: int, rank: int, all_: list[Staging], told: Exchange, marked: bool, data: list[int], mistake: str | None
) -> Iterator[list[int] | None]:
    """A block's part of an exchange, step by step; at the end the sums of its vectors, of which each is a number."""
    own, devices, width = all_[rank], len(all_), VECTOR * (1 + marked)
    number = own.number[which] = own.number.get(which, 0) + 1
    turn = 0 if mistake == "one half" else number & 1
    start = told.staging if mistake != "marks among data" else 0

    def place(whose: int, at: int) -> int:
        return start + (turn * devices + whose) * told.half + which * told.region + at * width

    mine = data[which * told.share :][: told.share]
    for at, value in enumerate(mine):
        for peer in range(devices):
            if peer != rank:
                all_[peer].words[place(rank, at)] = (value, number if marked else value)
                yield None
    if not marked:
        for peer in range(devices):
            if peer != rank:
                all_[peer].sent[which, rank] = number
                yield None
        for peer in range(devices):
            while peer != rank and mistake != "nobody waits" and own.sent.get((which, peer), 0) < number:
                yield None
    sums = []
    for at, value in enumerate(mine):
        total = value
        for peer in range(devices):
            if peer == rank:
                continue
            while marked and mistake != "nobody waits" and own.words.get(place(peer, at), (0, 0))[1] != number:
                yield None
            total += own.words.get(place(peer, at), (0, 0))[0]
            yield None
        sums.append(total)
    yield sums


def device(
    rank: int, all_: list[Staging], messages: list[list[list[int]]], results: list[Any], seed: int, mistake: str | None
) -> Iterator[None]:
    """A device's exchanges, one kernel after another, the blocks of each in any order."""
    rng = random.Random(seed)
    for message in messages:
        data = message[rank]
        found = met(len(all_), rank).exchange(0, 0, VECTOR * len(data), room=4)
        assert found is not None
        told, blocks, marked = found
        running = {which: block(which, rank, all_, told, marked, data, mistake) for which in range(blocks)}
        sums: dict[int, list[int]] = {}
        while running:
            which = rng.choice(list(running))
            step = next(running[which])
            if step is not None:
                sums[which] = step
                del running[which]
            yield
        results.append([value for which in range(blocks) for value in sums[which]])


def exchanged(devices: int, sizes: list[int], seed: int, mistake: str | None = None) -> bool:
    """Whether exchanges of so many vectors, which devices come to at different times, end and sum up right."""
    rng = random.Random(seed)
    # Small numbers: those of exchanges are among them, so that data may look like a mark.
    messages = [[[rng.randint(1, 8) for _ in range(size)] for _ in range(devices)] for size in sizes]
    all_, results = [Staging() for _ in range(devices)], [list[Any]() for _ in range(devices)]
    running = {r: device(r, all_, messages, results[r], seed + r, mistake) for r in range(devices)}
    speeds = [rng.random() ** 2 + 1e-2 for _ in range(devices)]
    for _ in range(PATIENCE):
        if not running:
            break
        (rank,) = rng.choices(list(running), [speeds[each] for each in running])
        if next(running[rank], "done") == "done":
            del running[rank]
    if running:
        return False  # they wait for ever
    expected = [[sum(values) for values in zip(*message)] for message in messages]
    return all(result == expected for result in results)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of few vectors are large ones."""
    for name, value in {"ROWS": 4, "_SHARE": 2 * VECTOR, "_MARKED": 8 * VECTOR, "_TOLD": 4 * 4 * 4 * VECTOR}.items():
        monkeypatch.setattr(meeting, name, value)


SIZES = st.lists(st.integers(1, 14), min_size=1, max_size=8)


@settings(max_examples=40)
@given(st.integers(1, 4), SIZES, st.integers(0, 999))
def test_devices_may_get_on_in_any_order(devices: int, sizes: list[int], seed: int) -> None:
    assert exchanged(devices, sizes, seed)


@pytest.mark.parametrize(
    ("mistake", "sizes"),
    [
        ("one half", [3, 3, 3, 3]),  # a device sends again before its peer has read
        ("one half", [12, 12, 12, 12]),
        ("marks among data", [12, 12, 3, 3, 12, 12, 3, 3]),  # what lies there from before looks like a mark
        ("nobody waits", [3]),
        ("nobody waits", [12]),
    ],
)
def test_mistakes_are_seen(mistake: str, sizes: list[int]) -> None:
    assert not all(exchanged(2, sizes, seed, mistake) for seed in range(40))


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("nbytes", [16, 4096, 12_304, 256 << 10, 1 << 20, 4 << 20])
def test_blocks_have_room_of_their_own(devices: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for room in (1, 16, 132):
        found = met(devices).exchange(0, 0, nbytes, room)
        if found is None:
            assert nbytes > 1 << 20 or room < 132
            continue
        told, blocks, marked = found
        assert (blocks - 1) * told.share < told.total <= blocks * told.share
        assert told.share * VECTOR * (1 + marked) <= told.region and blocks * told.region <= told.half
        assert not (told.region % VECTOR or told.half % VECTOR or told.staging % VECTOR)
        end = told.staging + 2 * devices * told.half
        assert end <= 4 * meeting.WORDS
        assert marked or end <= 4 * meeting.ROWS * meeting.ROW + 2 * meeting._TOLD


def test_what_is_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert met(9).exchange(0, 0, 1024, 132) is None
    assert met(2).exchange(8, 0, 1024, 132) is None
    assert met(2).exchange(0, 0, 1020, 132) is None
    assert met(2).exchange(0, 0, 8 << 20, 132) is None


@pytest.mark.parametrize(
    ("name", "algorithm", "parts", "shape", "dtype", "holds", "expected"),
    [
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "float32", Held(True, True, True), ("marked", 0)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "bfloat16", Held(True, True), ("marked", 1)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "bfloat16", Held(behind=True), ("marked", 0)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (1 << 18,), "float32", Held(True, True, True), ("told", 0)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "float32", Held(), None),  # on whatever stream
        ("all_reduce", Algorithm.ONE_SHOT, 2, (7, 5), "float32", Held(True, True), None),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "int8", Held(True, True), None),
        ("all_reduce", Algorithm.ONE_SHOT, 4, (64, 4), "float32", Held(True, True), None),  # along one axis of 2 x 4
        ("all_reduce", Algorithm.TWO_SHOT, 2, (64, 4), "float32", Held(True, True), None),
        ("reduce", Algorithm.ONE_SHOT, 2, (64, 4), "float32", Held(True, True), None),
    ],
)
def test_which_collectives_are_exchanges(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    algorithm: Algorithm,
    parts: int,
    shape: tuple[int, ...],
    dtype: str,
    holds: Held,
    expected: tuple[str, int] | None,
) -> None:
    """All devices decide alike, and one that holds the meeting behind it loosely leaves it out."""
    monkeypatch.undo()
    seen: list[tuple[str, Around]] = []
    mover: Mover = object.__new__(Mover)
    mover._rows, mover._functions = 132, dict.fromkeys(kernels())
    monkeypatch.setattr(Mover, "_launch", lambda self, work, blocks, around: seen.append((work.name, around)))
    monkeypatch.setattr(Meeting, "meet", lambda self, arrives, behind: None)
    devices = 8 if parts == 4 else parts
    for rank in range(parts):
        views = Side(tuple(4096 * (1 + part) for part in range(parts)), shape, dtype)
        own = Side((4096 * (1 + rank),), shape, dtype)
        target = views if name == "all_reduce" else own
        seen.clear()
        told = phases(name, algorithm, shape, shape, [0] if name == "reduce" else [], parts, rank)
        mover.run(told, views, target, met(devices, rank), holds)
        exchanges = [(kind.rpartition("_")[2], around.after) for kind, around in seen if kind.startswith("exchange")]
        assert exchanges == ([] if expected is None else [expected])
