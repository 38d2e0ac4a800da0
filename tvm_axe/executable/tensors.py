"""Tensors where an executable of one device runs: arrays put there, and fetched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import LowerError
from tvm_axe.machines import backend_of

__all__ = ["all_fetched", "calling", "device_of", "fetched", "put"]

_HOST = tvm.cpu()
_ALIGNMENT = 64  # bytes: what kernels take tensors to be aligned to
_PLAIN = "fiu"  # numpy's kinds of types that it exports, but for those of `ml_dtypes`, which are of another kind


def device_of(name: str, target: Target) -> tvm.runtime.Device:
    """The device of a target on this machine, for what is called `name`.

    Raises
    ------
    LowerError
        If the machine has none.
    """
    backend = backend_of(target)
    device = tvm.device(backend.device)
    if not device.exist:
        raise LowerError(f"{name} was compiled for {backend.name}; this machine has no {backend.device} device")
    return device


@contextmanager
def calling(function: str) -> Iterator[None]:
    """Say what function was called, if the runtime refuses something in the body.

    Raises
    ------
    LowerError
        If it does.
    """
    try:
        yield
    except _tvm.UPSTREAM_ERRORS as error:
        raise LowerError(f"{function}: the call failed: {_tvm.why_refused(error)}") from error


def put(array: np.ndarray, device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    """A copy of an array on a device."""
    known = array.dtype.kind in _PLAIN and array.dtype.isbuiltin == 1  # float8_e5m2 says that it is a float, too
    if device == _HOST and array.size and known and array.dtype.isnative:
        return _aligned(array)
    host = tvm.runtime.empty(array.shape, str(array.dtype))
    _tvm.as_array(host)[...] = array
    if device == _HOST:
        return host
    tensor = tvm.runtime.empty(array.shape, str(array.dtype), device)
    host.copyto(tensor)
    return tensor


def _aligned(array: np.ndarray) -> tvm.runtime.Tensor:
    """A copy of an array of a type that numpy exports, in the host's memory: a twentieth of the time of `empty`."""
    room = np.empty(array.nbytes + _ALIGNMENT, "uint8")
    begin = -room.__array_interface__["data"][0] % _ALIGNMENT
    own = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    own[...] = array
    return tvm_ffi.from_dlpack(own)


def fetched(tensor: tvm.runtime.Tensor) -> np.ndarray:
    """A copy of a tensor."""
    if tensor.device == _HOST:
        return _tvm.as_array(tensor).copy()
    host = tvm.runtime.empty(tensor.shape, str(tensor.dtype))
    tensor.copyto(host)
    return _tvm.as_array(host).copy()


def all_fetched(result: Any) -> list[np.ndarray]:
    """What a model returned, copied: a tensor, or several."""
    if isinstance(result, tvm.runtime.Tensor):
        return [fetched(result)]
    return [array for each in result for array in all_fetched(each)]
