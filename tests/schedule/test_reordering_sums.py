"""reorder_collective with consumers that sum over what is gathered (norms): partial sums and a small all-reduce."""

from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


@T.prim_func(s_tir=True)
def row_sums(A: T.Buffer((4, 8), "float32"), W: T.Buffer((8, 6), "float32"), total: T.Buffer((4,), "float32")):
    C = T.sblock_alloc_buffer((4, 6))
    for i, j, k in T.grid(4, 6, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(4, 6):
        with T.sblock("total"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                total[vi] = T.float32(0)
            total[vi] = total[vi] + C[vi, vj]


@T.prim_func(s_tir=True)
def norm_behind_columns(
    A: T.Buffer((4, 8), "float32"), W: T.Buffer((8, 5), "float32"), out: T.Buffer((4, 5), "float32")
):
    S = T.sblock_alloc_buffer((4,))
    C_rf = T.sblock_alloc_buffer((2, 4, 5))
    C_global = T.sblock_alloc_buffer((4, 5))
    S_rf = T.sblock_alloc_buffer((2, 4))
    out_global = T.sblock_alloc_buffer((4, 5))
    for i, j in T.grid(4, 5):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("mm_rf"):
                    vk_0, vi, vj, vk_1 = T.axis.remap("SSSR", [k_0, i, j, k_1])
                    with T.init():
                        C_rf[vk_0, vi, vj] = T.float32(0.0)
                    C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for j_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i in range(4):
            for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                for j_1 in range(3):
                    with T.sblock("mm"):
                        vk_0, vi = T.axis.remap("RS", [k_0, i])
                        vj = T.axis.spatial(5, j_0 * 3 + j_1)
                        T.where(j_0 * 3 + j_1 < 5)
                        with T.init():
                            C_global[vi, vj] = T.float32(0.0)
                        C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
    for j_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i, j_1 in T.grid(4, 3):
            with T.sblock("squares_rf"):
                vj_0, vi, vj_1 = T.axis.remap("SSR", [j_0, i, j_1])
                T.where(j_0 * 3 + j_1 < 5)
                with T.init():
                    S_rf[vj_0, vi] = T.float32(0.0)
                S_rf[vj_0, vi] = S_rf[vj_0, vi] + C_global[vi, vj_0 * 3 + vj_1] * C_global[vi, vj_0 * 3 + vj_1]
    for i in range(4):
        for j_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            with T.sblock("squares"):
                vj_0, vi = T.axis.remap("RS", [j_0, i])
                with T.init():
                    S[vi] = T.float32(0.0)
                S[vi] = S[vi] + S_rf[vj_0, vi]
    for j_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i, j_1 in T.grid(4, 3):
            with T.sblock("scale"):
                vi = T.axis.spatial(4, i)
                vj = T.axis.spatial(5, j_0 * 3 + j_1)
                T.where(j_0 * 3 + j_1 < 5)
                out_global[vi, vj] = C_global[vi, vj] / T.sqrt(S[vi])
    for ax0, ax1 in T.grid(4, 5):
        with T.sblock("out_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            out[v0, v1] = out_global[v0, v1]


def test_norm_over_what_is_gathered(gathered, programs, is_now):
    """Each device sums its slice, masked where that is uneven, and a small all-reduce sums the rest."""
    sch, gather = gathered(programs.norm(4, 5, 8).func, 1)
    gathers = sch.reorder_collective(gather, [sch.get_sblock("squares"), sch.get_sblock("scale")])
    is_now(sch, norm_behind_columns)
    assert [sch.get(block).name_hint for block in gathers] == ["out_global"]


def test_sum_of_slices_leaves_nothing_to_gather(gathered):
    sch, gather = gathered(row_sums, 1)
    assert sch.reorder_collective(gather, [sch.get_sblock("total")]) == []
    names = [sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))]
    assert names == ["mm_rf", "mm", "total_rf", "total"]


def test_reader_of_a_sum_only(gathered, refused):
    """What the norm's all-reduce leaves is whole, and nobody's slice."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 8), "float32"), W: T.Buffer((8, 6), "float32"), length: T.Buffer((4,), "float32")):
        C = T.sblock_alloc_buffer((4, 6))
        S = T.sblock_alloc_buffer((4,))
        for i, j, k in T.grid(4, 6, 8):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for i, j in T.grid(4, 6):
            with T.sblock("squares"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    S[vi] = T.float32(0)
                S[vi] = S[vi] + C[vi, vj] * C[vi, vj]
        for i in range(4):
            with T.sblock("length"):
                vi = T.axis.spatial(4, i)
                length[vi] = T.sqrt(S[vi])

    sch, gather = gathered(program, 1)
    blocks = [sch.get_sblock("squares"), sch.get_sblock("length")]
    refused(sch, sch.reorder_collective, gather, blocks, words=("reads nothing that is gathered (C)", "leave it out"))


def test_device_without_a_partial_sum(programs, refused):
    """Five columns over four devices, in pieces of two: the last has none."""
    sch = Schedule(programs.norm(4, 5, 8).func, mesh=Mesh({"tp": 4}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    _, gather = sch.split_collective(reduce, 1)
    blocks = [sch.get_sblock("squares"), sch.get_sblock("scale")]
    words = ("'squares'", "a reduction of 5 in pieces of 2", "without a partial")
    refused(sch, sch.reorder_collective, gather, blocks, words=words)


def test_sum_that_is_masked_already(programs, refused):
    """Its uneven rows are shared over another axis; rfactor would drop that mask."""
    sch = Schedule(programs.norm(5, 6, 8).func, mesh=Mesh({"dp": 2, "tp": 2}))
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    blocks = [sch.get_sblock("squares"), sch.get_sblock("scale")]
    for block in (partial, reduce, *blocks):
        sch.shard(sch.get_loops(block)[0], "dp")
    _, gather = sch.split_collective(reduce, 1)
    words = ("'squares'", "masked (i_0 * 3 + i_1 < 5)")
    refused(sch, sch.reorder_collective, gather, blocks, words=words)


def test_consumer_that_reduces_over_another_dimension(gathered):
    sch, gather = gathered(row_sums, 0)
    (moved,) = sch.reorder_collective(gather, [sch.get_sblock("total")])
    assert sch.get(moved).name_hint == "total_global"
