"""Programs of `fuzz_programs` by numpy, in float64 and int64: the truth that schedules are compared with.

`evaluate` refuses what means nothing: an index outside its tensor, two iterations of a data-parallel block that store
one element, an element that is read and was never written, a number that the tensors' types don't hold exactly.

>>> from fuzz_programs import Tensor
>>> program = Program(
...     (("a", 4),),
...     (Tensor("X", ("a",), "float32"), Tensor("Y", ("a",), "float32")),
...     (Stage("flip", ("a",), "S", "Y", ("a - 1 - v0",), "X[v0] * T.float32(2)"),),
... )
>>> evaluate(program, {"X": np.array([1, 2, 3, 4], "float32"), "Y": np.zeros(4, "float32")})["Y"].tolist()
[8.0, 6.0, 4.0, 2.0]
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import numpy as np
from fuzz_programs import COMBINERS, LIMITS, Program, Stage, is_carried, number, parsed


class Malformed(Exception):
    """A program that means nothing: it is drawn again."""


def evaluate(
    program: Program, inputs: Mapping[str, np.ndarray], stored: dict[str, np.ndarray] | None = None
) -> dict[str, np.ndarray]:
    """All the tensors after a run by numpy, in float64 and int64; `inputs` has every parameter, outputs too.

    `stored`, if given, gets for each tensor whether an element is stored to.

    Raises
    ------
    Malformed
        If the program means nothing.
    """
    held: dict[str, np.ndarray] = {}
    known: dict[str, np.ndarray] = {}  # whether an element has a value
    stored = {} if stored is None else stored
    for tensor in program.tensors:
        shape = program.shape(tensor)
        if any(extent < 1 for extent in shape):
            raise Malformed(f"{tensor.name} has no elements")
        wide = "float64" if tensor.dtype.startswith("float") else "bool" if tensor.dtype == "bool" else "int64"
        held[tensor.name] = np.zeros(shape, wide) if tensor.local else inputs[tensor.name].astype(wide)
        known[tensor.name] = np.full(shape, not tensor.local)
        stored[tensor.name] = np.zeros(shape, bool)
    dtypes = {tensor.name: tensor.dtype for tensor in program.tensors}
    for stage in program.stages:
        for step in range(number(stage.extents[0], program.extents)) if is_carried(stage) else (None,):
            places = _Run(program, stage, held, known, dtypes, step).store()
            stored[stage.target].reshape(-1)[places] = True
    return held


class _Run:
    """One stage's iterations at once, or those of one step of its first loop: the iterators are arrays."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        held: dict[str, np.ndarray],
        known: dict[str, np.ndarray],
        dtypes: Mapping[str, str],
        step: int | None,
    ) -> None:
        self.stage, self.held, self.known, self.dtypes = stage, held, known, dtypes
        self.domain = tuple(number(text, program.extents) for text in stage.extents)
        if any(extent < 1 for extent in self.domain):
            raise Malformed(f"{stage.name} has no iterations")
        if step is not None:
            self.domain = (1, *self.domain[1:])
        grid = np.indices(self.domain)
        grid[:1] += step or 0
        self.names: dict[str, Any] = {**program.sizes, **{f"v{i}": axis for i, axis in enumerate(grid)}}
        self.limit = LIMITS[dtypes[stage.target]]

    def store(self) -> np.ndarray:
        """Do all the iterations; returns the elements that they store to, by their row-major index."""
        stage = self.stage
        everywhere = np.ones(self.domain, bool)
        value = np.broadcast_to(self._value(parsed(stage.value).body, everywhere), self.domain)
        places = [np.broadcast_to(self._value(parsed(text).body, everywhere), self.domain) for text in stage.indices]
        target, known = self.held[stage.target], self.known[stage.target]
        self._check_inside(stage.target, places, everywhere)
        flat = np.ravel_multi_index(tuple(places), target.shape) if places else np.zeros(self.domain, int)
        if stage.combine == "add":
            if not known.reshape(-1)[flat].all():
                raise Malformed(f"{stage.name} adds to what was never written")
            np.add.at(target.reshape(-1), flat.reshape(-1), value.reshape(-1))
        else:
            reduced = tuple(i for i, kind in enumerate(stage.kinds) if kind != "S")
            if reduced:
                assert stage.combine is not None
                combine = COMBINERS[stage.combine][2]
                if stage.combine in _LARGEST_PARTIAL:
                    self._check_range(_LARGEST_PARTIAL[stage.combine](np.abs(value), reduced))
                self._check_range(value)
                value = combine.reduce(value, axis=reduced)
                first = tuple(0 if i in reduced else slice(None) for i in range(len(self.domain)))
                if (flat != np.expand_dims(flat[first], reduced)).any():
                    raise Malformed(f"{stage.name} stores by what it reduces")
                flat = flat[first]
            if len(np.unique(flat)) != flat.size:
                raise Malformed(f"{stage.name} stores an element twice")
            target.reshape(-1)[flat.reshape(-1)] = value.reshape(-1)
            known.reshape(-1)[flat.reshape(-1)] = True
        self._check_range(target.reshape(-1)[flat.reshape(-1)])
        return flat.reshape(-1)

    def _check_range(self, value: Any) -> None:
        if value.dtype != bool and np.abs(value).max(initial=0) > self.limit:
            raise Malformed(f"{self.stage.name} leaves what its type holds")

    def _check_inside(self, name: str, places: list[Any], mask: np.ndarray) -> None:
        for place, extent in zip(places, self.held[name].shape, strict=True):
            if (((place < 0) | (place >= extent)) & mask).any():
                raise Malformed(f"{self.stage.name} leaves {name}")

    def _value(self, node: ast.expr, mask: np.ndarray) -> Any:
        """The value of an expression in all iterations; only those of `mask` need it."""
        match node:
            case ast.Constant(value=value):
                return np.asarray(value)
            case ast.Name(id=name):
                return np.asarray(self.names[name])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, mask)
            case ast.BinOp(left=left, op=op, right=right):
                found = _BINARY[type(op)](self._value(left, mask), self._value(right, mask))
                self._check_range(np.where(mask, found, 0))
                return found
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _COMPARE[type(op)](self._value(left, mask), self._value(right, mask))
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                return self._load(name, index, mask)
            case ast.Call(func=ast.Attribute(attr=name), args=arguments):
                return self._call(name, arguments, mask)
        raise AssertionError(ast.dump(node))

    def _load(self, name: str, index: ast.expr, mask: np.ndarray) -> Any:
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        places = [np.broadcast_to(self._value(part, mask), self.domain) for part in parts]
        self._check_inside(name, places, mask)
        inside = tuple(np.clip(p, 0, extent - 1) for p, extent in zip(places, self.held[name].shape, strict=True))
        if not np.broadcast_to(self.known[name][inside], self.domain)[mask].all():
            raise Malformed(f"{self.stage.name} reads what was never written of {name}")
        return np.asarray(self.held[name][inside])

    def _call(self, name: str, arguments: list[ast.expr], mask: np.ndarray) -> Any:
        if name == "if_then_else":
            condition = np.broadcast_to(self._value(arguments[0], mask), self.domain)
            return np.where(
                condition, self._value(arguments[1], mask & condition), self._value(arguments[2], mask & ~condition)
            )
        if name == "Cast":
            assert isinstance(arguments[0], ast.Constant)
            value = self._value(arguments[1], mask)
            return value != 0 if arguments[0].value == "bool" else value + 0
        values = [self._value(each, mask) for each in arguments]
        if name in LIMITS:
            return values[0]
        return {"max": np.maximum, "min": np.minimum, "Or": np.logical_or, "And": np.logical_and}[name](*values)


