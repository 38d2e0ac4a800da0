"""`tvm-axe check`: whether a schedule computes what its kernel says."""

from __future__ import annotations

import argparse

from tvm_axe.cli.command import Command, positive
from tvm_axe.cli.given import add_engine_argument, add_kernel_arguments, given_kernel
from tvm_axe.collective import registry
from tvm_axe.errors import CheckError, InputError

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel_arguments(parser)
    add_engine_argument(parser)
    parser.add_argument(
        "--seeds", type=positive, default=3, help="how many times arrays are drawn (default: %(default)s)"
    )


def _check(args: argparse.Namespace) -> int:
    """`tvm-axe check`"""
    import tvm_axe as axe

    if registry.find(args.engine).has_ranks:
        alone = ", ".join(name for name in registry.names() if not registry.find(name).has_ranks)
        raise InputError(f"check: --engine {args.engine} has ranks that are started apart; take one of {alone}")
    program = given_kernel(args)
    options = {"engine": args.engine, "seeds": args.seeds, "target": args.target, "work_dir": args.work_dir}
    try:
        if program.schedule is not None:
            report = axe.check(program.schedule, **options)
        else:
            report = axe.check(program.func, program.mesh, **options)
    except CheckError as error:
        print(error.report)
        return 1
    print(report)
    return 0


COMMAND = Command("check", "judge a schedule by the kernel before any primitive", _add_arguments, _check)
