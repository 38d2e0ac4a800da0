"""Which keys the scores of an attention count, by what is added to the scores, or chosen instead of them.

A mask is a constant; or, where tokens are as many as a call brings, what importers write of ranges and comparisons::

    where(expand_dims(arange(n), 0) - expand_dims(arange(n), 1) <= 0, 0, -inf)

Of these the elements are worked out in two cases, of keys that are later than their query and of the others: a mask is
causal if in the one case no score counts, and in the other each is as it was. Where the others aren't all alike, the
nearest of them that differs from its query's own key ends a window, if all keys before it differ, and none behind it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tvm import ir, relax, tirx
from tvm.ir import GenericConst, Range
from tvm.sym import Analyzer

from tvm_axe.relax.values import Side, Values, alike, sides_of

__all__ = ["NOTHING", "Mask", "chosen_by", "mask_added"]

NOTHING = -1e30
"""What is added to scores that aren't to count is at most this."""

_FAR = 1 << 40
"""More than there are keys."""

_COMPARISONS = {
    "less": (operator.lt, tirx.LT), "less_equal": (operator.le, tirx.LE), "greater": (operator.gt, tirx.GT),
    "greater_equal": (operator.ge, tirx.GE), "equal": (operator.eq, tirx.EQ), "not_equal": (operator.ne, tirx.NE),
}  # fmt: skip
_ARITHMETIC = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
_LOGICAL = {"logical_and": min, "bitwise_and": min, "logical_or": max, "bitwise_or": max}
_FILLED = {"zeros": 0.0, "zeros_like": 0.0, "ones": 1.0, "ones_like": 1.0}


class Mask(NamedTuple):
    """Which keys a query sees: all or, causal, none behind its own; with a window, of these the last so many alone."""

    causal: bool = False
    window: int | None = None


_Element = Any
"""An expression of the place of integers, a number of anything else: of truth values 1 or 0."""


def mask_added(values: Values, mask: relax.Expr, sides: Sequence[Side]) -> Mask | None:
    """The mask that is added to scores of these extents; None of any other.

    The last query is that of the last key.
    """
    queries, keys = sides[-2:]
    array = values.constant(mask)
    if array is not None and isinstance(queries, int) and isinstance(keys, int):
        hidden = array.astype("float64") <= NOTHING  # which float16 has not
        return None if (array[~hidden] != 0).any() else _of_hidden(hidden, queries, keys)
    later, seen, far, window = _in_cases(values, mask, sides)
    if later is None or seen != 0 or not (later == 0 or later <= NOTHING):
        return None
    if window is None:
        return Mask(later != 0)
    hides = later != 0 and far is not None and far <= NOTHING
    return Mask(True, window) if hides else None


def chosen_by(values: Values, condition: relax.Expr, sides: Sequence[Side]) -> tuple[bool, Mask] | None:
    """Whether a condition holds of the keys that a mask hides, or of all others, and the mask; None of any other."""
    queries, keys = sides[-2:]
    array = values.constant(condition)
    if array is not None and isinstance(queries, int) and isinstance(keys, int):
        found = ((holds, _of_hidden(array == holds, queries, keys)) for holds in (True, False))
        return next(((holds, mask) for holds, mask in found if mask is not None and mask.causal), None)
    later, seen, far, window = _in_cases(values, condition, sides)
    if later is None or seen is None or later == seen or (window is not None and far != later):
        return None
    return later != 0, Mask(True, window)


def _of_hidden(hidden: np.ndarray, queries: int, keys: int) -> Mask | None:
    if math.prod(hidden.shape[:-2]) != 1:
        return None
    hidden = np.broadcast_to(hidden.reshape(hidden.shape[-2:] if hidden.ndim > 1 else hidden.shape), (queries, keys))
    if not hidden.any():
        return Mask()
    rows, columns = np.indices(hidden.shape)
    before = rows + keys - queries - columns
    shown = ~hidden
    window = int(before[shown].max(initial=-1)) + 1
    if window < 1 or not np.array_equal(shown, (before >= 0) & (before < window)):
        return None
    return Mask(True, window if window < int(before.max()) + 1 else None)


