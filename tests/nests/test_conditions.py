"""Blocks under conditions between their loops: apart they compute the same, and threads behind the last do nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from threaded import GPU, bound, computed
from tvm import tirx
from tvm.relax.frontend.nn.llm import kv_cache
from tvm.script import tirx as T

from tvm_axe.errors import LowerError
from tvm_axe.nests.conditions import with_conditions_inside
from tvm_axe.nests.default import is_unscheduled, with_default_schedules


def scheduled(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return with_default_schedules(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), GPU)["main"]


def test_a_cache_takes_the_tokens_that_it_has_room_for() -> None:
    """Upstream's function that appends to pages: a token at -1 goes nowhere, and none is behind the last."""
    func, rng = kv_cache._kv_cache_transpose_append(2, 8, "float32"), np.random.default_rng(3)
    assert not is_unscheduled(func) and is_unscheduled(with_conditions_inside(func))
    pages = rng.standard_normal((3, 2, 2, 16, 8)).astype("float32")
    k, v = rng.standard_normal((2, 5, 2, 8)).astype("float32")
    places = np.array([40, -1, 3, 17, -1], "int32")
    want = pages.copy()
    for token, place in enumerate(places):
        if place >= 0:
            want[place // 16, 0, :, place % 16], want[place // 16, 1, :, place % 16] = k[token], v[token]
    got, *given = computed(scheduled(func), [pages, k, v, places])
    np.testing.assert_array_equal(got, want)
    for one, other in zip(given, (k, v, places)):
        np.testing.assert_array_equal(one, other)


@T.prim_func(s_tir=True)
def chosen(A: T.Buffer((300,), "int32"), B: T.Buffer((300, 5), "int32"), C: T.Buffer((300, 5), "int32")):
    for i in range(300):
        if A[i] > 0:
            for j in range(5):
                if B[i, j] != 3:
                    with T.sblock("copies"):
                        vi, vj = T.axis.remap("SS", [i, j])
                        C[vi, vj] = B[vi, vj] + vj


def test_conditions_of_known_extents_too() -> None:
    rng = np.random.default_rng(4)
    a, b, c = (rng.integers(0, 6, shape).astype("int32") for shape in ((300,), (300, 5), (300, 5)))
    want = np.where((a[:, None] > 2) & (b != 3), b + np.arange(5), c)
    np.testing.assert_array_equal(computed(bound(scheduled(chosen)), [a - 2, b, c])[2], want)


@T.prim_func(s_tir=True)
def marks(a: T.handle, b: T.handle):
    n = T.int64()
    A, B = T.match_buffer(a, (n,), "int32"), T.match_buffer(b, (n,), "int32")
    for i in range(n):
        if A[i] != 0:
            with T.sblock("unmarks"):
                vi = T.axis.spatial(n, i)
                A[vi] = 0
            with T.sblock("counts"):
                vi = T.axis.spatial(n, i)
                B[vi] = B[vi] + 1


@T.prim_func(s_tir=True)
def moves(a: T.handle, b: T.handle):
    n = T.int64()
    A, B = T.match_buffer(a, (n,), "int32"), T.match_buffer(b, (n,), "int32")
    for i in range(n):
        if B[i] != 0:
            with T.sblock("writes"):
                vi = T.axis.spatial(n, i)
                A[vi] = B[vi]
            with T.sblock("reads"):
                vi = T.axis.spatial(n, i)
                T.reads(A[0:n])
                A[vi] = A[0] + 1


@pytest.mark.parametrize("func", [marks, moves])
def test_what_isnt_apart_stays_together(func: tirx.PrimFunc) -> None:
    """One block writes what the condition, or the other, reads; then nobody schedules it, and that is said."""
    assert with_conditions_inside(func).same_as(func)
    with pytest.raises(LowerError, match=r"main: the loop over i has the extent n.*a nest of its own"):
        bound(scheduled(func))
