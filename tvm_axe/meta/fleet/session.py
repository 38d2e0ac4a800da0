"""What a server does for a job: one piece of work after the other, each in a thread, whose results are asked for.

What the two say to each other is JSON, and an answer never takes much longer than a second, whatever is being done: so
a job knows a server that works from one that is gone. The work itself has its limits here, on the server.

    ["begin", kind, arguments]  -> null; the work goes on
    ["next"]                    -> {"results": [...], "over": false}; what came of it until now, waiting for a moment
                                   {"results": [...], "over": true, "error": text or null, "fault": text or null}
    ["note", {...}]             -> null; what the job says of itself and of the server, for `tvm-axe fleet status`

The kinds of work, and what each result is; modules and targets are JSON:

    look                             -> the server's name, and a `Fingerprint`
    open target, builder, timeout, devices -> the target, resolved for one of so many devices; what follows is for this
    probe times                      -> seconds of a call of `probe_function`, as often
    prepare mod                      -> seconds, failure, conditions: the untuned function, whose candidates follow
    measure mods                     -> seconds, failure, build, run of each
    turns [mods, turns]              -> seconds of each in each turn
    prepare program name, mod, origin -> as prepare, of a program on a mesh, by the measurer of that name
    programs [[mod, files], ...], ... -> of each item as measure of each, with these records of the kernels
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import tvm
from tvm.ir import IRModule

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.machines.builder import builder_named
from tvm_axe.machines.target import resolve_target
from tvm_axe.meta.fleet.fingerprint import Fingerprint
from tvm_axe.meta.fleet.probe import probe_function
from tvm_axe.meta.measure.child import Fault
from tvm_axe.meta.measure.protocol import Measurement, TimesInTurns
from tvm_axe.meta.measure.runner import Runner

__all__ = ["FAILED", "Desk", "Here", "Measuring", "candidates_of", "measured"]

_MOMENT = 1.0  # seconds that an answer waits for a result
FAILED = "failed"
"""What a session notes of a candidate for its server's count: whether it failed."""


class Measuring(Protocol):
    """What does a server's work."""

    def work(self, kind: str, arguments: Sequence[Any]) -> Iterator[Any]:
        """Do work of a kind; gives its results, each as soon as it is there, as JSON has them.

        Raises
        ------
        Exception
            Why it can't be done, or not to its end.
        """


class Desk:
    """Where a job asks for work, and for what came of it.

    Parameters
    ----------
    measuring
        Does the work.
    noted
        Is told what a job says of itself, and each result.
    """

    def __init__(self, measuring: Measuring, noted: Callable[[Mapping[str, Any]], None] = lambda _: None) -> None:
        self._measuring, self._noted = measuring, noted
        self._work: queue.SimpleQueue[tuple[str, Sequence[Any]]] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.asked = time.monotonic()
        """When somebody asked for something last, by `time.monotonic`."""

    def ask(self, text: str) -> str:
        """Answer a request."""
        self.asked = time.monotonic()
        kind, *arguments = json.loads(text)
        if kind == "begin":
            self._begin(*arguments)
            return json.dumps(None)
        if kind == "note":
            self._noted(*arguments)
            return json.dumps(None)
        return json.dumps(self._next())

    def _begin(self, kind: str, arguments: Sequence[Any]) -> None:
        if self._thread is None:
            # One for all of a session: the processes that it starts end with it (PR_SET_PDEATHSIG follows the thread).
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()
        self._work.put((kind, arguments))

    def _next(self) -> dict[str, Any]:
        answer: dict[str, Any] = {"results": [], "over": False}
        wait = _MOMENT
        while not answer["over"]:
            try:
                found = self._found.get(timeout=wait)
            except queue.Empty:
                break
            wait = 0.001  # what is there already comes along
            if "result" in found:
                answer["results"].append(found["result"])
            else:
                answer |= found
        return answer

    def _serve(self) -> None:
        while True:
            kind, arguments = self._work.get()
            told: dict[str, Any] = {"over": True, "error": None, "fault": None}
            try:
                for result in self._measuring.work(kind, arguments):
                    for candidate in candidates_of(kind, result):
                        self._noted({FAILED: candidate["failure"] is not None})
                    self._found.put({"result": result})
            except Fault as error:
                told["fault"] = str(error)
            except Exception as error:  # whatever it is, the job is to hear of it
                own = _tvm.is_own_fault(error)
                told |= {"fault": traceback.format_exc()} if own else {"error": _said(error)}
            self._found.put(told)


