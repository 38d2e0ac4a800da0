"""The tuner's choice for a program on a mesh, beside the choice of measuring every schedule of the same space.

    python scripts/bench_tune_mesh.py [--program demo] [--mesh tp=2] [--trials 32] [--rounds 15] [--json]

`axe.tune` measures what its model hopes of; the other side measures all, whatever the model hopes. Each begins with
nothing, in a work directory of its own, and tunes the local kernels of what it measures there, with as many trials for
a kernel on average. Both choose in the same way: the fastest few run again in turns, and of those that noise can't tell
apart the simplest is taken (`tvm_axe.meta.mesh.finals`). Then the two choices, each with its side's kernels, run in
turns with the next best of both on one set of devices, and every result is compared with the function's on one device.
A figure is the median over all rounds, with quartiles; ratio = peer_ms / ours_ms, ours being the tuner. A second row
has the time that each side took for its choice. Most of it is tuning kernels: fewer trials take less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.patterns import is_product
from tvm_axe.checking.reference import Reference
from tvm_axe.demo import block
from tvm_axe.executable import Executable
from tvm_axe.lower import lower
from tvm_axe.lower.parsing import parse_program
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.finals import chosen, run_finals
from tvm_axe.meta.mesh.kernels import KernelTuner
from tvm_axe.meta.mesh.model import ProgramModel
from tvm_axe.meta.mesh.moves import structure
from tvm_axe.meta.mesh.process import bench_for
from tvm_axe.meta.mesh.runner import MeshRunner
from tvm_axe.meta.mesh.space import program_space, program_workload
from tvm_axe.meta.mesh.strategy import Ranking
from tvm_axe.meta.search.job import kernel_tools
from tvm_axe.programs import PROGRAMS
from tvm_axe.records.database import FAILED_SECONDS, Database
from tvm_axe.records.folders import folder_for, target_name

TIMEOUT, SEED = 60.0, 0
NEXT_BEST, REPEAT, NAP = 2, 4, 0.05  # of each side beside its choice; runs of one in a round; seconds before them


@dataclass(frozen=True)
class Case:
    """A program on a mesh, and what its kernels are compiled for."""

    name: str
    func: tirx.PrimFunc
    mesh: axe.Mesh
    engine: str
    target: Target

    @property
    def mod(self) -> IRModule:
        """What its records are of."""
        return program_workload(self.func, self.mesh, self.engine)

    def database(self, work_dir: Path) -> Database:
        """Where `axe.tune` keeps its records."""
        return Database(folder_for(work_dir, self.target, str(self.func.attrs["global_symbol"]), self.mod))


@dataclass(frozen=True)
class Side:
    """What one way of searching came to: its choice first, then the next best, and what that took."""

    name: str
    work_dir: Path
    schedules: list[IRModule]
    measured: int
    seconds: float


def say(text: str) -> None:
    """Progress, apart from the results."""
    print(f"bench_tune_mesh: {text}", file=sys.stderr, flush=True)


def tuned(case: Case, work_dir: Path, trials: int) -> Side:
    """The tuner's."""
    options = {"trials": trials, "work_dir": work_dir, "seed": SEED, "progress": False, "engine": case.engine}
    result = axe.tune(case.func, mesh=case.mesh, target=case.target, **options)
    return Side("tuner", work_dir, best_few(case, work_dir), result.tasks[0].trials, result.seconds["total"])


def exhaustive(case: Case, work_dir: Path, trials: int) -> Side:
    """Measuring all."""
    start, database = time.monotonic(), case.database(work_dir)
    workload = database.commit_workload(case.mod)
    candidates = all_schedules(case)

    def commit(candidate: ms.MeasureCandidate, seconds: float | None) -> None:
        times = [FAILED_SECONDS if seconds is None else seconds]
        trace, infos = candidate.sch.trace, candidate.args_info
        database.commit_tuning_record(ms.database.TuningRecord(trace, workload, times, case.target, infos))

    with kernel_tools(case.target, work_dir, SEED) as tools:
        kernels = KernelTuner(Candidates(), tools, case.target, work_dir, trials, SEED)
        log = work_dir / target_name(case.target) / "logs" / "mesh.log"
        with MeshRunner(case.target, kernels, log, TIMEOUT, case.mod["main"]) as worker:
            as_it_is = worker.prepare(workload.mod)
            if as_it_is.failure is not None:
                raise SystemExit(f"bench_tune_mesh: the program as it is: {as_it_is.failure}")
            infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
            commit(ms.MeasureCandidate(s_tir.Schedule(workload.mod), infos), as_it_is.seconds)
            mods = [candidate.sch.mod for candidate in candidates]
            for candidate, measured in zip(candidates, worker.measure_all(mods)):
                commit(candidate, measured.seconds)
            run_finals(worker, database, workload.mod, case.target)
    return Side("exhaustive", work_dir, best_few(case, work_dir), len(candidates), time.monotonic() - start)


