"""Random numbers of a counter as a device function, all rounds in registers."""

from __future__ import annotations

from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.tile.philox import CALL, MULTIPLIERS, ROUNDS, STEPS, draws, is_random


def defined(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its random numbers computed by the device function."""

    def on_call(call: ir.Call) -> ir.Call:
        return _tvm.device_call(CALL, *call.args[1:], code=_CODE, gives="uint32") if is_random(call) else call

    return func.with_body(_tvm.structural_map(func.body, (ir.Call, on_call))) if draws(func) else func


_CODE = f"""
__device__ __forceinline__ unsigned int {CALL}(long long seed, long long counter) {{
  unsigned int a = static_cast<unsigned int>(counter), b = static_cast<unsigned int>(counter >> 32), c = 0, d = 0;
  unsigned int k = static_cast<unsigned int>(seed), l = static_cast<unsigned int>(seed >> 32);
#pragma unroll
  for (int round = 0; round < {ROUNDS}; ++round) {{
    unsigned int first = a, third = c;
    a = __umulhi({MULTIPLIERS[1]}u, third) ^ b ^ k;
    b = {MULTIPLIERS[1]}u * third;
    c = __umulhi({MULTIPLIERS[0]}u, first) ^ d ^ l;
    d = {MULTIPLIERS[0]}u * first;
    k += {STEPS[0]}u, l += {STEPS[1]}u;
  }}
  return a;
}}
"""
