"""Layouts attached to a function: who may be named, what is kept, and what they survive."""

import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.errors import LayoutError
from tvm_axe.layout import Layout
from tvm_axe.schedule import LAYOUTS, layouts_of, with_layouts

ROWS = "S[(2, 4) : (1@tp, 1)]"
WHOLE = "S[8 : 1] + R[2 : 1@tp]"


@T.prim_func(s_tir=True)
def double(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("B"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[vi] * T.float32(2)


def test_none_attached():
    assert layouts_of(double) == {}


def test_text_and_layout_mean_the_same():
    assert layouts_of(with_layouts(double, {"A": ROWS})) == layouts_of(with_layouts(double, {"A": Layout.parse(ROWS)}))
    assert layouts_of(with_layouts(double, {"A": ROWS})) == {"A": Layout.parse(ROWS)}


def test_later_calls_add_and_replace():
    func = with_layouts(with_layouts(double, {"A": ROWS}), {"B": ROWS, "A": WHOLE})
    assert layouts_of(func) == {"A": Layout.parse(WHOLE), "B": Layout.parse(ROWS)}


def test_function_is_left_alone():
    with_layouts(double, {"A": ROWS})
    assert LAYOUTS not in double.attrs


@pytest.mark.parametrize("name", ["C", "a", ""])
def test_name_of_no_parameter(name):
    with pytest.raises(LayoutError, match=f"{name!r} is not a parameter; the parameters are A, B"):
        with_layouts(double, {"A": ROWS, name: ROWS})


def test_text_that_does_not_parse():
    with pytest.raises(LayoutError):
        with_layouts(double, {"A": "S[(2, 4) : (1@tp)"})


def test_survive_scheduling_printing_and_json():
    sch = s_tir.Schedule(with_layouts(double, {"A": ROWS}))
    sch.split(sch.get_loops(sch.get_sblock("B"))[0], [2, None])
    expected = {"A": Layout.parse(ROWS)}
    assert layouts_of(sch.mod["main"]) == expected
    assert layouts_of(tvm.script.from_source(sch.mod["main"].script())) == expected
    assert layouts_of(tvm.ir.load_json(tvm.ir.save_json(sch.mod))["main"]) == expected


def test_function_is_left_alone_by_schedules_of_the_result():
    before = double.script()
    sch = s_tir.Schedule(with_layouts(double, {"A": ROWS}))
    outer, _ = sch.split(sch.get_loops(sch.get_sblock("B"))[0], [2, None])
    sch.annotate(outer, "axe.bind", "tp")
    assert double.script() == before


def test_schedules_word_comes_last():
    """On whatever block, and wherever that goes."""
    sch = s_tir.Schedule(with_layouts(double, {"A": ROWS, "B": WHOLE}))
    block = sch.get_sblock("B")
    sch.annotate(block, f"{LAYOUTS}.B", ROWS)
    sch.split(sch.get_loops(block)[0], [2, None])
    assert layouts_of(sch.mod["main"]) == {"A": Layout.parse(ROWS), "B": Layout.parse(ROWS)}
    sch.unannotate(block, f"{LAYOUTS}.B")
    assert layouts_of(sch.mod["main"])["B"] == Layout.parse(WHOLE)
