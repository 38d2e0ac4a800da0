"""The last word on a task: its fastest candidates and the default, timed again in turns.

The least of many times is a lucky one as often as a good one, and what is compared was measured minutes apart. So
before a task's best is taken for that, the fastest few run again, one after the other and all of that several times
over, beside what would be used without the search: the function as it is, and the search's first candidate, which has
a kernel's defaults. What is recorded first has the right of way (`tvm_axe.meta.search.policy`), so that within the
noise the default stays.

MetaSchedule's databases know one opinion only, that the least time is the best. What the turns said is therefore
written into the records themselves: each finalist's time is replaced by the median of its turns, and no record may say
less than that of the one chosen. `tvm_axe.records.apply_best` and upstream's ``get_top_k`` then choose the same.
All of it is one replacement of the file, so that a job that is killed before has lost the finals and nothing else; the
next one sees by the log of trials that the best was never confirmed, and does that first.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from tvm.ir import IRModule

from tvm_axe.meta.measure.protocol import TimesInTurns
from tvm_axe.meta.search.policy import KERNELS, winner
from tvm_axe.meta.task import Task
from tvm_axe.records.database import FAILED_SECONDS, Record

__all__ = ["FINALISTS", "TURNS", "Finals"]

FINALISTS = 4
"""Candidates that are timed again at once, beside the default and the one that won before."""

TURNS = 7

_BATCHES = 3  # of finalists in a job; after that what is left is only kept from looking better
_CLOSE = 2.0  # times the best: noise makes no default that is slower than that the best


@dataclass
class Finals:
    """The finals of one task, from its records on disk.

    Invariants: the order of `records` is the right of way, and never changes; `confirmed` are some of their keys;
    between turns no confirmed record says less than the chosen one, and after `run` no record at all does. Nothing on
    disk changes before the last turn.

    Attributes
    ----------
    records
        Those that have a time, by key, in the order of measuring; the function as it is comes first if it has one.
    confirmed
        Keys of what was timed in turns, by any job.
    seconds
        Their times by key, as far as is known now.
    chosen
        Key of what won this job's last turns.
    """

    task: Task
    records: dict[str, tuple[Record, IRModule]] = field(init=False)
    confirmed: set[str] = field(init=False)
    seconds: dict[str, float] = field(init=False)
    chosen: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        found = {key: pair for key, pair in self.task.records().items() if pair[0].seconds < FAILED_SECONDS}
        self._candidates = [key for key, (record, _) in found.items() if record.trace[0]]
        self._defaults = [*(key for key in found if key not in self._candidates), *self._candidates[:1]]
        self.records = {key: found[key] for key in dict.fromkeys([*self._defaults, *self._candidates])}
        self.confirmed = self.task.confirmed() & self.records.keys()
        self._recorded = {key: record.seconds for key, (record, _) in self.records.items()}
        self.seconds = {**self._recorded}

    @property
    def due(self) -> bool:
        """Whether what looks best was never timed beside anything else, and there is something to time it beside."""
        return bool(self._rivals()) and len(self._group()) > 1

    def run(self, measurer: TimesInTurns) -> None:
        """Time finalists until the best is one of them, and put what comes of it on disk.

        Raises
        ------
        TuneError
            If they can't be timed; the records are as they were then.
        """
        for _ in range(_BATCHES):
            if not self.due:
                break
            group = self._group()
            mods = [record.schedule(mod).mod for record, mod in (self.records[key] for key in group)]
            times = measurer.in_turns(mods, TURNS)
            self.chosen = group[winner(times, KERNELS)]
            self.confirmed |= {*group}
            self.seconds |= {key: statistics.median(turns) for key, turns in zip(group, times)}
            self._lift(self.confirmed)  # what earlier turns confirmed lost to one of these
        if self.chosen is not None:
            self._settle()
            self.task.revise(self.seconds, dict.fromkeys(self.confirmed, TURNS))

    def _rivals(self) -> list[str]:
        """The fastest that look faster than what won last, and never were confirmed.

        Turns heat a GPU, for example, so that all times are longer in them: what won is compared as it was recorded.
        """
        won = min(self._known(), key=self.seconds.__getitem__, default=None)
        bar = math.inf if won is None else self._recorded[won]
        rivals = [key for key in self._candidates if key not in self.confirmed and self.seconds[key] < bar]
        return sorted(rivals, key=self.seconds.__getitem__)[:FINALISTS]

    def _group(self) -> list[str]:
        """The keys of those that are timed together, in the order of their right of way."""
        least = min((self.seconds[key] for key in self._candidates), default=math.inf)
        won = sorted(self._known(), key=self.seconds.__getitem__)[:1]
        group = {*won, *self._rivals(), *(key for key in self._defaults if self.seconds[key] < _CLOSE * least)}
        return [key for key in self.records if key in group]

    def _known(self) -> list[str]:
        """What was timed in turns; the fastest of it is what won last."""
        return [key for key in self.records if key in self.confirmed]

    def _lift(self, keys: set[str]) -> None:
        """Let none of these but the chosen one say as little as it does."""
        assert self.chosen is not None
        least = math.nextafter(self.seconds[self.chosen], math.inf)
        for key in keys - {self.chosen}:
            self.seconds[key] = max(self.seconds[key], least)

    def _settle(self) -> None:
        """Have the chosen one be the best of all.

        What never was confirmed keeps its distance from it, where its own time is longer now. What still looked better
        than it before was measured on a faster machine yet.
        """
        assert self.chosen is not None
        others = self.records.keys() - self.confirmed
        least = min([self._recorded[self.chosen], *(self.seconds[key] for key in others)])
        factor = self.seconds[self.chosen] / least
        if factor >= 1:
            self.seconds |= {key: factor * self.seconds[key] for key in others}
            self._lift({*others})
