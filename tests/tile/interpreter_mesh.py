"""What a tile program means on all devices of a mesh together: the judge of its waits and signals.

Every block of every device is a coroutine over one memory; who goes on is drawn at random, step by step. What the
devices do is ordered by flags alone, which vector clocks follow: a signal releases what its block has done and seen,
and a wait acquires what its flags had been set with when they first were what it waits for, however late it sees them:
in another order it goes on by then. `Fault` says what no order holds between: an access of an
element that another block stores, a flag that is set or reset while another sets it, a slab that is stored to after
its device has ended; and that nobody can go on.

Copy engines, and whatever else is no kernel, are `Agent`s: Python generators beside the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from interpreter import Fault, _Block, _extents, _Memory, _poison, _sizes, _widened
from tvm import tirx

from tvm_axe.tile.nodes import Signal, Wait
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.reading import read
from tvm_axe.tile.regions import Tile


def interpret_mesh(
    program: TileProgram | tirx.PrimFunc,
    *arguments: np.ndarray | float | None,
    rng: np.random.Generator,
    running: int | None = None,
    agents: Sequence[Callable[[Agent], Iterator[object]]] = (),
) -> list[np.ndarray]:
    """Run a program on all devices at once, on an array or a number for each parameter; arrays stay as they are.

    Parameters
    ----------
    arguments : of a mesh tensor the array, of another tensor one for each device, stacked; None for the device
    rng : draws who goes on
    running : how many blocks of a device run at once, begun in the order of the grid; all, without it
    agents : what each device's agent does, besides its blocks

    Returns
    -------
    What each tensor holds afterwards: float64, int64 or bool, stacked if it is no mesh tensor.
    """
    program = program if isinstance(program, TileProgram) else read(program)
    mesh = _Mesh(program, arguments, running, agents)
    with np.errstate(all="ignore"):
        mesh.run(rng)
    mesh.check_ends()
    return [
        mesh.memories[0][tile].data if tile.is_mesh else np.stack([of[tile].data for of in mesh.memories])
        for tile in program.params
    ]


class _Clocks:
    """Vector clocks: of blocks and agents, and behind them of each device's beginning."""

    def __init__(self, threads: int, home: Sequence[int], devices: int) -> None:
        self.home, self.threads = home, threads
        self.time = np.zeros((threads, threads + devices), "int64")
        for thread, device in enumerate(home):
            self.time[thread, thread] = self.time[thread, self.begin(device)] = 1

    def begin(self, device: int) -> int:
        """What a device's kernel before this one counts as."""
        return self.threads + device

    def name(self, thread: int) -> str:
        """Who a thread is, in words."""
        if thread >= self.threads:
            return f"what came before on device {thread - self.threads}"
        return f"block {thread - self.home.index(self.home[thread])} of device {self.home[thread]}"

    def released(self, thread: int, ordered: bool) -> np.ndarray:
        """What a thread's signal says: all that it has done and seen, or that its device has begun."""
        if ordered:
            now = self.time[thread].copy()
            self.time[thread, thread] += 1
            return now
        only = np.zeros(self.time.shape[1], "int64")
        only[self.begin(self.home[thread])] = 1
        return only

    def acquire(self, thread: int, seen: np.ndarray) -> None:
        self.time[thread] = np.maximum(self.time[thread], seen)


