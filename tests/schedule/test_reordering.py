"""reorder_collective: consumers compute on slices, what leaves them is gathered, and the rest is refused."""

from collections.abc import Callable

import pytest
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


@T.prim_func(s_tir=True)
def behind_rows_even(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((4, 2), "float32"),
    out: T.Buffer((4, 2), "float32"),
):
    C_rf = T.sblock_alloc_buffer((2, 4, 2))
    C_global = T.sblock_alloc_buffer((4, 2))
    out_global = T.sblock_alloc_buffer((4, 2))
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
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1, j in T.grid(2, 2):
            with T.sblock("epi"):
                vi = T.axis.spatial(4, i_0 * 2 + i_1)
                vj = T.axis.spatial(2, j)
                out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
    for ax0, ax1 in T.grid(4, 2):
        with T.sblock("out_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            out[v0, v1] = out_global[v0, v1]


@T.prim_func(s_tir=True)
def behind_columns_uneven(
    A: T.Buffer((5, 8), "float32"),
    W: T.Buffer((8, 3), "float32"),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    C_rf = T.sblock_alloc_buffer((2, 5, 3))
    C_global = T.sblock_alloc_buffer((5, 3))
    out_global = T.sblock_alloc_buffer((5, 3))
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
    for j_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i, j_1 in T.grid(5, 2):
            with T.sblock("epi"):
                vi = T.axis.spatial(5, i)
                vj = T.axis.spatial(3, j_0 * 2 + j_1)
                T.where(j_0 * 2 + j_1 < 3)
                out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
    for ax0, ax1 in T.grid(5, 3):
        with T.sblock("out_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            out[v0, v1] = out_global[v0, v1]


@T.prim_func(s_tir=True)
def two_results(A: T.Buffer((4, 8), "float32"), first: T.Buffer((4,), "float32"), second: T.Buffer((4,), "float32")):
    """`first` is a result and read on; `D` is read on and by a block that can't be sharded with it."""
    C = T.sblock_alloc_buffer((4,))
    D = T.sblock_alloc_buffer((4,))
    for i, k in T.grid(4, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                C[vi] = T.float32(0)
            C[vi] = C[vi] + A[vi, vk]
    for i in range(4):
        with T.sblock("double"):
            vi = T.axis.spatial(4, i)
            D[vi] = C[vi] * T.float32(2)
    for i in range(4):
        with T.sblock("add"):
            vi = T.axis.spatial(4, i)
            first[vi] = C[vi] + D[vi]
    for i in range(4):
        with T.sblock("flip"):
            vi = T.axis.spatial(4, i)
            second[vi] = D[3 - vi] + first[vi]


@T.prim_func(s_tir=True)
def two_results_reordered(
    A: T.Buffer((4, 8), "float32"), first: T.Buffer((4,), "float32"), second: T.Buffer((4,), "float32")
):
    D = T.sblock_alloc_buffer((4,))
    C_rf = T.sblock_alloc_buffer((2, 4))
    C_global = T.sblock_alloc_buffer((4,))
    D_global = T.sblock_alloc_buffer((4,))
    first_global = T.sblock_alloc_buffer((4,))
    for i in range(4):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("sum_rf"):
                    vk_0, vi, vk_1 = T.axis.remap("SSR", [k_0, i, k_1])
                    with T.init():
                        C_rf[vk_0, vi] = T.float32(0.0)
                    C_rf[vk_0, vi] = C_rf[vk_0, vi] + A[vi, vk_0 * 4 + vk_1]
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for i_1 in range(2):
                with T.sblock("sum"):
                    vk_0 = T.axis.reduce(2, k_0)
                    vi = T.axis.spatial(4, i_0 * 2 + i_1)
                    with T.init():
                        C_global[vi] = T.float32(0.0)
                    C_global[vi] = C_global[vi] + C_rf[vk_0, vi]
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1 in range(2):
            with T.sblock("double"):
                vi = T.axis.spatial(4, i_0 * 2 + i_1)
                D_global[vi] = C_global[vi] * T.float32(2)
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1 in range(2):
            with T.sblock("add"):
                vi = T.axis.spatial(4, i_0 * 2 + i_1)
                first_global[vi] = C_global[vi] + D_global[vi]
    for ax0 in range(4):
        with T.sblock("D_global"):
            v0 = T.axis.spatial(4, ax0)
            D[v0] = D_global[v0]
    for ax0 in range(4):
        with T.sblock("first_global"):
            v0 = T.axis.spatial(4, ax0)
            first[v0] = first_global[v0]
    for i in range(4):
        with T.sblock("flip"):
            vi = T.axis.spatial(4, i)
            second[vi] = D[3 - vi] + first[vi]


def consumer(statement: Callable) -> tirx.PrimFunc:
    """A square matmul with one consumer, whose store `statement(out, C, X, vi, vj)` writes."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 8), "float32"), W: T.Buffer((8, 4), "float32"), X: T.Buffer((4, 4), "float32")):
        C = T.sblock_alloc_buffer((4, 4))
        for i, j, k in T.grid(4, 4, 8):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for i, j in T.grid(4, 4):
            with T.sblock("use"):
                vi, vj = T.axis.remap("SS", [i, j])
                X[vi, vj] = statement(C, X, vi, vj)

    return program


def test_rows(gathered, schedule, is_now):
    sch, gather = gathered(schedule(4, 2, 8).mod)
    (moved,) = sch.reorder_collective(gather, [sch.get_sblock("epi")])
    is_now(sch, behind_rows_even)
    assert sch.get(moved).name_hint == "out_global"


def test_columns_that_do_not_divide(gathered, schedule, is_now):
    sch, gather = gathered(schedule(5, 3, 8).mod, dim=1)
    sch.reorder_collective(gather, [sch.get_sblock("epi")])
    is_now(sch, behind_columns_uneven)


def test_chain_with_two_live_outs(gathered, is_now):
    """A result that a later consumer reads is gathered all the same, and the consumer reads the slices."""
    sch, gather = gathered(two_results, matmul="sum")
    gathers = sch.reorder_collective(gather, [sch.get_sblock("double"), sch.get_sblock("add")])
    is_now(sch, two_results_reordered)
    assert [sch.get(block).name_hint for block in gathers] == ["D_global", "first_global"]


@T.prim_func(s_tir=True)
def chain(A: T.Buffer((4, 8), "float32"), out: T.Buffer((4,), "float32")):
    C = T.sblock_alloc_buffer((4,))
    D = T.sblock_alloc_buffer((4,))
    for i, k in T.grid(4, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                C[vi] = T.float32(0)
            C[vi] = C[vi] + A[vi, vk]
    for i in range(4):
        with T.sblock("double"):
            vi = T.axis.spatial(4, i)
            D[vi] = C[vi] * T.float32(2)
    for i in range(4):
        with T.sblock("add"):
            vi = T.axis.spatial(4, i)
            out[vi] = D[vi] + T.float32(1)


def test_one_consumer_at_a_time(gathered):
    """The gather that one reorder leaves is a gather for the next; together they come to the same as one step."""
    sch, gather = gathered(chain, matmul="sum")
    (gather,) = sch.reorder_collective(gather, [sch.get_sblock("double")])
    assert sch.get(gather).name_hint == "D_global"
    (gather,) = sch.reorder_collective(gather, [sch.get_sblock("add")])
    assert sch.get(gather).name_hint == "out_global"
    at_once, gather = gathered(chain, matmul="sum")
    at_once.reorder_collective(gather, [at_once.get_sblock("double"), at_once.get_sblock("add")])
    assert [len(s.get_child_blocks(s.get_sblock("root"))) for s in (sch, at_once)] == [5, 5]


def test_transposed_consumer_computes_columns(gathered):
    """Rows of C are columns of X: still one's own slice, of another dimension."""
    sch, gather = gathered(consumer(lambda C, X, vi, vj: C[vj, vi]))
    (moved,) = sch.reorder_collective(gather, [sch.get_sblock("use")])
    loops = [sch.get(loop) for loop in sch.get_loops(sch.get_sblock("use"))]
    assert [(loop.loop_var.name, loop.annotations.get("axe.bind")) for loop in loops] == [
        ("j_0", "tp"),
        ("i", None),
        ("j_1", None),
    ]
    assert sch.get(moved).name_hint == "X_global"


def test_not_a_gather(schedule, all_reduce, refused):
    sch = schedule()
    partial, reduce = all_reduce(sch)
    for block in (partial, reduce, sch.get_sblock("epi")):
        words = (f"{sch.get(block).name_hint!r} is not an all-gather", "as split_collective leaves it")
        refused(sch, sch.reorder_collective, block, [sch.get_sblock("epi")], words=words)


def test_no_consumers(gathered, schedule, refused):
    sch, gather = gathered(schedule().mod)
    refused(sch, sch.reorder_collective, gather, [], words=("gather 'C_global'", "no consumers named"))


def test_reader_left_out(gathered, refused):
    sch, gather = gathered(two_results, matmul="sum")
    words = ("gather 'C_global'", "'add' reads what it gathers", "(double)", "name it too")
    refused(sch, sch.reorder_collective, gather, [sch.get_sblock("double")], words=words)


def test_consumer_that_reads_nothing_gathered(gathered, schedule, refused):
    sch, gather = gathered(schedule().mod)
    blocks = [sch.get_sblock("epi"), sch.get_sblock("mm_rf")]
    refused(
        sch, sch.reorder_collective, gather, blocks, words=("'mm_rf' reads nothing that is gathered", "leave it out")
    )


NOT_POINTWISE = {
    "shifted": lambda C, X, vi, vj: T.if_then_else(vi > 0, C[vi - 1, vj], T.float32(0)),
    "both": lambda C, X, vi, vj: C[vi, vj] + C[vj, vi],
    "one row": lambda C, X, vi, vj: C[vi, vj] - C[0, vj],
}


@pytest.mark.parametrize("name", NOT_POINTWISE)
def test_consumer_that_is_not_pointwise(gathered, refused, name):
    sch, gather = gathered(consumer(NOT_POINTWISE[name]))
    words = ("consumer 'use' is not pointwise in dimension 0 of 'C'", "reads C[", "its own slice over 'tp' only")
    refused(sch, sch.reorder_collective, gather, [sch.get_sblock("use")], words=words)


def test_consumer_that_is_pointwise_in_the_other_dimension(gathered):
    """Shifted rows are as good as any when the columns are gathered."""
    sch, gather = gathered(consumer(NOT_POINTWISE["shifted"]), dim=1)
    (moved,) = sch.reorder_collective(gather, [sch.get_sblock("use")])
    assert sch.get(moved).name_hint == "X_global"


def test_consumer_that_updates_in_place(gathered, refused):
    sch, gather = gathered(consumer(lambda C, X, vi, vj: X[vi, vj] + C[vi, vj]))
    words = ("consumer 'use' updates 'X' in place", "a buffer of its own")
    refused(sch, sch.reorder_collective, gather, [sch.get_sblock("use")], words=words)


def test_gather_over_one_axis_of_two(schedule):
    """What is moved behind stays shared over the other axis."""
    sch = Schedule(schedule(4, 6, 8).mod, mesh=Mesh({"dp": 2, "tp": 2}))
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    epi = sch.get_sblock("epi")
    for block in (partial, reduce, epi):
        sch.shard(sch.get_loops(block)[0], "dp")
    _, gather = sch.split_collective(reduce, 1)
    (moved,) = sch.reorder_collective(gather, [epi])
    bound = {
        sch.get(block).name_hint: {sch.get(loop).annotations.get("axe.bind") for loop in sch.get_loops(block)} - {None}
        for block in (epi, moved)
    }
    assert bound == {"epi": {"dp", "tp"}, "out_global": {"dp"}}


def test_consumer_of_slices_that_is_not_pointwise(gathered, refused):
    """`flip` reads nothing of C, but `D` backwards."""
    sch, gather = gathered(two_results, matmul="sum")
    blocks = [sch.get_sblock(name) for name in ("double", "add", "flip")]
    refused(sch, sch.reorder_collective, gather, blocks, words=("consumer 'flip' is not pointwise", "of 'D'"))


def test_gather_that_is_gone(gathered, schedule, refused):
    sch, gather = gathered(schedule().mod)
    epi = sch.get_sblock("epi")
    sch.reorder_collective(gather, [epi])
    refused(sch, sch.reorder_collective, gather, [epi], words=("reorder_collective: the block given is not of this",))


def test_blocks_of_one_name_are_told_apart(gathered):
    """Both consumers are called `use`; leaving one out is noticed."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 8), "float32"), X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
        C = T.sblock_alloc_buffer((4,))
        for i, k in T.grid(4, 8):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    C[vi] = T.float32(0)
                C[vi] = C[vi] + A[vi, vk]
        for i in range(4):
            with T.sblock("use"):
                vi = T.axis.spatial(4, i)
                X[vi] = C[vi] * T.float32(2)
        for i in range(4):
            with T.sblock("use"):
                vi = T.axis.spatial(4, i)
                Y[vi] = C[vi] * T.float32(3)

    sch, gather = gathered(program, matmul="sum")
    readers = sch.get_consumers(gather)
    assert len(readers) == 2
    with pytest.raises(ValueError, match="'use' reads what it gathers and is not among"):
        sch.reorder_collective(gather, readers[:1])
    assert len(sch.reorder_collective(gather, readers)) == 2


def test_a_gather_of_a_parameter(refused):
    """The caller gets all of it, beside what is computed of it."""

    @T.prim_func(s_tir=True)
    def step(X: T.Buffer((8, 4), "float32"), W: T.Buffer((4,), "float32"), g: T.Buffer((4,), "float32"),
             new: T.Buffer((4,), "float32")):  # fmt: skip
        for i, k in T.grid(4, 8):
            with T.sblock("gradient"):
                v, r = T.axis.remap("SR", [i, k])
                with T.init():
                    g[v] = T.float32(0)
                g[v] = g[v] + X[r, v]
        for i in range(4):
            with T.sblock("step"):
                v = T.axis.spatial(4, i)
                new[v] = W[v] - g[v]

    sch = Schedule(step, mesh=Mesh({"dp": 2}))
    _, gather = sch.split_collective(sch.shard("gradient", "k", "dp")[1])
    words = ("leaves the parameter 'g', which the caller gets whole", "Declare 'g' sharded", "with_layouts")
    refused(sch, sch.reorder_collective, gather, [sch.get_sblock("step")], words=words)
