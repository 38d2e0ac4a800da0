"""The order of calls: every call stands behind what it reads, and what is stored to isn't read later than it was."""

from __future__ import annotations

import random

import pytest
from tvm import tirx

from tvm_axe.relax.graph import Node, Value
from tvm_axe.relax.ordering import MANY, in_order_of_use

FUNC = tirx.PrimFunc([], tirx.Evaluate(0))
OPAQUE = None


def value(size: int = 4, kind: str = "value") -> Value:
    return Value("", (size,), "float32", kind, (size,))


def node(name: str, ins: tuple[int, ...], out: int, overwrites: int = 0) -> Node:
    return Node(name, ins, (out,), FUNC, OPAQUE, overwrites=overwrites)


def parts_of(count: int, whole: int = 4, part: int = 4, overwrites: int = 0) -> list[str]:
    """The order of a call, `count` parts of what it makes, and as many that read one each and what came before."""
    values = [value(kind="input"), value(whole), *(value(part) for _ in range(count)), *(value() for _ in range(count))]
    parts = [node(f"part {at}", (1,), 2 + at) for at in range(count)]
    steps = [node(f"step {at}", (2 + at, 1 + count + at if at else 0, 0), 2 + count + at) for at in range(count)]
    stores = [] if not overwrites else [node("stores", (0, 1), len(values), overwrites)]
    order = in_order_of_use([node("all", (0,), 1), *parts, *stores, *steps], [*values, value(whole)])
    return [each.name for each in order]


def test_parts_are_made_where_they_are_read() -> None:
    found = parts_of(MANY + 1)
    assert found[1:5] == ["part 0", "step 0", "part 1", "step 1"]


@pytest.mark.parametrize("given", [{"count": MANY}, {"count": MANY + 1, "whole": 40}])
def test_few_parts_and_small_ones_stay(given: dict[str, int]) -> None:
    assert parts_of(**given)[1:3] == ["part 0", "part 1"]


def test_what_is_stored_to_is_read_before() -> None:
    found = parts_of(MANY + 1, overwrites=1)
    assert found.index("stores") == MANY + 2


def test_all_calls_stand_behind_what_they_read() -> None:
    rng = random.Random(5)
    for _ in range(50):
        count = rng.randrange(5, 60)
        values = [value(rng.choice([1, 8]), "input" if at < 2 else "value") for at in range(count + 2)]
        nodes = []
        for at in range(2, count + 2):
            least = rng.choice([0, max(0, at - 3)])
            ins = tuple(rng.randrange(least, at) for _ in range(rng.randrange(3)))
            nodes.append(node(str(at), ins, at, rng.random() < 0.05 and len(ins) > 1))
        order, known = in_order_of_use(nodes, values), {0, 1}
        assert sorted(map(id, order)) == sorted(map(id, nodes))
        for each in order:
            assert known.issuperset(each.ins)
            known.update(each.outs)
        for store in (each for each in nodes if each.overwrites):
            before = {each.name for each in nodes[: nodes.index(store)] if store.ins[-1] in each.ins}
            assert before <= {each.name for each in order[: order.index(store)]}
