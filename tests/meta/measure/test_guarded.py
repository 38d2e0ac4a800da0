"""Arrays whose surroundings are watched, or aren't there."""

from __future__ import annotations

import ctypes
import mmap
import signal
import subprocess
import sys

import numpy as np
import pytest

from tvm_axe.meta.measure.guarded import Guarded


@pytest.mark.parametrize("shape", [(), (1,), (16,), (1000,), (1024,), (1025,), (3, 5, 7), (1 << 20,), (0, 4)])
def test_an_array_is_aligned_and_ends_before_the_guard(shape):
    guarded = Guarded(shape, np.dtype("float32"))
    guarded.array[...] = 7
    assert guarded.array.shape == shape
    assert guarded.array.ctypes.data % 64 == 0
    end = guarded.array.ctypes.data + guarded.array.nbytes
    assert -end % mmap.PAGESIZE < 64
    assert guarded.intact()


@pytest.mark.parametrize("place", [-1, -40, 36, 63])
def test_a_byte_beside_an_array_is_seen(place):
    guarded = Guarded((9,), np.dtype("float32"))  # 36 bytes, and 28 behind them
    at = ctypes.c_uint8.from_address(guarded.array.ctypes.data + place)
    at.value ^= 1
    assert not guarded.intact()
    at.value ^= 1
    assert guarded.intact()
    at.value ^= 1
    guarded.fill(np.arange(9, dtype="float32"))
    assert guarded.intact() and guarded.array.tolist() == list(range(9))


@pytest.mark.parametrize("place", [4096, -1])
def test_a_byte_beyond_the_pages_is_not_there(place):
    code = f"""
import ctypes, numpy
from tvm_axe.meta.measure.guarded import Guarded
guarded = Guarded((4096,), numpy.dtype("uint8"))
ctypes.c_uint8.from_address(guarded.array.ctypes.data + {place}).value
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGSEGV
