"""`tvm-axe kernels`: what kernels there are, and every one of them beside numpy in float64."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import tvm
from tvm.target import Target

from tvm_axe.errors import AxeError, InputError
from tvm_axe.machines import Gpu, backend_of, machine_of, resolve_target
from tvm_axe.tile.build import compile_all
from tvm_axe.tile.kernels.kernel import TOLERANCE, Expected, Kernel, Problem, Recipe, described
from tvm_axe.tile.kernels.registry import KERNELS

TARGETS = {"cpu": "llvm", "cuda": "cuda"}
"""What ``--target`` takes, and the targets' kinds."""


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


def main(names: Sequence[str], target: str, check: bool, seed: int | None, as_json: bool) -> int:
    """List the kernels, or check them; prints to stdout, progress and faults to stderr; returns the exit code.

    Raises
    ------
    InputError
        There is no kernel of a name, or no such target, or it is a GPU and there is none.
    """
    kernels = [_kernel(name) for name in names or KERNELS]
    if target not in TARGETS:
        raise InputError(f"--target is one of {', '.join(TARGETS)}, got {target!r}")
    resolved = resolve_target(TARGETS[target])
    if not check:
        print(json.dumps({"kernels": [*map(_listed, kernels, [resolved] * len(kernels))]}) if as_json
              else "\n\n".join(_paragraph(kernel, resolved) for kernel in kernels))  # fmt: skip
        return 0
    if not tvm.runtime.device(backend_of(resolved).device).exist:
        raise InputError(f"--target {target} checks kernels on a GPU, and this machine has none")
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    print(f"kernels: data from seed {seed}", file=sys.stderr)
    rows = []
    for row, fault in run(kernels, resolved, seed):
        rows.append(row)
        if not as_json:
            print(_line(row), flush=True)
        if fault:
            print(f"kernels: {row.kernel} {row.shape} {row.dtype}: {fault}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


def run(kernels: Sequence[Kernel], target: Target, seed: int) -> Iterator[tuple[Row, str]]:
    """A row for each case of each kernel that the target has instructions for, and what was wrong, if anything."""
    for kernel in kernels:
        for index, problem in enumerate(kernel.cases):
            if supported(target, problem):
                # Each case draws from a seed of its own, so that one alone draws what it draws among all.
                rng = np.random.default_rng([seed, [*KERNELS].index(kernel.name), index])
                yield checked(kernel, problem, target, rng)


def supported(target: Target, problem: Problem) -> bool:
    """Whether the target multiplies the problem's dtype: 8-bit floats need Hopper among GPUs."""
    machine = machine_of(target)
    return not (isinstance(machine, Gpu) and problem["dtype"].startswith("float8") and not machine.float8)


def checked(
    kernel: Kernel, problem: Problem, target: Target, rng: np.random.Generator, **parameters: int | str
) -> tuple[Row, str]:
    """Compile and run a kernel once on random data, into poisoned outputs; the row, and what was wrong."""
    arrays = kernel.inputs(rng, problem)
    error, fault = math.nan, ""
    try:
        outputs = executed(kernel.recipe(target, problem, **parameters), target, arrays)
        error, fault = judged(outputs, kernel.reference(problem, arrays), TOLERANCE[problem["dtype"]])
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
    """An array of NaN, or of an integer type's smallest number."""
    kind = np.dtype(dtype)
    return np.full(tuple(shape), np.iinfo(kind).min if kind.kind in "iu" else np.nan, kind)


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


# ---- What is printed ---------------------------------------------------------------------------------------------


def _kernel(name: str) -> Kernel:
    if name not in KERNELS:
        raise InputError(f"no kernel {name}; there are {', '.join(KERNELS)}")
    return KERNELS[name]


def _listed(kernel: Kernel, target: Target) -> dict[str, object]:
    problem = kernel.cases[0]
    parameters = {name: [*values] for name, values in kernel.parameters(target, problem).items()}
    return {"name": kernel.name, "summary": kernel.summary, "problem": dict(problem), "parameters": parameters}


def _paragraph(kernel: Kernel, target: Target) -> str:
    """The kernel with its parameters for its first case; the first value of each is the default there."""
    problem = kernel.cases[0]
    lines = [f"{kernel.name}: {kernel.summary}", f"  for {described(problem)} {problem['dtype']}"]
    for name, values in kernel.parameters(target, problem).items():
        lines.append(f"    {name:<10} {values[0]}, or {', '.join(map(str, values[1:]))}")
    return "\n".join(lines)


def _line(row: Row) -> str:
    error = "NaN" if row.relative_error is None else f"{row.relative_error:.1e}"
    return f"{'ok ' if row.ok else 'BAD'} {row.kernel:<18} {error:>8}  {row.dtype:<14} {row.shape}"
