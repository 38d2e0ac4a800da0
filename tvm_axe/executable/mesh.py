"""A function on a mesh of workers: slabs are filled, ``main`` runs on every device, and the slabs are put together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tvm
from tvm.target import Target

from tvm_axe.collective import ALL, Argument, Coord, LoadedProgram, MeshTensor, Timeline, Workers, registry
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.errors import LowerError
from tvm_axe.executable.arguments import Arrays, Input
from tvm_axe.executable.measured import Measured, measured_stages, measured_whole
from tvm_axe.executable.on_mesh import OnMesh, discard
from tvm_axe.expecting import expected_timeline
from tvm_axe.layout.arrays import disagreeing, gather, scatter
from tvm_axe.lower.algorithms import described
from tvm_axe.lower.derive import EXCHANGE, MESH_KERNEL
from tvm_axe.lower.lowered import Lowered, MeshBuffer, Stage
from tvm_axe.machines import backend_of
from tvm_axe.machines.builder import program_builder
from tvm_axe.pipeline import PASSES, Work, run
from tvm_axe.tracing import timeline_of

__all__ = ["MeshExecutable"]

_LOG = logging.getLogger("tvm_axe")


class MeshExecutable(OnMesh):
    """A lowered function, built by the workers that run it.

    Parameters
    ----------
    lowered : Lowered
        What each device runs, and what is known of it.
    module : IRModule
        The same module as records left it.
    runnable : IRModule
        The same with tile kernels in the place of the blocks that chose one, which workers build.
    target, tuned
        See `Executable`.
    begun : Work, optional
        The program before it was lowered, for workers whose devices don't all see each other's memory.
    """

    def __init__(
        self,
        lowered: Lowered,
        module: tvm.IRModule,
        runnable: tvm.IRModule,
        target: Target,
        tuned: Mapping[str, float],
        begun: Work | None = None,
    ) -> None:
        super().__init__(lowered.name, module, target, tuned)
        self.lowered, self.runnable = lowered, runnable
        self.mesh, self.stages = lowered.mesh, lowered.stages
        self.notation, self.layouts = lowered.notation, lowered.layouts
        self._loaded: weakref.WeakKeyDictionary[Workers, _Loaded] = weakref.WeakKeyDictionary()
        self._measured: Measured | None = None
        self.begun = begun
        self._unfused: dict[frozenset[str], MeshExecutable] = {}  # by the axes along which devices are apart

    @classmethod
    def of(cls, work: Work) -> MeshExecutable:
        """Take a program the passes that it takes before workers build it.

        Raises
        ------
        LowerError
            If it can't be lowered, or a tile kernel that was chosen can't be compiled.
        """
        begun = work if work.lowered is None else None
        work = run(work, PASSES[:-1])  # workers do the last pass
        assert work.lowered is not None and work.scheduled is not None
        return cls(work.lowered, work.scheduled, work.module, work.target, work.tuned, begun)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(buffer.name for buffer in self.lowered.outputs)

    def _inputs(self) -> Sequence[Input]:
        return [Input(buffer.name, buffer.shape, buffer.dtype) for buffer in self.lowered.inputs]

    def _run(self, workers: Workers | None, arrays: Arrays) -> Arrays:
        assert workers is not None  # a mesh has them
        loaded = self._load(workers, arrays)
        workers.call(loaded.program, loaded.arguments)
        return tuple(loaded.gather(buffer) for buffer in loaded.lowered.outputs)

    def _time(self, workers: Workers | None, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        assert workers is not None
        self._load(workers, arrays)
        return self.time_again(workers, repeat, warmup)

    def time_again(self, workers: Workers, repeat: int = 20, warmup: int = 3) -> list[float]:
        """Seconds of each of `repeat` runs on what the last run on these workers left in place: no array is copied.

        Otherwise as `time`.

        Raises
        ------
        LowerError
            If nothing has run there.
        WorkerError
            As `run`.
        InputError
            If `repeat` or `warmup` is too small.
        """
        exe, loaded = self._fitting(workers), self._ran(workers)
        seconds = workers.time(loaded.program, loaded.arguments, repeat, warmup)
        exe._measured = measured_whole(exe._measured, exe.lowered, workers.engine, seconds)
        return seconds

    def trace(self, *arguments: Any, warmup: int = 3, **named: Any) -> Timeline:
        workers, arrays = self._taken(arguments, named)
        loaded, exe = self._load(workers, arrays), self._fitting(workers)
        recordings = workers.trace(loaded.program, loaded.arguments, len(exe.lowered.calls), warmup)
        timeline = timeline_of(exe.lowered, recordings)
        exe._measured = measured_stages(exe._measured, exe.lowered, workers.engine, timeline)
        return timeline

    def expected(self) -> Timeline:
        """What a run is expected to look like, by the model that searches rank by; nothing is run for it.

        On the engine of the target's devices, each of which has a track, and one for what it does beside.
        """
        return expected_timeline(self.lowered, registry.for_target(self.target).rates)

    def held(self, workers: Workers) -> dict[str, np.ndarray]:
        """What the tensors of the mesh held after the last run on these workers, each put together, by name.

        These are the parameters and the intermediates that devices exchange. A device's own partial sums are left out,
        as no whole array says what they were.

        Raises
        ------
        LowerError
            If nothing has run there.
        """
        loaded = self._ran(workers)
        whole = [buffer for buffer in loaded.lowered.buffers.values() if not buffer.sharding.partial]
        return {buffer.name: loaded.gather(buffer) for buffer in whole}

    def copies(self, workers: Workers) -> Iterator[tuple[int, str, np.ndarray]]:
        """Yield the outputs of the last run that a device holds otherwise than was returned, which is of the first.

        Each with the device, the name and the array with the device's elements in it. Whatever rounds alike on all
        devices is the same on all.
        """
        loaded = self._ran(workers)
        for buffer in loaded.lowered.outputs:
            slab = loaded.tensors[buffer.name].slab
            for device, array in disagreeing(buffer.sharding.holding, slab, loaded.gather(buffer)):
                yield device, buffer.name, array

    def fill(self, workers: Workers, value: Callable[[MeshBuffer], object | None]) -> None:
        """Fill the slabs of all devices, also beyond their shares of an uneven extent, for `tvm_axe.check`.

        A run puts the inputs into their places again. What it takes from elsewhere without having written it shows.

        Parameters
        ----------
        workers : Workers
            Where the tensors are.
        value : Callable[[MeshBuffer], object or None]
            The number for the tensor of a buffer; None leaves it as it is.
        """
        loaded = self._on(workers)
        for buffer in loaded.lowered.buffers.values():
            number, tensor = None if buffer.is_flags else value(buffer), loaded.tensors[buffer.name]
            for device in range(0 if number is None else 1 if tensor.shared else self.mesh.size):
                tensor.slab(device)[...] = number

    def show(self) -> str:
        width = max(len(name) for name in self.layouts)
        lines = [f"schedule {self.notation} on mesh {self.mesh}", "", "layouts"]
        lines += [f"  {name:<{width}}  {layout}" for name, layout in self.layouts.items()]
        lines += ["", "stages (bytes a device)"]
        for stage in self.stages:
            over = "" if stage.axis is None else " over all" if stage.axis == ALL else f" over {stage.axis}"
            note = "" if stage.kernel is None else self._note(stage.kernel)
            lines.append(f"  {stage.name:<{width + 12}}  {stage.kind + over:<24}  {stage.bytes:>12,}{note}")
        lines += [f"  {'in all':<{width + 12}}  {'':<24}  {self.bytes:>12,}", ""]
        if self.lowered.forms:
            lines += ["forms", *(f"  {line}" for line in self.lowered.forms), ""]
        collectives = self._collectives()
        if collectives:
            lines += ["collectives", *(f"  {line}" for line in collectives), ""]
        if self._measured is not None:
            lines += [*self._measured.lines(self.lowered), ""]
        if self.lowered.inserted:
            lines += ["redistributed", *(f"  {line}" for line in self.lowered.inserted), ""]
        for axes, exe in self._unfused.items():
            over = ", ".join(sorted(axes))
            lines += [f"where devices along {over} don't see each other's memory, it runs as", exe.show(), ""]
        lines.append(self.module.script())
        return "\n".join(lines)

    def _collectives(self) -> list[str]:
        """Which algorithm each collective takes, on the workers that it ran on last, or would be launched on."""
        backend = backend_of(self.target)
        if backend.on_host:  # there is one way
            return []
        launched = [workers for workers in self._loaded if workers.table is not None]
        table = launched[-1].table if launched else registry.find(backend.device).table(self.mesh.size)
        if table is None:
            return []
        return described(self.lowered, table, launched[-1].way if launched else lambda _: "")

    def _on(self, workers: Workers) -> _Loaded:
        """The program and its tensors on `workers`, made at the first use."""
        exe = self._fitting(workers)
        if workers not in exe._loaded:
            exe._loaded[workers] = _Loaded(exe.lowered, exe.runnable, exe.target, workers, exe.kept)
        return exe._loaded[workers]

    def _ran(self, workers: Workers) -> _Loaded:
        """The program and its tensors on workers that have run it."""
        exe = self._fitting(workers)
        if workers not in exe._loaded:
            raise LowerError(f"{self.name} has not run on these workers; run it first: {self._usage()}")
        return exe._loaded[workers]

    def _fitting(self, workers: Workers) -> MeshExecutable:
        """The program in the form in which workers can run it: itself, or unfused where its kernels see no peers."""
        found = [(stage, axes) for stage in self.stages if (axes := self._unseen(stage, workers))]
        if not found:
            return self
        if workers.apart not in self._unfused:
            stage, axes = found[0]
            if self.begun is None:
                raise LowerError(
                    f"{self.name}: stage {stage.name!r} is a kernel that indexes the slabs of its peers over "
                    f"{', '.join(axes)}, where these devices don't see each other's memory, and only the lowered "
                    "program is at hand; compile its function or its schedule here"
                )
            exe = MeshExecutable.of(replace(self.begun, apart=workers.apart))
            self._check_held_alike(exe)
            _LOG.warning(
                "%s: devices along %s don't see each other's memory; %s runs as %s",
                self.name, ", ".join(axes), self.notation, exe.notation,
            )  # fmt: skip
            exe.kept = self.kept
            self._unfused[workers.apart] = exe
        return self._unfused[workers.apart]

    def _unseen(self, stage: Stage, workers: Workers) -> list[str]:
        """The axes over which a stage is a kernel that indexes slabs which its device doesn't see."""
        if stage.kind not in (MESH_KERNEL, EXCHANGE) or stage.axis is None:
            return []
        return [axis for axis in (self.mesh.names if stage.axis == ALL else (stage.axis,)) if workers.is_apart(axis)]

    def _check_held_alike(self, exe: MeshExecutable) -> None:
        """Check that a device holds of each parameter what it holds in this form."""
        for buffer in (*self.lowered.inputs, *self.lowered.outputs):
            there = exe.lowered.buffers[buffer.name]
            if there.layout != buffer.layout:
                raise LowerError(
                    f"{self.name}: where devices don't see each other's memory, each would hold {buffer.name!r} as "
                    f"{there.layout} and not {buffer.layout}; declare its layout (with_layouts), or leave its "
                    "collectives unfused"
                )

    def _load(self, workers: Workers, arrays: Arrays) -> _Loaded:
        """The same, with `arrays` put into place."""
        self._check(workers)
        loaded = self._on(workers)
        for buffer, array in zip(self.lowered.inputs, arrays):
            loaded.scatter(buffer, array)
        return loaded


