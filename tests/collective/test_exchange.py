"""Exchanges of GPUs without one: their kernels on the host, in random order, and mistakes that are caught."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernels_on_host import OnHost

from tvm_axe.collective.algorithms import Algorithm, phases
from tvm_axe.collective.cuda import meeting
from tvm_axe.collective.cuda.exchange import EXCHANGED
from tvm_axe.collective.cuda.meeting import Meeting
from tvm_axe.collective.cuda.moving import Mover, Side
from tvm_axe.collective.cuda.source import Around, kernels
from tvm_axe.collective.cuda.waiting import EXCHANGE, ROW, SENT
from tvm_axe.collective.merging import Held
from tvm_axe.collective.plan import VIEWS

VECTOR = 16  # bytes
SPARE = 0xABAB
PATIENCE = 5_000_000  # steps of an exchange, by which devices that don't get on are given up


def met(devices: int, rank: int = 0) -> Meeting:
    """A device's meetings, without a GPU."""
    made: Meeting = object.__new__(Meeting)
    made.rank, made.devices = rank, devices
    made._slabs = made._distance = made._limit = made._report = 0
    return made


SUM, SCATTER, GATHER, DEAL, TWICE = "sum", "scatter", "gather", "deal", "sum in two steps"
KINDS = (SUM, SCATTER, GATHER, DEAL, TWICE)


def exchanged(
    kernels: OnHost,
    devices: int,
    sizes: list[int],
    seed: int,
    movers: int = 3,
    dtype: str = "int32",
    patience: int = PATIENCE,
    kinds: tuple[str, ...] = (SUM,),
    quiet: bool = False,
    values: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 0xFFFFFFFF, 0x7FC07FC0),
) -> bool:
    """Whether exchanges of so many vectors, which devices come to at different times, end and give what they should.

    What kind each is, and if some are `quiet` which, is drawn. In two steps half are in place, and half of one block.
    What no two steps hold is summed in one.
    """
    rng = np.random.default_rng(seed)
    slabs = np.zeros((devices, meeting.WORDS), "uint32")
    missing = np.zeros(devices, "uint32")
    told, arounds, blocks, which, results, tells, marks = [], [], [], [], [], [], []
    for size in sizes:
        kind, quietly = str(rng.choice(kinds)), quiet and bool(rng.integers(2))
        placed, parted = kind in (GATHER, DEAL), kind in (SCATTER, DEAL)
        words = 4 * size
        # Few values, numbers of exchanges among them, and all ones: any of them may look like a mark.
        shape = (devices, devices if parted else 1, words)
        given = rng.choice(np.array(values, "uint32"), shape)
        if dtype == "bfloat16":
            whole = rng.integers(-8, 9, (*shape[:2], 2 * words)).astype("float32")
            given = (whole.view("uint32") >> 16).astype("uint16")
        given = spared(given)
        sent = np.ascontiguousarray(np.broadcast_to(given, (devices, devices, given.shape[-1])).swapaxes(0, 1))
        expected = sent if placed else np.stack([_summed(each)[:1] for each in sent])
        result, room = spared(np.full_like(expected, SPARE)), 5
        twice = kind == TWICE and in_two_steps(devices, size)
        if twice and rng.integers(2):
            result = given
        if twice and rng.integers(2):
            room = 2
        found = [
            met(devices, rank).exchange(
                given[rank].ctypes.data, result[rank].ctypes.data, VECTOR * size, room, VECTOR * size * parted, twice
            )
            for rank in range(devices)
        ]
        assert all(each is not None and each[1:] == found[0][1:] for each in found)
        told.append([each[0] for each in found])
        _, moving, marked = found[0]
        blocks.append(moving + (marked and not quietly))
        kernel = marked + (4 if placed else 2 * (dtype == "bfloat16"))
        which.append(6 + (dtype == "bfloat16") if twice else kernel)
        tells.append(not (marked and quietly))
        marks.append(marked)
        place = slabs.ctypes.data, slabs.strides[0], 1 << 60, missing.ctypes.data
        arounds.append([Around(*place, rank, devices, not quietly, 0) for rank in range(devices)])
        results.append((result, expected, given))  # which stay where they are

    def meets_all(at: int, row: int) -> bool:
        return not marks[at] and blocks[at] > row

    speeds = rng.random(devices) ** 2 + 5e-2
    if not kernels.run(told, arounds, blocks, which, speeds.tolist(), movers, seed, patience * len(sizes)):
        return False  # they wait for ever
    assert not missing.any()
    rows = slabs[:, : meeting.ROWS * ROW].reshape(devices, meeting.ROWS, ROW)
    for rank in range(devices):  # what is before an exchange and behind it is ordered, whichever kind it is
        others = [SENT + peer for peer in range(devices) if peer != rank]
        for at, count in enumerate(blocks):  # in the last of its blocks, in which others may have been before and after
            if not tells[at]:
                continue
            last = count - 1
            after = range(at, len(blocks))
            later = [each for each in after if tells[each] and (blocks[each] == count or meets_all(each, last))]
            number = sum(each > last for each in blocks[: max(later) + 1])
            assert (rows[rank, last, others] == number).all()
    return all((result == expected).all() and (result.base[devices:] == SPARE).all() for result, expected, _ in results)


