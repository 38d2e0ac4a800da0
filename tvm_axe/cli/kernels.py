"""`tvm-axe kernels`: what tile kernels there are, or each of them beside numpy in float64."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tvm_axe.cli.command import Command
from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from tvm.target import Target

    from tvm_axe.tile.kernels.check import Row
    from tvm_axe.tile.kernels.kernel import Kernel

__all__ = ["COMMAND"]

TARGETS = ("llvm", "cuda")
"""What ``--target`` takes."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all)")
    parser.add_argument("--check", action="store_true", help="run each over a set of shapes, beside numpy in float64")
    parser.add_argument("--target", default="llvm", help="llvm, for this CPU, or cuda (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="draws the data of an earlier check again")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _run(args: argparse.Namespace) -> int:
    """List the kernels, or check them; progress and faults go to stderr."""
    from tvm_axe.machines import resolve_target
    from tvm_axe.tile.kernels.registry import KERNELS

    kernels = [_kernel(name) for name in args.names or KERNELS]
    if args.target not in TARGETS:
        raise InputError(f"--target is one of {', '.join(TARGETS)}, got {args.target!r}")
    resolved = resolve_target(args.target)
    if args.check:
        return _check(kernels, resolved, args.seed, args.json)
    if args.json:
        print(json.dumps({"kernels": [_listed(kernel, resolved) for kernel in kernels]}))
    else:
        print("\n\n".join(_paragraph(kernel, resolved) for kernel in kernels))
    return 0


def _check(kernels: Sequence[Kernel], target: Target, seed: int | None, as_json: bool) -> int:
    """Run each kernel over its shapes; exit code 1 if one is wrong."""
    import numpy as np
    import tvm

    from tvm_axe.machines import backend_of
    from tvm_axe.tile.kernels.check import run

    device = backend_of(target).device
    if not tvm.runtime.device(device).exist:
        raise InputError(f"--target {device} checks kernels on a GPU, and this machine has none")
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    print(f"kernels: data from seed {seed}", file=sys.stderr)
    rows = []
    for row, fault in run(kernels, target, seed):
        rows.append(row)
        if not as_json:
            print(_line(row), flush=True)
        if fault:
            print(f"kernels: {row.kernel} {row.shape} {row.dtype}: {fault}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


def _kernel(name: str) -> Kernel:
    from tvm_axe.tile.kernels.registry import KERNELS

    if name not in KERNELS:
        raise InputError(f"no kernel {name}; there are {', '.join(KERNELS)}")
    return KERNELS[name]


def _listed(kernel: Kernel, target: Target) -> dict[str, object]:
    problem = kernel.cases[0]
    parameters = {name: [*values] for name, values in kernel.parameters(target, problem).items()}
    return {"name": kernel.name, "summary": kernel.summary, "problem": dict(problem), "parameters": parameters}


def _paragraph(kernel: Kernel, target: Target) -> str:
    """The kernel with its parameters for its first case; the first value of each is the default there."""
    from tvm_axe.tile.kernels.kernel import described

    problem = kernel.cases[0]
    lines = [f"{kernel.name}: {kernel.summary}", f"  for {described(problem)} {problem['dtype']}"]
    for name, values in kernel.parameters(target, problem).items():
        others = ", or " * (len(values) > 1) + ", ".join(map(str, values[1:]))
        lines.append(f"    {name:<10} {values[0]}{others}")
    return "\n".join(lines)


def _line(row: Row) -> str:
    error = "NaN" if row.relative_error is None else f"{row.relative_error:.1e}"
    return f"{'ok ' if row.ok else 'BAD'} {row.kernel:<18} {error:>8}  {row.dtype:<14} {row.shape}"


COMMAND = Command("kernels", "the tile kernels: their parameters, or each of them beside numpy", _add_arguments, _run)
