"""What reductions combine two values by: `sum`, `max` and `min`, and `reduce` by a function of one's own.

The product of each row, and the largest magnitude in it:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def rows(X: T.Buffer((64, 256), "float32"), P: T.Buffer((64,), "float32"), M: T.Buffer((64,), "float32")):
...     with tile.kernel(16) as i:
...         x = tile.fragment((4, 256), "float32")
...         product = tile.fragment((4,), "float32")
...         most = tile.fragment((4,), "float32")
...         tile.copy(X[i * 4, 0], x)
...         tile.reduce(x, product, lambda a, b: a * b, identity=1)
...         tile.reduce(x, most, lambda a, b: T.max(T.abs(a), T.abs(b)), identity=0)
...         tile.copy(product, P[i * 4])
...         tile.copy(most, M[i * 4])
>>> print(tile.read(rows).body[1])
product = a * b of x along 1

The function becomes data: upstream's ``T.comm_reducer``, two variables, an expression of them and the identity, as the
option `REDUCER` of upstream's ``T.tile.sum``. So a program prints, parses back and is saved with it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.script.tirx import tile as primitives

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import is_choice, is_value, loads_in, substitute, uses, variables_of
from tvm_axe.errors import TileError
from tvm_axe.tile.arithmetic import chosen

REDUCER = "reducer"
"""The option of a tile primitive's call that has the function of `reduce`."""

_KINDS: dict[str, Callable[[Any, Any], Any]] = {"sum": operator.add, "max": tirx.max, "min": tirx.min}
_VALID = "valid is a function of two scalars that gives one, as `lambda a, b: a * b`"


def reduce(
    src: Any,
    dst: Any,
    combine: Callable[[Any, Any], Any],
    axis: int = -1,
    *,
    identity: Any,
    accumulate: bool = False,
) -> Any:
    """Reduce a tile along one of its dimensions by a function, as `sum` does by addition.

    Elements are combined in no order, two at a time, each as a number of the type that `sum` adds them in: `dst`'s; or
    `src`'s, where `dst` is of integers and lacks some of its numbers; float32 for floats of 16 and 8 bits. The result
    is then converted to `dst`'s type.

    Parameters
    ----------
    src : Buffer or BufferRegion
        The tile, such as one of (M, N).
    dst : Buffer or BufferRegion
        The tile of the results, of the shape without `axis`: (M,) for the last one.
    combine : callable
        A function of two scalars that gives one of their type: ``lambda a, b: a ^ b``, `T.bitwise_or`, or one that is
        defined outside of the program. It is associative and commutative, which nothing checks, and reads nothing but
        its arguments and constants.
    axis : int
        The dimension that is reduced; from the end if negative.
    identity : int, float or Expr
        The number that `combine` changes nothing by, such as 1 of products. It is combined with elements, and with
        itself, any number of times.
    accumulate : bool
        Whether the results are combined with what `dst` holds, which is of the type that they are combined in then.

    Raises
    ------
    TileError
        A side is no tile and no slice of one, or is of truth values; `combine` is no function of two scalars, or gives
        no expression of their type and of both of them, or one of something else; `identity` is no number of that type,
        or is seen to give another number when it is combined with itself.
    """
    types: list[str] = []
    for name, side in (("src", src), ("dst", dst)):
        if not (isinstance(side, ir.TensorRegion) or (isinstance(side, tirx.Var) and tirx.is_buffer_var(side))):
            raise TileError(f"reduce: {name} is a {type(side).__name__}; valid is a tile or a slice of one")
        types.append(str((side.source if isinstance(side, ir.TensorRegion) else side).dtype))
    of_src, of_dst = types
    _check_numbers(of_src, of_dst, "reduce")
    dtype = combined_type(of_src, of_dst)
    a, b = variables = tirx.Var("a", dtype), tirx.Var("b", dtype)
    reducer = tirx.CommReducer([a], [b], [_combined(combine, *variables)], [_constant(identity, dtype)])
    check_reducer(reducer, of_src, of_dst, accumulate, "reduce")
    _check_identity(reducer)
    return primitives.sum(dst, src, axis, accumulate, **{REDUCER: reducer})


# ---- What targets ask ------------------------------------------------------------------------------------------------


def reduced_type(src: str, dst: str) -> str:
    """The type in which elements of `src` are combined into `dst`: `src` where `dst` is of integers and lacks some.

    As numpy does it, the result is converted, and not each element.
    """
    return dst if "float" in dst or ("float" not in src and np.can_cast(src, dst)) else src


