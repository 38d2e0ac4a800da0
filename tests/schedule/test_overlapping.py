"""overlap: neighbouring stages are cut into chunks, those over all slices in ring order; the rest is refused."""

import pytest
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule, with_layouts


@T.prim_func(s_tir=True)
def chunked(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((4, 2), "float32"),
    out: T.Buffer((4, 2), "float32"),
):
    """The matmul takes both devices' slices in ring order; the fused kernel the device's own."""
    C_rf = T.sblock_alloc_buffer((2, 4, 2))
    C_global = T.sblock_alloc_buffer((4, 2))
    out_global = T.sblock_alloc_buffer((4, 2))
    for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_0 in T.serial(2, annotations={"axe.ring": "tp"}):
            for i_1 in T.serial(2, annotations={"axe.overlap": "mm_rf"}):
                for i_2, j, k_1 in T.grid(1, 2, 4):
                    with T.sblock("mm_rf"):
                        vk_0 = T.axis.spatial(2, k_0)
                        vi = T.axis.spatial(4, i_0 * 2 + i_1 + i_2)
                        vj, vk_1 = T.axis.remap("SR", [j, k_1])
                        with T.init():
                            C_rf[vk_0, vi, vj] = T.float32(0)
                        C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1_0 in T.serial(2, annotations={"axe.overlap": "mm_rf"}):
            for i_1_1 in range(1):
                for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                    for j in range(2):
                        with T.sblock("mm"):
                            vk_0 = T.axis.reduce(2, k_0)
                            vi = T.axis.spatial(4, i_0 * 2 + i_1_0 + i_1_1)
                            vj = T.axis.spatial(2, j)
                            with T.init():
                                C_global[vi, vj] = T.float32(0)
                            C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
                for ax0 in range(2):
                    with T.sblock("epi"):
                        vi = T.axis.spatial(4, i_0 * 2 + i_1_0 + i_1_1)
                        vj = T.axis.spatial(2, ax0)
                        out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0)) + residual[vi, vj]
                for ax0 in range(2):
                    with T.sblock("out_global"):
                        v0 = T.axis.spatial(4, i_0 * 2 + i_1_0 + i_1_1)
                        v1 = T.axis.spatial(2, ax0)
                        out[v0, v1] = out_global[v0, v1]


def scattered(schedule, m=4, n=2, tp=2, fuse=True):
    """(schedule, one block of each stage): the partial products, and RS-C-AG, fused or not."""
    sch = schedule(m, n, 8, tp)
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce)
    epi = sch.get_sblock("epi")
    (gather,) = sch.reorder_collective(gather, [epi])
    if fuse:
        sch.fuse_collective([scatter, epi, gather])
        return sch, [partial, scatter]
    return sch, [partial, scatter, epi, gather]


def test_matmul_and_fused_kernel(schedule, is_now):
    sch, stages = scattered(schedule)
    loops = sch.overlap(stages, "tp", 2)
    is_now(sch, chunked)
    assert [sch.get(loop).annotations["axe.overlap"] for loop in loops] == ["mm_rf", "mm_rf"]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_annotations_ignored(programs, schedule, alone, tp, fuse):
    sch, stages = scattered(schedule, 5 if tp == 3 else 4 * tp, 3, tp, fuse)
    loops = sch.overlap(stages, "tp", 2)
    assert len(loops) == len(stages)
    alone(sch.mod["main"], programs.block(1, 1, 1).reference)


def test_stages_over_all_slices_go_around_the_ring(schedule):
    """The partial products are made for all devices, and all slices are gathered; the others work on their own."""
    sch, stages = scattered(schedule, fuse=False)
    sch.overlap(stages, "tp", 2)
    rings = [any("axe.ring" in sch.get(loop).annotations for loop in sch.get_loops(block)) for block in stages]
    assert rings == [True, False, False, True]


