"""What one does with workers on a mesh: tensors, programs, objects, and the collectives of `operations`."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe.collective.choice import Table
from tvm_axe.collective.engine import Engine
from tvm_axe.collective.objects import ANSWER, Plain, answered
from tvm_axe.collective.operations import Operations
from tvm_axe.collective.recording import Recording, aligned
from tvm_axe.collective.repeating import repeats
from tvm_axe.collective.session import Session
from tvm_axe.collective.stored import Piece, Stored
from tvm_axe.collective.tensor import ALL, SLAB, Coord, Inside, MeshTensor
from tvm_axe.errors import InputError, WorkerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.layout.holding import Holding
from tvm_axe.machines.builder import PROGRAM_BUILDER

Argument = tuple[MeshTensor, str] | Inside | Coord | int


class LoadedProgram:
    """A compiled module, on every worker; made by `Workers.load`."""

    def __init__(self, number: int, functions: Sequence[str]) -> None:
        self.number = number
        self.functions = tuple(functions)

    def __repr__(self) -> str:
        return f"LoadedProgram({', '.join(self.functions)})"


class BoundCall:
    """A call of a function of a program of which most arguments are always the same; made by `Workers.bind`."""

    def __init__(self, number: int, function: str, places: int) -> None:
        self.number, self.function, self.places = number, function, places

    def __repr__(self) -> str:
        return f"BoundCall({self.function}, {self.places} arguments left)"


class DeviceObject:
    """An object of the runtime on each device, such as a cache; where `Workers.place` says, programs keep theirs."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"DeviceObject({self.number})"


Item = MeshTensor | LoadedProgram | BoundCall | DeviceObject
"""What workers keep until they are told to free it."""


