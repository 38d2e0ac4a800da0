"""Two floats of 16 bits in a register, and the loops of two steps that make them."""

from __future__ import annotations

from tvm import tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import loads_in

HALVES = ("lower", "upper")


def half_of(both: tirx.Expr, half: str) -> tirx.Expr:
    """The bits of one of two floats in a register, which the assembler takes for a pair; shifts would take it apart."""
    name = f"axe_{half}_half"
    code = f"""
__device__ __forceinline__ unsigned short {name}(int both) {{
  unsigned short lower, upper;
  asm("mov.b32 {{%0, %1}}, %2;" : "=h"(lower), "=h"(upper) : "r"(both));
  return {half};
}}
"""
    return _tvm.device_call(name, both, code=code, gives="uint16")


def is_twice(loop: tirx.Stmt) -> bool:
    """Whether it is a loop of two steps, which are unrolled."""
    return (
        isinstance(loop, tirx.For)
        and loop.kind == tirx.ForKind.UNROLLED
        and isinstance(loop.extent, tirx.IntImm)
        and isinstance(loop.min, tirx.IntImm)
        and (int(loop.min), int(loop.extent)) == (0, 2)
    )


def is_apart(store: tirx.Stmt) -> bool:
    """Whether it stores what isn't made of what it stores to."""
    return isinstance(store, tirx.BufferStore) and not any(
        load.source.data.same_as(store.buffer.data) for load in loads_in(store.value)
    )
