"""The words that join values with what memory holds: `atomic_add`, `atomic_max`, `atomic_min`; and `atomic_cas`.

Blocks and points may do so to one element of a tensor, in no order, points to one of a tile in shared memory. A
histogram, of what each block holds and then of all:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def count(X: T.Buffer((4096,), "int32"), H: T.Buffer((256,), "int32")):
...     with tile.kernel(16) as b:
...         own = tile.shared((256,), "int32")
...         tile.fill(own, 0)
...         with tile.parallel(256) as i:
...             tile.atomic_add(1, own[X[b * 256 + i] % 256])
...         tile.atomic_add(own, H)

`atomic_cas` gives what was there before, so that points find out who came first. A set of keys, each in the first place
from its hash on that is free (0) or has it already; how many keys found no place is counted:

>>> @T.prim_func
... def collect(X: T.Buffer((4096,), "int32"), K: T.Buffer((1024,), "int32"), lost: T.Buffer((1,), "int32")):
...     with tile.kernel(16) as b:
...         with tile.parallel(256) as i:
...             key = X[b * 256 + i]
...             done = False
...             for probe in range(8):
...                 if not done:
...                     held = tile.atomic_cas(0, key, K[(key * 37 + probe) % 1024])
...                     if held == 0 or held == key:
...                         done = True
...             if not done:
...                 tile.atomic_add(1, lost[0])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.tile.language import ATOMICS, copy

CALL = "axe.atomic_"
"""How the call begins that is stored in an element which a value is joined with; the kind follows."""

CAS = f"{CALL}cas"

SWAPPED = ("int32", "int64", "uint32")
"""The types of elements that are compared and swapped."""


def atomic_add(src: Any, dst: Any) -> Any:
    """Add to what `dst` holds, in no order with whoever else does.

    Parameters
    ----------
    src : Buffer, BufferRegion, number or Expr
        A tile, which is added as ``copy(src, dst, atomic="add")`` does; or inside `parallel` a value of `dst`'s type.
    dst : BufferRegion or an element
        Where to, in a tensor in global memory that the program touches in no other way, unless flags order that
        (`tvm_axe.tile.joining`), or in a tile in shared memory that the `parallel` touches in no other way. For a
        value, an element.

    Raises
    ------
    TileError
        The value's type isn't that of `dst`, or `dst` is no place in a tensor or in shared memory.

    Notes
    -----
    Relaxed, at the scope of a device, of the system in a tensor of the mesh, of a block in shared memory (PTX ISA,
    "Memory Consistency Model"). On Hopper a kernel with products adds whole tiles by one instruction, of sums that
    leave through shared memory or of a tile there (PTX ISA, "cp.reduce.async.bulk.tensor").
    """
    return _join("add", src, dst)


def atomic_max(src: Any, dst: Any) -> Any:
    """Keep the larger of `src` and what `dst` holds, as `atomic_add` adds; a NaN stays."""
    return _join("max", src, dst)


def atomic_min(src: Any, dst: Any) -> Any:
    """Keep the smaller of `src` and what `dst` holds, as `atomic_add` adds; a NaN stays."""
    return _join("min", src, dst)


def atomic_cas(compare: Any, src: Any, dst: Any) -> Any:
    """Compare and swap: store `src` in `dst` if that holds `compare`, and give what it held before, all at once.

    Parameters
    ----------
    compare, src : number or Expr
        Values of `dst`'s type.
    dst : an element
        Of a tensor in global memory or of a tile in shared memory, as `atomic_add` takes them; of int32, int64 or
        uint32.

    Returns
    -------
    Expr
        What `dst` held. It is a value of the body of a `parallel`, outside of the sides of ``T.if_then_else``; an `if`
        keeps points from swapping. For all of a block, the element of a `tile.shared` that it is stored in.

    Raises
    ------
    TileError
        `dst` is no element, or of another type, or the values are.

    Notes
    -----
    Relaxed, as `atomic_add` is: that a point sees a value says nothing of what else its giver has stored. With equal
    values it changes nothing, and reads an element that others swap.
    """
    dtype = _element("cas", dst)
    if dtype not in SWAPPED:
        raise TileError(
            f"atomic_cas: {dst} is {dtype}; valid are {', '.join(SWAPPED)}: a tensor of numbers of as many bits, whose "
            "values T.reinterpret gives"
        )
    return T.call_extern(dtype, CAS, _value("cas", compare, dst), _value("cas", src, dst), dst)


def _join(kind: str, src: Any, dst: Any) -> Any:
    if isinstance(src, ir.TensorRegion) or (isinstance(src, tirx.Var) and tirx.is_buffer_var(src)):
        return copy(src, dst, atomic=kind)
    dtype = _element(kind, dst)
    call = T.call_extern(dtype, f"{CALL}{kind}", _value(kind, src, dst))
    return T.buffer_store(dst.source, call, list(dst.indices))


def _element(kind: str, dst: Any) -> str:
    """The type of the element that a value is joined with."""
    if not isinstance(dst, ir.TensorLoad):
        raise TileError(f"atomic_{kind}: a value is joined with an element of a tensor, got {type(dst).__name__}")
    return str(dst.ty.dtype)


def _value(kind: str, src: Any, dst: Any) -> Any:
    """A value of the element's type."""
    dtype = str(dst.ty.dtype)
    if isinstance(src, (int, float)):
        src = tirx.const(src, dtype)
    if str(src.ty.dtype) != dtype:
        raise TileError(f'atomic_{kind}: the value is {src.ty}, {dst} is {dtype}; valid is T.cast(value, "{dtype}")')
    return src


