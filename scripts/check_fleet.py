"""Tuning on a fleet while its servers, its tracker, its link or the job itself go, at random moments.

    python scripts/check_fleet.py                                # each fault twenty times, then the throughput
    python scripts/check_fleet.py --only link --times 3 --cut 30
    python scripts/check_fleet.py --only throughput --json

A tracker and two workers run on this machine. Each time a small job is started in a folder of its own, something is
done to it, and afterwards

- the job, or the one that goes on after it, has finished, and no candidate has failed;
- each of its records is there once, with one line in the log of trials, and they are as many as were asked for;
- the fault was named, and how long that took;
- nothing runs that shouldn't, and the servers that are left wait for the next job.

    build      the process that serves the job is killed while a candidate is built
    run        ... while one runs
    worker     the worker itself is killed
    stop       all of a worker's processes are stopped, and go on later
    hang       the process that serves the job alone is stopped, and goes on later
    link       the link to a worker goes down for a while: it is in a network namespace of its own (needs root, and ip)
    tracker    the tracker is killed and started again
    job        the job is killed and started again
    throughput candidates a second of two workers with a core each, over those of one; and what the best takes
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tvm_axe.cli import main as tvm_axe
from tvm_axe.meta.fleet import server
from tvm_axe.meta.fleet.tracker import status, tracker_summary
from tvm_axe.meta.measure.child import Child

TRIALS = 12
SIZE = 128
SILENT = 3.0
"""Seconds without a word after which a server is lost, in these jobs."""
LONGEST = 240.0
"""Seconds that a job may take, whatever happens to it."""
AFTER = 90.0
"""Seconds until nothing is left of it."""
KEY = "check"
_NETWORK = 0x40000000  # CLONE_NEWNET
MARK = "TVM_AXE_CHECK_FLEET"
"""The environment variable that all that is started here has; its value is the folder where all lies."""

HOSTS = ("10.77.213.1", "10.77.213.2")
"""Of the two namespaces between which there is a link."""


class Wrong(Exception):
    """What isn't as it should be; the message says what."""


# ---- What runs in processes of its own -------------------------------------------------------------------------------


def job(told: dict[str, Any]) -> None:
    """Tune, as a process of its own; prints what came of it."""
    from tvm.script import tirx as T

    from tvm_axe.meta.fleet.crew import crew_for
    from tvm_axe.meta.fleet.fleet import Fleet
    from tvm_axe.meta.search.job import tune_kernels

    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((SIZE, SIZE), "float32"), W: T.Buffer((SIZE, SIZE), "float32"), C: T.Buffer((SIZE, SIZE), "float32")
    ) -> None:
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        for i, j, k in T.grid(SIZE, SIZE, SIZE):
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]

    place = Path(told["work_dir"])
    fleet = Fleet(told["tracker"], KEY, drift=1e9, noise=1e9, silent=SILENT)
    with crew_for(fleet, {"kind": "llvm", "num-cores": 1}, place, True) as crew:
        assert crew is not None
        while sum(member.is_in for member in crew._members) < told["wait_for"]:
            crew._turn()
        began = time.time()
        result = tune_kernels(
            main, crew.target, told["trials"], None, place, None, told["seed"], True, False, crew=crew
        )
    machines = [{"name": machine.name, **machine.encode()} for machine in result.machines]
    (task,) = result.tasks
    print(
        json.dumps(
            {
                "machines": machines,
                "trials": task.trials,
                "failures": task.failures,
                "best_ms": task.best_ms,
                "began": began,
                "search": result.seconds["search"],
            }
        )
    )


def worker(arguments: Sequence[str]) -> int:
    """`tvm-axe worker` whose sessions write down what they have their processes do."""
    server._ENTRY = "check_fleet:serve_session"
    return tvm_axe(["worker", *arguments])


def serve_session(descriptors: Sequence[int], name: str, **named: Any) -> None:
    """Be a session's process, whose steps are lines of a file: ``build``, ``run`` and others."""
    send = Child.send

    def sending(self: Child, request: tuple[Any, ...]) -> None:
        send(self, request)
        with open(_steps(name), "a", encoding="ascii") as steps:
            steps.write(f"{request[0]}\n")

    Child.send = sending  # type: ignore[method-assign]
    server.serve_session(descriptors, name, **named)


def _steps(name: str) -> Path:
    return Path(os.environ[MARK]) / f"{name}.steps"


# ---- The fleet -------------------------------------------------------------------------------------------------------


