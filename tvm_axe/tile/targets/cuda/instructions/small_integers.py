"""Casts of integers of few values to 16-bit floats by adding, which is done in pairs and faster than converting.

Where the last bit of a float stands for 1, an integer in its low bits is added to it: float16 has the bits 0x6400 for
1024, and 0x6400 + i for 1024 + i, for i up to 1023. Subtracting 1024 again is exact, so it is the number that a cast
gives:

>>> import numpy as np
>>> np.uint16(0x6400 + 5).view(np.float16) - np.float16(1024)
np.float16(5.0)

Source: Kim et al., "Who says elephants can't run", 2022, section 3.3, for weights of 4 and 8 bits.
"""

from __future__ import annotations

from tvm import sym, tirx

from tvm_axe import _tvm

UNITS = {"float16": (0x6400, 1024), "bfloat16": (0x4300, 128)}
"""By type the bits, and the value, of the float whose last bit is 1; as many integers follow it."""


def decoded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with casts of integers whose values are known to be few made by addition."""
    analyzer = sym.Analyzer()

    def on_cast(cast: tirx.Cast) -> tirx.Expr:
        source, target = str(cast.value.ty), str(cast.ty)
        if target not in UNITS or not source.startswith(("int", "uint")) or isinstance(cast.value, tirx.IntImm):
            return cast
        bits, unit = UNITS[target]
        value = cast.value.astype("int32") if source != "int32" else cast.value
        bound = analyzer.const_int_bound(value)
        low = int(bound.min_value)
        if int(bound.max_value) - low >= unit or not 0 <= unit - low <= 2 * unit:
            return cast
        number = analyzer.simplify(value + (bits - low)).astype("uint16")
        return tirx.reinterpret(target, number) - tirx.const(unit - low, target)

    return func.with_body(_tvm.structural_map(func.body, (tirx.Cast, on_cast)))
