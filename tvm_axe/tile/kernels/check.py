"""Tile kernels beside numpy in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tvm.target import Target

from tvm_axe.errors import AxeError
from tvm_axe.machines import Gpu, backend_of, machine_of
from tvm_axe.tile.build import compile_all
from tvm_axe.tile.kernels.kernel import TOLERANCE, Expected, Kernel, Problem, Recipe, described
from tvm_axe.tile.kernels.registry import KERNELS


@dataclass(frozen=True)
class Row:
    """One kernel on one problem, with the names that it has as JSON."""

    kernel: str
    shape: str
    dtype: str
    target: str
    relative_error: float | None
    """Of the worst output, the norm of the difference from float64 over the norm of that; None for NaN."""
    ok: bool
    """Whether that is within the dtype's tolerance, and no element is further off than rounding explains."""


def run(kernels: Sequence[Kernel], target: Target, seed: int) -> Iterator[tuple[Row, str]]:
    """A row for each case of each kernel that the target has instructions for, and what was wrong, if anything."""
    for kernel in kernels:
        for index, problem in enumerate(kernel.cases):
            if supported(target, problem):
                # Each case draws from a seed of its own, so that one alone draws what it draws among all.
                rng = np.random.default_rng([seed, [*KERNELS].index(kernel.name), index])
                yield checked(kernel, problem, target, rng)


def supported(target: Target, problem: Problem) -> bool:
    """Whether the target has the problem's types: 8-bit floats need Ada or Hopper among GPUs."""
    machine, types = machine_of(target), (problem["dtype"], problem.get("out_dtype") or "")
    return not (isinstance(machine, Gpu) and any(t.startswith("float8") for t in types) and not machine.float8)


def checked(
    kernel: Kernel, problem: Problem, target: Target, rng: np.random.Generator, **parameters: int | str
) -> tuple[Row, str]:
    """Compile and run a kernel once on random data, into poisoned outputs; the row, and what was wrong."""
    arrays = kernel.inputs(rng, problem)
    error, fault = math.nan, ""
    try:
        outputs = executed(kernel.recipe(target, problem, **parameters), target, arrays)
        tolerance = max(TOLERANCE.get(each, 0.0) for each in (problem["dtype"], problem.get("out_dtype") or ""))
        error, fault = judged(outputs, kernel.reference(problem, arrays), tolerance)
    except Exception as failure:  # whatever a kernel does, the others are run
        fault = str(failure) if isinstance(failure, AxeError) else f"{type(failure).__name__}: {failure}"
    measured = None if math.isnan(error) else error
    return Row(kernel.name, described(problem), problem["dtype"], backend_of(target).device, measured, not fault), fault


def executed(recipe: Recipe, target: Target, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs after the recipe's programs have run on `arrays`; they and the scratch tensors begin poisoned."""
    tensors = {name: arrays[name] if name in arrays else poison(*kind) for name, kind in recipe.tensors.items()}
    for program, names in zip(compile_all(recipe.programs, target), recipe.arguments):
        program(*(tensors[name] for name in names))
    return {name: tensors[name] for name in recipe.outputs}


def poison(shape: Sequence[int], dtype: str) -> np.ndarray:
    """An array of NaN, or of the number of an integer type that is furthest from zero."""
    kind = np.dtype(dtype)
    extremes = {"i": lambda: np.iinfo(kind).min, "u": lambda: np.iinfo(kind).max, "b": lambda: True}
    return np.full(tuple(shape), extremes.get(kind.kind, lambda: np.nan)(), kind)


def judged(outputs: Mapping[str, np.ndarray], expected: Mapping[str, Expected], tolerance: float) -> tuple[float, str]:
    """The largest relative error of an output, and what is wrong with it, if anything."""
    worst, faults = 0.0, []
    for name, (value, slack) in expected.items():
        output = outputs[name].astype("float64")
        with np.errstate(invalid="ignore"):  # infinities that are equal are no difference
            off = np.where(output == value, 0.0, np.abs(output - value))
        size = np.linalg.norm(value[np.isfinite(value)])
        error = float(np.linalg.norm(off) / size) if size else float(off.max(initial=0.0))
        worst = float(np.max([worst, error]))  # NaN stays
        if not error <= tolerance:
            faults.append(f"{name} has the relative error {error:.1e}, more than {tolerance:.0e}")
        beyond = ~(off <= slack)
        if beyond.any():
            place = tuple(int(at[0]) for at in np.nonzero(beyond))
            faults.append(
                f"{int(beyond.sum())} elements of {name} are further off than rounding explains, the first at {place}: "
                f"{output[place]:.6g}, which should be {value[place]:.6g} up to {slack[place]:.1e}"
            )
    return worst, "; ".join(faults)
