"""Each item is done by somebody, and once."""

from __future__ import annotations

import random

from tvm_axe.meta.fleet.items import Items, Outcome


def test_items_are_taken_in_order():
    items = Items("measure", "abcde")
    assert items.left == 5
    assert items.take(2) == [0, 1]
    assert (items.take(2), items.left) == ([2, 3], 1)
    assert items.take(2) == [4]
    assert (items.take(2), items.left) == ([], 0)


def test_what_is_lost_once_comes_first_and_alone():
    items = Items("measure", "abcd")
    items.take(3)
    items.lose([1, 2], "first", "it died")
    assert items.left == 3
    assert [items.take(4) for _ in range(3)] == [[1], [2], [3]]
    assert items.done == {}


def test_what_is_lost_behind_others_is_taken_alone_too():
    items = Items("measure", "abcd")
    items.take(2)
    items.lose([1], "first", "it died")
    items._todo.rotate(-1)  # behind the third and the fourth
    assert items.take(4) == [2, 3]
    assert items.take(4) == [1]


def test_what_is_lost_twice_has_failed_and_both_are_named():
    items = Items("measure", "ab")
    items.take(1)
    items.lose([0], "first", "no word within 3 s")
    assert items.take(1) == [0]
    items.lose([0], "second", "it died")
    why = "lost twice with its server; first: no word within 3 s; second: it died"
    assert items.done == {0: Outcome("second", 1.0, None, why)}
    assert items.take(2) == [1]


def test_whatever_is_lost_each_has_one_outcome():
    draw = random.Random(0)
    for _ in range(200):
        items = Items("measure", range(draw.randrange(1, 20)))
        hands, finished, lost = [], [], []
        while items.left or hands:
            if items.left and draw.random() < 0.6:
                hands.append(items.take(draw.randrange(1, 4)))
                continue
            if not hands:
                continue
            own = hands.pop(draw.randrange(len(hands)))
            cut = draw.randrange(len(own) + 1) if draw.random() < 0.4 else len(own)
            for number in own[:cut]:
                assert number not in items.done
                items.done[number] = Outcome("m", 1.0, number)
                finished.append(number)
            lost += own[cut:]
            items.lose(own[cut:], "m", "it died")
        assert sorted(items.done) == list(range(len(items.items)))
        assert len(finished) == len(set(finished))
        for number, outcome in items.done.items():
            assert (outcome.failure is None) == (number in finished)
            assert lost.count(number) == 2 or outcome.failure is None
            assert lost.count(number) < 3
