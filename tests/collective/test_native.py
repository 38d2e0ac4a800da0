"""The compiled barrier, with threads for workers."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import tvm
from tvm.script.ir_builder import tirx as T

from tvm_axe import _tvm
from tvm_axe.collective import calls, native, sync
from tvm_axe.collective.native import meeting
from tvm_axe.collective.sync import Aborted, Control, Late


class Meeting:
    """A control block, and for each worker what compiled code does with it."""

    def __init__(self, size: int, spins: int, timeout: float = 10.0) -> None:
        self.control = Control(mmap.mmap(-1, Control.nbytes(size)), size)
        self.slow = [0] * size  # how often each worker came to the slow path
        self.errors: dict[int, Exception] = {}  # what came of it; C++ makes a RuntimeError of any error
        self._timeout = timeout
        functions = {
            f"{name}{rank}": meeting(name, numbers, self.control, rank, spins).with_attr(
                "global_symbol", f"{name}{rank}"
            )
            for rank in range(size)
            for name, numbers in (("barrier", []), ("arrive", []), ("wait", [1]))
        }
        self._compiled = tvm.compile(tvm.IRModule(functions), target="llvm").jit()

    def call(self, name: str, rank: int) -> None:
        """Do it in this thread, as a worker."""

        def slow(behind: int) -> None:
            self.slow[rank] += 1
            try:
                self.control.wait(rank, behind, self._timeout)
            except Exception as error:
                self.errors[rank] = error
                raise

        calls._current.worker = SimpleNamespace(wait=slow)
        self._compiled[f"{name}{rank}"]()


def run(size: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(size) as pool:
        for done in [pool.submit(work, rank) for rank in range(size)]:
            done.result(timeout=60)


@pytest.mark.parametrize("spins", [0, 3, native.SPINS])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_nobody_leaves_before_all_have_arrived(size: int, spins: int) -> None:
    meeting, rounds = Meeting(size, spins), [0] * size
    for rank in range(size):  # the counters wrap around on the way
        meeting.control._words[meeting.control._word(0, rank)] = 0xFFFFFFFF - 100

    def work(rank: int) -> None:
        for i in range(1, 301):
            if i % 50 == rank:
                time.sleep(0.002)
            rounds[rank] = i
            meeting.call("barrier", rank)
            seen = list(rounds)
            assert all(i <= other <= i + 1 for other in seen), (rank, seen)

    run(size, work)
    assert rounds == [300] * size


@contextmanager
def delays(seed: int) -> Iterator[list[str]]:
    """Have meetings compiled in here wait for random times before and after each system call, and at each look."""
    taken: list[str] = []
    rng = random.Random(seed)

    def delay(where: str) -> None:
        taken.append(where)
        if rng.random() < 0.5:
            time.sleep(rng.choice([0, 0, 1e-5, 1e-4, 1e-3]))

    _tvm.register_functions({"axe.test_delay": delay})
    futex, reached = native._futex, native._reached

    def slow_futex(word: object, operation: int, *arguments: object) -> None:
        T.evaluate(T.call_packed("axe.test_delay", f"before futex {operation}"))
        futex(word, operation, *arguments)
        T.evaluate(T.call_packed("axe.test_delay", f"after futex {operation}"))

    def slow_reached(word: object, generation: object) -> object:
        T.evaluate(T.call_packed("axe.test_delay", "before a look"))
        return reached(word, generation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_futex", slow_futex)
        patch.setattr(native, "_reached", slow_reached)
        yield taken


@pytest.mark.parametrize("spins", [0, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_delays_anywhere_do_not_matter(size: int, spins: int) -> None:
    """Nor is a sleeper left alone: it would come out five seconds later each time, and `run` waits for sixty."""
    with delays(size) as taken:
        meeting, rounds = Meeting(size, spins), [0] * size
        sync._Timespec.from_buffer(meeting.control._bytes, sync._LINE // 2).seconds = 5

        def work(rank: int) -> None:
            for i in range(1, 61):
                rounds[rank] = i
                meeting.call("barrier", rank)
                assert all(i <= other <= i + 1 for other in rounds), rounds

        run(size, work)
    assert rounds == [60] * size
    assert {"before futex 0", "after futex 0", "before futex 1", "after futex 1", "before a look"} == set(taken)


def test_waiting_for_an_earlier_arrival() -> None:
    """A worker may be one arrival ahead of those it waits for, and not two."""
    meeting = Meeting(2, 0)
    meeting.call("arrive", 0)
    meeting.call("wait", 0)
    assert meeting.slow == [0, 0]
    meeting.call("arrive", 0)
    left = []

    def wait() -> None:
        meeting.call("wait", 0)
        left.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.02)
    assert not left
    meeting.call("arrive", 1)
    waiter.join(timeout=5)
    assert left


@pytest.mark.parametrize("spins", [0, native.SPINS])
def test_who_has_not_arrived_is_named(spins: int) -> None:
    meeting = Meeting(4, spins, timeout=0.15)

    def work(rank: int) -> None:
        if rank in (0, 2):
            with pytest.raises(RuntimeError, match=r"worker\(s\) \[1, 3\] did not arrive at a barrier within 0.15 s"):
                meeting.call("barrier", rank)
            error = meeting.errors[rank]
            assert isinstance(error, Late) and error.missing == [1, 3]

    run(4, work)
    assert meeting.slow == [1, 0, 1, 0]


@pytest.mark.parametrize("before", [False, True])
def test_abort_ends_the_wait(before: bool) -> None:
    meeting = Meeting(2, native.SPINS)
    if before:
        meeting.control.abort()
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(meeting.call, "barrier", 0)
        if not before:
            time.sleep(0.02)
            meeting.control.abort()
        with pytest.raises(RuntimeError, match="another worker failed"):
            attempt.result(timeout=5)
        error = meeting.errors[0]
        assert isinstance(error, Aborted) and error.missing == [1]


def test_waiting_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for half a second looks as often as it may and sleeps, a slice each time: ten times or so."""
    slices, futex_wait = [], sync._futex_wait

    def sleep(*arguments: float) -> None:
        slices.append(arguments)
        futex_wait(*arguments)

    monkeypatch.setattr(sync, "_futex_wait", sleep)
    with delays(0) as taken:
        meeting = Meeting(2, 20)
        waiter = threading.Thread(target=meeting.call, args=("barrier", 0))
        waiter.start()
        time.sleep(0.5)
        meeting.control.arrive(1)
        waiter.join()
    assert taken.count("before futex 0") == 1 and 20 <= taken.count("before a look") <= 20 + 2
    assert meeting.slow == [1, 0] and 0 < len(slices) < 100
