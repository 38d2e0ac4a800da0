"""Random programs for `fuzz_schedules`: small value objects that print as TVMScript and that numpy runs too.

A `Program` is extents by name, tensors and stages. Shapes, indices and values are texts over the extents (``a``,
``b``, ...) and a stage's iterators (``v0``, ``v1``, ...), so that a smaller program is the same with other extents or
fewer stages: what the minimizer tries. `evaluate` runs one with numpy, in float64 or int64, and refuses what isn't well
formed: an index outside its tensor, two iterations of a data-parallel block that store the same element, an element
that is read and was never written, a number that the tensors' types don't hold exactly.

>>> program = Program(
...     (("a", 4),),
...     (Tensor("X", ("a",), "float32"), Tensor("Y", ("a",), "float32")),
...     (Stage("flip", ("a",), "S", "Y", ("a - 1 - v0",), 'X[v0] * T.float32(2)'),),
... )
>>> evaluate(program, {"X": np.array([1, 2, 3, 4], "float32")})["Y"].tolist()
[8.0, 6.0, 4.0, 2.0]
>>> print(program.source())
@T.prim_func(s_tir=True)
def main(X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
    for i0 in range(4):
        with T.sblock("flip"):
            v0 = T.axis.spatial(4, i0)
            Y[3 - v0] = X[v0] * T.float32(2)
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

LIMITS = {"float16": 2**11, "float32": 2**24, "float64": 2**53, "int32": 2**31 - 1, "int8": 127, "bool": 1}
"""The largest integer up to which a type holds all."""

COMBINERS = {
    "sum": ("T.{dtype}(0)", "{old} + {value}", np.add),
    "prod": ("T.{dtype}(1)", "{old} * {value}", np.multiply),
    "max": ('T.min_value("{dtype}")', "T.max({old}, {value})", np.maximum),
    "min": ('T.max_value("{dtype}")', "T.min({old}, {value})", np.minimum),
    "any": ("T.bool(False)", "T.Or({old}, {value})", np.logical_or),
}
"""The reductions: what a sum starts with, what it becomes, and numpy's name of it."""


class Malformed(Exception):
    """A program that means nothing: it is drawn again."""


@dataclass(frozen=True)
class Tensor:
    """A parameter or an intermediate. `limit`, of int32 indices, is the extent that they index."""

    name: str
    shape: tuple[str, ...]
    dtype: str
    local: bool = False
    limit: str | None = None


@dataclass(frozen=True)
class Stage:
    """One block in its nest.

    `kinds` has a letter for each iterator: S (data-parallel), R (reduced) or O (opaque). `combine` is a key of
    `COMBINERS`; ``"add"`` adds to what the stored element holds already, without an initial value.
    """

    name: str
    extents: tuple[str, ...]
    kinds: str
    target: str
    indices: tuple[str, ...]
    value: str
    combine: str | None = None


