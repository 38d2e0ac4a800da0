"""What a kernel is: a maker of tile programs, what of it is tunable, and what is expected of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile.checks import scalars
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.reading import read

Problem = Mapping[str, Any]
"""What is to be computed: extents, dtypes and options by name, as plain ints, strings and bools."""

Knobs = Mapping[str, tuple[int | str, ...]]
"""The candidates of each knob, a tunable parameter; the first is the default for the target and the problem asked."""


class Expected(NamedTuple):
    """An output in float64, and how far each of its elements may be off by rounding alone."""

    value: np.ndarray
    slack: np.ndarray


@dataclass(frozen=True)
class Recipe:
    """Tile programs that run one after the other; parameters of one name are one tensor.

    Attributes
    ----------
    programs : tuple of TileProgram
        As read, in order; each with a name of its own.
    inputs, outputs : tuple of str
        The tensors that a caller gives, by name. All others are `scratch`.

    Raises
    ------
    TileError
        Two programs of one name, a tensor with two shapes, or an input or output that no program has.
    """

    programs: tuple[TileProgram, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        names = [program.name for program in self.programs]
        if len(set(names)) < len(names):
            raise TileError(f"recipe: programs have names of their own, got {', '.join(names)}")
        missing = [name for name in (*self.inputs, *self.outputs) if name not in self.tensors]
        if missing:
            raise TileError(f"recipe: no program has a parameter {', '.join(missing)}; there are {[*self.tensors]}")

    @cached_property
    def tensors(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of every tensor, by name."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        for program in self.programs:
            for param in program.params:
                kind = (param.shape, param.dtype)
                if found.setdefault(param.name, kind) != kind:
                    raise TileError(f"recipe: {param.name} is {kind} in {program.name} and {found[param.name]} before")
        return found

    @property
    def scratch(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of the tensors that hold what one program leaves for the next; undefined before."""
        return {name: kind for name, kind in self.tensors.items() if name not in (*self.inputs, *self.outputs)}

    @property
    def arguments(self) -> tuple[tuple[str, ...], ...]:
        """The names of each program's tensors, in the order of its parameters."""
        return tuple(tuple(param.name for param in program.params) for program in self.programs)


class Fewer(NamedTuple):
    """Which parameters are better where an extent that isn't known is small.

    Attributes
    ----------
    extent : str
        The extent, by its name in the problem.
    most : int
        Up to which value.
    parameters : mapping
        These parameters.
    """

    extent: str
    most: int
    parameters: Mapping[str, int | str]


def _no_fewer(_target: Target, _problem: Problem) -> Fewer | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """A kernel: the programs that compute it, by problem and parameters, and the judge of their results.

    Attributes
    ----------
    name : str
        What it is called in `KERNELS` and in annotations.
    summary : str
        What it computes, in one line.
    make : Callable
        ``make(**problem, **parameters) -> Recipe``.
    parameters : Callable[[Target, Problem], Knobs]
        The tunable parameters with their candidates, the default first.
    inputs : Callable[[numpy.random.Generator, Problem], dict[str, numpy.ndarray]]
        Random data for the recipe's inputs.
    reference : Callable[[Problem, dict[str, numpy.ndarray]], dict[str, Expected]]
        The outputs in float64.
    cases : tuple of Problem
        What it is checked with: extents that no tile divides, extents of 1, long and skinny ones.
    fewer : Callable[[Target, Problem], Fewer or None]
        Of a problem with an extent that is a variable, when other parameters than the defaults are better.
    """

    name: str
    summary: str
    make: Callable[..., Recipe]
    parameters: Callable[[Target, Problem], Knobs]
    inputs: Callable[[np.random.Generator, Problem], dict[str, np.ndarray]]
    reference: Callable[[Problem, Mapping[str, np.ndarray]], dict[str, Expected]]
    cases: tuple[Problem, ...]
    fewer: Callable[[Target, Problem], Fewer | None] = _no_fewer

    def recipe(self, target: Target, problem: Problem, **parameters: int | str) -> Recipe:
        """The programs for a problem, with the target's defaults for the parameters that aren't given.

        Raises
        ------
        TileError
            There is no such parameter, or the program with these values is none.
        """
        knobs = self.parameters(target, problem)
        unknown = [name for name in parameters if name not in knobs]
        if unknown:
            raise TileError(f"{self.name}: no parameter {', '.join(unknown)}; there are {', '.join(knobs)}")
        chosen = {name: candidates[0] for name, candidates in knobs.items()} | parameters
        return self.make(**problem, **chosen)


