"""Random numbers by counters: `random`, Philox-4x32-10, the same bits on every target.

A number is a function of a seed and of a counter, so no state is kept: any thread or block computes any element's, and
a backward pass the forward's again. Dropout with the probability 0.1:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def dropout(X: T.Buffer((64, 256), "float32"), Y: T.Buffer((64, 256), "float32"), seed: T.int64):
...     with tile.kernel(16) as b:
...         x = tile.fragment((4, 256), "float32")
...         tile.copy(X[b * 4, 0], x)
...         with tile.parallel(4, 256) as (i, j):
...             kept = tile.random(seed, (b * 4 + i) * 256 + j) >= T.float32(0.1)
...             x[i, j] = T.Select(kept, x[i, j] / T.float32(0.9), T.float32(0))
...         tile.copy(x, Y[b * 4, 0])

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011, section 3.3.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx

from tvm_axe.errors import TileError

CALL = "axe_random"
"""The function that targets define: of the seed and the counter, both int64, a uint32."""

ROUNDS = 10
MULTIPLIERS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
"""What two of the counter's words are multiplied by in a round, and what is added to the key's behind it."""


def random(seed: Any, counter: Any, *, dtype: str = "float32") -> Any:
    """The random number of a counter: a value wherever values are, in `parallel` or beside it.

    Parameters
    ----------
    seed, counter : int or Expr
        Integers of up to 64 bits: the key, and the lower half of the counter's 128 bits, whose other half is 0.
    dtype : str
        ``"uint32"``: the first of the block's four words. ``"float32"``: its upper 24 bits as a multiple of 2**-24, so
        it is at least 0 and less than 1, each of them as likely.

    Raises
    ------
    TileError
        `dtype` is none of these; the seed or the counter is no integer.
    """
    if dtype not in ("uint32", "float32"):
        raise TileError(f"random: dtype is 'uint32' or 'float32', got {dtype!r}")
    bits = tirx.call_extern("uint32", CALL, *(_wide(*given) for given in (("seed", seed), ("counter", counter))))
    if dtype == "uint32":
        return bits
    upper = tirx.RShift(bits, tirx.const(8, "uint32"))
    return tirx.Cast("float32", tirx.Cast("int32", upper)) * tirx.const(2.0**-24, "float32")


def _wide(name: str, value: Any) -> Any:
    if isinstance(value, int):
        return tirx.const(value, "int64")
    dtype = str(value.ty.dtype) if isinstance(value, ir.Expr) else type(value).__name__
    if "int" not in dtype:
        raise TileError(f"random: the {name} is an integer, got {dtype}")
    return value if dtype == "int64" else tirx.Cast("int64", value)


def is_random(call: ir.Call) -> bool:
    """Whether a call is what `random` becomes."""
    return bool(call.args) and getattr(call.args[0], "value", None) == CALL


def draws(func: tirx.PrimFunc) -> bool:
    """Whether a function has random numbers."""
    found: list[bool] = []
    tvm_ffi.structural_walk(func.body, (ir.Call, lambda call: found.append(is_random(call))))
    return any(found)
