"""shard: what becomes of data-parallel and reduction loops, and what is refused."""

import pytest
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule, shard


@T.prim_func(s_tir=True)
def rows_uneven(
    A: T.Buffer((5, 7), "float32"),
    W: T.Buffer((7, 3), "float32"),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    C = T.sblock_alloc_buffer((5, 3))
    for i, j, k in T.grid(5, 3, 7):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0.0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1, j in T.grid(3, 3):
            with T.sblock("epi"):
                vi = T.axis.spatial(5, i_0 * 3 + i_1)
                vj = T.axis.spatial(3, j)
                T.where(i_0 * 3 + i_1 < 5)
                out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def reduction_even(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((4, 2), "float32"),
    out: T.Buffer((4, 2), "float32"),
):
    C = T.sblock_alloc_buffer((4, 2))
    C_rf = T.sblock_alloc_buffer((2, 4, 2))
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
                with T.init():
                    C[vi, vj] = T.float32(0.0)
                C[vi, vj] = C[vi, vj] + C_rf[vk_0, vi, vj]
    for i, j in T.grid(4, 2):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def reduction_uneven(
    A: T.Buffer((5, 7), "float32"),
    W: T.Buffer((7, 3), "float32"),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    C = T.sblock_alloc_buffer((5, 3))
    C_rf = T.sblock_alloc_buffer((2, 5, 3))
    for i, j in T.grid(5, 3):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("mm_rf"):
                    vk_0, vi, vj, vk_1 = T.axis.remap("SSSR", [k_0, i, j, k_1])
                    T.where(k_0 * 4 + k_1 < 7)
                    with T.init():
                        C_rf[vk_0, vi, vj] = T.float32(0.0)
                    C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for i, j in T.grid(5, 3):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            with T.sblock("mm"):
                vk_0, vi, vj = T.axis.remap("RSS", [k_0, i, j])
                with T.init():
                    C[vi, vj] = T.float32(0.0)
                C[vi, vj] = C[vi, vj] + C_rf[vk_0, vi, vj]
    for i, j in T.grid(5, 3):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


@T.prim_func(s_tir=True)
def fused_nest(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4, 8), "float32"), C: T.Buffer((4, 8), "float32")):
    for i in range(4):
        for j in range(8):
            with T.sblock("first"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] + T.float32(1)
        for j in range(8):
            with T.sblock("second"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = B[vi, vj] * T.float32(2)


@T.prim_func(s_tir=True)
def from_five(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4,), "float32")):
    for i, k in T.grid(4, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                B[vi] = T.float32(5)
            B[vi] = B[vi] + A[vi, vk]


def test_data_parallel_loop(schedule, is_now):
    sch = schedule(5, 3, 7)
    device, local = sch.shard(sch.get_loops(sch.get_sblock("epi"))[0], "tp")
    is_now(sch, rows_uneven)
    assert (int(sch.get(device).extent), int(sch.get(local).extent)) == (2, 3)
    assert sch.get(device).annotations["axe.bind"] == "tp"


def test_even_reduction(schedule, all_reduce, is_now):
    sch = schedule(4, 2, 8)
    partial, reduce = all_reduce(sch)
    is_now(sch, reduction_even)
    assert [sch.get(block).name_hint for block in (partial, reduce)] == ["mm_rf", "mm"]


def test_uneven_reduction_is_masked(schedule, all_reduce, is_now):
    sch = schedule(5, 3, 7)
    all_reduce(sch)
    is_now(sch, reduction_uneven)


def test_function_on_a_plain_schedule(schedule, is_now):
    sch = s_tir.Schedule(schedule(5, 3, 7).mod)
    shard(sch, sch.get_loops(sch.get_sblock("mm"))[2], "tp", Mesh({"tp": 2}))
    is_now(sch, reduction_uneven)


def test_one_device(schedule, all_reduce):
    sch = schedule(tp=1)
    _, reduce = all_reduce(sch)
    assert [int(sch.get(loop).extent) for loop in sch.get_loops(reduce)] == [4, 2, 1]


def test_loop_of_several_blocks_needs_the_block(refused):
    sch = Schedule(fused_nest, mesh=Mesh({"tp": 2}))
    loop = sch.get_loops(sch.get_sblock("first"))[0]
    refused(sch, sch.shard, loop, "tp", words=("'i'", "first, second", "name the one"))
    device, _ = sch.shard(loop, "tp", sch.get_sblock("first"))
    assert sch.get(device).annotations["axe.bind"] == "tp"


def test_unknown_axis(schedule, refused):
    sch = schedule()
    loop = sch.get_loops(sch.get_sblock("mm"))[0]
    refused(sch, sch.shard, loop, "dp", words=("no axis 'dp'", "its axes are tp"))


def test_loop_of_another_block(schedule, refused):
    sch = schedule()
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    loop = sch.get_loops(epi)[0]
    refused(
        sch, sch.shard, loop, "tp", mm, words=("not one of block 'mm''s loops", "(i, j, k)", "sch.get_loops(block)")
    )


@pytest.mark.parametrize("named", [False, True])
def test_loop_of_another_schedule(schedule, refused, named):
    sch, other = schedule(), schedule()
    loop = other.get_loops(other.get_sblock("mm"))[0]
    block = [sch.get_sblock("mm")] if named else []
    refused(sch, sch.shard, loop, "tp", *block, words=("loop given is not of this schedule", "sch.get_loops(block)"))


def test_block_of_another_schedule(schedule, refused):
    sch = schedule()
    loop = sch.get_loops(sch.get_sblock("mm"))[0]
    foreign = schedule().get_sblock("mm")
    refused(sch, sch.shard, loop, "tp", foreign, words=("block given is not of this schedule", "sch.get_sblock(name)"))


@pytest.mark.parametrize("named", [False, True])
def test_loop_that_is_gone(schedule, refused, named):
    sch = schedule()
    mm = sch.get_sblock("mm")
    loop = sch.get_loops(mm)[0]
    sch.split(loop, [2, None])
    refused(sch, sch.shard, loop, "tp", *([mm] if named else []), words=("or was changed since",))


def test_loop_that_is_bound(schedule, refused):
    sch = schedule()
    mm = sch.get_sblock("mm")
    device, _ = sch.shard(sch.get_loops(mm)[0], "tp")
    refused(sch, sch.shard, device, "tp", words=("'mm'", "'i_0' is already bound to 'tp'"))


@pytest.mark.parametrize("index", [1, 2, 3])
def test_block_that_is_bound(schedule, refused, index):
    """The second data-parallel loop, and the reduction too: its partials would be shared over the axis twice."""
    sch = schedule()
    mm = sch.get_sblock("mm")
    sch.shard(sch.get_loops(mm)[0], "tp")
    loop = sch.get_loops(mm)[index]
    refused(sch, sch.shard, loop, "tp", words=("'mm'", "already has a data-parallel loop bound to 'tp'"))


def test_reduction_that_is_bound(refused):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 2, 8), "float32"), B: T.Buffer((4,), "float32")):
        for i, k, l in T.grid(4, 2, 8):
            with T.sblock("sum"):
                vi, vk, vl = T.axis.remap("SRR", [i, k, l])
                with T.init():
                    B[vi] = T.float32(0)
                B[vi] = B[vi] + A[vi, vk, vl]

    sch = Schedule(program, mesh=Mesh({"tp": 2}))
    _, bound, free = sch.get_loops(sch.get_sblock("sum"))
    sch.annotate(bound, "axe.bind", "tp")
    refused(sch, sch.shard, free, "tp", words=("'sum'", "already has a reduction loop bound to 'tp'"))


