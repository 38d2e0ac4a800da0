"""The interface of everything that `axe.compile` returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, MethodType
from typing import Any, overload

import tvm
from tvm import relax, tirx
from tvm.target import Target

from tvm_axe.collective import Timeline, Workers
from tvm_axe.errors import LowerError
from tvm_axe.executable.arguments import Arrays, Input, foreign, given_back, matched
from tvm_axe.executable.session import Session
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import Stage
from tvm_axe.machines.registry import described
from tvm_axe.notebook import preformatted
from tvm_axe.schedule import Schedule
from tvm_axe.schedule.tiles import choices_in


class _Load:
    """`Executable.load`: of the class it reads a file, of a model's executable it opens a session."""

    @overload
    def __get__(self, exe: None, kind: type) -> Callable[[str | Path], Executable]: ...

    @overload
    def __get__(self, exe: Executable, kind: type) -> Callable[..., Session]: ...

    def __get__(self, exe: Executable | None, kind: type) -> Callable[..., Any]:
        return _read if exe is None else MethodType(_open, exe)


def _read(path: str | Path) -> Executable:
    """Read what `Executable.save` wrote.

    Raises
    ------
    InputError
        If the file can't be read, isn't one that `save` wrote, is damaged, or is of other versions of tvm_axe or the
        compiler.
    """
    from tvm_axe.executable.saved import read

    return read(Path(path))


def _open(
    exe: Executable, *arguments: Any, params: Any = None, workers: Workers | None = None, graphs: bool = False
) -> Session:
    """Put a model's weights where it runs, once, for all calls of its functions by name. ::

        model = exe.load(params)                       model = exe.load(workers, params)

    Parameters
    ----------
    workers : Workers, optional
        Who runs a model on a mesh, if it isn't to run on workers of its own; of one for one device None.
    params : mapping, sequence or path, optional
        The weights: arrays by name, of numpy or of what speaks DLPack, such as a ``state_dict`` of PyTorch; arrays in
        the order of the parameters; or the path of a safetensors file, of its index, of a folder with such, or several.
        Dots in names may be underscores in the model's. Left out, they are those that the model was imported with, if
        it has kept any. On a mesh a device gets its share alone, and what lies in files each worker reads for itself.
    graphs : bool
        On one GPU, whether calls are captured as CUDA graphs, one for inputs of the same shapes, and replayed
        (`tvm_axe.executable.replayed`): the host then launches one thing a call. Inputs and results are copied on the
        GPU. Functions for which the host decides something run as without, which a line of the log ``tvm_axe`` says.

    Returns
    -------
    model : Session
        What its functions are called on; `Session.close`, or the end of a ``with``, frees the weights.

    Raises
    ------
    InputError
        If weights are missing, or are given that no function takes, or have another shape or type, all of which is
        listed; or if a file can't be read.
    LowerError
        If this is no model, the device is missing, or workers are of another mesh or left over; or if graphs are asked
        for of what isn't compiled for one GPU, or none of its functions can be replayed.
    WorkerError
        If a worker doesn't start, fails or dies, or there is no room for the weights; then none of them is left.
    """
    given = list(arguments)
    if given and isinstance(given[0], Workers):
        if workers is not None:
            raise LowerError(f"{exe.name}: load is given workers twice")
        workers = given.pop(0)
    if len(given) > (params is None):
        raise LowerError(f"{exe.name}: load takes workers, if there are any, and params; got {len(given)} values more")
    return exe._session(given[0] if given else params, workers, graphs)


