"""An element and its place in a row as one integer, by which targets order them.

The upper half of a key is an int32 whose order is that of elements, the lower half counts places from the end: so of
two keys of a row the larger one comes first, equal elements in the order of their places, and no two keys are equal.
What takes the largest of integers, or sorts them, then knows nothing of NaN, signs of zero, or which comes first.

Source: the order of floats' bits, IEEE 754-2019, section 5.10.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tvm_axe.tile.nodes import Sort
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram

KEY = "int64"
"""The type of a key."""

ORDERED = ("float16", "bfloat16", "float32", "int8", "int16", "int32", "uint8", "uint16", "uint32")
"""The types of elements that keys are made of."""

PASSES = 8
"""Results of a row up to which each is the largest key below the one before; more are the first of a sorted row."""

_LAST = 0x7FFFFFFF  # the place at the end, and the bits of the number that a NaN counts as
_INFINITY = 0x7F800000


def by_passes(node: Sort) -> bool:
    """Whether each result is searched by itself, and rows aren't sorted."""
    return node.word in ("argmax", "argmin") or (node.word == "top_k" and node.count <= PASSES)


def decide(program: TileProgram, decisions: Decisions) -> None:
    """Write down how rows are ordered, and why."""
    for node in program.nodes():
        if isinstance(node, Sort) and by_passes(node):
            how = f"{node.count} pass{'es' * (node.count > 1)} over each line"
            decisions.add(node, how, "the largest of integers that are an element and its place")
        elif isinstance(node, Sort):
            why = "all of a row is sorted" if node.word == "sort" else f"more than {PASSES} results of a row"
            decisions.add(node, f"a network of {len(stages(node.length))} stages", why)


def stages(length: int) -> list[tuple[int, bool]]:
    """The stages of a network that sorts rows of a length: half of a group's extent, and whether it is mirrored.

    In a group of twice `half`, each of the first elements meets the one as far from the group's end, if mirrored, else
    the one `half` further on. The larger one goes to the front in all of them, so what would fill a row up to a power
    of two stays at its end, and isn't there.

    >>> stages(4)
    [(1, True), (2, True), (1, False)]
    """
    found, half = [], 1
    while half < length:
        found.append((half, True))
        inner = half // 2
        while inner:
            found.append((inner, False))
            inner //= 2
        half *= 2
    return found


def pair(number: Any, half: int, mirrored: bool) -> tuple[Any, Any]:
    """The two places, the smaller one first, that the pair of a number compares in a stage."""
    first, step = number // half * (2 * half), number % half
    return first + step, first + (2 * half - 1) - step if mirrored else first + half + step


def pairs(length: int) -> int:
    """How many pairs a stage has, some of them beyond the row's end."""
    return 1 << max(length - 1, 0).bit_length() >> 1


def key(node: Sort, value: Any, place: Any) -> Any:
    """The key of an element, given as a float32 or an integer, and its place in the row."""
    dtype, last = str(value.ty.dtype), _int32(_LAST)
    if dtype == "float32":
        bits = tirx.reinterpret("int32", value)
        size = tirx.BitwiseAnd(bits, last)
        number = tirx.Select(bits < _int32(0), tirx.BitwiseXor(bits, last), bits)
        number = tirx.Select(size == _int32(0), _int32(0), number)
        is_nan = size > _int32(_INFINITY)
        first = is_nan if node.nan_first else None
        number = _reversed(tirx.Select(is_nan, last, number), node.descending)
        number = number if first is None or node.descending else tirx.Select(first, last, number)
    elif dtype == "uint32":
        bits = tirx.reinterpret("int32", value)
        number = _reversed(tirx.BitwiseXor(bits, tirx.const(-(2**31), "int32")), node.descending)
    else:
        number = _reversed(value if dtype == "int32" else tirx.Cast("int32", value), node.descending)
    upper = tirx.LShift(tirx.Cast(KEY, number), tirx.const(32, KEY))
    return tirx.BitwiseOr(upper, tirx.Cast(KEY, last - place))


def least() -> Any:
    """What is less than all keys."""
    return tirx.min_value(KEY)


def place(found: Any) -> Any:
    """The place of a key, an int32."""
    return _int32(_LAST) - tirx.Cast("int32", tirx.BitwiseAnd(found, tirx.const(_LAST, KEY)))


def element(node: Sort, found: Any, dtype: str) -> Any:
    """The element of a key, in the type that `key` was given, `dtype`."""
    number = _reversed(tirx.Cast("int32", tirx.RShift(found, tirx.const(32, KEY))), node.descending)
    if dtype == "float32":
        last = _int32(_LAST)
        return tirx.reinterpret(dtype, tirx.Select(number < _int32(0), tirx.BitwiseXor(number, last), number))
    if dtype == "uint32":
        return tirx.reinterpret(dtype, tirx.BitwiseXor(number, tirx.const(-(2**31), "int32")))
    return number if dtype == "int32" else tirx.Cast(dtype, number)


def _reversed(number: Any, descending: bool) -> Any:
    return number if descending else tirx.BitwiseXor(number, _int32(-1))


def _int32(number: int) -> Any:
    return tirx.const(number, "int32")
