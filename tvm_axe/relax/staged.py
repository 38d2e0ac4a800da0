"""Calls that combine something between devices inside become several calls, with moves between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tvm_axe.lower.stages import pieces
from tvm_axe.relax.chosen import Choice, Chosen, Moved
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.graph import Value
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.sizes import shape_at, shape_of
from tvm_axe.relax.ways import Strategy

__all__ = ["in_pieces"]


def in_pieces(chosen: Chosen, operators: Operators) -> Chosen:
    """What was chosen for a function, with each call in pieces that has stages (`tvm_axe.relax.ways.Stage`).

    Parameters
    ----------
    chosen : Chosen
        How the function is shared along an axis.
    operators : Operators
        What it was chosen by.
    """
    if not any(choice.strategy.stages for choice in chosen.choices):
        return chosen
    values, choices = list(chosen.graph.values), list[Choice]()
    for choice in chosen.choices:
        choices += _pieces(choice, operators, values, chosen.graph.typical) if choice.strategy.stages else [choice]
    return replace(chosen, graph=replace(chosen.graph, values=values), choices=tuple(choices))


def _pieces(choice: Choice, operators: Operators, values: list[Value], typical: Mapping[str, int]) -> list[Choice]:
    node, strategy = choice.node, choice.strategy
    func = operators.local(node, strategy)
    stages = {stage.buffer: stage for stage in strategy.stages}
    buffers = [*func.params, *func.body.block.alloc_buffers]
    # Where each buffer is: which value, in which form.
    spots = dict(enumerate(zip((*node.ins, *node.outs), (*strategy.ins, *strategy.outs))))
    seconds = strategy.seconds - sum(stage.how.seconds for stage in strategy.stages)
    found, moves = list[Choice](), choice.moves
    for piece in pieces(func, stages):
        combined = []
        for at in piece.outs:
            if at not in spots:
                shape = shape_of(buffers[at].shape)
                known = shape_at(shape, typical)
                values.append(
                    Value(f"{node.name}_{buffers[at].name}", shape, str(buffers[at].dtype), "value", known, None, shape)
                )
                spots[at] = len(values) - 1, WHOLE
            if at in stages:
                number, terms = spots[at][0], Form(partial=stages[at].combiner)
                combined.append(Moved(number, terms, WHOLE, stages[at].how))
                spots[at] = number, terms
        ins, outs = ([spots[at] for at in of] for of in (piece.ins, piece.outs))
        part = replace(
            node, func=piece.func, ins=tuple(value for value, _ in ins), outs=tuple(value for value, _ in outs)
        )
        way = Strategy(tuple(form for _, form in ins), tuple(form for _, form in outs), seconds, strategy.share)
        found.append(Choice(part, way, moves))
        spots.update({at: (spots[at][0], WHOLE) for at in piece.outs if at in stages})
        moves, seconds = tuple(combined), 0.0
    return found
