"""``provenance.json``: what made the records of a database, so that a number can be judged years later."""

from __future__ import annotations

import datetime
import json
import platform
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

from tvm.target import Target

from ..target import host_cpu
from .database import replace_file

__all__ = ["Provenance"]

_PACKAGES = ("tvm-axe", "apache-tvm", "apache-tvm-ffi", "xgboost-cpu", "numpy")


class Provenance:
    """The list of tuning runs beside a database, with one more for this call.

    A run is an object with ``date`` (UTC), ``versions``, ``python``, ``host``, ``cpu``, ``target``, ``seed``,
    ``trials`` and ``tasks``: by the workload's hash ``name``, ``before_ms``, ``best_ms``, ``trials``, ``failures``. It
    is written when its first task starts to measure, and again after each task; a call that measures nothing leaves no
    trace.
    """

    def __init__(self, folder: Path, target: Target, seed: int, trials: int) -> None:
        self.path = folder / "provenance.json"
        self.target = json.loads(str(target))
        self.earlier = self._read()
        self.run: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": {name: metadata.version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "host": platform.node(),
            "cpu": host_cpu(),
            "target": self.target,
            "seed": seed,
            "trials": trials,
            "tasks": {},
        }

    def record(self, workload: str, **task: Any) -> None:
        """Add to what is known about a task of this run, and write the file."""
        self.run["tasks"].setdefault(workload, {}).update(task)
        replace_file(self.path, json.dumps({"runs": [*self.earlier, self.run]}, indent=1) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        try:
            runs = json.loads(self.path.read_text(encoding="utf-8"))["runs"]
            return [run for run in runs if isinstance(run["tasks"], dict) and run["target"]]
        except (ValueError, KeyError, TypeError):
            kept = self.path.replace(self.path.with_name("provenance.json.broken"))
            warnings.warn(f"{self.path} cannot be read; it is now {kept}, and a new one is started", stacklevel=4)
            return []
