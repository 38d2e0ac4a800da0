"""Two floats of 16 bits in a register, and the loops of two steps that make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import loads_in, substitute

_HALVES = ("lower", "upper")


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


def both_steps(loop: tirx.For, words: Sequence[tirx.Bind], halves: Mapping[tirx.Cast, tirx.Var]) -> tirx.Stmt:
    """The two stores of a loop, behind what makes the words of which these casts are the halves.

    A half is as many bits, which a cast to an integer is, or float16, which a cast to another float is of.
    """
    store, stores = loop.body, []
    for step, name in enumerate(_HALVES):

        def half(cast: tirx.Cast, name: str = name) -> tirx.Expr:
            both = halves.get(cast)
            if both is None:
                return cast
            bits, kind = half_of(both, name), str(cast.ty)
            if kind == "uint16":
                return bits
            number = tirx.reinterpret("float16", bits)
            return number if kind == "float16" else tirx.Cast(cast.ty, number)

        value = _tvm.structural_map(store.value, (tirx.Cast, half))
        place = {loop.loop_var: tirx.const(step, loop.loop_var.ty)}
        stores.append(substitute(tirx.BufferStore(store.buffer, value, store.indices), place))
    return tirx.SeqStmt([*words, *stores])
