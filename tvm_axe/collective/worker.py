"""One worker: what it does for the controller's commands, and the functions that its programs may call.

A worker is a thread of a Disco session: worker 0 (with the engine `threads`, every worker) in the controller's process,
the others each alone in a process that runs `serve`. Whatever goes wrong in a command is answered through the control
block; nothing may be raised to Disco, which would end the process.

Functions that a program may call with `R.call_packed`, on the tensors that it got as arguments; none of them waits,
except the barrier:

| name | arguments |
|---|---|
| `axe.barrier` | |
| `axe.arrive` | : says that what this worker did until now is done |
| `axe.wait` | behind: waits until all have arrived as often as this worker less `behind` times |
| `axe.all_reduce` | source (n, *shape), target (n, *shape), axis |
| `axe.reduce_scatter` | source (n, *shape), target (*block), dim, axis |
| `axe.all_gather` | source (*block), target (n, *shape), dim, axis |
| `axe.all_gather_in_place` | source (n, *shape), target (n, *shape), which is the source, dim, axis |
| `axe.all_to_all` | source (n, *piece), target (*piece), gathered, scattered, axis |
| `axe.send` | source (n, *shape), target (*shape), shift, axis |
| `axe.reduce` | source (n, *shape), target (*shape), root, axis |
| `axe.broadcast` | source (n, *shape), target (*shape), root, axis |
| `axe.fork`, `axe.wait_count`, `axe.copy`, `axe.flag`, `axe.join` | see `tvm_axe.collective.side` |

(n, *shape) is the view of a mesh tensor along the mesh axis named last; without n it is the worker's own slab.
`plan` says what each one does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvm_axe import _tvm
from tvm_axe.collective.across import Across, spanning_axes
from tvm_axe.collective.arena import Arena
from tvm_axe.collective.device import Cores, Device
from tvm_axe.collective.forked import speak
from tvm_axe.collective.job import Job
from tvm_axe.collective.link import SUPPORTED, link
from tvm_axe.collective.merging import HELD, MERGED, merged
from tvm_axe.collective.native import SPINS
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.recording import Recorder, Recording, clock
from tvm_axe.collective.side import STEPS
from tvm_axe.collective.staging import BUFFER, Staging
from tvm_axe.collective.stored import Piece, Stored, fill
from tvm_axe.collective.sync import ABORTED, DONE, FAILED, LATE, LOST, Aborted, Control, Late
from tvm_axe.collective.tensor import View, decode_view
from tvm_axe.layout import Mesh
from tvm_axe.machines.builder import builder_named

MOST_VIEWS = 1 << 12  # tensors that a worker keeps, as calls ask for the same ones


class _Call(NamedTuple):
    """A function of a program with arguments, and the places of those that are still to be given."""

    function: Callable[..., Any]
    values: list[Any]
    places: list[int]
    repeats: bool


class Site:
    """What the workers of one launch that live in this process have in common: their memory and compiled programs.

    Attributes
    ----------
    sharing : int
        How many workers share the cores.
    across : Across or None
        What this process's worker does with workers on other machines, if there are any.
    neighbours : tuple of tuple of int
        The workers whose devices see each other's memory.
    apart : frozenset of str
        The mesh axes along which there are devices that don't.
    alone : bool
        Whether only one worker lives in this process.
    """

    def __init__(
        self,
        mesh: Mesh,
        arena: Arena,
        timeout: float,
        cores: Sequence[int],
        job: Job | None = None,
        alone: bool = True,
        neighbours: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.mesh = mesh
        self.arena = arena
        self.timeout = timeout
        self.cores = tuple(cores)
        self.sharing = mesh.size if job is None else job.sharing()
        self.control = Control(arena.map, mesh.size, None if job is None else job.host)
        self.across: Across | None = None
        if job is not None and len(job.hosts) > 1:
            self.across = Across(job, mesh, self.control, timeout)
        if neighbours is None:
            neighbours = [range(mesh.size)] if job is None else job.hosts
        self.neighbours = tuple(map(tuple, neighbours))
        self.apart = spanning_axes(mesh, self.neighbours)
        self.alone = alone
        self._executables: dict[int, Any] = {}
        self._compiling = threading.Lock()

    def executable(self, program: int, compile_it: Callable[[], Any]) -> Any:
        """Return the program's executable, compiled by the first worker here that asks for it."""
        with self._compiling:
            if program not in self._executables:
                self._executables[program] = compile_it()
            return self._executables[program]

    def compiled(self, program: int) -> Any:
        """Return the program's executable, which a worker here has asked for."""
        return self._executables[program]

    def unload(self, program: int) -> None:
        """Drop the program's executable."""
        with self._compiling:
            self._executables.pop(program, None)


