"""Tuning the functions of a module: the job around the search."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from ..errors import TuneError
from ..schedule.tiles import has_choice
from ..target import resolve_target
from .database import normalize, repair
from .measure import Worker
from .provenance import Provenance
from .search import Search, TaskResult, logger

__all__ = ["TuneResult", "tune"]

_TIMEOUT = 10.0  # seconds for one candidate: some make LLVM unroll for minutes


@dataclass(frozen=True)
class TuneResult:
    """What a call of `tune` did.

    Attributes
    ----------
    target
        The resolved target, for which the records hold.
    tasks
        One result for each tuned function, in the module's order.
    left_out
        Why each other function was not tuned, by name.
    seconds
        Where this call's time went: ``search``, ``build``, ``run``, and ``total``.
    """

    target: Target
    tasks: tuple[TaskResult, ...]
    left_out: dict[str, str]
    seconds: dict[str, float] = field(default_factory=dict)


def tune(
    func_or_mod: tirx.PrimFunc | IRModule,
    *,
    target: str | dict[str, Any] | Target = "llvm",
    trials: int = 64,
    work_dir: str | Path = "tuning_logs",
    seed: int | None = None,
    progress: bool = True,
) -> TuneResult:
    """Search for the fastest schedule of each TensorIR function, and keep every measurement in a database.

    Candidates are built and run in a process of their own; one that crashes, hangs or computes something else than the
    untuned function is recorded as failed. The call can be interrupted at any moment: the next one with the same
    `work_dir` counts what is there towards `trials`, learns from it, and goes on. `apply_best` finds the results.

    Parameters
    ----------
    func_or_mod
        A function, or a module whose every schedulable function is tuned: one with blocks, whose parameters are
        buffers of constant shapes.
    target
        See `resolve_target`. Records hold for the resolved target only.
    trials
        Number of candidates for each function, those of earlier calls included.
    work_dir
        Folder of the database, of ``provenance.json`` and of ``logs/``; made if needed. One call at a time.
    seed
        Seed of the search; drawn if None, and recorded. Timings differ from run to run, and so does what is tried next.
    progress
        Whether to show a bar for each function: trials, best, failures, the model's error, time left.

    Raises
    ------
    TuneError
        If `trials` is not positive, `work_dir` cannot be used or is in use, or there is nothing to tune.
    """
    if trials < 1:
        raise TuneError(f"trials: a function needs at least one trial, not {trials}")
    resolved = resolve_target(target)
    mods, left_out = _tasks(func_or_mod)
    if not mods:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items()) or "the module is empty"
        raise TuneError(f"func_or_mod: no function can be tuned ({reasons})")
    seed = secrets.randbelow(2**31 - 1) if seed is None else seed
    start = time.perf_counter()
    with _in_use(Path(work_dir)) as folder, _quiet(folder / "logs"):
        for moved in repair(folder):
            warnings.warn(moved, stacklevel=2)
        run = Provenance(folder, resolved, seed, trials)
        with Worker(resolved, folder / "logs" / "worker.log", _TIMEOUT) as worker:
            search = Search(resolved, folder, trials, seed, worker, run)
            results = tuple(search.tune(name, mod, progress) for name, mod in mods.items())
    total = time.perf_counter() - start
    return TuneResult(resolved, results, left_out, {**search.seconds, "total": total})


def _tasks(func_or_mod: tirx.PrimFunc | IRModule) -> tuple[dict[str, IRModule], dict[str, str]]:
    """The workloads by name, and why the other functions are left out."""
    mod = func_or_mod
    if isinstance(mod, tirx.PrimFunc):
        mod = IRModule({str(mod.attrs["global_symbol"]) if "global_symbol" in (mod.attrs or {}) else "main": mod})
    tasks, left_out = {}, {}
    for variable, func in mod.functions_items():
        name = str(variable.name_hint)
        reason = _why_not(func)
        if reason is None:
            tasks[name] = normalize(func)
        else:
            left_out[name] = reason
    return tasks, left_out


def _why_not(func: Any) -> str | None:
    if not isinstance(func, tirx.PrimFunc) or not (func.attrs and func.attrs.get("s_tir")):
        return "not a schedulable TensorIR function (@T.prim_func(s_tir=True))"
    if has_choice(func):
        return "its schedule chose a tile kernel"
    try:
        infos = ms.arg_info.ArgInfo.from_prim_func(func)
        for info in infos:
            np.dtype(str(info.dtype))
    except (TypeError, ValueError):
        return "a parameter is not a buffer of constant shape and of a type that numpy has"
    # The parser gives a body with blocks a root block, and leaves any other as it is.
    if not isinstance(func.body, s_tir.SBlockRealize):
        return "it has no block to schedule"
    return None


@contextlib.contextmanager
def _in_use(folder: Path) -> Iterator[Path]:
    """Make the folder and hold a lock on it, which ends with the process however that ends."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TuneError(f"work_dir: {folder} cannot be used: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TuneError(f"work_dir: another tuning job is at work in {folder}; wait or use another") from error
        yield folder
    finally:
        os.close(handle)


@contextlib.contextmanager
def _quiet(logs: Path) -> Iterator[None]:
    """Send MetaSchedule's log, which is long, to a file."""
    handler = logging.FileHandler(logs / "tuning.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
        handler.close()
