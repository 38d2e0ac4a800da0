"""The calls that a search for forms goes along, of which those that take many values are made one value at a time.

A recurrence that is unrolled leaves a value at each step, and one call behind the last step takes them all. Until then
every one is needed, and a search that keeps in which forms each is held has a state for any combination of them. What
they are held for is one thing, the way in which that call is made. So that way is chosen before the first of its values
is handed over: from there on a mark says which it is, each value is moved to the form that this way takes as soon as
no other call needs it, and then nothing more has to be known of it. What is found is the same: between that place and
the call nobody makes another form of the value.

>>> from tvm_axe.layout.shares import Share
>>> from tvm_axe.relax.forms import WHOLE
>>> rows, value = Form(0, Share.blocks(4, 2)), Value("x", (4,), "float32", "value", (4,))
>>> make = [SearchStep(None, None, (), (at,), [Strategy((), (rows,)), Strategy((), (WHOLE,))]) for at in range(9)]
>>> stack = SearchStep(None, None, tuple(range(9)), (9,), [Strategy((form,) * 9, (form,)) for form in (rows, WHOLE)])
>>> steps, values = collected([*make, stack], [value] * 10)
>>> for step in steps[:4] + steps[-1:]:
...     print("hands over" if step.hands_over else "makes", step.ins, "->", step.outs)
makes () -> (0,)
hands over (0,) -> (10,)
makes () -> (1,)
hands over (10, 1) -> (11,)
makes (18,) -> (9,)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tvm_axe.relax.chosen import Choice, Moved
from tvm_axe.relax.forms import Form
from tvm_axe.relax.graph import Node, Value
from tvm_axe.relax.holding import Holding
from tvm_axe.relax.objects import Attending
from tvm_axe.relax.strategies import Operator
from tvm_axe.relax.transfers import Carrying
from tvm_axe.relax.ways import Strategy

__all__ = ["SearchStep", "collected", "joined"]

MANY = 8
"""Values that a call takes at most to be made at once."""


@dataclass
class SearchStep:
    """A call with the strategies that there are of it; calls of a group have the same ways and costs."""

    node: Node | None
    operator: Operator | Carrying | Holding | Attending | None
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    strategies: list[Strategy]
    group: int = -1
    of: SearchStep | None = None
    """The call that this is a part of, if it is one: the last, or one that hands over a value."""
    hands_over: bool = False


def collected(steps: Sequence[SearchStep], values: Sequence[Value]) -> tuple[list[SearchStep], list[Value]]:
    """Calls of which those that take many values are made one value at a time; all values, and those that are marks.

    Parameters
    ----------
    steps : Sequence[SearchStep]
        In the order of the calls.
    values : Sequence[Value]
        By number.
    """
    made = {v: at for at, step in enumerate(steps) for v in step.outs}
    takes = {
        at: own for at, step in enumerate(steps) if len(own := [v for v in dict.fromkeys(step.ins) if v in made]) > MANY
    }
    places: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    known = dict(made)  # the last call that makes or reads a value, but for those that take many
    for at, step in enumerate(steps):
        for value in takes.get(at, ()):
            places[known[value]][at].append(value)
        if at not in takes:
            known.update((v, at) for v in step.ins if v in made)
    everything, found = list(values), list[SearchStep]()
    marks: dict[int, int] = {}
    for at, step in enumerate(steps):
        found.append(_last(step, takes[at], marks[at]) if at in takes else step)
        for call, handed in sorted(places[at].items()):
            for value in handed:
                mark = len(everything)
                everything.append(Value("", (), "bool", "value", ()))
                found.append(_handing(steps[call], value, marks.get(call), mark))
                marks[call] = mark
    return found, everything


def _mark(at: int) -> Form:
    """What says that a call is made in the way of a number; as terms of a sum it is made of nothing else by a move."""
    return Form(partial=f"way {at}")


def _handing(step: SearchStep, value: int, before: int | None, mark: int) -> SearchStep:
    """The part of a call that takes a value, at all the places where it does, beside the mark of those before it."""
    first = () if before is None else (before,)
    places = [at for at, each in enumerate(step.ins) if each == value]
    ways = [
        Strategy(
            ((_mark(at),) if first else ()) + tuple(way.ins[each] for each in places), (_mark(at),), share=way.share
        )
        for at, way in enumerate(step.strategies)
    ]
    return SearchStep(
        step.node, step.operator, (*first, *(value for _ in places)), (mark,), ways, of=step, hands_over=True
    )


def _last(step: SearchStep, taken: Sequence[int], mark: int) -> SearchStep:
    """The part of a call that is left where these values are handed over."""
    left = [at for at, value in enumerate(step.ins) if value not in taken]
    ways = [way._replace(ins=(*(way.ins[each] for each in left), _mark(at))) for at, way in enumerate(step.strategies)]
    return replace(step, ins=(*(step.ins[each] for each in left), mark), strategies=ways, of=step)


def joined(steps: Sequence[SearchStep], choices: Sequence[Choice]) -> Iterator[Choice]:
    """Yield the choices for the calls that parts were made of, moves of what is handed over included."""
    moves: dict[int, list[Moved]] = defaultdict(list)
    for step, choice in zip(steps, choices, strict=True):
        if step.of is None:
            yield choice
            continue
        moves[id(step.of)] += choice.moves
        if not step.hands_over:
            marked = choice.strategy.ins[-1]
            (way,) = (each for at, each in enumerate(step.of.strategies) if _mark(at) == marked)
            yield Choice(choice.node, way, tuple(moves[id(step.of)]))
