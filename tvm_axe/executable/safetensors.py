"""Files of weights in the safetensors format, read where they lie.

A file is the length of a header in eight bytes, the header in JSON, and the tensors' bytes, dense and little-endian
(https://github.com/huggingface/safetensors#format). What is read is mapped into memory and not copied: an array of it,
or a slice, costs what is touched of it.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
>>> write_safetensors(path, {"up.weight": np.arange(6, dtype="float32").reshape(2, 3)})
>>> read_safetensors(path)["up.weight"][1]
array([3., 4., 5.], dtype=float32)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np

from tvm_axe.collective.stored import map_file
from tvm_axe.errors import InputError

__all__ = ["read_safetensors", "write_safetensors"]

_TYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NAMES = {own: name for name, own in _TYPES.items()}
_INDEX = ".index.json"
_ALIGNMENT = 64  # bytes: of tensors, so that a machine's vectors are aligned in what is mapped


def read_safetensors(source: str | Path | Iterable[str | Path]) -> dict[str, np.ndarray]:
    """Read the tensors of a file, of several, or of all of a folder, as arrays over mapped memory, by name.

    Parameters
    ----------
    source : path, or several of them
        A file, the index of several (``model.safetensors.index.json``), or a folder with files.

    Returns
    -------
    arrays : dict[str, numpy.ndarray]
        They can't be written to, and keep their file mapped as long as they live.

    Raises
    ------
    InputError
        If a file can't be read, is none of this format, or is damaged; if two have a tensor of one name.
    """
    found: dict[str, np.ndarray] = {}
    homes: dict[str, Path] = {}
    for path in _files(source):
        for name, array in _read(path).items():
            if name in found:
                raise InputError(f"{path}: has the tensor {name!r}, as {homes[name]} has")
            found[name], homes[name] = array, path
    return found


def write_safetensors(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to a file, which `read_safetensors` and others read.

    Parameters
    ----------
    path : path
        The file; what it has had is replaced.
    arrays : Mapping[str, numpy.ndarray]
        The tensors by name.

    Raises
    ------
    InputError
        If an array's type is none of the format's, or the file can't be written.
    """
    entries: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        if array.dtype.name not in _NAMES:
            raise InputError(f"{path}: {name} is of {array.dtype}; safetensors has {', '.join(_NAMES)}")
        size = array.nbytes
        offsets = [at, at + size]
        entries[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        at += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    try:
        with open(path, "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for array in arrays.values():
                dense = np.ascontiguousarray(array)
                file.write(dense.reshape(-1).view("uint8").data if dense.size else b"")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _files(source: str | Path | Iterable[str | Path]) -> list[Path]:
    if not isinstance(source, str | Path):
        return [path for each in source for path in _files(each)]
    path = Path(source)
    if path.is_dir():
        index = sorted(path.glob(f"*.safetensors{_INDEX}"))
        files = sorted(path.glob("*.safetensors"))
        if not index and not files:
            raise InputError(f"{path}: has no file *.safetensors")
        return _files(index[0]) if index else files
    if not path.name.endswith(_INDEX):
        return [path]
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        return [path.parent / str(name) for name in dict.fromkeys(places)]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: no index of safetensors files, which has a weight_map of names to files") from error


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(min(length, size))
        mapped: Any = map_file(path) if size else b""
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if size < 8 or length > size - 8:
        raise _damaged(path, f"its header would be {length} bytes long, and the file has {size}")
    try:
        header = json.loads(text)
    except ValueError as error:
        raise _damaged(path, "its header is no JSON") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no JSON object")
    start = 8 + length
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {str(name): _array(path, mapped, str(name), entry, start, size) for name, entry in entries.items()}


def _array(path: Path, mapped: Any, name: str, entry: Any, start: int, size: int) -> np.ndarray:
    try:
        kind, shape, (begin, end) = (
            str(entry["dtype"]),
            tuple(map(int, entry["shape"])),
            map(int, entry["data_offsets"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{name!r} has no dtype, shape and data_offsets") from error
    if kind not in _TYPES:
        raise InputError(f"{path}: {name!r} is of {kind}; what is read is {', '.join(_TYPES)}")
    dtype = np.dtype(_TYPES[kind])
    if min((begin, *shape), default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
        raise _damaged(path, f"{name!r} of {kind}{list(shape)} would be the bytes {begin} to {end} of {size - start}")
    # An offset within the file, which need be no multiple of the type's size.
    data = np.frombuffer(mapped, "uint8", end - begin, start + begin) if end > begin else np.zeros(0, "uint8")
    return data.view(dtype).reshape(shape)


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path}: no safetensors file, or a damaged one: {why}")
