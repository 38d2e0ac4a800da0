"""Programs as all devices run them, in numpy: kernels, collectives, and the side stream, in any order of events.

Kernels of pairs run tile by tile, others at once; collectives a row of a move at a time.

Each device has a stream for its kernels and one for each peer, whose operations are done in order, and processors that
take the tiles of a kernel in the order of its grid. What goes on next is drawn at random, some streams being faster
than others; where nothing can, the devices are stuck.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from interpreter import Unsignalled, _block, _extents, _Memory, _sizes

from tvm_axe.collective.algorithms import Algorithm, offered, phases
from tvm_axe.collective.ops import boxes, summed
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.side import BESIDE, STEPS, Branching, step
from tvm_axe.errors import WorkerError
from tvm_axe.lower.calls import Call, Tensor
from tvm_axe.lower.pairing import Launch
from tvm_axe.tile.program import TileProgram

PROCESSORS = 2


class Running:
    """A program on arrays that others use too while it runs: point by point, in the order of its grid.

    The arrays are float64 or int64, by the parameters' names, and scalars numbers.
    """

    def __init__(self, program: TileProgram, arrays: Mapping[str, np.ndarray], scalars: Mapping[str, int]) -> None:
        self._program = program
        tiles = [arrays[tile.name] for tile in program.params]
        given = {scalar: np.asarray(scalars[scalar.name]) for scalar in program.scalars}
        self._sizes = {**_sizes(program, tiles), **given}
        self._tensors = {tile: _Memory(tile, array, "block") for tile, array in zip(program.params, tiles)}
        self.points = list(np.ndindex(*_extents(program, self._sizes)))
        self.steps = 0  # that blocks have done
        self._blocks: dict[int, Iterator[object]] = {}

    def run(self, number: int) -> bool:
        """Run the block of a point on, as far as flags let it; whether it is done."""
        if number not in self._blocks:
            block = _block(self._program, number, self.points[number], self._tensors, self._sizes, {})
            self._blocks[number] = block.run(self._program.body)
        with np.errstate(all="ignore"):
            for event in self._blocks[number]:
                if isinstance(event, Unsignalled):
                    return False
                self.steps += 1
        return True


class Stuck(Exception):
    """No device can go on."""


@dataclass
class Streams:
    """What a device was told: the operations of its streams, each of which says whether it could be done.

    `sides` are the branches of its side stream, one for each peer. What is left there that nobody has joined goes on
    beside what follows.
    """

    main: list[Callable[[], bool]] = field(default_factory=list)
    sides: list[list[Callable[[], bool]]] = field(default_factory=list)


class Devices:
    """The devices along one axis.

    Parameters
    ----------
    arrays : mapping from str to numpy.ndarray
        The slabs of each buffer, the device first: float64, or int64.
    launches : mapping from str to Launch
        The kernels of pairs, by their names in the module.
    names : mapping
        What buffers are called.
    kernels : mapping from str to callable
        The other kernels, which take the arguments of their calls.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        launches: Mapping[str, Launch],
        names: Mapping,
        kernels: Mapping[str, Callable[..., object]] | None = None,
    ) -> None:
        self.arrays, self.launches, self.names, self.kernels = arrays, launches, names, kernels or {}
        self.count = len(next(iter(arrays.values())))
        self.sides: list[list[list[Callable[[], bool]]]] = [[[] for _ in range(self.count)] for _ in range(self.count)]

    def run(self, calls: Sequence[Call], rng: np.random.Generator) -> None:
        """Have all devices make the calls, until all of their streams but the side streams are done."""
        self.met = [0] * self.count
        self.luck = rng.random()  # which algorithms collectives take
        streams = [self._told(calls, device) for device in range(self.count)]
        queues = [queue for each in streams for queue in (each.main, *each.sides)]
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
        streams, meetings = Streams(sides=self.sides[device]), 0
        ends: list[list[None]] = []  # of each fork, whose branches have done what was told behind it
        branches, branching = streams.sides, Branching()
        for call in calls:
            if call.function == "axe.barrier":
                meetings += 1
                streams.main += [self._arrive(device), self._wait(meetings)]
            elif call.function == "axe.fork":
                events: list[None] = []
                streams.main.append(lambda events=events: events.append(None) is None)
                ends.append([])
                for branch in branches:
                    branch.append(lambda events=events: bool(events))
                    branch.append(lambda events=ends[-1]: events.append(None) is None)
            elif call.function == "axe.join":
                (left,) = call.arguments
                waited = ends[: len(ends) - left]
                streams.main.append(lambda waited=waited: all(len(end) == len(branches) for end in waited))
            elif call.function in self.launches:
                streams.main.append(self._kernel(call, device))
            elif call.kernel is not None:
                streams.main.append(self._function(call, device))
            elif call.function.removeprefix("axe.") in VIEWS:
                streams.main.append(self._collective(call, device))
            else:
                branch, told = self._beside(call, device, branching)
                branches[branch].insert(len(branches[branch]) - bool(ends), told)
        return streams

    def _arrive(self, device: int) -> Callable[[], bool]:
        def arrive() -> bool:
            self.met[device] += 1
            return True

        return arrive

    def _wait(self, meetings: int) -> Callable[[], bool]:
        return lambda: min(self.met) >= meetings

    def _kernel(self, call: Call, device: int) -> Callable[[], bool]:
        """The rest of a kernel, as far as flags let a tile of one of its processors go at a time."""
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
                before, done = running[0].steps, running[0].run(number)
                self.moved = running[0].steps > before
                if done:
                    left.remove(number)
                if self.moved:
                    break
            return not left

        return go_on

    def _function(self, call: Call, device: int) -> Callable[[], bool]:
        """A kernel that is done at once."""
        given = [self._tensor(each, device) if isinstance(each, Tensor) else each for each in call.arguments]
        kernel = self.kernels[call.function]
        return lambda: kernel(*(device if isinstance(each, str) else each for each in given)) is None

    def _tensor(self, tensor: Tensor, device: int) -> np.ndarray:
        slabs = self.arrays[tensor.buffer]
        return slabs[device] if tensor.view == "slab" else slabs

    def _collective(self, call: Call, device: int) -> Callable[[], bool]:
        """This device's part of a collective, by one of the algorithms that are offered for it."""
        name = call.function.removeprefix("axe.").removesuffix(BESIDE)
        source, target, *others = call.arguments
        numbers = [number for number in others if isinstance(number, int)]
        assert isinstance(source, Tensor) and isinstance(target, Tensor)
        valid = offered(name, in_place=source.buffer == target.buffer)
        rest: list[Iterator[None]] = []

        def go_on() -> bool:
            if not rest:
                algorithm = valid[int(self.luck * len(valid))]
                rest.append(self._moves(name, algorithm, (source, target), numbers, device))
            self.moved = True
            return next(rest[0], "done") == "done"

        return go_on

    def _moves(
        self, name: str, algorithm: Algorithm, tensors: tuple[Tensor, Tensor], numbers: Sequence[int], device: int
    ) -> Iterator[None]:
        sides = [self.arrays[t.buffer][slice(None) if is_view else slice(device, device + 1)]
                 for t, is_view in zip(tensors, VIEWS[name])]  # fmt: skip
        source, target = (tensor.slab for tensor in tensors)
        for phase in phases(name, algorithm, source, target, numbers, self.count, device):
            for move in phase.moves:
                terms = boxes(sides[1 if phase.onwards else 0], move.source, move.box)
                outs = boxes(sides[1], move.target, move.box)
                for row in range(move.box[0]):
                    total = summed([term[row : row + 1].copy() for term in terms])
                    yield
                    for out in outs:
                        out[row : row + 1] = total

    def _beside(self, call: Call, device: int, branching: Branching) -> tuple[int, Callable[[], bool]]:
        """What a branch of the side stream is told, and which."""
        if call.function.endswith(BESIDE):
            return 0, self._collective(call, device)
        numbers = [each for each in call.arguments if isinstance(each, int)]
        return branching.branch(call.function.removeprefix("axe."), numbers), self._step(call, device)

    def _step(self, call: Call, device: int) -> Callable[[], bool]:
        name = call.function.removeprefix("axe.")
        *numbers, _ = call.arguments[STEPS[name] :]
        tensors = [self._tensor(each, device) for each in call.arguments[: STEPS[name]] if isinstance(each, Tensor)]

        def do() -> bool:
            try:
                step(name, tensors, numbers, device)
            except WorkerError:  # a counter is behind
                return False
            return True

        return do
