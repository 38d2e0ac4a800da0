"""Runs of a program as CUDA graphs: told to the stream once, captured the second time, and launched from then on.

What the host does for a run is to launch the graph, whatever the number of kernels, copies and meetings in it.

Source: CUDA Driver API, "Graph Management"; "Stream Management", cuStreamBeginCapture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

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
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._graphs: dict[Hashable, Any] = {}

    def run(self, key: Hashable, tell: Callable[[], object]) -> None:
        """Have the stream do what `tell` tells it, the same each time for one key."""
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
        while len(self._graphs) > _ROOM:
            self._destroy(next(iter(self._graphs)))

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
        call("cuStreamBeginCapture", self._stream, enum("CUstreamCaptureMode", "CU_STREAM_CAPTURE_MODE_RELAXED"))
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
