"""What stages were predicted to take beside what they took: how far to trust a search that ranks by the prediction."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm_axe.collective import Timeline, registry
from tvm_axe.lower.cost import expected
from tvm_axe.lower.lowered import Lowered
from tvm_axe.timeline import ARRIVAL, BESIDE, WAITING

__all__ = ["Measured", "measured_stages", "measured_whole"]


@dataclass(frozen=True)
class Measured:
    """What the last measurements on one engine say, in seconds.

    Attributes
    ----------
    engine : str
        The engine's name.
    stages : tuple of float or None
        Of each stage, what the device took that took longest; None where nothing was traced.
    waiting : float or None
        What the device waited that waited longest.
    whole : float or None
        The median of the runs that `time` made, or else the run that `trace` recorded.
    timed : bool
        Whether `whole` is of `time`.
    """

    engine: str
    stages: tuple[float | None, ...]
    waiting: float | None = None
    whole: float | None = None
    timed: bool = False

    def lines(self, lowered: Lowered) -> list[str]:
        """Return a table of the stages, the waiting and the whole: milliseconds predicted, measured, their ratio."""
        predicted = expected(lowered, registry.find(self.engine).rates)
        rows: list[tuple[str, float | None, float | None]] = [
            (stage.name, own, found) for stage, own, found in zip(lowered.stages, predicted, self.stages, strict=True)
        ]
        rows += [("waiting", None, self.waiting), ("in all", sum(predicted), self.whole)]
        width = max(len(name) for name, _, _ in rows)
        lines = [
            f"predicted and measured on {self.engine} (milliseconds, of the slowest device)",
            f"  {'':<{width}}  {'predicted':>12}  {'measured':>12}  {'ratio':>8}",
        ]
        for name, own, found in rows:
            ratio = "-" if own is None or found is None or own == 0 else f"{found / own:.2f}"
            lines.append(f"  {name:<{width}}  {_milliseconds(own):>12}  {_milliseconds(found):>12}  {ratio:>8}")
        return lines


def measured_whole(before: Measured | None, lowered: Lowered, engine: str, seconds: Sequence[float]) -> Measured:
    """Return what is known once runs were timed."""
    return replace(_of(before, lowered, engine), whole=statistics.median(seconds), timed=True)


def measured_stages(before: Measured | None, lowered: Lowered, engine: str, timeline: Timeline) -> Measured:
    """Return what is known once a run was traced."""
    taken: dict[tuple[str, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    waited: dict[int, int] = defaultdict(int)
    for event in timeline.events:
        if event.kind in (WAITING, ARRIVAL, BESIDE):
            waited[event.worker] += event.stop - event.start
        else:
            taken[event.name, event.kind][event.worker] += event.stop - event.start
    found = [taken.get((stage.name, stage.kind)) for stage in lowered.stages]
    known = _of(before, lowered, engine)
    return replace(
        known,
        stages=tuple(None if times is None else max(times.values()) / 1e9 for times in found),
        waiting=max(waited.values(), default=0) / 1e9,
        whole=known.whole if known.timed else timeline.duration / 1e9,
    )


def _of(before: Measured | None, lowered: Lowered, engine: str) -> Measured:
    """Return what was measured before, if that was on the same engine."""
    return before if before is not None and before.engine == engine else Measured(engine, (None,) * len(lowered.stages))


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4f}"
