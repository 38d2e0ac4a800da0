"""Arrays that lie in files: found by who has mapped them, and read by each worker for itself, of which it takes a part.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.npy"
>>> np.save(path, np.arange(12, dtype="float32").reshape(4, 3))
>>> rows = np.load(path, mmap_mode="r")
>>> there = stored(rows[2:])
>>> print(there.shape, there.dtype, there.offset)
(2, 3) float32 152
>>> slab = np.zeros((2, 1), "float32")
>>> fill(slab, there, [(((0, 2), (0, 1)), ((0, 2), (1, 2)))])
>>> slab.tolist()
[[7.0], [10.0]]
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np

from tvm_axe.errors import InputError

__all__ = ["Box", "Piece", "Stored", "fill", "let_go", "map_file", "sliced", "stored"]

Box = Sequence[tuple[int, int]]
"""Of each dimension, the first index and the one behind the last."""
Piece = tuple[Box, Box]
"""A box of a slab, and the box of the whole array that belongs there."""


class Stored(NamedTuple):
    """A dense array in a file.

    Attributes
    ----------
    path : str
        The file's absolute path.
    size, changed : int
        Its bytes, and the nanosecond in which it was last written to, when it was mapped: what has changed since isn't
        read.
    offset : int
        Where the array begins.
    dtype, shape
        What it is.
    """

    path: str
    size: int
    changed: int
    offset: int
    dtype: str
    shape: tuple[int, ...]


class _File(NamedTuple):
    path: str
    size: int
    changed: int


_mapped: weakref.WeakKeyDictionary[mmap.mmap, _File] = weakref.WeakKeyDictionary()


def map_file(path: str | Path) -> mmap.mmap:
    """Map a file that isn't empty, to be read; arrays over it are found by `stored`."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _mapped[mapped] = _File(os.path.abspath(path), status.st_size, status.st_mtime_ns)
    return mapped


def _below(array: np.ndarray) -> Any:
    """The memory that an array is a view of."""
    memory: Any = array
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    return memory


def stored(array: np.ndarray) -> Stored | None:
    """Where a dense array lies in a file that is mapped by `map_file`, or by numpy to be read; None of any other."""
    found: np.memmap | None = None
    memory: Any = array
    while isinstance(memory, np.ndarray | memoryview):
        if isinstance(memory, np.memmap) and memory.mode == "r":
            found = memory
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    if not isinstance(memory, mmap.mmap) or not array.flags.c_contiguous or not array.size:
        return None
    begin = 0
    if memory not in _mapped:
        if found is None or found.filename is None:
            return None
        begin = found.offset - found.offset % mmap.ALLOCATIONGRANULARITY
        try:
            status = os.stat(found.filename)
        except OSError:
            return None  # it has gone, and its memory is still there
        if status.st_size < begin + len(memory):
            return None  # another one of that name
        _mapped[memory] = _File(os.path.abspath(found.filename), status.st_size, status.st_mtime_ns)
    offset = begin + array.ctypes.data - np.frombuffer(memory, "uint8", 1).ctypes.data
    return Stored(*_mapped[memory], offset, array.dtype.name, array.shape)


def let_go(array: np.ndarray) -> None:
    """Give back the memory that holds an array in a mapped file, which has been copied; of any other, nothing.

    What is mapped counts as the process's as long as it is there. The array stays valid: who touches it again reads
    the file again.
    """
    base = _below(array)
    if not isinstance(base, mmap.mmap) or not array.flags.c_contiguous or not hasattr(mmap, "MADV_DONTNEED"):
        return
    begin = array.ctypes.data - np.frombuffer(base, "uint8").ctypes.data
    first = begin - begin % mmap.PAGESIZE
    if array.nbytes:
        base.madvise(mmap.MADV_DONTNEED, first, begin + array.nbytes - first)


def fill(slab: np.ndarray, source: Stored, pieces: Sequence[Piece]) -> None:
    """Copy pieces of an array in a file to a slab; nothing else of the file is touched.

    Raises
    ------
    InputError
        If the file can't be read, or is another one than it was.
    """
    try:
        with open(source.path, "rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (source.size, source.changed):
                raise InputError(f"{source.path}: has been written to since it was mapped; read it again")
            dtype = np.dtype(source.dtype)
            begin = source.offset - source.offset % mmap.ALLOCATIONGRANULARITY
            length = source.offset - begin + math.prod(source.shape) * dtype.itemsize
            with mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=begin) as mapped:
                _copy(slab, mapped, source.offset - begin, dtype, source.shape, pieces)
    except OSError as error:
        raise InputError(f"{source.path}: cannot be read by a worker: {error.strerror}") from error


def _copy(
    slab: np.ndarray, mapped: mmap.mmap, offset: int, dtype: np.dtype, shape: Sequence[int], pieces: Sequence[Piece]
) -> None:
    # The arrays are gone when this returns, so that the file can be let go.
    data = np.frombuffer(mapped, "uint8", math.prod(shape) * dtype.itemsize, offset)
    whole = data.view(dtype).reshape(shape)
    for target, source in pieces:
        slab[sliced(target)] = whole[sliced(source)]


def sliced(box: Box) -> tuple[slice, ...]:
    """The index of a box."""
    return tuple(slice(begin, end) for begin, end in box)