class Started:
    """A process, in a network namespace if one is named, whose output goes to files."""

    def __init__(self, folder: Path, name: str, *arguments: str, namespace: str = "") -> None:
        self.out, self.errors = folder / f"{name}.out", folder / f"{name}.errors"
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        with self.out.open("w") as out, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*inside, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env={**os.environ, MARK: str(folder), "TMPDIR": str(folder)},
                start_new_session=True,
            )

    def up(self) -> str:
        """Wait for its first line."""
        _wait(lambda: "\n" in self.out.read_text() or self.process.poll() is not None, 120, "a server didn't start")
        if self.process.poll() is not None:
            raise Wrong(f"a server didn't start: {self.errors.read_text()}")
        return self.out.read_text().splitlines()[0]

    def kill(self) -> None:
        """End it alone, at once."""
        self.process.kill()
        self.process.wait()


class Rig:
    """A tracker and the workers ``first`` and ``second``, each on some cores and perhaps in a namespace."""

    def __init__(self, names: dict[str, str], namespaces: tuple[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="check_fleet-"))
        self.names, self.namespaces = names, namespaces
        self.hosts = HOSTS if namespaces else ("127.0.0.1", "127.0.0.1")
        self.workers: dict[str, Started] = {}
        self.port = 0
        self.start_tracker()
        for name in names:
            self.start_worker(name)
        for started in self.workers.values():
            started.up()

    @property
    def tracker_address(self) -> str:
        """Where the tracker is."""
        return f"{self.hosts[0]}:{self.port}"

    def _namespace(self, name: str) -> str:
        return "" if self.namespaces is None else self.namespaces[name == "second"]

    def start_tracker(self) -> None:
        """Start it, where it was if it was before."""
        place = ("--listen", self.hosts[0], "--port", str(self.port))
        self.tracker = Started(
            self.folder, "tracker", "-m", "tvm_axe", "fleet", "tracker", *place, namespace=self._namespace("")
        )
        self.port = int(self.tracker.up().rpartition(":")[2])

    def start_worker(self, name: str) -> None:
        """Start a worker."""
        place = ("--tracker", self.tracker_address, "--key", KEY, "--port", "0", "--name", name)
        here = ("--listen", self.hosts[name == "second"], "--cores", self.names[name])
        self.workers[name] = Started(
            self.folder, name, __file__, "--as-worker", *place, *here, namespace=self._namespace(name)
        )

    def start_job(self, work_dir: Path, seed: int, trials: int = TRIALS, wait_for: int = 1) -> Started:
        """Start a job."""
        for name in self.names:
            (self.folder / f"{name}.steps").write_text("")
        told = {"tracker": self.tracker_address, "work_dir": str(work_dir), "seed": seed, "trials": trials}
        arguments = ("--as-job", json.dumps({**told, "wait_for": wait_for}))
        return Started(self.folder, "job", __file__, *arguments, namespace=self._namespace(""))

    def steps(self) -> dict[str, list[str]]:
        """What each worker's sessions have done for this job, step by step."""
        return {name: (self.folder / f"{name}.steps").read_text().split() for name in self.names}

    def processes(self) -> dict[int, int]:
        """All that was started here and runs, each with its parent."""
        found = {}
        mark = f"{MARK}={self.folder}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    state, parent = (path / "stat").read_text().rpartition(") ")[2].split()[:2]
                    if state != "Z":
                        found[int(path.name)] = int(parent)
        return found

    def below(self, name: str) -> list[int]:
        """A worker's processes: itself, what forks its sessions, the session, and so on."""
        processes, own = self.processes(), [self.workers[name].process.pid]
        for pid in own:
            own += [child for child, parent in processes.items() if parent == pid]
        return own

    def session(self, name: str) -> int | None:
        """The process that serves a worker's job; None if there is none."""
        processes, pid = self.processes(), self.workers[name].process.pid
        forking = [child for child, parent in processes.items() if parent == pid]
        return next((child for child, parent in processes.items() if parent in forking), None)

    def left(self) -> str:
        """What runs that shouldn't where no job does, in words; nothing if all is well."""
        processes = self.processes()
        own = {self.tracker.process.pid, *(started.process.pid for started in self.workers.values())}
        own |= {child for child, parent in processes.items() if parent in own}  # what forks sessions
        return ", ".join(f"{pid} ({_command(pid)})" for pid in processes.keys() - own)

    def states(self) -> dict[str, str]:
        """What the tracker says of the workers."""
        found: dict[str, Any] = {"servers": []}

        def look() -> None:
            if self.namespaces is not None:
                _enter(self.namespaces[0])
            with contextlib.suppress(OSError):
                found.update(status(tracker_summary((self.hosts[0], self.port))))

        thread = threading.Thread(target=look)  # which may go into a namespace alone
        thread.start()
        thread.join()
        return {one["name"]: one["state"] for one in found["servers"]}

    def close(self) -> None:
        """End all that runs."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[-80:]
    return "gone"


def _wait(is_so: Callable[[], Any], seconds: float, otherwise: str, step: float = 0.02) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            raise Wrong(f"{otherwise} within {seconds:.0f} s")
        time.sleep(step)


# ---- Faults ----------------------------------------------------------------------------------------------------------


@dataclass
class Time:
    """One job and what is done to it."""

    rig: Rig
    draw: random.Random
    cut: float
    work_dir: Path
    seed: int
    job: Started
    said: str = ""
    """What is to be found among the job's words, as a pattern; nothing if it may go unnoticed."""
    since: float = 0.0
    later: list[Callable[[], None]] = field(default_factory=list)
    """What is to be done after the job."""

    def until_some_trials(self, least: int = 0) -> None:
        """Let a random part of the job go by, of so many trials at least."""
        wanted, log = self.draw.randrange(least, TRIALS - 2), "*/*/trials.jsonl"
        self.wait(lambda: sum(len(p.read_text().splitlines()) for p in self.work_dir.glob(log)) >= wanted)
        time.sleep(self.draw.random() / 2)

    def until_a_step(self, kind: str | None, names: Sequence[str]) -> str:
        """Wait until a worker does a step of a kind for a random time; gives the worker."""
        wanted, found = self.draw.randrange(1, 8 if kind else 16), {}

        def is_so() -> bool:
            nonlocal found
            steps = self.rig.steps()
            found = {n: len(steps[n]) for n in names if steps[n] and (kind is None or steps[n][-1] == kind)}
            done = sum(kind is None or step == kind for name in names for step in steps[name])
            return bool(found) and done >= wanted

        self.wait(is_so, 0.002)
        return max(found, key=found.__getitem__)

    def wait(self, is_so: Callable[[], bool], step: float = 0.02) -> None:
        """Wait for something while the job runs; if it ends before, that is where it is left."""
        _wait(lambda: is_so() or self.job.process.poll() is not None, LONGEST, "the moment didn't come", step)

    def lost(self, name: str) -> None:
        """The worker is lost now, and the job is to say so if it needs it."""
        self.since = time.monotonic()
        self.said = rf"{name} is lost: "