def all_schedules(case: Case) -> list[ms.MeasureCandidate]:
    """Every schedule of the space that the tuner searches."""
    strategy = Ranking(ProgramModel(), 1)
    context = _tvm.tune_context(case.mod, case.target, program_space(case.mod), strategy, "program", SEED + 1, 1, None)
    strategy.pre_tuning(1, 1, context.generate_design_space())
    return list(strategy.candidates)


def best_few(case: Case, work_dir: Path) -> list[IRModule]:
    """The choice that the records make, then the fastest others that were timed in turns."""
    database = case.database(work_dir)
    records = database.records(database.commit_workload(case.mod), case.target)
    choice = chosen(records)
    if choice is None:
        raise SystemExit(f"bench_tune_mesh: no schedule of {work_dir} could be run")
    last = {str(record.trace): record for record in records if str(record.trace) != str(choice.trace)}
    others = sorted((r for r in last.values() if len(r.run_secs) > 1), key=lambda r: float(r.run_secs[0]))
    return [record.as_measure_candidate().sch.mod for record in (choice, *others[:NEXT_BEST])]


def described(mod: IRModule, mesh: axe.Mesh) -> str:
    """A schedule's notation, into how many chunks it cuts, and the matmul's loop that each axis shares."""
    lowered = lower(mod["main"], mesh)
    chunks = max(stage.chunks for stage in lowered.stages)
    products = [b for b in parse_program(mod["main"], mesh).blocks() if is_product(b.realize.block)]
    shared = {axis: loop.loop_var.name.split("_")[0] for axis, loop in products[-1].device.items()} if products else {}
    text = f"{lowered.notation}, {chunks} chunks" if chunks > 1 else lowered.notation
    return ", ".join([text, *(f"{loop} on {axis}" for axis, loop in shared.items())])


def timers(case: Case, sides: list[Side], workers: Any) -> Iterator[tuple[tuple[str, int], Callable[[], list[float]]]]:
    """For each side's schedules by their rank, the choice's being 0, a function that times some runs."""
    bench = bench_for(case.mod, lower(case.mod["main"], case.mesh), case.target, sides[0].work_dir, case.mod["main"])
    expected = Reference(bench.origin)(bench.arrays)
    for side in sides:
        for rank, mod in enumerate(side.schedules):
            exe = axe.compile(mod["main"], case.mesh, target=case.target, work_dir=side.work_dir)
            arrays = [bench.arrays[name] for name in exe.inputs]
            results = exe.run(workers, *arrays)
            for name, got in zip(exe.outputs, results if isinstance(results, tuple) else (results,)):
                wrong = expected.fault(name, got)
                if wrong:
                    raise SystemExit(f"bench_tune_mesh: {side.name}, {exe.notation}: {name} {wrong}")

            def call(exe: Executable = exe, arrays: list[Any] = arrays) -> list[float]:
                return exe.time(workers, *arrays, repeat=REPEAT, warmup=1)

            yield (side.name, rank), call


def in_turns(case: Case, sides: list[Side], rounds: int) -> dict[tuple[str, int], list[float]]:
    """Seconds of all runs of each side's schedules."""
    with axe.launch(case.mesh, engine=case.engine) as workers:
        calls = dict(timers(case, sides, workers))
        seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
        for _ in range(rounds):
            for key, call in calls.items():
                time.sleep(NAP)  # what spins after its last job has stopped then
                seconds[key] += call()
    return seconds


