"""MetaSchedule's JSON databases, read line by line so that a broken line costs that line only.

A database is a folder with two files. ``database_workload.json`` has a line ``["hash", "function, encoded"]`` for each
workload; ``database_tuning_record.json`` has a line ``[n, [trace, run_secs, target, args]]`` for each measured
candidate of workload n. Upstream appends a line at a time, and refuses a whole database for one bad line, which is what
a process that was killed while writing leaves behind.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import tirx
from tvm.ir import IRModule
from tvm.target import Target

__all__ = [
    "FAILED_SECONDS",
    "Record",
    "find_databases",
    "normalize",
    "read_records",
    "read_workloads",
    "repair",
    "replace_file",
    "with_only_attrs",
]

WORKLOADS, RECORDS = "database_workload.json", "database_tuning_record.json"
FAILED_SECONDS = 1e10  # upstream's time of a candidate that failed


@dataclass(frozen=True)
class Record:
    """A measured candidate.

    Attributes
    ----------
    workload
        Number of its workload: the line in the other file, from 0.
    trace
        The schedule's trace, as `Trace.apply_json_to_schedule` takes it.
    seconds
        Its time; `FAILED_SECONDS` if it has none.
    target
        The target's JSON object.
    place
        File and line, for messages.
    """

    workload: int
    trace: Any
    seconds: float
    target: dict[str, Any]
    place: str

    def is_for(self, target: Target) -> bool:
        """Whether it was measured for exactly this target."""
        return self.target == json.loads(str(target))


def normalize(func: tirx.PrimFunc) -> IRModule:
    """The function as a workload: alone in a module, called ``main``, without what its attributes say of its use.

    The structural hash already ignores the names of blocks, loops and buffers, so the same computation is the same
    workload whatever it is called and whatever module it stands in.
    """
    return IRModule({"main": with_only_attrs(func, {"global_symbol": "main", "s_tir": True, "tirx.noalias": True})})


def with_only_attrs(func: tirx.PrimFunc, attrs: dict[str, Any]) -> tirx.PrimFunc:
    """The function with these attributes and no others."""
    for name in list(func.attrs.keys()) if func.attrs else []:
        func = func.without_attr(str(name))
    return func.with_attrs(attrs)


def find_databases(work_dir: Path) -> list[Path]:
    """The folders at or below `work_dir` that hold a database."""
    return sorted(path.parent for path in work_dir.rglob(RECORDS))


def read_workloads(folder: Path) -> list[tuple[str, str] | None]:
    """(hash, encoded function) of each line; None for a line that cannot be read, so that the numbers stay right."""
    return [_workload(line) for _, line in _lines(folder / WORKLOADS)]


def read_records(folder: Path, workloads: list[tuple[str, str] | None]) -> list[Record]:
    """The readable records of readable workloads; a warning names each other line."""
    path, records = folder / RECORDS, []
    for number, line in _lines(path):
        record = _record(line, workloads, f"{path}:{number}")
        if record is None:
            warnings.warn(f"{path}:{number}: skipped a broken tuning record: {line[:60]!r}", stacklevel=2)
        else:
            records.append(record)
    return records


def repair(folder: Path) -> list[str]:
    """Take the lines that cannot be read out of a database, into files named ``.broken`` beside its own.

    A record counts its workload by line, so those after a broken workload are renumbered.

    Returns
    -------
    list of str
        What was moved, in words; empty if the database (or its absence) is in order.
    """
    workloads = read_workloads(folder)
    numbers = {old: new for new, old in enumerate(n for n, w in enumerate(workloads) if w is not None)}
    keep: dict[str, list[str]] = {WORKLOADS: [], RECORDS: []}
    broken: dict[str, list[str]] = {WORKLOADS: [], RECORDS: []}
    for (_, line), workload in zip(_lines(folder / WORKLOADS), workloads):
        (broken if workload is None else keep)[WORKLOADS].append(line)
    for _, line in _lines(folder / RECORDS):
        record = _record(line, workloads, "")
        if record is None:
            broken[RECORDS].append(line)
        else:
            keep[RECORDS].append(json.dumps([numbers[record.workload], json.loads(line)[1]]))
    moved = []
    for name, lines in broken.items():
        if lines:
            with open(folder / f"{name}.broken", "a", encoding="utf-8") as out:
                out.writelines(f"{line}\n" for line in lines)
            moved.append(f"{len(lines)} broken line(s) of {folder / name} moved to {name}.broken")
        # A last line without its end is whole, but the next record would be appended to it.
        if lines or (moved and name == RECORDS) or not _ends_well(folder / name):
            replace_file(folder / name, "".join(f"{line}\n" for line in keep[name]))
    return moved


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees either the old or the new contents."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers, from 1, and lines; bytes that are no text are replaced, which makes the line a broken one."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as lines:
            yield from ((n, line.rstrip("\n")) for n, line in enumerate(lines, 1) if line.strip())


def _ends_well(path: Path) -> bool:
    return not path.exists() or path.stat().st_size == 0 or path.read_bytes().endswith(b"\n")


def _workload(line: str) -> tuple[str, str] | None:
    try:
        digest, encoded = json.loads(line)
    except (ValueError, TypeError):
        return None
    return (digest, encoded) if isinstance(digest, str) and isinstance(encoded, str) else None


def _record(line: str, workloads: list[tuple[str, str] | None], place: str) -> Record | None:
    try:
        workload, (trace, run_secs, target, _) = json.loads(line)
        seconds = sorted(float(s) for s in run_secs)[len(run_secs) // 2]
    except (ValueError, TypeError, IndexError):
        return None
    known = isinstance(workload, int) and 0 <= workload < len(workloads) and workloads[workload] is not None
    return Record(workload, trace, seconds, target, place) if known and isinstance(target, dict) else None