def _kill_session(kind: str) -> Callable[[Time], None]:
    def fault(now: Time) -> None:
        name = now.until_a_step(kind, [*now.rig.names])
        pid = now.rig.session(name)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            now.lost(name)

    return fault


def _kill_worker(now: Time) -> None:
    name = now.until_a_step(None, [*now.rig.names])
    now.rig.workers[name].kill()
    now.lost(name)

    def again() -> None:
        left = [pid for pid in now.rig.processes() if pid not in _known(now.rig, name)]
        _wait(lambda: not [pid for pid in left if pid in now.rig.processes()], AFTER, "what it ran goes on")
        now.rig.start_worker(name)
        now.rig.workers[name].up()

    now.later.append(again)


def _known(rig: Rig, without: str) -> set[int]:
    others = {pid for name in rig.names if name != without for pid in rig.below(name)}
    return {rig.tracker.process.pid, *others}


def _stop(alone: bool) -> Callable[[Time], None]:
    def fault(now: Time) -> None:
        name = now.until_a_step(None, [*now.rig.names])
        pid = now.rig.session(name)
        stopped = ([] if pid is None else [pid]) if alone else now.rig.below(name)
        for each in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGSTOP)
        now.lost(name)
        time.sleep(now.draw.uniform(1.5, 4) * SILENT)
        for each in reversed(stopped):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)

    return fault


def _cut(now: Time) -> None:
    assert now.rig.namespaces is not None
    there = now.rig.namespaces[1]
    now.until_a_step(None, ["second"])
    _ip("netns", "exec", there, "ip", "link", "set", f"{there}v", "down")
    now.lost("second")
    time.sleep(now.cut)
    _ip("netns", "exec", there, "ip", "link", "set", f"{there}v", "up")


