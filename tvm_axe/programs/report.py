"""Every program under every schedule, checked against numpy and timed beside it."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from tvm.script import tirx as T

from tvm_axe.collective import Workers, launch
from tvm_axe.compiler import compile
from tvm_axe.errors import InputError
from tvm_axe.executable import Executable
from tvm_axe.layout import Mesh
from tvm_axe.notebook import preformatted
from tvm_axe.programs.program import DistributedProgram
from tvm_axe.programs.registry import PROGRAMS
from tvm_axe.schedule import Schedule

__all__ = ["ProgramRow", "ProgramsReport", "chosen", "run"]

REPEAT = 5


@dataclass(frozen=True)
class ProgramRow:
    """One program under one schedule, with the names that it has as JSON."""

    program: str
    schedule: str
    mesh: str
    engine: str
    relative_error: float | None
    """The largest difference from float64 over the largest value of that, of the worst output; None for NaN."""
    bytes: int
    """What the busiest device of each stage receives in one run, as the compiler derived it."""
    bytes_expected: int
    """The same in closed form."""
    median_ms: float
    reference_ms: float
    """numpy's computation, on all cores, and the engine's all-reduce of what devices would have to sum."""


@dataclass(frozen=True)
class ProgramsReport:
    """The rows, and what was wrong: a row that failed, or one whose result or bytes aren't as expected."""

    rows: list[ProgramRow]
    faults: list[str]

    def table(self) -> str:
        """Return the rows for people."""
        head = ("program", "schedule", "mesh", "relative error", "bytes a device", "expected", "median ms", "numpy ms")
        cells = [
            (
                row.program, row.schedule, row.mesh,
                "NaN" if row.relative_error is None else f"{row.relative_error:.1e}",
                f"{row.bytes:,}", f"{row.bytes_expected:,}", f"{row.median_ms:.3f}", f"{row.reference_ms:.3f}",
            )
            for row in self.rows
        ]  # fmt: skip
        widths = [max(len(line[column]) for line in (head, *cells)) for column in range(len(head))]
        # Words to the left, numbers to the right.
        return "\n".join(
            "  ".join(
                f"{text:{'<' if column < 3 else '>'}{widths[column]}}" for column, text in enumerate(line)
            ).rstrip()
            for line in (head, *cells)
        )

    def _repr_html_(self) -> str:
        return preformatted(self.table())


