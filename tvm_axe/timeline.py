"""Timelines: what each worker did when in one run of a program, and whose data it worked on.

A timeline is saved in the Trace Event Format (the JSON object form), which https://ui.perfetto.dev and
chrome://tracing open, or drawn as text. Times are nanoseconds from the start of the run.

>>> send = Event(0, "mm", "local", 0, 60_000)
>>> wait, receive = Event(1, "barrier", WAITING, 0, 70_000), Event(1, "sum", "all-reduce", 70_000, 100_000)
>>> timeline = Timeline("MM-AR on tp=2", ("worker 0", "worker 1"), (send, wait, receive), (Arrow("C", send, receive),))
>>> print(timeline.text(width=31))
MM-AR on tp=2: 0.100 ms, 5.0 us a column
worker 0 |AAAAAAAAAAAA        |
worker 1 |..............BBBBBB|
milliseconds of each worker
  A mm: local        0.060  0.000
  B sum: all-reduce  0.000  0.030
  . waiting          0.000  0.070

Source: Trace Event Format, "JSON Object Format", "Complete Events", "Flow Events" and "Metadata Events".
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from string import ascii_uppercase
from typing import Any

from tvm_axe.errors import InputError
from tvm_axe.notebook import preformatted

WAITING = "waiting"
"""The kind of an event in which a worker waits for others."""
ARRIVAL = "arrival"
"""The kind of an event in which it says that others need not wait for it any longer."""
BESIDE = "beside"
"""The kind of an event in which it tells its copy engines what to do beside a kernel."""
EDGE = "edge"
"""The kind of what stands for the time before the first worker did something, and after the last had finished."""

_PROCESS = 1  # one group of tracks; 0 is the idle process to some viewers
_MARKS = {WAITING: ".", ARRIVAL: ".", BESIDE: ".", EDGE: " "}


@dataclass(frozen=True, eq=False)
class Event:
    """What a worker was at from `start` to before `stop`.

    Attributes
    ----------
    worker : int
        Its rank.
    name, kind : str
        A stage's name and kind (`tvm_axe.lower.Stage`); or what was called and `WAITING`, `ARRIVAL` or `EDGE`.
    start, stop : int
        Nanoseconds.
    details : Mapping
        What else there is to say, to be shown beside it: numbers and strings by name. Events of different ``chunk``
        are told apart in `Timeline.text`.

    Raises
    ------
    InputError
        If it takes no time.
    """

    worker: int
    name: str
    kind: str
    start: int
    stop: int
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InputError(
                f"event {self.name!r} of worker {self.worker}: it must start at 0 or later and stop after that, not "
                f"run from {self.start} to {self.stop}"
            )


@dataclass(frozen=True, eq=False)
class Arrow:
    """The tensor `data` goes from the event on one worker that wrote it to the one on another that reads it."""

    data: str
    source: Event
    target: Event


@dataclass(frozen=True, eq=False)
class Timeline:
    """One run of a program.

    Attributes
    ----------
    title : str
        What was run.
    workers : tuple of str
        The workers' names, by rank.
    events : tuple of Event
        In any order; those of one worker don't overlap.
    arrows : tuple of Arrow
        Between them.

    Raises
    ------
    InputError
        If events of a worker overlap, or belong to none; or an arrow joins others than two of the events.
    """

    title: str
    workers: tuple[str, ...]
    events: tuple[Event, ...]
    arrows: tuple[Arrow, ...]

    def __post_init__(self) -> None:
        for event in self.events:
            if event.worker not in range(len(self.workers)):
                raise InputError(f"event {event.name!r}: there are {len(self.workers)} workers, no {event.worker}")
        for rank, worker in enumerate(self.workers):
            for before, after in pairwise(self.track(rank)):
                if after.start < before.stop:
                    raise InputError(
                        f"events {before.name!r} and {after.name!r} of {worker} overlap: the first stops at "
                        f"{before.stop}, the second starts at {after.start}"
                    )
        known = set(map(id, self.events))
        for arrow in self.arrows:
            if not {id(arrow.source), id(arrow.target)} <= known:
                raise InputError(f"arrow {arrow.data!r}: its source and target must be events of the timeline")

    def track(self, rank: int) -> list[Event]:
        """The events of a worker in order."""
        return sorted((event for event in self.events if event.worker == rank), key=lambda event: event.start)

    @property
    def duration(self) -> int:
        """Nanoseconds until the last worker has finished."""
        return max((event.stop for event in self.events if event.kind != EDGE), default=0)

    def trace_events(self) -> dict[str, Any]:
        """Return the object that `save` writes: a complete event for each event, two flow events for each arrow."""
        names = [_metadata("process_name", 0, {"name": self.title})]
        for rank, worker in enumerate(self.workers):
            names.append(_metadata("thread_name", rank, {"name": worker}))
            names.append(_metadata("thread_sort_index", rank, {"sort_index": rank}))
        spans = [
            _record("X", event.name, event.kind, event.worker, event.start)
            | {"dur": (event.stop - event.start) / 1000, "args": dict(event.details)}
            for event in self.events
        ]
        flows = []
        for number, arrow in enumerate(self.arrows):
            # Inside the slices that they bind to, which are those from their start to before their stop.
            flows += [
                _record("s", arrow.data, "data", arrow.source.worker, arrow.source.stop - 1) | {"id": number},
                _record("f", arrow.data, "data", arrow.target.worker, arrow.target.start) | {"id": number, "bp": "e"},
            ]
        # A viewer that reads them in order has to know a slice before what binds to it; sorting keeps that order.
        ordered = sorted(spans + flows, key=lambda record: record["ts"])
        return {"traceEvents": names + ordered, "displayTimeUnit": "ns"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as JSON.

        Raises
        ------
        InputError
            If the file cannot be written.
        """
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(self.trace_events(), file)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return preformatted(self.text(max(120, 80 + max(map(len, self.workers), default=0))))

    def text(self, width: int = 120) -> str:
        """Draw a bar for each worker, `width` columns wide with its name.

        A stage is a letter, a small one in chunks of odd number; a point is waiting, a blank neither. A column shows
        what took most of its time, or a stage's event that is too short to be seen otherwise.

        Raises
        ------
        InputError
            If that is too narrow.
        """
        label = max(map(len, self.workers), default=0)
        columns = width - label - 3
        if columns < 1:
            raise InputError(f"text: width must be at least {label + 4} for these workers' names, not {width}")
        letters: dict[tuple[str, str], str] = {}
        for event in sorted(self.events, key=lambda event: event.start):
            if event.kind not in _MARKS:
                letters.setdefault((event.name, event.kind), ascii_uppercase[len(letters) % len(ascii_uppercase)])
        column = max(self.duration, 1) / columns
        lines = [f"{self.title}: {self.duration / 1e6:.3f} ms, {column / 1e3:,.1f} us a column"]
        for rank, worker in enumerate(self.workers):
            lines.append(f"{worker:<{label}} |{self._bar(rank, letters, columns, column)}|")
        rows = [(f"{letter} {name}: {kind}", self._times(name, kind)) for (name, kind), letter in letters.items()]
        rows.append((f"{_MARKS[WAITING]} {WAITING}", self._times(None, WAITING)))
        label = max(len(what) for what, _ in rows)
        lines.append("milliseconds of each worker")
        lines += [f"  {what:<{label}}" + "".join(f"  {ns / 1e6:.3f}" for ns in times) for what, times in rows]
        return "\n".join(lines)

    def _bar(self, rank: int, letters: Mapping[tuple[str, str], str], columns: int, column: float) -> str:
        shares: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
        short: dict[int, str] = {}
        for event in self.track(rank):
            mark = _MARKS.get(event.kind) or letters[event.name, event.kind]
            mark = mark.lower() if event.details.get("chunk", 0) % 2 else mark
            if event.kind not in _MARKS and event.stop - event.start < column:
                short[min(int((event.start + event.stop) / 2 / column), columns - 1)] = mark
            for at in range(int(event.start / column), columns):
                inside = min(event.stop, (at + 1) * column) - max(event.start, at * column)
                if inside <= 0:
                    break
                shares[at][mark] += inside
        for share in shares:
            share[" "] += column - sum(share.values())
        bar = [max(share, key=lambda mark: share[mark]) for share in shares]
        return "".join(short.get(at, mark) for at, mark in enumerate(bar))

    def _times(self, name: str | None, kind: str) -> list[int]:
        """Nanoseconds that each worker spent on events of that kind, and of that name if one is given."""
        return [
            sum(
                event.stop - event.start
                for event in self.track(rank)
                if event.kind == kind and name in (None, event.name)
            )
            for rank in range(len(self.workers))
        ]


def _record(phase: str, name: str, category: str, worker: int, at: int) -> dict[str, Any]:
    # The half makes 1.001 us 1001 ns again when it is multiplied by 1000 and cut, as Perfetto does: a nanosecond less,
    # and an event would begin within the one before.
    return {"ph": phase, "name": name, "cat": category, "pid": _PROCESS, "tid": worker + 1, "ts": (at + 0.5) / 1000}


def _metadata(name: str, worker: int, what: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": _PROCESS, "tid": worker + 1, "args": dict(what)}