def _restart_tracker(now: Time) -> None:
    now.until_some_trials(1)  # a job that begins without a tracker ends at once, and says why
    now.rig.tracker.kill()
    now.since, now.said = time.monotonic(), "fleet: no tracker at "
    time.sleep(now.draw.uniform(0, 5))
    now.rig.start_tracker()


def _kill_job(now: Time) -> None:
    now.until_some_trials()
    now.job.kill()
    now.job = now.rig.start_job(now.work_dir, now.seed)


FAULTS: dict[str, Callable[[Time], None]] = {
    "build": _kill_session("build"),
    "run": _kill_session("run"),
    "worker": _kill_worker,
    "stop": _stop(alone=False),
    "hang": _stop(alone=True),
    "link": _cut,
    "tracker": _restart_tracker,
    "job": _kill_job,
}


# ---- Once, and many times --------------------------------------------------------------------------------------------


def once(rig: Rig, fault: Callable[[Time], None], draw: random.Random, cut: float, work_dir: Path) -> float | None:
    """A job with a fault; gives the seconds until it was named, None if the job could do without.

    Raises
    ------
    Wrong
        If anything is not as it should be.
    """
    seed = draw.randrange(1 << 30)
    now = Time(rig, draw, cut, work_dir, seed, rig.start_job(work_dir, seed))
    named: list[float] = []
    with _heard(now, named):
        fault(now)
        _wait(lambda: now.job.process.poll() is not None, LONGEST, "the job didn't finish")
    words = now.job.errors.read_text()
    if now.job.process.returncode != 0:
        raise Wrong(f"the job ended ({now.job.process.returncode}): {words[-2000:]}")
    told = json.loads(now.job.out.read_text().splitlines()[-1])
    if told["failures"] or told["trials"] != TRIALS:
        raise Wrong(f"{told['trials']} trials, failed: {told['failures']}")
    _look_at_records(work_dir)
    if named and now.said.endswith("is lost: "):
        events = [event for machine in told["machines"] for event in machine["events"]]
        if not any(event.startswith("lost: ") for event in events):
            raise Wrong("what was said isn't among the machine's events")
    for then in now.later:
        then()
    _wait(lambda: not rig.left(), AFTER, "it left processes", 0.3)
    _wait(lambda: rig.states() == dict.fromkeys(rig.names, "free"), AFTER, f"not all are free: {rig.states()}", 1.0)
    if named and named[0] > SILENT + 15:
        raise Wrong(f"the fault was named after {named[0]:.1f} s")
    return named[0] if named else None


@contextlib.contextmanager
def _heard(now: Time, named: list[float]) -> Iterator[None]:
    """Listen to what the job says, while a block runs."""
    over = threading.Event()

    def listen() -> None:
        while not over.wait(0.05) and not named:
            if now.said and re.search(now.said, now.job.errors.read_text()):
                named.append(time.monotonic() - now.since)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield
    finally:
        time.sleep(0.2)
        over.set()
        thread.join()


def _look_at_records(work_dir: Path) -> None:
    from tvm_axe.records.database import find_databases, read_records, read_workloads
    from tvm_axe.records.trials import TRIALS as LOG
    from tvm_axe.records.trials import key_of

    (database,) = find_databases(work_dir)
    records = [record for record in read_records(database, read_workloads(database)) if record.trace[0]]
    keys = [key_of(record.entry) for record in records]
    lines = [json.loads(line)["record"] for line in (database / LOG).read_text().splitlines()]
    traces = {json.dumps(record.trace) for record in records}
    if not len(traces) == len(set(keys)) == len(keys) == TRIALS or sorted(lines) != sorted(keys):
        counts = f"{len(keys)} records, {len(traces)} schedules, {len(lines)} lines"
        raise Wrong(f"not each of {TRIALS} candidates is recorded once: {counts}")