class _Ordered(_Memory):
    """A tensor's elements, with who stored and who read each, and when; for flags, what each was set to with what."""

    def __init__(self, tile: Tile, data: np.ndarray, clocks: _Clocks, begins: np.ndarray) -> None:
        super().__init__(tile, data, "block")
        self.clocks = clocks
        self.by, self.at = begins.copy(), np.ones(data.shape, "int64")
        self.read, self.joined = (np.zeros((clocks.threads, *data.shape), "int32") for _ in range(2))
        self.set_with: dict[tuple[int, ...], list[tuple[int, np.ndarray]]] = {}
        self.set_by: dict[tuple[int, ...], tuple[int, int, bool]] = {}

    def check(self, where: tuple, who: np.ndarray, stores: bool) -> None:
        thread = int(who)
        now, done = self.clocks.time[thread], "stored" if stores else "read"
        # What is stored over what was there before the kernel is free by agreement: buffers that are used in turns.
        counts = self.by[where] < len(self.clocks.time) if stores else True
        self._ordered(where, thread, done, "store", counts & (self.at[where] > now[self.by[where]]), self.by[where])
        self._others(where, thread, done, "join of it", self.joined)
        if not stores:
            self.read[(thread, *where)] = now[thread]
            return
        self._others(where, thread, done, "read of it", self.read)
        self.by[where], self.at[where] = thread, now[thread]

    def join(self, where: tuple, thread: int) -> None:
        """Note that a thread joins values with elements; those of others it needs no order with."""
        now = self.clocks.time[thread]
        late = (self.by[where] < len(self.clocks.time)) & (self.at[where] > now[self.by[where]])
        self._ordered(where, thread, "joined", "store", late, self.by[where])
        self._others(where, thread, "joined", "read of it", self.read)
        self.joined[(thread, *where)] = now[thread]

    def _others(self, where: tuple, thread: int, done: str, what: str, times: np.ndarray) -> None:
        """Refuse what others did at times that the thread hasn't seen."""
        those = times[(slice(None), *where)]
        late = those > self.clocks.time[thread][: len(those)].reshape(-1, *[1] * (those.ndim - 1))
        self._ordered(where, thread, done, what, late.any(axis=0), late.argmax(axis=0))

    def _ordered(self, where: tuple, thread: int, done: str, what: str, late: np.ndarray, others: np.ndarray) -> None:
        """Refuse elements at which what another did isn't ordered: say of one of them where it is, and who both are."""
        if np.any(late):
            first = tuple(np.argwhere(late)[0])
            place = np.arange(self.data.size).reshape(self.data.shape)[where][first]
            at = [int(index) for index in np.unravel_index(int(place), self.data.shape)]
            one, other = self.clocks.name(thread), self.clocks.name(int(np.broadcast_to(others, np.shape(late))[first]))
            raise Fault(
                f"{self.tile}: an element is {done}, and another's {what} isn't ordered: {at}, by {one} and by {other}"
            )

    def signal(self, thread: int, place: tuple[int, ...], value: int, ordered: bool, add: bool) -> None:
        self.change(thread, place, add)
        said = self.clocks.released(thread, ordered)
        before = self.set_with.setdefault(place, [(int(self.data[place]), np.zeros_like(said))])
        if add:
            said = np.maximum(said, before[-1][1])
        self.data[place] = self.data[place] + value if add else value
        before.append((int(self.data[place]), said))

    def wait(self, thread: int, place: tuple[int, ...], value: int, reset: bool) -> None:
        for found, said in self.set_with.get(place, []):
            if found >= value:
                self.clocks.acquire(thread, said)
                break
        if reset:  # of what was seen: it comes behind all changes so far
            self.set_by[place] = thread, int(self.clocks.time[thread, thread]), False
            self.data[place] = 0
            self.set_with.pop(place, None)

    def change(self, thread: int, place: tuple[int, ...], add: bool) -> None:
        """Note that a flag is set; refuse it where another's change, other than to add too, isn't ordered."""
        if place in self.set_by:
            by, at, added = self.set_by[place]
            if at > self.clocks.time[thread, by] and not (add and added):
                raise Fault(f"{self.tile}: flag {place} is set, and another's change of it isn't ordered")
        self.set_by[place] = thread, int(self.clocks.time[thread, thread]), add


@dataclass(frozen=True)
class _Waiting:
    """What a coroutine yields while it can't go on."""

    what: str
    ready: Callable[[], bool]


class _MeshBlock(_Block):
    """A block whose waits wait, and whose signals are ordered."""

    def _places(self, node: Wait | Signal) -> tuple[_Ordered, list[tuple[int, ...]]]:
        memory, there = self._flags(node.flags)
        first = [part.start for part in there]
        return memory, [tuple(map(sum, zip(first, offset))) for offset in np.ndindex(*node.flags.extents)]

    def _wait(self, node: Wait) -> Iterator[object]:
        yield None
        memory, places = self._places(node)
        value = self._scalar(node.value)
        yield _Waiting(str(node), lambda: all(memory.data[place] >= value for place in places))
        for place in places:
            memory.wait(self.number, place, int(value), node.reset)

    def _signal(self, node: Signal) -> None:
        memory, places = self._places(node)
        for place in places:
            memory.signal(self.number, place, self._scalar(node.value), node.ordered, node.add)


@dataclass
class Agent:
    """What an agent does it with; tensors are named, and indices begin with the device."""

    device: int
    number: int
    tensors: Callable[[str, int], tuple[_Ordered, bool]]

    def wait(self, name: str, index: tuple[int, ...], value: int) -> Iterator[object]:
        memory, place = self._at(name, index)
        yield _Waiting(f"agent of {self.device} for {name}{list(index)}", lambda: memory.data[place] >= value)
        memory.wait(self.number, place, value, False)

    def signal(self, name: str, index: tuple[int, ...], value: int) -> None:
        memory, place = self._at(name, index)
        memory.signal(self.number, place, value, True, False)

    def copy(self, source: tuple[str, tuple], target: tuple[str, tuple]) -> None:
        (src, there), (dst, here) = self._at(*source), self._at(*target)
        src.check(there, np.asarray(self.number), False)
        dst.check(here, np.asarray(self.number), True)
        dst.data[here] = src.data[there]

    def _at(self, name: str, index: tuple) -> tuple[_Ordered, tuple]:
        memory, of_mesh = self.tensors(name, index[0])
        return memory, index if of_mesh else index[1:]


