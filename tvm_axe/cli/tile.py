"""`tvm-axe tile explain`: a program as it is read, and every decision about it."""

from __future__ import annotations

from inspect import isfunction
from typing import Any

from tvm import tirx
from tvm.error import DiagnosticError

from tvm_axe.errors import InputError
from tvm_axe.inputs import load_attribute
from tvm_axe.tile.lowering import plan


def main(spec: str, target: str) -> None:
    """Print what becomes of a tile program.

    Parameters
    ----------
    spec : str
        ``FILE.py:NAME`` of a program, or of a function that returns one without arguments.
    target : str
        As `tvm_axe.machines.target.resolve_target` takes it, such as ``"cuda:sm_80"``.

    Raises
    ------
    InputError
        There is no such program.
    TileError
        It is malformed, or the target cannot run it.
    TuneError
        There is no such target.
    """
    decided = plan(_program(spec), target)
    print(f"{decided.program}\n")
    print(decided.explain())


def _program(spec: str) -> tirx.PrimFunc:
    """The tile program that `FILE.py:NAME` names or, where that is a function, returns."""

    def accepts(value: Any) -> bool:
        return isinstance(value, tirx.PrimFunc) or isfunction(value)

    found, _ = load_attribute(spec, accepts, "a tile program, or a function that returns one")
    if not isfunction(found):
        return found
    try:
        program = found()
    except (TypeError, DiagnosticError) as error:
        raise InputError(f"{spec}: called without arguments, it fails: {error}") from error
    if not isinstance(program, tirx.PrimFunc):
        raise InputError(f"{spec}: returns a {type(program).__name__}; needed is a PrimFunc")
    return program
