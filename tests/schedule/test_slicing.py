"""as_slice: a state stays where it is computed, its gather goes, and what is read whole is refused."""

import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule, layouts_of, with_layouts

ROWS = "S[(2, 2, 3) : (1@dp, 3, 1)]"


@T.prim_func(s_tir=True)
def read_by_another(
    g: T.Buffer((2, 4, 3), "float32"),
    old: T.Buffer((4, 3), "float32"),
    w: T.Buffer((4, 3), "float32"),
    m_out: T.Buffer((4, 3), "float32"),
    w_out: T.Buffer((4, 3), "float32"),
):
    """`step` goes on with the slices, so that each device copies its own into the state."""
    s_global = T.sblock_alloc_buffer((4, 3))
    m_out_global = T.sblock_alloc_buffer((4, 3))
    w_out_global = T.sblock_alloc_buffer((4, 3))
    for i_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for i_1 in range(2):
            for k in T.serial(2, annotations={"axe.bind": "dp"}):
                for j in range(3):
                    with T.sblock("sum"):
                        vi = T.axis.spatial(4, i_0 * 2 + i_1)
                        vj, vk = T.axis.remap("SR", [j, k])
                        with T.init():
                            s_global[vi, vj] = T.float32(0)
                        s_global[vi, vj] = s_global[vi, vj] + g[vk, vi, vj]
    for i_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for i_1, j in T.grid(2, 3):
            with T.sblock("state"):
                vi = T.axis.spatial(4, i_0 * 2 + i_1)
                vj = T.axis.spatial(3, j)
                m_out_global[vi, vj] = old[vi, vj] * T.float32(0.5) + s_global[vi, vj]
    for i_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for i_1, j in T.grid(2, 3):
            with T.sblock("step"):
                vi = T.axis.spatial(4, i_0 * 2 + i_1)
                vj = T.axis.spatial(3, j)
                w_out_global[vi, vj] = w[vi, vj] - m_out_global[vi, vj]
    for ax0_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for ax0_1, ax1 in T.grid(2, 3):
            with T.sblock("m_out_global"):
                v0 = T.axis.spatial(4, ax0_0 * 2 + ax0_1)
                v1 = T.axis.spatial(3, ax1)
                T.sblock_attr({"axe.layouts.m_out": "S[(2, 2, 3) : (1@dp, 3, 1)]"})
                m_out[v0, v1] = m_out_global[v0, v1]
    for ax0, ax1 in T.grid(4, 3):
        with T.sblock("w_out_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            w_out[v0, v1] = w_out_global[v0, v1]


@T.prim_func(s_tir=True)
def read_by_none(A: T.Buffer((2, 5), "float32"), out: T.Buffer((5,), "float32")):
    """The block that computes the state writes it, and its mask stays."""
    s_global = T.sblock_alloc_buffer((5,))
    for i_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for k in T.serial(2, annotations={"axe.bind": "dp"}):
            for i_1 in range(3):
                with T.sblock("sum"):
                    vi = T.axis.spatial(5, i_0 * 3 + i_1)
                    vk = T.axis.reduce(2, k)
                    T.where(i_0 * 3 + i_1 < 5)
                    with T.init():
                        s_global[vi] = T.float32(0)
                    s_global[vi] = s_global[vi] + A[vk, vi]
    for i_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for i_1 in range(3):
            with T.sblock("state"):
                vi = T.axis.spatial(5, i_0 * 3 + i_1)
                T.where(i_0 * 3 + i_1 < 5)
                T.sblock_attr({"axe.layouts.out": "S[(2, 3) : (1@dp, 1)]"})
                out[vi] = s_global[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def doubled_sum(A: T.Buffer((2, 5), "float32"), out: T.Buffer((5,), "float32")):
    s = T.sblock_alloc_buffer((5,))
    for i, k in T.grid(5, 2):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                s[vi] = T.float32(0)
            s[vi] = s[vi] + A[vk, vi]
    for i in range(5):
        with T.sblock("state"):
            vi = T.axis.spatial(5, i)
            out[vi] = s[vi] * T.float32(2)


def reordered(func, *names, mesh=None, dim=0):
    """The schedule up to the gathers behind the blocks `names`."""
    sch = Schedule(func, mesh=mesh or Mesh({"dp": 2}))
    reduce = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[-1], "dp")
    _, gather = sch.split_collective(reduce, dim)
    return sch, sch.reorder_collective(gather, [sch.get_sblock(name) for name in names])


def test_state_that_goes_on(programs, is_now):
    sch, (state, _) = reordered(programs.update(2, 4, 3).func, "state", "step")
    copy = sch.as_slice(state)
    is_now(sch, read_by_another)
    assert sch.get(copy).name_hint == "m_out_global"
    assert layouts_of(sch.mod["main"]) == {"m_out": Layout.parse(ROWS)}


def test_state_that_nobody_reads(is_now):
    sch, (gather,) = reordered(doubled_sum, "state")
    block = sch.as_slice(gather)
    is_now(sch, read_by_none)
    assert sch.get(block).name_hint == "state"


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(4, 6), (5, 3)])
def test_annotations_ignored(programs, alone, shape, dim):
    program = programs.update(2, *shape)
    sch, gathers = reordered(program.func, "state", "step", dim=dim)
    for gather in gathers:
        sch.as_slice(gather)
    alone(sch.mod["main"], program.reference)
    assert {name: str(layout) for name, layout in layouts_of(sch.mod["main"]).items()} == dict.fromkeys(
        ("m_out", "w_out"), str(Layout.sharded(shape, Mesh({"dp": 2}), {dim: "dp"}))
    )


