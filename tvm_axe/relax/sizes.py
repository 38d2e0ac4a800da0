"""Extents of a model's tensors that calls decide: counted in sizes, the model's variables by name.

>>> from tvm import tirx
>>> rows = Extent.of(tirx.Var("n", "int64") * 2 + 1)
>>> print(rows, rows.names, rows.at({"n": 64}))
n * 2 + 1 ('n',) 129
>>> shape_at((4, rows), {"n": 64})
(4, 129)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx

from tvm_axe.analysis.expressions import variables_of
from tvm_axe.analysis.sizes import number
from tvm_axe.errors import InputError
from tvm_axe.lower.told import part_of

__all__ = ["TYPICAL", "Extent", "Shape", "exprs", "names_in", "shape_at", "shape_of", "typical_of"]

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