def chosen(mesh: Mesh | None, names: Sequence[str] | None) -> dict[str, Mesh]:
    """Return the mesh for each program to run: the one given, or two devices on each axis that it is shared over.

    Raises
    ------
    InputError
        If there is no program of a name, or none that can use the mesh.
    """
    unknown = [name for name in names or () if name not in PROGRAMS]
    if unknown:
        raise InputError(f"no program {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    found: dict[str, Mesh] = {}
    for name in names or PROGRAMS:
        axes = PROGRAMS[name].axes
        if mesh is None:
            found[name] = Mesh(dict.fromkeys(axes, 2))
        elif all(axis in mesh for axis in axes):
            found[name] = mesh
        else:
            _say(f"{name}: left out, as it is shared over {' and '.join(axes)} and the mesh is {mesh}")
    if not found:
        needed = {", ".join(PROGRAMS[name].axes) for name in names or PROGRAMS}
        raise InputError(f"no program can use the mesh {mesh}; give it axes among: {'; '.join(sorted(needed))}")
    return found


def run(
    meshes: Mapping[str, Mesh], engine: str, size: str, options: Mapping[str, Any] = MappingProxyType({})
) -> ProgramsReport:
    """Run the programs that `meshes` names, each on its mesh under all of its schedules.

    Parameters
    ----------
    meshes : Mapping[str, Mesh]
        The mesh of each program, by name.
    engine : str
        The engine's name.
    size : str
        One of `SIZES`.
    options : Mapping[str, Any]
        What the engine is launched with beside the mesh (`tvm_axe.launch`).
    """
    report = ProgramsReport([], [])
    with ExitStack() as stack:
        launched: dict[str, Workers] = {}

        def workers_of(mesh: Mesh) -> Workers:
            """Workers on `mesh`; new ones where a fault has ended those that were there."""
            if str(mesh) not in launched or launched[str(mesh)].closed:
                launched[str(mesh)] = stack.enter_context(launch(mesh, engine=engine, **options))
            return launched[str(mesh)]

        for name, mesh in meshes.items():
            workers_of(mesh)  # an engine that doesn't start is no program's fault
            try:
                _run_program(PROGRAMS[name](mesh, size), workers_of, engine, report)
            except Exception as error:  # whatever a program does, the others are run
                report.faults.append(f"{name} on {mesh}: {type(error).__name__}: {error}")
    return report


def _run_program(
    program: DistributedProgram, workers_of: Callable[[Mesh], Workers], engine: str, report: ProgramsReport
) -> None:
    """Add a row for each schedule of `program`, or what was wrong with it, to `report`."""
    mesh = program.mesh
    _say(f"{program.name} on {mesh}: numpy")
    arrays = program.inputs(np.random.default_rng(0))
    expected = program.reference(*arrays)
    reference_ms = _numpy_ms(program, arrays) + _all_reduce_ms(program, workers_of(mesh))
    for name in program.schedules:
        place = f"{program.name} on {mesh}: {name}"
        _say(place)
        try:
            exe = compile(program.schedule(name), target=workers_of(mesh).target)
            wrong = _error(program, exe, workers_of(mesh), arrays, expected)
            median = _median_ms(exe, workers_of(mesh), arrays)
        except Exception as error:  # nor does a schedule stop the others
            report.faults.append(f"{place}: {type(error).__name__}: {error}")
            continue
        row = ProgramRow(
            program.name, name, str(mesh), engine, None if math.isnan(wrong) else wrong,
            exe.bytes, program.bytes[name], median, reference_ms,
        )  # fmt: skip
        report.rows.append(row)
        if not wrong <= program.tolerance:
            report.faults.append(f"{place}: its relative error is {wrong:.1e}, more than {program.tolerance:.0e}")
        if row.bytes != row.bytes_expected:
            report.faults.append(f"{place}: it moves {row.bytes} bytes, not {row.bytes_expected}")


def _error(
    program: DistributedProgram,
    exe: Executable,
    workers: Workers,
    arrays: tuple[np.ndarray, ...],
    expected: tuple[np.ndarray, ...],
) -> float:
    """Return the error of a run that follows one on NaNs, which would show in anything that is left from before."""
    exe.run(workers, *(np.full_like(array, np.nan) if array.dtype.kind == "f" else array for array in arrays))
    outputs = exe.run(workers, *arrays)
    return program.error(outputs if isinstance(outputs, tuple) else (outputs,), expected)


def _median_ms(exe: Executable, workers: Workers, arrays: tuple[np.ndarray, ...]) -> float:
    return 1e3 * statistics.median(exe.time(workers, *arrays, repeat=REPEAT, warmup=1))


def _numpy_ms(program: DistributedProgram, arrays: tuple[np.ndarray, ...]) -> float:
    """Return the median time of numpy's computation, given what an all-reduce would have summed."""
    summed = [array[:1] if index in program.terms else array for index, array in enumerate(arrays)]
    seconds = []
    for _ in range(1 + REPEAT):
        start = time.perf_counter()
        program.compute(*summed)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])  # the first is a warm-up


def _all_reduce_ms(program: DistributedProgram, workers: Workers) -> float:
    """Return the median time of the engine's all-reduce of what `program` would have to sum without schedules."""
    shape, dtype = program.reduced
    axis = program.axis
    n, count = program.mesh[axis], math.prod(shape)

    @T.prim_func(s_tir=True)
    def kernel(x: T.Buffer((n, count), dtype), total: T.Buffer((count,), dtype)) -> None:
        for i, k in T.grid(count, n):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    total[vi] = T.cast(0, dtype)
                total[vi] = total[vi] + x[vk, vi]

    sch = Schedule(kernel, mesh=program.mesh)
    sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[1], axis)
    return _median_ms(compile(sch, target=workers.target), workers, (np.ones((n, count), dtype),))


def _say(text: str) -> None:
    """Progress and faults, apart from the report."""
    print(f"programs: {text}", file=sys.stderr, flush=True)
