"""Values joined with what memory holds, by one instruction or a loop that compares and swaps; and that by itself.

On a tensor of the mesh peers join values with the same elements, so they are joined at the scope of the system; at that
of a device, CUDA's default, they would be atomic for blocks of one device alone (PTX ISA, "Memory Consistency Model:
Scope").
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.tile.regions import Tile

_AS = {
    "int32": ("int", "int"),
    "uint32": ("unsigned int", "unsigned int"),
    "int64": ("long long", "long long"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
}
"""CUDA's type, and the one as which its functions take it, of elements that one instruction joins."""

_FLOATS = {
    "float32": ("float", "unsigned int", "__uint_as_float({})", "__float_as_uint({})", "{}", "{}"),
    "float64": ("double", "unsigned long long", "__longlong_as_double({})", "__double_as_longlong({})", "{}", "{}"),
    "float16": (
        *("__half", "unsigned short", "__ushort_as_half({})", "__half_as_ushort({})"),
        *("__half2float({})", "__float2half({})"),
    ),
    "bfloat16": (
        *("__nv_bfloat16", "unsigned short", "__ushort_as_bfloat16({})", "__bfloat16_as_ushort({})"),
        *("__bfloat162float({})", "__float2bfloat16({})"),
    ),
}
"""CUDA's type, that of its bits, the number of some bits, the bits of a number, the number as it is compared and added,
and the number of such a one."""

_SWAP_OF_16_BITS = """unsigned short seen;
    asm volatile("atom.relaxed.sys.cas.b16 %0, [%1], %2, %3;"
                 : "=h"(seen) : "l"(at), "h"(old), "h"(next) : "memory");"""
"""CUDA has no function for it (PTX ISA, atom)."""


_SWAPPED = {
    "int32": ("int", "int"),
    "uint32": ("unsigned int", "unsigned int"),
    "int64": ("long long", "unsigned long long"),
}
"""CUDA's type, and that which it compares."""


def join(kind: str, tile: Tile, pointer: Any, value: Any) -> None:
    """Emit the addition, or the choice of the larger or the smaller (`kind`), of an element of a tile at an address."""
    dtype, scope = tile.dtype, "_system" * tile.is_mesh
    if kind == "add" and dtype != "int64" and not tile.is_mesh:
        T.evaluate(T.cuda.atomic_add(pointer, value))
        return
    name = f"axe_atomic_{kind}_{dtype}{scope}"
    one = dtype in _AS and (kind == "add" or dtype not in _FLOATS)
    code = (_at_once if one else _by_swapping)(name, kind, dtype, scope)
    T.evaluate(_tvm.device_call(name, pointer, value, code=code))


def _at_once(name: str, kind: str, dtype: str, scope: str) -> str:
    """CUDA's own addition of 64 bits is of the unsigned type, whose sums have the same bits."""
    type_name, as_type = _AS[dtype]
    if (kind, dtype) == ("add", "int64"):
        as_type = "unsigned long long"
    return f"""
__device__ __forceinline__ void {name}(void* to, {type_name} number) {{
  atomic{kind.capitalize()}{scope}(reinterpret_cast<{as_type}*>(to), static_cast<{as_type}>(number));
}}
"""


def _by_swapping(name: str, kind: str, dtype: str, scope: str) -> str:
    """A choice ends where what is held is as large already; a NaN is larger and smaller than all else."""
    type_name, bits, number_of, bits_of, compared, of_compared = _FLOATS[dtype]
    held, new = compared.format(number_of.format("old")), compared.format("number")
    chosen = of_compared.format(f"{held} + {new}") if kind == "add" else "number"
    goes_on = "true" if kind == "add" else f"{new} {'>' if kind == 'max' else '<'} {held} || {new} != {new}"
    swap = f"{bits} seen = atomicCAS{scope}(at, old, next);"
    if scope and bits == "unsigned short":
        swap = _SWAP_OF_16_BITS
    return f"""
__device__ __forceinline__ void {name}(void* to, {type_name} number) {{
  {bits}* at = reinterpret_cast<{bits}*>(to);
  {bits} old = *reinterpret_cast<volatile {bits}*>(to);
  while ({goes_on}) {{
    {bits} next = static_cast<{bits}>({bits_of.format(chosen)});
    {swap}
    if (seen == old) break;
    old = seen;
  }}
}}
"""


def swap(tile: Tile, pointer: Any, compare: Any, value: Any) -> tirx.Expr:
    """The compare-and-swap of an element of a tile at an address: what it held before."""
    dtype, scope = tile.dtype, "_system" * tile.is_mesh
    type_name, bits = _SWAPPED[dtype]
    name = f"axe_atomic_cas_{dtype}{scope}"
    code = f"""
__device__ __forceinline__ {type_name} {name}(void* to, {type_name} compare, {type_name} number) {{
  return static_cast<{type_name}>(atomicCAS{scope}(
      reinterpret_cast<{bits}*>(to), static_cast<{bits}>(compare), static_cast<{bits}>(number)));
}}
"""
    return _tvm.device_call(name, pointer, compare, value, code=code, gives=dtype)
