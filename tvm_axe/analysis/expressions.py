"""Variables and loads in expressions and statements: which there are, which are alike, and others in their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe._tvm import is_float, is_zero, variables_of

__all__ = [
    "alike",
    "is_choice",
    "is_float",
    "is_value",
    "is_zero",
    "loads_in",
    "substitute",
    "terms",
    "unconditional_loads",
    "uses",
    "variables_of",
]


def uses(expr: object, var: tirx.Var) -> bool:
    """Return whether `var` occurs in `expr`."""
    if isinstance(expr, tirx.Var):
        return expr.same_as(var)
    found: list[bool] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, lambda v: found.append(True) if v.same_as(var) else None))
    return bool(found)


def substitute(value: tirx.Expr, replacements: Mapping[tirx.Var, tirx.Expr]) -> tirx.Expr:
    """Return `value` with variables replaced."""
    return _tvm.structural_map(value, (tirx.Var, lambda var: replacements.get(var, var)))


def alike(some: Sequence[tirx.Expr], others: Sequence[tirx.Expr]) -> bool:
    """Return whether indices are the same expressions, so that they are of one element of a buffer."""
    return bool(tvm_ffi.structural_equal(list(some), list(others)))


def terms(value: tirx.Expr, sign: int = 1) -> Iterator[tuple[int, tirx.Expr]]:
    """Yield the terms of a sum, each behind its sign, 1 or -1: of what is none, itself."""
    if isinstance(value, tirx.Add | tirx.Sub):
        yield from terms(value.a, sign)
        yield from terms(value.b, sign if isinstance(value, tirx.Add) else -sign)
    else:
        yield sign, value


def loads_in(part: object) -> list[ir.TensorLoad]:
    """Return every load in an expression or statement, those in indices of others too."""
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(part, (ir.TensorLoad, found.append))
    return found


def is_choice(expr: object) -> bool:
    """Return whether an expression is ``if_then_else``, of which one side alone is computed."""
    return isinstance(expr, ir.Call) and isinstance(expr.op, ir.Op) and expr.op.name == "prim.if_then_else"


_PURE = int(tirx.CallEffectKind.Pure.value)
_ADDRESSES = ("tirx.address_of", "tirx.buffer_data")


def is_value(call: ir.Call) -> bool:
    """Return whether a call does no more than give a value of the values of its arguments, none of which is a place."""
    effect = call.op.get_attr("TCallEffectKind") if isinstance(call.op, ir.Op) else None
    return effect is not None and int(effect) <= _PURE and call.op.name not in _ADDRESSES


def unconditional_loads(part: tirx.Expr | tirx.Stmt) -> list[ir.TensorLoad]:
    """Return the loads that happen whatever the numbers are: none that a choice may leave out."""
    chosen: list[tirx.Expr] = []

    def on_choice(choice: tirx.Select | ir.Call) -> None:
        if isinstance(choice, tirx.Select):
            chosen.extend((choice.true_value, choice.false_value))
        elif is_choice(choice):
            chosen.extend(choice.args[1:])

    tvm_ffi.structural_walk(part, [(tirx.Select, on_choice), (ir.Call, on_choice)])
    conditional = loads_in(chosen)
    return [load for load in loads_in(part) if not any(load.same_as(other) for other in conditional)]
