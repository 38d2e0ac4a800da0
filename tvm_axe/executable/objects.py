"""Objects of the runtime in a session on a mesh, such as paged caches: one on each device."""

from __future__ import annotations

import weakref

from tvm_axe.collective import DeviceObject, Workers

__all__ = ["Kept", "Places"]


class Places:
    """The objects of a session; devices let go of those that have gone.

    Parameters
    ----------
    workers : Workers
        Who have them.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = weakref.ref(workers)
        self._all: set[DeviceObject] = set()

    def new(self) -> Kept:
        """Make place for an object on each device."""
        workers = self._workers()
        assert workers is not None  # whoever asks has them
        found = workers.place()
        self._all.add(found)
        return Kept(found, self)

    def give(self, place: DeviceObject) -> None:
        """Take back what nobody uses any more; in any thread, also while another closes."""
        workers = self._workers()
        if place in self._all and workers is not None:
            self._all.discard(place)
            workers.discard(place)

    def close(self) -> None:
        """Let go of all."""
        left, self._all = self._all, set()
        workers = self._workers()
        if workers is not None and not workers.closed:
            for place in left:
                workers.discard(place)
            workers.free_discarded()


class Kept:
    """An object on each device, which is let go of once this has gone.

    Attributes
    ----------
    place : DeviceObject
        Where workers have it.
    """

    __slots__ = ("_places", "place")

    def __init__(self, place: DeviceObject, places: Places) -> None:
        self.place, self._places = place, places

    def __del__(self) -> None:
        self._places.give(self.place)
