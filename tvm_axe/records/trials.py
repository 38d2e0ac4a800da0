"""``trials.jsonl``: when each record of a database was measured, and what is said of it beyond its time.

MetaSchedule's records have no room for either. A line of this file is an object with

    record    the key of the record in the database beside it (`key_of`)
    at        the time of day, UTC
    elapsed   seconds of tuning of this workload until then, over all calls; null if that is not known
    seconds   the candidate's time; null if it failed
    failure   why it failed, in words; null if it didn't
    build     seconds that compiling it took, and
    run       that running it until its time was known took; null where they are not known
    machine   the name of the machine that measured it; null where that is not known
    turns     in how many turns with others its time was taken again (the finals of a job); null if that wasn't done

A line is written right after its record, so that a process that is killed between the two leaves a record without a
line; the next call adds what is missing. A record whose time is revised gets another key: its line under that is there
before it, and the one under the old key until after it, so that being killed then leaves lines without a record, which
mean nothing. The file is read by key, and its order is the order of the measurements.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tvm_axe.records.database import FAILED_SECONDS
from tvm_axe.records.files import append_line, ends_well, locked, replace_file

__all__ = ["TRIALS", "Trial", "add_missing", "key_of", "read_trials", "revise_trials", "write_trial"]

TRIALS = "trials.jsonl"


@dataclass(frozen=True)
class Trial:
    """One line; the module says what its fields are."""

    record: str
    at: str
    elapsed: float | None
    seconds: float | None
    failure: str | None
    build: float | None = None
    run: float | None = None
    turns: int | None = None
    machine: str | None = None


def key_of(entry: Any) -> str:
    """What a record is known by: a hash of its JSON, which is ``[trace, run_secs, target, args]``."""
    return hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()[:16]


def now() -> str:
    """The time of day, to a millisecond."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")


def read_trials(folder: Path) -> list[Trial]:
    """The lines of a folder in their order, the last of those on the same record; broken ones are left out."""
    trials: dict[str, Trial] = {}
    try:
        lines = (folder / TRIALS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            trial = Trial(**json.loads(line))
        except (ValueError, TypeError):
            continue
        trials[trial.record] = trial
    return list(trials.values())


def write_trial(folder: Path, trial: Trial) -> None:
    """Append a line, on disk when this returns.

    Raises
    ------
    TuneError
        If it cannot be written.
    """
    with locked(folder):
        _append(folder, [trial])


def add_missing(folder: Path, records: Iterable[tuple[str, float]]) -> None:
    """Add a line for each record, of which key and seconds are given, that has none.

    Raises
    ------
    TuneError
        If it cannot be written.
    """
    with locked(folder):
        there = {trial.record for trial in read_trials(folder)}
        new = {
            key: Trial(key, now(), None, *((seconds, None) if seconds < FAILED_SECONDS else (None, "not recorded")))
            for key, seconds in records
            if key not in there
        }
        _append(folder, new.values())


def revise_trials(folder: Path, revised: Mapping[str, Trial], keep: bool) -> None:
    """Put lines in the place of others, given by the keys of their records; behind them where these are to be kept.

    Raises
    ------
    TuneError
        If it cannot be written; the file is as it was then.
    """
    with locked(folder):
        found: dict[str, Trial] = {}
        for trial in read_trials(folder):
            if keep or trial.record not in revised:
                found[trial.record] = trial
            if trial.record in revised:
                found[revised[trial.record].record] = revised[trial.record]
        replace_file(folder / TRIALS, "".join(f"{json.dumps(asdict(trial))}\n" for trial in found.values()))


def _append(folder: Path, trials: Iterable[Trial]) -> None:
    lines = [json.dumps(asdict(trial)) for trial in trials]
    if lines:
        # After a line that a killed process left without its end, a new one would be broken too.
        start = "" if ends_well(folder / TRIALS) else "\n"
        append_line(folder / TRIALS, start + "\n".join(lines))
