"""Scalar expressions of tile programs in numpy, at one point or at many, each value of its expression's type."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import tvm_ffi
from tvm import ir, tirx

Load: TypeAlias = Callable[[Any, "Evaluator"], np.ndarray]
"""A function from a load, and what computes its indices, to what is loaded."""

_BINARY: dict[type, Callable[..., Any]] = {
    tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply, tirx.Min: np.minimum, tirx.Max: np.maximum,
    tirx.FloorDiv: np.floor_divide, tirx.FloorMod: np.mod,
    tirx.EQ: np.equal, tirx.NE: np.not_equal, tirx.LT: np.less, tirx.LE: np.less_equal,
    tirx.GT: np.greater, tirx.GE: np.greater_equal, tirx.And: np.logical_and, tirx.Or: np.logical_or,
    tirx.BitwiseAnd: np.bitwise_and, tirx.BitwiseOr: np.bitwise_or, tirx.BitwiseXor: np.bitwise_xor,
    tirx.LShift: np.left_shift, tirx.RShift: np.right_shift,
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "fabs": np.abs, "ceil": np.ceil, "cos": np.cos, "erf": np.vectorize(math.erf, otypes=[float]),
    "exp": np.exp, "exp2": np.exp2, "floor": np.floor, "fma": lambda x, y, z: x * y + z,
    "isinf": np.isinf, "isnan": np.isnan, "likely": lambda x: x, "log": np.log, "log1p": np.log1p, "log2": np.log2,
    "nearbyint": np.rint, "pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sin": np.sin, "sqrt": np.sqrt, "tanh": np.tanh, "trunc": np.trunc,
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert, "shift_left": np.left_shift, "shift_right": np.right_shift,
}  # fmt: skip


class Evaluator:
    """The values of expressions, given those of variables.

    Parameters
    ----------
    values : Mapping
        The variables' values: numbers, or arrays that are broadcast together.
    load : Callable, optional
        What is loaded; without, expressions have no loads.
    """

    def __init__(self, values: Mapping[tirx.Var, Any], load: Load | None = None) -> None:
        self.values, self._load = dict(values), load

    def __call__(self, expr: Any) -> Any:
        """Compute an expression; floats are of its type, integers int64 that wrap as their type does."""
        if isinstance(expr, (bool, int, float)):
            return expr
        dtype = str(expr.ty)
        if isinstance(expr, tirx.IntImm):
            return bool(expr.value) if dtype == "bool" else int(expr.value)
        if isinstance(expr, tirx.FloatImm):
            return np.dtype(dtype).type(expr.value)
        if isinstance(expr, tirx.Var):
            return self.values[expr]
        if isinstance(expr, ir.TensorLoad):
            assert self._load is not None
            return self._load(expr, self)
        if isinstance(expr, tirx.Cast):
            return converted(self(expr.value), dtype)
        if isinstance(expr, tirx.Not):
            return np.logical_not(self(expr.a))
        if isinstance(expr, tirx.Select):
            return np.where(self(expr.condition), self(expr.true_value), self(expr.false_value))
        if isinstance(expr, tirx.Let):
            return Evaluator({**self.values, expr.var: self(expr.value)}, self._load)(expr.body)
        with np.errstate(all="ignore"):
            if isinstance(expr, (tirx.Div, tirx.Mod)):
                return self._divided(expr, "int" in dtype)
            if type(expr) in _BINARY:
                return converted(_BINARY[type(expr)](self(expr.a), self(expr.b)), dtype)
            name, arguments = _called(expr), [self(argument) for argument in expr.args]
            if name == "if_then_else":
                return np.where(*arguments)
            if name == "reinterpret":
                return converted(kept(arguments[0], str(expr.args[0].ty)).view(dtype), dtype)
            return converted(_CALLS[name](*arguments), dtype)

    def _divided(self, expr: Any, whole: bool) -> Any:
        a, b = self(expr.a), self(expr.b)
        if not whole:
            return np.divide(a, b) if isinstance(expr, tirx.Div) else np.fmod(a, b)
        quotient = np.trunc(np.divide(a, b)).astype("int64")
        return quotient if isinstance(expr, tirx.Div) else a - quotient * b


def converted(value: Any, dtype: str) -> Any:
    """Return values as a type keeps them: floats rounded to it, integers wrapped, in int64."""
    if dtype == "bool":
        return np.asarray(value).astype(bool)
    if "float" in dtype:
        return np.asarray(value).astype(dtype)
    found = np.asarray(value)
    return (np.trunc(found) if found.dtype.kind in "fV" else found).astype("int64").astype(dtype).astype("int64")


def unknown(*values: Any) -> str | None:
    """Return what numpy isn't told how to compute in expressions or statements, in words, if there is something."""
    found: list[str] = []

    def look(node: Any) -> None:
        name = _called(node)
        if name not in (*_CALLS, "if_then_else", "reinterpret"):
            found.append(f"the call {node}")

    for value in values:
        if not isinstance(value, (int, float)):
            tvm_ffi.structural_walk(value, (ir.Call, look))
    return found[0] if found else None


def _called(expr: Any) -> str:
    return str(getattr(expr.op, "name", expr.op)).rpartition(".")[2]


def kept(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return values as a tile of a type holds them."""
    return converted(value, dtype).astype(dtype)