# The largest that some of a reduction's terms come to, whichever they are: a schedule combines them in parts.
_LARGEST_PARTIAL = {
    "sum": lambda magnitudes, axes: magnitudes.sum(axis=axes),
    "prod": lambda magnitudes, axes: np.maximum(magnitudes, 1).prod(axis=axes),
}
_BINARY = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
    ast.BitXor: np.bitwise_xor,
}
_COMPARE = {ast.Lt: np.less, ast.LtE: np.less_equal, ast.Gt: np.greater, ast.GtE: np.greater_equal}


# ---- Data ------------------------------------------------------------------------------------------------------------


def inputs_of(program: Program, seed: int, spread: int) -> dict[str, np.ndarray]:
    """Small integers for every parameter, also those that are outputs, in their types.

    The values of a tensor are distinct where `spread` allows it: they are drawn of -spread to spread.
    """
    rng = np.random.default_rng(seed)
    found = {}
    for tensor in program.parameters:
        shape = program.shape(tensor)
        count = int(np.prod(shape))
        if tensor.limit is not None:
            limit = number(tensor.limit, program.extents)
            drawn = rng.permutation(limit)[:count] if count <= limit else rng.integers(limit, size=count)
        elif tensor.dtype == "bool":
            drawn = rng.integers(2, size=count)
        else:
            values = np.arange(-spread, spread + 1)
            values = values[values != 0]  # a product with 0 hides what it is of
            drawn = rng.permutation(np.resize(rng.permutation(values), max(count, 1)))[:count]
        found[tensor.name] = drawn.reshape(shape).astype(tensor.dtype)
    return found


def fitting_inputs(program: Program, seed: int) -> dict[str, np.ndarray]:
    """Inputs that the types of the program's results hold exactly, of a spread as wide as can be.

    Raises
    ------
    Malformed
        If the program means nothing, with the smallest numbers too.
    """
    for spread in (40, 9, 3, 1):
        inputs = inputs_of(program, seed, spread)
        try:
            evaluate(program, inputs)
        except Malformed:
            if spread == 1:
                raise
        else:
            return inputs
    raise AssertionError
