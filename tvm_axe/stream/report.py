"""What a run gives: results, counters, symbols' values, timelines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import sympy

from tvm_axe.errors import InputError
from tvm_axe.notebook import preformatted, with_picture


class Activity(NamedTuple):
    """The work of a unit in a run.

    Attributes
    ----------
    name, kind : str
        The operator's name and kind.
    busy : int
        Cycles that it worked.
    memory : int
        Cycles that it waited for off-chip memory.
    blocked : int
        Cycles that it waited for room in a channel.
    starved : int
        Cycles that it waited for something to come, until it had ended.
    flops, read, written : int
        FLOPs, bytes loaded and bytes stored off-chip.
    tokens : int
        Tokens that it sent.
    compute : int
        FLOPs that it could have done a cycle; 0 of a unit that doesn't compute.
    spans : tuple[tuple[int, int], ...]
        The intervals in which it worked or waited for off-chip memory; none unless the run was traced.
    """

    name: str
    kind: str
    busy: int
    memory: int
    blocked: int
    starved: int
    flops: int
    read: int
    written: int
    tokens: int
    compute: int
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Report:
    """The results and counters of a run of a program.

    Attributes
    ----------
    program : str
        The program's name.
    outputs : Mapping
        The nested lists of each output's values.
    tensors : Mapping
        The array of each tensor that was stored to; none in runs without values.
    cycles : int
        The cycle in which the last unit had ended; 0 without an accelerator.
    units : tuple[Activity, ...]
        One an operator, and one a broadcast.
    bindings : Mapping
        The values of the program's symbols: how long dynamic dims were, ragged ones in all; of a tile's rows, the mean.
    peak_on_chip : int
        The most bytes that buffers took up at a time.
    off_chip_busy : float
        Cycles that off-chip memory served requests.
    occupancy : tuple[tuple[int, int], ...]
        The cycles in which the buffers' bytes changed, each with the bytes from then on.
    """

    program: str
    outputs: Mapping[str, list]
    tensors: Mapping[str, np.ndarray]
    cycles: int
    units: tuple[Activity, ...]
    bindings: Mapping[sympy.Symbol, Any]
    peak_on_chip: int
    off_chip_busy: float
    occupancy: tuple[tuple[int, int], ...]

    @property
    def read(self) -> int:
        """Bytes loaded from off-chip memory."""
        return sum(unit.read for unit in self.units)

    @property
    def written(self) -> int:
        """Bytes stored to off-chip memory."""
        return sum(unit.written for unit in self.units)

    @property
    def traffic(self) -> int:
        """Bytes loaded from and stored to off-chip memory."""
        return self.read + self.written

    @property
    def flops(self) -> int:
        """FLOPs of all the units."""
        return sum(unit.flops for unit in self.units)

    @property
    def tokens(self) -> int:
        """Tokens that units sent: the events of the run."""
        return sum(unit.tokens for unit in self.units)

    @property
    def compute(self) -> int:
        """FLOPs a cycle of all the units that compute."""
        return sum(unit.compute for unit in self.units)

    @property
    def utilization(self) -> float:
        """The part of the FLOPs that the units could have done in the cycles of the run that they did."""
        possible = self.compute * self.cycles
        return self.flops / possible if possible else 0.0

    def unit(self, name: str) -> Activity:
        """Return the unit of that name.

        Raises
        ------
        InputError
            If there is none.
        """
        for unit in self.units:
            if unit.name == name:
                return unit
        raise InputError(f"the run of {self.program!r} has no unit {name!r}")

    def trace_events(self) -> dict[str, Any]:
        """Return the run in the Trace Event Format, a microsecond a cycle: a track a unit, and on-chip bytes."""
        records: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": self.program}}
        ]
        for number, unit in enumerate(self.units, start=1):
            for name, value in (("thread_name", {"name": unit.name}), ("thread_sort_index", {"sort_index": number})):
                records.append({"ph": "M", "name": name, "pid": 1, "tid": number, "args": value})
        timed: list[dict[str, Any]] = [
            {"ph": "X", "name": unit.kind, "cat": unit.kind, "pid": 1, "tid": number, "ts": start, "dur": stop - start}
            for number, unit in enumerate(self.units, start=1)
            for start, stop in unit.spans
        ]
        timed += [
            {"ph": "C", "name": "on-chip bytes", "pid": 1, "tid": 0, "ts": time, "args": {"bytes": used}}
            for time, used in self.occupancy
        ]
        return {"traceEvents": records + sorted(timed, key=lambda record: record["ts"]), "displayTimeUnit": "ns"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `trace_events` as JSON, which https://ui.perfetto.dev and chrome://tracing open.

        Raises
        ------
        InputError
            If the run wasn't traced, or the file cannot be written.
        """
        if not any(unit.spans for unit in self.units):
            raise InputError("the run kept no times; run the program on an accelerator with trace=True")
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(self.trace_events(), file)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error

    def __str__(self) -> str:
        lines = [
            f"{self.program}: {self.cycles:,} cycles, {self.flops:,} FLOPs ({self.utilization:.2%} of {self.compute:,} "
            f"a cycle), {self.read:,} B loaded, {self.written:,} B stored, at most {self.peak_on_chip:,} B on chip",
            f"{'unit':<24}{'busy':>12}{'memory':>12}{'blocked':>12}{'starved':>12}",
        ]
        lines += [f"{u.name:<24}{u.busy:>12,}{u.memory:>12,}{u.blocked:>12,}{u.starved:>12,}" for u in self.units]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        if not any(unit.spans for unit in self.units):
            return preformatted(str(self))
        from tvm_axe.stream.draw import timeline_svg

        return with_picture(timeline_svg(self), str(self))
