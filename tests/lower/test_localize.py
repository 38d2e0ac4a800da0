"""Localize: what one stage is on a device."""

import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe.collective import slab_stride
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.localize import localize
from tvm_axe.schedule import Schedule, layouts_of

# From one device's slab to the next: whole pages.
STRIDE = slab_stride((4, 2), "float32")


@T.prim_func(s_tir=True)
def partial_even(A: T.Buffer((4, 4), "float32"), W: T.Buffer((4, 2), "float32"), C_rf: T.Buffer((4, 2), "float32")):
    T.func_attr({"tirx.noalias": True})
    for i, j, k_1 in T.grid(4, 2, 4):
        with T.sblock("mm_rf"):
            vi, vj, vk_1 = T.axis.remap("SSR", [i, j, k_1])
            with T.init():
                C_rf[vi, vj] = T.float32(0.0)
            C_rf[vi, vj] = C_rf[vi, vj] + A[vi, vk_1] * W[vk_1, vj]


@T.prim_func(s_tir=True)
def partial_uneven(
    A: T.Buffer((5, 4), "float32"), W: T.Buffer((4, 3), "float32"), C_rf: T.Buffer((5, 3), "float32"), tp: T.int32
):
    T.func_attr({"tirx.noalias": True})
    for i, j, k_1 in T.grid(5, 3, 4):
        with T.sblock("mm_rf"):
            vi, vj, vk_1 = T.axis.remap("SSR", [i, j, k_1])
            T.where(tp * 4 + k_1 < 7)
            with T.init():
                C_rf[vi, vj] = T.float32(0.0)
            C_rf[vi, vj] = C_rf[vi, vj] + A[vi, vk_1] * W[vk_1, vj]


@T.prim_func(s_tir=True)
def epilogue_whole(
    C: T.Buffer((5, 3), "float32"),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    T.func_attr({"tirx.noalias": True})
    for i, j in T.grid(5, 3):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def epilogue_even(
    C_global: T.Buffer((2, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((2, 2), "float32"),
    out_global: T.Buffer((2, 2), "float32"),
):
    T.func_attr({"tirx.noalias": True})
    for i_1, j in T.grid(2, 2):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i_1, j])
            out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def epilogue_uneven(
    C_global: T.Buffer((3, 3), "float32"),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((3, 3), "float32"),
    out_global: T.Buffer((3, 3), "float32"),
    tp: T.int32,
):
    T.func_attr({"tirx.noalias": True})
    for i_1, j in T.grid(3, 3):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i_1, j])
            T.where(tp * 3 + i_1 < 5)
            out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def fused_even(
    C_rf_tp: T.Buffer((2, 4, 2), "float32", strides=(STRIDE, 2, 1)),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((2, 2), "float32"),
    out_tp: T.Buffer((2, 4, 2), "float32", strides=(STRIDE, 2, 1)),
    tp: T.int32,
):
    T.func_attr({"tirx.noalias": True})
    C_global = T.sblock_alloc_buffer((2, 2))
    out_global = T.sblock_alloc_buffer((2, 2))
    for i_1 in range(2):
        for k_0, j in T.grid(2, 2):
            with T.sblock("mm"):
                vk_0, vi, vj = T.axis.remap("RSS", [k_0, i_1, j])
                with T.init():
                    C_global[vi, vj] = T.float32(0.0)
                C_global[vi, vj] = C_global[vi, vj] + C_rf_tp[vk_0, tp * 2 + vi, vj]
        for ax0 in range(2):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i_1, ax0])
                out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
        for tp_peer, ax0 in T.grid(2, 2):
            with T.sblock("out_global"):
                v0, v1, vtp_peer = T.axis.remap("SSS", [i_1, ax0, tp_peer])
                out_tp[vtp_peer, tp * 2 + v0, v1] = out_global[v0, v1]


