"""What the functions of a model take and return, in a form that outlives the model: read off it, written to files.

>>> from tvm.relax.frontend import nn
>>> class Scale(nn.Module):
...     def __init__(self):
...         self.weight = nn.Parameter((8,), "float32")
...     def forward(self, x: nn.Tensor):
...         return x * self.weight
>>> mod, _ = Scale().export_tvm({"forward": {"x": nn.spec.Tensor(["n", 8], "float32")}})
>>> (forward,) = signatures(mod)
>>> print(forward)
forward(x: float32[n, 8]; weight: float32[8]) -> gv
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import tvm
from tvm import relax, tirx
from tvm.relax.distributed import DTensorType

from tvm_axe.executable.arguments import Extents, Input
from tvm_axe.executable.coding import decoded, encoded
from tvm_axe.relax.sizes import Extent

__all__ = ["Param", "Signature", "signatures"]

ARRAY, SHAPE, NUMBER, TUPLE, OBJECT = "array", "shape", "number", "tuple", "object"


class Param(NamedTuple):
    """A parameter of a function of a model.

    Attributes
    ----------
    name : str
        Its name in the model.
    kind : str
        ``"array"``, ``"shape"`` (a tuple of extents), ``"number"``, ``"tuple"``, or ``"object"`` of whatever else.
    shape : tuple of int, str, Extent or None
        The extents of an array or a shape, or their names, or what they are of sizes that have names; None where an
        extent may be any. A shape of None has any number of extents.
    dtype : str
        The type of an array or a number; empty where it may be any.
    fields : tuple[Param, ...]
        What a tuple has.
    """

    name: str
    kind: str
    shape: Extents | None = None
    dtype: str = ""
    fields: tuple[Param, ...] = ()

    @classmethod
    def of(cls, name: str, kind: Any) -> Param:
        """The parameter of a name and a Relax type; of a distributed tensor, which callers give whole."""
        if isinstance(kind, DTensorType):
            kind = kind.tensor_ty
        if isinstance(kind, relax.TensorType):
            shape = kind.shape
            extents = tuple(map(_extent, shape.values)) if isinstance(shape, relax.ShapeExpr) else None
            if extents is None and kind.ndim >= 0:
                extents = (None,) * kind.ndim
            return cls(name, ARRAY, extents, "" if kind.dtype is None else str(kind.dtype))
        if isinstance(kind, relax.ShapeType):
            extents = None if kind.values is None else tuple(map(_extent, kind.values))
            return cls(name, SHAPE, extents or ((None,) * kind.ndim if kind.ndim >= 0 else None))
        if isinstance(kind, relax.TupleType):
            fields = tuple(cls.of(f"{name}[{n}]", field) for n, field in enumerate(kind.fields))
            return cls(name, TUPLE, fields=fields)
        if isinstance(kind, tvm.ir.PrimType):
            return cls(name, NUMBER, (), str(kind.dtype))
        return cls(name, OBJECT)

    @classmethod
    def parse(cls, data: Any) -> Param:
        """What JSON made of a parameter."""
        name, kind, shape, dtype, fields = data
        return cls(str(name), str(kind), decoded(shape), str(dtype), tuple(map(cls.parse, fields)))

    def _saved(self) -> list[Any]:
        """What `parse` reads, in what JSON can hold."""
        return [self.name, self.kind, encoded(self.shape), self.dtype, [field._saved() for field in self.fields]]

    def as_input(self) -> Input | None:
        """The same for who takes arrays of a known number of dimensions only; None if it is something else."""
        if self.kind != ARRAY or self.shape is None:
            return None
        return Input(self.name, self.shape, self.dtype)

    def __str__(self) -> str:
        if self.kind == TUPLE:
            return f"{self.name}: ({', '.join(str(field).partition(': ')[2] for field in self.fields)})"
        extents = "..." if self.shape is None else ", ".join("any" if e is None else str(e) for e in self.shape)
        if self.kind == ARRAY:
            return f"{self.name}: {self.dtype or 'any'}[{extents}]"
        return f"{self.name}: {f'shape({extents})' if self.kind == SHAPE else self.dtype or self.kind}"


class Signature(NamedTuple):
    """What a function of a model takes and returns.

    Attributes
    ----------
    name : str
        The function's name.
    params : tuple[Param, ...]
        Its parameters.
    outputs : tuple[str, ...]
        The names of its results.
    num_input : int or None
        How many of the parameters are inputs; those behind them are weights. None where the model doesn't say.
    nesting : None or tuple
        How results are put together: None for a value, a tuple of such for a tuple.
    """

    name: str
    params: tuple[Param, ...]
    outputs: tuple[str, ...]
    num_input: int | None
    nesting: Any = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Signature:
        """What JSON made of a signature."""
        count = data["num_input"]
        return cls(
            str(data["name"]),
            tuple(map(Param.parse, data["params"])),
            tuple(map(str, data["outputs"])),
            None if count is None else int(count),
            _tuples(data["nesting"]),
        )

    def saved(self) -> dict[str, Any]:
        """What `parse` reads, in what JSON can hold."""
        return self._asdict() | {"params": [each._saved() for each in self.params]}

    @property
    def inputs(self) -> tuple[Input, ...] | None:
        """All that it takes, if these are arrays of known dimensions; None otherwise."""
        found = [each.as_input() for each in self.params]
        known = tuple(each for each in found if each is not None)
        return known if len(known) == len(found) else None

    def __str__(self) -> str:
        count = len(self.params) if self.num_input is None else self.num_input
        inputs, weights = (", ".join(map(str, part)) for part in (self.params[:count], self.params[count:]))
        return f"{self.name}({inputs}{'; ' if weights else ''}{weights}) -> {', '.join(self.outputs)}"


def signatures(model: tvm.IRModule) -> tuple[Signature, ...]:
    """Those of the functions of a Relax model that can be called, as it was given."""
    found = []
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function) and not (func.attrs and "Primitive" in func.attrs):
            attrs = dict(func.attrs.items()) if func.attrs else {}
            count = int(attrs["num_input"]) if "num_input" in attrs else None
            params = tuple(Param.of(str(param.name), param.ty) for param in func.params)
            name, nesting = str(variable.name_hint), _nesting(func.body.body.ty)
            found.append(Signature(name, params, tuple(_results(func)), count, nesting))
    return tuple(found)


def _extent(extent: tirx.Expr) -> int | str | Extent:
    """An extent, its name if it is a variable, what it is if it is computed of such."""
    if isinstance(extent, tirx.IntImm):
        return int(extent)
    return str(extent.name) if isinstance(extent, tirx.Var) else Extent.of(extent)


def _nesting(kind: Any) -> Any:
    return tuple(map(_nesting, kind.fields)) if isinstance(kind, relax.TupleType) else None


def _tuples(data: Any) -> Any:
    """What JSON made a list of."""
    return tuple(map(_tuples, data)) if isinstance(data, list) else None


def _results(func: relax.Function) -> list[str]:
    """The names of what a function returns, or numbers where these have none."""
    values = {binding.var: binding.value for block in func.body.blocks for binding in block.bindings}
    found: list[str] = []

    def visit(value: relax.Expr) -> None:
        bound = values.get(value) if isinstance(value, relax.Var) else None
        fields = value if isinstance(value, relax.Tuple) else bound
        if isinstance(fields, relax.Tuple):
            for each in fields.fields:
                visit(each)
        else:
            found.append(str(value.name) if isinstance(value, relax.Var) else f"output_{len(found)}")

    visit(func.body.body)
    return found
