"""Off-chip memory as a fluid, against every request on its own; on-chip occupancy."""

import heapq
import random

import pytest

from tvm_axe.stream import Accelerator, OffChip, Scalar, StreamError, StreamProgram, StreamType, functions
from tvm_axe.stream.memory import Occupancy


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


def loads(starts, memory):
    """A run of units that each load a tile of so many requests, (time, requests)."""
    p = StreamProgram("loads")
    for number, (time, requests) in enumerate(starts):
        begin = p.input(f"x{number}", StreamType((1,), Scalar()))
        begun = begin.map(functions.number("wait", lambda n: n, cycles=time), name=f"wait{number}")
        begun.load(p.tensor(f"t{number}", requests, 16), (requests, 16), name=f"load{number}").discard()
    given = {f"x{number}": [0] for number in range(len(starts))}
    return p.run(given, Accelerator(off_chip=memory, hop=0), values=False)


@pytest.mark.parametrize("issue", [1, 3, 8])
@pytest.mark.parametrize("seed", range(8))
def test_the_fluid_is_within_a_few_cycles_of_single_requests(seed, issue):
    draw = random.Random(seed)
    memory = OffChip(channels=8, interval=2, issue=issue)
    starts = [(draw.randrange(200), draw.randrange(1, 150)) for _ in range(12)]
    report = loads(starts, memory)
    for number, want in enumerate(one_by_one(starts, memory)):
        found = starts[number][0] + report.unit(f"load{number}").memory
        # Requests of one cycle have no order in the fluid: off by as much as they take.
        assert abs(found - want) <= 1 + issue * len(starts) / memory.rate
    assert report.off_chip_busy == pytest.approx(sum(requests for _, requests in starts) / memory.rate)


@pytest.mark.parametrize(("issue", "cycles"), [(1, 10), (4, 3), (5, 2), (16, 1), (99, 1)])
def test_a_unit_alone_sends_so_many_a_cycle(issue, cycles):
    report = loads([(7, 10)], OffChip(issue=issue))
    assert report.unit("load0").memory == cycles - 1 + 16 and report.cycles == 7 + cycles - 1 + 16


def test_rows_take_whole_requests():
    assert OffChip().requests(3, 96) == 6 and OffChip().requests(3, 64) == 3 and OffChip().requests(0, 64) == 0


def test_occupancy_is_what_is_in_use_at_a_time():
    use = Occupancy()
    first, second = use.add(100), use.add(50)
    first.stop = 10
    second.start, second.stop = 10, 30
    assert use.peak == 150 and use.steps() == [(0, 100), (10, 150), (11, 50), (31, 0)]


def test_machines_are_checked():
    with pytest.raises(StreamError, match="Accelerator: compute must be 1 or more, not 0"):
        Accelerator(compute=0)
    with pytest.raises(StreamError, match="OffChip: channels must be 1 or more"):
        OffChip(channels=0)
    with pytest.raises(StreamError, match="OffChip: issue must be 1 or more"):
        OffChip(issue=0)