def combined_type(src: str, dst: str) -> str:
    """The type in which they are combined by a function: that one, float32 for floats that have fewer bits."""
    dtype = reduced_type(src, dst)
    return "float32" if "float" in dtype and tvm_ffi.dtype(dtype).bits < 32 else dtype


def combined(kind: str, reducer: tirx.CommReducer | None, a: Any, b: Any) -> Any:
    """The combination of two values; they are in it as often as the function names them."""
    if reducer is None:
        return _KINDS[kind](a, b)
    return substitute(reducer.result[0], {reducer.lhs[0]: a, reducer.rhs[0]: b})


def identity_of(kind: str, reducer: tirx.CommReducer | None, dtype: str) -> tirx.Expr:
    """The constant of a type that changes no result."""
    if reducer is not None:
        return reducer.identity_element[0]
    if kind == "sum":
        return tirx.const(0, dtype)
    if dtype.startswith("float"):
        return tirx.const(-math.inf if kind == "max" else math.inf, dtype)
    return tirx.min_value(dtype) if kind == "max" else tirx.max_value(dtype)


# ---- What is refused -------------------------------------------------------------------------------------------------


def without_choices(reducer: tirx.CommReducer) -> tirx.CommReducer:
    """The same function with both sides of each ``if_then_else`` computed, of which vectors can be made.

    It loads nothing, and divides by nothing that is 0, so that either side may be computed.
    """
    return _tvm.structural_map(reducer, (ir.Call, lambda call: chosen(*call.args) if is_choice(call) else call))


def check_reducer(reducer: Any, src: str, dst: str, accumulate: bool, what: str) -> None:
    """Refuse what is no function of two scalars for tiles of two types.

    Raises
    ------
    TileError
        As `reduce` says.
    """
    if not isinstance(reducer, tirx.CommReducer) or [*map(len, (reducer.lhs, reducer.rhs, reducer.result))] != [1] * 3:
        raise TileError(f"{what}: {REDUCER} is `{reducer}`; {_VALID}, T.comm_reducer")
    _check_numbers(src, dst, what)
    dtype, value, identity = combined_type(src, dst), reducer.result[0], reducer.identity_element[0]
    pair = {"the first": reducer.lhs[0], "the second": reducer.rhs[0]}
    for name, scalar in (*pair.items(), ("the result", value), ("the identity", identity)):
        if str(scalar.ty) != dtype:
            raise TileError(
                f"{what}: combine of {src} into {dst} is of {dtype}, and {name}, `{scalar}`, of {scalar.ty}; valid is "
                f"{dtype}, to which T.cast brings a result"
            )
    if not isinstance(identity, tirx.IntImm | tirx.FloatImm):
        raise TileError(f"{what}: identity is `{identity}`; valid is a constant of {dtype}")
    _check_value(value, pair, what)
    if accumulate and combined_type(dst, dst) != dtype:
        raise TileError(
            f"{what}: it accumulates in {dst} what is combined in {dtype}; valid is a dst of {dtype}, or another tile "
            "for the result, which `parallel` combines with dst"
        )


def _check_numbers(src: str, dst: str, what: str) -> None:
    if "bool" in (src, dst):
        raise TileError(
            f"{what}: truth values of a tile; valid are numbers, as int8 of 0 and 1, which T.bitwise_and and "
            "T.bitwise_or combine"
        )


def _check_value(value: tirx.Expr, pair: dict[str, tirx.Var], what: str) -> None:
    """Refuse an expression of something else than a pair of variables, or not of both of them."""
    for load in loads_in(value):
        raise TileError(f"{what}: combine reads {load.source.name}; valid are its two scalars and constants")
    for var in variables_of(value):
        if not any(var.same_as(own) for own in pair.values()):
            raise TileError(
                f"{what}: combine reads {var.name}, which is another variable; valid are its two scalars and constants"
            )
    for name, var in pair.items():
        if not uses(value, var):
            raise TileError(f"{what}: combine gives `{value}`, without {name} of its scalars; valid is one of both")

    def on_call(call: ir.Call) -> None:
        if not (is_value(call) or is_choice(call)):
            refused.append(call)

    refused: list[ir.Call] = []
    tvm_ffi.structural_walk(value, (ir.Call, on_call))
    for call in refused:
        raise TileError(
            f"{what}: combine calls `{call}`, which is more than a value; valid is arithmetic, as T.exp and T.max"
        )


