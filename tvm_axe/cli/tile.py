"""`tvm-axe tile`: a program as it is read, and every decision about it."""

from __future__ import annotations

import argparse
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from tvm_axe.cli.command import Command, Group
from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from tvm import tirx

__all__ = ["COMMAND", "add_knob_argument", "tile_program"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "program", metavar="FILE.py:NAME", help="a tile program, or a function that returns one without arguments"
    )
    parser.add_argument(
        "--target",
        default="llvm",
        help="llvm, cuda, cuda:sm_80, rocm:gfx942 and the like, or JSON (default: %(default)s)",
    )
    add_knob_argument(parser)


def add_knob_argument(parser: argparse.ArgumentParser) -> None:
    """Add what the knobs of a tile program are."""
    parser.add_argument(
        "--knob",
        action="append",
        type=_setting,
        metavar="NAME=VALUE",
        help="what a knob is; once for each",
    )


def _setting(text: str) -> tuple[str, int]:
    """``bm=128`` as a name and a number."""
    name, _, value = text.partition("=")
    try:
        return name, int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a knob and its value, such as bm=128") from None


def _explain(args: argparse.Namespace) -> None:
    """`tvm-axe tile explain`"""
    from tvm_axe.tile.lowering import plan
    from tvm_axe.tile.sequences import read_function

    decided = plan(read_function(tile_program(args.program), dict(args.knob or ())), args.target)
    print(f"{decided.program}\n")
    print(decided.explain())


def tile_program(spec: str) -> tirx.PrimFunc:
    """The tile program that `FILE.py:NAME` names or, where that is a function, returns."""
    from tvm import tirx
    from tvm.error import DiagnosticError

    from tvm_axe.cli.inputs import call_given, load_attribute

    def accepts(value: Any) -> bool:
        return isinstance(value, tirx.PrimFunc) or isfunction(value)

    found, _ = load_attribute(spec, accepts, "a tile program, or a function that returns one")
    if not isfunction(found):
        return found
    try:
        program = call_given(spec, found)
    except InputError as error:
        said = error.__cause__ if isinstance(error.__cause__, TypeError | DiagnosticError) else error
        raise InputError(f"{spec}: called without arguments, it fails: {said}") from error
    if not isinstance(program, tirx.PrimFunc):
        raise InputError(f"{spec}: returns a {type(program).__name__}; needed is a PrimFunc")
    return program


COMMAND = Group(
    "tile",
    "what becomes of a tile program",
    (Command("explain", "print the program as it is read, and every decision about it", _add_arguments, _explain),),
)
