"""Infer layouts: where each buffer lives, by how it is written, read and declared."""

import pytest
from tvm.script import tirx as T

from tvm_axe.errors import LayoutError, LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule

TP2 = Mesh({"tp": 2})
WHOLE = ({}, set())
ROWS = ({0: "tp"}, set())
COLUMNS = ({1: "tp"}, set())
PARTIAL = ({0: "tp"}, {0})

INPUTS = {"A": COLUMNS, "W": ROWS, "bias": WHOLE, "C_rf": PARTIAL, "out": WHOLE}
GOLDEN = {
    "MM-AR-C": {**INPUTS, "residual": WHOLE, "C": WHOLE},
    "MM-RS-C-AG": {**INPUTS, "residual": ROWS, "C_global": ROWS, "out_global": ROWS},
    "MM-fuse(RS-C-AG)": {**INPUTS, "residual": ROWS, "C_global": ROWS, "out_global": ROWS},
}


@pytest.mark.parametrize("shape", [(4, 2, 8, 2), (5, 3, 7, 2), (2, 3, 7, 3)])
@pytest.mark.parametrize("name", GOLDEN)
def test_schedules(scheduled, layouts, name, shape):
    assert layouts(scheduled(name, *shape)) == GOLDEN[name]


def test_unscheduled_is_replicated(scheduled, layouts):
    assert set(map(str, layouts(scheduled(None)).values())) == {str(WHOLE)}


def test_one_device_is_whole(scheduled, layouts):
    assert all(axes == {} for axes, _ in layouts(scheduled("MM-fuse(RS-C-AG)", tp=1)).values())


def test_slab_and_layout_of_an_uneven_sharding(scheduled, passes):
    program, shardings, _ = passes(scheduled("MM-RS-C-AG", 5, 3, 7))
    by_name = {program.names[buffer]: sharding for buffer, sharding in shardings.items()}
    assert by_name["C_rf"].slab == (5, 3)
    assert by_name["C_global"].slab == (3, 3)
    assert str(by_name["C_global"].layout) == "S[(2, 3, 3) : (1@tp, 3, 1)]"
    assert by_name["A"].slab == (5, 4)


def test_input_read_in_two_ways_is_replicated(scheduled, layouts):
    """The epilogue's rows are sharded and read `residual` by rows; another block reads it whole."""

    @T.prim_func(s_tir=True)
    def program(R: T.Buffer((4,), "float32"), X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("x"):
                vi = T.axis.spatial(4, i)
                X[vi] = R[vi]
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                Y[vi] = R[3 - vi]

    sch = Schedule(program, mesh=TP2)
    sch.shard(sch.get_loops(sch.get_sblock("x"))[0], "tp")
    found = layouts(sch, X=Layout.sharded((4,), TP2, {0: "tp"}))
    assert found == {"R": WHOLE, "X": ROWS, "Y": WHOLE}


def test_declared_input(scheduled, layouts):
    sch = scheduled("MM-fuse(RS-C-AG)")
    assert layouts(sch, residual=Layout.sharded((4, 2), TP2, {}))["residual"] == WHOLE


def test_declared_output(scheduled, layouts):
    sch = scheduled("MM-fuse(RS-C-AG)")
    assert layouts(sch, out=Layout.sharded((4, 2), TP2, {0: "tp"}))["out"] == ROWS


def test_name_of_no_parameter(scheduled, layouts):
    with pytest.raises(LowerError, match=r"axe.layouts names 'C'; the parameters are A, W, bias, out, residual"):
        layouts(scheduled("MM-AR-C"), C=Layout.sharded((4, 2), TP2, {}))


@pytest.mark.parametrize(
    "layout",
    [
        Layout.sharded((4, 4), TP2, {0: "tp"}),  # of another shape
        Layout.parse("S[(4, 2) : (2, 1)]"),  # says nothing of tp
        Layout.parse("S[(2, 2, 2) : (2, 1@tp, 1)]"),  # cyclic
        Layout.parse("S[(2, 4) : (1@dp, 1)]"),  # of another mesh
    ],
    ids=["shape", "mesh axis left out", "cyclic", "unknown mesh axis"],
)
def test_declared_layout_that_does_not_fit(scheduled, layouts, layout):
    with pytest.raises(LayoutError):
        layouts(scheduled("MM-AR-C"), residual=layout)