def test_slice_over_two_axes(programs):
    """The state lies as it is computed: sharded over the other axis too."""
    sch = Schedule(programs.update(2, 4, 6).func, mesh=Mesh({"dp": 2, "tp": 2}))
    reduce = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[-1], "dp")
    blocks = [sch.get_sblock(name) for name in ("state", "step")]
    for block in (reduce, *blocks):
        sch.shard(sch.get_loops(block)[1], "tp")
    _, gather = sch.split_collective(reduce)
    state, _ = sch.reorder_collective(gather, blocks)
    sch.as_slice(state)
    assert str(layouts_of(sch.mod["main"])["m_out"]) == "S[(2, 2, 2, 3) : (1@dp, 3, 1@tp, 1)]"


def test_a_schedules_word_comes_after_the_functions(programs):
    func = with_layouts(programs.update(2, 4, 3).func, {"m_out": "S[(4, 3) : (3, 1)] + R[2 : 1@dp]"})
    sch, (state, _) = reordered(func, "state", "step")
    sch.as_slice(state)
    assert str(layouts_of(sch.mod["main"])["m_out"]) == ROWS


def test_copies_of_the_schedule_are_left_alone(programs):
    """Upstream shares a copy's body, and changes it in both after an annotation of the root block."""
    sch, (state, _) = reordered(programs.update(2, 4, 3).func, "state", "step", dim=1)
    copied, module = sch.copy(), sch.mod
    before = module.script()
    copied.as_slice(state)
    copied.split(copied.get_loops(copied.get_sblock("state"))[1], [2, None])
    assert sch.mod.script() == module.script() == before


def test_state_that_is_read_whole(programs, refused):
    """`step` reads it, and isn't among the consumers."""
    sch, (state,) = reordered(programs.update(2, 4, 3).func, "state")
    words = ("as_slice: 'm_out' is read whole by step after its gather 'm_out_global'", "name the reader to reorder")
    refused(sch, sch.as_slice, state, words=words)


def test_no_parameter(schedule, all_reduce, refused):
    sch = schedule()
    _, reduce = all_reduce(sch)
    _, gather = sch.split_collective(reduce)
    words = ("'C_global' gathers 'C', which is no parameter", "a state tensor that the function leaves")
    refused(sch, sch.as_slice, gather, words=words)


def test_no_gather(programs, refused):
    sch, (state, _) = reordered(programs.update(2, 4, 3).func, "state", "step")
    for name in ("sum", "state"):
        refused(sch, sch.as_slice, sch.get_sblock(name), words=(f"as_slice: block {name!r} is not an all-gather",))
    slices = sch.as_slice(state)
    refused(sch, sch.as_slice, slices, words=("'m_out_global' is not an all-gather",))


def test_gather_that_is_gone(refused):
    sch, (gather,) = reordered(doubled_sum, "state")
    sch.as_slice(gather)
    refused(sch, sch.as_slice, gather, words=("as_slice: the block given is not of this schedule",))


def test_fused_afterwards(programs, alone):
    """The copy of the slices joins the nest."""
    program = programs.update(2, 5, 3)
    sch, (state, step) = reordered(program.func, "state", "step")
    copy = sch.as_slice(state)
    sch.fuse_collective([sch.get_sblock("sum"), sch.get_sblock("state"), sch.get_sblock("step"), copy, step])
    assert len(sch.get_child_blocks(sch.get_sblock("root"))) == 5
    nests = {str(sch.get(sch.get_loops(block)[0]).loop_var) for block in sch.get_child_blocks(sch.get_sblock("root"))}
    assert len(nests) == 1 and layouts_of(sch.mod["main"]) == layouts_of(
        tvm.ir.load_json(tvm.ir.save_json(sch.mod))["main"]
    )
    alone(sch.mod["main"], program.reference)
