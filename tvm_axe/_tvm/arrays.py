"""Arrays of numpy and tensors of the runtime over one memory, whatever their type and strides."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import tvm
import tvm_ffi


class _Import:
    """An array as a DLPack producer, for `tvm_ffi.from_dlpack`; numpy itself can't export the small float types."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)  # kDLCPU

    def __dlpack__(self, **options: Any) -> Any:
        array = self._array.view(f"u{self._array.itemsize}")
        # numpy takes no notice of strides along dimensions of one element, calls such arrays dense, and exports no
        # strides then; of two elements that aren't neighbours it does, and nothing is read to export them.
        alone = array.ndim > 1 and 1 in array.shape
        if alone:
            array = np.lib.stride_tricks.as_strided(array, (2,) * array.ndim, (2 * array.itemsize,) * array.ndim)
        capsule = array.__dlpack__()
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        if alone:
            for dimension, (extent, stride) in enumerate(zip(self._array.shape, self._array.strides)):
                tensor.shape[dimension], tensor.strides[dimension] = extent, stride // array.itemsize
        dtype = tvm_ffi.dtype(self._array.dtype.name)
        tensor.code, tensor.bits = int(dtype.type_code), dtype.bits
        return capsule


class _Elsewhere(_Import):
    """The same of memory that isn't the host's."""

    def __init__(self, array: np.ndarray, address: int, device: tuple[int, int]) -> None:
        super().__init__(array)
        self._address, self._device = address, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        capsule = super().__dlpack__(**options)
        tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
        tensor.data = self._address
        tensor.device[:] = self._device
        return capsule


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
    )


_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def restrided(array: np.ndarray, shape: Sequence[int], strides: Sequence[int]) -> np.ndarray:
    """A view of an array's memory, of whatever type; `strides` are in bytes. numpy's own knows no small floats."""
    words = array.view(f"u{array.itemsize}")
    return np.lib.stride_tricks.as_strided(words, tuple(shape), tuple(strides)).view(array.dtype)


def as_tensor(array: np.ndarray) -> tvm_ffi.Tensor:
    """A tensor over the array's memory, strides and all; upstream's `from_dlpack` takes dense arrays only."""
    return tvm_ffi.from_dlpack(_Import(array))


def device_tensor(
    address: int, shape: Sequence[int], strides: Sequence[int], dtype: np.dtype, device: tvm.runtime.Device
) -> tvm_ffi.Tensor:
    """A tensor over memory of a device that somebody else keeps; `strides` are in bytes."""
    # An array of that shape, which nobody reads.
    stand_in = restrided(np.zeros(1, dtype), shape, strides)
    return tvm_ffi.from_dlpack(_Elsewhere(stand_in, address, (device.dlpack_device_type(), device.index)))


class _Export:
    """A tensor's memory for numpy; keeps the tensor."""

    def __init__(self, tensor: tvm_ffi.Tensor, itemsize: int) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple([stride * itemsize for stride in tensor.strides]),
            "typestr": f"|V{itemsize}",
            "data": (tensor.data_ptr(), False),
        }


_numpy_type = functools.cache(np.dtype)


def as_array(tensor: tvm_ffi.Tensor) -> np.ndarray:
    """An array over a CPU tensor's memory, whatever its type; upstream's `numpy()` copies."""
    dtype = _numpy_type(str(tensor.dtype))
    return np.asarray(_Export(tensor, dtype.itemsize)).view(dtype)
