"""tile_kernel: annotates a product of matrices, moves its epilogue, and refuses what a kernel cannot compute."""

import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule, tile_kernel
from tvm_axe.schedule.product import product_of


@T.prim_func(s_tir=True)
def annotated(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((4, 2), "float32"),
    out: T.Buffer((4, 2), "float32"),
):
    C = T.sblock_alloc_buffer((4, 2))
    for i in range(4):
        for j, k in T.grid(2, 8):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                T.sblock_attr({"axe.tile": "matmul", "axe.tile.block_m": 64, "axe.tile.block_n": 16})
                with T.init():
                    C[vi, vj] = T.float32(0.0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for ax0 in range(2):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, ax0])
                out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]


def test_the_rewrite(schedule, is_now):
    sch = schedule()
    sch.tile_kernel(sch.get_sblock("mm"), "matmul", sch.get_sblock("epi"), block_m=64, block_n=16)
    is_now(sch, annotated)
    replayed = s_tir.Schedule(sch.origin)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), replayed)
    tvm.ir.assert_structural_equal(replayed.mod, sch.mod)


def test_a_sampled_parameter(schedule):
    sch = schedule()
    rows = sch.sample_categorical([32, 64], [0.5, 0.5], decision=1)
    sch.tile_kernel(sch.get_sblock("mm"), "matmul", block_m=rows)
    annotations = sch.get(sch.get_sblock("mm")).annotations
    assert {str(key): value for key, value in annotations.items()} == {"axe.tile": "matmul", "axe.tile.block_m": 64}
    for decision, block_m in enumerate([32, 64]):
        trace = sch.trace.with_decision(sch.trace.insts[0], decision, remove_postproc=False)
        other = s_tir.Schedule(sch.origin)
        trace.apply_to_schedule(other, remove_postproc=False)
        assert other.get(other.get_sblock("mm")).annotations["axe.tile.block_m"] == block_m


def blocks_of(func):
    sch = s_tir.Schedule(func)
    return sch, sch.get_sblock("mm")


def batched(order: str):
    b_shape = {"kn": (3, 8, 6), "nk": (3, 6, 8)}[order]

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((3, 4, 8), "float16"), B: T.Buffer(b_shape, "float16"), C: T.Buffer((3, 4, 6), "float16")):
        for b, i, j, k in T.grid(3, 4, 6, 8):
            with T.sblock("mm"):
                vb, vi, vj, vk = T.axis.remap("SSSR", [b, i, j, k])
                with T.init():
                    C[vb, vi, vj] = T.float16(0)
                if order == "kn":
                    C[vb, vi, vj] = B[vb, vk, vj] * A[vb, vi, vk] + C[vb, vi, vj]
                else:
                    C[vb, vi, vj] = C[vb, vi, vj] + A[vb, vi, vk] * B[vb, vj, vk]

    return func


@pytest.mark.parametrize("order", ["kn", "nk"])
def test_products_with_a_batch(order):
    sch, mm = blocks_of(batched(order))
    found = product_of(sch.get(mm))
    assert (found.shape, found.transpose_b, found.a.name) == ((3, 4, 6, 8), order == "nk", "A")
    with pytest.raises(ScheduleError, match="takes no batch, here of 3; valid is batched_matmul"):
        tile_kernel(sch, mm, "matmul")
    tile_kernel(sch, mm, "batched_matmul")


@T.prim_func(s_tir=True)
def many_dimensions(
    A: T.Buffer((2, 3, 4, 5), "bfloat16"), B: T.Buffer((4, 5, 6, 7), "bfloat16"), C: T.Buffer((2, 3, 6, 7), "float32")
):
    """Attention's projection of all heads, and a result of two dimensions."""
    for a, b, c, d, e, f in T.grid(2, 3, 6, 7, 4, 5):
        with T.sblock("mm"):
            va, vb, vc, vd, ve, vf = T.axis.remap("SSSSRR", [a, b, c, d, e, f])
            with T.init():
                C[va, vb, vc, vd] = T.float32(0)
            C[va, vb, vc, vd] += T.cast(A[va, vb, ve, vf], "float32") * T.cast(B[ve, vf, vc, vd], "float32")


