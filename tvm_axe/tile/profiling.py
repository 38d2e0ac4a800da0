"""Where a compiled tile program waits: what `TileExecutable.profile` gives, and how it reads what a kernel wrote down.

A kernel that is profiled is compiled anew, with a clock's reading before and behind each wait, by one thread of each
role; the executable's own code has none of it. A `Profile` says it as a table, and as a timeline for
https://ui.perfetto.dev, in which all that isn't waiting is work.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tvm import tirx

from tvm_axe.errors import InputError
from tvm_axe.notebook import preformatted
from tvm_axe.timeline import WAITING, Event, Timeline

HEADER = 8
"""Words in front of a role's samples: its first and last clock with the nanoseconds of each, how many waits there were,
and the multiprocessor."""

LABELS = 256
"""How many kinds of waits there are at most; a wait's cycles are multiplied by it, and its kind is added."""

WORK = "work"
"""The kind of an event in which a role doesn't wait."""


@dataclass(eq=False)
class Samples:
    """Where a kernel writes down its waits.

    Attributes
    ----------
    roles : tuple of str
        Who waits, in each block.
    blocks : int
        How many blocks, the first ones, write.
    most : int
        How many waits of a role in a block there is room for.
    labels : list of str
        What is waited for, as the kernel's code is written.
    """

    roles: tuple[str, ...]
    blocks: int
    most: int
    labels: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.buffer: tirx.Buffer = tirx.decl_buffer((self.size,), "int64", "samples")

    @property
    def stride(self) -> int:
        """Words of a role in a block."""
        return HEADER + 2 * self.most

    @property
    def size(self) -> int:
        """Words of them all."""
        return self.blocks * len(self.roles) * self.stride

    def label(self, what: str) -> int:
        """The number of what is waited for."""
        if what not in self.labels:
            assert len(self.labels) < LABELS, self.labels
            self.labels.append(what)
        return self.labels.index(what)

    def read(self, name: str, words: np.ndarray) -> Profile:
        """The profile that a kernel has written."""
        tracks = words.reshape(self.blocks * len(self.roles), self.stride)
        ran = [number for number, track in enumerate(tracks) if track[2] > track[0]]
        if not ran:
            raise InputError(f"profile: no block of {name} has written anything")
        longest = tracks[max(ran, key=lambda number: tracks[number, 2] - tracks[number, 0])]
        cycle = max(1, longest[3] - longest[1]) / (longest[2] - longest[0])
        # Clocks are those of multiprocessors, and nanoseconds are coarse: one reading of both for all that it ran.
        base: dict[int, tuple[int, int]] = {}
        for number in ran:
            clock, nanoseconds, *_, sm = tracks[number, [0, 1, 5]].tolist()
            if sm not in base or clock < base[sm][0]:
                base[sm] = (clock, nanoseconds)
        origin = min(nanoseconds for _, nanoseconds in base.values())

        def at(sm: int, clock: int) -> int:
            return round(base[sm][1] - origin + (clock - base[sm][0]) * cycle)

        roles = []
        for number in ran:
            first, _, last, _, count, sm, *_ = tracks[number].tolist()
            pairs = tracks[number, HEADER : HEADER + 2 * min(count, self.most)].reshape(-1, 2).tolist()
            waits = tuple(
                Waited(self.labels[word % LABELS], at(sm, begin), at(sm, begin + word // LABELS))
                for begin, word in pairs
            )
            block, role = divmod(number, len(self.roles))
            lost = max(0, count - self.most)
            roles.append(Role(self.roles[role], block, sm, at(sm, first), at(sm, last), waits, lost))
        return Profile(name, tuple(roles))


@dataclass(frozen=True)
class Waited:
    """A wait of a role: for what, and from when to when, in nanoseconds."""

    label: str
    start: int
    stop: int


@dataclass(frozen=True)
class Role:
    """What a role did in a block.

    Attributes
    ----------
    name : str
        The role: the producer, a consumer warpgroup, the storing warp; or a warp.
    block : int
        The block's number in the order of launching.
    processor : int
        The multiprocessor that ran it.
    start, stop : int
        When it began and ended, in nanoseconds.
    waits : tuple of Waited
        When it waited, in order.
    lost : int
        How many more waits there were, for which there was no room; they count as work.
    """

    name: str
    block: int
    processor: int
    start: int
    stop: int
    waits: tuple[Waited, ...]
    lost: int = 0


@dataclass(frozen=True)
class Profile:
    """Where a kernel waited in one run, of its first blocks.

    Attributes
    ----------
    name : str
        The program.
    roles : tuple of Role
        What each role did in each block.
    """

    name: str
    roles: tuple[Role, ...]

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return preformatted(self.text())

    def text(self) -> str:
        """A table: of each role how often and how long it waited for what, in all blocks, and the share of its time."""
        blocks = {role.block: role.processor for role in self.roles}
        spans = [role.stop - role.start for role in self.roles]
        sms = len(set(blocks.values()))
        head = f"{self.name}: {len(blocks)} blocks on {sms} multiprocessors, {np.mean(spans) / 1e3:.2f} us each"
        rows = [("role", "waits for", "times", "mean us", "share")]
        for name in dict.fromkeys(role.name for role in self.roles):
            own = [role for role in self.roles if role.name == name]
            whole, found = sum(role.stop - role.start for role in own), defaultdict[str, list[int]](list)
            for wait in (wait for role in own for wait in role.waits):
                found[wait.label].append(wait.stop - wait.start)
            waited = 0
            for label, times in sorted(found.items(), key=lambda item: -sum(item[1])):
                waited += sum(times)
                rows.append((name, label, f"{len(times)}", f"{np.mean(times) / 1e3:.3f}", _share(sum(times), whole)))
            rows.append((name, "nothing", "", "", _share(whole - waited, whole)))
        lost = sum(role.lost for role in self.roles)
        end = [f"{lost} more waits had no room, and count as nothing waited for"] if lost else []
        return "\n".join([head, *_aligned(rows), *end])

    def timeline(self) -> Timeline:
        """The same as tracks, one for each role of each block, whose events are waits and the work between them."""
        tracks, events = [], []
        for number, role in enumerate(self.roles):
            tracks.append(f"block {role.block} (SM {role.processor}): {role.name}")
            now = role.start
            for wait in role.waits:
                start = max(wait.start, now)
                if start > now:
                    events.append(Event(number, role.name, WORK, now, start))
                now = max(wait.stop, start + 1)
                events.append(Event(number, wait.label, WAITING, start, now))
            if role.stop > now:
                events.append(Event(number, role.name, WORK, now, role.stop))
        return Timeline(self.name, tuple(tracks), tuple(events), ())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as JSON, which https://ui.perfetto.dev and chrome://tracing open.

        Raises
        ------
        InputError
            If the file cannot be written.
        """
        self.timeline().save(path)


def _share(part: float, whole: float) -> str:
    return f"{part / max(whole, 1):.0%}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for name, label, *numbers in rows:
        cells = [name.ljust(widths[0]), label.ljust(widths[1])]
        cells += [number.rjust(width) for number, width in zip(numbers, widths[2:])]
        lines.append("  ".join(cells).rstrip())
    return lines
