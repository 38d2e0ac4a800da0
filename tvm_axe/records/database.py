"""MetaSchedule's JSON databases, kept whole: by several writers at once, through crashes, and around broken lines.

A database is a folder with two files. ``database_workload.json`` has a line ``["hash", "function, encoded"]`` for each
workload; ``database_tuning_record.json`` has a line ``[n, [trace, run_secs, target, args]]`` for each measured
candidate of workload n. Upstream rewrites nothing and locks nothing, reads a database once, and refuses all of it for
one bad line, which is what a process that was killed while writing leaves behind. Here

- a line is appended under the folder's lock, in one write, and is on disk when the call returns;
- a workload is on disk before its first record, and its number never changes;
- a broken line is named with its file and number, and costs itself and nothing else.

What is written stays upstream's format: `tvm.s_tir.meta_schedule.database.JSONDatabase` reads and extends it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import PROGRAM
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import TuneError
from tvm_axe.records.checks import Checks, note_checked
from tvm_axe.records.faults import entry_fault, workload_fault
from tvm_axe.records.files import append_line, ends_well, locked, replace_file
from tvm_axe.records.packing import LAYOUT_FREE, layout_free
from tvm_axe.records.record import FAILED_SECONDS, Record, parse_record

__all__ = [
    "FAILED_SECONDS",
    "RECORDS",
    "WORKLOADS",
    "Database",
    "Record",
    "add_records",
    "choose_records",
    "find_databases",
    "normalize",
    "read_records",
    "read_workloads",
    "scan_records",
    "scan_workloads",
    "with_only_attrs",
]

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
_MOST_FOLDERS = 20_000  # below one that databases are looked for in


class Database:
    """The writer's view of one folder; any number of processes may hold one at once.

    Traces go by the names of blocks, so a workload is recorded once for each way of naming them that records came in.
    Opening takes broken lines out, into files named ``.broken`` beside, so that what is appended stands alone.

    Parameters
    ----------
    folder
        Made if needed; see `tvm_axe.records.folders.folder_for`.

    Attributes
    ----------
    repaired
        What was found broken and moved aside, in words.

    Raises
    ------
    TuneError
        If the folder cannot be written; by `commit_workload` and `commit_tuning_record` too, which then leave the
        files as they were.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with locked(folder):
            self.repaired = tuple(_repair(folder))
        self._numbers: dict[str, int] = {}
        self._seen: tuple[int, ...] | None = None

    def commit_workload(self, mod: IRModule) -> ms.database.Workload:
        """Add the workload unless it is there, and give it as it is there.

        Search on the result's ``mod``, not on the `mod` given: the two are equal up to the names of blocks, loops and
        buffers, and a trace goes by names.
        """
        ours = ms.database.Workload(mod)
        with locked(self.folder):
            same = _same(read_workloads(self.folder), str(ours.as_json()[0]), mod)
            if not same:
                self._number(ours)
                return ours
        return next(iter(same.values()))

    def commit_tuning_record(self, record: ms.database.TuningRecord) -> None:
        """Add a record, and its workload before it if that isn't there."""
        with locked(self.folder):
            entry = _tvm.record_json(record)
            append_line(self.folder / RECORDS, json.dumps([self._number(record.workload), entry]))
            digest, encoded = (str(text) for text in record.workload.as_json())
            note_checked((digest, encoded), [entry])

    def records(self, workload: ms.database.Workload, target: Target) -> list[ms.database.TuningRecord]:
        """The records of a workload for exactly this target, in the order of their commits, by all processes so far.

        A record whose trace doesn't apply to the workload is left out, with a warning that names its line.
        """
        records = []
        for record, its in self.lines(workload, target):
            try:
                records.append(record.load(its))
            except TuneError as error:
                warnings.warn(f"skipped {error}", stacklevel=2)
        return records

    def lines(self, workload: ms.database.Workload, target: Target) -> list[tuple[Record, ms.database.Workload]]:
        """The same records as the file has them, each with the workload by whose names its trace goes."""
        with locked(self.folder):  # or what another process is writing would look like a broken line
            workloads = read_workloads(self.folder)
            found = read_records(self.folder, workloads)
        same = _same(workloads, str(workload.as_json()[0]), workload.mod)
        same = {n: workload if other.mod.script() == workload.mod.script() else other for n, other in same.items()}
        ours = (record for record in found if record.workload in same and record.is_for(target))
        return [(record, same[record.workload]) for record in ours]

    def _number(self, workload: ms.database.Workload) -> int:
        """The workload's line, appended if it is missing; with the lock held."""
        for path in (self.folder / WORKLOADS, self.folder / RECORDS):
            if not ends_well(path):  # another writer was killed in the middle of a line
                for moved in _repair(self.folder):
                    warnings.warn(moved, stacklevel=3)
        digest, encoded = (str(text) for text in workload.as_json())
        # The numbers of workloads stay, but a file that was edited or restored from elsewhere is another one.
        if self._seen != _signature(self.folder / WORKLOADS):
            self._numbers.clear()
        if encoded not in self._numbers:
            self._numbers[encoded] = _commit_workload(self.folder, digest, encoded)
            self._seen = _signature(self.folder / WORKLOADS)
        return self._numbers[encoded]


