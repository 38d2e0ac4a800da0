"""Derive collectives: what each stage is, what it moves, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.demo.block import SCHEDULES
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.schedule import Schedule

TP2 = Mesh({"tp": 2})


@pytest.mark.parametrize(("m", "tp"), [(4, 2), (5, 2), (5, 3)])
def test_schedules(scheduled, passes, m, tp, table, moved):
    scatter, gather, reduce, both = (moved([stage], m, 3, tp) for stage in ("RS", "AG", "AR", "RS+AG"))
    partial = ("mm_rf", "local", None, 0, (), [], [])
    tables = {name: table(*passes(scheduled(name, m, 3, 9, tp))[::2]) for name in SCHEDULES}
    assert tables["MM-AR-C"] == [
        partial,
        ("mm", "all-reduce", "tp", reduce, (), ["C_rf"], ["C"]),
        ("epi", "local", None, 0, (), [], []),
    ]
    assert tables["MM-RS-C-AG"] == [
        partial,
        ("mm", "reduce-scatter", "tp", scatter, (0,), ["C_rf"], []),
        ("epi", "local", None, 0, (), [], []),
        ("out_global", "all-gather", "tp", gather, (0,), [], ["out"]),
    ]
    assert tables["MM-fuse(RS-C-AG)"] == [
        partial,
        ("mm_epi_out_global", "mesh kernel", "tp", both, (), ["C_rf"], ["out"]),
    ]


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 9),
    tp=st.sampled_from([1, 2, 3, 5]),  # 5 terms in pieces of 2 would leave a fourth device without any
    dim=st.integers(0, 1),
    fuse=st.booleans(),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_bytes_are_the_closed_forms(m, n, tp, dim, fuse, dtype, moved):
    zero = tirx.const(0, dtype)

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((m, n, 5), dtype), C: T.Buffer((m, n), dtype)):
        for i, j, k in T.grid(m, n, 5):
            with T.sblock("sum"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = zero
                C[vi, vj] = C[vi, vj] + A[vi, vj, vk]

    sch = Schedule(program, mesh=Mesh({"tp": tp}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("sum"))[2], "tp")
    sides = (*((m, n) if dim == 0 else (n, m)), tp, int(dtype[5:]) // 8)
    assert lower(sch.mod["main"], sch.mesh).stages[1].bytes == moved(["AR"], *sides)
    blocks = sch.split_collective(reduce, dim)
    if fuse:
        sch.fuse_collective(blocks)
    stages = lower(sch.mod["main"], sch.mesh).stages[1:]
    assert [stage.bytes for stage in stages] == [
        moved([stage], *sides) for stage in (["RS+AG"] if fuse else ["RS", "AG"])
    ]


def test_one_device_moves_nothing(scheduled, passes):
    for name in SCHEDULES:
        steps = passes(scheduled(name, tp=1))[2]
        assert {(step.kind, step.bytes) for step in steps} == {("local", 0)}


def test_all_gather_of_columns(scheduled, passes):
    sch = scheduled("MM-AR-C")
    sch.split_collective(sch.get_sblock("mm"), 1)
    _, _, steps = passes(sch)
    assert [(step.kind, step.arguments) for step in steps[1:3]] == [("reduce-scatter", (1,)), ("all-gather", (1,))]


def test_maximum_is_a_mesh_kernel(passes):
    """No collective of the engine takes a maximum, so a kernel reads the peers."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 8):
            with T.sblock("max"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    B[vi] = T.min_value("float32")
                B[vi] = T.max(B[vi], A[vi, vk])

    sch = Schedule(program, mesh=TP2)
    sch.shard(sch.get_loops(sch.get_sblock("max"))[1], "tp")
    steps = passes(sch)[2]
    # Each of the two devices reads the other's partial of all four rows.
    assert [(step.kind, step.bytes) for step in steps] == [("local", 0), ("mesh kernel", 4 * 4)]


def test_declared_output_needs_no_gather(scheduled, passes, table):
    """The copy stays on the device: of the fused kernel only the reduce-scatter is left to move anything."""
    sch = scheduled("MM-fuse(RS-C-AG)")
    program, _, steps = passes(sch, out=Layout.sharded((4, 2), TP2, {0: "tp"}))
    assert table(program, steps)[1][1:] == ("mesh kernel", "tp", 16, (), ["C_rf"], [])


def test_declared_output_of_an_unsharded_gather(scheduled, passes):
    """Every device would write all of a buffer of which it holds a piece."""
    with pytest.raises(LowerError, match=r"'out_global' writes more of 'out' than its device holds .* or declare the"):
        passes(scheduled("MM-RS-C-AG"), out=Layout.sharded((4, 2), TP2, {0: "tp"}))


def test_read_of_what_others_own(passes):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4,), "float32"), out: T.Buffer((4,), "float32")):
        B = T.sblock_alloc_buffer((4,))
        for i in range(4):
            with T.sblock("first"):
                vi = T.axis.spatial(4, i)
                B[vi] = A[vi] * T.float32(2)
        for i in range(4):
            with T.sblock("second"):
                vi = T.axis.spatial(4, i)
                out[vi] = B[3 - vi]

    sch = Schedule(program, mesh=TP2)
    sch.shard(sch.get_loops(sch.get_sblock("first"))[0], "tp")
    words = r"'second' reads 'B' across 'tp', where each device owns a share \(S\[\(2, 2\) : \(1@tp, 1\)\]\), outside"
    with pytest.raises(LowerError, match=words):
        passes(sch)