def test_gather_and_its_reader():
    """Rows of an input are gathered and multiplied, chunk by chunk."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 6), "float32"), W: T.Buffer((6, 4), "float32"), C: T.Buffer((4, 4), "float32")):
        for i, j, k in T.grid(4, 4, 6):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]

    mesh = Mesh({"tp": 2})
    layouts = {"A": Layout.sharded((4, 6), mesh, {0: "tp"}), "C": Layout.sharded((4, 4), mesh, {1: "tp"})}
    sch = Schedule(with_layouts(program, layouts), mesh=mesh)
    mm = sch.get_sblock("mm")
    device, _ = sch.shard(sch.get_loops(mm)[1], "tp")
    copy = sch.redistribute(mm, "A", "tp")
    sch.overlap([copy, mm], "tp", 2)
    annotations = [{key for loop in sch.get_loops(block) for key in sch.get(loop).annotations} for block in (copy, mm)]
    assert annotations == [{"axe.ring", "axe.overlap"}, {"axe.bind", "axe.ring", "axe.overlap"}]
    assert sch.get(device).annotations["axe.bind"] == "tp"


@pytest.mark.parametrize("count", [0, 1])
def test_one_stage(schedule, refused, count):
    sch, stages = scattered(schedule)
    words = (f"overlap: two stages or more overlap each other; got {count}",)
    refused(sch, sch.overlap, stages[:count], "tp", 2, words=words)


@pytest.mark.parametrize("chunks", [0, -1, 3, 4])
def test_chunks_that_do_not_divide(schedule, refused, chunks):
    sch, stages = scattered(schedule)
    words = ("'mm_rf'", f"{chunks} chunks do not divide the 2 elements of a device's slice", "a divisor")
    refused(sch, sch.overlap, stages, "tp", chunks, words=words)


def test_stages_out_of_order(schedule, refused):
    sch, (partial, scatter) = scattered(schedule)
    words = ("mm_rf reads nothing that mm, epi, out_global write", "each follows from an earlier one")
    refused(sch, sch.overlap, [scatter, partial], "tp", 2, words=words)


def test_stages_that_do_not_follow(schedule, refused):
    sch, (partial, _, epi, _) = scattered(schedule, fuse=False)
    refused(sch, sch.overlap, [partial, epi], "tp", 2, words=("epi reads nothing that mm_rf write",))


def test_stage_between(refused):
    """The sum reads the products and what another stage has made meanwhile."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
        X = T.sblock_alloc_buffer((4,))
        Y = T.sblock_alloc_buffer((4,))
        for i in range(4):
            with T.sblock("x"):
                vi = T.axis.spatial(4, i)
                X[vi] = A[vi] * T.float32(2)
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                Y[vi] = B[vi] * T.float32(3)
        for i in range(4):
            with T.sblock("c"):
                vi = T.axis.spatial(4, i)
                C[vi] = X[vi] + Y[vi]

    sch = Schedule(program, mesh=Mesh({"tp": 2}))
    blocks = [sch.get_sblock(name) for name in ("x", "c")]
    for block in blocks:
        sch.shard(sch.get_loops(block)[0], "tp")
    words = ("1 nests lie between c and the stage before", "overlap what lies between too, or fuse it")
    refused(sch, sch.overlap, blocks, "tp", 2, words=words)


def test_stages_that_share_nothing_over_the_axis(schedule, refused):
    """Nothing is exchanged, so that there are no slices to cut."""
    sch = schedule()
    blocks = [sch.get_sblock(name) for name in ("mm", "epi")]
    words = ("overlap: the dimension that 'tp' shares is not carried through to block 'mm'",)
    refused(sch, sch.overlap, blocks, "tp", 2, words=words)


def test_dimension_that_is_summed(programs, refused):
    """Behind the scattered columns comes a sum over all of them."""
    sch = Schedule(programs.norm(4, 8, 8).func, mesh=Mesh({"tp": 2}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce, 1)
    sch.reorder_collective(gather, [sch.get_sblock("squares"), sch.get_sblock("scale")])
    words = ("is not carried through to block 'squares_rf'", "pointwise in it")
    refused(sch, sch.overlap, [scatter, sch.get_sblock("squares_rf")], "tp", 2, words=words)


def test_unknown_axis(schedule, refused):
    sch, stages = scattered(schedule)
    refused(sch, sch.overlap, stages, "dp", 2, words=("overlap: the mesh has no axis 'dp'; its axes are tp",))


def test_overlapped_already(schedule, refused):
    sch, stages = scattered(schedule)
    sch.overlap(stages, "tp", 2)
    refused(sch, sch.overlap, stages, "tp", 2, words=("'mm_rf'", "before its loops are transformed"))


def test_block_of_another_schedule(schedule, refused):
    sch, (partial, _) = scattered(schedule)
    _, (_, foreign) = scattered(schedule)
    words = ("overlap: the block given is not of this schedule",)
    refused(sch, sch.overlap, [partial, foreign], "tp", 2, words=words)
