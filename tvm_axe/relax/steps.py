"""What a device does for a function of a model, in order: kernels, collectives and other calls, and on what.

A step says which values it takes and leaves, each in a form, and no more: where these lie, and which barriers stand
between steps, is decided when the steps are known (`tvm_axe.relax.device`), so that steps may be put together first
(`tvm_axe.relax.fusing`). Each value is left in each form once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from tvm_axe.collective import SLAB
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.shares import shared
from tvm_axe.lower.taking import taking
from tvm_axe.relax.choosing import Choice, Chosen, Moved, Operators
from tvm_axe.relax.forms import EXCHANGE, SLICE, WHOLE, Form
from tvm_axe.relax.graph import Graph, Node

__all__ = ["Mover", "Spot", "Step", "Touch", "numbers_of", "steps_of"]

Spot = tuple[int, Form]
"""A value, by its number, in a form."""

_PULLS = {Collective.REDUCE_SCATTER.operation, Collective.ALL_TO_ALL.operation, Collective.ALL_REDUCE.operation}
"""The collectives by which devices read their peers' slabs of the source."""
_PUSHES = {Collective.ALL_GATHER.operation, Collective.ALL_REDUCE.operation}
"""The collectives by which devices write to their peers' slabs of the target."""


@dataclass(frozen=True)
class Touch:
    """What a step does with a value in a form: through which view, and whether it leaves it."""

    spot: Spot
    view: str
    writes: bool


@dataclass(frozen=True, eq=False)
class Step:
    """A kernel, if it has a function; a collective, if it has a kind; else another call of the model.

    Attributes
    ----------
    name : str
        What it is called.
    ins, outs : tuple[Spot, ...]
        What it takes and leaves.
    views : tuple[str, ...]
        Through which view it touches each: its own slab, or those of all along an axis.
    func : PrimFunc or None
        Of the ins, the device's number if it asks for it, and the outs.
    kind : str
        The collective's operation.
    node : Node or None
        The model's call.
    moves : tuple[str, ...]
        Of a kernel, what is moved between devices by it, in words.
    """

    name: str
    ins: tuple[Spot, ...]
    outs: tuple[Spot, ...]
    views: tuple[str, ...]
    func: tirx.PrimFunc | None = None
    kind: str = ""
    node: Node | None = None
    moves: tuple[str, ...] = ()

    def touches(self) -> list[Touch]:
        """What it does with each of the values."""
        spots = [*((spot, False) for spot in self.ins), *((spot, True) for spot in self.outs)]
        return [Touch(spot, view, writes) for (spot, writes), view in zip(spots, self.views)]


@dataclass(frozen=True)
class Mover:
    """Makes kernels that move values of a function between devices.

    Attributes
    ----------
    graph : Graph
        The function.
    mesh, axis
        The devices, and the axis along which they share.
    page : int
        Bytes of a page of their memory.
    """

    graph: Graph
    mesh: Mesh
    axis: str
    page: int

    def taken(self, source: Spot, target: Spot, view: str) -> Step:
        """The kernel by which a device takes what it is to hold out of the slabs in a view."""
        value = self.graph.values[source[0]]
        cuts = [None if f.share is None or f.dim is None else (f.dim, f.share) for f in (source[1], target[1])]
        func = taking(
            value.shape, value.dtype, cuts[0], cuts[1], source[1].partial, self.mesh, self.axis, view, self.page
        )
        return Step(f"{value.name}_taken", (source,), (target,), (view, SLAB), func)


def steps_of(chosen: Chosen, operators: Operators, mover: Mover) -> list[Step]:
    """The steps of a function, as its values are shared.

    Parameters
    ----------
    chosen : Chosen
        How they are.
    operators : Operators
        What they were chosen by.
    mover : Mover
        Of the function.
    """
    there: set[Spot] = {(value, form) for value, forms in chosen.held.items() for form in forms}
    found = []
    for step in _all(chosen, operators, mover):
        # What a device has kept it needs no move for.
        if step.node is None and there.issuperset(step.outs):
            continue
        there.update(step.outs)
        found.append(step)
    return found


def _all(chosen: Chosen, operators: Operators, mover: Mover) -> Iterator[Step]:
    known: dict[object, tirx.PrimFunc] = {}
    for choice in chosen.choices:
        for each in choice.moves:
            yield _moved(each, mover)
        yield _called(choice, operators, known)


def _called(choice: Choice, operators: Operators, known: dict[object, tirx.PrimFunc]) -> Step:
    node, strategy = choice.node, choice.strategy
    ins = tuple(zip(node.ins, strategy.ins))
    views = (SLAB,) * (len(node.ins) + len(node.outs))
    if node.func is None:
        return Step(node.name, ins, tuple((out, WHOLE) for out in node.outs), views, node=node)
    operator = operators.of(node.func, len(node.ins))
    key = operator, strategy.assigned
    if key not in known:  # of equal layers, one function
        local = shared(operator.func, operator.rule, dict(strategy.assigned), operators.devices)
        assert local is not None  # the strategy was made of shares
        known[key] = local
    func = known[key]
    name = str(node.value.args[0].name_hint)
    return Step(name, ins, tuple(zip(node.outs, strategy.outs)), views, func, node=node)


def _moved(each: Moved, mover: Mover) -> Step:
    source, target = (each.value, each.source), (each.value, each.target)
    kind = each.how.kind
    if kind in (SLICE, EXCHANGE):
        return mover.taken(source, target, SLAB if kind == SLICE else mover.axis)
    views = mover.axis if kind in _PULLS else SLAB, mover.axis if kind in _PUSHES else SLAB
    return Step(kind, (source,), (target,), views, kind=kind)


def numbers_of(step: Step) -> list[int]:
    """The dimensions that a collective is told: which it puts together, then which it deals out."""
    ((_, source),), ((_, target),) = step.ins, step.outs
    dims: Sequence[int | None] = {
        Collective.ALL_GATHER.operation: [source.dim],
        Collective.REDUCE_SCATTER.operation: [target.dim],
        Collective.ALL_TO_ALL.operation: [source.dim, target.dim],
    }.get(step.kind, [])
    return [dim for dim in dims if dim is not None]
