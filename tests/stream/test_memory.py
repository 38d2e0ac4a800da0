"""Off-chip memory as a fluid, against every request on its own; on-chip occupancy."""

import heapq
import random

import pytest

from tvm_axe.stream import Accelerator, OffChip, StreamError
from tvm_axe.stream.memory import MemoryQueue, Occupancy


def one_by_one(starts, memory):
    """When each of (time, requests) has its last answer: requests are served in the order in which they are sent."""
    sent = sorted(
        (time + at // memory.issue, unit) for unit, (time, requests) in enumerate(starts) for at in range(requests)
    )
    answered, slots, clock = {}, [], 0
    for time, unit in sent:
        # One queue of `rate` requests a cycle.
        clock = max(clock, time)
        while len(slots) and slots[0] < clock:
            heapq.heappop(slots)
        if len(slots) == int(memory.rate):
            clock = slots[0] + 1
            while slots and slots[0] < clock:
                heapq.heappop(slots)
        heapq.heappush(slots, clock)
        answered[unit] = clock + memory.latency
    return [answered[unit] for unit in range(len(starts))]


@pytest.mark.parametrize("issue", [1, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_the_fluid_is_within_a_few_cycles_of_single_requests(seed, issue):
    draw = random.Random(seed)
    memory = OffChip(channels=8, interval=2, issue=issue)
    starts = [(draw.randrange(200), draw.randrange(1, 150)) for _ in range(12)]
    queue = MemoryQueue(memory, hop=0)
    for unit, (time, requests) in sorted(enumerate(starts), key=lambda item: item[1]):
        queue.start(time, requests, unit)
    found = {}
    while (answered := queue.advance()) is not None:
        found[answered[0]] = answered[1]
    for unit, want in enumerate(one_by_one(starts, memory)):
        # Requests of one cycle have no order in the fluid: off by as much as they take.
        assert abs(found[unit] - want) <= 1 + issue * len(starts) / memory.rate
    assert queue.busy == pytest.approx(sum(requests for _, requests in starts) / memory.rate)


@pytest.mark.parametrize(("issue", "cycles"), [(1, 10), (4, 3), (5, 2), (16, 1), (99, 1)])
def test_a_unit_alone_sends_so_many_a_cycle(issue, cycles):
    queue = MemoryQueue(OffChip(issue=issue), hop=0)
    queue.start(7, 10, "load")
    assert queue.advance(7 + cycles) is None  # the last is sent in the cycle that ends there
    assert queue.advance() == ("load", 7 + cycles - 1 + 16)
    assert queue.advance() is None


def test_rows_take_whole_requests():
    assert OffChip().requests(3, 96) == 6 and OffChip().requests(3, 64) == 3 and OffChip().requests(0, 64) == 0


def test_occupancy_is_what_is_in_use_at_a_time():
    use = Occupancy()
    first, second = use.add(100, 0), use.add(50, 10)
    first.use(10)
    second.use(30)
    assert use.peak == 150 and use.steps() == [(0, 100), (10, 150), (11, 50), (31, 0)]


def test_machines_are_checked():
    with pytest.raises(StreamError, match="Accelerator: compute must be 1 or more, not 0"):
        Accelerator(compute=0)
    with pytest.raises(StreamError, match="OffChip: channels must be 1 or more"):
        OffChip(channels=0)
    with pytest.raises(StreamError, match="OffChip: issue must be 1 or more"):
        OffChip(issue=0)
