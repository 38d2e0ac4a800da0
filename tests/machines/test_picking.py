"""Sums of which one term counts, beside the same sum of all of them in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from threaded import bound, computed, loops_of, source
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.machines.picking import picked

S, R, H = 3, 5, 6  # places, rows, and what is in a row


def gather(
    condition: Callable[..., tirx.Expr],
    term: Callable[..., tirx.Expr] = lambda value: value,
    zero: float = 0.0,
    start: float = 0.0,
) -> tirx.PrimFunc:
    """D[r, h] = sum over s of condition ? X[s, row[r], h] : 0, where `place` may be nobody's, and `row` then is too."""

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((S, R, H), "float32"),
        place: T.Buffer((R,), "int32"),
        row: T.Buffer((R,), "int32"),
        mask: T.Buffer((S,), "int32"),
        D: T.Buffer((R, H), "float32"),
    ) -> None:
        for r, s, h in T.grid(R, S, H):
            with T.sblock("gather"):
                vr, vs, vh = T.axis.remap("SRS", [r, s, h])
                with T.init():
                    D[vr, vh] = T.float32(start)
                D[vr, vh] = D[vr, vh] + term(
                    T.if_then_else(condition(place[vr], vs, mask), X[vs, row[vr], vh], T.float32(zero))
                )

    return func


def arrays(rng: np.random.Generator) -> list[np.ndarray]:
    place = rng.integers(-2, S + 2, R).astype("int32")
    # A row that is nobody's is never looked for: it would be far outside.
    row = np.where((place >= 0) & (place < S), rng.integers(0, R, R), 1 << 28).astype("int32")
    x, d = rng.standard_normal((S, R, H)).astype("float32"), np.full((R, H), np.nan, "float32")
    return [x, place, row, rng.integers(0, 2, S).astype("int32"), d]


def looped(func: tirx.PrimFunc) -> bool:
    return any(int(loop.extent) == S for loop in loops_of(func.body, tirx.ForKind.SERIAL))


