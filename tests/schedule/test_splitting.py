"""split_collective: an all-reduce becomes a reduce-scatter and an all-gather, and nothing else does."""

import pytest
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


@T.prim_func(s_tir=True)
def scattered_rows_even(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((4, 2), "float32"),
    out: T.Buffer((4, 2), "float32"),
):
    C = T.sblock_alloc_buffer((4, 2))
    C_rf = T.sblock_alloc_buffer((2, 4, 2))
    C_global = T.sblock_alloc_buffer((4, 2))
    for i, j in T.grid(4, 2):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("mm_rf"):
                    vk_0, vi, vj, vk_1 = T.axis.remap("SSSR", [k_0, i, j, k_1])
                    with T.init():
                        C_rf[vk_0, vi, vj] = T.float32(0.0)
                    C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1 in range(2):
            for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                for j in range(2):
                    with T.sblock("mm"):
                        vk_0 = T.axis.reduce(2, k_0)
                        vi = T.axis.spatial(4, i_0 * 2 + i_1)
                        vj = T.axis.spatial(2, j)
                        with T.init():
                            C_global[vi, vj] = T.float32(0.0)
                        C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
    for ax0, ax1 in T.grid(4, 2):
        with T.sblock("C_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            C[v0, v1] = C_global[v0, v1]
    for i, j in T.grid(4, 2):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def scattered_columns_uneven(
    A: T.Buffer((5, 8), "float32"),
    W: T.Buffer((8, 3), "float32"),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    C = T.sblock_alloc_buffer((5, 3))
    C_rf = T.sblock_alloc_buffer((2, 5, 3))
    C_global = T.sblock_alloc_buffer((5, 3))
    for i, j in T.grid(5, 3):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("mm_rf"):
                    vk_0, vi, vj, vk_1 = T.axis.remap("SSSR", [k_0, i, j, k_1])
                    with T.init():
                        C_rf[vk_0, vi, vj] = T.float32(0.0)
                    C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for j_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i in range(5):
            for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                for j_1 in range(2):
                    with T.sblock("mm"):
                        vk_0, vi = T.axis.remap("RS", [k_0, i])
                        vj = T.axis.spatial(3, j_0 * 2 + j_1)
                        T.where(j_0 * 2 + j_1 < 3)
                        with T.init():
                            C_global[vi, vj] = T.float32(0.0)
                        C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
    for ax0, ax1 in T.grid(5, 3):
        with T.sblock("C_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            C[v0, v1] = C_global[v0, v1]
    for i, j in T.grid(5, 3):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def reduced_to_one(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((4, 2), "float32"),
    out: T.Buffer((4, 2), "float32"),
):
    C = T.sblock_alloc_buffer((4, 2))
    C_rf = T.sblock_alloc_buffer((2, 4, 2))
    C_global = T.sblock_alloc_buffer((4, 2))
    for i, j in T.grid(4, 2):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("mm_rf"):
                    vk_0, vi, vj, vk_1 = T.axis.remap("SSSR", [k_0, i, j, k_1])
                    with T.init():
                        C_rf[vk_0, vi, vj] = T.float32(0.0)
                    C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for i, j in T.grid(4, 2):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            with T.sblock("mm"):
                vk_0, vi, vj = T.axis.remap("RSS", [k_0, i, j])
                T.sblock_attr({"axe.root": "1"})
                with T.init():
                    C_global[vi, vj] = T.float32(0.0)
                C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
    for ax0, ax1 in T.grid(4, 2):
        with T.sblock("C_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            C[v0, v1] = C_global[v0, v1]
    for i, j in T.grid(4, 2):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def largest(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4,), "float32")):
    for i, k in T.grid(4, 8):
        with T.sblock("max"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                B[vi] = T.min_value("float32")
            B[vi] = T.max(B[vi], A[vi, vk])


@T.prim_func(s_tir=True)
def squares(A: T.Buffer((4, 2), "float32"), B: T.Buffer((4,), "float32")):
    for i, k in T.grid(4, 2):
        with T.sblock("squares"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                B[vi] = T.float32(0)
            B[vi] = B[vi] + A[vi, vk] * A[vi, vk]


def test_rows(schedule, all_reduce, is_now):
    sch = schedule(4, 2, 8)
    _, reduce = all_reduce(sch)
    scatter, gather = sch.split_collective(reduce)
    is_now(sch, scattered_rows_even)
    assert [sch.get(block).name_hint for block in (scatter, gather)] == ["mm", "C_global"]


def test_columns_that_do_not_divide(schedule, all_reduce, is_now):
    sch = schedule(5, 3, 8)
    _, reduce = all_reduce(sch)
    sch.split_collective(reduce, 1)
    is_now(sch, scattered_columns_uneven)


def test_reduce_and_broadcast(schedule, all_reduce, is_now):
    sch = schedule(4, 2, 8)
    _, reduce = all_reduce(sch)
    blocks = sch.split_collective(reduce, root=1)
    is_now(sch, reduced_to_one)
    assert [sch.get(block).name_hint for block in blocks] == ["mm", "C_global"]


def test_root_on_an_axis_of_one_device(schedule, all_reduce, refused):
    sch = schedule(tp=1)
    _, reduce = all_reduce(sch)
    refused(sch, sch.split_collective, reduce, 0, 1, words=("root is 1", "'tp' has the devices 0 to 0"))
    assert len(sch.split_collective(reduce, root=0)) == 2


@pytest.mark.parametrize("root", [-1, 2])
def test_root_that_is_no_device(schedule, all_reduce, refused, root):
    sch = schedule(tp=2)
    _, reduce = all_reduce(sch)
    refused(sch, sch.split_collective, reduce, 0, root, words=("'mm'", f"root is {root}", "the devices 0 to 1"))


@pytest.mark.parametrize("root", [None, 0])
def test_reduce_to_one_device(schedule, all_reduce, refused, root):
    sch = schedule()
    _, reduce = all_reduce(sch)
    reduce, broadcast = sch.split_collective(reduce, root=1)
    refused(sch, sch.split_collective, reduce, 0, root, words=("'mm'", "a reduce to one device already"))
    refused(sch, sch.split_collective, broadcast, words=("'C_global' is not an all-reduce",))
    refused(sch, sch.reorder_collective, broadcast, [sch.get_sblock("epi")], words=("'C_global' is not an all-gather",))


def test_both_collectives_stay_on_the_other_axis(schedule):
    """Rows over dp: each group of tp scatters, or reduces, and gathers what it has."""
    for root in (None, 1):
        sch = Schedule(schedule(4, 6, 8).mod, mesh=Mesh({"dp": 2, "tp": 2}))
        _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
        sch.shard(sch.get_loops(reduce)[0], "dp")
        blocks = sch.split_collective(reduce, 1, root)
        bound = [[sch.get(loop).annotations.get("axe.bind") for loop in sch.get_loops(block)] for block in blocks]
        assert [set(axes) - {None} for axes in bound] == [{"dp", "tp"}, {"dp"}]


@pytest.mark.parametrize("name", ["mm", "epi"])
def test_block_without_a_bound_reduction(schedule, refused, name):
    sch = schedule()
    block = sch.get_sblock(name)
    words = (f"{name!r} is not an all-reduce", "no reduction loop bound", "the block that shard leaves")
    refused(sch, sch.split_collective, block, words=words)


def test_partial(schedule, all_reduce, refused):
    sch = schedule()
    partial, _ = all_reduce(sch)
    refused(sch, sch.split_collective, partial, words=("'mm_rf' is not an all-reduce", "i, j, k_0, k_1"))


def test_reduction_that_is_no_sum():
    """A maximum is scattered and gathered as a sum is."""
    sch = Schedule(largest, mesh=Mesh({"tp": 2}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("max"))[1], "tp")
    blocks = sch.split_collective(reduce)
    bound = [[sch.get(loop).annotations.get("axe.bind") for loop in sch.get_loops(block)] for block in blocks]
    assert bound == [["tp", "tp", None], [None]]


def test_reduction_of_no_load(refused):
    """Squares, summed over devices by hand: what is split is what rfactor leaves."""
    sch = Schedule(squares, mesh=Mesh({"tp": 2}))
    loop = sch.get_loops(sch.get_sblock("squares"))[1]
    sch.annotate(loop, "axe.bind", "tp")
    refused(sch, sch.split_collective, sch.get_sblock("squares"), words=("is not an all-reduce", "not a plain sum"))


def test_reduce_scatter(schedule, all_reduce, refused):
    sch = schedule()
    _, reduce = all_reduce(sch)
    scatter, gather = sch.split_collective(reduce)
    refused(sch, sch.split_collective, scatter, words=("'mm'", "a reduce-scatter over 'tp' already"))
    refused(sch, sch.split_collective, gather, words=("'C_global' is not an all-reduce",))


@pytest.mark.parametrize("dim", [-1, 2])
def test_dimension(schedule, all_reduce, refused, dim):
    sch = schedule()
    _, reduce = all_reduce(sch)
    refused(sch, sch.split_collective, reduce, dim, words=(f"dim is {dim}", "has 2 dimensions"))


def test_dimension_whose_loop_was_split(schedule, all_reduce, refused):
    """Found out after the gather was made; the schedule is still as it was."""
    sch = schedule()
    _, reduce = all_reduce(sch)
    sch.split(sch.get_loops(reduce)[0], [2, None])
    refused(sch, sch.split_collective, reduce, words=("'mm'", "dimension 0", "before its loops are transformed"))


def test_block_of_another_schedule(schedule, all_reduce, refused):
    sch, other = schedule(), schedule()
    all_reduce(sch)
    _, reduce = all_reduce(other)
    refused(sch, sch.split_collective, reduce, words=("split_collective: the block given is not of this schedule",))
