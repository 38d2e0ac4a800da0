"""The command line, `tvm-axe COMMAND`; docs/cli.md describes it.

What a user got wrong is said in one message and ends with exit code 2; anything else keeps its traceback. The compiler
is imported by the commands that need it, when they run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tvm_axe.cli import (
    cache,
    check,
    db,
    demo,
    doctor,
    fleet,
    kernels,
    layout,
    meta,
    programs,
    run,
    search,
    show,
    stream,
    tile,
    tune,
    worker,
)
from tvm_axe.cli.command import Command, Group
from tvm_axe.errors import AxeError
from tvm_axe.processes import leave_out_torch

__all__ = ["main"]

COMMANDS: tuple[Command | Group, ...] = (
    run.COMMAND,
    show.COMMAND,
    check.COMMAND,
    search.COMMAND,
    tune.COMMAND,
    programs.COMMAND,
    kernels.COMMAND,
    tile.COMMAND,
    stream.COMMAND,
    layout.COMMAND,
    db.COMMAND,
    meta.COMMAND,
    worker.COMMAND,
    fleet.COMMAND,
    cache.COMMAND,
    doctor.COMMAND,
    demo.COMMAND,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        The arguments behind the program's name; those of the process when left out.

    Returns
    -------
    The exit code: 0, or 1 when a command that checks something finds it wrong, or 2 when something that the user gave
    cannot be used. Malformed options exit with 2 too, by way of `SystemExit`, and Ctrl-C gives 130.
    """
    parser = argparse.ArgumentParser(
        prog="tvm-axe",
        description="Distribute, tune and run TensorIR kernels.",
        epilog="Begin with doctor and demo. `tvm-axe COMMAND --help` lists its options; docs/cli.md has examples.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    args = parser.parse_args(argv)
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # the process is the command's
        leave_out_torch()
    try:
        code: int | None = args.command.run(args)
        sys.stdout.flush()
    except AxeError as error:
        print(f"tvm-axe: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tvm-axe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except RuntimeError as error:
        from tvm_axe import _tvm

        if _tvm.is_unsaid(error):
            print(error, file=sys.stderr)
        raise
    return code or 0