@dataclass(frozen=True)
class Joined:
    """How a stored value is joined with what its element holds.

    Attributes
    ----------
    kind : str
        One of `ATOMICS`, or ``"cas"``.
    value : Expr
        The value.
    compare, former : Expr and Var, or None
        Of ``"cas"``: what the element has to hold, and the name of what it held, in all that follows.
    """

    kind: str
    value: Any
    compare: Any = None
    former: Any = None


def joined(value: Any) -> Joined | None:
    """How a stored value is joined with what its element holds; None of one that is just stored.

    >>> from tvm import tirx
    >>> joined(tirx.call_extern("int32", "axe.atomic_max", 5)).kind
    'max'
    """
    kind, arguments = _called(value)
    if kind == "cas":
        compare, src, former = arguments
        return Joined(kind, src, compare, former)
    return Joined(kind, *arguments) if kind in ATOMICS else None


def formers(body: tirx.Stmt) -> list[tirx.Var]:
    """The names of what the compare-and-swaps of a body found."""
    found: list[Joined | None] = []
    tvm_ffi.structural_walk(body, (tirx.BufferStore, lambda store: found.append(joined(store.value))))
    return [how.former for how in found if how is not None and how.former is not None]


def is_swap(value: Any) -> bool:
    """Whether an expression is a call of `atomic_cas` as it is written: with its element, and no name yet."""
    kind, arguments = _called(value)
    return kind == "cas" and isinstance(arguments[2], ir.TensorLoad)


def swapped(swap: ir.Call) -> tuple[tirx.BufferStore, tirx.Var]:
    """Such a call as a store to its element, and the name of what that held before."""
    name, compare, src, element = swap.args
    former = tirx.Var("former", element.ty.dtype)
    call = tirx.call_extern(element.ty.dtype, str(name.value), compare, src, former)
    return tirx.BufferStore(element.source, call, list(element.indices)), former


def _called(value: Any) -> tuple[str, list[Any]]:
    name = str(getattr(value.args[0], "value", "")) if isinstance(value, ir.Call) and value.args else ""
    return (name.removeprefix(CALL), list(value.args[1:])) if name.startswith(CALL) else ("", [])