def _in_cases(
    values: Values, value: relax.Expr, sides: Sequence[Side]
) -> tuple[float | None, float | None, float | None, int | None]:
    """The element of a key that is later than its query, of any other, of those before a window, and the window.

    None where these aren't all one number; there is a window only where the others aren't.
    """

    def element(least: int, extent: int = _FAR) -> float | None:
        return _at_distance(values, value, sides, least, extent)

    later = element(1)
    seen = None if later is None else element(1 - _FAR)
    if later is None or seen is not None:
        return later, seen, None, None
    own = element(0, 1)
    window = None if own is None else _window(lambda distance: element(-distance, 1) == own)
    if window is None:
        return later, None, None, None
    return later, element(1 - window, window), element(-_FAR, _FAR - window + 1), window


def _window(is_seen: Callable[[int], bool]) -> int | None:
    """The first distance that isn't seen, if there is one and all before it are; who asks has to prove that."""
    most = 1
    while is_seen(most):
        most *= 2
        if most >= _FAR:
            return None
    least = most // 2
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if is_seen(middle) else (least, middle)
    return most


def _at_distance(values: Values, value: relax.Expr, sides: Sequence[Side], least: int, extent: int) -> float | None:
    """The element of all keys so far behind their query's own, from `least` on; None if it isn't one number."""
    *lead, queries, keys = sides
    row = tirx.const(0, "int64") if queries == 1 else tirx.Var("row", "int64")
    distance: tirx.Expr = tirx.const(least, "int64")
    analyzer = Analyzer()
    if extent > 1:
        distance = tirx.Var("distance", "int64")
        analyzer.bind(distance, Range.from_min_extent(tirx.const(least, "int64"), tirx.const(extent, "int64")))
    last = row if alike([queries], [keys]) else row + (keys - queries)
    place = [*(tirx.Var(f"i{at}", "int64") for at in range(len(lead))), row, last + distance]
    element = _Elements(values, analyzer).spread(value, place)
    return element if isinstance(element, float) else None


