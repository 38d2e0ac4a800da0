"""Which lines of databases may be read in this process, and why the others may not.

A line is checked once: in words (`tvm_axe.records.faults`), then tried in another process (`tvm_axe.records.replay`).
What passed is noted in ``checked_records.txt`` in the user's cache folder (`tvm_axe.machines.cache`), by a hash of what
the line says and of upstream's version; what this package writes is noted when it is written. So a database in order
costs a hash of each line, and a line that was changed since, by whatever, is checked again. Losing the file costs no
more than that everything is checked again.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tvm

from tvm_axe.machines.cache import default_folder
from tvm_axe.records.faults import entry_fault, workload_fault
from tvm_axe.records.replay import Trials

__all__ = ["CHECKED", "Checks", "note_checked"]

CHECKED = "checked_records.txt"
_VERSION = f"1 {tvm.__version__}"  # of the checks and of what they are for
_MOST = 64 << 20  # bytes of the file, which is begun anew then

_trials = Trials()
_asking = threading.RLock()  # of what follows and of the process in which lines are tried
_faults: dict[str, str | None] = {}  # what this process has found out, by the line's hash
_files: dict[Path, tuple[tuple[int, ...], frozenset[str]]] = {}


def _after_fork() -> None:
    """In a child that this process forked: the process in which lines are tried is none of its."""
    global _trials, _asking
    _trials, _asking = Trials(), threading.RLock()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _trials.close())  # whichever it is then


class Checks:
    """What is known of lines; a context manager, at whose end what was found out is noted."""

    def __init__(self) -> None:
        self._known = _read(default_folder() / CHECKED)
        self._new: list[str] = []

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, *_: object) -> None:
        _append(self._new)

    def workload_fault(self, line: str, workload: tuple[str, str]) -> str | None:
        """Why a workload, a line of text and what JSON makes of it, may not be read; None if it may."""
        key = _hash(workload)
        if key in self._known:
            return None
        with _asking:
            if key not in _faults:
                self._note(key, workload_fault(line) or _trials.workload_fault(workload))
            return _faults[key]

    def entry_fault(self, line: str, workload: tuple[str, str], entry: Any) -> str | None:
        """Why a record on a workload that may be read may not be itself; None if it may."""
        key = _hash(workload, entry)
        if key in self._known:
            return None
        with _asking:
            if key not in _faults:
                self._note(key, entry_fault(line) or _trials.entry_fault(workload, entry))
            return _faults[key]

    def _note(self, key: str, fault: str | None) -> None:
        _faults[key] = fault
        if fault is None:
            self._new.append(key)


def note_checked(workload: tuple[str, str], entries: Iterable[Any] = ()) -> None:
    """Note that a workload and records of it are in order, as this process has made them."""
    keys = [_hash(workload), *(_hash(workload, entry) for entry in entries)]
    with _asking:
        new = [key for key in keys if _faults.get(key, "") is not None]
        _faults.update(dict.fromkeys(new))
    _append(new)


def _hash(workload: tuple[str, str], *entry: Any) -> str:
    text = json.dumps([_VERSION, workload, *entry])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path) -> frozenset[str]:
    """The hashes in a file, which is read again when it has changed."""
    try:
        stat = path.stat()
        signature = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        found = _files.get(path)
        if found is None or found[0] != signature:
            found = _files[path] = signature, frozenset(path.read_text(encoding="ascii", errors="replace").split())
        return found[1]
    except OSError:
        return frozenset()  # nothing is known, so everything is checked


def _append(keys: Sequence[str]) -> None:
    """Note hashes in one write, which needs no lock: one that is cut matches nothing.

    Where the folder cannot be written, this process remembers, and the next one checks again.
    """
    if not keys:
        return
    path = default_folder() / CHECKED
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > _MOST:
            path.unlink()
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(handle, "".join(f"\n{key}" for key in keys).encode() + b"\n")
        finally:
            os.close(handle)