class Workers(Operations):
    """Workers on a mesh, one a device; made by `tvm_axe.launch`. A context manager.

    Commands run on all the workers at once, and return when all have finished. One thread at a time may use them: the
    one that has the `lock`, where there are several.

    Attributes
    ----------
    mesh : Mesh
        The devices.
    engine : str
        The engine's name.
    lock : threading.RLock
        For threads that share them.
    """

    def __init__(self, mesh: Mesh, engine: Engine, session: Session) -> None:
        self.mesh = mesh
        self.lock = threading.RLock()
        self.engine = engine.name
        self._engine = engine
        self._session = session
        # Also when the caller forgets to close, and at the interpreter's exit.
        self._closer = weakref.finalize(self, session.close)
        self._tensors: set[MeshTensor] = set()
        self._programs: set[LoadedProgram] = set()
        self._calls: set[BoundCall] = set()
        self._objects: set[DeviceObject] = set()
        self._loaded = 0  # programs, calls and objects so far
        self._discarded: deque[Item] = deque()

    @property
    def closed(self) -> bool:
        """Whether the workers have gone: closed by the caller, or after a fault."""
        return self._session.closed

    def is_apart(self, axis: str) -> bool:
        """Whether there are devices along a mesh axis that don't see each other's memory, as those of several machines.

        A view along such an axis has the worker's own slab only, at each index: collectives work on it, and a kernel
        that indexes its peers' slabs does not.

        Raises
        ------
        LayoutError
            If the mesh has no such axis.
        """
        self.mesh.axis_size(axis)
        return self._session.is_apart(axis)

    def way(self, axis: str) -> str:
        """Return in words how collectives along a mesh axis go, if not by the `table`; else nothing."""
        return self._session.way(axis)

    @property
    def table(self) -> Table | None:
        """Which algorithms their collectives take, where there is a choice."""
        return self._session.table

    @property
    def shares_context(self) -> bool:
        """Whether a GPU is that of several of them in one process, in which a kernel can't wait for a peer's."""
        return self._session.shares_context

    @property
    def apart(self) -> frozenset[str]:
        """The mesh axes of which `is_apart` is true."""
        return frozenset(filter(self._session.is_apart, self.mesh.names))

    @property
    def device_type(self) -> str:
        """What the devices are, by DLPack's name: ``"cpu"`` or ``"cuda"``."""
        return self._engine.device_type

    @property
    def target(self) -> str:
        """What programs for them are compiled for, unless one says more, such as ``"llvm"`` or ``"cuda"``."""
        return self._engine.target

    @property
    def page(self) -> int:
        """Bytes of the pages of their memory: slabs of a mesh tensor lie whole ones apart (`slab_stride`)."""
        return self._session.arena.page

    def mesh_tensor(
        self, shape: Sequence[int], dtype: str, shared: bool = False, layout: Layout | Holding | None = None
    ) -> MeshTensor:
        """Make a tensor of zeros with a slab on each device.

        Parameters
        ----------
        shape : sequence of int
            One device's slab; with a layout, the whole tensor.
        dtype : str
            Any type of whole bytes that numpy (with ml_dtypes) and the compiler both have.
        shared : bool
            Store one slab for all the devices, for data that they only read.
        layout : Layout or Holding, optional
            How the tensor lies on the mesh, any layout that a mesh can hold, or how it is to be read
            (`tvm_axe.layout.holding`). The slabs are as it says, whole arrays go in and out (`MeshTensor.scatter`,
            `gather`), and `tvm_axe.redistribute` gives the tensor in another layout.

        Raises
        ------
        InputError
            For a malformed shape or an unknown type, or a shared tensor with a layout.
        LayoutError
            If the layout doesn't fit the shape or the mesh.
        WorkerError
            If there is no memory for it, or the workers are closed.
        """
        self._check_open()
        self.free_discarded()
        holding = Holding.of(layout, shape, self.mesh) if isinstance(layout, Layout) else layout
        if holding is not None and shared:
            raise InputError("mesh_tensor: a tensor with a layout has a slab on each device; leave shared out")
        slab = shape if holding is None else holding.slab
        tensor = MeshTensor(self._session.arena, self.mesh, slab, dtype, shared, self._session.mirror, holding, self)
        self._tensors.add(tensor)
        return tensor

    def _message(self, shape: Sequence[int], dtype: str, shared: bool = False) -> MeshTensor:
        """Make a tensor of zeros by which the host's code talks to the workers', in the host's memory."""
        self._check_open()
        self.free_discarded()
        session = self._session
        mirror = session.messages if session.mirror is not None and session.mirror.discrete else session.mirror
        tensor = MeshTensor(session.arena, self.mesh, shape, dtype, shared, mirror)
        self._tensors.add(tensor)
        return tensor

    def free(self, item: Item) -> None:
        """Give back the memory of a mesh tensor, or drop a program, a call or objects; none can be used afterwards."""
        self._check_open()
        if isinstance(item, MeshTensor):
            self._check_own(item)
            self._tensors.remove(item)
            item.release()
        elif isinstance(item, BoundCall):
            self._check_call(item)
            self._calls.remove(item)
            self._session.run("unbind", item.number)
        elif isinstance(item, DeviceObject):
            self._check_object(item)
            self._objects.remove(item)
            self._session.run("drop", item.number)
        else:
            self._check_program(item, None)
            self._programs.remove(item)
            self._session.run("unload", item.number)

    def discard(self, item: Item) -> None:
        """Have `item` freed when memory or a program is asked for next.

        For finalizers: the garbage collector runs them in any thread, a worker's too, and in the middle of a command,
        where `free` would wait for that command for ever.
        """
        self._discarded.append(item)

    def load(self, mod: IRModule, target: str | Target, builder: str = PROGRAM_BUILDER) -> LoadedProgram:
        """Compile a module on every worker.

        Parameters
        ----------
        mod : IRModule
            With at least one public Relax function. It may call the functions that `tvm_axe.collective.calls` lists.
        target : str or Target
            What to compile for; of the engine's kind of devices.
        builder : str
            What compiles it, as ``module:function`` of a module and a target, which workers import.

        Raises
        ------
        InputError
            If the target is of another kind.
        WorkerError
            If it doesn't compile; has the compiler's message.
        """
        names = [str(var.name_hint) for var, f in mod.functions_items() if isinstance(f, tvm.relax.Function)]
        text = np.frombuffer(tvm.ir.save_json(mod).encode(), "uint8")
        target = Target(target) if isinstance(target, str) else target
        if not self._engine.matches(target):
            devices = self._engine.device_type
            raise InputError(
                f"load: engine {self.engine!r} has devices of type {devices}; target {target} is for others; compile "
                f'the program for them: axe.compile(..., target="{self.target}")'
            )
        carrier = self._message(text.shape, "uint8", shared=True)
        carrier.slab(0)[:] = text
        self._loaded += 1
        try:
            self._session.run("load", self._loaded, carrier.encode(SLAB), str(target), builder, repeats(mod))
        finally:
            self._drop(carrier)
        program = LoadedProgram(self._loaded, names)
        self._programs.add(program)
        return program

    def call(self, program: LoadedProgram, args: Sequence[Argument], function: str = "main") -> None:
        """Run a function of a program once on every worker.

        Parameters
        ----------
        program : LoadedProgram
            As returned by `load`.
        args : sequence
            Each one is an int; a `Coord`; an `Inside`; or (mesh tensor, view), where the view is ``"slab"`` for the
            worker's own slab, of the slab's shape, or a mesh axis for the slabs of the worker's group along it: a
            tensor whose dimension 0 is as long as the axis, and has a stride of its own (`slab_stride`), before the
            slab's.
        function : str
            Its name.

        Raises
        ------
        InputError
            For a program or an argument that isn't these workers'.
        WorkerError
            If a worker failed, died or fell behind.
        """
        self._check_program(program, function)
        self._session.run("run", program.number, function, self._encode(args))

    def bind(self, program: LoadedProgram, args: Sequence[Argument | None], function: str = "main") -> BoundCall:
        """Keep a call on every worker, for `invoke`: arguments that are None are what that is given, in their order.

        For the other parameters and for errors see `call`.
        """
        self._check_program(program, function)
        encoded = [None if argument is None else self._encode([argument])[0] for argument in args]
        self._loaded += 1
        self._session.run("bind", self._loaded, program.number, function, encoded)
        bound = BoundCall(self._loaded, function, sum(argument is None for argument in args))
        self._calls.add(bound)
        return bound

    def invoke(self, bound: BoundCall, args: Sequence[tuple[MeshTensor, str] | int]) -> None:
        """Run a bound call once on every worker, with what it left open: tensors with their views, and integers.

        It costs little beside the function itself, however many arguments are bound.

        Raises
        ------
        InputError
            For a call that isn't these workers', or another number of arguments than it left open.
        WorkerError
            If a tensor was freed, or a worker failed, died or fell behind.
        """
        self._check_call(bound)
        if len(args) != bound.places:
            raise InputError(f"invoke: {bound!r}; got {len(args)}")
        said = [str(each) if isinstance(each, int) else each[0].text(each[1]) for each in args]
        self._session.run("invoke", bound.number, said)

    def place(self) -> DeviceObject:
        """Make place for an object on each worker: a program that is called with its number keeps one there."""
        self._check_open()
        self.free_discarded()
        self._loaded += 1
        found = DeviceObject(self._loaded)
        self._objects.add(found)
        return found

    def apply(self, function: str, args: Sequence[DeviceObject | Plain]) -> int | float | None:
        """Call a function of the runtime on every worker, each with its own objects, and return what it returns.

        Parameters
        ----------
        function : str
            A global function that each worker's process has.
        args : sequence
            Objects that programs have kept, numbers, text, None, and tuples of integers, which are shapes.

        Returns
        -------
        result : int, float or None
            What the first worker's returned.

        Raises
        ------
        InputError
            For objects that aren't these workers'.
        WorkerError
            If there is no such function, nothing was kept, or it failed or returned something else.
        """
        self._check_open()
        said = [[self._check_object(each).number] if isinstance(each, DeviceObject) else {"is": each} for each in args]
        answer = self._message((ANSWER,), "uint8")
        try:
            self._session.run("apply", function, said, answer.encode(SLAB))
            return answered(answer.slab(0))
        finally:
            self._drop(answer)

    def read(self, requests: Sequence[tuple[MeshTensor, Stored, Sequence[Sequence[Piece]]]]) -> None:
        """Have each worker fill its slabs out of files.

        Parameters
        ----------
        requests : sequence
            A tensor each, the array in a file, and for each device the pieces of that which go to its slab.

        Raises
        ------
        InputError
            For a tensor that isn't these workers'.
        WorkerError
            If a file can't be read where a worker is, or has changed; if a worker failed, died or fell behind.
        """
        self._check_open()
        said = [(self._check_own(tensor).encode(SLAB), source, pieces) for tensor, source, pieces in requests]
        self._session.run("read", said)

    def time(
        self, program: LoadedProgram, args: Sequence[Argument], repeat: int, warmup: int = 1, function: str = "main"
    ) -> list[float]:
        """Run a function `repeat` times and return the seconds that each run took on the slowest worker.

        Each run starts when all the workers have finished the one before; `warmup` runs come first and don't count.
        For the other parameters see `call`.
        """
        self._check_program(program, function)
        if repeat < 1 or warmup < 0:
            raise InputError(f"time: repeat must be at least 1 and warmup at least 0, not {repeat} and {warmup}")
        arguments = self._encode(args)
        seconds = self._message((repeat,), "float64")
        try:
            self._session.run("time", program.number, function, arguments, warmup, repeat, seconds.encode(SLAB))
            return np.max([seconds.slab(device) for device in range(self.mesh.size)], axis=0).tolist()
        finally:
            self._drop(seconds)

    def trace(
        self, program: LoadedProgram, args: Sequence[Argument], calls: int, warmup: int = 1, function: str = "main"
    ) -> list[Recording]:
        """Run a function `warmup` times, then once more, and return what that called when on each worker.

        Parameters
        ----------
        calls : int
            The most calls to expect, those of the virtual machine's own functions left out; see `call` for the others.

        Raises
        ------
        InputError
            For a program or an argument that isn't these workers', or numbers that are too small.
        WorkerError
            If a worker failed, died or fell behind, or the program makes more calls than there is room for.
        """
        self._check_program(program, function)
        if calls < 0 or warmup < 0:
            raise InputError(f"trace: calls and warmup must be at least 0, not {calls} and {warmup}")
        arguments = self._encode(args)
        recording = self._message((Recording.room(calls),), "uint8")
        try:
            self._session.run("trace", program.number, function, arguments, warmup, recording.encode(SLAB))
            return aligned([Recording.read(recording.slab(device)) for device in range(self.mesh.size)])
        finally:
            self._drop(recording)

    def _check_open(self) -> None:
        if self._session.closed:
            raise WorkerError("the workers are closed; launch new ones")

    def free_discarded(self) -> None:
        """Free what was discarded until now."""
        while self._discarded:
            self.free(self._discarded.popleft())

    def _check_own(self, tensor: object) -> MeshTensor:
        if not isinstance(tensor, MeshTensor) or tensor not in self._tensors:
            raise InputError(f"{tensor!r} is not a mesh tensor of these workers; make one with workers.mesh_tensor")
        return tensor

    def _check_program(self, program: object, function: str | None) -> None:
        self._check_open()
        if program not in self._programs:
            raise InputError(f"{program!r} is not a program of these workers; load it with workers.load")
        if isinstance(program, LoadedProgram) and function is not None and function not in program.functions:
            raise InputError(f"the program has no function {function!r}; it has {', '.join(program.functions)}")

    def _check_call(self, bound: object) -> None:
        self._check_open()
        if bound not in self._calls:
            raise InputError(f"{bound!r} is not a call of these workers; make one with workers.bind")

    def _check_object(self, item: object) -> DeviceObject:
        if not isinstance(item, DeviceObject) or item not in self._objects:
            raise InputError(f"{item!r} is no object of these workers; make place for it with workers.place")
        return item

    def _encode(self, args: Sequence[Argument]) -> list[Any]:
        encoded: list[Any] = []
        for i, argument in enumerate(args):
            if isinstance(argument, Coord):
                self.mesh.axis_size(argument.axis)  # raises for an unknown axis
                encoded.append(argument.axis)
            elif isinstance(argument, Inside):
                self._check_own(argument.tensor)
                encoded.append(argument.encode())
            elif isinstance(argument, tuple) and len(argument) == 2:
                tensor, view = argument
                if view not in (SLAB, ALL) and view not in self.mesh:
                    valid = ", ".join((SLAB, *self.mesh.names, repr(ALL)))
                    raise InputError(f"args[{i}]: unknown view {view!r}; valid: {valid}")
                encoded.append(self._check_own(tensor).encode(view))
            elif isinstance(argument, int | np.integer) and not isinstance(argument, bool):
                encoded.append(int(argument))
            else:
                raise InputError(
                    f"args[{i}]: must be (mesh tensor, view), Inside(...), Coord(axis) or an int, not {argument!r}"
                )
        return encoded

    def _drop(self, tensor: MeshTensor) -> None:
        """Free a tensor of our own, unless a fault has taken the arena with it."""
        self._tensors.remove(tensor)
        if not self._session.closed:
            tensor.release()

    def close(self) -> None:
        """End the workers. Arrays over mesh tensors stay valid; everything else of these workers can't be used."""
        self._session.close()
        self._closer.detach()  # last, so that what is interrupted before is still closed in the end

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