@T.prim_func(s_tir=True)
def fused_uneven(
    C_rf_tp: T.Buffer((2, 5, 3), "float32", strides=(STRIDE, 3, 1)),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((3, 3), "float32"),
    out_tp: T.Buffer((2, 5, 3), "float32", strides=(STRIDE, 3, 1)),
    tp: T.int32,
):
    T.func_attr({"tirx.noalias": True})
    C_global = T.sblock_alloc_buffer((3, 3))
    out_global = T.sblock_alloc_buffer((3, 3))
    for i_1 in range(3):
        for k_0, j in T.grid(2, 3):
            with T.sblock("mm"):
                vk_0, vi, vj = T.axis.remap("RSS", [k_0, i_1, j])
                T.where(tp * 3 + i_1 < 5)
                with T.init():
                    C_global[vi, vj] = T.float32(0.0)
                C_global[vi, vj] = C_global[vi, vj] + C_rf_tp[vk_0, tp * 3 + vi, vj]
        for ax0 in range(3):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i_1, ax0])
                T.where(tp * 3 + i_1 < 5)
                out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
        for tp_peer, ax0 in T.grid(2, 3):
            with T.sblock("out_global"):
                v0, v1, vtp_peer = T.axis.remap("SSS", [i_1, ax0, tp_peer])
                T.where(tp * 3 + i_1 < 5)
                out_tp[vtp_peer, tp * 3 + v0, v1] = out_global[v0, v1]


GOLDEN = {
    ("MM-AR-C", 4, 2, 8, "mm_rf"): partial_even,
    ("MM-AR-C", 5, 3, 7, "mm_rf"): partial_uneven,
    ("MM-RS-C-AG", 5, 3, 7, "mm_rf"): partial_uneven,
    ("MM-fuse(RS-C-AG)", 5, 3, 7, "mm_rf"): partial_uneven,
    ("MM-AR-C", 5, 3, 7, "epi"): epilogue_whole,
    ("MM-RS-C-AG", 4, 2, 8, "epi"): epilogue_even,
    ("MM-RS-C-AG", 5, 3, 7, "epi"): epilogue_uneven,
    ("MM-fuse(RS-C-AG)", 4, 2, 8, "mm_epi_out_global"): fused_even,
    ("MM-fuse(RS-C-AG)", 5, 3, 7, "mm_epi_out_global"): fused_uneven,
}


def kernel_of(passed, name, inside=()):
    """The kernel of the stage `name`, the buffers called `inside` living in it."""
    program, shardings, steps = passed
    step = next(step for step in steps if step.name == name)
    private = tuple(buffer for buffer in program.intermediates if program.names[buffer] in inside)
    return program, localize(program, step, shardings, private)


@pytest.mark.parametrize("key", GOLDEN, ids=str)
def test_kernel(scheduled, passes, key):
    name, m, n, k, stage = key
    inside = ("C_global", "out_global") if "fuse" in name else ()
    _, kernel = kernel_of(passes(scheduled(name, m, n, k)), stage, inside)
    tvm.ir.assert_structural_equal(kernel.func, GOLDEN[key].without_attr("global_symbol"))


# From one stage's slab to the next: whole pages.
STAGE = slab_stride((3,), "float32")


@T.prim_func(s_tir=True)
def received(
    C_pp: T.Buffer((3, 1, 3), "float32", strides=(STAGE, 3, 1)),
    X: T.Buffer((1, 3), "float32"),
    out: T.Buffer((1, 3), "float32"),
    pp: T.int32,
):
    """The receiver reads its peer's slab where it computes."""
    T.func_attr({"tirx.noalias": True})
    Z = T.sblock_alloc_buffer((1, 3))
    for _ in range(1):
        for i in range(3):
            with T.sblock("send"):
                vi = T.axis.spatial(3, i)
                Z[0, vi] = C_pp[(pp + 1) % 3, 0, vi]
        for ax0 in range(3):
            with T.sblock("add"):
                vi = T.axis.spatial(3, ax0)
                out[0, vi] = Z[0, vi] + X[0, vi]


