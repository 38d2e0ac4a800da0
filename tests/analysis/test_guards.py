"""Loads and the conditions under which they happen."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx

from tvm_axe.analysis.guards import guarded_loads

I = tirx.Var("i", "int32")
A, B = (tirx.decl_buffer([8], "int32", name, layout=None) for name in "AB")
X, Y = tirx.BufferLoad(A, [I]), tirx.BufferLoad(B, [tirx.BufferLoad(A, [I])])


def guards(expr: tirx.Expr) -> list[tuple[str, list[str]]]:
    found = guarded_loads(expr)
    assert found is not None
    return [(str(load.source.name), [str(guard) for guard in conditions]) for load, conditions in found]


def test_loads_come_in_the_order_of_use() -> None:
    assert guards(Y + X * 2) == [("A", []), ("B", []), ("A", [])]


def test_sides_of_choices_have_conditions() -> None:
    under, other = str(X > 0), str(tirx.Not(X > 0))
    for chosen in (tirx.if_then_else(X > 0, Y, X), tirx.Select(X > 0, Y, X)):
        assert guards(chosen) == [("A", []), ("A", [under]), ("B", [under]), ("A", [other])]


def test_the_other_side_of_and_and_or_relies_on_the_first() -> None:
    first = I < 3
    assert guards(tirx.And(first, X > 0)) == [("A", [str(first)])]
    assert guards(tirx.Or(first, X > 0)) == [("A", [str(tirx.Not(first))])]
    nested = tirx.if_then_else(tirx.And(first, X > 0), X, 0)
    assert guards(nested)[1] == ("A", [str(tirx.And(first, X > 0))])


def test_what_is_no_plain_number_isnt_read() -> None:
    name = tirx.Var("name", "int32")
    for other in (
        tirx.Let(name, X, name + 1),
        tirx.Broadcast(X, 4),
        tirx.address_of(X),
        tirx.call_extern("int32", "f"),
    ):
        assert guarded_loads(other) is None
    exp = guarded_loads(tirx.exp(X.astype("float32")))
    assert exp is not None and tvm_ffi.structural_equal(exp[0][0], X)
