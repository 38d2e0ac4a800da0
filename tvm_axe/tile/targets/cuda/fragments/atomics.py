"""Values joined with what memory holds: one instruction where there is one, else a loop around atomicCAS; and that."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm


def join(kind: str, dtype: str, pointer: Any, value: Any) -> None:
    """Emit the addition, or the choice of the larger or the smaller (`kind`), of an element at an address."""
    if kind == "add" and dtype != "int64":
        T.evaluate(T.cuda.atomic_add(pointer, value))
        return
    made = _OF_INTEGERS.get(dtype, _of_floats)(kind, dtype)
    T.evaluate(_tvm.device_call(f"axe_atomic_{kind}_{dtype}", pointer, value, code=made))


def _of_integers(type_name: str, as_type: str) -> Any:
    def code(kind: str, dtype: str) -> str:
        return f"""
__device__ __forceinline__ void axe_atomic_{kind}_{dtype}(void* to, {type_name} number) {{
  atomic{kind.capitalize()}(reinterpret_cast<{as_type}*>(to), static_cast<{as_type}>(number));
}}
"""

    return code


def _of_int64(kind: str, dtype: str) -> str:
    """CUDA's own addition is of the unsigned type, whose sums have the same bits."""
    return _of_integers("long long", "unsigned long long" if kind == "add" else "long long")(kind, dtype)


_OF_INTEGERS = {
    "int32": _of_integers("int", "int"),
    "uint32": _of_integers("unsigned int", "unsigned int"),
    "int64": _of_int64,
}

_FLOATS = {
    "float32": ("float", "unsigned int", "__uint_as_float({})", "__float_as_uint({})", "{}"),
    "float64": ("double", "unsigned long long", "__longlong_as_double({})", "__double_as_longlong({})", "{}"),
    "float16": ("__half", "unsigned short", "__ushort_as_half({})", "__half_as_ushort({})", "__half2float({})"),
    "bfloat16": (
        *("__nv_bfloat16", "unsigned short", "__ushort_as_bfloat16({})", "__bfloat16_as_ushort({})"),
        "__bfloat162float({})",
    ),
}
"""CUDA's type, that of its bits, the number of some bits, the bits of a number, and the number as it is compared."""


def _of_floats(kind: str, dtype: str) -> str:
    """It ends where what is held is as large already; a NaN is larger and smaller than all else."""
    type_name, bits, number_of, bits_of, compared = _FLOATS[dtype]
    held = compared.format(number_of.format("old"))
    new = compared.format("number")
    return f"""
__device__ __forceinline__ void axe_atomic_{kind}_{dtype}(void* to, {type_name} number) {{
  {bits}* at = reinterpret_cast<{bits}*>(to);
  {bits} old = *reinterpret_cast<volatile {bits}*>(to);
  while ({new} {">" if kind == "max" else "<"} {held} || {new} != {new}) {{
    {bits} seen = atomicCAS(at, old, static_cast<{bits}>({bits_of.format("number")}));
    if (seen == old) break;
    old = seen;
  }}
}}
"""


def swap(dtype: str, pointer: Any, compare: Any, value: Any) -> tirx.Expr:
    """The compare-and-swap of an element at an address: what it held before."""
    type_name, bits = _SWAPPED[dtype]
    code = f"""
__device__ __forceinline__ {type_name} axe_atomic_cas_{dtype}(void* to, {type_name} compare, {type_name} number) {{
  return static_cast<{type_name}>(atomicCAS(
      reinterpret_cast<{bits}*>(to), static_cast<{bits}>(compare), static_cast<{bits}>(number)));
}}
"""
    return _tvm.device_call(f"axe_atomic_cas_{dtype}", pointer, compare, value, code=code, gives=dtype)


_SWAPPED = {
    "int32": ("int", "int"),
    "uint32": ("unsigned int", "unsigned int"),
    "int64": ("long long", "unsigned long long"),
}
"""CUDA's type, and that which it compares."""
