"""`tvm-axe fleet`: the tracker of a fleet, and who is there."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tvm_axe.cli.command import Command, Group
from tvm_axe.cli.worker import add_listen_argument, warn_of
from tvm_axe.defaults import TRACKER_PORT
from tvm_axe.errors import InputError

__all__ = ["COMMAND"]


def _add_tracker_arguments(parser: argparse.ArgumentParser) -> None:
    add_listen_argument(parser)
    parser.add_argument("--port", type=int, default=TRACKER_PORT, help="where it listens (default: %(default)s)")


def _tracker(args: argparse.Namespace) -> None:
    """`tvm-axe fleet tracker`"""
    from tvm_axe.meta.fleet.tracker import run_tracker

    def say(port: int) -> None:
        print(f"tracker: listening on {args.listen}:{port}", flush=True)
        warn_of(args.listen, port)

    run_tracker(args.listen, args.port, say)


def _add_status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT", help="whose servers to list")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _status(args: argparse.Namespace) -> None:
    """`tvm-axe fleet status`"""
    from tvm_axe.meta.fleet.fleet import address
    from tvm_axe.meta.fleet.tracker import status, tracker_summary

    try:
        found = status(tracker_summary(address(args.tracker)))
    except OSError as error:
        raise InputError(f"--tracker: no tracker at {args.tracker}: {error}; tvm-axe fleet tracker is one") from error
    if args.json:
        print(json.dumps(found))
        return
    rows = [("server", "key", "address", "state", "measured", "failed", "times by")]
    rows += [tuple(map(_cell, server.values())) for server in found["servers"]]  # type: ignore[misc]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    for key, queue in found["keys"].items():
        print(f"{key}: {queue['servers']} there, {queue['free']} free, {queue['pending']} requests waiting")
    if not found["servers"]:
        print("no server is there; tvm-axe worker --tracker ... --key ... is one")


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


COMMAND = Group(
    "fleet",
    "machines that measure for tuning jobs",
    (
        Command(
            "tracker",
            "be a tracker, which hands out machines that are offered",
            _add_tracker_arguments,
            _tracker,
        ),
        Command("status", "who is there, free or busy, and what each has measured", _add_status_arguments, _status),
    ),
)
