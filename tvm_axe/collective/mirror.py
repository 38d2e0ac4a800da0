"""The controller's copies of the slabs that lie in the memory of other machines.

A slab has the same offset everywhere, so the controller's memory has a place for each. `MeshTensor.slab` hands arrays
over these places out; while one is in use, or was since the last command, its contents go to the device before the next
command, and what the device then has comes back into those still in use. A copy that no command has outdated is not
fetched again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tvm_axe.collective.tensor import MeshTensor


class Place(NamedTuple):
    """Bytes of the arena that belong to a device of another machine."""

    device: int
    offset: int
    nbytes: int


class Mirror:
    """Keeps the copies of the tensors of one launch.

    Attributes
    ----------
    discrete : bool
        Whether the copies are of what is in the memory of devices of this machine.

    Parameters
    ----------
    run : callable
        Has all the workers do a command, without looking here first.
    hosts : sequence of sequence of int
        The devices of each machine; the controller's comes first.
    """

    discrete = False

    def __init__(self, run: Callable[..., None], hosts: Sequence[Sequence[int]]) -> None:
        self._run = run
        self._here = frozenset(hosts[0])
        self._elsewhere = hosts[1:]
        self._views: dict[Place, list[weakref.ref[np.ndarray]]] = {}
        self._shared: set[Place] = set()
        self._current: set[Place] = set()

    def reserve(self, tensor: MeshTensor) -> None:
        """Give a new tensor its zeros on the other machines."""
        places = self._places(tensor)
        self._run("reserve", places)
        self._current.update(places)
        self._shared.update(places if tensor.shared else ())

    def forget(self, tensor: MeshTensor) -> None:
        """Let go of the copies of a tensor, whatever was written to them."""
        for place in self._places(tensor):
            self._views.pop(place, None)
            self._current.discard(place)

    def release(self, tensor: MeshTensor) -> None:
        """Give the memory of a tensor on the other machines back."""
        places = self._places(tensor)
        self.forget(tensor)
        self._shared.difference_update(places)
        self._run("release", places)

    def fetch(self, tensor: MeshTensor, device: int) -> None:
        """Make the copy of a slab what the device has."""
        self._fetch([place for place in self._places(tensor) if place.device == device])

    def watch(self, tensor: MeshTensor, device: int, array: np.ndarray) -> None:
        """Take note of an array over a slab, which the controller may write to."""
        for place in self._places(tensor):
            if tensor.shared or place.device == device:
                self._views.setdefault(place, []).append(weakref.ref(array))

    def push(self) -> None:
        """Before a command: send what the controller may have written."""
        if self._views:
            self._run("move", list(self._views), False)
        alive = {place: [view for view in views if view() is not None] for place, views in self._views.items()}
        self._views = {place: views for place, views in alive.items() if views}

    def pull(self) -> None:
        """After a command that may have written slabs: fetch what the controller still has arrays over."""
        self.outdate()
        self._fetch(list(self._views))

    def outdate(self) -> None:
        """After such a command that failed: take no copy for what the device has, but for what devices only read."""
        self._current &= self._shared

    def _fetch(self, places: Sequence[Place]) -> None:
        stale = [place for place in places if place not in self._current]
        if stale:
            self._run("move", stale, True)
            self._current.update(stale)

    def _places(self, tensor: MeshTensor) -> list[Place]:
        """Where the slabs on other machines lie; one a machine of what its devices share; none of what is empty."""
        if not tensor.nbytes:
            return []
        _, offset, stride, _, _ = tensor.encode("slab")
        if tensor.shared:
            return [Place(host[0], offset, tensor.nbytes) for host in self._elsewhere]
        devices = [device for host in self._elsewhere for device in host]
        return [Place(device, offset + device * stride, tensor.nbytes) for device in devices]
