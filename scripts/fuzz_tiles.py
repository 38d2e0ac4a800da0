"""Draws random tile programs, runs each on a target beside the interpreter, and counts what is right.

    python scripts/fuzz_tiles.py --count 1000                       # on this machine's CPU
    python scripts/fuzz_tiles.py --target cuda:sm_90a --count 200   # on a GPU; without one they are compiled alone
    python scripts/fuzz_tiles.py --mesh 3 --count 200               # programs of three devices, by workers
    compute-sanitizer python scripts/fuzz_tiles.py --here --target cuda --seed 7 --count 1

The programs are those of `tests/tile/generator.py`, of integers in every type, so that each bit counts; their outputs
are poisoned, and of every second program some tensors have strides. With ``--mesh`` they are those of
`tests/tile/generator_mesh.py`: devices that store to each other's slabs and meet in flags, run by CPU workers beside
the interpreter of all devices. They are run by child processes, so that one that ends its process, or never ends, is
counted with its seed. The exit code is 1 if any is wrong, ends its process or leaves by another error than a refusal.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "tile"))

BATCH = 20
"""Programs that a child process runs before another takes over."""

SIZES = ("small", "tiled", "wide")


def outcome(seed: int, target: str, store: object, runs: bool) -> tuple[str, str]:
    """What became of a program: "right", "compiled", "refused", "inexact" or "wrong", and why."""
    from interpreter import TooLarge
    from judging import drawn, judge, wanted

    from tvm_axe import tile
    from tvm_axe.errors import TileError

    made = drawn(seed, SIZES[seed % 3], strided=seed % 2 == 1)
    try:
        program = made.program
        expected = wanted(made, program)
    except TooLarge:
        return "inexact", ""
    except TileError as error:
        return "wrong", f"the drawn program is refused by every target: {error}\n{made.source}"
    try:
        executable = tile.compile(program, target, store)
    except TileError as error:
        return "refused", str(error)
    except Exception:
        return "wrong", f"{traceback.format_exc()}\n{made.source}"
    if not runs:
        return "compiled", ""
    try:
        judge(executable, made, expected)
    except Exception as error:
        return "wrong", f"{error}\n{made.source}"
    return "right", ""


def outcome_on_mesh(seed: int, workers: object) -> tuple[str, str]:
    """The same of a program that all devices of a mesh run together."""
    from generator_mesh import drawn, judge

    made = drawn(seed, workers.mesh.size)
    try:
        judge(made, workers)
    except Exception:
        return "wrong", f"{traceback.format_exc()}\n{made.source}"
    return "right", ""


def here(seeds: range, target: str, devices: int = 0) -> Iterator[tuple[int, str, str]]:
    """(seed, what became of it, why) of each program, in this process; first (seed, "begun", "")."""
    import tvm

    from tvm_axe.errors import TileWarning
    from tvm_axe.machines.cache import Cache

    warnings.simplefilter("ignore", TileWarning)
    if devices:
        from tvm_axe.collective import launch
        from tvm_axe.layout import Mesh

        with launch(Mesh({"tp": devices}), engine="threads") as workers:
            for seed in seeds:
                yield seed, "begun", ""
                yield seed, *outcome_on_mesh(seed, workers)
        return
    runs = "cuda" not in target or bool(tvm.runtime.device("cuda").exist)
    with tempfile.TemporaryDirectory() as folder:
        store = Cache(Path(folder))
        for seed in seeds:
            yield seed, "begun", ""
            yield seed, *outcome(seed, target, store, runs)


def lines_of(child: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """A child's lines as they come; None behind the last."""
    found: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            found.put(line)
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def apart(seeds: range, target: str, limit: float, devices: int = 0) -> Iterator[tuple[int, str, str]]:
    """The same by child processes; one that dies, or says nothing for `limit` seconds, is followed by another."""
    at = seeds.start
    while at < seeds.stop:
        command = [sys.executable, __file__, "--here", "--report", "--target", target]
        command += ["--seed", str(at), "--count", str(seeds.stop - at)]
        command += ["--mesh", str(devices)] if devices else []
        with tempfile.TemporaryFile("w+") as said:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
            lines, begun, hangs = lines_of(child), at, False
            while True:
                try:
                    line = lines.get(timeout=limit)
                except queue.Empty:
                    hangs = True
                    child.kill()
                    break
                if line is None:
                    break
                if not line.startswith("{"):
                    continue
                seed, kind, why = json.loads(line)["case"]
                if kind == "begun":
                    begun = seed
                else:
                    yield seed, kind, why
                    at = seed + 1
            code = child.wait()
            if at >= seeds.stop:
                return
            said.seek(0)
            end = f"no answer in {limit:g} s" if hangs else _end(code)
            yield begun, "ended", f"{end}\n{said.read()[-2000:]}"
            at = begun + 1


def _end(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def fuzz(seeds: range, target: str, processes: int, limit: float, devices: int = 0) -> Iterator[tuple[int, str, str]]:
    """All outcomes, as they come."""
    todo: queue.Queue[range] = queue.Queue()
    for first in range(seeds.start, seeds.stop, BATCH):
        todo.put(range(first, min(first + BATCH, seeds.stop)))
    done: queue.Queue[tuple[int, str, str] | None] = queue.Queue()

    def work() -> None:
        while True:
            try:
                batch = todo.get_nowait()
            except queue.Empty:
                break
            for case in apart(batch, target, limit, devices):
                done.put(case)
        done.put(None)

    for _ in range(processes):
        threading.Thread(target=work, daemon=True).start()
    ended = 0
    while ended < processes:
        case = done.get()
        if case is None:
            ended += 1
        else:
            yield case


def reason(message: str) -> str:
    """A refusal without its names and numbers, to count alike ones together."""
    return re.sub(r"\b\w*\d+\w*\b", "#", message.splitlines()[0])[:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="the first program's")
    parser.add_argument("--count", type=int, default=100, help="how many programs")
    parser.add_argument("--target", default="llvm", help="llvm, cuda, cuda:sm_80 or the like")
    parser.add_argument("--mesh", type=int, default=0, help="devices of programs that run on CPU workers together")
    parser.add_argument("--processes", type=int, default=1, help="child processes at once")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a silent child is ended")
    parser.add_argument("--here", action="store_true", help="run in this process, as compute-sanitizer needs it")
    parser.add_argument("--report", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.mesh and arguments.target != "llvm":
        parser.error("--mesh runs on CPU workers: leave --target out")
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    if arguments.report:
        for case in here(seeds, arguments.target, arguments.mesh):
            print(json.dumps({"case": case}), flush=True)
        return 0
    counts, refusals, bad = Counter[str](), Counter[str](), []
    cases = (
        here(seeds, arguments.target, arguments.mesh)
        if arguments.here
        else fuzz(seeds, arguments.target, arguments.processes, arguments.limit, arguments.mesh)
    )
    for seed, kind, why in cases:
        if kind == "begun":
            continue
        counts[kind] += 1
        if kind == "refused":
            refusals[reason(why)] += 1
        if kind in ("wrong", "ended"):
            bad.append(seed)
            print(f"seed {seed}: {kind}: {why}\n", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    for why, count in refusals.most_common():
        print(f"  {count} refused: {why}")
    if bad:
        print(f"wrong or ended: seeds {', '.join(map(str, sorted(bad)))}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