@dataclass
class _Lane:
    """What one device runs: coroutines begun, and those still to begin."""

    running: list[tuple[Iterator[object], list]] = field(default_factory=list)
    later: list[Iterator[object]] = field(default_factory=list)


class _Mesh:
    def __init__(
        self, program: TileProgram, arguments: Sequence, running: int | None, agents: Sequence[Callable]
    ) -> None:
        given = dict(zip(program.func.params, arguments, strict=True))
        arrays = {tile: np.asarray(given[tile.buffer]) for tile in program.params}
        first = [array if tile.is_mesh else array[0] for tile, array in arrays.items()]
        sizes = {
            **_sizes(program, first),
            **{s: np.asarray(given[s]) for s in program.scalars if not s.same_as(program.device)},
        }
        points = list(np.ndindex(*_extents(program, sizes)))
        each, devices = len(points) + bool(agents), program.devices
        home = [device for device in range(devices) for _ in range(each)]
        self.program, self.clocks, self.lanes = program, _Clocks(len(home), home, devices), []
        shared: dict[Tile, _Ordered] = {}
        for tile, array in arrays.items():
            if tile.is_mesh:
                begins = np.empty(array.shape, "int64")
                for device in range(devices):
                    begins[device] = self.clocks.begin(device)
                shared[tile] = _Ordered(tile, _widened(array), self.clocks, begins)
        self.memories = [
            {
                tile: shared[tile]
                if tile.is_mesh
                else _Ordered(
                    tile, _widened(array[device]), self.clocks, np.full(array[0].shape, self.clocks.begin(device))
                )
                for tile, array in arrays.items()
            }
            for device in range(devices)
        ]
        for device in range(devices):
            blocks = []
            for number, point in enumerate(points):
                on_chip = {tile: _Memory(tile, _poison(tile), "point") for tile in program.tiles}
                values = {**sizes, **{var: np.asarray(x) for (var, _), x in zip(program.grid, point)}}
                values[program.device] = np.asarray(device)
                block = _MeshBlock(device * each + number, {**self.memories[device], **on_chip}, values, {})
                blocks.append(block.run(program.body))
            count = len(blocks) if running is None else running
            lane = _Lane([(block, []) for block in blocks[:count]], blocks[count:])
            if agents:
                agent = Agent(device, device * each + len(points), self._tensor)
                lane.running.append((agents[device](agent), []))
            self.lanes.append(lane)

    def _tensor(self, name: str, device: int) -> tuple[_Ordered, bool]:
        tile = next(tile for tile in self.program.params if tile.name == name)
        return self.memories[device][tile], tile.is_mesh

    def run(self, rng: np.random.Generator) -> None:
        """Let whoever can go on do so, some more often than others, until all have ended."""
        favour = {}
        while any(lane.running for lane in self.lanes):
            able = [
                (lane, entry) for lane in self.lanes for entry in lane.running if not entry[1] or entry[1][0].ready()
            ]
            if not able:
                stuck = [entry[1][0].what for lane in self.lanes for entry in lane.running if entry[1]]
                raise Fault(f"deadlock: nobody can go on; {len(stuck)} wait, the first: {stuck[0]}")
            weights = np.array([favour.setdefault(id(e[0]), rng.exponential() ** 3 + 1e-3) for _, e in able])
            lane, entry = able[int(rng.choice(len(able), p=weights / weights.sum()))]
            try:
                said = next(entry[0])
                entry[1][:] = [] if said is None else [said]
            except StopIteration:
                lane.running.remove(entry)
                if lane.later:
                    lane.running.append((lane.later.pop(0), []))

    def check_ends(self) -> None:
        """Refuse a slab that was stored to by what its device has not seen when its kernel ends."""
        of_device = self.clocks.time.reshape(self.program.devices, -1, self.clocks.time.shape[1]).max(axis=1)
        for memory in self.memories[0].values():
            if not memory.tile.is_mesh or memory.set_by:
                continue
            for device, seen in enumerate(of_device):
                late = memory.at[device] > seen[memory.by[device]]
                joins = memory.joined[:, device] > seen[: len(memory.joined)].reshape(-1, *[1] * late.ndim)
                for what, those in (("store to", late), ("join with", joins)):
                    if those.any():
                        raise Fault(f"{memory.tile}: device {device} ends, and a {what} its slab isn't ordered")