def test_parts_of_several_dimensions():
    sch, mm = blocks_of(many_dimensions)
    found = product_of(sch.get(mm))
    assert (found.shape, found.transpose_b) == ((1, 6, 42, 20), False)
    tile_kernel(sch, mm, "matmul")


@T.prim_func(s_tir=True)
def transposed_a(A: T.Buffer((8, 4), "float32"), B: T.Buffer((8, 6), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j, k in T.grid(4, 6, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += A[vk, vi] * B[vk, vj]


@T.prim_func(s_tir=True)
def part(A: T.Buffer((4, 9), "float32"), B: T.Buffer((8, 6), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j, k in T.grid(4, 6, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def from_one(A: T.Buffer((4, 8), "float32"), B: T.Buffer((8, 6), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j, k in T.grid(4, 6, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(1)
            C[vi, vj] += A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def doubles(A: T.Buffer((4, 8), "float64"), B: T.Buffer((8, 6), "float64"), C: T.Buffer((4, 6), "float64")):
    for i, j, k in T.grid(4, 6, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float64(0)
            C[vi, vj] += A[vi, vk] * B[vk, vj]


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (transposed_a, ("'mm' is no product of matrices", "A[vk, vi]", "valid is C[batch, i, j] += A[batch, i, k]")),
        (part, ("'mm' is no product of matrices", "over whole buffers")),
        (from_one, ("'mm' is no product of matrices", "C starting from zero")),
        (doubles, ("matmul multiplies two operands of one type of float32", "A is float64")),
    ],
)
def test_blocks_that_the_kernel_does_not_compute(func, words, refused):
    sch = Schedule(func, mesh=Mesh({"tp": 1}))
    refused(sch, sch.tile_kernel, sch.get_sblock("mm"), "matmul", words=words)


def test_names(schedule, refused):
    sch = schedule()
    mm = sch.get_sblock("mm")
    refused(sch, sch.tile_kernel, mm, "softmax", words=("'mm'", "'softmax' is no kernel for products", "matmul"))
    refused(sch, sch.tile_kernel, mm, "gem", words=("'gem' is no kernel for products",))
    refused(sch, sch.tile_kernel, mm, "batched_matmul", words=("batched_matmul takes a batch; valid is matmul",))
    refused(sch, sch.tile_kernel, mm, "skinny_matmul", words=("skinny_matmul takes B by columns", "W is B[k, j]"))
    with pytest.raises(ScheduleError, match=r"matmul has no parameter block_x; valid are .*block_m.*stages"):
        sch.tile_kernel(mm, "matmul", block_x=3)


def test_epilogues(schedule, refused):
    sch = schedule()
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    refused(sch, sch.tile_kernel, mm, "matmul", mm, words=("'mm'", "'C' is read by epi", "alone reads it, here 'mm'"))
    sch = Schedule(transposed_b_alone, mesh=Mesh({"tp": 1}))
    mm = sch.get_sblock("mm")
    refused(sch, sch.tile_kernel, mm, "matmul", mm, words=("its product 'C' is a parameter",))
    sch = schedule()
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    for loop in sch.get_loops(mm)[:2]:
        sch.split(loop, [2, None])
    refused(sch, sch.tile_kernel, mm, "matmul", epi, words=("none of its loops is a row or column alone",))


@T.prim_func(s_tir=True)
def transposed_b_alone(A: T.Buffer((4, 8), "float32"), B: T.Buffer((6, 8), "float32"), C: T.Buffer((4, 6), "float32")):
    for i, j, k in T.grid(4, 6, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += A[vi, vk] * B[vj, vk]


def test_a_device_s_share_of_a_sum(schedule, all_reduce):
    """The partial product that shard leaves of the block: C_rf[d, i, j] += A[i, d * 4 + k] * W[d * 4 + k, j]."""
    sch = schedule()
    partial, reduce = all_reduce(sch)
    sch.tile_kernel(partial, "matmul")
    assert "axe.tile" in sch.get(partial).annotations
    with pytest.raises(ScheduleError, match="'mm' is no product of matrices"):
        sch.tile_kernel(reduce, "matmul")
