"""Looking after databases: what is in them, merging, pruning, validating. `tvm-axe db` is this on the command line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import TILE
from tvm_axe.errors import TuneError
from tvm_axe.machines.target import resolve_target
from tvm_axe.records.database import (
    FAILED_SECONDS,
    WORKLOADS,
    Record,
    add_records,
    choose_records,
    find_databases,
    read_records,
    read_workloads,
    scan_records,
)
from tvm_axe.records.folders import folder_for, largest_block, target_name, workload_name, workload_suffix
from tvm_axe.records.provenance import PROVENANCE, add_runs, read_runs

__all__ = ["Tuned", "find", "merge", "prune", "tuned", "validate"]


@dataclass(frozen=True)
class Tuned:
    """What a database holds of one workload for one target.

    Attributes
    ----------
    folder
        The database.
    workload
        Its line: hash and encoded function.
    target
        The resolved target.
    records
        All of them, in the order of measuring; the one without a trace is the function as it was.
    runs
        The tuning runs that made them, as far as is known.
    """

    folder: Path
    workload: tuple[str, str]
    target: Target
    records: list[Record]
    runs: list[dict[str, Any]]

    @cached_property
    def mod(self) -> IRModule:
        """The workload, a module with the function ``main``."""
        return ms.database.Workload.from_json(list(self.workload)).mod

    @cached_property
    def name(self) -> str:
        """The name of its folder, or of the folder that it would have, where several share one."""
        if self.folder.name.endswith(workload_suffix(self.workload[0])):
            return self.folder.name
        return workload_name(self.function, self.mod)

    @property
    def function(self) -> str:
        """What the function was called when it was tuned last; its main block's name where nothing says so."""
        said = [str(name) for run in self.runs if (name := run["tasks"][self.workload[0]].get("name"))]
        rest = workload_name("f", self.mod).removeprefix("f")
        if self.folder.name.endswith(rest):
            said.insert(0, self.folder.name.removesuffix(rest))
        return said[-1] if said else largest_block(self.mod)[0]

    @property
    def candidates(self) -> list[Record]:
        """The records of candidates, the fastest first and the failed ones last."""
        return sorted((record for record in self.records if record.trace[0]), key=lambda record: record.seconds)

    @property
    def untuned(self) -> Record | None:
        """The record of the function as it was."""
        return next((record for record in self.records if not record.trace[0]), None)

    @property
    def best(self) -> Record | None:
        """The fastest record, the untuned one included; None if all failed."""
        best = min(self.records, key=lambda record: record.seconds)
        return best if best.seconds < FAILED_SECONDS else None

    def schedule(self) -> tuple[Record, s_tir.Schedule] | None:
        """The fastest record that still applies, and its schedule; warnings name those that don't and are faster."""
        for record in sorted(self.records, key=lambda record: record.seconds):
            if record.seconds >= FAILED_SECONDS:
                break
            try:
                return record, record.schedule(self.mod)
            except TuneError as error:
                warnings.warn(f"skipped {error}", stacklevel=2)
        return None

    @property
    def date(self) -> str | None:
        """When it was tuned last (UTC, ISO 8601), if that is known."""
        return max((str(run["date"]) for run in self.runs if "date" in run), default=None)


def tuned(root: Path, target: str | None = None) -> list[Tuned]:
    """What the databases at or below a folder hold, by target and name.

    Broken lines are named in warnings and skipped.

    Parameters
    ----------
    target
        Only for this one: a folder's name such as ``llvm-znver5-2cores``, or anything that `resolve_target` takes.

    Raises
    ------
    TuneError
        If the folder doesn't exist, or `target` is no target.
    """
    _check_folder(root)
    found = [entry for folder in find_databases(root) for entry in _in_folder(folder)]
    found.sort(key=lambda entry: (target_name(entry.target), entry.name, str(entry.folder)))
    if target is None:
        return found
    names = {target_name(entry.target) for entry in found}
    wanted = target if target in names else target_name(resolve_target(target))
    return [entry for entry in found if target_name(entry.target) == wanted]


def find(root: Path, name: str, target: str | None = None) -> list[Tuned]:
    """The entries of the one workload that `name` is, or is a part of the name of.

    Raises
    ------
    TuneError
        If there is none, or several; as `tuned`.
    """
    entries = tuned(root, target)
    names = sorted({entry.name for entry in entries})
    matching = [name] if name in names else [other for other in names if name in other]
    if len(matching) != 1:
        if matching:
            raise TuneError(f"{name}: is a part of several workloads' names: {', '.join(matching)}; say more of one")
        where = f"{root}{f' for {target}' if target else ''}"
        raise TuneError(f"{name}: no workload of {where} is called so; there are {', '.join(names) or 'none'}")
    return [entry for entry in entries if entry.name == matching[0]]