@pytest.mark.parametrize(("extent", "devices", "most"), [(5, 4, 3), (3, 4, 3), (1, 2, 1)])
def test_device_without_a_partial(schedule, refused, extent, devices, most):
    sch = schedule(k=extent, tp=devices)
    loop = sch.get_loops(sch.get_sblock("mm"))[2]
    words = (f"a reduction of {extent}", "without a partial", f"an axis of at most {most}")
    refused(sch, sch.shard, loop, "tp", words=words)


def test_reduction_of_a_masked_block(schedule, refused):
    """rfactor drops the mask of the block that sums, which would then write past the end of its buffer."""
    sch = Schedule(schedule(5, 3, 8).mod, mesh=Mesh({"dp": 2, "tp": 2}))
    mm = sch.get_sblock("mm")
    sch.shard(sch.get_loops(mm)[0], "dp")
    loop = sch.get_loops(mm)[3]
    refused(sch, sch.shard, loop, "tp", words=("'mm'", "masked (i_0 * 3 + i_1 < 5)", "before its other loops"))


def test_rows_that_divide_and_then_the_reduction(schedule):
    sch = Schedule(schedule(4, 3, 8).mod, mesh=Mesh({"dp": 2, "tp": 2}))
    mm = sch.get_sblock("mm")
    sch.shard(sch.get_loops(mm)[0], "dp")
    partial, _ = sch.shard(sch.get_loops(mm)[3], "tp")
    bound = [sch.get(loop).annotations.get("axe.bind") for loop in sch.get_loops(partial)]
    assert bound == ["dp", None, None, "tp", None]


