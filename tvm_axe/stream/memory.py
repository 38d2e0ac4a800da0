"""The accelerator that a program is simulated on: units, channels between them, on-chip and off-chip memory.

Off-chip memory serves requests of a fixed size, spread over its channels in turn, so that together they are one queue
that serves `OffChip.rate` requests a cycle. Whoever loads or stores a tile sends `OffChip.issue` requests a cycle and
waits for the last one's answer. Requests are not simulated one by one: while n are sent a cycle, the queue grows by n -
rate, so what has to be known is when a unit starts and stops to send, two events a tile, and when it sends what is left
in its last cycle.

>>> memory = OffChip()
>>> memory.requests(rows=4, row_bytes=96)
8
>>> queue = MemoryQueue(memory, hop=1)
>>> queue.start(100, 8, unit="load")
>>> queue.advance()
('load', 126)

The eighth request is sent at 107 and answered 16 cycles later; it crosses three channels, to the memory, into its queue
and back.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import Any

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import Token, decode


@dataclass(frozen=True)
class OffChip:
    """The off-chip memory of an accelerator.

    Attributes
    ----------
    request_bytes : int
        Bytes of a request; each row of a tile takes whole requests.
    channels : int
        The number of channels.
    interval : int
        Cycles from one request of a channel to the next.
    latency : int
        Cycles from a request to its answer.
    issue : int
        Requests that a unit sends in a cycle.
    """

    request_bytes: int = 64
    channels: int = 32
    interval: int = 2
    latency: int = 16
    issue: int = 1

    def __post_init__(self) -> None:
        _check_positive(self, ("request_bytes", "channels", "interval", "issue"))

    @property
    def rate(self) -> float:
        """Requests that all the channels serve in a cycle."""
        return self.channels / self.interval

    def requests(self, rows: int, row_bytes: int) -> int:
        """Return the requests for so many rows."""
        return rows * -(-row_bytes // self.request_bytes)


@dataclass(frozen=True)
class Accelerator:
    """The accelerator that a program is simulated on.

    Attributes
    ----------
    compute : int
        FLOPs a cycle of a unit that doesn't say otherwise.
    on_chip_bandwidth : int
        Bytes a cycle between a unit and on-chip memory, each way.
    off_chip : OffChip
        The off-chip memory.
    depth : int
        Tokens that a channel holds where it isn't said otherwise.
    hop : int
        Cycles until a token that was sent can be seen, and until a slot that was freed can be filled.
    capacity : int, optional
        Bytes of on-chip memory; more in use at a time is an error.
    banked : bool
        Whether reading a tile from on-chip memory is slowed down by the bank conflicts of its layout.
    """

    compute: int = 1024
    on_chip_bandwidth: int = 64
    off_chip: OffChip = field(default_factory=OffChip)
    depth: int = 2
    hop: int = 1
    capacity: int | None = None
    banked: bool = False

    def __post_init__(self) -> None:
        _check_positive(self, ("compute", "on_chip_bandwidth", "depth"))
        if self.hop < 0:
            raise StreamError(f"Accelerator: hop must be 0 or more, not {self.hop}")


class MemoryQueue:
    """The requests under way, as a fluid: see the module's text.

    Parameters
    ----------
    memory : OffChip
        What serves them.
    hop : int
        Cycles of a channel, of which there are three on a request's way.
    """

    __slots__ = ("_events", "_issue", "_latency", "_rate", "_sending", "_serial", "_served", "_time", "_waiting")

    def __init__(self, memory: OffChip, hop: int) -> None:
        self._rate, self._latency, self._issue = memory.rate, memory.latency + 3 * hop, memory.issue
        self._events: list[tuple[int, int, int, int, Any]] = []  # with the requests left, and those sent a cycle so far
        self._serial = self._sending = self._time = 0
        self._waiting = 0.0  # requests that were sent and not yet served
        self._served = 0.0  # requests

    @property
    def busy(self) -> float:
        """Cycles that it takes to serve what was sent, were all the channels one."""
        return (self._served + self._waiting) / self._rate

    def start(self, time: int, requests: int, unit: Any) -> None:
        """Have `unit` send so many requests from `time` on, which is not before the last event."""
        assert time >= self._time, "a request before what was served"
        self._serial += 1
        heappush(self._events, (time, self._serial, requests, 0, unit))

    def advance(self, until: float = math.inf) -> tuple[Any, int] | None:
        """Go on to the next last request of a unit that is before `until`; return the unit and when that is answered.

        None says that nothing is left before then.
        """
        events, rate, issue = self._events, self._rate, self._issue
        now, sending, queued = self._time, self._sending, self._waiting
        answered = None
        while events:
            time, serial, left, sent, unit = events[0]
            if time >= until:
                break
            passed = time - now
            if passed:
                most = queued + sending * passed
                queued = most - rate * passed
                if queued < 0:
                    queued = 0.0
                self._served += most - queued
                now = time
            sending -= sent
            if not left:
                heappop(events)
                answered = unit, time - 1 + self._latency + int(queued / rate)
                break
            sent = issue if issue < left else left
            cycles, left = divmod(left, sent)
            sending += sent
            heapreplace(events, (time + cycles, serial, left, sent, unit))
        self._time, self._sending, self._waiting = now, sending, queued
        return answered


class Occupancy:
    """How much on-chip memory is in use over time: what was written from when, read for the last time when."""

    __slots__ = ("_tenants",)

    def __init__(self) -> None:
        self._tenants: deque[Tenant] = deque()

    def add(self, size: int, start: int) -> Tenant:
        """Take up `size` bytes from `start` until the last time that the tenant is read."""
        tenant = Tenant(size, start)
        self._tenants.append(tenant)
        return tenant

    def steps(self) -> list[tuple[int, int]]:
        """Return when what is in use changes, and the bytes in use from then on."""
        changes: dict[int, int] = {}
        for tenant in self._tenants:
            changes[tenant.start] = changes.get(tenant.start, 0) + tenant.size
            changes[tenant.stop + 1] = changes.get(tenant.stop + 1, 0) - tenant.size
        used, found = 0, []
        for time in sorted(changes):
            used += changes[time]
            found.append((time, used))
        return found

    @property
    def peak(self) -> int:
        """The most bytes in use at a time."""
        return max((used for _, used in self.steps()), default=0)


class Tenant:
    """A user of on-chip memory: its bytes, and the first and last cycle that it is needed in."""

    __slots__ = ("size", "start", "stop")

    def __init__(self, size: int, start: int) -> None:
        self.size, self.start, self.stop = size, start, start

    def use(self, time: int) -> None:
        """Note that the tenant is needed at that time."""
        if time > self.stop:
            self.stop = time


class Stored:
    """A tensor of tiles in on-chip memory: what a buffer's reference refers to."""

    __slots__ = ("rank", "tenant", "tokens")

    def __init__(self, tokens: list[Token], rank: int, tenant: Tenant) -> None:
        self.tokens, self.rank, self.tenant = tokens, rank, tenant

    def nested(self) -> list:
        """Return the tiles as nested lists."""
        return decode(self.tokens, self.rank)


def _check_positive(what: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(what, name) < 1:
            raise StreamError(f"{type(what).__name__}: {name} must be 1 or more, not {getattr(what, name)}")