def _check_identity(reducer: tirx.CommReducer) -> None:
    """Refuse an identity that is seen not to be its own: parts of a tile that hold nothing are combined, too."""
    identity = reducer.identity_element[0]
    value = combined("reduce", reducer, identity, identity)
    value = sym.Analyzer().simplify(value) if isinstance(identity, tirx.IntImm) else _folded(value)
    nan: list[tirx.FloatImm] = []
    choices: list[Any] = []  # of which it isn't known here which side is taken
    tvm_ffi.structural_walk(value, (tirx.FloatImm, lambda each: nan.append(each) if math.isnan(each.value) else None))
    tvm_ffi.structural_walk(
        value, ((tirx.Select, ir.Call), lambda each: None if _plain_call(each) else choices.append(each))
    )
    if nan and not choices and not math.isnan(identity.value):
        raise TileError(
            f"reduce: combine computes NaN of {identity.value} twice, which is no identity then; valid is a finite "
            "one, as -1e30, or T.if_then_else in combine"
        )
    if isinstance(value, tirx.IntImm | tirx.FloatImm) and not nan and value.value != identity.value:
        raise TileError(
            f"reduce: combine gives {value.value} for {identity.value} twice, which is no identity; valid is the "
            "number that it changes nothing by, as 0 of sums and 1 of products"
        )


_FOLDED: dict[type, Callable[[float, float], Any]] = {
    tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul, tirx.Max: max, tirx.Min: min,
    tirx.EQ: operator.eq, tirx.NE: operator.ne, tirx.LT: operator.lt, tirx.LE: operator.le,
    tirx.GT: operator.gt, tirx.GE: operator.ge, tirx.And: operator.and_, tirx.Or: operator.or_,
}  # fmt: skip


def _plain_call(node: Any) -> bool:
    return isinstance(node, ir.Call) and not is_choice(node)


def _folded(value: tirx.Expr) -> tirx.Expr:
    """An expression of constants in floats with what is plain arithmetic done; upstream takes ``inf - inf`` for 0."""

    def on_pair(node: Any) -> Any:
        if not all(isinstance(side, tirx.FloatImm | tirx.IntImm) for side in (node.a, node.b)):
            return node
        return tirx.const(_FOLDED[type(node)](node.a.value, node.b.value), str(node.ty))

    def on_choice(node: Any) -> Any:
        if _plain_call(node):
            return node
        is_call = isinstance(node, ir.Call)
        condition, *sides = node.args if is_call else (node.condition, node.true_value, node.false_value)
        return sides[not condition.value] if isinstance(condition, tirx.IntImm) else node

    return _tvm.structural_map(value, ((tuple(_FOLDED), on_pair), ((tirx.Select, ir.Call), on_choice)))


def _combined(combine: Any, a: tirx.Var, b: tirx.Var) -> tirx.Expr:
    if not callable(combine):
        raise TileError(f"reduce: combine is {combine!r}; {_VALID}")
    try:
        value = combine(a, b)
    except TileError:
        raise
    except Exception as error:  # whatever a function raises that is given scalars of the compiler
        raise TileError(
            f"reduce: combine isn't a function of two scalars of {a.ty} ({error}); {_VALID}, and T.if_then_else, T.And "
            "and T.max in the place of `if`, `and` and max"
        ) from error
    if not isinstance(value, ir.Expr):
        raise TileError(f"reduce: combine gives {value!r}, a {type(value).__name__}; {_VALID}")
    return value


def _constant(identity: Any, dtype: str) -> tirx.Expr:
    """The identity as a constant of a type."""
    valid = f"valid is a number of {dtype}"
    if isinstance(identity, ir.Expr):
        found = sym.Analyzer().simplify(identity)
        if not isinstance(found, tirx.IntImm | tirx.FloatImm) or str(found.ty) != dtype:
            raise TileError(f"reduce: identity is `{identity}` of {identity.ty}; {valid}")
        return found
    whole = isinstance(identity, int | np.integer) and not isinstance(identity, bool)
    if not whole and not ("float" in dtype and isinstance(identity, float | np.floating)):
        raise TileError(f"reduce: identity is {identity!r}, a {type(identity).__name__}; {valid}")
    if whole and "int" in dtype:
        limits = np.iinfo(dtype)
        if not limits.min <= identity <= limits.max:
            raise TileError(f"reduce: identity is {identity}; {valid}, {limits.min} to {limits.max}")
        return tirx.const(int(identity), dtype)
    if math.isfinite(identity) and abs(identity) > float(np.finfo(dtype).max):
        raise TileError(f"reduce: identity is {identity}; {valid}, up to {np.finfo(dtype).max}, or infinity")
    return tirx.const(float(identity), dtype)