def _enter(namespace: str) -> None:
    """Have this thread be in a network namespace."""
    with open(f"/run/netns/{namespace}", "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), "this thread can't enter the namespace")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextlib.contextmanager
def linked() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them.

    Raises
    ------
    OSError
        If there is no ``ip``, or this user may not.
    """
    token = secrets.token_hex(2)
    names = f"axe{token}a", f"axe{token}b"
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = [f"{name}v" for name in names]
        _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, host in zip(names, ends, HOSTS):
            _ip("netns", "exec", name, "ip", "addr", "add", f"{host}/24", "dev", end)
            for device in (end, "lo"):
                _ip("netns", "exec", name, "ip", "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                _ip("netns", "delete", name)


def check(name: str, times: int, cut: float, seed: int) -> dict[str, Any]:
    """The row of a fault: how often all was well, and how long it took to be named."""
    draw, row = random.Random(f"{seed} {name}"), {"name": name, "times": times, "well": 0}
    wrong: list[str] = []
    named: list[float] = []
    took: list[float] = []
    cores = sorted(os.sched_getaffinity(0))
    workers = {"first": str(cores[0]), "second": str(cores[-1])}
    with contextlib.ExitStack() as stack:
        try:
            namespaces = stack.enter_context(linked()) if name == "link" else None
        except OSError as error:
            return {**row, "skipped": str(error)}
        rig = stack.enter_context(contextlib.closing(Rig(workers, namespaces)))
        for number in range(times):
            start, work_dir = time.monotonic(), rig.folder / f"work{number}"
            try:
                after = once(rig, FAULTS[name], draw, cut, work_dir)
            except Exception as error:  # whatever it is, the others are to be tried too
                said = str(error) if isinstance(error, Wrong) else traceback.format_exc()
                wrong.append(f"time {number + 1}: {said}")
                print(f"check_fleet: {name}, time {number + 1}: {said}", file=sys.stderr, flush=True)
                rig.close()
                rig = stack.enter_context(contextlib.closing(Rig(workers, namespaces)))
            else:
                row["well"] += 1
                named += [] if after is None else [after]
                took.append(time.monotonic() - start)
                told = "not named" if after is None else f"named within {after:.1f} s"
                print(f"check_fleet: {name}, time {number + 1}: well, {told}", file=sys.stderr, flush=True)
    longest = {"named": len(named), "longest_s": max(named, default=None), "took_s": max(took, default=None)}
    return {**row, **longest, "wrong": wrong}


def throughput(trials: int, seed: int) -> dict[str, Any]:
    """Candidates a second with one worker on a core and with two on a core each, and their best."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    rates, best = [], []
    for names in ({"first": str(first)}, {"first": str(first), "second": str(second)}):
        with contextlib.closing(Rig(names)) as rig:
            started = rig.start_job(rig.folder / "work", seed, trials, len(names))
            _wait(lambda: started.process.poll() is not None, 10 * LONGEST, "the job didn't finish")  # noqa: B023
            told = json.loads(started.out.read_text().splitlines()[-1])
            rates.append(trials / (_measured_until(rig.folder / "work") - told["began"] - told["search"]))
            best.append(told["best_ms"])
    return {"name": "throughput", "one": rates[0], "two": rates[1], "ratio": rates[1] / rates[0], "best_ms": best}


def _measured_until(work_dir: Path) -> float:
    import datetime

    from tvm_axe.records.database import find_databases
    from tvm_axe.records.trials import read_trials

    (database,) = find_databases(work_dir)
    return max(datetime.datetime.fromisoformat(trial.at).timestamp() for trial in read_trials(database))


def _shown(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return f"{row['name']:<10} skipped: {row['skipped']}"
    if row["name"] == "throughput":
        best = " and ".join(f"{ms:.4f} ms" for ms in row["best_ms"])
        return f"throughput {row['one']:.2f} and {row['two']:.2f} candidates a second, ratio {row['ratio']:.2f}; {best}"
    longest = "-" if row["longest_s"] is None else f"{row['longest_s']:.1f} s"
    return f"{row['name']:<10} {row['well']:>3} of {row['times']} well; named {row['named']} times, within {longest}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print a line for each fault or JSON, and give 1 if anything was wrong."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    if given[:1] == ["--as-worker"]:
        return worker(given[1:])
    if given[:1] == ["--as-job"]:
        job(json.loads(given[1]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="of each fault (default: %(default)s)")
    parser.add_argument("--only", choices=[*FAULTS, "throughput"], help="one of them alone")
    parser.add_argument("--cut", type=float, default=30.0, help="seconds without a link (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=64, help="of the throughput's jobs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the jobs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(given)
    rows = []
    for name in [options.only] if options.only else [*FAULTS, "throughput"]:
        is_fault = name in FAULTS
        rows.append(
            check(name, options.times, options.cut, options.seed)
            if is_fault
            else throughput(options.trials, options.seed)
        )
        if not options.json:
            print(_shown(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"rows": rows}))
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started ends with it
    sys.exit(main())