CONDITIONS: dict[str, tuple[Callable[..., tirx.Expr], Callable[..., bool]]] = {
    "equal": (lambda place, s, mask: place == s, lambda place, s, mask: place == s),
    "the other way": (lambda place, s, mask: tirx.EQ(s, place), lambda place, s, mask: place == s),
    "and of all": (
        lambda place, s, mask: tirx.And(place > 0, place == s),
        lambda place, s, mask: place > 0 and place == s,
    ),
    "and of one": (
        lambda place, s, mask: tirx.And(mask[s] > 0, place == s),
        lambda place, s, mask: mask[s] > 0 and place == s,
    ),
    "and of one behind": (
        lambda place, s, mask: tirx.And(tirx.And(place == s, place < 2), mask[s] > 0),
        lambda place, s, mask: mask[s] > 0 and place == s and place < 2,
    ),
    "of what it is": (lambda place, s, mask: place + 1 == s, lambda place, s, mask: place + 1 == s),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_one_term_is_the_sum(name: str) -> None:
    condition, holds = CONDITIONS[name]
    func = gather(condition)
    assert looped(func) and not looped(picked(func))
    for _ in range(4):
        given = arrays(np.random.default_rng())
        x, place, row, mask, _ = given
        expected = np.zeros((R, H))
        for r, s in np.ndindex(R, S):
            if name == "of what it is":
                row[r] = r  # for a place before the first there is one, too
            if holds(place[r], s, mask):
                expected[r] += x[s, row[r]]
        np.testing.assert_array_equal(computed(bound(func), given)[-1], expected)


def test_the_guard_is_around_the_load() -> None:
    """Places that are nobody's have rows that don't exist; a term that looked there would end the process."""
    func = gather(lambda place, s, mask: place == s)
    given = arrays(np.random.default_rng())
    given[1][:], given[2][:] = [-1, S, -(1 << 30), (1 << 31) - 1, S + 1], 1 << 28
    np.testing.assert_array_equal(computed(bound(func), given)[-1], np.zeros((R, H)))
    assert "0 <= place" in source(func) and f"< {S}" in source(func)


LEFT: dict[str, tirx.PrimFunc] = {
    "another condition": gather(lambda place, s, mask: place <= s),
    "one of two": gather(lambda place, s, mask: tirx.Or(place == s, s == 0)),
    "what it equals is of the term": gather(lambda place, s, mask: mask[s] == s),
    "others aren't zero": gather(lambda place, s, mask: place == s, zero=1.0),
    "it doesn't start from zero": gather(lambda place, s, mask: place == s, start=1.0),
    "terms of others": gather(lambda place, s, mask: place == s, lambda value: value * T.float32(2)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_are_left(name: str) -> None:
    assert picked(LEFT[name]).same_as(LEFT[name])


def test_a_condition_that_guards_what_chooses_is_left_around_it() -> None:
    """What chooses may be there under an outer condition alone; if that one is of the term, all is left as it is.

    Upstream makes one condition of both, of which a GPU asks the second one only where the first holds.
    """

    def nested(outer: Callable[[tirx.Expr, tirx.Expr], tirx.Expr]) -> tirx.PrimFunc:
        @T.prim_func(s_tir=True)
        def func(
            X: T.Buffer((S, H), "float32"),
            count: T.Buffer((1,), "int32"),
            place: T.Buffer((R,), "int32"),
            D: T.Buffer((R, H), "float32"),
        ) -> None:
            for r, s, h in T.grid(R, S, H):
                with T.sblock("gather"):
                    vr, vs, vh = T.axis.remap("SRS", [r, s, h])
                    with T.init():
                        D[vr, vh] = T.float32(0)
                    D[vr, vh] = D[vr, vh] + T.if_then_else(
                        outer(vr, vs) < count[0],
                        T.if_then_else(place[vr] == vs, X[vs, vh], T.float32(0)),
                        T.float32(0),
                    )

        return func

    func, rng = nested(lambda r, s: r), np.random.default_rng()
    assert not looped(picked(func))
    x, place = rng.standard_normal((S, H)).astype("float32"), rng.integers(0, S, R).astype("int32")
    found = computed(bound(func), [x, np.array([1], "int32"), place, np.full((R, H), np.nan, "float32")])[-1]
    np.testing.assert_array_equal(found, np.stack([x[place[0]], *np.zeros((R - 1, H))]))
    code = source(func)
    assert code.index("count_ptr[0]") < code.index("&&") < code.index("place_ptr[")
    other = nested(lambda r, s: s)
    assert picked(other).same_as(other)


@pytest.mark.parametrize("both", [False, True])
def test_of_several_loops_those_go_that_pick(both: bool) -> None:
    """As where tokens' results come back from several choices, of which each is somewhere."""

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((S, R, H), "float16"),
        place: T.Buffer((R, 4), "int32"),
        row: T.Buffer((R, 4), "int32"),
        D: T.Buffer((R, H), "float32"),
    ) -> None:
        for r, k, s, t, h in T.grid(R, 4, S, R, H):
            with T.sblock("combine"):
                vr, vk, vs, vt, vh = T.axis.remap("SRRRS", [r, k, s, t, h])
                with T.init():
                    D[vr, vh] = T.float32(0)
                D[vr, vh] = D[vr, vh] + T.Cast(
                    "float32",
                    T.if_then_else(
                        T.And(place[vr, vk] == vs, (vt == row[vr, vk]) if both else (vt <= row[vr, vk])),
                        X[vs, vt, vh],
                        T.float16(0),
                    ),
                )

    left = loops_of(picked(func).body, tirx.ForKind.SERIAL)
    assert sorted(int(loop.extent) for loop in left) == sorted([R, 4, H] if both else [R, 4, R, H])
    rng = np.random.default_rng()
    x = rng.integers(-8, 8, (S, R, H)).astype("float16")
    place, row = (rng.integers(-1, n + 1, (R, 4)).astype("int32") for n in (S, R))
    expected = np.zeros((R, H))
    for r, k, s, t in np.ndindex(R, 4, S, R):
        if place[r, k] == s and (t == row[r, k] if both else t <= row[r, k]):
            expected[r] += x[s, t]
    found = computed(bound(func), [x, place, row, np.full((R, H), np.nan, "float32")])[-1]
    np.testing.assert_array_equal(found, expected)


def test_a_sum_of_part_of_the_places_has_none_of_the_others() -> None:

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((S, R), "float32"), place: T.Buffer((R,), "int32"), D: T.Buffer((R,), "float32")):
        for r, s in T.grid(R, S - 1):
            with T.sblock("gather"):
                vr, vs = T.axis.remap("SR", [r, s])
                with T.init():
                    D[vr] = T.float32(0)
                D[vr] = D[vr] + T.if_then_else(place[vr] == vs, X[vs, vr], T.float32(0))

    given = [np.ones((S, R), "float32"), np.full((R,), S - 1, "int32"), np.full((R,), np.nan, "float32")]
    np.testing.assert_array_equal(computed(bound(func), given)[-1], np.zeros(R))
