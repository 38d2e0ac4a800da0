"""Adding to what a tensor holds, or a tile in shared memory, keeping the larger or the smaller, comparing and swapping.

A tensor's elements other blocks join with values at the same time, in parallel threads, so it must be one operation.
TensorIR has none for CPUs; it comes in as a function in LLVM's language, which makes a loop around compare-and-exchange
of it where the CPU can't add floats in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.llvm.conversions import NARROW, rounded
from tvm_axe.tile.targets.llvm.writer import Writer

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


_BITS = {"float32": "i32", "float64": "i64", "float16": "i16", "bfloat16": "i16"}

_CHOICE = """
define linkonce_odr void @axe_atomic_{kind}_{dtype}(ptr %to, {passed} %number) alwaysinline {{
entry:
  {bits_of}
  %nan = fcmp uno {passed} %number, %number
  %first = load atomic {bits}, ptr %to monotonic, align {size}
  br label %loop
loop:
  %old = phi {bits} [ %first, %entry ], [ %seen, %store ]
  {number_of}
  %further = fcmp {compare} {passed} %number, %before
  %taken = or i1 %further, %nan
  br i1 %taken, label %store, label %end
store:
  %pair = cmpxchg ptr %to, {bits} %old, {bits} %new monotonic monotonic
  %seen = extractvalue {{ {bits}, i1 }} %pair, 0
  %done = extractvalue {{ {bits}, i1 }} %pair, 1
  br i1 %done, label %end, label %loop
end:
  ret void
}}
"""

_SWAP = """
define linkonce_odr {bits} @axe_atomic_cas_{dtype}(ptr %to, {bits} %compare, {bits} %new) alwaysinline {{
  %pair = cmpxchg ptr %to, {bits} %compare, {bits} %new monotonic monotonic
  %seen = extractvalue {{ {bits}, i1 }} %pair, 0
  ret {bits} %seen
}}
"""

_WAYS = {
    "bfloat16": (
        "%all = bitcast float %number to i32\n  %top = lshr i32 %all, 16\n  %new = trunc i32 %top to i16",
        "%wide = zext i16 %old to i32\n  %high = shl i32 %wide, 16\n  %before = bitcast i32 %high to float",
    ),
    "float16": (
        "%value = fptrunc float %number to half\n  %new = bitcast half %value to i16",
        "%held = bitcast i16 %old to half\n  %before = fpext half %held to float",
    ),
    "float32": ("%new = bitcast float %number to i32", "%before = bitcast i32 %old to float"),
    "float64": ("%new = bitcast double %number to i64", "%before = bitcast i64 %old to double"),
}
"""The bits of a number, and the number of the bits that are held."""


def source(kind: str, dtype: str) -> str:
    """The function that joins elements of a type with what is held, given in the type that they are computed with."""
    if kind != "add" and dtype in _WAYS:
        return _of_floats(kind, dtype)
    if dtype == "bfloat16":
        return _BFLOAT16
    held, operation = _TYPES[dtype]
    if kind == "cas":
        return _SWAP.format(dtype=dtype, bits=held)
    if kind != "add":
        operation = f"u{kind}" if dtype.startswith("u") else kind
    passed, converted = ("float", "fptrunc") if dtype in NARROW else (held, "bitcast")
    return f"""
define linkonce_odr void @axe_atomic_{kind}_{dtype}(ptr %to, {passed} %number) alwaysinline {{
  %value = {converted} {passed} %number to {held}
  %before = atomicrmw {operation} ptr %to, {held} %value monotonic
  ret void
}}
"""


def _of_floats(kind: str, dtype: str) -> str:
    """It ends where what is held is as large already; a NaN is larger and smaller than all else."""
    bits, (bits_of, number_of) = _BITS[dtype], _WAYS[dtype]
    return _CHOICE.format(
        kind=kind,
        dtype=dtype,
        passed="double" if dtype == "float64" else "float",
        bits=bits,
        size=int(bits[1:]) // 8,
        bits_of=bits_of,
        number_of=number_of,
        compare="ogt" if kind == "max" else "olt",
    )


def join(writer: Writer, kind: str, tile: Tile, indices: Sequence[Any], value: Any) -> None:
    """Emit the joining of `value`, a number of the type that the tile's elements are computed with.

    What is on chip one thread has alone, which goes over the points in order.
    """
    if tile.scope != "global":
        held, value = writer.load(tile, indices), T.bind(value)
        stays = T.Or(value > held if kind == "max" else value < held, value != value)
        writer.store(tile, indices, held + value if kind == "add" else T.Select(stays, value, held))
        return
    buffer, where = writer.at(tile, indices)
    dtype = str(buffer.dtype)
    value = rounded(value, dtype) if dtype in NARROW else value
    T.evaluate(T.call_extern("void", f"axe_atomic_{kind}_{dtype}", T.address_of(buffer[tuple(where)]), value))


def swap(writer: Writer, tile: Tile, indices: Sequence[Any], compare: Any, value: Any) -> Any:
    """Emit a compare-and-swap; give what was there before."""
    if tile.scope != "global":
        held = T.Bind(writer.load(tile, indices))
        writer.store(tile, indices, T.Select(held == compare, value, held))
        return held
    buffer, where = writer.at(tile, indices)
    name = f"axe_atomic_cas_{buffer.dtype}"
    return T.call_extern(str(buffer.dtype), name, T.address_of(buffer[tuple(where)]), compare, value)
