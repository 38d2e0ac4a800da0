"""The value of upstream's expressions in numpy: float64 and int64, at one point or at many at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from tvm import ir, tirx

from tvm_axe.tile.philox import is_random

_BINARY = {
    tirx.Add: np.add, tirx.Sub: np.subtract, tirx.Mul: np.multiply,
    tirx.Min: np.minimum, tirx.Max: np.maximum,
    tirx.FloorDiv: np.floor_divide, tirx.FloorMod: np.mod,
    tirx.EQ: np.equal, tirx.NE: np.not_equal, tirx.LT: np.less, tirx.LE: np.less_equal,
    tirx.GT: np.greater, tirx.GE: np.greater_equal,
    tirx.And: np.logical_and, tirx.Or: np.logical_or,
    tirx.BitwiseAnd: np.bitwise_and, tirx.BitwiseOr: np.bitwise_or, tirx.BitwiseXor: np.bitwise_xor,
    tirx.LShift: np.left_shift, tirx.RShift: np.right_shift,
}  # fmt: skip


def _round_away(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


_CALLS = {
    "abs": np.abs, "fabs": np.abs, "ceil": np.ceil, "cos": np.cos, "erf": np.vectorize(math.erf, otypes=[float]),
    "exp": np.exp, "exp2": np.exp2, "floor": np.floor, "fma": lambda x, y, z: x * y + z,
    "isinf": np.isinf, "isnan": np.isnan, "likely": lambda x: x, "log": np.log, "log1p": np.log1p, "log2": np.log2,
    "nearbyint": np.rint, "pow": np.power, "round": _round_away, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "sin": np.sin, "sqrt": np.sqrt, "tanh": np.tanh, "trunc": np.trunc,
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.invert, "shift_left": np.left_shift, "shift_right": np.right_shift,
}  # fmt: skip


def wrapped(value: np.ndarray, dtype: str) -> np.ndarray:
    """An integer as its type keeps it; floats are not rounded."""
    if dtype == "bool":
        return np.asarray(value).astype(bool)
    return np.asarray(value).astype(dtype).astype("int64") if "int" in dtype else np.asarray(value)


def philox(seed: np.ndarray, counter: np.ndarray, upper: int = 0) -> list[np.ndarray]:
    """The four words of Philox-4x32-10, whose counter's upper 64 bits are a number; int64, as arithmetic is here."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    seed, counter, rest = (np.asarray(number).astype("int64").view("uint64") for number in (seed, counter, upper))
    a, b, c, d, k, l = (part for word in (counter, rest, seed) for part in (word & low, word >> shift))
    for _ in range(10):
        p, q = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (q >> shift) ^ b ^ k, q & low, (p >> shift) ^ d ^ l, p & low
        k, l = (k + np.uint64(0x9E3779B9)) & low, (l + np.uint64(0xBB67AE85)) & low
    return [word.astype("int64") for word in (a, b, c, d)]


@dataclass(frozen=True)
class Evaluator:
    """Evaluates expressions.

    Parameters
    ----------
    values : of the variables; arrays have a value a point
    load : called with a load, the values of its indices, and where it happens
    active : at which points, or True
    """

    values: dict[tirx.Var, np.ndarray]
    load: Callable[[ir.TensorLoad, list[np.ndarray], np.ndarray], np.ndarray]
    active: np.ndarray = np.True_

    def where(self, condition: np.ndarray) -> Evaluator:
        """The same at those points alone at which the condition holds."""
        return replace(self, active=np.logical_and(self.active, condition))

    def __call__(self, expr: tirx.Expr) -> np.ndarray:
        if isinstance(expr, int | float | bool):
            return np.asarray(expr)
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            return np.asarray(bool(expr.value) if str(expr.ty) == "bool" else expr.value)
        if isinstance(expr, tirx.Var):
            return self.values[expr]
        if isinstance(expr, ir.TensorLoad):
            return self.load(expr, [self(index) for index in expr.indices], self.active)
        if isinstance(expr, tirx.Cast):
            value, dtype = self(expr.value), str(expr.ty)
            return np.asarray(value, "float64") if "float" in dtype else wrapped(np.trunc(value), dtype)
        if isinstance(expr, tirx.BitwiseNot):
            return np.invert(self(expr.a))
        if isinstance(expr, tirx.Not):
            return np.logical_not(self(expr.a))
        if isinstance(expr, tirx.Select):
            return np.where(self(expr.condition), self(expr.true_value), self(expr.false_value))
        if isinstance(expr, tirx.Let):
            return replace(self, values={**self.values, expr.var: self(expr.value)})(expr.body)
        if isinstance(expr, tirx.Div | tirx.Mod) and "int" in str(expr.ty):
            quotient = np.trunc(self(expr.a) / self(expr.b)).astype("int64")
            return quotient if isinstance(expr, tirx.Div) else self(expr.a) - quotient * self(expr.b)
        if isinstance(expr, tirx.Div | tirx.Mod):
            return (np.divide if isinstance(expr, tirx.Div) else np.fmod)(self(expr.a), self(expr.b))
        if type(expr) in _BINARY:
            found = _BINARY[type(expr)](self(expr.a), self(expr.b))
            wraps = isinstance(expr, tirx.LShift) or str(expr.ty).startswith("uint")
            return wrapped(found, str(expr.ty)) if wraps else found
        if isinstance(expr, ir.Call):
            name = str(expr.op.name).rpartition(".")[2]
            if is_random(expr):
                return philox(*(self(argument) for argument in expr.args[1:]))[0]
            if name == "if_then_else":
                condition, then, otherwise = expr.args
                holds = self(condition)
                return np.where(holds, self.where(holds)(then), self.where(np.logical_not(holds))(otherwise))
            if name == "reinterpret":
                bits = np.asarray(self(expr.args[0])).astype(str(expr.args[0].ty)).view(str(expr.ty))
                return bits.astype("int64" if "int" in str(expr.ty) else "float64")
            if name in _CALLS:
                return _CALLS[name](*(self(argument) for argument in expr.args))
        raise NotImplementedError(f"the interpreter knows no {type(expr).__name__}: {expr}")
