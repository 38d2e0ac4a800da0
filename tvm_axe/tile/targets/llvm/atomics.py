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
    "int32": ("i32", "add"),
    "int64": ("i64", "add"),
    "uint32": ("i32", "add"),
}
"""LLVM's type and operation, by the element's type."""

# LLVM would round by a function of compiler-rt, ``__truncsfbf2``, on every CPU without AVX512_BF16, and the process has
# none. So the sum is rounded by arithmetic, to nearest, ties to even; a NaN stays one.
_BFLOAT16 = """
define linkonce_odr void @axe_atomic_add_bfloat16(ptr %to, float %number) alwaysinline {
entry:
  %first = load atomic i16, ptr %to monotonic, align 2
  br label %loop
loop:
  %old = phi i16 [ %first, %entry ], [ %seen, %loop ]
  %wide = zext i16 %old to i32
  %high = shl i32 %wide, 16
  %before = bitcast i32 %high to float
  %sum = fadd float %before, %number
  %bits = bitcast float %sum to i32
  %above = lshr i32 %bits, 16
  %odd = and i32 %above, 1
  %half = add i32 %odd, 32767
  %up = add i32 %bits, %half
  %nan = fcmp uno float %sum, %sum
  %quiet = or i32 %bits, 4194304
  %rounded = select i1 %nan, i32 %quiet, i32 %up
  %top = lshr i32 %rounded, 16
  %new = trunc i32 %top to i16
  %pair = cmpxchg ptr %to, i16 %old, i16 %new monotonic monotonic
  %seen = extractvalue { i16, i1 } %pair, 0
  %done = extractvalue { i16, i1 } %pair, 1
  br i1 %done, label %end, label %loop
end:
  ret void
}
"""


def source(dtype: str) -> str:
    """The function that adds elements of a type, given in the type that they are computed with."""
    if dtype == "bfloat16":
        return _BFLOAT16
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