def compare(case: Case, work_dir: Path, trials: int, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, and the lines that say more."""
    name = f"{case.name} on {case.mesh}"
    say(f"tuning {name}")
    ours = tuned(case, work_dir / "tuner", trials)
    say(f"{ours.measured} schedules in {ours.seconds:.0f} s; measuring all")
    theirs = exhaustive(case, work_dir / "exhaustive", trials)
    say(f"{theirs.measured} schedules in {theirs.seconds:.0f} s; timing the best of both in turns")
    seconds = in_turns(case, [ours, theirs], rounds)
    own, peer = (statistics.median(seconds[side.name, 0]) for side in (ours, theirs))
    choices = [described(side.schedules[0], case.mesh) for side in (ours, theirs)]
    return [
        row(f"{name}: {choices[0]}", own, f"exhaustive: {choices[1]}", peer),
        row(
            f"{name}: {ours.measured} measured", ours.seconds, f"exhaustive: {theirs.measured} measured", theirs.seconds
        ),
    ], [*listing(case, ours, seconds), *listing(case, theirs, seconds), verdict(ours, theirs, own, peer)]


def listing(case: Case, side: Side, seconds: dict[tuple[str, int], list[float]]) -> list[str]:
    """What a side chose and what comes next, with times."""
    lines = [f"{side.name}: measured {side.measured} schedules in {side.seconds:.0f} s"]
    for rank, mod in enumerate(side.schedules):
        low, median, high = (1e3 * s for s in statistics.quantiles(seconds[side.name, rank], n=4))
        label = f"next {rank}" if rank else "choice"
        lines.append(f"  {label}  {described(mod, case.mesh):<44} {median:9.3f} ms, quartiles {low:.3f} to {high:.3f}")
    return lines


def verdict(ours: Side, theirs: Side, own: float, peer: float) -> str:
    """Whether the choices are one schedule, and what the tuner's costs where they aren't."""
    if structure(s_tir.Schedule(ours.schedules[0])) == structure(s_tir.Schedule(theirs.schedules[0])):
        return "both chose the same schedule"
    times = f"{own / peer - 1:.1%} slower" if own > peer else f"{1 - own / peer:.1%} faster"
    return f"the choices differ: the tuner's is {times} than that of measuring all"


def row(name: str, ours: float, peer: str, theirs: float) -> dict[str, Any]:
    """A row of the result, from seconds."""
    return {"name": name, "ours_ms": ours * 1e3, "peer": peer, "peer_ms": theirs * 1e3, "ratio": theirs / ours}


def case_of(program: str, size: str, mesh: axe.Mesh, engine: str) -> Case:
    """The demo's block, or a program of `tvm_axe.programs`."""
    func = block.block if program == "demo" else PROGRAMS[program](mesh, size).func
    return Case(program, func, mesh, engine, resolve_target("llvm", threads=cores_per_device(mesh)))


def main() -> None:
    """Run and print the comparison, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="demo", choices=["demo", *PROGRAMS], help="(default: the demo's block)")
    parser.add_argument("--size", default="test", help="of a program other than the demo's (default: %(default)s)")
    parser.add_argument("--mesh", type=axe.Mesh.parse, default=block.mesh, help="(default: %(default)s)")
    parser.add_argument("--engine", default="processes", help="what the devices are (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=32, help="schedules for the tuner, and candidates for a kernel")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--work-dir", type=Path, help="an empty folder to leave the records in (default: a temporary)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.work_dir is not None and args.work_dir.exists() and any(args.work_dir.iterdir()):
        parser.error(f"--work-dir: {args.work_dir} isn't empty, and both sides begin with nothing")
    case = case_of(args.program, args.size, args.mesh, args.engine)
    with tempfile.TemporaryDirectory() as temporary:
        rows, lines = compare(case, args.work_dir or Path(temporary), args.trials, args.rounds)
    if args.json:
        print("\n".join(lines), file=sys.stderr)
        print(json.dumps({"rows": rows}))
        return
    print("\n".join(lines))
    for r in rows:
        print(f"{r['name']}  {r['ours_ms']:.3f} ms   {r['peer']}  {r['peer_ms']:.3f} ms   ratio {r['ratio']:.2f}")


if __name__ == "__main__":
    main()