def test_declared_input_that_is_read_elsewhere(scheduled, passes):
    """W arrives in columns, and each device needs some rows of all of them."""
    with pytest.raises(LowerError, match=r"'mm_rf' reads 'W' across 'tp', .* outside a collective; gather it first"):
        passes(scheduled("MM-AR-C"), W=Layout.sharded((8, 2), TP2, {1: "tp"}))


def test_slice_of_a_replicated_buffer(scheduled, passes):
    sch = scheduled(None)
    sch.shard(sch.get_loops(sch.get_sblock("epi"))[0], "tp")
    words = "'epi' computes a slice over 'tp' of 'out', which every device holds whole; put a gather behind it"
    with pytest.raises(LowerError, match=words):
        passes(sch)


def test_two_dimensions_at_a_time(scheduled, passes):
    sch = Schedule(scheduled(None).mod, mesh=Mesh({"dp": 2, "tp": 2}))
    epi = sch.get_sblock("epi")
    sch.shard(sch.get_loops(epi)[0], "dp")
    sch.shard(sch.get_loops(epi)[2], "tp")
    sch.cache_write(epi, 0, "global")
    with pytest.raises(
        LowerError, match=r"'out_global' leaves its device's piece of 2 dimensions \(dp, tp\); gather one"
    ):
        passes(sch)


@T.prim_func(s_tir=True)
def exchanged_at_once(A: T.Buffer((2, 4), "float32"), out: T.Buffer((4,), "float32")):
    """Each device writes its partial and sums all of them, in one nest: nobody waits for the others' partials."""
    P = T.sblock_alloc_buffer((2, 4))
    for i in range(4):
        for d in T.serial(2, annotations={"axe.bind": "tp"}):
            with T.sblock("partial"):
                vd, vi = T.axis.remap("SS", [d, i])
                P[vd, vi] = A[vd, vi] * T.float32(2)
        for d in T.serial(2, annotations={"axe.bind": "tp"}):
            with T.sblock("sum"):
                vd, vi = T.axis.remap("RS", [d, i])
                with T.init():
                    out[vi] = T.float32(0)
                out[vi] = out[vi] + P[vd, vi]


def test_buffer_exchanged_and_touched_in_one_kernel(passes):
    with pytest.raises(LowerError, match=r"'partial' touches 'P', which the same kernel exchanges .* need a barrier"):
        passes(exchanged_at_once, TP2)


@T.prim_func(s_tir=True)
def gathered_and_read_at_once(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1 in range(2):
            with T.sblock("gather"):
                vi = T.axis.spatial(4, i_0 * 2 + i_1)
                B[vi] = A[vi]
        for i_1 in range(2):
            with T.sblock("use"):
                vi = T.axis.spatial(4, i_0 * 2 + i_1)
                C[vi] = B[vi] * T.float32(2)


def test_buffer_pushed_and_read_in_one_kernel(passes):
    with pytest.raises(LowerError, match="'use' touches 'B', which the same kernel exchanges"):
        passes(gathered_and_read_at_once, TP2, C=Layout.sharded((4,), TP2, {0: "tp"}))


def test_stage_over_two_axes(passes):
    mesh = Mesh({"dp": 2, "tp": 2})

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((2, 4), "float32"), out: T.Buffer((2, 4), "float32")):
        B = T.sblock_alloc_buffer((2, 4))
        C = T.sblock_alloc_buffer((2, 4))
        for i in T.serial(2, annotations={"axe.bind": "dp"}):
            for j in range(4):
                with T.sblock("b"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    B[vi, vj] = A[vi, vj] * T.float32(2)
        for i in T.serial(2, annotations={"axe.bind": "tp"}):
            for j in range(4):
                with T.sblock("c"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = A[vi, vj] * T.float32(3)
        for j in range(4):
            for i in range(2):
                with T.sblock("gather_b"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    out[vi, vj] = B[vi, vj]
            for i in range(2):
                with T.sblock("gather_c"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    out[vi, vj] = C[vi, vj]

    with pytest.raises(LowerError, match="stage 'gather_b_gather_c' communicates over dp and tp; one axis a stage"):
        passes(program, mesh)
