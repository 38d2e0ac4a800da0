"""Dropout from a counter: whether an element is kept depends on the seed and on its place in the whole tensor alone.

So it doesn't matter which device computes an element, in which order, or on how large a slice: slices and the whole
agree bit for bit. The bits are Philox2x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
2, 3", SC'11); the counter is the element's row-major index, the key the seed. A kernel and its numpy
reference share the one definition.

>>> import numpy as np
>>> dropout(np.ones(6, "float32"), np.array([7], "uint32"), np.arange(6), 0.5).tolist()
[2.0, 2.0, 2.0, 2.0, 0.0, 0.0]
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

__all__ = ["dropout", "dropped", "philox"]

_MULTIPLIER, _WEYL, _ROUNDS = 0xD256D193, 0x9E3779B9, 10
_WORD = 32
_MASK = (1 << _WORD) - 1
_BLOCK = 1 << 15  # elements that numpy takes at a time: all the rounds of them stay in the cache


def philox(low: Any, high: Any, key: Any) -> tuple[Any, Any]:
    """Return the two 32-bit words that Philox2x32-10 makes of a counter of two words and a key.

    Parameters
    ----------
    low, high, key : numpy.ndarray or tirx.Expr
        The two words of the counter and the key, of dtype uint64, with values below 2**32.

    Returns
    -------
    (first, second) : tuple[numpy.ndarray, numpy.ndarray] or tuple[tirx.Expr, tirx.Expr]
        The two words, of the kind of the arguments, with values below 2**32.
    """
    constant = _constant if isinstance(low, tirx.Expr) else np.uint64
    for number in range(_ROUNDS):
        product = low * constant(_MULTIPLIER)
        round_key = (key + constant(number * _WEYL & _MASK)) & constant(_MASK)
        low, high = (product >> constant(_WORD)) ^ round_key ^ high, product & constant(_MASK)
    return low, high


def dropout(x: np.ndarray, seed: np.ndarray, index: np.ndarray, rate: float) -> np.ndarray:
    """Set each element of `x` to 0 with probability `rate`, and scale the others by 1 / (1 - rate).

    Parameters
    ----------
    x : numpy.ndarray
        Any shape, floating-point.
    seed : numpy.ndarray
        The key: one element, uint32.
    index : numpy.ndarray
        The row-major index of each element in the whole tensor; of the shape of `x`.
    rate : float
        The probability, in [0, 1).
    """
    flat, key = index.reshape(-1), seed.astype("uint64")
    kept = np.empty(flat.shape, bool)
    for start in range(0, flat.size, _BLOCK):
        counter = flat[start : start + _BLOCK].astype("uint64")
        bits, _ = philox(counter & np.uint64(_MASK), counter >> np.uint64(_WORD), key)
        kept[start : start + _BLOCK] = bits >= _threshold(rate)
    return np.where(kept.reshape(index.shape), x * x.dtype.type(_scale(rate)), x.dtype.type(0))


def dropped(x: tirx.Expr, seed: tirx.Expr, index: tirx.Expr, rate: float) -> tirx.Expr:
    """Return the same as `dropout`, as an expression for one element of a kernel."""
    # Written out, the ten rounds are some hundred products, which LLVM finds to be ten. A `Let` for each would be
    # shorter, but upstream's unrolling leaves several of one variable, and its simplifier then fails.
    counter = T.Cast("uint64", index)
    bits, _ = philox(counter & _constant(_MASK), counter >> _constant(_WORD), T.Cast("uint64", seed))
    return T.Select(bits >= _constant(_threshold(rate)), x * T.float32(_scale(rate)), T.float32(0))


def _threshold(rate: float) -> int:
    """Return the least of the words below 2**32 that keep their element."""
    return round(rate * (1 << _WORD))


def _scale(rate: float) -> float:
    return 1 / (1 - rate)


def _constant(value: int) -> tirx.Expr:
    return tirx.const(value, "uint64")
