"""`print`: elements of a tile, or a number, as a kernel has them, a line each.

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def softmax(X: T.Buffer((64, 256), "float32"), Y: T.Buffer((64, 256), "float32")):
...     with tile.kernel(16) as b:
...         x = tile.fragment((4, 256), "float32")
...         most = tile.fragment((4,), "float32")
...         tile.copy(X[b * 4, 0], x)
...         tile.max(x, most)
...         tile.print("largest", most, block=(3,))
...         with tile.parallel(4, 256) as (i, j):
...             x[i, j] = T.exp(x[i, j] - most[i])
...         tile.copy(x, Y[b * 4, 0])

Called, it says ``largest[0] = 2.75 in block (3)`` and so on, four lines. A condition around it says when, too, as in
``if b > 3 and k == 0:``, of numbers that all threads of a block have alike.

Lines go to the standard output of the process, by C's ``printf``: on a GPU once the host waits for it, those of one
tile in no order, and a megabyte of them at most between two waits (CUDA C++ Programming Guide, "Formatted Output").
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.tile.calls import corner
from tvm_axe.tile.nodes import Print

PRINT = "axe.print"
"""Name of the call that `print` becomes: of the label, how many coordinates of a block follow, these, and a value, or
the first element of a region and its extents."""


def print(label: str, what: Any, *, block: Sequence[Any] | None = None) -> Any:
    """Print each element of a tile, or a number, with a label and the block that has it.

    An element is printed once, by the first of the threads that have it: ``label[2, 5] = 0.25 in block (0, 3)``, with
    its place in the tile. Of a region that reaches over the end of its tensor what lies outside isn't.

    Parameters
    ----------
    label : str
        What stands before the place, of printable ASCII.
    what : Buffer, BufferRegion, an element or Expr
        A tile on chip or a tensor, a slice or an element of one, or a number that all threads have alike.
    block : sequence of int, optional
        The one block that prints, a coordinate for each dimension of the grid; without it all do.

    Raises
    ------
    TileError
        `label` is no such text, or `what` is nothing of these.
    """
    if not isinstance(label, str) or not (label.isascii() and label.isprintable()):
        raise TileError(f"print: the label is a text of printable ASCII, got {label!r}")
    found = corner(what)
    if found is None and not isinstance(what, ir.Expr):
        raise TileError(f"print: takes a tile, a slice of one, an element or a number, got {type(what).__name__}")
    rest = [what] if found is None else [found[0], *found[1]]
    coordinates = list(block or ())
    return T.evaluate(T.call_extern("int32", PRINT, label, len(coordinates), *coordinates, *rest))


def parts(stmt: tirx.Evaluate) -> tuple[str, list[Any], Any, list[Any]]:
    """What `print` was given: the label, the block's coordinates, the value or first element, and the extents."""
    _, label, count, *rest = stmt.value.args
    first, *extents = rest[int(count) :]
    return str(label.value), rest[: int(count)], first, extents


# ---- What targets print ----------------------------------------------------------------------------------------------


def kind(node: Print) -> str:
    """As what a value goes to ``printf``: ``"float64"``, ``"int64"`` or ``"uint64"``."""
    return "float64" if "float" in node.dtype else "uint64" if node.dtype == "uint64" else "int64"


def line(node: Print) -> str:
    """A line as ``printf`` takes it: of the place, the value and the block's coordinates, integers as int64."""
    value = {"float64": "%.17g" if node.dtype == "float64" else "%.9g", "int64": "%ld", "uint64": "%lu"}[kind(node)]
    place = "" if node.region is None else f"[{_numbers(len(node.region.extents))}]"
    return f"{node.label.replace('%', '%%')}{place} = {value} in block ({_numbers(len(node.block))})\n"


def _numbers(count: int) -> str:
    return ", ".join(["%ld"] * count)


def function(node: Print) -> str:
    """The name of the function that prints such lines, the same wherever they are alike."""
    return f"axe_print_{hashlib.sha256(line(node).encode()).hexdigest()[:16]}"


def arguments(node: Print, place: Sequence[Any], value: Any, block: Sequence[Any]) -> list[Any]:
    """What the function is called with, each in its type."""
    return [
        *(T.cast(index, "int64") for index in place),
        _as(value, kind(node)),
        *(T.cast(at, "int64") for at in block),
    ]


def _as(value: Any, dtype: str) -> Any:
    if dtype == "float64" and str(value.ty.dtype) != "float32":
        value = value if str(value.ty.dtype) == "float64" else T.cast(value, "float32")  # which has all smaller floats
    return value if str(value.ty.dtype) == dtype else T.cast(value, dtype)