@dataclass(frozen=True)
class Program:
    """What is fuzzed: see the module's head."""

    extents: tuple[tuple[str, int], ...]
    tensors: tuple[Tensor, ...]
    stages: tuple[Stage, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The extents by name."""
        return dict(self.extents)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """What the caller passes."""
        return tuple(tensor for tensor in self.tensors if not tensor.local)

    @property
    def written(self) -> tuple[str, ...]:
        """The parameters that are stored to."""
        targets = {stage.target for stage in self.stages}
        return tuple(tensor.name for tensor in self.parameters if tensor.name in targets)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a tensor in numbers."""
        return tuple(number(text, self.extents) for text in tensor.shape)

    def source(self) -> str:
        """The program as TVMScript."""
        declared = ", ".join(f'{t.name}: T.Buffer({self._shape(t)}, "{t.dtype}")' for t in self.parameters)
        lines = ["@T.prim_func(s_tir=True)", f"def main({declared}):"]
        for tensor in self.tensors:
            if tensor.local:
                lines.append(f'    {tensor.name} = T.sblock_alloc_buffer({self._shape(tensor)}, "{tensor.dtype}")')
        dtypes = {tensor.name: tensor.dtype for tensor in self.tensors}
        for stage in self.stages:
            lines += self._nest(stage, dtypes[stage.target])
        return "\n".join(lines)

    def function(self) -> tirx.PrimFunc:
        """The program as a function: what parsing `source` gives, built in a tenth of the time."""
        with IRBuilder() as builder, T.prim_func(s_tir=True):
            T.func_name("main")
            held = {"T": T}
            for tensor in self.parameters:
                held[tensor.name] = T.arg(tensor.name, T.Buffer(self.shape(tensor), tensor.dtype))
            for tensor in self.tensors:
                if tensor.local:
                    held[tensor.name] = T.sblock_alloc_buffer(self.shape(tensor), tensor.dtype)
                    IRBuilder.name(tensor.name, held[tensor.name])
            dtypes = {tensor.name: tensor.dtype for tensor in self.tensors}
            for stage in self.stages:
                self._build(stage, dtypes[stage.target], dict(held))
        return builder.get()

    def _build(self, stage: Stage, dtype: str, names: dict[str, Any]) -> None:
        """Build a stage's nest; `names` is what its texts are evaluated with."""

        def value(text: str) -> Any:
            return eval(_code(in_numbers(text, self.extents)), names)

        extents = [number(text, self.extents) for text in stage.extents]
        with contextlib.ExitStack() as nest:
            loops: Any = nest.enter_context(T.grid(*extents)) if extents else ()
            loops = loops if len(extents) != 1 or isinstance(loops, (list, tuple)) else [loops]
            for i, loop in enumerate(loops):
                IRBuilder.name(f"i{i}", loop)
            nest.enter_context(T.sblock(stage.name))
            for i, (extent, kind) in enumerate(zip(extents, stage.kinds, strict=True)):
                names[f"v{i}"] = _AXES[kind](extent, loops[i])
                IRBuilder.name(f"v{i}", names[f"v{i}"])
            if not extents:
                IRBuilder.name("vu", T.axis.spatial(1, 0))
            target, indices = names[stage.target], [value(index) for index in stage.indices]
            old = f"{stage.target}[{', '.join(stage.indices) or '()'}]"
            if stage.combine == "add":
                T.buffer_store(target, value(f"{old} + ({stage.value})"), indices)
            elif stage.combine is not None:
                initial, update, _ = COMBINERS[stage.combine]
                with T.init():
                    T.buffer_store(target, value(initial.format(dtype=dtype)), indices)
                T.buffer_store(target, value(update.format(old=old, value=f"({stage.value})")), indices)
            else:
                T.buffer_store(target, value(stage.value), indices)

    def _shape(self, tensor: Tensor) -> str:
        return str(self.shape(tensor))

    def _nest(self, stage: Stage, dtype: str) -> list[str]:
        extents = [number(text, self.extents) for text in stage.extents]
        loops = ", ".join(f"i{i}" for i in range(len(extents)))
        lines, indent = [], "    "
        if extents:
            domain = f"range({extents[0]})" if len(extents) == 1 else f"T.grid({', '.join(map(str, extents))})"
            lines.append(f"{indent}for {loops} in {domain}:")
            indent += "    "
        lines.append(f'{indent}with T.sblock("{stage.name}"):')
        indent += "    "
        for i, (extent, kind) in enumerate(zip(extents, stage.kinds, strict=True)):
            word = {"S": "spatial", "R": "reduce", "O": "opaque"}[kind]
            lines.append(f"{indent}v{i} = T.axis.{word}({extent}, i{i})")
        if not extents:
            lines.append(f"{indent}vu = T.axis.spatial(1, 0)")
        indices = ", ".join(in_numbers(index, self.extents) for index in stage.indices) or "()"
        element, value = f"{stage.target}[{indices}]", in_numbers(stage.value, self.extents)
        if stage.combine is not None and " " in value:
            value = f"({value})"
        if stage.combine == "add":
            lines.append(f"{indent}{element} = {element} + {value}")
        elif stage.combine is not None:
            initial, update, _ = COMBINERS[stage.combine]
            lines += [f"{indent}with T.init():", f"{indent}    {element} = {initial.format(dtype=dtype)}"]
            lines.append(f"{indent}{element} = {update.format(old=element, value=value)}")
        else:
            lines.append(f"{indent}{element} = {value}")
        return lines


_AXES = {"S": T.axis.spatial, "R": T.axis.reduce, "O": T.axis.opaque}


# ---- Texts -----------------------------------------------------------------------------------------------------------


def number(text: str, extents: tuple[tuple[str, int], ...]) -> int:
    """The value of a text over extents."""
    return int(eval(compile(_parsed(text), text, "eval"), {"__builtins__": {}}, dict(extents)))


@cache
def _code(text: str) -> CodeType:
    return compile(text, text, "eval")


@cache
def _parsed(text: str) -> ast.Expression:
    return ast.parse(text, mode="eval")


class _Numbers(ast.NodeTransformer):
    """Puts numbers in the place of extents, and folds what is constant then."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.sizes[node.id]) if node.id in self.sizes else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
            expression = ast.fix_missing_locations(ast.Expression(node))
            return ast.Constant(eval(compile(expression, "", "eval"), {"__builtins__": {}}))
        return node


@cache
def in_numbers(text: str, extents: tuple[tuple[str, int], ...]) -> str:
    """A text with numbers for the extents."""
    return ast.unparse(_Numbers(dict(extents)).visit(ast.parse(text, mode="eval")))


def names_in(text: str) -> set[str]:
    """All the names in a text: extents, iterators and tensors."""
    return set(re.findall(r"\b[A-Za-z_]\w*\b", text))


def read_by(stage: Stage) -> set[str]:
    """The names that a stage reads: those of tensors, and others."""
    found = names_in(stage.value).union(*map(names_in, stage.indices)) if stage.indices else names_in(stage.value)
    return found | ({stage.target} if stage.combine == "add" else set())


# ---- By numpy --------------------------------------------------------------------------------------------------------


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
        places = _Run(program, stage, held, known, dtypes).store()
        stored[stage.target].reshape(-1)[places] = True
    return held


class _Run:
    """One stage's iterations at once: the iterators are arrays."""

    def __init__(
        self,
        program: Program,
        stage: Stage,
        held: dict[str, np.ndarray],
        known: dict[str, np.ndarray],
        dtypes: Mapping[str, str],
    ) -> None:
        self.stage, self.held, self.known, self.dtypes = stage, held, known, dtypes
        self.domain = tuple(number(text, program.extents) for text in stage.extents)
        if any(extent < 1 for extent in self.domain):
            raise Malformed(f"{stage.name} has no iterations")
        grid = np.indices(self.domain)
        self.names: dict[str, Any] = {**program.sizes, **{f"v{i}": axis for i, axis in enumerate(grid)}}
        self.limit = LIMITS[dtypes[stage.target]]

    def store(self) -> np.ndarray:
        """Do all the iterations; returns the elements that they store to, by their row-major index."""
        stage = self.stage
        everywhere = np.ones(self.domain, bool)
        value = np.broadcast_to(self._value(_parsed(stage.value).body, everywhere), self.domain)
        places = [np.broadcast_to(self._value(_parsed(text).body, everywhere), self.domain) for text in stage.indices]
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
                self._check_range(np.abs(value).sum(axis=reduced) if stage.combine == "sum" else value)
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


# ---- Smaller programs ------------------------------------------------------------------------------------------------


def without_stage(program: Program, index: int) -> Program:
    """The program less a stage; what nothing touches goes, and an intermediate that nothing writes is passed in."""
    stages = program.stages[:index] + program.stages[index + 1 :]
    written = {stage.target for stage in stages}
    used = written.union(*(read_by(stage) for stage in stages)) if stages else set()
    tensors = tuple(
        replace(tensor, local=tensor.local and tensor.name in written)
        for tensor in program.tensors
        if tensor.name in used
    )
    # What was read on only and is read no more is a result now.
    reads = set().union(*(read_by(stage) for stage in stages)) if stages else set()
    tensors = tuple(replace(t, local=False) if t.local and t.name not in reads else t for t in tensors)
    return Program(program.extents, tensors, stages)


def with_extent(program: Program, name: str, value: int) -> Program:
    """The program with another extent."""
    return replace(program, extents=tuple((n, value if n == name else v) for n, v in program.extents))
