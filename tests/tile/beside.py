"""Pairs as all devices run them, in numpy: kernels tile by tile, and copy engines beside them, in any order of events.

Each device has two streams, whose operations are done in order, and processors that take the tiles of a kernel in the
order of its grid. What goes on next is drawn at random, some streams being faster than others; where nothing can, the
devices are stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from interpreter import Running

from tvm_axe.collective.side import STEPS, step
from tvm_axe.errors import WorkerError
from tvm_axe.lower.calls import Call, Tensor
from tvm_axe.lower.pairing import Launch

PROCESSORS = 2


class Stuck(Exception):
    """No device can go on."""


@dataclass
class Streams:
    """What a device was told: the operations of its two streams, each of which says whether it could be done.

    What is left on a side stream that nobody has joined goes on beside what follows.
    """

    main: list[Callable[[], bool]] = field(default_factory=list)
    side: list[Callable[[], bool]] = field(default_factory=list)


class Devices:
    """The devices along one axis.

    Parameters
    ----------
    arrays : mapping from str to numpy.ndarray
        The slabs of each buffer, the device first: float64, or int64.
    launches : mapping from str to Launch
        The kernels, by their names in the module.
    names : mapping
        What buffers are called.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], launches: Mapping[str, Launch], names: Mapping) -> None:
        self.arrays, self.launches, self.names = arrays, launches, names
        self.count = len(next(iter(arrays.values())))
        self.sides: list[list[Callable[[], bool]]] = [[] for _ in range(self.count)]

    def run(self, calls: Sequence[Call], rng: np.random.Generator) -> None:
        """Have all devices make the calls, until all of their streams but the side streams are done."""
        self.met = [0] * self.count
        streams = [self._told(calls, device) for device in range(self.count)]
        queues = [queue for each in streams for queue in (each.main, each.side)]
        fast = 10 ** rng.uniform(-3, 0, len(queues))  # some are much slower than others
        while any(each.main for each in streams):
            drawn = np.argsort(rng.random(len(queues)) / fast)
            for queue in (queues[at] for at in drawn if queues[at]):
                self.moved = False
                if queue[0]():
                    queue.pop(0)
                    break
                if self.moved:
                    break
            else:
                raise Stuck(f"{[len(queue) for queue in queues]} operations are left")

    def _told(self, calls: Sequence[Call], device: int) -> Streams:
        streams, meetings = Streams(side=self.sides[device]), 0
        for call in calls:
            if call.function == "axe.barrier":
                meetings += 1
                streams.main += [self._arrive(device), self._wait(meetings)]
            elif call.function in ("axe.fork", "axe.join"):
                events: list[None] = []
                first, second = streams.main, streams.side
                if call.function == "axe.join":
                    first, second = second, first
                first.append(lambda events=events: events.append(None) is None)
                second.append(lambda events=events: bool(events))
            elif call.function in self.launches:
                streams.main.append(self._kernel(call, device))
            else:
                streams.side.append(self._step(call, device))
        return streams

    def _arrive(self, device: int) -> Callable[[], bool]:
        def arrive() -> bool:
            self.met[device] += 1
            return True

        return arrive

    def _wait(self, meetings: int) -> Callable[[], bool]:
        return lambda: min(self.met) >= meetings

    def _kernel(self, call: Call, device: int) -> Callable[[], bool]:
        """The rest of a kernel, a tile of one of its processors at a time."""
        launch = self.launches[call.function]
        own = {
            tile.name: self.arrays[self.names[launch.tensors[tile.name]]][device].reshape(tile.shape)
            for tile in launch.program.params
        }
        running: list[Running] = []
        left: list[int] = []

        def go_on() -> bool:
            if not running:
                running.append(Running(launch.program, own, {"me": device}))
                left.extend(range(len(running[0].points)))
            for number in left[:PROCESSORS]:
                if running[0].run(number):
                    left.remove(number)
                    self.moved = True
                    break
            return not left

        return go_on

    def _step(self, call: Call, device: int) -> Callable[[], bool]:
        name = call.function.removeprefix("axe.")
        *numbers, _ = call.arguments[STEPS[name] :]
        tensors = []
        for tensor in call.arguments[: STEPS[name]]:
            assert isinstance(tensor, Tensor)
            slabs = self.arrays[tensor.buffer]
            tensors.append(slabs[device] if tensor.view == "slab" else slabs)

        def do() -> bool:
            try:
                step(name, tensors, numbers, device)
            except WorkerError:  # a counter is behind
                return False
            return True

        return do
