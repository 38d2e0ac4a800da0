"""Launches timed by the GPU's own clock: captured in a CUDA graph, so that the host's part of them isn't measured.

Nothing of this is in TVM's Python interface, so the driver's library is called itself; it is there where a GPU is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

import tvm_ffi

__all__ = ["Graph"]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: what other threads do meanwhile is no error
_DRIVER = "libcuda.so.1"


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL(_DRIVER)


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {text.value.decode() if text.value else f'CUDA error {code}'}")


class Graph:
    """What `launch` launches on the current stream, to be replayed.

    Parameters
    ----------
    launch
        Launches kernels, and nothing that waits or allocates.
    device
        TVM's, of the GPU whose context is current.
    """

    def __init__(self, launch: Callable[[], None], device: Any) -> None:
        self._device = device
        self._stream = ctypes.c_void_p(int(device.create_raw_stream()))
        self._executable = ctypes.c_void_p()
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        for event in self._events:
            _call("cuEventCreate", ctypes.byref(event), 0)
        graph = ctypes.c_void_p()
        with tvm_ffi.use_raw_stream(device, self._stream.value):
            _call("cuStreamBeginCapture_v2", self._stream, _RELAXED)
            try:
                launch()
            finally:  # a stream that is being captured can't be used for anything else
                _call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        _call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0))
        _call("cuGraphDestroy", graph)

    def seconds(self) -> float:
        """Replay once and wait; the seconds between its first launch and the end of its last one."""
        start, stop = self._events
        _call("cuEventRecord", start, self._stream)
        _call("cuGraphLaunch", self._executable, self._stream)
        _call("cuEventRecord", stop, self._stream)
        _call("cuEventSynchronize", stop)
        milliseconds = ctypes.c_float()
        _call("cuEventElapsedTime", ctypes.byref(milliseconds), start, stop)
        return milliseconds.value / 1e3

    def close(self) -> None:
        """Free the graph."""
        for event in self._events:
            _call("cuEventDestroy_v2", event)
        _call("cuGraphExecDestroy", self._executable)
        self._device.free_raw_stream(self._stream.value)

    def __enter__(self) -> Graph:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
