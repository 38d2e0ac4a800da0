"""Tile kernels on a CUDA GPU with the parameters that they have by default, beside the best that a search finds.

    python scripts/bench_defaults_gpu.py [--only TEXT] [--candidates 12] [--rounds 9] [--part K/N] [--json]
    python scripts/bench_defaults_gpu.py --compile       only compile, which needs no GPU and fills the cache

The kernels and problems are those of bench_gpu.py. Candidates for the parameters are drawn by a fixed seed: one half
differ from the defaults in one parameter, the others in any. Those that the target refuses are left out; the others are
compiled by as many processes as there are cores, checked on the same inputs with their outputs poisoned, and run in
turns, by bursts from CUDA graphs. The fastest then runs beside the defaults in turns once more, rested: a ratio is its
time over theirs, and 1 where nothing was faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from bench_gpu import PRODUCT, Bench, Case, cases
from timing_gpu import Series, calls_of, captured, in_turns, part, size
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines.target import resolve_target

Parameters = Mapping[str, Any]

SEED = 0

SCREENED = 5  # measurements of each candidate before the fastest is measured again


def problems(target: Target) -> list[Case]:
    """The cases of bench_gpu.py, each problem once."""
    seen: set[tuple[str, str]] = set()
    found = []
    for case in cases(target):
        key = case.kernel.name, json.dumps(case.problem)
        if key not in seen:
            seen.add(key)
            found.append(case)
    return found


def candidates(case: Case, target: Target, count: int) -> list[Parameters]:
    """The defaults, and up to `count` others of what the kernel says is worth trying."""
    space = case.kernel.parameters(target, case.problem)
    chosen = {name: values[0] for name, values in space.items()}
    single = [{**chosen, name: value} for name, values in space.items() for value in values[1:]]
    rng = random.Random(SEED)
    found: list[Parameters] = [chosen, *rng.sample(single, min(len(single), count // 2))]
    for _ in range(20 * count):
        if len(found) == 1 + count:
            break
        drawn = {name: rng.choice(values) for name, values in space.items()}
        if drawn not in found:
            found.append(drawn)
    return found


def refused(number: int, parameters: Parameters) -> str | None:
    """Compile a candidate for the problem of that number; why the target refuses it, if it does."""
    target = resolve_target("cuda")
    try:
        Bench(problems(target)[number], target, parameters)
    except TileError as error:
        return str(error)
    return None


def compiled(
    chosen: Mapping[int, Case], target: Target, count: int
) -> Iterator[tuple[Case, list[Parameters], list[str | None]]]:
    """Each case, by its number among all, with its candidates, the defaults first, and why they were refused."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        asked = {number: candidates(case, target, count) for number, case in chosen.items()}
        told = {number: [pool.submit(refused, number, each) for each in given] for number, given in asked.items()}
        for number, given in asked.items():
            yield chosen[number], given, [answer.result() for answer in told[number]]


def measured(
    case: Case, target: Target, given: Sequence[Parameters], why: Sequence[str | None], rounds: int
) -> dict[str, Any]:
    """The row of a case."""
    if why[0] is not None:
        raise TileError(why[0])
    able = [parameters for parameters, refusal in zip(given, why) if refusal is None]
    benches = [Bench(case, target, parameters) for parameters in able]
    first = benches[0].spec.drawn(SEED)
    sets = [first]
    if 4 * size(first) < 3e10:
        sets += [benches[0].spec.drawn(seed) for seed in range(1, 4)]
    calls = calls_of(case.work / (8e14 if case.unit == PRODUCT else 4e12))
    graphs, errors = [], []
    for bench in benches:
        own = [bench.spec.beside(each) for each in sets]
        bench.run(own[0])
        errors.append(bench.spec.error(own[0]))
        graphs.append(captured({"it": bench.run}, own, calls)["it"])
    screened = in_turns({str(n): graph.timed for n, graph in enumerate(graphs)}, SCREENED, 0.0, 0.0)
    best = min(range(len(graphs)), key=lambda n: screened[str(n)])
    ms = in_turns({str(n): graphs[n].timed for n in {0, best}}, rounds, 0.1, 0.0)
    changed = {name: value for name, value in able[best].items() if value != able[0][name]}
    peer_ms = min(ms[str(best)], ms["0"])
    return {
        "name": case.name, "kernel": case.kernel.name, "ours_ms": ms["0"], "peer": "the best of parameters",
        "peer_ms": peer_ms, "ratio": peer_ms / ms["0"], "error": max(errors), "tried": len(able) - 1,
        "defaults": dict(able[0]), "changed": changed if peer_ms < ms["0"] else {},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name or kernel has this text")
    parser.add_argument("--candidates", type=int, default=12, help="drawn for each (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each (default: %(default)s)")
    parser.add_argument("--part", type=part, default="0/1", metavar="K/N", help="every N-th case from the K-th")
    parser.add_argument("--compile", action="store_true", help="compile only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    target = resolve_target("cuda")
    named = {n: case for n, case in enumerate(problems(target)) if args.only in f"{case.name} {case.kernel.name}"}
    chosen = dict(list(named.items())[args.part])
    series = Series(args.json)
    for case, given, why in compiled(chosen, target, args.candidates):
        if args.compile:
            print(f"{case.name}: {why.count(None)} of {len(why)} compiled", flush=True)
            continue
        with series.case(case.name):
            row = measured(case, target, given, why, args.rounds)
            changed = " ".join(f"{name}={value}" for name, value in row["changed"].items())
            series.add(
                row,
                f"{row['name']:<40} {row['ours_ms'] * 1e3:9.2f} us, best of {1 + row['tried']:>2} "
                f"{row['peer_ms'] * 1e3:9.2f} us, ratio {row['ratio']:.3f}, {row['error']:.0e} {changed}".rstrip(),
            )
    series.end()


if __name__ == "__main__":
    main()
