"""A Relax function as values and the calls that make them: what is shared over a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import tvm
from tvm import ir, relax, tirx

from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.patterns import Pattern, pattern_of
from tvm_axe.errors import LowerError

__all__ = ["Graph", "Node", "Value", "graph_of", "legalized"]

_CALL_TIR = "relax.call_tir"
_PATTERN, _OPAQUE = "op_pattern", 8  # what FuseOps leaves alone


@dataclass(frozen=True)
class Value:
    """A tensor of the model.

    Attributes
    ----------
    name : str
        Its variable's; ``constant_0`` and so on of constants.
    shape, dtype
        What it is.
    kind : "input", "weight" or "value"
        Whether a call of the model brings it, it is the same in all calls, or it is computed.
    constant : Tensor or None
        What it is, of a constant.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    constant: tvm.runtime.Tensor | None = None

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Node:
    """A call: of a function of TensorIR, which is `func`, or of anything else, which takes and gives whole values."""

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    func: tirx.PrimFunc | None
    value: relax.Expr
    fields: bool
    """Whether it gives a tuple."""


@dataclass
class Graph:
    """A function of the model: values by number, calls in order, and which values it takes and returns."""

    name: str
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    params: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


def legalized(model: tvm.IRModule) -> tvm.IRModule:
    """The model with a function of TensorIR for each operator, and for pointwise ones with what they follow.

    Products read transposed weights as they lie, and stay apart from what follows: with a bias or a residual behind it
    a sum of the devices' terms could no longer be scattered.
    """
    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.FuseTransposeMatmul(),  # which fails at a transpose that two products read
        # Importers flatten tokens in front of each product that reads them: they are gathered once, not thrice.
        relax.transform.EliminateCommonSubexpr(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.LegalizeOps(),
        relax.transform.FoldConstant(),
        relax.transform.DeadCodeElimination(),
        relax.transform.AnnotateTIROpPattern(),
    ]
    module = tvm.transform.Sequential(passes)(model)
    for variable, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc) and _is_product(func):
            module[variable] = func.with_attr(_PATTERN, _OPAQUE)
    return tvm.transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])(module)


def _is_product(func: tirx.PrimFunc) -> bool:
    return any(pattern_of(block) is Pattern.CONTRACTION for block in all_blocks(func.body))


def graph_of(model: tvm.IRModule, name: str) -> Graph:
    """The function `name` of a legalized model.

    Raises
    ------
    LowerError
        If it isn't straight-line code over tensors of constant shapes; names the variable, what it is, and a remedy.
    """
    return _Reader(model, name).graph


class _Reader:
    def __init__(self, model: tvm.IRModule, name: str) -> None:
        self.model, self.graph = model, Graph(name)
        self.env: dict[relax.Var, int | tuple[int, ...]] = {}
        self.constants: list[tuple[ir.GenericConst, int]] = []
        source: relax.Function = model[name]
        attrs = source.attrs or {}
        inputs = int(attrs["num_input"]) if "num_input" in attrs else len(source.params)
        for at, param in enumerate(source.params):
            self.env[param] = self.new(param.name, param.ty, "input" if at < inputs else "weight", "parameter")
            self.graph.params.append(self.number(param))
        for block in source.body.blocks:
            for binding in block.bindings:
                self.bind(binding)
        self.graph.results = list(self.flat(source.body.body, "its result"))

    def number(self, value: relax.Expr) -> int:
        found = self.env[value]
        assert isinstance(found, int)
        return found

    def new(self, name: str, ty: ir.Type, kind: str, what: str) -> int:
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            raise LowerError(
                f"{self.graph.name}: {what} {name!r} is a {type(ty).__name__} without a shape; on a mesh values are "
                "tensors of known shapes"
            )
        shape = list(ty.shape)
        if not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise LowerError(
                f"{self.graph.name}: {what} {name!r} has the symbolic shape {shape}; on a mesh shapes are constant: "
                "export the model for the sizes that are run, or tvm.relax.transform.BindSymbolicVars"
            )
        self.graph.values.append(Value(name, tuple(map(int, shape)), str(ty.dtype), kind))
        return len(self.graph.values) - 1

    def bind(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value if isinstance(binding, relax.VarBinding) else binding
        if isinstance(value, relax.Var):
            self.env[var] = self.env[value]
        elif isinstance(value, relax.Tuple):
            self.env[var] = tuple(self.flat(value, f"variable {var.name!r}"))
        elif isinstance(value, relax.TupleGetItem):
            fields = self.env[value.tuple_value]
            assert isinstance(fields, tuple)
            self.env[var] = fields[value.index]
        elif isinstance(value, ir.GenericConst):
            self.env[var] = self.constant(value)
        elif isinstance(value, relax.Call):
            self.call(var, value)
        else:
            raise LowerError(
                f"{self.graph.name}: {var.name} is bound by a {type(value).__name__}; on a mesh a function is "
                "straight-line code of calls: compile what branches for one device, or lift it out of the function"
            )

    def call(self, var: relax.Var, value: relax.Call) -> None:
        is_tir = isinstance(value.op, ir.Op) and value.op.name == _CALL_TIR
        given = (
            [value.args[1]] if is_tir else [a for a in value.args if not isinstance(a, ir.GlobalVar | relax.ExternFunc)]
        )
        ins = tuple(number for argument in given for number in self.flat(argument, f"variable {var.name!r}"))
        fields = isinstance(var.ty, relax.TupleType)
        types = list(var.ty.fields) if fields else [var.ty]
        outs = tuple(self.new(var.name, ty, "value", "variable") for ty in types)
        self.env[var] = outs if fields else outs[0]
        func = self.model[value.args[0]] if is_tir else None
        if func is not None and len(func.params) != len(ins) + len(outs):
            func = None  # it takes numbers, too
        self.graph.nodes.append(Node(var.name, ins, outs, func, value, fields))

    def constant(self, value: ir.GenericConst) -> int:
        for other, number in self.constants:
            if other.same_as(value):
                return number
        number = self.new(f"constant_{len(self.constants)}", value.ty, "weight", "constant")
        old = self.graph.values[number]
        self.graph.values[number] = Value(old.name, old.shape, old.dtype, old.kind, value.value)
        self.constants.append((value, number))
        return number

    def flat(self, value: relax.Expr, what: str) -> Iterable[int]:
        """The numbers of the tensors that an expression is made of."""
        if isinstance(value, relax.Tuple):
            for each in value.fields:
                yield from self.flat(each, what)
        elif isinstance(value, ir.GenericConst):
            yield self.constant(value)
        elif isinstance(value, relax.Var) and value in self.env:
            found = self.env[value]
            yield from [found] if isinstance(found, int) else found
        elif isinstance(value, relax.ShapeExpr | ir.Constant | ir.StringImm):
            return
        else:
            raise LowerError(
                f"{self.graph.name}: {what} takes a {type(value).__name__}; on a mesh calls take tensors and constants"
            )
