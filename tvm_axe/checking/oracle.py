"""axe.check: whether a schedule computes what its function says, on one device and on the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.parameters import parameters
from tvm_axe.checking.comparing import first_wrong, relative_error
from tvm_axe.checking.exactness import exact_magnitude
from tvm_axe.checking.inputs import distinct_values, indices_of, other_data, padding, small_integers
from tvm_axe.checking.reference import Alone, Expected, Reference
from tvm_axe.checking.report import LOOSE, CheckReport, Mismatch
from tvm_axe.checking.sampling import sampled
from tvm_axe.checking.stages import wrong_on_mesh, wrong_on_one_device
from tvm_axe.checking.tracing import blamed
from tvm_axe.collective import Workers, launch
from tvm_axe.compiler import compile
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError, LowerError
from tvm_axe.executable import Executable
from tvm_axe.executable.mesh import MeshExecutable
from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule
from tvm_axe.tile.kernels.check import poison

__all__ = ["check"]

_ROUNDED = 3  # magnitude of integers of a function that rounds them
_Arrays = Mapping[str, np.ndarray]


def check(
    program: Schedule | Executable | tirx.PrimFunc | IRModule,
    mesh: Mesh | Mapping[str, int] | None = None,
    *,
    origin: tirx.PrimFunc | IRModule | None = None,
    engine: str | Workers = "threads",
    seeds: int = 3,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = WORK_DIR,
) -> CheckReport:
    """Show that a program computes what its function said before any primitive; or say where it doesn't, and why.

    The reference is the function before any primitive, run on one device as upstream compiles it, its types of floating
    point widened to float64. Beside it the scheduled function runs twice: on one device, where its annotations mean
    nothing, and on the mesh. For each seed both are given

    1. integers, in the real types. Where the function computes these without rounding, in whatever order it sums
       (`tvm_axe.checking.exactness`), each element must be the same number;
    2. numbers that all differ, or integers from 0 on where they are an index, all different too if there are enough.

    Where the reference isn't finite for these, or the function itself rounds by more than a tenth, positive ones are
    taken; the report says so of what can't be judged even then.

    What is not exact must be within what rounding explains, for the narrowest type and the number of terms that are
    summed (`tvm_axe.checking.reference.Reference` has the rule). Outputs begin as NaN, or as an integer type's extreme;
    on the mesh a run on other data, NaN where that can be, comes before, so that what is left of it shows, and so does
    all of the devices' slabs that a run doesn't fill itself, the padding of uneven shares too. What is in and out is
    given to the reference as to the program, and compared whole.

    Where a reference of all results would take minutes, a sample of them is compared: indices of each dimension, of
    which it takes half a second (`tvm_axe.checking.sampling`). The scheduled function then runs on the mesh alone.

    Parameters
    ----------
    program : Schedule, Executable, PrimFunc or IRModule
        A schedule; what `tvm_axe.compile` made, but of a model; or a function over whole tensors or a module of one,
        scheduled or not.
    mesh : Mesh or mapping, optional
        The devices of a function; a schedule and an executable know theirs. A function without a mesh is compiled for
        one device.
    origin : PrimFunc or IRModule, optional
        The function before any primitive. An `tvm_axe.Schedule` knows it, and so does what was compiled from one; for
        anything else it is the function itself, with its annotations ignored, if this is left out.
    engine : str or Workers
        What the devices are, see `tvm_axe.launch`; workers that were launched are used and left running.
    seeds : int
        How many times arrays are drawn; at least 1.
    target : str, dict or Target
        What a program that isn't compiled yet is compiled for.
    work_dir : path, optional
        Where its tuning records are; None leaves it untuned.

    Returns
    -------
    report : CheckReport
        What was run, and how far it was off.

    Raises
    ------
    CheckError
        If a result is wrong. Its ``report`` names the first wrong element, the stage that computed it and, where a
        `tvm_axe.Schedule` has a trace of what was done, the instruction after which results are wrong: "already under
        stock TVM" if they are on one device, else "on the mesh".
    InputError
        If `program` can't be checked, `origin` has other parameters, or `seeds` is less than 1; or a reference takes
        minutes and a sample of its results no less.
    LowerError
        If the program is refused, as `tvm_axe.compile` would: that is no wrong answer.
    WorkerError
        If a worker fails, dies or doesn't answer.
    """
    if seeds < 1:
        raise InputError(f"check: seeds must be at least 1, not {seeds}")
    subject = _subject(program, None if mesh is None else Mesh.of(mesh), origin, target, work_dir)
    with _workers(subject.exe, engine) as workers:
        report = _Check(subject, workers).run(seeds)
    report.raise_if_wrong()
    return report


@dataclass(frozen=True)
class _Subject:
    """What is checked: an executable, the function that it was compiled from, and that before any primitive."""

    exe: Executable
    func: tirx.PrimFunc | None
    origin: tirx.PrimFunc
    sch: Schedule | None
    compiled: Callable[[tirx.PrimFunc], Executable]

    def __post_init__(self) -> None:
        own = {each.name: (each.shape, each.dtype) for each in self.exe._inputs()}
        for func in [self.origin] if self.func is None else [self.origin, self.func]:
            found = {str(p.name): (tuple(int(extent) for extent in p.shape), str(p.dtype)) for p in func.params}
            missing = [name for name in self.exe.outputs if name not in found]
            missing += [name for name, kind in own.items() if found.get(name) != kind]
            if missing:
                raise InputError(
                    f"check: origin must have the parameters of {self.exe.name}, of the same shapes and types; "
                    f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not among {', '.join(found)}"
                )


class _Check:
    """One check: what is run, and what has been seen."""

    def __init__(self, subject: _Subject, workers: Workers | None) -> None:
        self.subject, self.workers = subject, workers
        exe = subject.exe
        self.sample = sampled(subject.origin, exe.outputs, np.random.default_rng(0))
        self.reference = Reference(subject.origin, self.sample)
        self.indices = indices_of(subject.origin)
        self.exact = exact_magnitude(subject.origin, self.indices)
        self.errors: dict[str, float] = {}
        self.allowed: dict[str, float] = {}
        self.alone = "one device, its annotations ignored" if exe.mesh is not None else "one device"
        self.on_mesh = "" if exe.mesh is None else f"the mesh {exe.mesh}"
        self.on_one: Callable[[_Arrays], _Arrays] | None = None
        if exe.mesh is None:
            self.on_one = self._run
        elif subject.func is not None and not _binds_threads(subject.func) and self.sample is None:
            self.on_one = Alone(subject.func)

    def run(self, seeds: int) -> CheckReport:
        """Run all rounds, until something is wrong."""
        magnitude, mismatch = self.exact or _ROUNDED, None
        ran = [where for where, runs in ((self.alone, self.on_one), (self.on_mesh, self.on_mesh)) if runs]
        for seed in range(seeds):
            for data, given, expected, exactly in self._rounds(seed, magnitude):
                mismatch = mismatch or self._round(data, given, expected, exactly)
            if mismatch is not None:
                break
        rounds = 2 * seeds
        name, judged = self.subject.exe.name, {} if self.sample is None else self.sample.judged
        return CheckReport(name, tuple(ran), rounds, self.exact, self.errors, self.allowed, mismatch, judged)

    def _rounds(self, seed: int, magnitude: int) -> Iterator[tuple[str, _Arrays, Expected, bool]]:
        """What a seed's arrays are called, the arrays, what is expected of them, and whether exactly that."""
        rng, origin, indices = np.random.default_rng(seed), self.subject.origin, self.indices
        if self.on_mesh:
            self._run(other_data(origin, indices, magnitude, rng))
        integers = [small_integers(origin, indices, magnitude, rng)]
        integers += [{name: np.abs(array) for name, array in integers[0].items()}] if self.exact is None else []
        values = [distinct_values(origin, indices, magnitude, rng, positive) for positive in (False, True)]
        yield (f"integers up to {magnitude}, seed {seed}", *self._fit(integers), self.exact is not None)
        yield (f"distinct numbers, seed {seed}", *self._fit(values), False)

    def _fit(self, drawn: Sequence[_Arrays]) -> tuple[_Arrays, Expected]:
        """The first of these arrays of which all results are finite and can be judged; the last if none is so."""
        for each in drawn:
            given = {name: each[name] for name in self.subject.exe.inputs}
            expected = self.reference(given)
            outputs = self.subject.exe.outputs
            finite = all(np.isfinite(expected.arrays[name].astype("float64")).all() for name in outputs)
            if finite and all(expected.slack[name] <= LOOSE for name in outputs):
                break
        return given, expected

    def _run(self, given: _Arrays, exe: Executable | None = None) -> dict[str, np.ndarray]:
        """The outputs of the executable, or of another of the same function."""
        exe = exe or self.subject.exe
        if self.workers is not None and isinstance(exe, MeshExecutable):
            exe.fill(self.workers, lambda buffer: padding(buffer.dtype, self.indices))
        # Before a primitive has it written whole, a parameter may be an input, too.
        begun = {n: poison(p.shape, p.dtype) for n, p in parameters(self.subject.origin).items() if n not in given}
        arrays = [{**given, **begun}[name] for name in exe.inputs]
        results = exe.run(*arrays) if self.workers is None else exe.run(self.workers, *arrays)
        return dict(zip(exe.outputs, results if isinstance(results, tuple) else (results,)))

    def _round(self, data: str, given: _Arrays, expected: Expected, exactly: bool) -> Mismatch | None:
        if not exactly:
            for name in self.subject.exe.outputs:
                self.allowed[name] = max(expected.slack[name], self.allowed.get(name, 0.0))
        if self.on_one is not None:
            got = self.on_one(given)
            output = self._first_fault(got, expected, exactly)
            if output is not None:
                return self._mismatch(self.alone, data, output, got[output], given, expected, exactly)
        if self.on_mesh:
            got = self._run(given)
            output = self._first_fault(got, expected, exactly)
            if output is not None:
                return self._mismatch(self.on_mesh, data, output, got[output], given, expected, exactly)
            for device, output, array in self._copies():
                if self._first_fault({output: array}, expected, exactly) is not None:
                    found = self._mismatch(self.on_mesh, data, output, array, given, expected, exactly)
                    stage = "not looked for, as what other devices hold is right"
                    return replace(found, data=f"{data}, in the copy of device {device}", stage=stage)
        return None

    def _copies(self, exe: Executable | None = None) -> Iterator[tuple[int, str, np.ndarray]]:
        """The outputs of the last run on the mesh that devices hold otherwise than it returned."""
        exe = exe or self.subject.exe
        return exe.copies(self.workers) if self.workers is not None and isinstance(exe, MeshExecutable) else iter(())

    def _first_fault(self, got: _Arrays, expected: Expected, exactly: bool) -> str | None:
        """The first output that is wrong."""
        for name in got:
            if name in self.subject.exe.outputs:
                error = relative_error(*expected.judged(name, got[name]))
                self.errors[name] = max(error, self.errors.get(name, 0.0))
        return next((name for name, array in got.items() if expected.fault(name, array, exactly)), None)

    def _mismatch(
        self,
        where: str,
        data: str,
        output: str,
        array: np.ndarray,
        given: _Arrays,
        expected: Expected,
        exactly: bool,
    ) -> Mismatch:
        func, origin, exe = self.subject.func, self.subject.origin, self.subject.exe
        judged, want = expected.judged(output, array)
        slack = 0.0 if exactly else expected.slack[output]
        index = first_wrong(judged, want, slack, exactly)
        if self.sample is not None:
            stage = "not looked for, as the reference is of a sample"
        elif where == self.on_mesh:
            assert isinstance(exe, MeshExecutable) and self.workers is not None
            held = exe.held(self.workers)
            stage = "not known, as the scheduled function isn't"
            if func is not None:
                stage = wrong_on_mesh(exe, func, held, given, expected, output)
        else:
            stage = wrong_on_one_device(func or origin, origin, given, expected, output)
        why = expected.fault(output, array, exactly)
        if output not in given and np.array_equal(
            want[index], poison((), str(want.dtype)), equal_nan=want.dtype.kind == "f"
        ):
            why += "; the function leaves that element as it was, or computes no number"
        blame = self._blame(where, given, expected, exactly)
        return Mismatch(where, data, output, index, want[index].item(), judged[index].item(), why, stage, blame)

    def _blame(self, where: str, given: _Arrays, expected: Expected, exactly: bool) -> str:
        """After which instruction results are wrong."""
        sch = self.subject.sch
        if sch is None:
            return "not known, as there is no trace of an axe.Schedule"

        def wrong_alone(func: tirx.PrimFunc) -> bool | None:
            try:
                return self._first_fault(Alone(func)(given), expected, exactly) is not None
            except _tvm.UPSTREAM_ERRORS as error:
                _tvm.raise_own_fault(error)
                return None

        def wrong_on_mesh(func: tirx.PrimFunc) -> bool | None:
            try:
                exe = self.subject.compiled(func)
                self._run(other_data(self.subject.origin, self.indices, _ROUNDED, np.random.default_rng(0)), exe)
                if self._first_fault(self._run(given, exe), expected, exactly) is not None:
                    return True
                copies = ({output: array} for _, output, array in self._copies(exe))
                return any(self._first_fault(copy, expected, exactly) is not None for copy in copies)
            except LowerError:
                return None

        found = blamed(sch, wrong_alone if where == self.alone else wrong_on_mesh)
        if found is None:
            return "none of its instructions: the function that the schedule was made of is not the origin, or is wrong"
        return (
            f"already wrong under stock TVM after {found}"
            if where == self.alone
            else f"wrong on the mesh after {found}"
        )


