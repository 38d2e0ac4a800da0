"""`tvm-axe stream`: streaming programs.

They need packages that the rest of the command line does without.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from tvm_axe.cli.command import Command, Group, positive
from tvm_axe.errors import InputError

__all__ = ["COMMAND"]


def _add_no_arguments(parser: argparse.ArgumentParser) -> None:
    """`list` takes none."""


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="as `list` names it")
    parser.add_argument(
        "--model",
        default="small",
        help="small, mixtral or qwen; the two real ones are simulated without values (default: %(default)s)",
    )
    parser.add_argument("--batch", type=positive, default=16, help="tokens or requests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and the arrays (default: %(default)s)")
    parser.add_argument("--max-cycles", type=positive, metavar="N", help="give up after so many cycles")
    parser.add_argument("--units", action="store_true", help="say what each unit did, too")
    parser.add_argument("--trace", metavar="T.json", help="what each unit did when, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", help="where other moe_routing/, kv_traces/ and published/ are than the package's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _check_packages() -> None:
    """Say what is missing, if something is."""
    if find_spec("sympy") is None:
        raise InputError("tvm-axe stream needs sympy: pip install tvm-axe[stream]")


def _list(args: argparse.Namespace) -> None:
    """`tvm-axe stream list`"""
    _check_packages()
    from tvm_axe.stream.programs.samples import PROGRAMS

    for name, meaning in PROGRAMS.items():
        print(f"{name:24}{meaning}")


def _run(args: argparse.Namespace) -> int:
    """`tvm-axe stream run`"""
    _check_packages()
    from tvm_axe.stream.programs.samples import MODELS, SMALL, make_sample

    if args.model not in MODELS:
        raise InputError(f"--model must be one of {', '.join(MODELS)}, not {args.model}")
    model = MODELS[args.model]
    sample = make_sample(args.name, model, args.batch, args.seed)
    report = sample.run(values=model is SMALL, trace=args.trace is not None, max_cycles=args.max_cycles)
    error = sample.error(report) if model is SMALL else None
    if args.trace is not None:
        report.save_trace(args.trace)
    if args.json:
        found = {
            "program": args.name,
            "model": args.model,
            "batch": args.batch,
            "seed": args.seed,
            "relative_error": error,
            "cycles": report.cycles,
            "flops": report.flops,
            "utilization": report.utilization,
            "read_bytes": report.read,
            "written_bytes": report.written,
            "tokens": report.tokens,
        }
        print(json.dumps(found))
    else:
        print(report if args.units else str(report).splitlines()[0])
        if error is not None:
            print(f"relative error beside numpy in float64: {error:.1e}")
    return 0 if error is None or error < 1e-4 else 1


def _reproduce(args: argparse.Namespace) -> None:
    """`tvm-axe stream reproduce`"""
    _check_packages()
    from tvm_axe.stream.published import DATA
    from tvm_axe.stream.reproduce import reproduce

    found = reproduce(DATA if args.data is None else Path(args.data))
    print(found.json() if args.json else found.text())


COMMAND = Group(
    "stream",
    "streaming tensor programs, computed and simulated",
    (
        Command("list", "the programs that come with the package", _add_no_arguments, _list),
        Command("run", "run a program on made-up requests, beside numpy", _add_run_arguments, _run),
        Command("reproduce", "simulate the published results again", _add_reproduce_arguments, _reproduce),
    ),
)
