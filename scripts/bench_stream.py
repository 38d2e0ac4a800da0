"""Time the simulator of streaming programs: tokens a second as programs grow, and the programs of the package.

    python scripts/bench_stream.py [--json] [--tokens N]

The first rows are a chain of functions; its rate should not fall as it grows. The others are the package's programs at
the sizes of real models, where channels hold one or two tokens, so that units take turns at nearly every one. A row is
the median of several runs without values in one process, and what it takes to build the program.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tvm_axe.stream import Accelerator, StreamProgram, functions
from tvm_axe.stream.programs.samples import MODELS, PROGRAMS, make_sample
from tvm_axe.stream.report import Report

STAGES = 8
BATCH = 64


def chain(elements: int) -> Callable[[], Report]:
    """Return a run of so many tiles through a chain of functions."""
    program = StreamProgram("chain")
    stream = program.load(program.tensor("x", elements, 8), (1, 8)).flatten()
    for _ in range(STAGES):
        stream = stream.map(functions.exp())
    stream.discard()
    return partial(program.run, accelerator=Accelerator(), values=False)


def sample(name: str, model: str) -> Callable[[], Report]:
    """Return a run of a program of the package."""
    return partial(make_sample(name, MODELS[model], BATCH, seed=0).run, values=False)


def row(name: str, build: Callable[[], Callable[[], Report]], repeat: int) -> dict[str, Any]:
    """Time building a program and running it."""
    start = time.perf_counter()
    run = build()
    built = time.perf_counter() - start
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        report = run()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds)
    return {
        "name": name,
        "build_s": built,
        "wall_s": median,
        "tokens": report.tokens,
        "tokens_per_s": report.tokens / median,
        "cycles": report.cycles,
    }


def measure(most: int) -> list[dict[str, Any]]:
    rows = []
    for tokens in (100_000, 1_000_000, 10_000_000):
        if tokens <= most:
            # Each element is a token of the load, of flattening and of each function, but for what is thrown away.
            elements = tokens // (STAGES + 2)
            rows.append(row(f"chain of {STAGES} functions", partial(chain, elements), 1 if tokens > 1_000_000 else 5))
    for model in ("mixtral", "qwen"):
        for name in PROGRAMS:
            rows.append(row(f"{name}, {model}", partial(sample, name, model), 3))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the simulator of streaming programs.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--tokens", type=int, default=10_000_000, help="of the largest chain (default: %(default)s, some 10 s)"
    )
    args = parser.parse_args()
    rows = measure(args.tokens)
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'program':34}{'tokens':>12}{'build s':>9}{'run s':>9}{'tokens/s':>12}{'cycles':>14}")
    for each in rows:
        print(
            f"{each['name']:34}{each['tokens']:12,}{each['build_s']:9.3f}{each['wall_s']:9.3f}"
            f"{each['tokens_per_s']:12,.0f}{each['cycles']:14,}"
        )


if __name__ == "__main__":
    main()