def _subject(
    program: Schedule | Executable | tirx.PrimFunc | IRModule,
    mesh: Mesh | None,
    origin: tirx.PrimFunc | IRModule | None,
    target: str | dict[str, Any] | Target,
    work_dir: str | Path | None,
) -> _Subject:
    if isinstance(program, Executable):
        exe, target = program, program.target
        if mesh is not None and mesh != exe.mesh:
            raise InputError(
                f"check: {exe.name} was compiled for {exe.mesh or 'one device'}, not {mesh}; leave mesh out"
            )
    elif isinstance(program, s_tir.Schedule | tirx.PrimFunc | IRModule):
        exe = compile(program, mesh, target, work_dir)
    else:
        raise InputError(
            "check: a schedule, an executable, a function or a module of one is checked, not a "
            f"{type(program).__name__}"
        )
    source = exe.source
    sch = source if isinstance(source, Schedule) else None
    func = _only(source)
    before = _only(sch.origin if origin is None and sch is not None else origin) or func
    if before is None:
        raise InputError(
            f"check: what {exe.name} was compiled from isn't known (it was read from a file, lowered before, or is a "
            "model); name the function: check(exe, origin=function)"
        )
    return _Subject(exe, func, before, sch, lambda each: compile(each, exe.mesh, target, work_dir))


def _only(program: Schedule | tirx.PrimFunc | IRModule | None) -> tirx.PrimFunc | None:
    """The function of a program; None of none."""
    module = program.mod if isinstance(program, s_tir.Schedule) else program
    if not isinstance(module, IRModule):
        return module
    functions = [func for func in module.functions.values() if isinstance(func, tirx.PrimFunc)]
    if len(functions) != 1:
        raise InputError(f"check: origin is one function over whole tensors; the module has {len(functions)}")
    return functions[0]


@contextlib.contextmanager
def _workers(exe: Executable, engine: str | Workers) -> Iterator[Workers | None]:
    """The workers that an executable runs on, launched for as long as this lasts unless they are given."""
    if exe.mesh is None:
        yield None
    elif isinstance(engine, Workers):
        yield engine
    else:
        with launch(exe.mesh, engine=engine) as workers:
            yield workers


def _binds_threads(func: tirx.PrimFunc) -> bool:
    """Whether loops of a function are threads of a GPU, which upstream can't compile for a CPU."""
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, found.append))
    return any(loop.kind == tirx.ForKind.THREAD_BINDING for loop in found)
