"""The interface of everything that `axe.compile` returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.target import Target

from tvm_axe.collective import Timeline, Workers
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import Stage
from tvm_axe.schedule import Schedule
from tvm_axe.schedule.tiles import choices_in

Arrays = tuple[np.ndarray, ...]


class Input(NamedTuple):
    """An array that an executable takes; an extent that is None may be any."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


class Executable:
    """A compiled function, program or model, for one device or for a mesh. ::

        exe = axe.compile(program, mesh=mesh)          exe = axe.compile(function)
        with axe.launch(exe.mesh) as workers:          out = exe(x, w)
            out = exe.run(workers, x, w)               out = exe(x, W=w)

    Whole numpy arrays go in, by position or by name, and whole arrays come out. What was compiled for a mesh runs on
    workers, which come before the arrays; what was compiled for one device runs in this process, without any.

    Attributes
    ----------
    name : str
        The function's name.
    module : IRModule
        What each device runs, tuned where the database had a record: on a mesh ``main`` and a function for each kernel.
        The blocks that tile kernels compute are annotated with them.
    target : Target
        What its kernels are compiled for.
    tuned : Mapping[str, float]
        The functions of `module` that a tuning record was found for, with the seconds it was measured at.
    mesh : Mesh or None
        The devices that it was compiled for; None for one device.
    stages : tuple[Stage, ...]
        What happens in order, with the bytes that each device receives; on one device there is nothing to tell apart.
    notation : str
        The schedule as CoCoNet writes it, such as ``ol(MM, fuse(RS-C-AG))``; empty for one device.
    layouts : Mapping[str, Layout]
        Where each buffer lives on the mesh.
    source : Schedule, PrimFunc or None
        What was compiled, as it was then: `tvm_axe.check` judges by it. None of a model, of what was lowered before,
        and of what was read from a file.
    """

    mesh: Mesh | None = None
    stages: tuple[Stage, ...] = ()
    notation: str = ""
    layouts: Mapping[str, Layout] = MappingProxyType({})
    source: Schedule | tirx.PrimFunc | None = None

    def __init__(self, name: str, module: tvm.IRModule, target: Target, tuned: Mapping[str, float]) -> None:
        self.name, self.module, self.target = name, module, target
        self.tuned: Mapping[str, float] = MappingProxyType(dict(tuned))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the arrays that `run` takes, in order."""
        return tuple(each.name for each in self._inputs())

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the arrays that `run` returns, in order."""
        raise NotImplementedError

    @property
    def bytes(self) -> int:
        """Bytes that the busiest device of each stage receives of its peers, over all stages of one run."""
        return sum(stage.bytes for stage in self.stages)

    @property
    def vm(self) -> relax.VMExecutable:
        """Upstream's executable of a model on one device, for ``tvm.relax.VirtualMachine``.

        Raises
        ------
        LowerError
            If this is anything else.
        """
        raise LowerError(
            f"{self.name}: .vm is of a Relax model compiled for one device, and this is {self._described()}; run it "
            f"as {self._usage()}"
        )

    def __call__(self, *arguments: Workers | np.ndarray, **named: np.ndarray) -> np.ndarray | Arrays:
        """Run once; the same as `run`."""
        return self.run(*arguments, **named)

    def run(self, *arguments: Workers | np.ndarray, **named: np.ndarray) -> np.ndarray | Arrays:
        """Run once on whole arrays.

        Parameters
        ----------
        *arguments
            First the workers that `axe.launch` gave for `mesh`, where there is one; then arrays, in the order of
            `inputs`, of their whole shapes and types.
        **named : numpy.ndarray
            The arrays that are given by name.

        Returns
        -------
        outputs : numpy.ndarray or tuple of them
            The whole outputs; one array if there is one output.

        Raises
        ------
        LowerError
            If workers are missing, left over or of another mesh, or if the number, a name, a shape or a dtype of the
            arrays is wrong.
        WorkerError
            If a worker fails, dies or doesn't answer.
        """
        workers, arrays = self._taken(arguments, named)
        outputs = self._run(workers, arrays)
        return outputs[0] if len(outputs) == 1 else outputs

    def time(
        self, *arguments: Workers | np.ndarray, repeat: int = 20, warmup: int = 3, **named: np.ndarray
    ) -> list[float]:
        """Seconds of each of `repeat` runs on arrays as `run` takes them, which are in place before.

        On a mesh a run takes as long as on the slowest device; on a GPU its own clock counts.

        Raises
        ------
        LowerError, WorkerError
            As `run`.
        """
        return self._time(*self._taken(arguments, named), repeat, warmup)

    def trace(self, *arguments: Workers | np.ndarray, warmup: int = 3, **named: np.ndarray) -> Timeline:
        """What each device does when in a run on arrays as `run` takes them; `warmup` runs come first.

        Raises
        ------
        LowerError
            As `run`; and for one device, on which there is nothing to see but one call.
        WorkerError
            As `run`.
        """
        raise LowerError(
            f"{self.name} was compiled for one device, where a run is one call; time() says what it takes, and what is "
            "compiled for a mesh can be traced"
        )

    def show(self) -> str:
        """What it is in words: on a mesh layouts and derived collectives with their bytes; and the module."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write to a file what `load` makes the same of in another process, without the sources.

        The file has the lowered modules, no machine code: what loads it builds them for the same target. It holds the
        constants of a model.

        Raises
        ------
        InputError
            If the file can't be written.
        """
        from tvm_axe.executable.saved import write  # which knows all kinds

        write(self, Path(path))

    @staticmethod
    def load(path: str | Path) -> Executable:
        """Read what `save` wrote.

        Raises
        ------
        InputError
            If the file can't be read, isn't one that `save` wrote, is damaged, or is of other versions of tvm_axe or
            the compiler.
        """
        from tvm_axe.executable.saved import read

        return read(Path(path))

    # ---- What each kind says of itself -------------------------------------------------------------------------------

    def _inputs(self) -> Sequence[Input]:
        """What it takes."""
        raise NotImplementedError

    def _run(self, workers: Workers | None, arrays: Arrays) -> Arrays:
        raise NotImplementedError

    def _time(self, workers: Workers | None, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        raise NotImplementedError

    def _described(self) -> str:
        """What it is, behind "this is"."""
        return "a function compiled for one device" if self.mesh is None else f"compiled for the mesh {self.mesh}"

    def _usage(self) -> str:
        """How it is run."""
        arrays = ", ".join(self.inputs)
        return f"exe({arrays})" if self.mesh is None else f"exe.run(workers, {arrays})"

    # ---- Arguments ---------------------------------------------------------------------------------------------------

    def _taken(
        self, arguments: Sequence[Workers | np.ndarray], named: Mapping[str, np.ndarray]
    ) -> tuple[Workers | None, Arrays]:
        """The workers, if there are any, and the arrays in order, checked."""
        workers: Workers | None = None
        if arguments and isinstance(arguments[0], Workers):
            workers, arguments = arguments[0], arguments[1:]
        if self.mesh is None and workers is not None:
            raise LowerError(
                f"{self.name} was compiled for one device and runs in this process, without workers: {self._usage()}; "
                "to have it run on workers, name their mesh to axe.compile"
            )
        if self.mesh is not None and workers is None:
            raise LowerError(
                f"{self.name} was compiled for the mesh {self.mesh} and runs on workers: {self._usage()}, where "
                "workers is what axe.launch(exe.mesh) gave"
            )
        return workers, self._ordered(arguments, named)

    def _ordered(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> Arrays:
        inputs = self._inputs()
        names = ", ".join(each.name for each in inputs)
        wrong = [name for name in named if name not in [each.name for each in inputs[len(arrays) :]]]
        if wrong:
            why = "is given twice" if wrong[0] in [each.name for each in inputs] else "is none of them"
            raise LowerError(f"{self.name} takes {len(inputs)} arrays ({names}); {wrong[0]!r} {why}")
        if len(arrays) + len(named) != len(inputs):
            raise LowerError(f"{self.name} takes {len(inputs)} arrays ({names}); got {len(arrays) + len(named)}")
        found = (*arrays, *(named[each.name] for each in inputs[len(arrays) :]))
        for each, array in zip(inputs, found):
            if not isinstance(array, np.ndarray):
                raise LowerError(f"{self.name}: {each.name} must be a numpy array; got {type(array).__name__}")
            fits = len(array.shape) == len(each.shape)
            if not fits or any(own not in (None, extent) for own, extent in zip(each.shape, array.shape)):
                raise LowerError(
                    f"{self.name}: {each.name} has the shape {_shown(each.shape)}; got an array of {array.shape}"
                )
            if str(array.dtype) != each.dtype:
                raise LowerError(f"{self.name}: {each.name} is {each.dtype}; got an array of {array.dtype}")
        return found

    def _note(self, function: str) -> str:
        """What was chosen for a function of the module, in brackets; nothing if nothing was."""
        notes = [str(choice) for choice in choices_in(self.module[function])]
        if function in self.tuned:
            notes.append(f"tuned: {self.tuned[function] * 1e3:.3f} ms")
        return f"  ({', '.join(notes)})" if notes else ""


def _shown(shape: tuple[int | None, ...]) -> str:
    extents = ["any" if extent is None else str(extent) for extent in shape]
    return f"({', '.join(extents)}{',' if len(extents) == 1 else ''})"
