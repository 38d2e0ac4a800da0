"""What runs on a mesh of workers: those that come with a call, or its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tvm_axe.collective import Workers, launch
from tvm_axe.collective.workers import Item
from tvm_axe.errors import LowerError, WorkerError
from tvm_axe.executable.arguments import Arrays
from tvm_axe.executable.base import Executable
from tvm_axe.layout import Mesh
from tvm_axe.machines import backend_of

__all__ = ["OnMesh", "discard"]


class OnMesh(Executable):
    """An executable for a mesh, with workers of its own once it is run without others."""

    mesh: Mesh
    _own: tuple[int, Workers] | None = None  # the process that launched them, and its own workers

    def close(self) -> None:
        if self._own is not None and self._own[0] == os.getpid():
            self._own[1].close()
        self._own = None

    def _workers(self) -> Workers:
        process = os.getpid()
        if self._own is None or self._own[0] != process or self._own[1].closed:
            on_host = backend_of(self.target).on_host
            workers = launch(self.mesh) if on_host else launch(self.mesh, engine=backend_of(self.target).device)
            weakref.finalize(self, workers.close)
            self._own = process, workers
        return self._own[1]

    def _taken(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Workers, Arrays]:
        if arguments and isinstance(arguments[0], Workers):
            self._check(arguments[0])
        workers, arrays = super()._taken(arguments, named)
        assert workers is not None  # a mesh has them
        return workers, arrays

    def _check(self, workers: Workers) -> None:
        """Check that it can run on workers."""
        if workers.mesh != self.mesh:
            raise LowerError(
                f"{self.name} was compiled for the mesh {self.mesh} ({self.mesh.size} devices); the workers are "
                f"{workers.mesh} ({workers.mesh.size}): launch the mesh that it was compiled for"
            )
        if workers.closed:
            raise WorkerError(f"{self.name}: the workers are closed; launch new ones")


def discard(workers: weakref.ref[Workers], items: Iterable[Item]) -> None:
    """Have workers, if they are still there, free what belonged to something that has gone: for finalizers."""
    alive = workers()
    if alive is not None:
        for item in items:
            alive.discard(item)
