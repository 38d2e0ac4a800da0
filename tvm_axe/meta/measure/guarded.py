"""Arrays with nothing around them: a kernel that reads or writes beyond one hits memory that isn't there.

An array ends right before a page that may not be touched, or up to 63 bytes before, since its start is aligned for
vectors. What is left of its own pages is filled with a pattern, which `intact` finds changed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from math import prod

import numpy as np

__all__ = ["Guarded"]

_ALIGNMENT = 64  # bytes; what LLVM's vector code takes for granted of a tensor's start
_PATTERN = 0xA5
_HUGE = 1 << 21
_NO_ACCESS = 0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """An array between two pages that may not be touched.

    Attributes
    ----------
    array
        The array; its contents are undefined at first. It keeps the memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        size, page = prod(shape) * dtype.itemsize, mmap.PAGESIZE
        inner = max(page, -(-size // page) * page)
        pages = mmap.mmap(-1, inner + 2 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if inner >= _HUGE:
            pages.madvise(mmap.MADV_HUGEPAGE)  # as allocators get them for arrays of this size
        whole = np.frombuffer(pages, "uint8")
        for guard in (whole.ctypes.data, whole.ctypes.data + page + inner):
            if _libc.mprotect(guard, page, _NO_ACCESS):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        start = page + (inner - size) // _ALIGNMENT * _ALIGNMENT
        self.array: np.ndarray = whole[start : start + size].view(dtype).reshape(shape)
        self._around = (whole[page:start], whole[start + size : page + inner])
        self._mark()

    def _mark(self) -> None:
        for rest in self._around:
            rest[...] = _PATTERN

    def fill(self, array: np.ndarray) -> None:
        """Put an array into it, and around it what `intact` looks for, whatever a kernel has left there."""
        self.array[...] = array
        self._mark()

    def intact(self) -> bool:
        """Whether nothing was written around the array."""
        return all(bool((rest == _PATTERN).all()) for rest in self._around)
