"""`tvm-axe show`: what becomes of a kernel on a mesh."""

from __future__ import annotations

import argparse

from tvm_axe.cli.command import Command
from tvm_axe.cli.given import add_kernel_arguments, given_kernel, given_target

__all__ = ["COMMAND"]


def _show(args: argparse.Namespace) -> None:
    """`tvm-axe show`"""
    print(given_kernel(args).compile(given_target(args), args.work_dir).show())


COMMAND = Command("show", "print layouts, collectives, bytes and the local module", add_kernel_arguments, _show)
