"""How well the cost model orders candidates that it was not trained on, with our features and without.

Two questions, each asked of every workload that has enough records for it:

- *across*: a model that has learnt from the target's other workloads alone, as a new workload meets it;
- *within*: a model that has learnt from half of the workload's candidates alone, asked about the other half.

Each is asked several times: a seed draws four fifths of the other workloads' candidates, or the half.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.meta.model.features import PER_STORE, AxeFeatures, context_for
from tvm_axe.meta.model.model import PackSum, Samples
from tvm_axe.meta.model.ranking import METRICS, grade
from tvm_axe.records.database import FAILED_SECONDS, Record, find_databases, read_records, read_workloads
from tvm_axe.records.folders import target_name

__all__ = ["ARMS", "Evaluation", "Score", "evaluate", "read_samples"]

ARMS = ("per-store", "with ours")
"""The features that are compared: upstream's alone, and together with ours."""

LEAST = 20
"""Candidates that a workload must have, at least half of them good, to be asked about: the top 5 of a half say little
where there are fewer."""

_SHARE = 0.8


@dataclass(frozen=True)
class Score:
    """What one question came to for one workload and one set of features.

    Attributes
    ----------
    question
        ``across`` or ``within``.
    target, workload
        Their names.
    candidates
        How many were ordered.
    arm
        Of `ARMS`.
    values
        (seeds, metrics): what `tvm_axe.meta.model.ranking.METRICS` says of each seed's model.
    """

    question: str
    target: str
    workload: str
    candidates: int
    arm: str
    values: np.ndarray


@dataclass(frozen=True)
class Evaluation:
    """All that was asked, and why the rest was not: `left_out` has a reason by target and workload."""

    scores: list[Score] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def mean(self, question: str, target: str, arm: str) -> tuple[np.ndarray, np.ndarray]:
        """Each metric's mean over workloads, and the standard deviation of that over the seeds."""
        values = np.array([s.values for s in self._of(question, target, arm)]).mean(axis=0)
        return values.mean(axis=0), values.std(axis=0)

    def wins(self, question: str, target: str) -> tuple[int, int]:
        """For how many workloads our features raise Spearman's rho in the mean over seeds, and of how many."""
        without, ours = (self._of(question, target, arm) for arm in ARMS)
        return sum(bool(b.values[:, 0].mean() > a.values[:, 0].mean()) for a, b in zip(without, ours)), len(ours)

    def questions(self) -> list[tuple[str, str]]:
        """The (question, target) pairs that have an answer."""
        return list(dict.fromkeys((s.question, s.target) for s in self.scores))

    def text(self) -> str:
        """A table, and what was left out."""
        lines = []
        for question, target in self.questions():
            won, count = self.wins(question, target)
            lines.append(f"{question}, {target}: {count} workload(s); with ours rho is higher for {won}")
            lines.append(" " * 12 + "".join(f"{name:>16}" for name in METRICS))
            for arm in ARMS:
                mean, spread = self.mean(question, target, arm)
                cells = "".join(f"{f'{m:.3f} ± {s:.3f}':>16}" for m, s in zip(mean, spread))
                lines.append(f"  {arm:<10}{cells}")
        if not lines:
            lines.append("nothing can be evaluated")
        return "\n".join([*lines, *(f"left out: {what}: {why}" for what, why in self.left_out.items())])

    def as_json(self) -> dict[str, Any]:
        """The table, its rows by workload, and what was left out, as plain values."""
        summary = []
        for question, target in self.questions():
            won, count = self.wins(question, target)
            entry: dict[str, Any] = {"question": question, "target": target, "workloads": count, "higher": won}
            for arm in ARMS:
                mean, spread = (dict(zip(METRICS, values.tolist())) for values in self.mean(question, target, arm))
                entry[arm] = {"mean": mean, "spread": spread}
            summary.append(entry)
        workloads = [
            {
                **{name: getattr(s, name) for name in ("question", "target", "workload", "candidates", "arm")},
                "mean": dict(zip(METRICS, s.values.mean(axis=0).tolist())),
            }
            for s in self.scores
        ]
        return {"summary": summary, "workloads": workloads, "left_out": self.left_out}

    def _of(self, question: str, target: str, arm: str) -> list[Score]:
        return [s for s in self.scores if (s.question, s.target, s.arm) == (question, target, arm)]