def merge(sources: Sequence[Path], destination: Path, flat: bool = False, target: str | None = None) -> dict[str, int]:
    """Copy all records into one place, without those that are there; what is there stays.

    Parameters
    ----------
    sources
        Folders with databases at or below them, in any layout.
    destination
        A folder of ``<target>/<workload>/`` databases; made if needed.
    flat
        Make `destination` itself one database of all workloads, as upstream's `MetaScheduleApplyDatabase` wants it.
        Upstream looks at no target, so all must be for one; it knows no tile kernels, so schedules that chose one are
        left out; and it opens no database with a trace that doesn't apply, so those are too, each with a warning.
    target
        As for `tuned`.

    Returns
    -------
    dict
        ``records`` that were new, ``known`` ones that were not, ``left_out``.

    Raises
    ------
    TuneError
        If a source doesn't exist or is the destination, there is nothing in them, or the targets differ.
    """
    for source in sources:
        if source.resolve() == destination.resolve():
            raise TuneError(f"merge: {source} is both a source and the destination")
    entries = [
        entry
        for source in sources
        for entry in tuned(source, target)
        if not entry.folder.resolve().is_relative_to(destination.resolve())
    ]
    if not entries:
        raise TuneError(f"merge: there are no records in {', '.join(map(str, sources))}")
    targets = sorted({target_name(entry.target) for entry in entries})
    if flat and destination.is_dir():
        targets = sorted({*targets, *(target_name(entry.target) for entry in _in_folder(destination))})
    if flat and len(targets) > 1:
        raise TuneError(f"merge: a flat database is for one target, not {', '.join(targets)}; --target chooses one")
    count = {"records": 0, "known": 0, "left_out": 0}
    for entry in entries:
        records = [record for record in entry.records if not flat or _is_for_upstream(entry, record)]
        count["left_out"] += len(entry.records) - len(records)
        folder = destination if flat else folder_for(destination, entry.target, entry.function, entry.mod)
        new = add_records(folder, entry.workload, [record.entry for record in records])
        count["records"] += new
        count["known"] += len(records) - new
        if entry.runs:
            digest = entry.workload[0]
            add_runs(folder, [{**run, "tasks": {digest: run["tasks"][digest]}} for run in entry.runs])
    return count


def prune(root: Path, keep: int, target: str | None = None) -> tuple[int, int]:
    """Drop all records but the untuned function's and the best `keep` that still apply, of each workload and target.

    Parameters
    ----------
    root
        A folder with databases at or below it.
    keep
        Schedules to keep of each.
    target
        As for `tuned`; records for others stay.

    Returns
    -------
    kept, dropped : int
        Records of the folders that were looked at.
    """
    if keep < 1:
        raise TuneError(f"keep: at least one schedule of each workload must stay, not {keep}")
    entries = tuned(root, target)
    targets = {target_name(entry.target) for entry in entries}
    counts = [0, 0]
    for folder in sorted({entry.folder for entry in entries}):

        def choose(records: list[Record], folder: Path = folder) -> list[Record]:
            wanted = [entry for entry in _entries(folder, records) if target_name(entry.target) in targets]
            drop = {record.place for entry in wanted for record in _surplus(entry, keep)}
            return [record for record in records if record.place not in drop]

        for n, count in enumerate(choose_records(folder, choose)):
            counts[n] += count
    return counts[0], counts[1]


def validate(root: Path) -> tuple[int, list[str]]:
    """Read every line of every database, and apply every trace.

    Returns
    -------
    good : int
        Records that are in order.
    problems : list of str
        Each begins with the file, and the line where there is one.

    Raises
    ------
    TuneError
        If the folder doesn't exist.
    """
    _check_folder(root)
    good, problems = 0, []
    for folder in find_databases(root):
        workloads = read_workloads(folder)
        problems += [_wrong_workload(f"{folder / WORKLOADS}:{n}", line) for n, line in enumerate(workloads, 1)]
        records, broken = scan_records(folder, workloads)
        problems += broken
        if read_runs(folder) is None:
            problems.append(f"{folder / PROVENANCE}: cannot be read")
        for entry in _entries(folder, records):
            wrong = [problem for record in entry.records if (problem := _wrong_record(entry, record))]
            good += len(entry.records) - len(wrong)
            problems += wrong
    return good, [problem for problem in problems if problem]


def _wrong_workload(place: str, line: tuple[str, str] | None) -> str:
    if line is None:
        return f"{place}: a broken workload"
    digest = _tvm.workload_hash(ms.database.Workload.from_json(list(line)).mod)
    return "" if digest == line[0] else f"{place}: its hash is given as {line[0]}, but the function's is {digest}"


def _wrong_record(entry: Tuned, record: Record) -> str:
    own_folder = entry.folder.name.endswith(workload_suffix(entry.workload[0]))
    if own_folder and entry.folder.parent.name != target_name(entry.target):
        return f"{record.place}: is for {target_name(entry.target)}, and its folder for {entry.folder.parent.name}"
    try:
        record.load(ms.database.Workload(entry.mod))
    except TuneError as error:
        return str(error)
    return ""


def _check_folder(root: Path) -> None:
    if not root.is_dir():
        raise TuneError(f"{root}: there is no such folder; `tvm-axe tune` makes it, or name another")


def _in_folder(folder: Path) -> list[Tuned]:
    return _entries(folder, read_records(folder, read_workloads(folder)))


def _entries(folder: Path, records: list[Record]) -> list[Tuned]:
    """The records by workload and target."""
    workloads, runs = read_workloads(folder), read_runs(folder) or []
    groups: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.workload, json.dumps(record.target, sort_keys=True)), []).append(record)
    entries = []
    for (number, target), members in groups.items():
        workload = workloads[number]
        assert workload is not None  # or its records would not have been read
        own = [run for run in runs if run["target"] == json.loads(target) and workload[0] in run["tasks"]]
        entries.append(Tuned(folder, workload, Target(json.loads(target)), members, own))
    return entries


def _surplus(entry: Tuned, keep: int) -> list[Record]:
    """The candidates but for the fastest ones that still apply."""
    surplus = []
    for record in entry.candidates:
        if keep > 0 and record.seconds < FAILED_SECONDS and not _wrong_record(entry, record):
            keep -= 1
        else:
            surplus.append(record)
    return surplus


def _is_for_upstream(entry: Tuned, record: Record) -> bool:
    """Whether it opens databases with this record, and compiles what it schedules as it was measured."""
    problem = _wrong_record(entry, record)
    if problem:
        warnings.warn(f"left out {problem}", stacklevel=3)
        return False
    instructions = record.trace[0]
    return not any(kind == "Annotate" and attributes == [TILE] for kind, _, attributes, _ in instructions)