class _Loaded:
    """A program on one set of workers, with its mesh tensors; they free them once its executable has gone."""

    def __init__(self, lowered: Lowered, module: tvm.IRModule, target: Target, workers: Workers, kept: bool) -> None:
        self.lowered, self.mesh = lowered, lowered.mesh
        self.program: LoadedProgram = workers.load(module, target, program_builder(kept))
        self.tensors: dict[str, MeshTensor] = {}
        for buffer in lowered.buffers.values():
            # What devices only read and all hold alike is stored once.
            shared = buffer.is_input and not buffer.is_output and not buffer.sharding.holding.axes
            self.tensors[buffer.name] = workers.mesh_tensor(buffer.sharding.stored, buffer.dtype, shared)
        views = [(self.tensors[name], view) for name, view in lowered.arguments]
        self.arguments: list[Argument] = [*views, *(Coord(axis) for axis in lowered.coordinates)]
        weakref.finalize(self, discard, weakref.ref(workers), [self.program, *self.tensors.values()])

    def scatter(self, buffer: MeshBuffer, array: np.ndarray) -> None:
        """Put each device's region of the whole `array` into its slab; the padding of an uneven one stays as it is."""
        tensor = self.tensors[buffer.name]
        for device in range(1 if tensor.shared else self.mesh.size):
            scatter(array, buffer.sharding.holding, device, tensor.slab(device))

    def gather(self, buffer: MeshBuffer) -> np.ndarray:
        """The whole array out of the devices' slabs."""
        return gather(buffer.sharding.holding, self.tensors[buffer.name].slab, check_dtype(buffer.dtype))
