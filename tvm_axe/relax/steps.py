"""What a device does for a function of a model, in order: kernels, collectives and other calls, and on what.

A step says which values it takes and leaves, each in a form, and no more: where these lie, and which barriers stand
between steps, is decided when the steps are known (`tvm_axe.relax.emitting`), so that steps may be put together first
(`tvm_axe.relax.fusing`). Each value is left in each form once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax, tirx

from tvm_axe.collective import SLAB
from tvm_axe.layout import Link, Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.lower.taking import giving, taking
from tvm_axe.relax.chosen import Chosen
from tvm_axe.relax.forms import EXCHANGE, SLICE, Form
from tvm_axe.relax.graph import Graph, Node
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.sizes import exprs
from tvm_axe.relax.transfers import Transfer

__all__ = ["COPIES", "JOIN", "Mover", "Spot", "Step", "Touch", "numbers_of", "steps_of"]

Spot = tuple[int, Form]
"""A value, by its number, in a form."""

COPIES, JOIN = "copies", "join"
"""What isn't a collective either: a device's own engines begin to copy to its peers, or have done so
(`tvm_axe.relax.beside`)."""

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
        Of the ins and the outs; the device's coordinates are free in it, and the sizes that shapes are counted in.
    kind : str
        The collective's operation, or one of `COPIES` and `JOIN`.
    transfer : Transfer or None
        What a collective moves, or a kernel that is nothing else in its place.
    node : Node or None
        The model's call.
    moves : tuple[str, ...]
        Of a kernel, what is moved between devices by it, in words.
    over : tuple[Spot, ...]
        The values in whose places it leaves the outs: what it stores to. It takes these, too.
    copies : tuple of tuple of int
        The numbers of each of the `COPIES` (`tvm_axe.collective.side`), from what it takes to what it leaves.
    """

    name: str
    ins: tuple[Spot, ...]
    outs: tuple[Spot, ...]
    views: tuple[str, ...]
    func: tirx.PrimFunc | None = None
    kind: str = ""
    transfer: Transfer | None = None
    node: Node | None = None
    moves: tuple[str, ...] = ()
    over: tuple[Spot, ...] = ()
    copies: tuple[tuple[int, ...], ...] = ()

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
    mesh : Mesh
        The devices.
    page : int
        Bytes of a page of their memory.
    ranks : Mapping[str, Var]
        What the device's coordinate along each axis is called in kernels.
    """

    graph: Graph
    mesh: Mesh
    page: int
    ranks: Mapping[str, tirx.Var]

    @property
    def _sizes(self) -> tuple[tirx.Var, ...]:
        return tuple(self.graph.sizes.values())

    def taken(self, source: Spot, target: Spot, transfer: Transfer, view: str) -> Step:
        """The kernel by which a device takes what it is to hold out of the slabs in a view."""
        value, axis = self.graph.values[source[0]], transfer.axis
        func = _taking(transfer, value.dtype, self.mesh, view, self.page, self.ranks[axis], self._sizes)
        moved = None if view == SLAB else transfer
        return Step(f"{value.name}_taken", (source,), (target,), (view, SLAB), func, transfer=moved)

    def given(self, source: Spot, target: Spot, transfer: Transfer) -> Step:
        """The kernel by which a device stores what it holds of a value to every device."""
        value, axis = self.graph.values[source[0]], transfer.axis
        func = _giving(transfer, value.dtype, self.mesh, self.page, self.ranks[axis], self._sizes)
        return Step("given", (source,), (target,), (SLAB, axis), func)


# Equal layers move equal values: what they move them by is one function. Shapes are counted in the same sizes there.


@functools.lru_cache(maxsize=1024)
def _taking(
    transfer: Transfer, dtype: str, mesh: Mesh, view: str, page: int, rank: tirx.Var, _sizes: tuple[tirx.Var, ...]
) -> tirx.PrimFunc:
    source, target = transfer.source, transfer.target
    return taking(
        exprs(transfer.shape), dtype, source.cut, target.cut, source.partial, mesh, transfer.axis, view, page, rank
    )


@functools.lru_cache(maxsize=1024)
def _giving(
    transfer: Transfer, dtype: str, mesh: Mesh, page: int, rank: tirx.Var, _sizes: tuple[tirx.Var, ...]
) -> tirx.PrimFunc:
    cut = transfer.source.cut
    assert cut is not None  # it is gathered
    return giving(exprs(transfer.shape), dtype, cut, mesh, transfer.axis, page, rank)


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
    for choice in chosen.choices:
        for each in choice.moves:
            value = chosen.graph.values[each.value]
            transfer = Transfer(
                operators.axis, each.source, each.target, value.shape, value.typical,
                max(1, dtype_bytes(value.dtype, 1)), operators.devices,
            )  # fmt: skip
            yield _moved((each.value, each.source), (each.value, each.target), transfer, chosen.link, mover)
        node, strategy = choice.node, choice.strategy
        if node.pins is not None:
            continue  # what pins a value has moved it
        ins, outs = tuple(zip(node.ins, strategy.ins)), tuple(zip(node.outs, strategy.outs))
        if choice.transfer is not None:
            yield _moved(ins[0], outs[0], choice.transfer, chosen.link, mover)
            continue
        over, ins = ins[len(ins) - node.overwrites :], ins[: len(ins) - node.overwrites]
        views = (SLAB,) * (len(ins) + len(outs))
        if node.func is None:
            yield Step(node.name, ins, outs, views, node=node)
            continue
        assert isinstance(node.value, relax.Call)  # it is a call of the model
        name = str(node.value.args[0].name_hint)
        yield Step(name, ins, outs, views, operators.local(node, strategy), node=node, over=over)


def _moved(source: Spot, target: Spot, transfer: Transfer, link: Link, mover: Mover) -> Step:
    kind, axis = transfer.how(link).kind, transfer.axis
    if kind in (SLICE, EXCHANGE):
        return mover.taken(source, target, transfer, SLAB if kind == SLICE else axis)
    views = axis if kind in _PULLS else SLAB, axis if kind in _PUSHES else SLAB
    return Step(kind, (source,), (target,), views, kind=kind, transfer=transfer)


def numbers_of(step: Step) -> list[int]:
    """The dimensions that a collective is told: which it puts together, then which it deals out."""
    assert step.transfer is not None  # it is a collective
    source, target = step.transfer.source, step.transfer.target
    dims: Sequence[int | None] = {
        Collective.ALL_GATHER.operation: [source.dim],
        Collective.REDUCE_SCATTER.operation: [target.dim],
        Collective.ALL_TO_ALL.operation: [source.dim, target.dim],
    }.get(step.kind, [])
    return [dim for dim in dims if dim is not None]