def evaluate(work_dir: Path, seeds: int = 3) -> Evaluation:
    """Ask both questions about all databases at or below a folder.

    Parameters
    ----------
    work_dir
        A folder of databases.
    seeds
        How often each question is asked.
    """
    found = Evaluation()
    for target, workloads in read_samples(work_dir).items():
        enough = {}
        for name, samples in workloads.items():
            good = int(np.isfinite(samples.seconds).sum())
            if len(samples.rows) >= LEAST and 2 * good >= len(samples.rows):
                enough[name] = samples
            else:
                found.left_out[f"{target}, {name}"] = (
                    f"{len(samples.rows)} candidate(s), {good} of them good; at least {LEAST}, and half of them good, "
                    "are needed"
                )
        if len(enough) == 1:
            found.left_out[f"across, {target}"] = "there is one workload, and no other to learn from"
        for name, samples in enough.items():
            others = [other for key, other in workloads.items() if key != name]
            for arm in ARMS:
                asked = {"within": [_within(samples, arm, seed) for seed in range(seeds)]}
                if len(enough) > 1:
                    asked["across"] = [_across(samples, others, arm, seed) for seed in range(seeds)]
                for question, values in asked.items():
                    count = len(samples.rows) - (len(samples.rows) // 2 if question == "within" else 0)
                    found.scores.append(Score(question, target, name, count, arm, np.array(values)))
    return found


def read_samples(work_dir: Path) -> dict[str, dict[str, Samples]]:
    """The candidates of all databases at or below a folder, with all features, by target and then by workload.

    A record whose trace no longer applies is named in a warning and isn't there; the untuned function isn't, either.
    """
    found: dict[str, dict[str, Samples]] = {}
    names: dict[str, str] = {}
    for folder in find_databases(work_dir):
        workloads = read_workloads(folder)
        groups: dict[tuple[str, int], list[Record]] = {}
        for record in read_records(folder, workloads):
            if record.trace[0]:
                groups.setdefault((json.dumps(record.target, sort_keys=True), record.workload), []).append(record)
        for (config, number), records in groups.items():
            line = workloads[number]
            if line is None:
                continue
            target = Target(json.loads(config))
            # A folder of one workload is called after it; one of many has to do with their hashes.
            name = names.setdefault(line[0], folder.name if len(workloads) == 1 else line[0])
            samples = found.setdefault(target_name(target), {}).setdefault(name, Samples())
            mod = ms.database.Workload.from_json(list(line)).mod
            for rows, seconds in _featured(mod, target, records):
                samples.add(rows, seconds)
    return found


def _featured(mod: IRModule, target: Target, records: Sequence[Record]) -> Iterator[tuple[np.ndarray, float]]:
    """The features and seconds of each record that applies."""
    candidates, seconds = [], []
    infos = ms.arg_info.ArgInfo.from_entry_func(mod)
    for record in records:
        sch = s_tir.Schedule(mod)
        try:
            s_tir.schedule.Trace.apply_json_to_schedule(record.trace, sch)
        except _tvm.UPSTREAM_ERRORS as error:  # traces come from files
            reason = _tvm.why_refused(error)
            warnings.warn(f"{record.place}: left out a record that no longer applies: {reason}", stacklevel=2)
            continue
        candidates.append(ms.MeasureCandidate(sch, infos))
        seconds.append(record.seconds if record.seconds < FAILED_SECONDS else np.inf)
    rows = AxeFeatures().extract_from(context_for(mod, target), candidates) if candidates else []
    return zip((table.numpy().astype("float32") for table in rows), seconds)


def _across(samples: Samples, others: Sequence[Samples], arm: str, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    scores: list[np.ndarray] = []
    for other in others:
        drawn = random.permutation(len(other.rows))[: max(1, round(_SHARE * len(other.rows)))]
        rows += [other.rows[n] for n in drawn]
        scores.append(other.scores()[drawn])
    return _graded(rows, np.concatenate(scores), samples.rows, np.array(samples.seconds), arm, seed)


def _within(samples: Samples, arm: str, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    seconds = np.array(samples.seconds)
    while True:  # until both halves have a candidate that didn't fail
        order = random.permutation(len(seconds))
        known, asked = np.split(order, [len(order) // 2])
        if np.isfinite(seconds[known]).any() and np.isfinite(seconds[asked]).any():
            break
    scores = seconds[known].min() / seconds[known]
    return _graded(
        [samples.rows[n] for n in known], scores, [samples.rows[n] for n in asked], seconds[asked], arm, seed
    )


def _graded(
    known: Sequence[np.ndarray],
    scores: np.ndarray,
    asked: Sequence[np.ndarray],
    seconds: np.ndarray,
    arm: str,
    seed: int,
) -> np.ndarray:
    if arm == ARMS[0]:
        known, asked = ([table[:-1, :PER_STORE] for table in tables] for tables in (known, asked))
    model = PackSum(seed)
    model.fit(known, scores)
    return grade(model.predict(asked), seconds)