def only_used(func: tirx.PrimFunc, kept: Sequence[str] = ()) -> TileProgram:
    """The program, read, without parameters that nothing in it touches: those of options that were not asked for.

    Those whose names are `kept` stay: an operator keeps its arguments for its gradient.
    """
    program = read(func)
    known = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
    used = {tile for node in program.nodes() for tile in (*node.reads, *node.writes, *scalars(node, known))}
    used |= {tile for tile in program.params if tile.name in kept}
    buffers = {tile.buffer for tile in used}
    params = [param for param in func.params if param in buffers or not tirx.is_buffer_var(param)]
    less = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
    return replace(program, func=less, params=tuple(tile for tile in program.params if tile in used))


def renamed(program: TileProgram, params: Mapping[str, str], name: str) -> TileProgram:
    """The program by another `name`, as one of several, some of whose parameters have other names, too."""
    func = program.func
    others = {param: tirx.Var(params.get(param.name, param.name), param.ty) for param in func.params}
    body = _tvm.structural_map(func.body, (tirx.Var, lambda var: others.get(var, var)))
    return read(tirx.PrimFunc([*others.values()], body, func.ret_type, func.attrs).with_attr("global_symbol", name))


def choose(default: int, *others: int) -> tuple[int, ...]:
    """Candidates: the default, then the others without it."""
    return (default, *(other for other in others if other != default))


def counted(rows: Any) -> Any:
    """How many rows or others there are, as grids count blocks: a number, or of 32 bits where it isn't known."""
    return rows if isinstance(rows, int) else tirx.Cast("int32", rows)


def has_variables(problem: Problem) -> bool:
    """Whether it has extents that aren't known."""
    return any(isinstance(value, tirx.Var) for value in problem.values())


def with_extents(problem: Problem, extent: int) -> Problem:
    """The problem with this number for each extent that isn't known."""
    return {name: extent if isinstance(value, tirx.Var) else value for name, value in problem.items()}


def power_of_two(extent: int) -> int:
    """The smallest power of two that is at least `extent`."""
    return 1 << max(extent - 1, 0).bit_length()


def described(problem: Problem) -> str:
    """A problem in one line, without its dtype: ``m=512 n=256 bias``."""
    plain = ((name, value) for name, value in problem.items() if name != "dtype" and value is not False)
    return " ".join(name if value is True else f"{name}={value}" for name, value in plain)


BYTE_TERMS = 32
"""8-bit terms that one instruction of the tensor cores adds up."""


# ---- How exact a result can be -------------------------------------------------------------------------------------

ROUNDING = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""The relative error of rounding to a type to the nearest."""

SMALLEST = {"float16": 2.0**-24, "float8_e4m3fn": 2.0**-9, "float8_e5m2": 2.0**-16}
"""The spacing of a type's numbers near zero, which results as small as that round to; of the others' 2^-126."""

TOLERANCE = {
    "float32": 1e-5, "tf32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2, "float8_e4m3fn": 5e-2, "float8_e5m2": 5e-2,
}  # fmt: skip
"""The largest relative error of an output, norm over norm, by dtype: the problem's, or that of its results."""


def stored(dtype: str) -> str:
    """The type that tensors of a problem's dtype have in memory: tf32 is float32 there."""
    return "float32" if dtype == "tf32" else dtype


def rounding_slack(dtype: str, unit: float | np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """How far a result may be off that was computed to `unit` of `magnitude` and then rounded to a type.

    The second is allowed for twice, since what it rounds is off already.
    """
    return (unit + 2 * ROUNDING[dtype]) * magnitude + SMALLEST.get(dtype, 2.0**-126)


def product_slack(dtype: str, out: str, terms: int, magnitude: np.ndarray) -> np.ndarray:
    """How far a sum of `terms` products may be off, where `magnitude` is the sum of the products' absolute values.

    Each of the additions rounds to float32, in any order: terms * 2^-24 of `magnitude` (Higham, "Accuracy and stability
    of numerical algorithms", section 4.2; the products of the 16-bit and 8-bit types are exact). Tensor cores truncate
    where they align the terms of one instruction, which doubles it, and keep 13 bits behind the point for 8-bit types.
    tf32 rounds both operands. The result rounds once to its type.
    """
    unit = 2 * ROUNDING["float32"] * (terms + 4)
    if dtype == "tf32":
        unit += 4 * ROUNDING["tf32"]
    if dtype == "float8_e4m3fn":
        unit += 2.0**-13 * math.ceil(terms / BYTE_TERMS)
    return rounding_slack(out, unit, magnitude)


def slack_of_groups(dtype: str, out: str, terms: int, group: int, magnitude: np.ndarray) -> np.ndarray:
    """How far a sum of `terms` products may be off whose groups are summed apart, and then added times their scales.

    A group's sum is off as `product_slack` says, in 8-bit floats by what is kept of its own terms only; times its
    scales and added it rounds some times more.
    """
    unit = 2 * ROUNDING["float32"] * (terms + 8)
    if dtype.startswith("float8"):
        unit += 2.0**-13 * math.ceil(min(terms, group) / BYTE_TERMS)
    return rounding_slack(out, unit, magnitude)