def test_kernel_that_reads_one_peer(programs, passes):
    mesh = Mesh({"pp": 3})
    sch = Schedule(programs.pipeline(3, 3, 2).func, mesh=mesh)
    for name in ("double", "add"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "pp")
    sch.send(sch.get_sblock("send"), "pp")
    sch.fuse_collective([sch.get_sblock("send"), sch.get_sblock("add")])
    _, kernel = kernel_of(passes(sch, out=Layout.sharded((3, 3), mesh, {0: "pp"})), "send_add", ("Z",))
    tvm.ir.assert_structural_equal(kernel.func, received.without_attr("global_symbol"))


@T.prim_func(s_tir=True)
def fused_on_two_axes(
    C_rf_tp: T.Buffer((2, 5, 2), "float32", strides=(STRIDE, 2, 1)),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((3, 2), "float32"),
    out_tp: T.Buffer((2, 5, 2), "float32", strides=(STRIDE, 2, 1)),
    dp: T.int32,
    tp: T.int32,
):
    """Columns over dp are the device's own; rows are exchanged over tp."""
    T.func_attr({"tirx.noalias": True})
    C_global = T.sblock_alloc_buffer((3, 2))
    out_global = T.sblock_alloc_buffer((3, 2))
    for i_1 in range(3):
        for k_0, j_1 in T.grid(2, 2):
            with T.sblock("mm"):
                vk_0, vi, vj = T.axis.remap("RSS", [k_0, i_1, j_1])
                T.where(dp * 2 + j_1 < 3 and tp * 3 + i_1 < 5)
                with T.init():
                    C_global[vi, vj] = T.float32(0.0)
                C_global[vi, vj] = C_global[vi, vj] + C_rf_tp[vk_0, tp * 3 + vi, vj]
        for ax0 in range(2):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i_1, ax0])
                T.where(tp * 3 + i_1 < 5 and dp * 2 + ax0 < 3)
                out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
        for tp_peer, ax0 in T.grid(2, 2):
            with T.sblock("out_global"):
                v0, v1, vtp_peer = T.axis.remap("SSS", [i_1, ax0, tp_peer])
                T.where(tp * 3 + i_1 < 5 and dp * 2 + ax0 < 3)
                out_tp[vtp_peer, tp * 3 + v0, v1] = out_global[v0, v1]


def test_kernel_on_two_axes(scheduled, passes):
    mesh = Mesh({"dp": 2, "tp": 2})
    sch = Schedule(scheduled(None, 5, 3, 8).mod, mesh=mesh)
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    epi = sch.get_sblock("epi")
    for block in (partial, reduce, epi):
        sch.shard(sch.get_loops(block)[1], "dp")
    scatter, gather = sch.split_collective(reduce)
    (gather,) = sch.reorder_collective(gather, [epi])
    sch.fuse_collective([scatter, epi, gather])
    passed = passes(sch, out=Layout.sharded((5, 3), mesh, {1: "dp"}))
    _, kernel = kernel_of(passed, "mm_epi_out_global", ("C_global", "out_global"))
    tvm.ir.assert_structural_equal(kernel.func, fused_on_two_axes.without_attr("global_symbol"))
    assert kernel.coordinates == ("dp", "tp")


def test_kernel_says_nothing_of_the_mesh(programs, passes):
    """Neither loops nor blocks keep what the schedule annotated them with."""
    sch = Schedule(programs.update(2, 4, 6).func, mesh=Mesh({"dp": 2}))
    reduce = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "dp")
    scatter, gather = sch.split_collective(reduce)
    consumers = [sch.get_sblock("state"), sch.get_sblock("step")]
    state, step = sch.reorder_collective(gather, consumers)
    sch.fuse_collective([scatter, *consumers, sch.as_slice(state), step])
    assert "axe.layouts.m_out" in sch.mod.script() and "axe.bind" in sch.mod.script()
    (name,) = (stage.name for stage in passes(sch, **layouts_of(sch.mod["main"]))[0].stages)
    _, kernel = kernel_of(passes(sch, **layouts_of(sch.mod["main"])), name)
    assert "axe." not in kernel.func.script()


