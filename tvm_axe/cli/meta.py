"""`tvm-axe meta`: the cost model on the command line.

This module is outside of `tvm_axe.meta`, which imports the compiler.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tvm_axe.errors import InputError


def add_meta_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `meta evaluate` to a parser's commands.

    Parameters
    ----------
    subparsers
        What `add_subparsers` returned. As with every command, ``args.command(args)`` runs it and prints to stdout; what
        the user got wrong is raised as an AxeError.
    """
    parser = subparsers.add_parser("meta", help="the cost model that tuning learns")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    evaluate = commands.add_parser(
        "evaluate", help="how well it orders candidates that it was not trained on, with our features and without"
    )
    evaluate.add_argument(
        "folder",
        nargs="?",
        default="tuning_logs",
        metavar="DB",
        help="databases are at or below this folder (default: %(default)s)",
    )
    evaluate.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="how often each question is asked (default: %(default)s)"
    )
    evaluate.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    evaluate.set_defaults(command=_evaluate)


def _evaluate(args: argparse.Namespace) -> None:
    """`tvm-axe meta evaluate`"""
    folder = Path(args.folder)
    if args.seeds < 1:
        raise InputError(f"--seeds: a question is asked at least once, not {args.seeds} times")
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder; one with tuning databases in it is needed, such as tuning_logs")
    from tvm_axe.meta.model.evaluate import evaluate

    found = evaluate(folder, args.seeds)
    if not found.scores and not found.left_out:
        raise InputError(f"{folder}: there is no tuning database at or below it")
    print(json.dumps(found.as_json(), indent=1) if args.json else found.text())