def spared(slabs: np.ndarray) -> np.ndarray:
    """The slabs with one more behind them, which is nobody's."""
    return np.concatenate([slabs, np.full_like(slabs[:1], SPARE)])[: len(slabs)]


def in_two_steps(devices: int, size: int) -> bool:
    return met(devices).exchange(0, 0, VECTOR * size, 2, twice=True) is not None


def _summed(given: np.ndarray) -> np.ndarray:
    if given.dtype != "uint16":
        return np.broadcast_to(given.sum(axis=0, dtype="uint32"), given.shape)
    whole = (given.astype("uint32") << 16).view("float32").sum(axis=0)  # whole numbers, which bfloat16 has
    return np.broadcast_to((whole.view("uint32") >> 16).astype("uint16"), given.shape)


@pytest.fixture(scope="module")
def kernels_on_host(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    return OnHost(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of few vectors are large ones."""
    told = 4 * 4 * 8 * VECTOR
    for name, value in {"ROWS": 5, "_PER_BLOCK": 4 * VECTOR, "_MARKED": 8 * VECTOR, "_TOLD": told}.items():
        monkeypatch.setattr(meeting, name, value)
    staging = max(devices * 5 * meeting._region(devices) for devices in range(1, EXCHANGED + 1))
    monkeypatch.setattr(meeting, "WORDS", 5 * ROW + 2 * (told + staging) // 4)


SIZES = st.lists(st.integers(1, 26), min_size=1, max_size=6)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.integers(1, 4), SIZES, st.integers(0, 999), st.integers(1, 3),
    st.sampled_from(["int32", "bfloat16"]),
)  # fmt: skip
def test_devices_may_get_on_in_any_order(
    kernels_on_host: OnHost, devices: int, sizes: list[int], seed: int, movers: int, dtype: str
) -> None:
    """Few movers have several vectors each, more than they have on their way at once."""
    assert exchanged(kernels_on_host, devices, sizes, seed, movers, dtype, kinds=KINDS, quiet=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("devices", [2, 3])
def test_each_kind(kernels_on_host: OnHost, devices: int, size: int, kind: str) -> None:
    for seed in range(3):
        assert exchanged(kernels_on_host, devices, [size] * 3, seed, kinds=(kind,))


@pytest.mark.parametrize("kind", [SUM, TWICE])
def test_more_peers_than_are_looked_at_at_once(kernels_on_host: OnHost, kind: str) -> None:
    assert exchanged(kernels_on_host, 6, [1, 5, 5], 0, kinds=(kind,))


NUMBER = f"const unsigned number = row[{EXCHANGE}] + 1;\n"
SENDS = "  for (int base = threadIdx.x; base < begins; base += step) {"


@pytest.mark.parametrize(
    ("old", "new", "sizes"),
    [
        # One half: a device sends again before its peer has read.
        ("((number & 1) * around.devices", "(0 * around.devices", [3, 3, 3, 3]),
        ("((number & 1) * around.devices", "(0 * around.devices", [12, 12, 12, 12]),
        # Nobody waits.
        ("absent = from;", ";", [3]),
        ("    meet_others(around, lane, number);\n    __syncthreads();", "    __syncthreads();", [12]),
        # The number is stored before all of the block have read it.
        (NUMBER + SENDS, f"{NUMBER}  if (threadIdx.x == 0) row[{EXCHANGE}] = number;\n{SENDS}", [3, 3]),
        # Only some of the words are looked at.
        ("for (int k = 0; k <= 3; ++k) there = there", "for (int k = 0; k < 3; ++k) there = there", [3, 3, 3]),
        # A block tells before all of it have sent.
        ("    __syncthreads();\n    meet_others", "    meet_others", [12, 12, 12]),
    ],
)
def test_mistakes_are_seen(old: str, new: str, sizes: list[int], tmp_path: Path) -> None:
    wrong = OnHost(tmp_path, [(old, new)])
    assert not all(_stands(wrong, sizes, seed) for seed in range(40))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # The second step's words lie on the first's: a sum goes over terms that its device hasn't added yet.
        ("second = static_cast<int>(moved.region) / 2", "second = 0"),
        # Of the last parts as much is stored as of the first.
        ("total - whose * part - first", "part - first"),
        # A sum is sent before all of it has come.
        ("collect(terms,", "if (begin != 0) collect(terms,"),
        # One half, as in one step.
        ("((number & 1) * around.devices", "(0 * around.devices"),
    ],
)  # fmt: skip
def test_mistakes_in_two_steps_are_seen(old: str, new: str, tmp_path: Path) -> None:
    wrong = OnHost(tmp_path, [(old, new)])
    assert not all(_stands(wrong, [7, 8, 5], seed, devices=3, kinds=(TWICE, SUM)) for seed in range(40))


def test_marks_among_data_are_seen(kernels_on_host: OnHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where marks are read from where plain data was, some of it looks like one."""
    exchange = Meeting.exchange

    def mixed(self: Meeting, *arguments: Any) -> Any:
        told, blocks, marked = exchange(self, *arguments)  # type: ignore[misc]
        told.staging = 4 * meeting.ROWS * ROW
        return told, blocks, marked

    monkeypatch.setattr(Meeting, "exchange", mixed)
    assert not all(exchanged(kernels_on_host, 2, [60, 60, 3, 3], seed, values=(4, 5)) for seed in range(40))


def _stands(kernels: OnHost, sizes: list[int], seed: int, devices: int = 2, kinds: tuple[str, ...] = (SUM,)) -> bool:
    try:
        return exchanged(kernels, devices, sizes, seed, patience=500_000, kinds=kinds)
    except AssertionError:  # that nobody was told
        return False


@pytest.mark.parametrize(("size", "twice"), [(3, False), (12, False), (7, True)])
def test_who_never_comes_is_named(kernels_on_host: OnHost, size: int, twice: bool) -> None:
    slabs = np.zeros((3, meeting.WORDS), "uint32")
    missing = np.zeros((3, 3), "uint32")
    data = np.zeros((3, 4 * size), "uint32")
    around = [
        Around(slabs.ctypes.data, slabs.strides[0], 200_000, missing[rank].ctypes.data, rank, 3, 1, 0)
        for rank in range(3)
    ]
    told = [met(3, rank).exchange(*[data[rank].ctypes.data] * 2, VECTOR * size, 5, twice=twice) for rank in range(3)]
    assert all(each is not None for each in told)
    _, blocks, marked = told[0]  # type: ignore[misc]
    speeds = [1.0, 1.0, 0.0]
    exchange = [[each[0] for each in told]]  # type: ignore[index]
    which = [6 if twice else int(marked)]
    assert kernels_on_host.run(exchange, [around], [blocks + marked], which, speeds, 3, 0, 10_000_000)
    assert missing[0].tolist() == missing[1].tolist() == [0, 0, 1]


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("nbytes", [16, 4096, 12_304, 256 << 10, 1 << 20, 4 << 20])
def test_blocks_have_room_of_their_own(devices: int, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for room, twice in itertools.product((1, 16, 132), (False, True)):
        found = met(devices).exchange(0, 0, nbytes, room, twice=twice)
        if found is None:
            assert nbytes > 1 << 20 or room < 132
            continue
        told, blocks, marked = found
        part = told.stride if twice else told.total
        assert (blocks - 1) * told.share < part <= blocks * told.share
        assert blocks <= room and blocks + marked <= meeting.ROWS
        words = -(-told.share // 24) * 8 * 4 if marked else told.share
        assert (1 + twice) * words * VECTOR <= told.region and blocks * told.region <= told.half
        if twice:
            assert marked and (devices - 1) * part < told.total + devices * devices <= devices * (part + devices)
        line = 8 * VECTOR if marked else VECTOR
        assert not (told.region // (1 + twice) % line or told.half % line or told.staging % line)
        end = told.staging + 2 * devices * told.half
        assert end <= 4 * meeting.WORDS
        assert marked or end <= 4 * meeting.ROWS * meeting.ROW + 2 * meeting._TOLD


def test_what_is_not_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert met(9).exchange(0, 0, 1024, 132) is None
    assert met(2).exchange(8, 0, 1024, 132) is None
    assert met(2).exchange(0, 0, 1020, 132) is None
    assert met(2).exchange(0, 0, 8 << 20, 132) is None


FREE = Held(True, True, True, True)


@pytest.mark.parametrize(
    ("name", "algorithm", "parts", "shape", "dtype", "holds", "expected"),
    [
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "float32", Held(True, True, True), ("float32_marked", 1, 0)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "float32", FREE, ("float32_marked", 0, 0)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "bfloat16", Held(True, True), ("bfloat16_marked", 1, 1)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "bfloat16", Held(behind=True), ("bfloat16_marked", 1, 0)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (1 << 19,), "float32", Held(True, True, True), ("float32_told", 1, 0)),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "float32", Held(), None),  # on whatever stream
        ("all_reduce", Algorithm.ONE_SHOT, 2, (7, 5), "float32", Held(True, True), None),
        ("all_reduce", Algorithm.ONE_SHOT, 2, (64, 4), "int8", Held(True, True), None),
        ("all_reduce", Algorithm.ONE_SHOT, 4, (64, 4), "float32", Held(True, True), None),  # along one axis of 2 x 4
        ("all_reduce", Algorithm.TWO_SHOT, 2, (64, 4), "float32", Held(True, True), None),
        ("all_reduce", Algorithm.TWO_STEP, 3, (64, 4), "float32", FREE, ("float32_twice", 0, 0)),
        ("all_reduce", Algorithm.TWO_STEP, 2, (4, 1), "bfloat16", Held(True, True), None),  # half a vector
        ("all_reduce", Algorithm.TWO_STEP, 3, (4, 2), "bfloat16", Held(True, True), ("bfloat16_twice", 1, 1)),
        ("all_reduce", Algorithm.TWO_STEP, 2, (1 << 20,), "float32", FREE, None),  # two shots
        ("all_reduce", Algorithm.TWO_STEP, 4, (64, 4), "float32", FREE, None),  # along one axis of 2 x 4
        ("reduce", Algorithm.ONE_SHOT, 2, (64, 4), "float32", Held(True, True), None),
        ("reduce_scatter", Algorithm.ONE_SHOT, 2, (64, 4), "float32", FREE, ("float32_marked", 0, 0)),
        ("reduce_scatter", Algorithm.ONE_SHOT, 3, (96, 4), "bfloat16", Held(True, True), ("bfloat16_marked", 1, 1)),
        ("reduce_scatter", Algorithm.ONE_SHOT, 3, (64, 4), "float32", FREE, None),  # parts that differ
        ("reduce_scatter", Algorithm.ONE_SHOT, 2, (64, 6), "int8", FREE, None),
        ("reduce_scatter along 1", Algorithm.ONE_SHOT, 2, (64, 8), "float32", FREE, None),
        ("all_gather", Algorithm.ONE_SHOT, 2, (64, 4), "int8", FREE, ("placed_marked", 0, 0)),
        ("all_gather", Algorithm.ONE_SHOT, 3, (32, 1024), "float64", Held(True, True), ("placed_marked", 1, 1)),
        ("all_gather", Algorithm.COPY_ENGINE, 2, (64, 4), "float32", FREE, None),
        ("all_gather along 1", Algorithm.ONE_SHOT, 2, (64, 4), "float32", FREE, None),
        ("all_gather, uneven", Algorithm.ONE_SHOT, 2, (64, 4), "float32", FREE, None),
        ("all_to_all", Algorithm.ONE_SHOT, 2, (64, 1024), "bfloat16", FREE, ("placed_marked", 0, 0)),
        ("all_to_all", Algorithm.ONE_SHOT, 2, (2048, 1024), "bfloat16", FREE, ("placed_told", 0, 0)),
        ("all_to_all along 1", Algorithm.ONE_SHOT, 2, (64, 1024), "bfloat16", FREE, None),
        ("broadcast", Algorithm.ONE_SHOT, 2, (64, 4), "float32", FREE, None),
        ("send", Algorithm.ONE_SHOT, 2, (64, 4), "float32", FREE, None),
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
    expected: tuple[str, int, int] | None,
) -> None:
    """All devices decide alike, and one that holds a meeting quietly or loosely leaves it out."""
    monkeypatch.undo()
    seen: list[tuple[str, Around, int]] = []
    mover: Mover = object.__new__(Mover)
    mover._rows, mover._functions = 132, dict.fromkeys(kernels())
    monkeypatch.setattr(Mover, "_launch", lambda self, work, blocks, around: seen.append((work.name, around, blocks)))
    monkeypatch.setattr(Mover, "_copy", lambda self, copy: None)
    monkeypatch.setattr(Meeting, "meet", lambda self, arrives, behind: None)
    devices = 8 if parts == 4 else parts
    name, _, kind = name.replace(",", "").partition(" ")
    dim, (rows, columns) = int(kind == "along 1"), (*shape, 1)[:2]
    ceil = -(-shape[dim] // parts)
    part = (ceil, columns) if dim == 0 else (rows, ceil)
    whole = (rows * parts - (kind == "uneven"), columns) if dim == 0 else (rows, columns * parts)
    numbers = {"reduce_scatter": [dim], "all_gather": [dim], "all_to_all": [dim, dim], "all_reduce": []}
    slabs = {"reduce_scatter": (shape, part), "all_gather": (shape, whole)}.get(name, (shape, shape))
    for rank in range(parts):
        source, target = (
            Side(tuple(4096 * (1 + each) for each in range(parts)) if is_view else (4096 * (1 + rank),), slab, dtype)
            for slab, is_view in zip(slabs, VIEWS[name])
        )
        seen.clear()
        told = phases(name, algorithm, *slabs, numbers.get(name, [0]), parts, rank)
        mover.run(told, source, target, met(devices, rank), holds)
        found = [(launch.removeprefix("exchange_"), around) for launch, around, _ in seen if "exchange" in launch]
        assert [(each, around.before, around.after) for each, around in found] == (
            [] if expected is None else [expected]
        )