class _Elements:
    """Elements of tensors, as far as what the analyzer knows of the place decides them; None of what it doesn't."""

    def __init__(self, values: Values, analyzer: Analyzer) -> None:
        self._values, self._analyzer = values, analyzer

    def at(self, value: relax.Expr, place: Sequence[tirx.Expr]) -> _Element | None:
        """The element of a tensor at a place."""
        sides, call = sides_of(value), self._values.of(value)
        if sides is None or len(sides) != len(place):
            return None
        if isinstance(call, GenericConst):
            array = self._values.constant(call)
            return _typed(float(array.flat[0]), call) if array is not None and array.size == 1 else None
        if not isinstance(call, relax.Call) or not isinstance(call.op, ir.Op):
            return None
        name = str(call.op.name).removeprefix("relax.")
        if name in _FILLED:
            return _typed(_FILLED[name], call)
        if name in ("full", "full_like"):
            filled = self.at(call.args[1], [])
            return filled if filled is None or isinstance(filled, float) else _typed(float(filled), call)
        if name in (*_COMPARISONS, *_ARITHMETIC, *_LOGICAL, "where"):
            return self._combined(name, call, [self.spread(each, place) for each in call.args])
        rule = _RULES.get(name)
        return None if rule is None else rule(self, call, place)

    def _holds(self, condition: tirx.Expr) -> float | None:
        if self._analyzer.can_prove(condition):
            return 1.0
        return 0.0 if self._analyzer.can_prove(tirx.Not(condition)) else None

    def _combined(self, name: str, call: relax.Call, given: Sequence[_Element | None]) -> _Element | None:
        """The element of what is computed element by element."""
        if name == "where":
            condition, then, otherwise = given
            return None if condition is None else then if condition else otherwise
        a, b = given
        if a is None or b is None or isinstance(a, float) != isinstance(b, float):
            return None
        if name in _ARITHMETIC:
            return _ARITHMETIC[name](a, b)
        if name in _COMPARISONS:
            of_numbers, of_expressions = _COMPARISONS[name]
            return float(of_numbers(a, b)) if isinstance(a, float) else self._holds(of_expressions(a, b))
        return float(_LOGICAL[name](a, b)) if str(call.ty.dtype) == "bool" else None

    def spread(self, value: relax.Expr, place: Sequence[tirx.Expr]) -> _Element | None:
        """The element of an operand that is broadcast to what has the place."""
        sides = sides_of(value)
        if sides is None or len(sides) > len(place):
            return None
        behind = place[len(place) - len(sides) :]
        return self.at(value, [tirx.const(0, "int64") if side == 1 else at for side, at in zip(sides, behind)])

    # ---- Operators, each by its name in `_RULES` ---------------------------------------------------------------------

    def _moved(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        """Of a tensor that has the same dimensions, apart from those of one index."""
        before, after = sides_of(call.args[0]), sides_of(call)
        if before is None or after is None:
            return None
        if not alike([side for side in before if side != 1], [side for side in after if side != 1]):
            return None
        own = iter([at for side, at in zip(after, place) if side != 1])
        return self.at(call.args[0], [tirx.const(0, "int64") if side == 1 else next(own) for side in before])

    def _permuted(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        axes = [*range(len(place))][::-1] if call.attrs.axes is None else [int(a) % len(place) for a in call.attrs.axes]
        return self.at(call.args[0], [place[axes.index(dim)] for dim in range(len(place))])

    def _wider(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        return self.spread(call.args[0], place)

    def _cast(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        value = self.at(call.args[0], place)
        if value is None or (_is_integer(call) and not isinstance(value, float)):
            return value
        if isinstance(value, float | tirx.IntImm):
            number = float(value) if isinstance(value, float) else float(int(value))
            return _typed(float(number != 0) if str(call.ty.dtype) == "bool" else number, call)
        return None

    def _negated(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        value = self.at(call.args[0], place)
        return 1.0 - value if isinstance(value, float) and str(call.ty.dtype) == "bool" else None

    def _counted(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        start, _, step = call.args[:3]
        return _wide(start) + place[0] * _wide(step) if _is_integer(call) else None

    def _lower(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        return self._part(call, place, place[-1] - place[-2] <= _wide(call.args[1]))

    def _upper(self, call: relax.Call, place: Sequence[tirx.Expr]) -> _Element | None:
        return self._part(call, place, place[-1] - place[-2] >= _wide(call.args[1]))

    def _part(self, call: relax.Call, place: Sequence[tirx.Expr], condition: tirx.Expr) -> _Element | None:
        kept = self._holds(condition)
        return None if kept is None else self.at(call.args[0], place) if kept else _typed(0.0, call)


_RULES: dict[str, Any] = {
    "expand_dims": _Elements._moved,
    "squeeze": _Elements._moved,
    "reshape": _Elements._moved,
    "permute_dims": _Elements._permuted,
    "broadcast_to": _Elements._wider,
    "astype": _Elements._cast,
    "logical_not": _Elements._negated,
    "bitwise_not": _Elements._negated,
    "arange": _Elements._counted,
    "tril": _Elements._lower,
    "triu": _Elements._upper,
}


def _wide(extent: Any) -> tirx.Expr:
    """A number as an expression of 64 bits."""
    if isinstance(extent, int | tirx.IntImm):
        return tirx.const(int(extent), "int64")
    return extent if str(extent.ty) == "int64" else tirx.Cast("int64", extent)


def _is_integer(value: relax.Expr) -> bool:
    return "int" in str(value.ty.dtype)


def _typed(number: float, value: relax.Expr) -> _Element:
    """A number as an element of a tensor's type."""
    return tirx.const(int(number), "int64") if _is_integer(value) else number
