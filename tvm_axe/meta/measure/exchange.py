"""Input sets and wanted results that the processes of a tuner share: one file, in memory alone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np

__all__ = ["Exchange", "Params", "exchange_file"]

Params = Sequence[tuple[tuple[int, ...], np.dtype]]
"""Shape and type of each argument."""

_ALIGNMENT = 64  # bytes


def exchange_file() -> tuple[int, Path]:
    """Make an empty file for an `Exchange`: its descriptor, and a name of it that this user's processes can open.

    It is gone once it is closed here and nobody has it mapped, also if this process is killed.
    """
    descriptor = os.memfd_create("tvm-axe-exchange")
    return descriptor, Path(f"/proc/{os.getpid()}/fd/{descriptor}")


class Exchange:
    """The file's contents: for each input set, the arguments, and what they are after a right call.

    Parameters
    ----------
    path
        What `exchange_file` gave, perhaps in another process.
    params
        Shape and type of each argument.
    sets
        Number of input sets.
    writable
        Whether the arrays can be written, and the file takes its size now.

    Attributes
    ----------
    inputs, wanted
        An array for each argument, in a list for each set. Pages of `wanted` that nobody writes take no memory.
    """

    def __init__(self, path: Path, params: Params, sets: int, writable: bool) -> None:
        sizes = [-(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for shape, dtype in params]
        total = max(1, 2 * sets * sum(sizes))
        with open(path, "r+b" if writable else "rb") as file:
            if writable:
                file.truncate(total)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapped = np.frombuffer(mmap.mmap(file.fileno(), total, access=access), "uint8")
        arrays, start = [], 0
        for _ in range(2 * sets):
            own = []
            for (shape, dtype), size in zip(params, sizes):
                own.append(mapped[start : start + prod(shape) * dtype.itemsize].view(dtype).reshape(shape))
                start += size
            arrays.append(own)
        self.inputs: list[list[np.ndarray]] = arrays[:sets]
        self.wanted: list[list[np.ndarray]] = arrays[sets:]
