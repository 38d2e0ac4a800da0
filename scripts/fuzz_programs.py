"""Random programs for `fuzz_schedules`: small value objects that print as TVMScript and are functions.

A `Program` is extents by name, tensors and stages. Shapes, indices and values are texts over the extents (``a``,
``b``, ...) and a stage's iterators (``v0``, ``v1``, ...), so that a smaller program is the same with other extents or
fewer stages: what the minimizer tries.

>>> program = Program(
...     (("a", 4),),
...     (Tensor("X", ("a",), "float32"), Tensor("Y", ("a",), "float32")),
...     (Stage("flip", ("a",), "S", "Y", ("a - 1 - v0",), 'X[v0] * T.float32(2)'),),
... )
>>> print(program.source())
@T.prim_func(s_tir=True)
def main(X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
    for i0 in range(4):
        with T.sblock("flip"):
            v0 = T.axis.spatial(4, i0)
            Y[3 - v0] = X[v0] * T.float32(2)
>>> print(program.function().script().splitlines()[-1].strip())
Y[3 - v0] = X[v0] * T.float32(2.0)
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
    return int(eval(compile(parsed(text), text, "eval"), {"__builtins__": {}}, dict(extents)))


@cache
def _code(text: str) -> CodeType:
    return compile(text, text, "eval")


@cache
def parsed(text: str) -> ast.Expression:
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


def is_carried(stage: Stage) -> bool:
    """Whether an iteration of a stage's first loop reads what those before have stored: steps, one after another."""
    return stage.kinds[:1] == "S" and stage.target in names_in(stage.value)


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