def test_arguments_are_inputs_then_outputs(scheduled, passes):
    program, kernel = kernel_of(
        passes(scheduled("MM-fuse(RS-C-AG)", 5, 3, 7)), "mm_epi_out_global", ("C_global", "out_global")
    )
    assert [(program.names[buffer], view) for buffer, view in kernel.arguments] == [
        ("C_rf", "tp"),
        ("bias", "slab"),
        ("residual", "slab"),
        ("out", "tp"),
    ]
    assert kernel.coordinates == ("tp",)


def test_even_kernel_needs_no_coordinate(scheduled, passes):
    _, kernel = kernel_of(passes(scheduled("MM-AR-C", 4, 2, 8)), "mm_rf")
    assert kernel.coordinates == ()


def test_output_declared_sharded_is_copied_on_the_device(scheduled, passes):
    passed = passes(scheduled("MM-fuse(RS-C-AG)", 5, 3, 7), out=Layout.sharded((5, 3), Mesh({"tp": 2}), {0: "tp"}))
    program, kernel = kernel_of(passed, "mm_epi_out_global", ("C_global", "out_global"))
    views = {program.names[buffer]: view for buffer, view in kernel.arguments}
    assert views["out"] == "slab" and views["C_rf"] == "tp"


def test_stride_to_the_next_device_of_an_outer_axis(passes):
    """On a mesh dp x tp, neighbours along dp are as many slabs apart as tp has devices."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 8):
            with T.sblock("max"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    B[vi] = T.min_value("float32")
                B[vi] = T.max(B[vi], A[vi, vk])

    strides = {}
    for axis in ("dp", "tp"):
        sch = Schedule(program, mesh=Mesh({"dp": 2, "tp": 3}))
        sch.shard(sch.get_loops(sch.get_sblock("max"))[1], axis)
        _, kernel = kernel_of(passes(sch), "max")
        strides[axis] = [int(stride) for stride in kernel.func.params[0].strides]
    page = slab_stride((4,), "float32")
    assert strides == {"dp": [3 * page, 1], "tp": [page, 1]}


def test_buffer_that_is_exchanged_is_one_argument(passes):
    """`B` is read as one's own slab and as the peers': both through the mesh view, for two arguments would overlap."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32"), D: T.Buffer((4,), "float32")):
        B = T.sblock_alloc_buffer((4,))
        for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for i_1 in range(2):
                with T.sblock("b"):
                    vi = T.axis.spatial(4, i_0 * 2 + i_1)
                    B[vi] = A[vi] + T.float32(1)
        for j in range(4):
            with T.sblock("gather"):
                vi = T.axis.spatial(4, j)
                C[vi] = B[vi]
            for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                for i_1 in range(2):
                    with T.sblock("own"):
                        vi = T.axis.spatial(4, i_0 * 2 + i_1)
                        D[vi] = B[vi] * T.float32(2)

    passed = passes(program, Mesh({"tp": 2}), D=Layout.sharded((4,), Mesh({"tp": 2}), {0: "tp"}))
    program, kernel = kernel_of(passed, "gather_own")
    views = [(program.names[buffer], view) for buffer, view in kernel.arguments]
    assert views == [("B", "tp"), ("C", "slab"), ("D", "slab")]
    assert kernel.func.attrs["tirx.noalias"] and kernel.coordinates == ("tp",)
    assert "D[vi] = B_tp[tp, vi] * T.float32(2" in kernel.func.script()


def test_loop_that_is_a_device_loop_for_some_and_a_peer_loop_for_others(passes):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((2, 4), "float32"), B: T.Buffer((2, 4), "float32"), C: T.Buffer((4,), "float32")):
        for d in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("own"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    B[vd, vi] = A[vd, vi] * T.float32(2)
            for i in range(4):
                with T.sblock("sum"):
                    vd, vi = T.axis.remap("RS", [d, i])
                    with T.init():
                        C[vi] = T.float32(0)
                    C[vi] = C[vi] + A[vd, vi]

    passed = passes(program, Mesh({"tp": 2}), B=Layout.sharded((2, 4), Mesh({"tp": 2}), {0: "tp"}))
    with pytest.raises(
        LowerError, match=r"loop 'd' .* a device loop for some of its blocks .* \(own, sum\); move them"
    ):
        kernel_of(passed, "own_sum")