class Here:
    """Measures on this machine, by the same processes as a job that runs here.

    Parameters
    ----------
    name
        The server's.
    log
        Collects what the processes and the kernels print.
    most
        Seconds that building or running a candidate may take, whatever a job asks for.
    """

    def __init__(self, name: str, log: Path, most: float) -> None:
        self._name, self._log, self._most = name, log, most
        self._runner: Runner | None = None
        self._programs: _Programs | None = None

    def work(self, kind: str, arguments: Sequence[Any]) -> Iterator[Any]:
        """Do work of a kind; see `Measuring`."""
        if kind == "look":
            yield [self._name, Fingerprint.own().encode()]
        elif kind == "open":
            yield self._open(*arguments)
        elif kind == "prepare program":
            yield self._prepare_program(*arguments)
        elif kind == "programs":
            yield from map(self._measure_programs, arguments)
        else:
            yield from measured(self.runner, kind, arguments)

    @property
    def runner(self) -> Runner:
        """What measures for the target that was opened."""
        if self._runner is None:
            raise TuneError("nothing was opened")
        return self._runner

    def _open(self, target: str, builder: str, timeout: float, devices: int) -> str:
        for measurer in (self._runner, self._programs):
            if measurer is not None:
                measurer.close()
        given = json.loads(target)
        own = max(1, len(os.sched_getaffinity(0)) // devices)
        resolved = resolve_target(given, threads=None if "num-cores" in given else own)
        self._runner = Runner(resolved, self._log, min(timeout, self._most), builder)
        return str(resolved)

    def _prepare_program(self, name: str, mod: str, origin: str) -> dict[str, Any]:
        if self._programs is not None:
            self._programs.close()
        target, work_dir = self.runner.target, self._log.parent / "records"
        self._programs = builder_named(name)(target, work_dir, self._log, self._most, tvm.ir.load_json(origin))
        assert self._programs is not None
        untuned = self._programs.prepare(tvm.ir.load_json(mod))
        return {**_encoded(untuned), "conditions": dict(self._programs.conditions)}

    def _measure_programs(self, item: Sequence[tuple[str, Mapping[str, str]]]) -> list[dict[str, Any]]:
        if self._programs is None:
            raise TuneError("no program was prepared")
        for _, files in item:
            for name, text in files.items():
                path = self._log.parent / "records" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        return [*map(_encoded, self._programs.measure_all([tvm.ir.load_json(mod) for mod, _ in item]))]


class _Programs(Protocol):
    """What measures schedules of a program, such as `tvm_axe.meta.mesh.runner.recorded`."""

    @property
    def conditions(self) -> Mapping[str, str | int]: ...

    def prepare(self, mod: IRModule) -> Measurement: ...

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]: ...

    def close(self) -> None: ...


class _Measures(TimesInTurns, Protocol):
    """What times functions, as a `Measurer` does, and times some of them again."""

    @property
    def conditions(self) -> Mapping[str, str | int]: ...

    def prepare(self, mod: IRModule) -> Measurement: ...

    def measure_all(self, mods: Sequence[IRModule]) -> Iterator[Measurement]: ...


def measured(measurer: _Measures, kind: str, arguments: Sequence[Any]) -> Iterator[Any]:
    """Have kernels measured; see the module for the kinds of work and their results."""
    if kind == "probe":
        (times,) = arguments
        mod = probe_function()
        measurer.prepare(mod)
        found = [measured.seconds for measured in measurer.measure_all([mod] * times)]
        yield [seconds for seconds in found if seconds is not None]
    elif kind == "prepare":
        (mod,) = arguments
        untuned = measurer.prepare(tvm.ir.load_json(mod))
        yield {**_encoded(untuned), "conditions": dict(measurer.conditions)}
    elif kind == "measure":
        yield from map(_encoded, measurer.measure_all([tvm.ir.load_json(mod) for mod in arguments]))
    elif kind == "turns":
        for mods, turns in arguments:
            yield measurer.in_turns([tvm.ir.load_json(mod) for mod in mods], turns)
    else:
        raise TuneError(f"this server does no work of the kind {kind!r}")


def candidates_of(kind: str, result: Any) -> list[dict[str, Any]]:
    """What a result of work says of candidates: of one, of several, or of none."""
    if kind == "programs":
        return list(result)
    return [result] if kind == "measure" else []


def _encoded(measured: Measurement) -> dict[str, Any]:
    times = {"build": measured.build_seconds, "run": measured.run_seconds}
    return {"seconds": measured.seconds, "failure": measured.failure, **times}


def _said(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, TuneError) else f"{type(error).__name__}: {text}"
