"""Infer layouts: where each buffer lives, by how it is written, read and declared."""

import pytest
from tvm.script import tirx as T

from tvm_axe.errors import LayoutError, LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule, layouts_of

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
        Layout.parse("S[(2, 4) : (1@dp, 1)]"),  # of another mesh
    ],
    ids=["shape", "unknown mesh axis"],
)
def test_declared_layout_that_does_not_fit(scheduled, layouts, layout):
    with pytest.raises(LayoutError):
        layouts(scheduled("MM-AR-C"), residual=layout)


@pytest.mark.parametrize("text", ["S[(4, 2) : (2, 1)]", "S[(2, 2, 2) : (2, 1@tp, 1)]"], ids=["one device", "cyclic"])
def test_declared_layout_in_no_contiguous_pieces(scheduled, layouts, text):
    """It is what it says, and no stage computes on it: it takes an exchange."""
    with pytest.raises(LowerError, match=r"'epi' touches 'residual', which axe.layouts declares as"):
        layouts(scheduled("MM-AR-C"), residual=Layout.parse(text))


# ---- Sums over devices, slices and what one device holds -----------------------------------------------------------


def gradients(programs, mesh, *steps):
    """The update of a state, its gradients summed over dp; as far as `steps` say."""
    sch = Schedule(programs.update(mesh.axis_size("dp"), 4, 6).func, mesh=mesh)
    reduce = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "dp")
    if "slices" in steps:
        _, gather = sch.split_collective(reduce, 1)
        state, _ = sch.reorder_collective(gather, [sch.get_sblock("state"), sch.get_sblock("step")])
        if "state" in steps:
            sch.as_slice(state)
    return sch


DP2 = Mesh({"dp": 2})
TERMS = ({0: "dp"}, {0})
SLICE = ({1: "dp"}, set())


@pytest.mark.parametrize("mesh", [DP2, Mesh({"tp": 2, "dp": 2})], ids=str)
def test_input_that_counts_devices(programs, layouts, mesh):
    """Each device holds its own gradients; nothing has to be declared, whatever the other axis."""
    found = layouts(gradients(programs, mesh))
    assert found == {"g": TERMS, "s": WHOLE, "old": WHOLE, "w": WHOLE, "m_out": WHOLE, "w_out": WHOLE}


def test_inputs_of_slices(programs, layouts):
    """What is read on slices alone is sharded; results are gathered, but for the state."""
    found = layouts(gradients(programs, DP2, "slices"))
    assert {name: found[name] for name in ("g", "old", "w", "m_out", "w_out")} == {
        "g": TERMS, "old": SLICE, "w": SLICE, "m_out": WHOLE, "w_out": WHOLE
    }  # fmt: skip
    assert found["s_global"] == found["m_out_global"] == SLICE


def test_state_that_stays_a_slice(programs, layouts):
    sch = gradients(programs, DP2, "slices", "state")
    found = layouts(sch, **layouts_of(sch.mod["main"]))
    assert (found["m_out"], found["w_out"]) == (SLICE, WHOLE)


def test_input_that_counts_devices_and_is_read_otherwise(layouts):
    """One reader sums over the devices, one takes a row for itself: each device then holds all of it."""

    @T.prim_func(s_tir=True)
    def program(g: T.Buffer((2, 4), "float32"), s: T.Buffer((4,), "float32"), first: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 2):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    s[vi] = T.float32(0)
                s[vi] = s[vi] + g[vk, vi]
        for i in range(4):
            with T.sblock("first"):
                vi = T.axis.spatial(4, i)
                first[vi] = g[0, vi]

    sch = Schedule(program, mesh=DP2)
    sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[1], "dp")
    assert layouts(sch)["g"] == WHOLE


def test_dimension_that_counts_devices_of_another_axis(layouts):
    """Both axes have two devices; the gradients are summed over one of them."""

    @T.prim_func(s_tir=True)
    def program(g: T.Buffer((2, 2, 4), "float32"), s: T.Buffer((2, 4), "float32")):
        for l, i, k in T.grid(2, 4, 2):
            with T.sblock("sum"):
                vl, vi, vk = T.axis.remap("SSR", [l, i, k])
                with T.init():
                    s[vl, vi] = T.float32(0)
                s[vl, vi] = s[vl, vi] + g[vk, vl, vi]

    mesh = Mesh({"dp": 2, "tp": 2})
    sch = Schedule(program, mesh=mesh)
    block = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "dp")
    sch.shard(sch.get_loops(block)[0], "tp")
    found = layouts(sch, s=Layout.sharded((2, 4), mesh, {0: "tp"}))
    assert found == {"g": ({0: "dp", 1: "tp"}, {0}), "s": ({0: "tp"}, set())}


def test_declared_gradients_are_kept(programs, passes):
    """A slab has no dimension that counts devices, though the layout has."""
    sch = gradients(programs, DP2)
    program, shardings, _ = passes(sch, g=Layout.sharded((2, 4, 6), DP2, {0: "dp"}))
    (g,) = (shardings[buffer] for buffer in program.parameters if buffer.name == "g")
    assert (g.slab, g.partial) == ((4, 6), {0})


def test_root(scheduled, passes):
    """What one device holds is whole on it, and is nowhere else."""
    sch = scheduled("MM-AR-C", 5, 3, 8, 2)
    sch.split_collective(sch.get_sblock("mm"), root=1)
    program, shardings, _ = passes(sch)
    by_name = {program.names[buffer]: sharding for buffer, sharding in shardings.items()}
    assert {name: sharding.root for name, sharding in by_name.items() if sharding.root} == {"C_global": ("tp", 1)}
    assert str(by_name["C_global"].layout) == "S[(5, 3) : (3, 1)] + 1@tp"
    assert by_name["C_global"].slab == (5, 3)


def test_root_of_one_device_is_nothing(scheduled, passes):
    sch = scheduled("MM-AR-C", tp=1)
    sch.split_collective(sch.get_sblock("mm"), root=0)
    assert not any(sharding.root for sharding in passes(sch)[1].values())


def test_copies_lie_as_they_are_read(programs, layouts):
    """Sharded over the experts for the reader that has its own; not over tokens, which it reads all."""
    sch = Schedule(programs.experts(4, 6, 3, 2).func, mesh=TP2)
    sch.shard(sch.get_loops(sch.get_sblock("dispatch"))[0], "tp")
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    for dim, expected in ((1, COLUMNS), (2, WHOLE), (None, WHOLE)):
        other = sch.copy()
        other.redistribute(other.get_sblock("mm"), "D", "tp", dim)
        other.redistribute(other.get_sblock("combine"), "H", "tp")
        found = layouts(other)
        assert (found["D"], found["D_global"], found["H_global"]) == (ROWS, expected, WHOLE)
