"""Casts of two neighbours of eight bits to wider floats, made at once.

An instruction makes two float16 of two floats of eight bits (PTX ISA, "Data Movement and Conversion Instructions:
cvt"). What CUDA has for one drops one of two, and makes a bfloat16 by two more conversions, at a quarter of the rate of
additions. Of integers there is an instruction for one, at such a rate too. Two are made by putting each below the upper
byte of 1024, so that it is added to that, and subtracting what was added:

>>> import numpy as np
>>> word, sign = np.uint32(0x80_7F), np.uint32(0x80_80)  # 127, and -128 above
>>> bits = np.frombuffer((word ^ sign).tobytes(), "uint8")[:2].astype("uint16") | 0x6400
>>> bits.view("float16") - np.float16(1024 + 128)
array([ 127., -128.], dtype=float16)

float16 has all of these numbers, and float32 those of float16.
"""

from __future__ import annotations

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import substitute
from tvm_axe.tile.targets.cuda.instructions.halves import both_steps, is_apart, is_twice

_FLOATS = {"float8_e4m3fn": "__NV_E4M3", "float8_e5m2": "__NV_E5M2"}
"""Floats of eight bits by their names in CUDA."""

_BIASES = {"uint8": (0, 1024), "int8": (0x8080, 1024 + 128)}
"""By type of an integer what flips the sign of two of them, and the number that is taken from each."""

_WIDER = ("float16", "bfloat16", "float32")


def in_pairs(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function whose unrolled loops of two steps cast two neighbours of eight bits at once.

    These are elements of a thread's own memory, the first at an even place, so that both are a word of 16 bits.
    """
    analyzer = sym.Analyzer()
    return func.with_body(_tvm.structural_map(func.body, (tirx.For, lambda loop: _at_once(loop, analyzer))))


def _at_once(loop: tirx.For, analyzer: sym.Analyzer) -> tirx.Stmt:
    """The loop; or both of its stores, behind what makes the numbers that they cast."""
    store = loop.body
    if not is_twice(loop) or not is_apart(store):
        return loop
    places = [tirx.const(n, loop.loop_var.ty) for n in range(2)]
    words: list[tirx.Bind] = []
    halves: dict[tirx.Cast, tirx.Var] = {}

    def found(cast: tirx.Cast) -> None:
        source, load = str(cast.value.ty), cast.value
        if str(cast.ty) not in _WIDER or source not in (*_FLOATS, *_BIASES) or not isinstance(load, ir.TensorLoad):
            return
        if load.source.scope() != "local" or len(load.indices) != 1:
            return
        first, second = (substitute(load.indices[0], {loop.loop_var: at}) for at in places)
        if analyzer.can_prove_equal(first % 2, 0) and analyzer.can_prove_equal(second, first + 1):
            halves[cast] = tirx.Var("both", "int32")
            words.append(
                tirx.Bind(halves[cast], _halves(source, tirx.address_of(tirx.BufferLoad(load.source, [first]))))
            )

    tvm_ffi.structural_walk(store.value, (tirx.Cast, found))
    return both_steps(loop, words, halves) if words else loop


def _halves(source: str, pointer: tirx.Expr) -> tirx.Expr:
    """Two float16 in an int32, of two elements of eight bits."""
    name = f"axe_halves_of_{source}"
    if source in _FLOATS:
        code = f"""
__device__ __forceinline__ int {name}(const void* two) {{
  __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(*static_cast<const __nv_fp8x2_storage_t*>(two), {_FLOATS[source]});
  return *reinterpret_cast<int*>(&both);
}}
"""
        return _tvm.device_call(name, pointer, code=code, gives="int32")
    signs, bias = _BIASES[source]
    biases = int(np.array([bias, bias], "float16").view("uint32")[0])
    code = f"""
__device__ __forceinline__ int {name}(const void* two) {{
  int both;
  asm("{{.reg .b32 x; prmt.b32 x, %1, 0x64646464, 0x4140; sub.rn.f16x2 %0, x, %2;}}"
      : "=r"(both) : "r"(*static_cast<const unsigned short*>(two) ^ {signs:#x}), "r"({biases:#x}));
  return both;
}}
"""
    return _tvm.device_call(name, pointer, code=code, gives="int32")
