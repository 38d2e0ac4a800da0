"""`tvm-axe programs`: every distributed program under every schedule, beside numpy."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from tvm_axe.cli.command import Command
from tvm_axe.cli.given import add_engine_argument, engine_options

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_argument(parser, gpus=True)
    parser.add_argument(
        "--mesh", metavar="AXIS=SIZE,...", help="devices by mesh axis; default: two on each axis that a program uses"
    )
    parser.add_argument("--programs", metavar="NAME,...", help="which ones (default: all)")
    parser.add_argument(
        "--size",
        choices=("test", "uneven", "bench"),
        default="test",
        help="how large the arrays are: test divides by up to four devices, uneven doesn't, bench is worth timing "
        "(default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _run(args: argparse.Namespace) -> int:
    """Print the report to stdout; progress and faults go to stderr."""
    from tvm_axe.layout import Mesh
    from tvm_axe.programs.report import chosen, run

    mesh = None if args.mesh is None else Mesh.parse(args.mesh)
    names = None if args.programs is None else [name.strip() for name in args.programs.split(",")]
    report = run(chosen(mesh, names), args.engine, args.size, engine_options(args))
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in report.rows]}))
    else:
        print(report.table())
    for fault in report.faults:
        print(f"programs: {fault}", file=sys.stderr, flush=True)
    return 1 if report.faults else 0


COMMAND = Command("programs", "every distributed program under every schedule, beside numpy", _add_arguments, _run)
