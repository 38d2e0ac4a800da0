"""The accelerator that a program is simulated on: units, channels between them, on-chip and off-chip memory.

Off-chip memory serves requests of a fixed size, spread over its channels in turn, so that together they are one queue
that serves `OffChip.rate` requests a cycle. Whoever loads or stores a tile sends `OffChip.issue` requests a cycle and
waits for the last one's answer.

>>> memory = OffChip()
>>> memory.requests(rows=4, row_bytes=96), memory.rate
(8, 16.0)
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


class Occupancy:
    """How much on-chip memory is in use over time: what was written from when, read for the last time when."""

    __slots__ = ("tenants",)

    def __init__(self) -> None:
        self.tenants: list[Tenant] = []

    def add(self, size: int) -> Tenant:
        """Take up `size` bytes, from a time to another that are known later."""
        tenant = Tenant(len(self.tenants), size)
        self.tenants.append(tenant)
        return tenant

    def steps(self) -> list[tuple[int, int]]:
        """Return when what is in use changes, and the bytes in use from then on."""
        changes: dict[int, int] = {}
        for tenant in self.tenants:
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
    """A user of on-chip memory: its number, its bytes, and the first and last cycle that it is needed in."""

    __slots__ = ("number", "size", "start", "stop")

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.start, self.stop = number, size, 0, 0


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
