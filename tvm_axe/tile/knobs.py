"""Knobs: numbers that a tile program leaves open, with the values that are worth trying (`tvm_axe.tile.language`).

A program names a knob where it begins, and uses it wherever a number may stand: in extents of tiles and of the grid, in
loops, stages, options of the kernel, and conditions. The first value is the default, which it has unless somebody sets
or tunes it:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def add(A: T.Buffer((4096,), "float32"), B: T.Buffer((4096,), "float32")):
...     block = tile.knob("block", (256, 512, 1024))
...     with tile.kernel(tile.cdiv(4096, block)) as i:
...         x = tile.fragment((block,), "float32")
...         tile.copy(A[i * block], x)
...         with tile.parallel(block) as j:
...             x[j] = x[j] + 1.0
...         tile.copy(x, B[i * block])
>>> print(*declared(add))
block of 256, 512, 1024
>>> tile.read(add).tiles[0].shape
(256,)
>>> tile.read(add, {"block": 512}).tiles[0].shape
(512,)

`tile.compile(add, knobs={"block": 512})` sets it; `axe.tune` searches for what is fastest, and `tile.compile` finds
that in its records. The function stays one function with all of its values, which prints and parses back, so that
records, and the processes that measure, know it by what it says.

Names for what is computed of knobs are `T.meta_var`: ``half = T.meta_var(block // 2)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KNOB
from tvm_axe.errors import InputError, TileError
from tvm_axe.tile.calls import called, is_nothing
from tvm_axe.tile.language import GRID

__all__ = ["Knob", "Setting", "check_allowed", "declared", "knob", "require", "settings", "settled"]

REQUIRE = "axe.require"
"""Name of the call that `require` becomes, of the condition."""


@dataclass(frozen=True)
class Knob:
    """A number that a program leaves open.

    Attributes
    ----------
    name : str
        What it is called.
    values : tuple of int
        What it may be.
    default : int
        What it is in a program that nobody set or tuned, one of the values.
    """

    name: str
    values: tuple[int, ...]
    default: int

    def __str__(self) -> str:
        return f"{self.name} of {', '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Setting:
    """What a knob is in a program, and why."""

    knob: Knob
    value: int
    reason: str

    def __str__(self) -> str:
        return f"{self.knob.name} = {self.value}"


def knob(name: str, values: Sequence[int], *, default: int | None = None) -> tirx.Var:
    """Leave a number of the program open.

    Parameters
    ----------
    name : str
        What it is called, by which it is set.
    values : sequence of int
        What it may be; choices between two ways may be 0 and 1, or False and True.
    default : int, optional
        What it is unless it is set or tuned; the first value without it.

    Raises
    ------
    TileError
        There are no values, one is no integer of 32 bits or is there twice, or the default is none of them.
    """
    numbers = [value for value in values if isinstance(value, int) and -(1 << 31) <= value < 1 << 31]
    if not numbers or len(numbers) < len(values) or len({*numbers}) < len(numbers):
        raise TileError(f"knob {name}: values {tuple(values)}; valid are different integers of 32 bits, one or more")
    chosen = numbers[0] if default is None else default
    if chosen not in numbers:
        raise TileError(f"knob {name}: default {default}; valid is one of {', '.join(map(str, numbers))}")
    variable = T.Bind(T.call_extern("int32", KNOB, name, int(chosen), *map(int, numbers)))
    IRBuilder.name(name, variable)
    return variable


def require(condition: Any) -> Any:
    """Say which values of knobs go together: combinations for which the condition doesn't hold are refused.

    It stands before what it is about, as in ``tile.require(block_m * block_n <= 128 * 128)``. Combinations that no
    target can run needn't be named: the search finds out.

    Raises
    ------
    TileError
        The condition is none.
    """
    if isinstance(condition, bool):
        condition = tirx.const(condition, "bool")
    if not (isinstance(condition, ir.Expr) and str(condition.ty) == "bool"):
        raise TileError(f"require: takes a condition on knobs, such as block_m <= 128; got {condition!r}")
    return T.evaluate(T.call_extern("int32", REQUIRE, condition))


def declared(func: tirx.PrimFunc) -> tuple[Knob, ...]:
    """The knobs of a tile program, in order; none of any other function.

    Raises
    ------
    TileError
        Two knobs have one name.
    """
    return tuple(_variables(func).values())


def settings(func: tirx.PrimFunc, values: Mapping[str, int], reason: str) -> tuple[Setting, ...]:
    """What each knob of a program is with these values, which `reason` is the reason for; else the default."""
    return tuple(
        Setting(each, int(values.get(each.name, each.default)), reason if each.name in values else "the default")
        for each in declared(func)
    )


def check_allowed(func: tirx.PrimFunc, values: Mapping[str, int]) -> None:
    """Refuse values of knobs that the program doesn't allow; those that are left out have their defaults.

    Raises
    ------
    InputError
        There is no such knob, a knob has no such value, or a `require` doesn't hold.
    """
    variables = _variables(func)
    knobs = {each.name: each for each in variables.values()}
    name = func.attrs["global_symbol"] if func.attrs and "global_symbol" in func.attrs else "main"
    there = "; ".join(map(str, knobs.values())) or "none"
    for given, value in values.items():
        if given not in knobs:
            raise InputError(f"{name}: no knob {given!r}; there are: {there}")
        if value not in knobs[given].values:
            raise InputError(f"{name}: {given} is {value}; valid are {', '.join(map(str, knobs[given].values))}")
    numbers = _numbers(variables, values)
    analyzer = sym.Analyzer()
    for condition in _required(func):
        held = analyzer.simplify(_with_numbers(condition, numbers))
        if not isinstance(held, tirx.IntImm):
            raise InputError(f"{name}: tile.require({condition}) is about more than knobs; there are: {there}")
        if not int(held):
            chosen = ", ".join(f"{each.name}={int(numbers[var])}" for var, each in variables.items())
            raise InputError(f"{name}: tile.require({condition}) doesn't hold of {chosen}")


def settled(func: tirx.PrimFunc, values: Mapping[str, int]) -> tirx.PrimFunc:
    """The program with a number for each of its knobs, the default of those without a value.

    Raises
    ------
    InputError
        As `check_allowed`.
    """
    check_allowed(func, values)
    variables = _variables(func)
    if not variables and not _required(func):
        return func
    numbers = _numbers(variables, values)
    nothing = tirx.Evaluate(0)

    def undeclared(bind: tirx.Bind) -> tirx.Stmt:
        return nothing if bind.var in numbers else bind

    def unrequired(stmt: tirx.Evaluate) -> tirx.Stmt:
        return nothing if called(stmt) == REQUIRE else stmt

    body = _tvm.structural_map(func.body, [(tirx.Bind, undeclared), (tirx.Evaluate, unrequired)])
    # Upstream puts numbers for parameters, into the types of tiles too, but not into annotations.
    whole = tirx.PrimFunc([*func.params, *numbers], body, func.ret_type, func.attrs).specialize(numbers)
    analyzer = sym.Analyzer()

    def annotated(loop: tirx.For) -> tirx.Stmt:
        known = {
            key: analyzer.simplify(_with_numbers(value, numbers)) if isinstance(value, ir.Expr) else value
            for key, value in loop.annotations.items()
        }
        if is_nothing(loop.body) and GRID not in loop.annotations:
            return nothing
        if any(known[key] is not value for key, value in loop.annotations.items()):
            return tirx.For(
                loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, known, loop.step
            )
        return loop

    def decided(branch: tirx.IfThenElse) -> tirx.Stmt:
        if not isinstance(branch.condition, tirx.IntImm):
            return branch
        taken = branch.then_case if int(branch.condition) else branch.else_case
        return nothing if taken is None else taken

    def joined(seq: tirx.SeqStmt) -> tirx.Stmt:
        kept = [stmt for stmt in seq.seq if not is_nothing(stmt)]
        if len(kept) == len(seq.seq):
            return seq
        return kept[0] if len(kept) == 1 else tirx.SeqStmt(kept) if kept else nothing

    rules = [
        (tirx.Var, lambda var: numbers.get(var, var)),
        (tirx.For, annotated),
        (tirx.IfThenElse, decided),
        (tirx.SeqStmt, joined),
    ]
    return tirx.PrimFunc(list(whole.params), _tvm.structural_map(whole.body, rules), whole.ret_type, func.attrs)


def _variables(func: tirx.PrimFunc) -> dict[tirx.Var, Knob]:
    found: dict[tirx.Var, Knob] = {}

    def on_bind(bind: tirx.Bind) -> None:
        call = bind.value
        if not (isinstance(call, ir.Call) and call.args and getattr(call.args[0], "value", None) == KNOB):
            return
        _, name, default, *values = call.args
        found[bind.var] = Knob(str(name.value), tuple(map(int, values)), int(default))

    tvm_ffi.structural_walk(func.body, (tirx.Bind, on_bind))
    names = [each.name for each in found.values()]
    if len({*names}) < len(names):
        raise TileError(f"knobs have names of their own, got {', '.join(names)}")
    return found


def _required(func: tirx.PrimFunc) -> list[tirx.Expr]:
    """The conditions that the program requires."""
    found: list[tirx.Expr] = []

    def on_statement(stmt: tirx.Evaluate) -> None:
        if called(stmt) == REQUIRE:
            found.append(stmt.value.args[1])

    tvm_ffi.structural_walk(func.body, (tirx.Evaluate, on_statement))
    return found


def _numbers(variables: Mapping[tirx.Var, Knob], values: Mapping[str, int]) -> dict[tirx.Var, tirx.IntImm]:
    return {var: tirx.const(int(values.get(each.name, each.default)), "int32") for var, each in variables.items()}


def _with_numbers(value: Any, numbers: Mapping[tirx.Var, tirx.Expr]) -> Any:
    return _tvm.structural_map(value, (tirx.Var, lambda var: numbers.get(var, var)))
