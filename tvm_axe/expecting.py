"""What a run of a lowered program is expected to look like: a timeline by a model, of which nothing has run.

Each stage takes what the search ranks by (`tvm_axe.lower.cost.expected`): its bytes over the link's bandwidth, its
memory's, its arithmetic. Calls are placed as the lowered program lists them: a device's stream and its side stream each
in order, a fork and a join between them. All devices do the same, so peers are done when this device is.

Of a product beside copies (`tvm_axe.lower.pairs`), columns of peers' rows are made one after the other, the own rows
last, and copied as soon as they are counted; where its operand is copied, it waits for each peer's rows in turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm_axe.collective import Event, Timeline
from tvm_axe.collective.engine import Rates
from tvm_axe.collective.side import BESIDE
from tvm_axe.lower.calls import Call
from tvm_axe.lower.cost import expected
from tvm_axe.lower.lowered import Lowered
from tvm_axe.tracing import described

__all__ = ["expected_timeline"]

_SIDE = ("axe.wait_count", "axe.copy", "axe.flag")


def expected_timeline(lowered: Lowered, rates: Rates) -> Timeline:
    """Return what devices of such rates are expected to do: a track for each, and one for what it does beside."""
    events = _Streams(lowered, rates).run()
    has_side = any(event.worker for event in events)
    tracks = [
        f"worker {device}{side}" for device in range(lowered.mesh.size) for side in ("", " beside")[: 1 + has_side]
    ]
    spread = tuple(
        Event(device * (1 + has_side) + each.worker, each.name, each.kind, each.start, each.stop, each.details)
        for device in range(lowered.mesh.size)
        for each in events
    )
    return Timeline(f"{lowered.name}: {lowered.notation} on {lowered.mesh}, expected", tuple(tracks), spread, ())


class _Streams:
    """The two streams of a device, in nanoseconds; events of worker 0 are the one's, of 1 the side stream's."""

    def __init__(self, lowered: Lowered, rates: Rates) -> None:
        self.lowered, self.rates = lowered, rates
        self.main = self.side = 0
        self.ends: list[int] = []  # of what the side stream was told from each fork on that is pending
        self.events: list[Event] = []
        self.arrivals: list[int] = []  # when each flag of the last fork is set
        self.kernel: tuple[int, int] | None = None  # when the kernel behind the last fork began and ended
        seconds = expected(lowered, rates)
        shares: dict[int, int] = {}
        for call in lowered.calls:
            if self._takes_time(call):
                assert call.stage is not None
                shares[call.stage] = shares.get(call.stage, 0) + 1
        self.nanoseconds = {stage: max(1, int(1e9 * seconds[stage] / count)) for stage, count in shares.items()}

    def _takes_time(self, call: Call) -> bool:
        """Whether a call is a part of what its stage takes; what prepares a kernel, steps and waits are not."""
        if call.stage is None or call.function in ("axe.wait_count", "axe.flag", "axe.join"):
            return False
        return call.kernel in (None, self.lowered.stages[call.stage].kernel)

    def run(self) -> list[Event]:
        """The events of all calls."""
        calls = self.lowered.calls
        for call in calls:
            if call.function in _SIDE:
                self._beside(call, calls)
            elif call.function.endswith(BESIDE):
                self._put(call, 1, self._length(call))
            elif call.function == "axe.fork":
                self.side = max(self.side, self.main)
                self.ends.append(self.side)
                self.arrivals, self.kernel = [], None
            elif call.function == "axe.join":
                (left,) = (argument for argument in call.arguments if isinstance(argument, int))
                count = len(self.ends) - left
                self._wait("join", max([self.main, *self.ends[:count]]))
                del self.ends[:count]
            elif call.stage is None:
                self._wait(call.function.removeprefix("axe."), self.main + max(1, int(1e9 * self.rates.link.latency)))
            elif self.arrivals and call.kernel is not None and self.ends:  # it waits for what is copied to it
                self._behind_flags(call)
            else:
                begun = self.main
                self._put(call, 0, self._length(call))
                self.kernel = (begun, self.main)
        return self.events

    def _length(self, call: Call) -> int:
        if not self._takes_time(call):
            return max(1, int(1e9 * self.rates.link.latency))
        assert call.stage is not None
        return self.nanoseconds[call.stage]

    def _put(self, call: Call, stream: int, length: int) -> None:
        """A call behind what its stream was told before."""
        begin = self.side if stream else self.main
        name, kind, details = described(self.lowered, call)
        self.events.append(Event(stream, name, kind, begin, begin + length, details))
        if stream:
            self.side = begin + length
            self.ends[-1] = self.side
        else:
            self.main = begin + length

    def _wait(self, name: str, until: int) -> None:
        if until > self.main:
            self.events.append(Event(0, name, "waiting", self.main, until))
            self.main = until

    def _beside(self, call: Call, calls: Sequence[Call]) -> None:
        numbers = [argument for argument in call.arguments if isinstance(argument, int)]
        if call.function == "axe.copy":
            self._put(call, 1, self._length(call))
        elif call.function == "axe.flag":
            self.arrivals.append(self.side)
        elif self.kernel is not None:  # a counter that the kernel has counted up to
            shift, group, _ = numbers
            counts = [c.arguments for c in calls if c.function == "axe.wait_count"]
            devices = self.lowered.mesh[str(call.arguments[-1])]
            groups = 1 + max(int(str(each[2])) for each in counts)
            begin, end = self.kernel
            done = ((shift or devices) - 1 + (group + 1) / groups) / devices
            self.side = max(self.side, begin + int(done * (end - begin)))

    def _behind_flags(self, call: Call) -> None:
        """A kernel that takes its own rows, then each peer's once they have arrived."""
        regions, length = len(self.arrivals) + 1, self._length(call)
        begin = self.main
        at = begin + length // regions
        for arrival in self.arrivals:
            at = max(at, arrival) + length // regions
        self._put(call, 0, max(1, at - begin))
        self.kernel = (begin, self.main)