class Worker:
    """Worker `rank` of a launch.

    Parameters
    ----------
    site : Site
        What it has in common with others here.
    rank : int
        Its number.
    device : Device, optional
        What it computes on; the host's cores if left out.

    Attributes
    ----------
    rank : int
        Its number, that of its device.
    coords : dict
        Its coordinate on each mesh axis.
    device : Device
        What it computes on.
    connection : socket or None
        Through which descriptors of memory go to the controller and come from it, if devices have their own
        (`discrete`).
    received : list of int
        The descriptors that have come, and aren't used yet.
    """

    def __init__(self, site: Site, rank: int, device: Device | None = None) -> None:
        self.rank = rank
        self._site = site
        self.device = Cores(site.arena) if device is None else device
        self.coords = site.mesh.coords(rank)
        self._programs: dict[int, relax.VirtualMachine] = {}
        self._calls: dict[int, _Call] = {}
        self._views: dict[str, Any] = {}  # tensors by what a call says of them
        self._repeating: set[int] = set()  # the programs that tell the device the same each time
        self._left_barrier: tuple[int, str] | None = None
        self._staging: Staging | None = None
        self.connection: socket.socket | None = None
        self.received: list[int] = []

    def barrier(self) -> None:
        """Wait for all the workers of the launch."""
        self.arrive()
        self.wait(0)

    def arrive(self) -> None:
        """Say that what this worker wrote and read until now is done."""
        if self.device.meets:
            self.device.arrive()
            return
        self.device.finish()
        self._site.control.arrive(self.rank)
        if self._site.across is not None:
            self._site.across.arrive()

    def wait(self, behind: int) -> None:
        """Wait until all the workers of the launch have arrived as often as this one less `behind` times."""
        if self.device.meets:
            self.device.wait(behind)
            return
        with self._meeting():
            self._site.control.wait(self.rank, behind, self._site.timeout)
            if self._site.across is not None:
                self._site.across.wait(behind)

    def take_part(
        self,
        name: str,
        source: Any,
        target: Any,
        *numbers: int,
        axis: str,
        holds: tuple[bool, bool] = (False, False),
    ) -> None:
        """Do this worker's part of a collective along a mesh axis, on tensors; see `tvm_axe.collective.plan`.

        It `holds` the barrier right before it, and the one right behind it, if the program leaves them to it
        (`tvm_axe.collective.merging`).
        """
        if any(holds):
            self.device.between(name, source, target, numbers, self.coords[axis], *holds)
        elif axis not in self._site.apart:
            self.device.collective(name, source, target, numbers, self.coords[axis])
        elif self._staging is not None:
            with self._meeting():
                self._staging.collective(name, source, target, numbers, axis)
        else:
            assert self._site.across is not None  # it is what keeps these apart
            with self._meeting():
                self._site.across.collective(name, _tvm.as_array(source), _tvm.as_array(target), *numbers, axis=axis)

    def step(self, name: str, tensors: Sequence[Any], numbers: Sequence[int], axis: str | None) -> None:
        """Tell the device a step of its side stream, along a mesh axis; see `tvm_axe.collective.side`."""
        self.device.step(name, tensors, numbers, 0 if axis is None else self.coords[axis])

    @contextlib.contextmanager
    def _meeting(self) -> Iterator[None]:
        """Keep in mind why a worker stopped waiting for others."""
        try:
            yield
        except Aborted as error:
            # What the program makes of the error isn't an Aborted any more.
            self._left_barrier = ABORTED, json.dumps(error.missing)
            raise
        except Late as error:
            self._left_barrier = LATE, json.dumps(error.missing)
            raise

    def execute(self, sequence: int, command: str) -> None:
        """Run a command (JSON: a name and its arguments) and answer it; raises nothing."""
        control = self._site.control
        self._left_barrier = None
        if self._site.across is not None:
            self._site.across.begin(sequence)
        outcome, text = DONE, ""
        try:
            name, *arguments = json.loads(command)
            with np.errstate(all="ignore"):  # as in compiled code, an overflow is an infinity and not worth a warning
                COMMANDS[name](self, *arguments)
        except BaseException as error:
            failure = FAILED if self.device.usable() else LOST
            outcome, text = self._left_barrier or (failure, "".join(traceback.format_exception(error)))
            traceback.clear_frames(error.__traceback__)  # else a cycle with it may keep the arena mapped for long
            control.abort()
            if outcome == FAILED:
                self.device.call_off()
        control.finish(self.rank, sequence, outcome, text)

    def start(self) -> None:
        """Give this worker its share of the cores."""
        self.device.start(max(1, len(self._site.cores) // self._site.sharing), self._site.cores)

    def load(self, program: int, module: Sequence[Any], target: str, builder: str, repeats: bool) -> None:
        """Have a builder, named as ``module:function``, compile JSON text in shared memory; make a virtual machine.

        Whether a call always tells the device the same, if its arguments are, is said by `repeats`.
        """

        def compile_it() -> Any:
            text = self._array(module).tobytes().decode()
            return builder_named(builder)(self._link(tvm.ir.load_json(text)), tvm.target.Target(json.loads(target)))

        if repeats:
            self._repeating.add(program)
        self._programs[program] = relax.VirtualMachine(self._site.executable(program, compile_it), self.device.runtime)

    def _link(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Have the module do without Python what it can; other workers of this process may run it too, if there are."""
        site = self._site
        if self.device.meets:
            return merged(mod)
        if not (site.alone and SUPPORTED and isinstance(self.device, Cores)):
            return mod
        axes = set(site.mesh.names) - site.apart
        spins = SPINS if site.sharing <= len(site.cores) else 0
        return link(mod, site.mesh, self.rank, axes, site.control if site.across is None else None, spins)

    def unload(self, program: int) -> None:
        """Drop a program."""
        self._programs.pop(program, None)
        self._repeating.discard(program)
        self.device.forget()
        self._site.unload(program)

    def run(self, program: int, function: str, arguments: Sequence[Any]) -> None:
        """Run a function of a program once."""
        key, entry = self._call(program, function, arguments)
        self.device.repeat(key, entry)
        self._finish()

    def _call(self, program: int, function: str, arguments: Sequence[Any]) -> tuple[Hashable, Callable[[], object]]:
        """What runs a function of a program once, and what tells that from other calls if it is the same each time."""
        values = [self._decode(argument) for argument in arguments]
        key = (program, function, json.dumps(arguments)) if program in self._repeating else None
        return key, functools.partial(self._programs[program][function], *values)

    def bind(self, call: int, program: int, function: str, arguments: Sequence[Any]) -> None:
        """Keep a call of a function, for `invoke`, which says what the arguments are that are None here."""
        values = [None if argument is None else self._decode(argument) for argument in arguments]
        places = [at for at, argument in enumerate(arguments) if argument is None]
        self._calls[call] = _Call(self._programs[program][function], values, places, program in self._repeating)

    def unbind(self, call: int) -> None:
        """Drop such a call."""
        self._calls.pop(call, None)
        self.device.forget()

    def invoke(self, call: int, arguments: Sequence[str]) -> None:
        """Run a function whose other arguments are bound; what these are is said in JSON, mostly as it was before."""
        bound = self._calls[call]
        values = bound.values.copy()
        for place, text in zip(bound.places, arguments, strict=True):
            value = self._views.get(text)
            if value is None:
                if len(self._views) >= MOST_VIEWS:
                    self._views.clear()
                value = self._views[text] = self._decode(json.loads(text))
            values[place] = value
        key = (call, *arguments) if bound.repeats else None
        self.device.repeat(key, functools.partial(bound.function, *values))
        self._finish()

    def _finish(self) -> None:
        """Wait for the device; raises if it stopped waiting for others."""
        self.device.finish()
        missing = self.device.missing()
        if missing:
            with self._meeting():
                raise Aborted(missing) if self._site.control.aborted else Late(missing, self._site.timeout)

    def time(
        self, program: int, function: str, arguments: Sequence[Any], warmup: int, repeat: int, seconds: Sequence[Any]
    ) -> None:
        """Run a function `repeat` times and write the seconds of each run, without the wait before it, to `seconds`."""
        key, entry = self._call(program, function, arguments)
        result = self._array(seconds)
        for i in range(-warmup, repeat):
            self.barrier()
            taken = self.device.timed(key, entry)
            self._finish()
            if i >= 0:
                result[i] = taken

    def trace(
        self, program: int, function: str, arguments: Sequence[Any], warmup: int, recording: Sequence[Any]
    ) -> None:
        """Run a function `warmup` times, then once more, and write what that called when to `recording`."""
        recorder = Recorder(self.device.follow)
        machine = relax.VirtualMachine(self._site.compiled(program), self.device.runtime)
        machine.set_instrument(recorder)
        entry, values = machine[function], [self._decode(argument) for argument in arguments]
        for _ in range(warmup + 1):
            recorder.calls.clear()
            self.barrier()
            self._finish()
            start = time.perf_counter_ns()
            entry(*values)
            self._finish()
            stop = time.perf_counter_ns()
            self.barrier()
            self._finish()
            left = time.perf_counter_ns()
        Recording(tuple(recorder.calls), start, stop, left, clock()).write(self._array(recording))

    def collective(self, name: str, source: Sequence[Any], target: Sequence[Any], numbers: Sequence[Any]) -> None:
        """Run one of the collectives on two mesh tensors; `numbers` are its other arguments, the axis last."""
        *others, axis = numbers
        self.take_part(name, self._decode(source), self._decode(target), *others, axis=axis)
        self._finish()

    def reserve(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Get memory for the slabs of a new tensor that are on this machine: (worker, offset, bytes) each."""
        for worker, offset, nbytes in places:
            if worker == self.rank:
                self.device.reserve(offset, nbytes)
                if self.connection is not None:
                    socket.send_fds(self.connection, [b"\0"], [self.device.lent(offset)])

    def share(self, places: Sequence[tuple[int, int, int]]) -> None:
        """See the memory that its neighbours have got for their slabs, the descriptors of which have come."""
        own = {offset for worker, offset, _ in places if worker == self.rank}
        neighbours = next(each for each in self._site.neighbours if self.rank in each)
        seen = [place for place in places if place[0] in neighbours]
        try:
            for (_, offset, nbytes), descriptor in zip(seen, self.received, strict=True):
                if offset not in own:  # of what is shared, each has its own
                    self.device.share(offset, nbytes, descriptor)
        finally:
            self.forget()

    def forget(self) -> None:
        """Close the descriptors that have come."""
        while self.received:
            os.close(self.received.pop())

    def release(self, places: Sequence[tuple[int, int, int]]) -> None:
        """Give that memory back."""
        self._views.clear()
        for worker, offset, nbytes in places:
            if worker == self.rank or self.connection is not None:
                self.device.release(offset, nbytes)

    def move(self, places: Sequence[tuple[int, int, int]], home: bool) -> None:
        """Copy slabs between the controller's memory and theirs, to the controller if they go `home`."""
        across = self._site.across
        if across is None:
            for worker, offset, nbytes in places:
                if worker == self.rank:
                    self.device.move(offset, self._site.arena.bytes(offset, nbytes), home)
            return
        parcels = [
            (worker if self.rank == 0 else 0, self._site.arena.bytes(offset, nbytes))
            for worker, offset, nbytes in places
            if self.rank in (0, worker)
        ]
        with self._meeting():
            if home == (self.rank == 0):
                across.exchange([], parcels)
            else:
                across.exchange(parcels, [])

    def read(self, requests: Sequence[tuple[Sequence[Any], Sequence[Any], Sequence[Sequence[Piece]]]]) -> None:
        """Fill this worker's slabs out of files: of each tensor, the array in the file and each worker's pieces."""
        for tensor, source, pieces in requests:
            _, _, stride, *_ = tensor
            view, in_arena = self._view(tensor), isinstance(self.device, Cores)
            if not stride and in_arena and self.rank != self._site.control.ranks[0]:
                continue  # it is the same memory
            slab = view.array(self._site.arena) if in_arena else np.zeros(view.shape, view.dtype)
            path, size, changed, offset, dtype, shape = source
            fill(slab, Stored(path, size, changed, offset, dtype, tuple(shape)), pieces[self.rank])
            if not in_arena:
                self.device.move(view.offset, slab.reshape(-1).view("uint8"), False)

    def meet(self, words: Sequence[Any]) -> None:
        """Have the device meet its peers by itself from now on, by the words of a tensor."""
        self.device.meet(self._view(words), self.rank, self._site.timeout)

    def stage(self, offset: int) -> None:
        """Do collectives along axes that are apart through buffers from here on, one for each worker, from now on."""
        site = self._site
        buffers = site.arena.bytes(offset, site.mesh.size * BUFFER).reshape(site.mesh.size, 2, -1)
        hosts = [range(site.mesh.size)]
        self._staging = Staging(self.device.copies(buffers), buffers, site.mesh, self.rank, hosts, self._meet_here)

    def _meet_here(self) -> None:
        """Wait for the workers of this host, whatever their devices are doing."""
        self._site.control.barrier(self.rank, self._site.timeout)

    def close(self) -> None:
        """Give back what it has of its device."""
        if self._staging is not None and self.device.usable():
            self._staging.close()
        self._staging = None  # the buffers are the arena's
        self.device.close()

    def settle(self) -> None:
        """Forget the barriers of a command that failed."""
        self._site.control.reset([self.rank])
        if self._staging is not None:
            self._staging.settle()
        self.device.settle()

    def _view(self, encoded: Sequence[Any]) -> View:
        return decode_view(encoded, self._site.mesh, self.coords, self._site.apart)

    def _array(self, encoded: Sequence[Any]) -> np.ndarray:
        """Return what the host has of an encoded tensor."""
        return self._view(encoded).array(self._site.arena)

    def _decode(self, argument: Any) -> Any:
        """Return the value of an encoded argument: an int, the name of a mesh axis, or a view of a mesh tensor."""
        if isinstance(argument, int):
            return argument
        if isinstance(argument, str):
            return self.coords[argument]
        return self.device.tensor(self._view(argument))


# What a worker is sent is called here, by its name.
COMMANDS: dict[str, Callable[..., None]] = {
    "start": Worker.start,
    "load": Worker.load,
    "unload": Worker.unload,
    "run": Worker.run,
    "bind": Worker.bind,
    "unbind": Worker.unbind,
    "invoke": Worker.invoke,
    "read": Worker.read,
    "time": Worker.time,
    "trace": Worker.trace,
    "collective": Worker.collective,
    "reserve": Worker.reserve,
    "share": Worker.share,
    "release": Worker.release,
    "move": Worker.move,
    "meet": Worker.meet,
    "settle": Worker.settle,
    "stage": Worker.stage,
}

# The workers of this process by launch and rank, and the one whose command the calling thread is in.
WORKERS: dict[tuple[str, int], Worker] = {}
_current = threading.local()


def _execute(launch: str, sequence: int, command: str) -> None:
    attend(WORKERS[launch, _tvm.disco_rank()], sequence, command)


def attend(worker: Worker, sequence: int, command: str) -> None:
    """Have a worker execute a command in the calling thread."""
    _current.worker = worker
    worker.execute(sequence, command)


def _barrier() -> None:
    _current.worker.barrier()


def _arrive() -> None:
    _current.worker.arrive()


def _wait(behind: int) -> None:
    _current.worker.wait(behind)


def _merged() -> None:
    """A barrier that the collective beside it holds."""


def _packed(name: str, holds: tuple[bool, bool]) -> Callable[..., None]:
    """What a program calls: tensors for arrays, and the name of the axis for the worker's coordinate on it."""

    def call(source: Any, target: Any, *arguments: Any) -> None:
        *numbers, axis = arguments
        _current.worker.take_part(name, source, target, *numbers, axis=axis, holds=holds)

    return call


def _beside(name: str) -> Callable[..., None]:
    """What a program calls for a step of the side stream: its tensors, its numbers, and the name of the axis."""
    count = STEPS[name]

    def call(*arguments: Any) -> None:
        tensors, numbers = arguments[:count], list(arguments[count:])
        axis = str(numbers.pop()) if numbers and not isinstance(numbers[-1], int) else None
        _current.worker.step(name, tensors, [int(number) for number in numbers], axis)

    return call


_tvm.register_functions(
    {_tvm.DISCO_EXECUTE: _execute, "axe.barrier": _barrier, "axe.arrive": _arrive, "axe.wait": _wait}
)
_tvm.register_functions({f"axe.{MERGED}": _merged})
_tvm.register_functions({f"axe.{name}{end}": _packed(name, holds) for name in VIEWS for end, holds in HELD.items()})
_tvm.register_functions({f"axe.{name}": _beside(name) for name in STEPS})


def serve(
    descriptors: Sequence[int],
    launch: str,
    rank: int,
    axes: dict[str, int],
    memory: int,
    timeout: float,
    cores: list[int],
) -> None:
    """Be worker `rank` of a launch, alone in this process, until the controller closes it.

    Parameters
    ----------
    descriptors : sequence of int
        The arena's file, the descriptors to read commands from and to write to, and the one for standard error, if
        there is any, once this worker is up; until then what it says there is kept in a file.
    launch : str
        The launch's name.
    axes : dict
        The mesh.
    memory : int
        The size of the arena in bytes.
    timeout : float
        Seconds to wait at a barrier.
    cores : list of int
        The cores that the launch may use.
    """
    # Who stops a job by hand sends Ctrl-C's signal to all of it; the controller decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.sched_setaffinity(0, cores)
    arena, read, write, *errors = descriptors
    mesh = Mesh(axes)
    WORKERS[launch, rank] = Worker(Site(mesh, Arena(arena, memory), timeout, cores), rank)
    speak(errors)
    _tvm.disco_serve(rank, mesh.size, read, write)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # there is nothing to save, and taking the compiler down takes longer than the rest of closing
