"""Kernels of products whose terms devices have twice: what another device counts is zero in front of the kernel.

Where devices don't divide the groups of a weight's codes their shares overlap, and a function of blocks leaves out the
terms that are another's (`tvm_axe.lower.owning`). A kernel counts all that it is given. So the device's part of the
product's other side becomes a value of its own, which has zeros in these places, and the kernel multiplies that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm import te, tirx

from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.expressions import substitute, uses
from tvm_axe.lower.owning import owns
from tvm_axe.relax.chosen import Choice, Chosen
from tvm_axe.relax.forms import WHOLE
from tvm_axe.relax.graph import Value
from tvm_axe.relax.kernels_of_shares import blocks_of_product, is_decoding, said_of_share
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.sizes import shape_at, shape_of
from tvm_axe.relax.ways import Strategy

__all__ = ["with_counted_terms"]


def with_counted_terms(chosen: Chosen, operators: Operators) -> Chosen:
    """What was chosen for a function, with a call in front of each product with a weight of few bits that needs one.

    Parameters
    ----------
    chosen : Chosen
        How the function is shared along an axis.
    operators : Operators
        What it was chosen by.
    """
    values, choices = list(chosen.graph.values), list[Choice]()
    for choice in chosen.choices:
        choices += _in_two(choice, operators, values, chosen) or [choice]
    if len(choices) == len(chosen.choices):
        return chosen
    return replace(chosen, graph=replace(chosen.graph, values=values), choices=tuple(choices))


def _in_two(choice: Choice, operators: Operators, values: list[Value], chosen: Chosen) -> list[Choice]:
    """A call as one that counts and one of a kernel; empty if it needs no counting, or there is no kernel of it."""
    node, strategy = choice.node, choice.strategy
    if node.func is None or not is_decoding(node.func) or not strategy.assigned:
        return []
    local, share = operators.local(node, strategy), strategy.ins[0].share
    said = said_of_share(local, node.func)
    if not uses(local.body, operators.rank) or share is None or strategy.ins[0].dim != 1 or said is None:
        return []
    problem = {key.removeprefix(f"{KERNEL}."): value for key, value in said.items()}
    # The same blocks without those conditions: what of it is the device's own is decided before.
    kernel = blocks_of_product(local, problem).with_attrs(said)
    rows, terms = local.params[0].shape
    dtype = str(local.params[0].dtype)
    x = te.placeholder((rows, terms), dtype, "x")

    def own(r: tirx.Expr, i: tirx.Expr) -> Any:
        return tirx.if_then_else(owns(operators.rank, i, share), x[r, i], tirx.const(0, dtype))

    counted = te.compute((rows, terms), own, "counted")
    func = te.create_prim_func([x, operators.rank, counted], "int64").without_attr("global_symbol")
    source, rank, target = func.params
    func = tirx.PrimFunc([source, target], substitute(func.body, {rank: operators.rank}), func.ret_type, func.attrs)
    shape = shape_of(func.params[1].shape)
    known = shape_at(shape, chosen.graph.typical)
    values.append(Value(f"{node.name}_counted", shape, dtype, "value", known, None, shape))
    number = len(values) - 1
    first, *others = node.ins
    here, *theirs = strategy.ins
    before = replace(node, name=f"{node.name}_counted", func=func, ins=(first,), outs=(number,))
    after = replace(node, func=kernel, ins=(number, *others))
    return [
        Choice(before, Strategy((here,), (WHOLE,)), choice.moves),
        Choice(after, Strategy((WHOLE, *theirs), strategy.outs, strategy.seconds, strategy.share), ()),
    ]
