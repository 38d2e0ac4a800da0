"""Extents of a model's tensors that calls decide: counted in sizes, the model's variables by name.

>>> from tvm import tirx
>>> rows = Extent.of(tirx.Var("n", "int64") * 2 + 1)
>>> print(rows, rows.names, rows.at({"n": 64}))
n * 2 + 1 ('n',) 129
>>> rows.line
(2, 1)
>>> shape_at((4, rows), {"n": 64})
(4, 129)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tvm import ir, relax, tirx
from tvm.ir import IRModule
from tvm.sym import Analyzer

from tvm_axe.analysis.expressions import substitute, variables_of
from tvm_axe.analysis.sizes import number
from tvm_axe.errors import InputError
from tvm_axe.lower.told import part_of

__all__ = [
    "TYPICAL",
    "Extent",
    "Shape",
    "check_known",
    "defines",
    "exprs",
    "names_in",
    "shape_at",
    "shape_of",
    "typical_of",
]

TYPICAL = 128
"""What a size is taken to be where costs are compared, if nothing says another."""


@dataclass(frozen=True)
class Extent:
    """An extent that is no constant. Extents of one text are equal: in a function each name is one variable's.

    Attributes
    ----------
    text : str
        The extent in words.
    expr : Expr
        The same of the function's variables.
    names : tuple[str, ...]
        The sizes that it depends on.
    """

    text: str
    expr: tirx.Expr = field(compare=False, repr=False)
    names: tuple[str, ...] = field(compare=False)

    @classmethod
    def of(cls, expr: tirx.Expr) -> Extent:
        """Return the extent that an expression is."""
        names = tuple(sorted(str(var.name) for var in variables_of(expr)))
        return cls(re.sub(r"T\.int\d+\((-?\d+)\)", r"\1", str(expr)), expr, names)

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return what it is at some sizes, which have all of its names."""
        found = number(self.expr, {var: sizes[str(var.name)] for var in variables_of(self.expr)})
        if found is None:
            raise InputError(f"an extent of {self.text} isn't arithmetic; give the tensor's shape by a size of its own")
        return found

    @cached_property
    def line(self) -> tuple[int, int] | None:
        """The numbers `a` and `b` of an extent that is ``a * n + b`` with a positive `a`; None if it isn't."""
        if len(self.names) != 1:
            return None
        (variable,) = variables_of(self.expr)
        analyzer, at = Analyzer(), []
        for n in range(2):
            found = analyzer.simplify(substitute(self.expr, {variable: tirx.const(n, variable.ty)}))
            if not isinstance(found, tirx.IntImm):
                return None
            at.append(int(found))
        factor, offset = at[1] - at[0], at[0]
        is_line = factor > 0 and analyzer.can_prove_equal(self.expr, variable * factor + offset)
        return (factor, offset) if is_line else None

    def part(self, devices: int) -> Extent:
        """Return how many indices each of some devices has of it, dealt out in blocks."""
        return Extent.of(part_of(self.expr, devices))

    def __str__(self) -> str:
        return self.text


Shape = tuple[int | Extent, ...]
"""The extents of a tensor."""


def shape_at(shape: Sequence[int | Extent], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return what a shape is at some sizes."""
    return tuple(extent if isinstance(extent, int) else extent.at(sizes) for extent in shape)


def shape_of(extents: Sequence[tirx.Expr]) -> Shape:
    """Return extents that are counted in the variables of sizes as a shape."""
    return tuple(int(extent) if isinstance(extent, tirx.IntImm) else Extent.of(extent) for extent in extents)


def names_in(shape: Sequence[int | Extent]) -> tuple[str, ...]:
    """Return the sizes that a shape depends on."""
    return tuple(dict.fromkeys(name for extent in shape if isinstance(extent, Extent) for name in extent.names))


def exprs(shape: Sequence[int | Extent]) -> list[tirx.Expr]:
    """Return the extents of a shape as expressions."""
    return [tirx.IntImm("int64", extent) if isinstance(extent, int) else extent.expr for extent in shape]


def typical_of(names: Sequence[str], given: Mapping[str, int], most: Mapping[str, int]) -> dict[str, int]:
    """Return what each size is taken to be: what is given, or `TYPICAL`, or the upper bound if that is less."""
    return {name: given.get(name, min(TYPICAL, most.get(name, TYPICAL))) for name in names}


def defines(param: relax.Var) -> list[tirx.Var]:
    """The variables that become known by a parameter."""
    ty = param.ty
    if isinstance(ty, ir.PrimType):
        return [param]
    values = ty.shape if isinstance(ty, relax.TensorType) else ty.values if isinstance(ty, relax.ShapeType) else None
    return [] if values is None else [extent for extent in values if isinstance(extent, tirx.Var)]


def check_known(model: IRModule) -> None:
    """Refuse functions with sizes that no call says.

    Raises
    ------
    InputError
        A parameter's extent is made of a variable that isn't the extent of any, such as ``2 * n``.
    """
    for name, func in model.functions_items():
        if not isinstance(func, relax.Function) or "global_symbol" not in (func.attrs or {}):
            continue  # it isn't called from outside
        known = {each for param in func.params for each in defines(param)}
        for param in func.params:
            shape = param.ty.shape if isinstance(param.ty, relax.TensorType) else None
            for extent in shape if isinstance(shape, relax.ShapeExpr) else ():
                unknown = [str(variable.name) for variable in variables_of(extent) if variable not in known]
                if unknown:
                    raise InputError(
                        f"{name.name_hint}: parameter {str(param.name)!r} has the extent {extent}, and {unknown[0]} "
                        "isn't the extent of any parameter, so no call says what it is; make it a parameter "
                        "(R.Shape), or import the model with this dimension known, or with one that isn't a multiple"
                    )
