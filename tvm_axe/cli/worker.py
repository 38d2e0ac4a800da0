"""`tvm-axe worker`: this machine, offered to tuning jobs."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from tvm_axe.cli.command import Command, positive
from tvm_axe.connections import is_loopback, listen

__all__ = ["COMMAND", "add_listen_argument", "warn_of"]

_GIB = 1 << 30


def add_listen_argument(parser: argparse.ArgumentParser) -> None:
    """Add what says where a server listens."""
    parser.add_argument(
        "--listen",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="who may connect: whoever reaches this address can run code here (default: %(default)s, this machine)",
    )


def warn_of(address: str, port: int) -> None:
    """Say who can run code here, where that isn't this machine alone."""
    if not is_loopback(address):
        print(
            f"tvm-axe: warning: listening on {address}:{port}: whoever can connect to it can run code as this user",
            file=sys.stderr,
        )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tracker", required=True, metavar="HOST:PORT", help="where it is offered")
    parser.add_argument("--key", required=True, metavar="NAME", help="what machines like this are called there")
    add_listen_argument(parser)
    parser.add_argument(
        "--port", type=int, default=9090, help="the first one to try; 0: any that is free (default: %(default)s)"
    )
    parser.add_argument("--name", help="of this server in reports (default: the host and the port)")
    parser.add_argument(
        "--announce", metavar="ADDRESS", help="what jobs are to connect to (default: what the tracker sees)"
    )
    parser.add_argument(
        "--memory", type=positive, metavar="GIB", help="for each process of a job (default: 80 %% of the machine's)"
    )
    parser.add_argument(
        "--seconds", type=positive, default=60, help="to build or to run a candidate (default: %(default)s)"
    )
    parser.add_argument("--cores", metavar="LIST", help="that jobs may use, such as 0,2-5 (default: all)")


def _worker(args: argparse.Namespace) -> None:
    """`tvm-axe worker`"""
    from tvm_axe.meta.fleet.fleet import Fleet
    from tvm_axe.meta.fleet.server import Limits, Server

    fleet = Fleet(args.tracker, args.key)
    if args.cores is not None:
        os.sched_setaffinity(0, given_cores(args.cores))
    listener = listen(args.listen, args.port)
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = Limits(own * 4 // 5 if args.memory is None else args.memory * _GIB, float(args.seconds))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # its folder goes with it
    with tempfile.TemporaryDirectory(prefix="tvm-axe-worker-", ignore_cleanup_errors=True) as folder:
        host = args.announce or (None if args.listen in ("0.0.0.0", "::") else args.listen)
        server = Server(fleet.address, args.key, listener, limits, Path(folder), host, args.name, _say)
        _say(f"{server.name}: listening on {args.listen}:{server.port}, offered as {args.key} at {args.tracker}")
        warn_of(args.listen, server.port)
        server.run()


def given_cores(text: str) -> set[int]:
    """The numbers in a list such as ``0,2-5``.

    Raises
    ------
    InputError
        If it is none, or names cores that this process may not use.
    """
    from tvm_axe.errors import InputError

    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError(f"--cores: {text!r} is no list of cores, such as 0,2-5")
        found.update(range(int(first), int(last if dash else first) + 1))
    own = os.sched_getaffinity(0)
    if not found or not found <= own:
        raise InputError(f"--cores: {text!r} isn't among those that this process may use, {sorted(own)}")
    return found


def _say(line: str) -> None:
    print(line, flush=True)


COMMAND = Command("worker", "offer this machine to tuning jobs, by a tracker", _add_arguments, _worker)
