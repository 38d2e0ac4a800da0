"""Runs of a program as CUDA graphs: told to the stream once, captured the second time, and launched from then on.

What the host does for a run is to launch the graph, whatever the number of kernels, copies and meetings in it.

Source: CUDA Driver API, "Graph Management"; "Stream Management", cuStreamBeginCapture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import tvm

from tvm_axe.collective.cuda.driver import call, enum
from tvm_axe.errors import WorkerError

_ROOM = 32  # graphs that are kept

_TOLD, _NEVER = "told", "never"  # of a run without a graph: it is to be captured next, or can't be


class Graphs:
    """The graphs of a stream's runs, by key.

    Parameters
    ----------
    stream : CUstream
        The stream.
    room : int
        How many are kept.
    mode : str
        How the driver captures: ``RELAXED``, or ``THREAD_LOCAL``, in which it refuses what no graph can hold.
    """

    def __init__(self, stream: Any, room: int = _ROOM, mode: str = "RELAXED") -> None:
        self._stream, self._room, self._mode = stream, room, mode
        self._graphs: dict[Hashable, Any] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, tell: Callable[[], object]) -> bool:
        """Have the stream do what `tell` tells it, the same each time for one key; whether a graph did it."""
        graph = self._graphs.pop(key, None)
        if graph is None:
            tell()  # the first time memory is allocated and modules are loaded, which a graph can't hold
            graph = _TOLD
        elif graph is _TOLD:
            graph = self._captured(tell)
            if graph is _NEVER:
                tell()
            else:
                call("cuGraphLaunch", graph, self._stream)
        elif graph is _NEVER:
            tell()
        else:
            call("cuGraphLaunch", graph, self._stream)
        self._graphs[key] = graph  # the last one used
        while len(self._graphs) > self._room:
            self._destroy(next(iter(self._graphs)))
        return graph not in (_TOLD, _NEVER)

    def clear(self) -> None:
        """Drop them all."""
        for key in list(self._graphs):
            self._destroy(key)

    def _destroy(self, key: Hashable) -> None:
        graph = self._graphs.pop(key)
        if graph not in (_TOLD, _NEVER):
            call("cuGraphExecDestroy", graph)

    def _captured(self, tell: Callable[[], object]) -> Any:
        """The graph of what `tell` tells the stream; `_NEVER` if that holds what no graph does."""
        mode = enum("CUstreamCaptureMode", f"CU_STREAM_CAPTURE_MODE_{self._mode}")
        call("cuStreamBeginCapture", self._stream, mode)
        fault: Exception | None = None
        try:
            tell()
        except Exception as error:  # it may fail because it is captured; told again, it fails for itself
            fault = error
        try:
            graph = call("cuStreamEndCapture", self._stream)
        except WorkerError:
            return _NEVER
        try:
            return _NEVER if fault is not None else call("cuGraphInstantiate", graph, 0)
        finally:
            call("cuGraphDestroy", graph)


class OwnGraphs(Graphs):
    """Graphs of a GPU that this process uses by itself, on a stream of their own that the default one waits for.

    Parameters
    ----------
    device : Device
        The GPU, as the runtime knows it.
    room : int
        How many are kept.
    """

    def __init__(self, device: tvm.runtime.Device, room: int) -> None:
        self._device = device
        self._context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device.index))
        call("cuCtxSetCurrent", self._context)
        super().__init__(call("cuStreamCreate", int(enum("CUstream_flags", "CU_STREAM_DEFAULT"))), room, "THREAD_LOCAL")

    def run(self, key: Hashable, tell: Callable[[], object]) -> bool:
        call("cuCtxSetCurrent", self._context)  # calls may come from any thread
        self._device.set_raw_stream(int(self._stream))
        try:
            return super().run(key, tell)
        finally:
            self._device.set_raw_stream(0)

    def close(self) -> None:
        """Drop them all, and the stream."""
        call("cuCtxSetCurrent", self._context)
        call("cuStreamSynchronize", self._stream)
        self.clear()
        call("cuStreamDestroy", self._stream)
        call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", self._device.index))
