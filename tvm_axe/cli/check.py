"""`tvm-axe check`: whether a schedule computes what its kernel says."""

from __future__ import annotations

import argparse

from tvm_axe.cli.command import Command, positive
from tvm_axe.cli.given import add_engine_argument, add_kernel_arguments, given_kernel, given_target, given_workers
from tvm_axe.errors import CheckError

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel_arguments(parser)
    add_engine_argument(parser, ranks=True, gpus=True)
    parser.add_argument(
        "--seeds", type=positive, default=3, help="how many times arrays are drawn (default: %(default)s)"
    )


def _check(args: argparse.Namespace) -> int:
    """`tvm-axe check`"""
    import tvm_axe as axe

    program = given_kernel(args)
    try:
        with given_workers(args, program.mesh) as workers:
            report = axe.check(
                program.func if program.schedule is None else program.schedule,
                program.mesh,
                engine=workers,
                seeds=args.seeds,
                target=given_target(args),
                work_dir=args.work_dir,
            )
    except CheckError as error:
        print(error.report)
        return 1
    print(report)
    return 0


COMMAND = Command("check", "judge a schedule by the kernel before any primitive", _add_arguments, _check)
