"""The words that join values with what memory holds: `atomic_add`, `atomic_max`, `atomic_min`.

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
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.tile.language import ATOMICS, copy

CALL = "axe.atomic_"
"""How the call begins that is stored in an element which a value is joined with; the kind follows."""


def atomic_add(src: Any, dst: Any) -> Any:
    """Add to what `dst` holds, in no order with whoever else does.

    Parameters
    ----------
    src : Buffer, BufferRegion, number or Expr
        A tile, which is added as ``copy(src, dst, atomic="add")`` does; or inside `parallel` a value of `dst`'s type.
    dst : BufferRegion or an element
        Where to, in a tensor in global memory that the program touches in no other way, or in a tile in shared memory
        that the `parallel` touches in no other way. For a value, an element.

    Raises
    ------
    TileError
        The value's type isn't that of `dst`, or `dst` is no place in a tensor or in shared memory.

    Notes
    -----
    Relaxed, at the scope of a device, of the system in a tensor of the mesh, of a block in shared memory (PTX ISA,
    "Memory Consistency Model").
    """
    return _join("add", src, dst)


def atomic_max(src: Any, dst: Any) -> Any:
    """Keep the larger of `src` and what `dst` holds, as `atomic_add` adds; a NaN stays."""
    return _join("max", src, dst)


def atomic_min(src: Any, dst: Any) -> Any:
    """Keep the smaller of `src` and what `dst` holds, as `atomic_add` adds; a NaN stays."""
    return _join("min", src, dst)


def _join(kind: str, src: Any, dst: Any) -> Any:
    if isinstance(src, ir.TensorRegion) or (isinstance(src, tirx.Var) and tirx.is_buffer_var(src)):
        return copy(src, dst, atomic=kind)
    if not isinstance(dst, ir.TensorLoad):
        raise TileError(f"atomic_{kind}: a value is joined with an element of a tensor, got {type(dst).__name__}")
    dtype = str(dst.ty.dtype)
    if isinstance(src, (int, float)):
        src = tirx.const(src, dtype)
    if str(src.ty.dtype) != dtype:
        raise TileError(f'atomic_{kind}: the value is {src.ty}, {dst} is {dtype}; valid is T.cast(value, "{dtype}")')
    return T.buffer_store(dst.source, T.call_extern(dtype, f"{CALL}{kind}", src), list(dst.indices))


def joined(value: Any) -> tuple[str, Any] | None:
    """How a stored value is joined with what its element holds, and the value itself; None of one that is just stored.

    >>> from tvm import tirx
    >>> joined(tirx.call_extern("int32", "axe.atomic_max", 5))
    ('max', 5)
    """
    name = str(getattr(value.args[0], "value", "")) if isinstance(value, ir.Call) and value.args else ""
    kind = name.removeprefix(CALL)
    return (kind, value.args[1]) if name.startswith(CALL) and kind in ATOMICS else None