def test_loop_that_drives_both(refused):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4,), "float32")):
        for x in range(32):
            with T.sblock("sum"):
                vi = T.axis.spatial(4, x // 8)
                vk = T.axis.reduce(8, x % 8)
                with T.init():
                    B[vi] = T.float32(0)
                B[vi] = B[vi] + A[vi, vk]

    sch = Schedule(program, mesh=Mesh({"tp": 2}))
    loop = sch.get_loops(sch.get_sblock("sum"))[0]
    refused(sch, sch.shard, loop, "tp", words=("'x'", "drives a reduction and a data-parallel iterator"))


def test_reduction_without_an_identity(refused):
    """Upstream's refusal comes after the split; the schedule is still as it was."""
    sch = Schedule(from_five, mesh=Mesh({"tp": 2}))
    loop = sch.get_loops(sch.get_sblock("sum"))[1]
    refused(sch, sch.shard, loop, "tp", words=("shard: block 'sum'", "begins so", "a maximum from T.min_value"))


@T.prim_func(s_tir=True)
def unusual(
    X: T.Buffer((2, 8), "float32"), m: T.Buffer((2,), "float32"), at: T.Buffer((2,), "int32"),
    U: T.Buffer((2, 2), "float32"),
):  # fmt: skip
    for i, k in T.grid(2, 8):
        with T.sblock("argmax"):
            v, r = T.axis.remap("SR", [i, k])
            with T.init():
                m[v] = T.min_value("float32")
                at[v] = -1
            at[v] = T.Select(X[v, r] > m[v], r, at[v])
            m[v] = T.max(X[v, r], m[v])
    for i in range(2):
        with T.sblock("first"):
            v = T.axis.spatial(2, i)
            U[0, v] = m[v]
    for i, k in T.grid(2, 2):
        with T.sblock("next"):
            v, r = T.axis.remap("SR", [i, k])
            with T.init():
                U[1, v] = T.float32(0)
            U[1, v] = U[1, v] + U[0, r]


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ("argmax", ("'argmax' reduces into several buffers at once", "a block for each")),
        ("next", ("'next' also reads elements of 'U' that it doesn't sum into", "a buffer of its own")),
    ],
)
def test_reductions_without_partials(refused, block, words):
    sch = Schedule(unusual, mesh=Mesh({"tp": 2}))
    refused(sch, sch.shard, sch.get_loops(sch.get_sblock(block))[1], "tp", words=words)
