"""``provenance.json``: what made the records of a database, so that a number can be judged years later."""

from __future__ import annotations

import datetime
import json
import platform
import secrets
import shlex
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from tvm.target import Target

from tvm_axe.machines.target import host_cpu
from tvm_axe.records.files import locked, replace_file

__all__ = ["PROVENANCE", "Provenance", "add_runs", "origin", "read_runs"]

PROVENANCE = "provenance.json"
_PACKAGES = ("tvm-axe", "apache-tvm", "apache-tvm-ffi", "xgboost-cpu", "numpy")


class Provenance:
    """One more run in the list of tuning runs beside a database, which others may extend at the same time.

    A run is an object with ``id``, ``date`` (UTC), ``command``, ``versions``, ``python``, ``host``, ``cpu``,
    ``target``, ``seed``, ``trials`` and ``tasks``: by the workload's hash ``name``, ``before_ms``, ``best_ms``,
    ``trials``, ``failures``. Where a fleet measured, ``machines`` says of each by name its ``fingerprint``, the
    ``scale`` of its times, how many it has ``measured`` and how many of them ``failed``, and the ``events``. It is
    written whenever something is recorded; a call that measures nothing leaves no trace.
    """

    def __init__(self, folder: Path, target: Target, seed: int, trials: int) -> None:
        self.folder = folder
        self.run: dict[str, Any] = {
            "id": secrets.token_hex(8),
            **origin(),
            "target": json.loads(str(target)),
            "seed": seed,
            "trials": trials,
            "tasks": {},
        }

    def record(self, workload: str, **task: Any) -> None:
        """Add to what is known about a task of this run, and write the file.

        Raises
        ------
        TuneError
            If it cannot be written; what it was before stays.
        """
        self.run["tasks"].setdefault(workload, {}).update(task)
        add_runs(self.folder, [self.run])


def origin() -> dict[str, Any]:
    """Return what makes a measurement now: ``date`` (UTC), ``command``, ``versions``, ``python``, ``host``, ``cpu``."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
        "versions": {name: metadata.version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "host": platform.node(),
        "cpu": host_cpu(),
    }


def add_runs(folder: Path, runs: list[dict[str, Any]]) -> None:
    """Add runs to those of a folder; one that is there, by its ``id``, is replaced."""
    with locked(folder):
        there = read_runs(folder)
        if there is None:
            path = folder / PROVENANCE
            broken = path.replace(path.with_name(f"{PROVENANCE}.broken"))
            warnings.warn(f"{path} cannot be read; it is now {broken}, and a new one is started", stacklevel=3)
        # Runs of before there were ids are told apart by all that they say.
        by_id = {run.get("id", json.dumps(run, sort_keys=True)): run for run in [*(there or []), *runs]}
        replace_file(folder / PROVENANCE, json.dumps({"runs": [*by_id.values()]}, indent=1) + "\n")


def read_runs(folder: Path) -> list[dict[str, Any]] | None:
    """The runs of a folder, none if it says nothing of them; None if what it says cannot be read."""
    try:
        runs = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["runs"]
        return [run for run in runs if isinstance(run["tasks"], dict) and isinstance(run["target"], dict)]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        return None
