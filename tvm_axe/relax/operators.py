"""The operators of a model on the devices of an axis: equal calls are one, and what devices do of it is made once."""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import tirx

from tvm_axe.collective.engine import Rates
from tvm_axe.lower.shares import shared
from tvm_axe.lower.told import RANK
from tvm_axe.relax.forms import blocks
from tvm_axe.relax.graph import Graph, Node
from tvm_axe.relax.holding import Holding
from tvm_axe.relax.kernels_of_shares import for_share
from tvm_axe.relax.objects import Attending, attends
from tvm_axe.relax.strategies import Operator
from tvm_axe.relax.transfers import Carrying, Transfer
from tvm_axe.relax.ways import Strategy

__all__ = ["Operators"]


class Operators:
    """The operators of a model on the devices of a mesh axis; equal functions are one.

    Parameters
    ----------
    devices : int
        How many the axis has.
    rates : Rates
        How fast they are.
    axis : str
        The axis, after which the device's coordinate is called in what devices do.
    deals_symbolic : bool
        Whether dimensions of symbolic extents are shared without a pin.
    """

    def __init__(self, devices: int, rates: Rates, axis: str = "", deals_symbolic: bool = True) -> None:
        self.devices, self.rates, self.axis, self.deals_symbolic = devices, rates, axis, deals_symbolic
        self.rank = tirx.Var(axis or RANK, "int64")
        self._known: dict[tuple[Any, ...], list[Operator]] = {}
        self._carrying: dict[Transfer, Carrying] = {}
        self._holding: dict[object, Holding] = {}
        self._attending: dict[tuple[int, int], Attending] = {}
        self._local: dict[object, tirx.PrimFunc] = {}

    def of_node(self, graph: Graph, node: Node) -> Operator | Carrying | Holding | Attending | None:
        """The operator that a call of a function is; None of what takes and gives whole values."""
        if node.pins is not None:
            value = graph.values[node.ins[0]]
            key = value.shape, value.typical, node.pins.get(self.axis, -1)
            if key not in self._holding:
                dims = [node.pins[self.axis]] if self.axis in node.pins else []
                self._holding[key] = Holding(*(blocks(*key[:2], dim, self.devices) for dim in dims))
            return self._holding[key]
        if attends(node.value):
            (_, packed, _), (_, heads, _) = (graph.values[number].typical for number in (node.ins[0], node.outs[0]))
            at = heads, (packed - heads) // 2
            if at not in self._attending:
                self._attending[at] = Attending(graph.name, *at, self.devices)
            return self._attending[at]
        if node.transfer is None:
            return None if node.func is None else self.of(node)
        if node.transfer not in self._carrying:
            self._carrying[node.transfer] = Carrying(node.transfer, self.rates.link)
        return self._carrying[node.transfer]

    def local(self, node: Node, strategy: Strategy) -> tirx.PrimFunc:
        """The function that a device runs of a call, in which its coordinate is free."""
        assert node.func is not None  # a call of a function has strategies that are more than whole
        if not strategy.assigned:
            return node.func
        operator = self.of(node)
        key = operator, strategy.assigned
        if key not in self._local:
            assigned = dict(strategy.assigned)
            func = shared(operator.func, operator.rule, assigned, self.devices, self.rank, operator.sizes)
            assert func is not None  # the strategy was made of shares
            self._local[key] = for_share(func, operator.func, self.rank)
        return self._local[key]

    def of(self, node: Node) -> Operator:
        """The operator that the function of a call is."""
        func, inputs, sizes, over = node.func, len(node.ins), node.sizes, node.overwrites
        assert func is not None  # it is a call of a function
        # What is equal but for the variables is another: shapes are counted in those of a function of the model. Of
        # functions of [b, n] and of [n, b] each is equal to the other, with its parameters' variables renamed.
        shapes = tuple(str(extent) for param in func.params if tirx.is_buffer_var(param) for extent in param.shape)
        same = self._known.setdefault((tvm_ffi.structural_hash(func), inputs, sizes, over, shapes), [])
        for operator in same:
            if tvm_ffi.structural_equal(operator.func, func):
                return operator
        same.append(Operator(func, inputs, self.devices, self.rates, sizes, self.deals_symbolic, over))
        return same[-1]
