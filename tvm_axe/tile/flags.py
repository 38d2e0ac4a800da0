"""The words by which kernels meet: `wait` and `signal`, on flags in global memory (`tvm_axe.tile.language`)."""

from __future__ import annotations

import math
from typing import Any

from tvm import ir, tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError
from tvm_axe.tile.calls import corner

WAIT, SIGNAL = "axe.wait", "axe.signal"
"""Names of the external calls that `wait` and `signal` become: of the first flag, a value, a mode and the extents."""

RESET, LOADS = 1, 2
"""Modes of a `wait`, which may be added up: it sets its flags to 0 afterwards; it is for loads alone."""

ORDERED, ADD = 1, 2
"""Modes of a `signal`, which may be added up."""

MOST_FLAGS = 1024
"""The most flags of one `wait` or `signal`: as many as a block may have threads."""


def wait(flags: Any, value: Any = 1, *, reset: bool = False, loads: bool = False) -> Any:
    """Go on when every one of the flags is at least `value`; whatever was ordered before their `signal` is seen then.

    Loads stay behind the wait, loads that run ahead too. In a specialized kernel the producer waits, so only what is
    loaded into shared memory may depend on it. A GPU's kernel that waits for about three seconds ends with an error, a
    CPU's after twenty.

    Parameters
    ----------
    flags : element or slice
        The flags, up to 1024 elements of an int32 tensor in global memory that other statements don't touch.
    value : int or Expr, optional
        The value to wait for, an int32; a constant is at least 1.
    reset : bool, optional
        Whether the flags are set to 0 afterwards, which only one block may do.
    loads : bool, optional
        Whether only what is loaded into shared memory depends on it: threads of a specialized kernel may then read and
        store what they like behind it. Nothing checks that.

    Raises
    ------
    TileError
        `flags` is no part of a tensor with constant extents, or has too many; `value` is no int32.

    Notes
    -----
    An acquire at system scope (PTX ISA, "Memory Consistency Model").
    """
    if isinstance(value, int) and value < 1:
        raise TileError(f"wait: for a value of {value}, which flags have from the start; valid is 1 or more")
    return _on_flags("wait", flags, value, RESET * bool(reset) + LOADS * bool(loads))


def signal(flags: Any, value: Any = 1, *, ordered: bool = True, add: bool = False) -> Any:
    """Set every one of the flags to `value` when all that the block has read and written so far is done.

    In a specialized kernel the storing warp signals: at least one tile must have left through shared memory before,
    behind all that has been read, and none may have been written otherwise.

    Parameters
    ----------
    flags : element or slice
        The flags, up to 1024 elements of an int32 tensor in global memory of any device, which other statements don't
        touch.
    value : int or Expr, optional
        The value to set or add, an int32.
    ordered : bool, optional
        Without it the flags are set at once, and say only that the kernels before this one have ended.
    add : bool, optional
        Whether the value is added, for flags that count; then several blocks may signal one flag.

    Raises
    ------
    TileError
        `flags` is no part of a tensor with constant extents, or has too many; `value` is no int32.

    Notes
    -----
    A release at system scope, or relaxed without `ordered` (PTX ISA, "Memory Consistency Model").
    """
    return _on_flags("signal", flags, value, ORDERED * bool(ordered) + ADD * bool(add))


def _on_flags(word: str, flags: Any, value: Any, mode: int) -> Any:
    """The call of `wait` or `signal`, as the module's text says it."""
    found = corner(flags)
    if found is None:
        raise TileError(f"{word}: flags are an element or a slice of a tensor, got {type(flags).__name__}")
    first, extents = found
    if not all(isinstance(extent, int) for extent in extents):
        raise TileError(f"{word}: flags have constant extents, got {[str(extent) for extent in extents]}")
    if not 1 <= math.prod(extents) <= MOST_FLAGS:
        raise TileError(f"{word}: {math.prod(extents)} flags; valid are 1 to {MOST_FLAGS}")
    if isinstance(value, int):
        if not -(1 << 31) <= value < 1 << 31:
            raise TileError(f"{word}: value is an int32, got {value}")
        value = tirx.const(value, "int32")
    elif not (isinstance(value, ir.Expr) and str(value.ty) == "int32"):
        raise TileError(f"{word}: value is an int32, got {getattr(value, 'ty', type(value).__name__)}")
    return T.evaluate(T.call_extern("int32", WAIT if word == "wait" else SIGNAL, first, value, mode, *extents))
