"""Arrays whose elements lie apart in memory, between elements that nobody may touch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_axe import _tvm

_GUARD = 256  # bytes in front of an array and behind it, a multiple of what tensors begin at
_FILLED = 0xA5


class Spread:
    """A copy of an array with strides of its own, in elements, that begins at a multiple of 64 bytes.

    Attributes
    ----------
    view : numpy.ndarray
        The copy. Where a stride is 0, the array's elements along that dimension are equal.
    """

    def __init__(self, array: np.ndarray, strides: Sequence[int]) -> None:
        item, shape = array.itemsize, array.shape
        reach = sum((extent - 1) * stride for extent, stride in zip(shape, strides)) + 1 if array.size else 0
        room = np.full(reach * item + 2 * _GUARD + 64, _FILLED, "uint8")
        start = -room.ctypes.data % 64 + _GUARD
        steps = [stride * item for stride in strides]
        self.view = _tvm.restrided(room[start : start + reach * item].view(array.dtype), shape, steps)
        self.view[...] = array
        outside = np.ones(room.size, bool)
        _tvm.restrided(outside[start : start + reach * item], (*shape, item), (*steps, 1))[...] = False
        self._room, self._outside = room, outside

    def check(self) -> None:
        """Refuse what was stored outside of the array's elements."""
        touched = np.flatnonzero(self._outside & (self._room != _FILLED))
        assert not touched.size, f"bytes {touched[:8]} of {self._room.size} aren't the array's, and were written"


def like(array: np.ndarray) -> Spread:
    """A copy of an array with its strides."""
    return Spread(array, [stride // array.itemsize for stride in array.strides])
