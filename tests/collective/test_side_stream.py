"""The side stream of a GPU, told by a driver that does at once, in the host's memory, what it is asked."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from tvm_axe import _tvm
from tvm_axe.collective import side as meaning
from tvm_axe.collective.cuda import branches, side

DEVICES, ROWS, COLUMNS, GROUPS = 3, 4, 24, 2


class HostDriver:
    """The calls of a side stream: streams are the order of the calls."""

    def __init__(self) -> None:
        self.driver = pytest.importorskip("cuda.bindings.driver")
        self.made, self.order, self.told = 0, list[str](), list[tuple[str, str, str]]()

    def enum(self, kind: str, value: str) -> Any:
        return getattr(getattr(self.driver, kind), value)

    def struct(self, kind: str) -> Any:
        return getattr(self.driver, kind)()

    def __call__(self, name: str, *arguments: Any) -> Any:
        if name in ("cuStreamCreate", "cuEventCreate"):
            self.made += 1
            return f"{name.removeprefix('cu').removesuffix('Create')} {self.made}"
        self.order.append(f"{name} {arguments[0] if name.startswith('cuEvent') else ''}".strip())
        strings = [each for each in arguments if isinstance(each, str)]
        self.told.append((name, *(sorted(strings, reverse=True) if len(strings) > 1 else [*strings, ""])))
        getattr(self, name)(*arguments)
        return None

    def cuStreamDestroy(self, stream: str) -> None:
        self.made -= 1

    def cuEventDestroy(self, event: str) -> None:
        self.made -= 1

    def cuEventRecord(self, event: str, stream: str) -> None:
        assert stream == "main" or stream.startswith("Stream ")

    def cuStreamWaitEvent(self, stream: str, event: str, flags: int) -> None:
        assert (stream == "main" or stream.startswith("Stream ")) and flags == 0

    def cuStreamWaitValue32(self, stream: str, place: int, value: int, flags: int) -> None:
        assert stream.startswith("Stream ") and flags == 0 and ctypes.c_int32.from_address(place).value >= value

    def cuStreamWriteValue32(self, stream: str, place: int, value: int, flags: int) -> None:
        assert stream.startswith("Stream ") and flags == 0
        ctypes.c_int32.from_address(place).value = value

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: str) -> None:
        assert stream.startswith("Stream ")
        ctypes.memmove(target, source, nbytes)

    def cuMemcpy2DAsync(self, shape: Any, stream: str) -> None:
        assert stream.startswith("Stream ") and shape.srcPitch >= shape.WidthInBytes <= shape.dstPitch
        for row in range(shape.Height):
            places = (int(shape.dstDevice) + row * shape.dstPitch, int(shape.srcDevice) + row * shape.srcPitch)
            ctypes.memmove(*places, shape.WidthInBytes)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> HostDriver:
    made = HostDriver()
    for name, value in (("call", made), ("enum", made.enum), ("struct", made.struct)):
        monkeypatch.setattr(side, name, value)
        monkeypatch.setattr(branches, name, value, raising=False)
    return made


def memory(slab: tuple[int, ...], dtype: str) -> np.ndarray:
    """Slabs a page apart, as in a mesh tensor."""
    page = 4096 // np.dtype(dtype).itemsize
    room = np.arange(DEVICES * page).astype(dtype)
    return np.lib.stride_tricks.as_strided(
        room, (DEVICES, *slab), (4096, *np.empty(slab, dtype).strides), writeable=True
    )


@pytest.mark.parametrize("rank", range(DEVICES))
@pytest.mark.parametrize("columns", [(0, COLUMNS), (5, 11)])
def test_the_driver_is_told_what_steps_mean(driver: HostDriver, rank: int, columns: tuple[int, int]) -> None:
    stream = side.SideStream("main")
    stream.step("fork", [], [0], rank)
    slabs = {"mine": (DEVICES * ROWS, COLUMNS), "arrived": (DEVICES, ROWS, COLUMNS), "words": (2, DEVICES, GROUPS)}
    found, wanted = (
        {name: memory(slab, "int32" if name == "words" else "float16") for name, slab in slabs.items()}
        for _ in range(2)
    )
    for shift in range(DEVICES):
        for name, tensors, numbers in [
            ("wait_count", ("words",), (shift, 1, 3)),
            ("copy", ("mine", "arrived*"), (ROWS, shift, shift, *columns)),
            ("flag", ("words*",), (shift, 1)),
        ]:
            for arrays, tell in ((found, stream.step), (wanted, meaning.step)):
                given = [arrays[each.rstrip("*")] for each in tensors]
                given = [array if each.endswith("*") else array[rank] for array, each in zip(given, tensors)]
                for words in (array for array in given if array.dtype == np.int32 and name == "wait_count"):
                    words[1] = 3
                tell(name, [_tvm.as_tensor(array) for array in given] if tell == stream.step else given, numbers, rank)
    for name, array in wanted.items():
        assert (found[name] == array).all(), name
    assert ("cuMemcpyDtoDAsync" in driver.order) == (columns == (0, COLUMNS))
    stream.close()
    assert driver.made == 0


def test_it_forks_behind_and_joins_before_the_other_stream(driver: HostDriver) -> None:
    stream = side.SideStream("main")
    assert not stream.forked
    stream.step("fork", [], [0], 0)
    assert stream.forked
    stream.step("join", [], [0], 0)
    assert not stream.forked
    first, second, third, fourth = driver.order
    assert first.startswith("cuEventRecord") and third.startswith("cuEventRecord")
    assert second == fourth == "cuStreamWaitEvent"
    assert first != third  # an event each


def test_what_is_made_for_a_peer_is_a_stream_s(driver: HostDriver) -> None:
    """Further peers' begin behind the fork and are back before the join; what is for all goes to one at a time."""
    stream = side.SideStream("main")
    slabs = {"mine": (DEVICES * ROWS, COLUMNS), "arrived": (DEVICES, ROWS, COLUMNS), "own": (ROWS, COLUMNS)}
    mine, arrived, own = (memory(slab, "float16") for slab in slabs.values())
    words = memory((2, DEVICES, GROUPS), "int32")
    words[:, 1] = 3
    counts, flags, gathered = _tvm.as_tensor(words[0]), _tvm.as_tensor(words), _tvm.as_tensor(arrived)
    moves = ("cuStreamWaitValue32", "cuStreamWriteValue32", "cuMemcpyDtoDAsync")
    for _ in range(2):
        driver.told.clear()
        stream.step("fork", [], [0], 0)
        for shift in (1, 2):
            stream.step("wait_count", [counts], [shift, 1, 3], 0)
            stream.step("copy", [_tvm.as_tensor(mine[0]), gathered], [ROWS, shift, shift, 0, COLUMNS], 0)
            stream.step("flag", [flags], [shift, 1], 0)
        stream.step("wait_count", [counts], [0, 1, 3], 0)
        for shift in (1, 2):
            stream.step("copy", [_tvm.as_tensor(own[0]), gathered], [ROWS, 0, shift, 0, COLUMNS], 0)
            stream.step("flag", [flags], [shift, 0], 0)
        stream.step("join", [], [0], 0)
        streams = [told[1] for told in driver.told if told[0] in moves]
        near, far = streams[0], streams[3]
        assert streams == [*[near] * 3, *[far] * 3, *[near] * 5] and near != far
        (forked, _, event), began = driver.told[:2]
        assert forked == "cuEventRecord" and began == ("cuStreamWaitEvent", near, event)
        waits = [told[1:] for told in driver.told if told[0] == "cuStreamWaitEvent"]
        back = next(told for told in driver.told if told[:2] == ("cuEventRecord", far))
        assert waits[1:3] == [(far, event), (near, back[2])]
        end = driver.told[-2]
        assert end[:2] == ("cuEventRecord", near) and driver.told[-1] == ("cuStreamWaitEvent", "main", end[2])
    stream.close()
    assert driver.made == 0


def test_forks_are_joined_one_by_one(driver: HostDriver) -> None:
    """A join waits for the end of what a fork began, and not for what a later one did."""
    stream = side.SideStream("main")
    for _ in range(3):  # the events of one turn are the next one's
        stream.step("fork", [], [0], 0)
        stream.step("fork", [], [0], 0)
        stream.step("join", [], [1], 0)
        assert stream.forked
        stream.step("fork", [], [0], 0)
        stream.step("join", [], [0], 0)
        assert not stream.forked
        words = [line.split() for line in driver.order]
        assert [line[0].removeprefix("cuEvent") for line in words] == [
            "Record", "cuStreamWaitEvent",  # the first fork
            "Record", "Record", "cuStreamWaitEvent",  # the end of its part, then the second
            "cuStreamWaitEvent",  # the first join
            "Record", "Record", "cuStreamWaitEvent",
            "Record", "cuStreamWaitEvent",  # the last end, and the join of both
        ]  # fmt: skip
        driver.order.clear()
    made = driver.made
    stream.step("fork", [], [0], 0)
    stream.step("fork", [], [0], 0)
    stream.settle()
    assert not stream.forked and driver.made == made
    stream.close()
    assert driver.made == 0
