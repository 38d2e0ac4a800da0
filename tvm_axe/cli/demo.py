"""`tvm-axe demo`: a tensor-parallel MLP block beside numpy."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tvm_axe.cli.command import Command

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _demo(args: argparse.Namespace) -> None:
    """Print the report to stdout; progress goes to stderr."""
    from tvm_axe import demo
    from tvm_axe.demo import block

    report = demo.run(demo.TRIALS, demo.WORK_DIR)
    if args.json:
        print(json.dumps(asdict(report)))
        return
    print(f"out = relu(X W + b) + residual; X {block.TOKENS} x {block.INNER}, W {block.INNER} x {block.OUTER}")
    print(f"float32, {block.mesh}, one process a device\n")
    print(report.table())


COMMAND = Command("demo", "a tensor-parallel MLP block on two workers, beside numpy", _add_arguments, _demo)
