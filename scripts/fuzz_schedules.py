"""Random programs under random schedules on random meshes: what isn't refused must be right.

    python scripts/fuzz_schedules.py                          # 1000 cases on threads
    python scripts/fuzz_schedules.py --seed 4711 --count 1    # one of them again
    python scripts/fuzz_schedules.py --engine processes --count 2000 --processes 2
    python scripts/fuzz_schedules.py --mistake "push unseen"  # made in the package: it can fail (fuzz_injecting.py)
    python scripts/fuzz_schedules.py --delays                 # workers stumble, so that a missing barrier shows
    mpiexec -n 4 python scripts/fuzz_schedules.py --engine mpi --count 200

A case is drawn from its seed: a program (`fuzz_programs`, `fuzz_stages`), a mesh, declared layouts and a schedule
(`fuzz_scheduling`, `fuzz_actions`); a fifth begin where a primitive's rule decides (`fuzz_situations`). It ends right;
refused by lowering, with a reason; wrong under stock TVM, which is upstream's; or as a bug: wrong with annotations
ignored, wrong on the mesh, an error that isn't the package's (`fuzz_judging`). What primitives refuse while a schedule
is drawn is counted by itself. Of each kind of bug some cases are made as small as they can be, and printed. The exit
status is 0 if there is no bug. Judging is done in processes of its own, so that one that dies is the bug of the seed
that it was at; on the ranks of an MPI job rank 0 judges, on meshes of as many devices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

CRASHED = "crashed or hung"
SILENCE = 180.0
"""Seconds without a word from a process before it is taken for hung."""


@dataclass
class Record:
    """What became of a seed, as it is told from one process to another."""

    seed: int
    kind: str
    reason: str = ""
    detail: str = ""
    family: str = ""
    case: str = ""
    small: str = ""
    ours: list[str] = field(default_factory=list)
    upstream: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)


# ---- In a process that judges ----------------------------------------------------------------------------------------


def _judge_all(
    tell: Connection, seeds: Sequence[int], engine: str, delays: bool, minimize: int, mistake: str | None
) -> None:
    """Judge seeds and tell of each that it begins, then what became of it."""
    from fuzz_judging import Pool

    if delays:
        import fuzz_delays

        fuzz_delays.install()
    with contextlib.ExitStack() as made:
        if mistake is not None:
            from fuzz_mistakes import MISTAKES

            made.enter_context(MISTAKES[mistake].patch())
        pool = Pool(engine, timeout=20.0 if mistake is None else 3.0)
        seen: Counter[tuple[str, str]] = Counter()
        for seed in seeds:
            tell.send(seed)
            tell.send(_record(seed, None, pool, seen, minimize))
        tell.send(None)
        pool.close()


def _on_ranks(options: argparse.Namespace) -> Iterator[Record]:
    """Judge seeds on the ranks of the MPI job that this process is one of; comes back on rank 0 only."""
    from fuzz_judging import Pool
    from mpi4py import MPI

    devices = MPI.COMM_WORLD.Get_size()
    pool = Pool("mpi")
    pool.on((("x", devices),))  # on another rank, this serves rank 0 to its end
    seen: Counter[tuple[str, str]] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        yield _record(seed, devices, pool, seen, 0)  # after a fault, a job can only end
    pool.close()


def _record(seed: int, devices: int | None, pool: Any, seen: Counter[tuple[str, str]], minimize: int) -> Record:
    import fuzz_judging as judging
    from fuzz_actions import OURS
    from fuzz_scheduling import draw_case

    case, sch, refused = draw_case(seed, devices)
    record = Record(seed, judging.RIGHT, accepted=[action.primitive for action in case.actions])
    verdict = None
    for refusal in refused:
        verdict = judging.refused_raw(refusal.action, refusal.error)
        if verdict is not None:
            case = type(case)(case.program, case.mesh, case.layouts, (*case.actions, refusal.action))
            break
        told = record.ours if refusal.action.primitive in OURS else record.upstream
        told.append(judging.stripped(refusal.error) if told is record.ours else refusal.action.primitive)
    if verdict is None:
        verdict = judging.judge(case, sch, pool)
    record.kind, record.reason, record.detail = verdict.kind, verdict.reason, verdict.detail
    if verdict.kind in judging.BUGS:
        record.case = judging.described(case)
        alike = verdict.kind, verdict.reason or str(sorted({action.primitive for action in case.actions}))
        seen[alike] += 1
        if seen[alike] <= minimize:
            small, last = judging.minimized(case, verdict, lambda smaller: judging.judged_anew(smaller, pool))
            record.small, record.detail = judging.described(small), last.detail
            record.family = judging.family(small, last)
    return record


# ---- In the process that asks ----------------------------------------------------------------------------------------


class _Child:
    """A process that judges its share of the seeds; one that dies or hangs is replaced behind the seed it was at."""

    def __init__(self, seeds: Sequence[int], options: argparse.Namespace) -> None:
        self.seeds, self.options = list(seeds), options
        self.done = False
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.ear, mouth = context.Pipe(duplex=False)
        options = self.options
        arguments = (mouth, self.seeds, options.engine, options.delays, options.minimize, options.mistake)
        self.process = context.Process(target=_judge_all, args=arguments)
        self.process.start()
        mouth.close()
        self.at: int | None = None
        self.heard = time.monotonic()

    def hear(self) -> Record | None:
        """The next record, if there is one."""
        try:
            said = self.ear.recv()
        except (EOFError, ConnectionResetError):
            return self._lost("ended")
        self.heard = time.monotonic()
        if said is None:
            self.done = True
            self.process.join(30)
            return None
        if isinstance(said, int):
            self.at = said
            return None
        self.seeds = self.seeds[self.seeds.index(said.seed) + 1 :]
        return said

    def check(self) -> Record | None:
        """A record of a hang, if there is one."""
        if not self.done and time.monotonic() - self.heard > SILENCE:
            self.process.kill()
            return self._lost(f"said nothing for {SILENCE:g} s")
        return None

    def _lost(self, how: str) -> Record:
        self.process.join(30)
        seed = self.seeds[0] if self.at is None else self.at
        code = self.process.exitcode
        self.seeds = self.seeds[self.seeds.index(seed) + 1 :]
        if self.seeds:
            self._start()
        else:
            self.done = True
        return Record(seed, CRASHED, how, f"the process {how}; its exit status is {code}")


def records(options: argparse.Namespace) -> Iterator[Record]:
    """What became of each seed, as it becomes known."""
    seeds = range(options.seed, options.seed + options.count)
    children = [_Child(seeds[i :: options.processes], options) for i in range(min(options.processes, len(seeds)))]
    try:
        while not all(child.done for child in children):
            ready = wait([child.ear for child in children if not child.done], timeout=5)
            for child in children:
                if not child.done:
                    found = child.hear() if child.ear in ready else child.check()
                    if found is not None:
                        yield found
    finally:
        for child in children:
            if child.process.is_alive():
                child.process.terminate()


def crash(record: Record, engine: str) -> Record:
    """The record of a seed that a process died or hung at, with the smallest case that does so by itself."""
    import fuzz_judging as judging
    from fuzz_scheduling import draw_case

    case, _, refused = draw_case(record.seed)
    broken = [refusal.action for refusal in refused if judging.refused_raw(refusal.action, refusal.error) is not None]
    case = replace(case, actions=(*case.actions, *broken[:1]))
    record.case = judging.described(case)
    case, verdict = judging.judged_apart(case, engine)
    if verdict.kind not in judging.BUGS:
        record.detail += "; not by itself"
        return record
    small, last = judging.minimized(case, verdict, lambda smaller: judging.judged_apart(smaller, engine), 180)
    record.small, record.detail, record.family = judging.described(small), last.detail, judging.family(small, last)
    return record


def _table(title: str, counts: Counter[str], most: int = 40) -> None:
    if counts:
        print(f"\n{title}")
        for text, count in counts.most_common(most):
            print(f"{count:7}  {text}")


def report(found: Sequence[Record], seconds: float) -> int:
    """Print what became of all of them; returns how many bugs there are."""
    from fuzz_judging import BUGS, REFUSED

    kinds = Counter(record.kind for record in found)
    print(f"{len(found)} cases in {seconds:.0f} s")
    _table("outcomes", kinds)
    _table("refused by lowering", Counter(record.reason for record in found if record.kind == REFUSED))
    _table("refused by a primitive of the package", Counter(text for record in found for text in record.ours))
    _table("refused by a primitive of upstream's", Counter(text for record in found for text in record.upstream))
    _table("accepted", Counter(text for record in found for text in record.accepted))
    families: defaultdict[str, list[Record]] = defaultdict(list)
    for record in found:
        if record.kind in BUGS:
            families[record.family or f"{record.kind}: {record.reason}"].append(record)
    for name, members in sorted(families.items(), key=lambda item: -len(item[1])):
        shown = min(members, key=lambda record: len(record.small or record.case))
        print(f"\n==== {len(members)}x {name}\nseeds {', '.join(str(record.seed) for record in members[:20])}")
        print(shown.small or shown.case)
        print("->", *shown.detail.strip().splitlines()[-4:], sep="\n   ")
    return sum(kinds[kind] for kind in BUGS)


def main() -> int:
    """Draw and judge; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument(
        "--seconds", type=float, help="judge no more after so long, and say what became of those judged"
    )
    parser.add_argument("--engine", choices=("threads", "processes", "mpi"), default="threads")
    parser.add_argument("--delays", action="store_true", help="random sleeps round every stage and barrier")
    parser.add_argument("--processes", type=int, default=1, help="processes that judge")
    parser.add_argument("--minimize", type=int, default=3, help="bugs of a kind that are made small")
    parser.add_argument("--mistake", help="one of fuzz_mistakes.MISTAKES, which is made in the package (threads only)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON a seed, and no tables")
    options = parser.parse_args()
    if options.mistake is not None:
        from fuzz_mistakes import MISTAKES

        if options.mistake not in MISTAKES or options.engine != "threads":
            parser.error(f"--mistake is one of {', '.join(MISTAKES)}, and met by workers on threads alone")
    if options.seconds is not None and options.engine == "mpi":
        parser.error("--seconds is for threads and processes: the ranks of a job end together")
    start = time.monotonic()
    found = []
    crashes = 0
    for record in _on_ranks(options) if options.engine == "mpi" else records(options):
        if record.kind == CRASHED:
            crashes += 1
            record = crash(record, options.engine) if crashes <= options.minimize else record
        found.append(record)
        if options.json:
            print(json.dumps(asdict(record)), flush=True)
        elif len(found) % 500 == 0:
            print(
                f"{len(found)} of {options.count} after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True
            )
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            break
    if options.json:
        from fuzz_judging import BUGS

        return int(any(record.kind in BUGS for record in found))
    return int(report(found, time.monotonic() - start) > 0)


if __name__ == "__main__":
    sys.exit(main())
