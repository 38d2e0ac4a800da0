"""`tvm-axe meta`: the cost model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tvm_axe.cli.command import Command, Group, plain_warnings
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        default=WORK_DIR,
        metavar="DB",
        help="databases are at or below this folder (default: %(default)s)",
    )
    parser.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="how often each question is asked (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _evaluate(args: argparse.Namespace) -> None:
    """`tvm-axe meta evaluate`"""
    folder = Path(args.folder)
    if args.seeds < 1:
        raise InputError(f"--seeds: a question is asked at least once, not {args.seeds} times")
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder; one with tuning databases in it is needed, such as {WORK_DIR}")
    from tvm_axe.meta.model.evaluate import evaluate
    from tvm_axe.records.database import find_databases

    with plain_warnings():
        found = evaluate(folder, args.seeds)
    if not found.scores and not found.left_out:
        count = len(find_databases(folder))
        what = f"none of its {count} tuning databases has a record that can be read" if count else None
        raise InputError(f"{folder}: {what or 'there is no tuning database at or below it'}")
    print(json.dumps(found.as_json(), indent=1) if args.json else found.text())


COMMAND = Group(
    "meta",
    "the cost model that tuning learns",
    (
        Command(
            "evaluate",
            "how well it orders candidates that it was not trained on, with our features and without",
            _add_arguments,
            _evaluate,
        ),
    ),
)
