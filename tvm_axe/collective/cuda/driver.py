"""CUDA's driver, by NVIDIA's bindings: its calls raise what it says, and what is asked of it before anything starts.

Source: CUDA Driver API, "Virtual Memory Management", "Peer Context Memory Access", "Execution Control".
"""

from __future__ import annotations

import functools
from typing import Any

from tvm_axe.errors import InputError, WorkerError

_REMEDY = "pip install tvm-axe[cuda]"


@functools.cache
def _bindings() -> Any:
    """The module of the driver's calls.

    Raises
    ------
    InputError
        If it isn't installed, or there is no driver.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise InputError(f'engine "cuda" needs cuda-bindings, which isn\'t here ({error}): {_REMEDY}') from None
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # no library
        raise InputError(
            f'engine "cuda" finds no CUDA driver on this machine; install NVIDIA\'s display driver, or compile for '
            f'"llvm", which runs on processes ({error})'
        ) from None
    if code != driver.CUresult.CUDA_SUCCESS:
        raise InputError(f'engine "cuda" can\'t start the CUDA driver, which says {_said(driver, code)}')
    return driver


def enum(kind: str, value: str) -> Any:
    """Return a value of one of the driver's enumerations, by its name."""
    return getattr(getattr(_bindings(), kind), value)


def struct(kind: str) -> Any:
    """Return a new structure of the driver's."""
    return getattr(_bindings(), kind)()


def call(name: str, *arguments: Any) -> Any:
    """Call the driver and return what it gives: nothing, a value, or a tuple of them.

    Raises
    ------
    WorkerError
        If it says that it failed; has the call and what it says.
    """
    driver = _bindings()
    code, *values = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise WorkerError(f"{name}: {_said(driver, code)}")
    return values[0] if len(values) == 1 else tuple(values) if values else None


def ready(name: str, *arguments: Any) -> bool:
    """Call the driver and return whether it knows of no error, be what it was asked done or not."""
    driver = _bindings()
    code = getattr(driver, name)(*arguments)[0]
    return code in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY)


def done(name: str, *arguments: Any) -> bool:
    """Call the driver and return whether what it was asked for is done.

    Raises
    ------
    WorkerError
        If it failed.
    """
    driver = _bindings()
    code = getattr(driver, name)(*arguments)[0]
    if code not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_NOT_READY):
        raise WorkerError(f"{name}: {_said(driver, code)}")
    return bool(code == driver.CUresult.CUDA_SUCCESS)


def _said(driver: Any, code: Any) -> str:
    found, text = driver.cuGetErrorString(code)
    known = found == driver.CUresult.CUDA_SUCCESS and text is not None
    return f"{code.name} ({text.decode() if known else 'unknown'})"


def gpus() -> int:
    """Return how many GPUs this process may use; makes no context.

    Raises
    ------
    InputError
        If there is no driver, or no bindings of it.
    """
    return int(call("cuDeviceGetCount"))


def gpus_for(devices: int) -> tuple[int, ...]:
    """Return a GPU for each of so many devices; where there are fewer, the first are named again.

    Raises
    ------
    InputError
        As `gpus`.
    """
    there = gpus()
    return tuple(device % there for device in range(devices))


def name_of(gpu: int) -> str:
    """Return what a GPU is called."""
    return bytes(call("cuDeviceGetName", 96, call("cuDeviceGet", gpu))).split(b"\0")[0].decode()


def memory_of(gpu: int) -> int:
    """Return the bytes of a GPU's memory."""
    return int(call("cuDeviceTotalMem", call("cuDeviceGet", gpu)))


def room(gpu: int) -> int:
    """Return how many blocks of a kernel surely run at once on a GPU: one on each of its processors."""
    attribute = enum("CUdevice_attribute", "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
    return int(call("cuDeviceGetAttribute", attribute, call("cuDeviceGet", gpu)))


def are_peers(first: int, second: int) -> bool:
    """Return whether kernels on a GPU can access the other's memory."""
    return first == second or bool(
        call("cuDeviceCanAccessPeer", call("cuDeviceGet", first), call("cuDeviceGet", second))
    )


def are_linked(first: int, second: int) -> bool:
    """Return whether a GPU has atomic operations on the other's memory, as over NVLink and not over PCIe."""
    attribute = enum("CUdevice_P2PAttribute", "CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED")
    return bool(call("cuDeviceGetP2PAttribute", attribute, call("cuDeviceGet", first), call("cuDeviceGet", second)))


def version() -> str:
    """Return the version of CUDA that the driver is of."""
    number = int(call("cuDriverGetVersion"))
    return f"{number // 1000}.{number % 1000 // 10}"
