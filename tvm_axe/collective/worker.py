"""One worker: what it does for the controller's commands.

A worker is a thread of a Disco session: worker 0 (with the engine `threads`, every worker) in the controller's process,
the others each alone in a process that is one (`serving`). Whatever goes wrong in a command is answered through the
control block; nothing may be raised to Disco, which would end the process. What a program calls of its worker is in
`calls`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax

from tvm_axe import _tvm
from tvm_axe.collective import slabs
from tvm_axe.collective.device import Cores, Device
from tvm_axe.collective.link import SUPPORTED, link
from tvm_axe.collective.merging import Held, merged
from tvm_axe.collective.native import SPINS
from tvm_axe.collective.objects import Objects
from tvm_axe.collective.recording import Recorder, Recording, clock
from tvm_axe.collective.site import Site
from tvm_axe.collective.slabs import Slabs
from tvm_axe.collective.staging import BUFFER, Staging
from tvm_axe.collective.stored import Piece, Stored, fill
from tvm_axe.collective.sync import ABORTED, DONE, FAILED, LATE, LOST, Aborted, Late
from tvm_axe.collective.tensor import View, decode_view
from tvm_axe.machines.builder import builder_named

MOST_VIEWS = 1 << 12  # tensors that a worker keeps, as calls ask for the same ones


class _Call(NamedTuple):
    """A function of a program with arguments, and the places of those that are still to be given."""

    function: Callable[..., Any]
    values: list[Any]
    places: list[int]
    repeats: bool


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
    slabs : Slabs
        Where its slabs are.
    objects : Objects
        What programs have kept here.
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
        self._peers = next(group for group in site.neighbours if rank in group)
        self._left_barrier: tuple[int, str] | None = None
        self._staging: Staging | None = None
        self._staged = frozenset[str]()
        self.slabs = Slabs(site, rank, self.device)
        self.objects = Objects()

    def barrier(self) -> None:
        """Wait for all the workers of the launch, or have the device wait for all that it sees."""
        self.arrive()
        self.wait(0)

    def arrive(self) -> None:
        """Say that what this worker wrote and read until now is done."""
        if self.device.meets:
            self.device.arrive()
        else:
            self._arrive()

    def _arrive(self) -> None:
        self.device.finish()
        self._site.control.arrive(self.rank)
        if self._site.across is not None:
            self._site.across.arrive()

    def wait(self, behind: int) -> None:
        """Wait until all the workers of the launch have arrived as often as this one less `behind` times."""
        if self.device.meets:
            self.device.wait(behind)
        else:
            self._wait(behind)

    def _wait(self, behind: int) -> None:
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
        holds: Held = Held(),  # noqa: B008, it is a tuple
        beside: bool = False,
    ) -> None:
        """Do this worker's part of a collective along a mesh axis, on tensors; see `tvm_axe.collective.plan`.

        It `holds` the barrier right before it, and the one right behind it, if the program leaves them to it
        (`tvm_axe.collective.merging`). The device does it on its side stream if it is `beside` what follows.
        """
        if self.device.passes(axis):
            if holds.behind:
                self.barrier()
            self.device.passed(name, source, target, numbers, self.coords[axis], axis)
            if holds.before:
                self.barrier()
        elif beside and axis not in self._site.apart:
            self.device.beside(name, source, target, numbers, self.coords[axis])
        elif any(holds):
            self.device.between(name, source, target, numbers, self.coords[axis], holds)
        elif axis not in self._site.apart:
            self.device.collective(name, source, target, numbers, self.coords[axis])
        elif self._staging is not None and axis in self._staged:
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
            with (
                self._meeting(),
                np.errstate(all="ignore"),
            ):  # as in compiled code, an overflow is an infinity and not worth a warning
                self._do(name, arguments)
        except BaseException as error:
            failure = FAILED if self.device.usable() else LOST
            outcome, text = self._left_barrier or (failure, "".join(traceback.format_exception(error)))
            traceback.clear_frames(error.__traceback__)  # else a cycle with it may keep the arena mapped for long
            control.abort()
            if outcome == FAILED:
                self.device.call_off()
        control.finish(self.rank, sequence, outcome, text)

    def _do(self, name: str, arguments: Sequence[Any]) -> None:
        if name in COMMANDS:
            COMMANDS[name](self, *arguments)
            return
        if name == "release":
            self._views.clear()
        slabs.COMMANDS[name](self.slabs, *arguments)

    def start(self) -> None:
        """Give this worker its share of the cores."""
        self.device.start(max(1, len(self._site.cores) // self._site.sharing), self._site.cores)

    def load(self, program: int, module: Sequence[Any], target: str, builder: str, repeats: bool) -> None:
        """Have a builder, named as ``module:function``, compile JSON text in shared memory; make a virtual machine.

        Whether a call always tells the device the same, if its arguments are, is said by `repeats`.
        """

        def compile_it() -> Any:
            text = self._array(module).tobytes().decode()
            return builder_named(builder)(self._link(_tvm.load_json(text)), tvm.target.Target(json.loads(target)))

        if repeats:
            self._repeating.add(program)
        self._programs[program] = relax.VirtualMachine(self._site.executable(program, compile_it), self.device.runtime)

    def _link(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Have the module do without Python what it can; other workers of this process may run it too, if there are."""
        site = self._site
        if self.device.meets:
            return merged(mod, len(self._peers))
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

    @property
    def _meets_all(self) -> bool:
        """Whether the device meets all others by itself, and not those of its host alone."""
        return self.device.meets and len(self._peers) == self._site.mesh.size

    def _meet_all(self) -> None:
        """Wait for all the workers of the launch, those whose memory the device doesn't see too."""
        if self._meets_all:
            self.barrier()
        else:
            self._arrive()
            self._wait(0)

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
        """Run a function `repeat` times and write the seconds of each run, without the wait before it, to `seconds`.

        Devices begin a run at the same time, as far as all meet by themselves: they are held before they meet until
        they have been told the run, too, so that nobody's run counts how much later a peer's process has told it.
        """
        key, entry = self._call(program, function, arguments)
        result = self._array(seconds)
        for i in range(-warmup, repeat):
            if self._meets_all:
                self.device.hold()
            self._meet_all()
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
            self._meet_all()
            self._finish()
            start = time.perf_counter_ns()
            entry(*values)
            self._finish()
            stop = time.perf_counter_ns()
            self._meet_all()
            self._finish()
            left = time.perf_counter_ns()
        Recording(tuple(recorder.calls), start, stop, left, clock()).write(self._array(recording))

    def collective(self, name: str, source: Sequence[Any], target: Sequence[Any], numbers: Sequence[Any]) -> None:
        """Run one of the collectives on two mesh tensors; `numbers` are its other arguments, the axis last."""
        *others, axis = numbers
        self.take_part(name, self._decode(source), self._decode(target), *others, axis=axis)
        self._finish()

    def apply(self, function: str, said: Sequence[Any], answer: Sequence[Any]) -> None:
        """Call a function of the runtime with what was kept here; see `Objects.apply`."""
        self.objects.apply(function, said, self._array(answer))
        self._finish()

    def drop(self, number: int) -> None:
        """Let go of an object."""
        self.objects.drop(number)

    def read(self, requests: Sequence[tuple[Sequence[Any], Sequence[Any], Sequence[Sequence[Piece]]]]) -> None:
        """Fill this worker's slabs out of files: of each tensor, the array in the file and each worker's pieces."""
        for tensor, source, pieces in requests:
            _, _, stride, *_ = tensor
            view, in_arena = self._view(tensor), self.device.in_arena
            if not stride and in_arena and self.rank != self._site.control.ranks[0]:
                continue  # it is the same memory
            slab = view.array(self._site.arena) if in_arena else np.zeros(view.shape, view.dtype)
            path, size, changed, offset, dtype, shape = source
            fill(slab, Stored(path, size, changed, offset, dtype, tuple(shape)), pieces[self.rank])
            if not in_arena:
                self.device.move(view.offset, slab.reshape(-1).view("uint8"), False)

    def meet(self, words: Sequence[Any]) -> None:
        """Have the device meet its peers by itself from now on, by the words of a tensor."""
        slabs, first = decode_view(words, self._site.mesh, self.coords), self._peers[0]
        shape = (len(self._peers), *slabs.shape[1:])
        theirs = dataclasses.replace(slabs, offset=slabs.offset + first * slabs.strides[0], shape=shape)
        self.device.meet(theirs, self._peers, self.rank, self._site.timeout)

    def stage(self, offset: int, axes: Sequence[str]) -> None:
        """Do collectives along these axes through buffers, one for each worker, from now on."""
        site = self._site
        site.arena.take(offset + self.rank * BUFFER, BUFFER)  # if it isn't there already
        buffers = site.arena.bytes(offset, site.mesh.size * BUFFER).reshape(site.mesh.size, 2, -1)
        exchange = None if site.across is None else site.across.exchange
        copies = self.device.copies(buffers)
        self._staging = Staging(copies, buffers, site.mesh, self.rank, site.hosts, self._meet_here, exchange)
        self._staged = frozenset(axes)

    def connect(self, unique: str, axes: Sequence[str]) -> None:
        """Have the device do collectives along mesh axes by a communicator from now on; waits for all workers."""
        mesh = self._site.mesh
        groups = {axis: (mesh.group(self.rank, axis)[0], mesh.axis_size(axis), self.coords[axis]) for axis in axes}
        self.device.connect(bytes.fromhex(unique), mesh.size, self.rank, groups, self._site.timeout, self._is_off)

    def _is_off(self) -> bool:
        """Whether the command that the worker is in was called off."""
        return self._site.control.aborted

    def _meet_here(self) -> None:
        """Wait for the workers of this host, whatever their devices are doing."""
        self._site.control.barrier(self.rank, self._site.timeout)

    def close(self) -> None:
        """Give back what it has of its device."""
        if self._staging is not None and self.device.usable():
            self._staging.close()
        self._staging = None  # the buffers are the arena's
        if self.device.usable():
            self.objects.clear()  # those that nobody let go of may have memory and streams of the device
        self.slabs.forget()
        self.slabs.close()
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
    "apply": Worker.apply,
    "drop": Worker.drop,
    "read": Worker.read,
    "time": Worker.time,
    "trace": Worker.trace,
    "collective": Worker.collective,
    "meet": Worker.meet,
    "settle": Worker.settle,
    "stage": Worker.stage,
    "connect": Worker.connect,
}
