"""Adding to memory that other blocks add to at the same time.

Blocks run in parallel threads, so the addition must be one operation. TensorIR has none for CPUs; it comes in as a
function in LLVM's language, which makes a loop around compare-and-exchange of it where the CPU can't add floats in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from tvm_axe.tile.targets.llvm.conversions import NARROW, rounded

_TYPES = {
    "float32": ("float", "fadd"),
    "float64": ("double", "fadd"),
    "float16": ("half", "fadd"),
    "bfloat16": ("bfloat", "fadd"),
    "int32": ("i32", "add"),
    "int64": ("i64", "add"),
    "uint32": ("i32", "add"),
}
"""LLVM's type and operation, by the element's type."""

DTYPES = tuple(_TYPES)


def source(dtype: str) -> str:
    """The function that adds elements of a type, given in the type that they are computed with."""
    kind, operation = _TYPES[dtype]
    passed, converted = ("float", "fptrunc") if dtype in NARROW else (kind, "bitcast")
    return f"""
define linkonce_odr void @axe_atomic_add_{dtype}(ptr %to, {passed} %number) alwaysinline {{
  %value = {converted} {passed} %number to {kind}
  %before = atomicrmw {operation} ptr %to, {kind} %value monotonic
  ret void
}}
"""


def add(buffer: Any, indices: Sequence[Any], value: Any) -> None:
    """Emit the addition of `value`, a number of the type that the buffer's elements are computed with."""
    dtype = str(buffer.dtype)
    value = rounded(value, dtype) if dtype in NARROW else value
    T.evaluate(T.call_extern("void", f"axe_atomic_add_{dtype}", T.address_of(buffer[tuple(indices)]), value))