def add_records(folder: Path, workload: tuple[str, str], entries: Sequence[list[Any]]) -> int:
    """Add a workload and those of its records that a folder doesn't have yet.

    Parameters
    ----------
    workload
        Its line: hash and encoded function.
    entries
        As `Record.entry`.

    Returns
    -------
    int
        How many records were new.
    """
    with locked(folder):
        _repair(folder)
        number = _commit_workload(folder, *workload)
        known = {
            _canonical(record.entry)
            for record in read_records(folder, read_workloads(folder))
            if record.workload == number
        }
        new = {text: entry for entry in entries if (text := _canonical(entry)) not in known}
        if new:
            append_line(folder / RECORDS, "\n".join(json.dumps([number, entry]) for entry in new.values()))
            note_checked(workload, new.values())
    return len(new)


def normalize(func: tirx.PrimFunc) -> IRModule:
    """The function as a workload: alone in a module, called ``main``, without what its attributes say of its use.

    The structural hash already ignores the names of blocks, loops and buffers, so the same computation is the same
    workload whatever it is called and whatever module it stands in; a tile program that it stands for is what it
    computes. Which parameters may be stored in another layout does count, as their packing isn't timed; that it is none
    of them says no more than to leave the attribute out.

    Raises
    ------
    TuneError
        If a parameter that may be stored in another layout is none, or is written.
    """
    attrs: dict[str, Any] = {"global_symbol": "main", "s_tir": True, "tirx.noalias": True}
    free = layout_free(func)
    if free:
        attrs[LAYOUT_FREE] = list(free)
    if func.attrs and PROGRAM in func.attrs:
        attrs[PROGRAM] = func.attrs[PROGRAM]
    return IRModule({"main": with_only_attrs(func, attrs)})


def with_only_attrs(func: tirx.PrimFunc, attrs: dict[str, Any]) -> tirx.PrimFunc:
    """The function with these attributes and no others."""
    for name in list(func.attrs.keys()) if func.attrs else []:
        func = func.without_attr(str(name))
    return func.with_attrs(attrs)


def find_databases(work_dir: Path) -> list[Path]:
    """The folders at or below `work_dir`, on its file system, that hold a database.

    Links aren't followed, and folders of other file systems, such as /proc, aren't entered.

    Raises
    ------
    TuneError
        If there are more than 20,000 folders below it: it isn't a folder of databases.
    """
    if not work_dir.is_dir():
        return []
    device = os.stat(work_dir).st_dev
    found: list[Path] = []
    for number, (folder, inner, files) in enumerate(os.walk(work_dir)):
        if number >= _MOST_FOLDERS:
            raise TuneError(
                f"{work_dir}: has more than {_MOST_FOLDERS:,} folders below it, of which {len(found)} with a database "
                f"were found so far; name one nearer to them, such as {WORK_DIR}"
            )
        if RECORDS in files:
            found.append(Path(folder))
        inner[:] = [name for name in sorted(inner) if _is_on(device, os.path.join(folder, name))]
    return sorted(found)


def _is_on(device: int, folder: str) -> bool:
    """Whether a folder is there, and on this file system."""
    try:
        return os.stat(folder, follow_symlinks=False).st_dev == device
    except OSError:  # it has gone meanwhile
        return False


def read_workloads(folder: Path) -> list[tuple[str, str] | None]:
    """(hash, encoded function) of each line; None for a line that cannot be read, so that the numbers stay right."""
    return [workload for workload, _ in scan_workloads(folder)]


def scan_workloads(folder: Path) -> list[tuple[tuple[str, str] | None, str | None]]:
    """As `read_workloads`, each with what is wrong with its line."""
    with Checks() as checks:
        return [_workload(line, checks) for line in _lines(folder / WORKLOADS)]


def read_records(folder: Path, workloads: list[tuple[str, str] | None]) -> list[Record]:
    """The readable records of readable workloads; a warning names each other line."""
    records, broken = scan_records(folder, workloads)
    for message in broken:
        warnings.warn(message, stacklevel=2)
    return records


def scan_records(folder: Path, workloads: list[tuple[str, str] | None]) -> tuple[list[Record], list[str]]:
    """As `read_records`, with the messages about other lines instead of warnings."""
    path, records, broken = folder / RECORDS, [], []
    with Checks() as checks:
        for number, line in enumerate(_lines(path), 1):
            record, fault = _record(line, workloads, f"{path}:{number}", checks)
            if record is None:
                broken.append(
                    f"{path}:{number}: skipped a broken tuning record: {line[:60]!r}{f' ({fault})' if fault else ''}"
                )
            else:
                records.append(record)
    return records, broken


