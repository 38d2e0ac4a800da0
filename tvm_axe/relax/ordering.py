"""The order of a function's calls, in which what few calls read is made where it is read.

Importers take zeros apart in front of everything, of which each layer of a recurrence starts from a part; and what is
computed for all steps at once, into what each of them reads. Until its layer or step comes each part takes memory, and
the choice of forms has to know how it is held.

>>> from tvm import tirx
>>> func, values = tirx.PrimFunc([], tirx.Evaluate(0)), [Value("", (4,), "float32", "value", (4,))] * 29
>>> parts = [Node(f"part {at}", (0,), (1 + at,), func, None) for at in range(9)]
>>> steps = [Node(f"step {at}", (1 + at, 10 + at), (11 + at,), func, None) for at in range(9)]
>>> nodes = [Node("all", (20,), (0, 10), func, None), *parts, *steps]
>>> print(*[each.name for each in in_order_of_use(nodes, values)][:5], sep=", ")
all, part 0, step 0, part 1, step 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tvm_axe.relax.graph import Node, Value

__all__ = ["in_order_of_use"]

MANY = 8
"""Calls that each take a part of a value, at most, to stay where they are."""


def in_order_of_use(nodes: Sequence[Node], values: Sequence[Value]) -> list[Node]:
    """Return the calls in an order in which each part of a value is made in front of the first call that reads it.

    Moved are only calls that take no tensor, or one alone beside weights: what such a call has made, or what more than
    `MANY` calls take parts of that are together as large. What is stored to and who reads it stays where it is.

    Parameters
    ----------
    nodes : Sequence[Node]
        In an order in which they can be done.
    values : Sequence[Value]
        By number.
    """
    waits = _waiting(nodes, values)
    made = {value: at for at, node in enumerate(nodes) for value in node.outs}
    found = dict[int, None]()
    for last in [*(at for at in range(len(nodes)) if at not in waits), *sorted(waits)]:  # nobody reads the last ones
        stack = [last]
        while stack:
            missing = [at for v in nodes[stack[-1]].ins if (at := made.get(v)) in waits and at not in found]
            if missing:
                stack.append(min(missing))
            else:
                found[stack.pop()] = None
    return [nodes[at] for at in found]


def _waiting(nodes: Sequence[Node], values: Sequence[Value]) -> set[int]:
    """The calls that are moved to those that read what they make."""
    stored = {v for node in nodes if node.overwrites for v in (*node.ins[-node.overwrites :], *node.outs)}
    made = {value: at for at, node in enumerate(nodes) for value in node.outs}
    readers: dict[int, set[int]] = defaultdict(set)
    for at, node in enumerate(nodes):
        for value in node.ins:
            readers[value].add(at)
    takes = {at: {v for v in node.ins if values[v].kind != "weight"} for at, node in enumerate(nodes)}
    free = {at for at, node in enumerate(nodes) if node.func is not None and stored.isdisjoint((*node.ins, *node.outs))}
    nothing, waits = set[int](), set[int]()
    for at in sorted(free):
        if not nodes[at].ins:
            nothing.add(at)
        elif len(takes[at]) == 1:
            (value,) = takes[at]
            parts = [each for each in readers[value] if each in free and len(takes[each]) == 1]
            size = sum(values[v].size for each in parts for v in nodes[each].outs)
            if made.get(value) in nothing:
                nothing.add(at)
            elif (len(parts) > MANY and size >= values[value].size) or (
                made.get(value) in waits and len(readers[value]) == 1
            ):
                waits.add(at)
    return waits | nothing
