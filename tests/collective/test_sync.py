"""The barrier and the answers, with threads for workers."""

from __future__ import annotations

import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tvm_axe.collective import sync
from tvm_axe.collective.sync import DONE, FAILED, Aborted, Control, Late


def make(size: int) -> Control:
    return Control(mmap.mmap(-1, Control.nbytes(size)), size)


@pytest.mark.parametrize("futex", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_nobody_leaves_before_all_have_arrived(size: int, futex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker counts its rounds; on leaving a barrier nobody may be behind, and at most one round ahead."""
    if not futex:
        monkeypatch.setattr(sync, "SYS_FUTEX", None)
    monkeypatch.setattr(sync, "_ORDERED", futex)  # also run what orders memory on other machines
    control, rounds = make(size), [0] * size
    for rank in range(size):
        control._words[control._word(0, rank)] = 0xFFFFFFFF - 20  # the counters wrap around on the way

    def work(rank: int) -> None:
        for i in range(1, 41):
            if i % 7 == rank:
                time.sleep(0.002)
            rounds[rank] = i
            control.barrier(rank, 10.0)
            seen = list(rounds)
            assert all(i <= other <= i + 1 for other in seen), (rank, seen)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(work, range(size)))
    assert rounds == [40] * size


def test_who_has_not_arrived_is_named() -> None:
    control = make(4)
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(control.barrier, rank, 0.15) for rank in (0, 2)]
        for attempt in tries:
            with pytest.raises(Late, match=r"worker\(s\) \[1, 3\] did not arrive at a barrier within 0.15 s") as caught:
                attempt.result()
            assert caught.value.missing == [1, 3]


def test_abort_ends_the_wait() -> None:
    control = make(2)
    with ThreadPoolExecutor(1) as pool:
        attempt = pool.submit(control.barrier, 0, 60.0)
        time.sleep(0.05)
        control.abort()
        with pytest.raises(Aborted):
            attempt.result(timeout=5)
    control.reset()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: control.barrier(rank, 5.0), range(2)))


def test_waiting_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for half a second sleeps a slice each time, ten times or so; who does not sleep comes here often."""
    control, slices, futex_wait = make(2), [], sync._futex_wait

    def sleep(*arguments: float) -> None:
        slices.append(arguments)
        futex_wait(*arguments)

    monkeypatch.setattr(sync, "_futex_wait", sleep)
    waiter = threading.Thread(target=control.barrier, args=(0, 10.0))
    waiter.start()
    time.sleep(0.5)
    control.barrier(1, 10.0)
    waiter.join()
    assert 0 < len(slices) < 100


def test_answers() -> None:
    control = make(3)
    assert control.unfinished(range(3), 0) == []
    assert control.unfinished(range(3), 7) == [0, 1, 2]
    control.finish(1, 7, FAILED, "it was ünlucky")
    control.finish(0, 7, DONE, "")
    assert control.unfinished(range(3), 7) == [2]
    assert control.answer(1) == (FAILED, "it was ünlucky")
    assert control.answer(0) == (DONE, "")
    control.finish(2, 7, FAILED, "x" * 100_000 + "the end")
    assert control.answer(2)[1].endswith("xxthe end")
    assert control.answer(1) == (FAILED, "it was ünlucky")