def choose_records(folder: Path, choose: Callable[[list[Record]], list[Record]]) -> tuple[int, int]:
    """Replace all records by what `choose` makes of them; every other writer waits meanwhile.

    Returns
    -------
    kept, dropped : int
    """
    with locked(folder):
        _repair(folder)
        workloads = read_workloads(folder)
        records = read_records(folder, workloads)
        chosen = choose(records)
        if chosen != records:
            lines = (json.dumps([record.workload, record.entry]) for record in chosen)
            replace_file(folder / RECORDS, "".join(f"{line}\n" for line in lines))
            for number, workload in enumerate(workloads):
                if workload is not None:
                    note_checked(workload, [record.entry for record in chosen if record.workload == number])
    return len(chosen), len(records) - len(chosen)


def _repair(folder: Path) -> list[str]:
    """Take the lines that cannot be read out of a database, into files named ``.broken`` beside its own.

    Records count workloads by line, so the place of a broken workload is filled with a copy of a whole one; its records
    go with it. Killed anywhere in between, this leaves a database that the next repair finishes: lines are copied
    before they are taken out, and records leave before their workload's place is filled. To be called with the
    folder's lock held.

    Returns
    -------
    list of str
        What was moved, in words; empty if the database (or its absence) is in order.
    """
    lines = {name: list(_lines(folder / name)) for name in (WORKLOADS, RECORDS)}
    with Checks() as checks:
        workloads = [_workload(line, checks)[0] for line in lines[WORKLOADS]]
        records = [_record(line, workloads, "", checks)[0] for line in lines[RECORDS]]
    filler = next((line for line, workload in zip(lines[WORKLOADS], workloads) if workload is not None), None)
    whole = {
        RECORDS: [record is not None for record in records],
        WORKLOADS: [workload is not None for workload in workloads],
    }
    moved = []
    for name, good in whole.items():
        broken = [line for line, ok in zip(lines[name], good) if not ok]
        if broken:
            append_line(folder / f"{name}.broken", "\n".join(broken))
            moved.append(f"{len(broken)} broken line(s) of {folder / name} moved to {name}.broken")
        # A last line without its end is whole, but the next one would be appended to it.
        if broken or not ends_well(folder / name):
            fill = filler if name == WORKLOADS else None
            keep = [line if ok else fill for line, ok in zip(lines[name], good)]
            replace_file(folder / name, "".join(f"{line}\n" for line in keep if line is not None))
    return moved


def _commit_workload(folder: Path, digest: str, encoded: str) -> int:
    """The number of a workload, appended if it isn't there under the same names; with the lock held."""
    workloads = read_workloads(folder)
    mod = ms.database.Workload.from_json([digest, encoded]).mod
    for number, workload in _same(workloads, digest, mod).items():
        if workload.mod.script() == mod.script():
            return number
    append_line(folder / WORKLOADS, json.dumps([digest, encoded]))
    note_checked((digest, encoded))
    return len(workloads)


def _same(workloads: list[tuple[str, str] | None], digest: str, mod: IRModule) -> dict[int, ms.database.Workload]:
    """Those workloads by number that are equal to a module up to names."""
    candidates = {
        number: ms.database.Workload.from_json(list(line))
        for number, line in enumerate(workloads)
        if line is not None and line[0] == digest
    }
    return {number: workload for number, workload in candidates.items() if _tvm.structural_equal(workload.mod, mod)}


def _lines(path: Path) -> list[str]:
    """The lines without their ends; bytes that are no text are replaced, which makes the line a broken one."""
    try:
        # Only the newline ends a line: others may stand in junk, and upstream counts as we do.
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TuneError(f"{path}: cannot be read: {error.strerror}") from error
    return text.removesuffix("\n").split("\n") if text else []


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _canonical(entry: list[Any]) -> str:
    return json.dumps(entry, sort_keys=True)


def _workload(line: str, checks: Checks) -> tuple[tuple[str, str] | None, str | None]:
    """A line's (hash, encoded function), or None and why it is none."""
    try:
        digest, encoded = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None, workload_fault(line) or "isn't a list of a hash and an encoded function"
    if not isinstance(digest, str) or not isinstance(encoded, str):
        return None, workload_fault(line) or "isn't a list of a hash and an encoded function"
    fault = checks.workload_fault(line, (digest, encoded))
    return (None if fault else (digest, encoded)), fault


def _record(
    line: str, workloads: Sequence[tuple[str, str] | None], place: str, checks: Checks
) -> tuple[Record | None, str | None]:
    """The record that a line is, or None and why it is none."""
    try:
        number, entry = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None, None  # isn't JSON or no pair, as anybody sees
    workload = workloads[number] if type(number) is int and 0 <= number < len(workloads) else None
    if workload is None:
        return None, entry_fault(line) or f"there is no workload {number} that can be read"
    fault = checks.entry_fault(line, workload, entry)
    if fault is not None:
        return None, fault
    record = parse_record(line, {number}, place)
    return record, None if record else "its times or its target aren't any"
