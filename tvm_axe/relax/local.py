"""What a device along one mesh axis does of a function, as a function that can be shared along the next axis.

Its values are what the device holds in each form, its calls those of the function on the device's part, and what is
moved between devices is a call, too. The coordinate along the axis is a free variable of what depends on it.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.relax.chosen import Choice, Chosen, Moved
from tvm_axe.relax.forms import Form
from tvm_axe.relax.graph import Graph, Node
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.transfers import Transfer

__all__ = ["local_graph"]


def local_graph(chosen: Chosen, operators: Operators) -> Graph:
    """The function that each device along an axis runs.

    Parameters
    ----------
    chosen : Chosen
        How the function is shared along the axis.
    operators : Operators
        What it was chosen by.
    """
    return _Local(chosen, operators).graph


class _Local:
    def __init__(self, chosen: Chosen, operators: Operators) -> None:
        self.of, self.operators = chosen.graph, operators
        of = chosen.graph
        self.graph = Graph(
            of.name,
            sizes=of.sizes,
            typical=of.typical,
            most=of.most,
            counts=of.counts,
            checks=of.checks,
            apart=of.apart,
            left=of.left,
        )
        self.numbers: dict[tuple[int, Form], int] = {}
        params = set(self.of.params)
        for number, forms in chosen.held.items():
            made = [self.new(number, form) for form in forms]
            if number in params:
                self.graph.params += made
        for choice in chosen.choices:
            for each in choice.moves:
                self.move(each)
            self.call(choice)
        self.graph.results = [self.numbers[key] for key in zip(self.of.results, chosen.results)]

    def new(self, number: int, form: Form) -> int:
        """A new value: what a device holds of one in a form."""
        value = self.of.values[number]
        forms = (*value.forms, (self.operators.axis, form))
        self.graph.values.append(
            replace(value, shape=form.local(value.shape), typical=form.local(value.typical), forms=forms)
        )
        self.numbers[number, form] = len(self.graph.values) - 1
        return self.numbers[number, form]

    def move(self, each: Moved) -> None:
        value = self.of.values[each.value]
        itemsize = max(1, dtype_bytes(value.dtype, 1))
        transfer = Transfer(
            self.operators.axis, each.source, each.target, value.shape, value.typical, itemsize, self.operators.devices
        )
        source = self.numbers[each.value, each.source]
        self.graph.nodes.append(
            Node(value.name, (source,), (self.new(each.value, each.target),), None, None, transfer=transfer)
        )

    def call(self, choice: Choice) -> None:
        node, strategy = choice.node, choice.strategy
        ins = tuple(self.numbers[key] for key in zip(node.ins, strategy.ins))
        if node.transfer is not None:
            node = replace(node, transfer=choice.transfer)
        if node.func is not None:
            node = replace(node, func=self.operators.local(node, strategy))
        outs = tuple(self.new(*key) for key in zip(node.outs, strategy.outs))
        self.graph.nodes.append(replace(node, ins=ins, outs=outs, left=node.left * strategy.share))