class Executable:
    """A compiled function, program or model, for one device or for a mesh. ::

        exe = axe.compile(program, mesh=mesh)          exe = axe.compile(function)
        with exe:                                      out = exe(x, w)
            out = exe(x, W=w)

        with axe.launch(exe.mesh) as workers:
            out = exe.run(workers, x, w)

    Whole arrays go in, by position or by name, and whole arrays come out: numpy's, or those of a package that speaks
    DLPack, such as PyTorch and JAX, and then the outputs are that package's. What was compiled for one device runs in
    this process. What was compiled for a mesh runs on workers: those that come before the arrays, or its own, which it
    launches at the first call and keeps until it is closed, by `close` or at the end of a `with`, or is collected.

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
    kept : bool
        Whether what workers compile for it is kept on disk.
    """

    mesh: Mesh | None = None
    stages: tuple[Stage, ...] = ()
    notation: str = ""
    layouts: Mapping[str, Layout] = MappingProxyType({})
    source: Schedule | tirx.PrimFunc | None = None
    kept: bool = False

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

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run once; the same as `run`."""
        return self.run(*arguments, **named)

    def __enter__(self) -> Executable:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers that it has launched for itself, if there are any; the next call launches others."""

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Run once on whole arrays.

        Parameters
        ----------
        *arguments
            First the workers that `axe.launch` gave for `mesh`, if it isn't to run on its own; then arrays, in the
            order of `inputs`, of their whole shapes and types: numpy's, or any that have ``__dlpack__``.
        **named
            The arrays that are given by name.

        Returns
        -------
        outputs : numpy.ndarray or tuple of them
            The whole outputs; one array if there is one output. Where an input was another package's array, those of
            the package of the first such.

        Raises
        ------
        InputError
            If the number, a name, a shape or a dtype of the arrays is wrong, or extents don't fit each other: all of it
            is listed, beside what is expected.
        LowerError
            If workers are left over or of another mesh; or if the runtime refuses the call, as a model checks more
            while it runs.
        WorkerError
            If a worker doesn't start, fails, dies or doesn't answer.
        """
        workers, arrays = self._taken(arguments, named)
        outputs: tuple[Any, ...] = self._run(workers, arrays)
        like = foreign([*arguments, *named.values()])
        if like is not None:
            outputs = tuple(given_back(array, like) for array in outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def time(self, *arguments: Any, repeat: int = 20, warmup: int = 3, **named: Any) -> list[float]:
        """Seconds of each of `repeat` runs on arrays as `run` takes them, which are in place before.

        On a mesh a run takes as long as on the slowest device; on a GPU its own clock counts.

        Raises
        ------
        InputError
            As `run`; and if `repeat` or `warmup` is too small.
        LowerError, WorkerError
            As `run`.
        """
        return self._time(*self._taken(arguments, named), repeat, warmup)

    def trace(self, *arguments: Any, warmup: int = 3, **named: Any) -> Timeline:
        """What each device does when in a run on arrays as `run` takes them; `warmup` runs come first.

        Raises
        ------
        LowerError
            As `run`; and for one device, on which there is nothing to see but one call.
        InputError, WorkerError
            As `run`.
        """
        raise LowerError(
            f"{self.name} was compiled for one device, where a run is one call; time() says what it takes, and what is "
            "compiled for a mesh can be traced"
        )

    def show(self) -> str:
        """What it is in words: on a mesh layouts and derived collectives with their bytes; and the module.

        Once `trace` or `time` has measured on a mesh, also what the search's model predicts beside what was measured.
        """
        raise NotImplementedError

    def __repr__(self) -> str:
        devices = "one device" if self.mesh is None else f"the mesh {self.mesh}"
        return f"<an executable of {self.name} on {devices}, for {described(self.target)}; show() says more>"

    def _repr_html_(self) -> str:
        return preformatted(self.show())

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

    load = _Load()

    # ---- What each kind says of itself -------------------------------------------------------------------------------

    def _inputs(self) -> Sequence[Input]:
        """What it takes."""
        raise NotImplementedError

    def _run(self, workers: Workers | None, arrays: Arrays) -> Arrays:
        raise NotImplementedError

    def _time(self, workers: Workers | None, arrays: Arrays, repeat: int, warmup: int) -> list[float]:
        raise NotImplementedError

    def _session(self, params: Any, workers: Workers | None, graphs: bool) -> Session:
        """A session of its model; an error if it is none."""
        raise LowerError(
            f"{self.name}: load(params) is of a Relax model, and this is {self._described()}; "
            f"run it as {self._usage()}, and read a file by axe.Executable.load(path)"
        )

    def _described(self) -> str:
        """What it is, behind "this is"."""
        return "a function compiled for one device" if self.mesh is None else f"compiled for the mesh {self.mesh}"

    def _usage(self) -> str:
        """How it is run."""
        return f"exe({', '.join(self.inputs)})"

    # ---- Arguments ---------------------------------------------------------------------------------------------------

    def _taken(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[Workers | None, Arrays]:
        """The workers, if there is a mesh, and the arrays in order, checked."""
        workers: Workers | None = None
        if arguments and isinstance(arguments[0], Workers):
            workers, arguments = arguments[0], arguments[1:]
        if self.mesh is None and workers is not None:
            raise LowerError(
                f"{self.name} was compiled for one device and runs in this process, without workers: {self._usage()}; "
                "to have it run on workers, name their mesh to axe.compile"
            )
        arrays = matched(self.name, self._inputs(), arguments, named)
        return workers or self._workers(), arrays

    def _workers(self) -> Workers | None:
        """Its own workers, launched if they aren't there; None for one device."""
        return None

    def _note(self, function: str) -> str:
        """What was chosen for a function of the module, in brackets; nothing if nothing was."""
        notes = [str(choice) for choice in choices_in(self.module[function])]
        if function in self.tuned:
            notes.append(f"tuned: {self.tuned[function] * 1e3:.3f} ms")
        return f"  ({', '.join(notes)})" if notes else ""
