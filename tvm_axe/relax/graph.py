"""A Relax function as values and the calls that make them: what is shared over a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import tvm
from tvm import relax, tirx

from tvm_axe.relax.forms import Forms
from tvm_axe.relax.objects import Cache
from tvm_axe.relax.sizes import Shape
from tvm_axe.relax.transfers import Transfer

__all__ = ["Count", "Graph", "Node", "Value"]


@dataclass(frozen=True)
class Value:
    """A tensor of the model.

    Attributes
    ----------
    name : str
        Its variable's; ``constant_0`` and so on of constants.
    shape, dtype
        What it is.
    typical : tuple[int, ...]
        What its shape is taken to be where costs are compared.
    kind : "input", "weight" or "value"
        Whether a call of the model brings it, it is the same in all calls, or it is computed.
    constant : Tensor or None
        What it is, of a constant; all of it, also where a device has a part.
    whole : tuple
        Its shape in the model, of which a device has what `forms` say.
    forms : Forms
        How it lies along the mesh axes that are decided; `shape` is what they leave of it.
    param : int or None
        The number of the model's parameter that it is, or holds in a form.
    pins : Mapping[str, int or None]
        Which dimension is to be shared along an axis in blocks, None for none; along other axes it is free.
    """

    name: str
    shape: Shape
    dtype: str
    kind: str
    typical: tuple[int, ...]
    constant: tvm.runtime.Tensor | None = None
    whole: Shape = ()
    forms: Forms = ()
    param: int | None = None
    pins: Mapping[str, int | None] = field(default_factory=dict, hash=False)

    @property
    def size(self) -> int:
        """How many elements it has, typically."""
        return math.prod(self.typical)


@dataclass(frozen=True)
class Node:
    """A call: of a function of TensorIR, which is `func`, or of anything else, which takes and gives whole values.

    Of what devices along outer mesh axes do it may be a move between them, which is `transfer`; and of the operations
    of a call of the model, `left` is what they have left to a device.
    A function is one of tensors alone; the variables of the graph's sizes, in which their shapes are counted, are free
    in it.

    Attributes
    ----------
    takes : tuple[str, ...]
        The objects that it takes, by name, in order.
    makes : str
        The object that it makes, and `cache` what that is.
    sizes : tuple of (Var, int)
        What those that the function has typically are.
    overwrites : int
        How many values, the last ones that it takes, it stores to: these are what it gives, and nothing else is. The
        function has one parameter for each.
    """

    name: str
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    func: tirx.PrimFunc | None
    value: relax.Expr | None
    fields: bool = False
    """Whether it gives a tuple."""
    transfer: Transfer | None = None
    left: float = 1.0
    pins: Mapping[str, int | None] | None = None
    """Of what leaves its value as it is, but for a form: which dimension is shared along an axis."""
    sizes: tuple[tuple[tirx.Var, int], ...] = ()
    overwrites: int = 0
    takes: tuple[str, ...] = ()
    makes: str = ""
    cache: Cache | None = None


class Count(NamedTuple):
    """A parameter that is a ``"shape"``, a ``"number"`` or an ``"object"``: where it is among all, its name, and the
    extents of the former."""

    position: int
    name: str
    kind: str
    extents: Shape


@dataclass
class Graph:
    """A function of the model: values by number, calls in order, and which values it takes and returns.

    Attributes
    ----------
    sizes : dict[str, Var]
        The variables that shapes are counted in, by name.
    typical : dict[str, int]
        What each is taken to be where costs are compared.
    most : dict[str, int]
        The upper bounds that the function says of them (``tir_var_upper_bound``).
    counts : list[Count]
        The parameters that are no tensors.
    checks : list of (Shape, Shape, str)
        Shapes that the function says to be others, with the variable that it says it of.
    apart : tuple[str, ...]
        Which attentions no kernel computes, and why.
    left : list of (int, str)
        The objects that it returns: where each is among all results, and its name.
    """

    name: str
    values: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    params: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    sizes: dict[str, tirx.Var] = field(default_factory=dict)
    typical: dict[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    counts: list[Count] = field(default_factory=list)
    checks: list[tuple[Shape, Shape, str]] = field(default_factory=list)
    apart: tuple[str, ...] = ()
    left: list[tuple[int, str]] = field(default_factory=list)
