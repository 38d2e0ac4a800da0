"""Every register tile of every contraction computes the right thing, and its trace is replayed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import s_tir, te, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing import te_workload
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import resolve_target
from tvm_axe.nests.contraction import find_contractions
from tvm_axe.nests.registers import register_tile
from tvm_axe.nests.tiles import tiles


def _any_order(m: int, n: int, k: int, order: str, left: str, right: str, swapped: bool) -> tirx.PrimFunc:
    """A matmul with its loops in `order`, its operands stored as `left` and `right` say, its factors swapped or not."""
    extent = {"i": m, "j": n, "k": k}
    e0, e1, e2 = (extent[c] for c in order)
    pi, pj, pk = (order.index(c) for c in "ijk")
    a_shape, b_shape = [extent[c] for c in left], [extent[c] for c in right]
    a0, a1 = (0, 1) if left == "ik" else (1, 0)
    b0, b1 = (0, 1) if right == "kj" else (1, 0)

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer(a_shape, "float32"), B: T.Buffer(b_shape, "float32"), C: T.Buffer((m, n), "float32")):
        for x, y, z in T.grid(e0, e1, e2):
            with T.sblock("C"):
                vi = T.axis.spatial(m, [x, y, z][pi])
                vj = T.axis.spatial(n, [x, y, z][pj])
                vk = T.axis.reduce(k, [x, y, z][pk])
                with T.init():
                    C[vi, vj] = T.float32(0)
                if swapped:
                    C[vi, vj] = B[[vk, vj][b0], [vk, vj][b1]] * A[[vi, vk][a0], [vi, vk][a1]] + C[vi, vj]
                else:
                    C[vi, vj] = C[vi, vj] + A[[vi, vk][a0], [vi, vk][a1]] * B[[vk, vj][b0], [vk, vj][b1]]

    return main


@settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    extents=st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 20)),
    order=st.sampled_from(["".join(p) for p in itertools.permutations("ijk")]),
    left=st.sampled_from(["ik", "ki"]),
    right=st.sampled_from(["kj", "jk"]),
    swapped=st.booleans(),
    threads=st.sampled_from([1, 2]),
    pick=st.integers(0, 1000),
)
def test_every_tile_is_right_for_all_extents_orders_and_transposes(
    error, extents, order, left, right, swapped, threads, pick
):
    m, n, k = extents
    func = _any_order(m, n, k, order, left, right, swapped)
    target = resolve_target("llvm", threads=threads)
    sch = s_tir.Schedule(func)
    (match,) = find_contractions(sch)
    options = tiles(match, target)
    register_tile(sch, match, target, options[pick % len(options)])
    resampled = _resampled(func, sch, pick + 1)
    rng = np.random.default_rng(pick)
    a, b = rng.standard_normal((m, k), "float32"), rng.standard_normal((k, n), "float32")
    stored = [a if left == "ik" else np.ascontiguousarray(a.T), b if right == "kj" else np.ascontiguousarray(b.T)]
    assert error(resampled.mod, target, stored, a.astype("float64") @ b) < 1e-5


def _resampled(func: tirx.PrimFunc, sch: s_tir.Schedule, seed: int) -> s_tir.Schedule:
    """The same trace with other decisions, drawn at random."""
    again = s_tir.Schedule(func, seed=seed)
    s_tir.schedule.Trace(sch.trace.insts, {}).apply_to_schedule(again, remove_postproc=False)
    return again


def _conv(x: np.ndarray, w: np.ndarray, stride: int, padding: int, dilation: int, groups: int) -> np.ndarray:
    """conv2d of NHWC data and HWIO weights in float64, by its definition."""
    x = np.pad(x.astype("float64"), ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    kh, kw, ci, co = w.shape
    oh, ow = ((n - dilation * (k - 1) - 1) // stride + 1 for n, k in zip(x.shape[1:3], (kh, kw)))
    out = np.zeros((x.shape[0], oh, ow, co))
    for g, r, s in itertools.product(range(groups), range(kh), range(kw)):
        rows = slice(r * dilation, r * dilation + (oh - 1) * stride + 1, stride)
        columns = slice(s * dilation, s * dilation + (ow - 1) * stride + 1, stride)
        own = slice(g * co // groups, (g + 1) * co // groups)
        out[..., own] += x[:, rows, columns, g * ci : (g + 1) * ci] @ w[r, s, :, own]
    return out


def _transposed(x: np.ndarray, w: np.ndarray, stride: int, padding: int) -> np.ndarray:
    """The transposed conv2d in float64: every input point adds its multiple of the kernel to the output."""
    n, h, width, _ = x.shape
    kh, kw, _, co = w.shape
    out = np.zeros((n, (h - 1) * stride + kh, (width - 1) * stride + kw, co))
    for y, z, r, s in itertools.product(range(h), range(width), range(kh), range(kw)):
        out[:, y * stride + r, z * stride + s] += x[:, y, z].astype("float64") @ w[r, s]
    return out[:, padding : out.shape[1] - padding, padding : out.shape[2] - padding]


@pytest.mark.parametrize(
    "h, w, ci, co, kernel, stride, padding, dilation, groups",
    [
        (9, 8, 3, 32, 3, 2, 1, 1, 1),
        (13, 13, 5, 16, 3, 1, 1, 2, 1),
        (6, 7, 8, 64, 2, 1, 0, 1, 2),
        (5, 23, 4, 48, 1, 1, 0, 1, 1),
    ],
    ids=["strided", "dilated", "grouped", "pointwise"],
)
def test_convolutions(error, h, w, ci, co, kernel, stride, padding, dilation, groups):
    target = resolve_target("llvm", threads=2)
    func = te.create_prim_func(te_workload.conv2d_nhwc(1, h, w, ci, co, kernel, stride, padding, dilation, groups))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, h, w, ci), "float32")
    weight = rng.standard_normal((kernel, kernel, ci // groups, co), "float32")
    _check(error, func, target, [x, weight], _conv(x, weight, stride, padding, dilation, groups))


@pytest.mark.parametrize("side, ci, stride, groups", [(7, 1024, 1, 1), (14, 1024, 2, 1), (7, 2048, 1, 2)])
def test_many_terms_go_through_all_rows_in_parts(error, side, ci, stride, groups):
    """What a panel of W is too large for goes through the first cache once, and not for each row of tiles."""
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=2)
    func = te.create_prim_func(te_workload.conv2d_nhwc(1, side, side, ci, 32, 3, stride, 1, 1, groups))
    sch = s_tir.Schedule(func)
    (match,) = find_contractions(sch)
    best, whole = tiles(match, target)[:2]
    assert best.parts > 1 and whole == replace(best, parts=1)
    register_tile(sch, match, target, best)
    rng = np.random.default_rng(ci)
    x = rng.standard_normal((1, side, side, ci), "float32")
    weight = rng.standard_normal((3, 3, ci // groups, 32), "float32")
    want = _conv(x, weight, stride, 1, 1, groups)
    for each in (sch, _resampled(func, sch, ci)):
        assert error(each.mod, target, [x, weight], want) < 1e-5


def test_depthwise_convolutions(error):
    target = resolve_target("llvm", threads=2)
    func = te.create_prim_func(te_workload.depthwise_conv2d_nhwc(1, 9, 11, 32, 3, 1, 1))
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 9, 11, 32), "float32"), rng.standard_normal((1, 3, 3, 32), "float32")
    want = _conv(x, weight.reshape(3, 3, 1, 32), 1, 1, 1, 32)
    _check(error, func, target, [x, weight], want)


def test_transposed_convolutions_write_every_point_once(error):
    target = resolve_target("llvm", threads=2)
    func = te.create_prim_func(te_workload.conv2d_transpose_nhwc(1, 4, 3, 6, 32, 4, 2, 1))
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 4, 3, 6), "float32"), rng.standard_normal((4, 4, 6, 32), "float32")
    _check(error, func, target, [x, weight], _transposed(x, weight, 2, 1))


def test_capsules(error):
    target = resolve_target("llvm", threads=2)
    func = te.create_prim_func(te_workload.conv2d_capsule_nhwijc(1, 4, 4, 3, 16, 3, 1, 1))
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 4, 4, 4, 4, 3), "float32"), rng.standard_normal((3, 3, 4, 4, 3, 16), "float32")
    padded = np.pad(x.astype("float64"), [(0, 0), (1, 1), (1, 1), (0, 0), (0, 0), (0, 0)])
    want = np.zeros((1, 4, 4, 4, 4, 16))
    for r, s in itertools.product(range(3), range(3)):
        want += np.einsum("nhwikc,kjco->nhwijo", padded[:, r : r + 4, s : s + 4], weight[r, s])
    _check(error, func, target, [x, weight], want)


def test_operands_that_are_transposed_first(error):
    target = resolve_target("llvm", threads=2)
    func = te.create_prim_func(te_workload.transpose_batch_matmul(1, 20, 3, 16))
    rng = np.random.default_rng(0)
    query, value = (rng.standard_normal((1, 20, 3, 16), "float32") for _ in range(2))
    want = np.einsum("blhd,bmhd->bhlm", query.astype("float64"), value)
    _check(error, func, target, [query, value], want)


def test_pointwise_blocks_that_follow_are_in_the_nest(error):
    target = resolve_target("llvm", threads=2)
    func = te.create_prim_func(te_workload.conv2d_nhwc_bn_relu(1, 6, 6, 3, 32, 3, 1, 1))
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((1, 6, 6, 3), "float32"), rng.standard_normal((3, 3, 3, 32), "float32")
    bias, offset, scale = (rng.standard_normal(32, "float32") for _ in range(3))
    want = np.maximum((_conv(x, weight, 1, 1, 1, 1) + bias) * scale + offset, 0)
    _check(error, func, target, [x, weight, bias, offset, scale], want)
    sch = s_tir.Schedule(func)
    (match,) = find_contractions(sch)
    taken = register_tile(sch, match, target, tiles(match, target)[0])
    assert taken == {"PaddedInput", "Conv2dOutput", "bias_add", "bn_mul", "bn_add", "compute"}
    left = {str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))}
    assert left == {"PaddedInput", "Conv2dOutput_init", "Conv2dOutput_update", "compute"}


def _check(error, func: tirx.PrimFunc, target: Target, arrays: list[np.ndarray], want: np.ndarray) -> None:
    """Some tiles of every kind, with the first decisions or drawn ones, are right and replayed from JSON."""
    (match,) = find_contractions(s_tir.Schedule(func))
    options = tiles(match, target)
    assert options
    kinds = {(tile.packed, tile.apart): tile for tile in options}
    for n, tile in enumerate([options[0], *kinds.values()]):
        sch = s_tir.Schedule(func)
        register_tile(sch, match, target, tile)
        if n > 0:
            sch = _resampled(func, sch, n)
        assert error(sch.mod, target, arrays, want) < 1e-5, tile
        again = s_tir.Schedule(func)
        s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), again)
        tvm.ir.assert_structural_equal(again.mod, sch.mod)


def test_batches_and_double_precision(error, target):
    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((3, 20, 9), "float64"), B: T.Buffer((9, 21), "float64"), C: T.Buffer((3, 20, 21), "float64")):
        for b, i, j, k in T.grid(3, 20, 21, 9):
            with T.sblock("C"):
                vb, vi, vj, vk = T.axis.remap("SSSR", [b, i, j, k])
                with T.init():
                    C[vb, vi, vj] = T.float64(0)
                C[vb, vi, vj] = C[vb, vi, vj] + A[vb, vi, vk] * B[vk, vj]

    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((3, 20, 9)), rng.standard_normal((9, 21))
    (match,) = find_contractions(s_tir.Schedule(main))
    for tile in tiles(match, target)[::3]:
        sch = s_tir.Schedule(main)
        register_tile(sch, match, target, tile)
        assert error(sch.mod, target, [a, b], a @ b) < 1e-13, tile


def test_tiles_fit_the_registers_and_the_result(matmul):
    for cpu, registers in (("znver4", 32), ("haswell", 16)):
        target = Target({"kind": "llvm", "mcpu": cpu, "num-cores": 1})
        for m, n in ((512, 768), (3, 768), (512, 5), (1, 1)):
            (match,) = find_contractions(s_tir.Schedule(matmul(m, n, 16)))
            shapes = tiles(match, target)
            assert shapes
            for tile in shapes:
                assert tile.accumulators + tile.vectors + 1 <= registers
                assert tile.accumulators <= m * tile.vectors


def test_the_first_decisions_give_every_core_as_much(matmul):
    target = Target({"kind": "llvm", "mcpu": "znver4", "num-cores": 4})
    func = matmul(512, 768, 256)
    (match,) = find_contractions(s_tir.Schedule(func))
    sch = s_tir.Schedule(func)
    register_tile(sch, match, target, tiles(match, target)[0])
    parallel = sch.get(sch.get_loops(sch.get_sblock("mm_rf_update"))[0])
    assert parallel.kind == tirx.ForKind.PARALLEL
    assert int(parallel.extent) % 4 == 0


def test_an_operand_that_costs_something_is_computed_once_for_each_piece(error):
    target = resolve_target("llvm", threads=2)
    x, w = te.placeholder((24, 8), name="x"), te.placeholder((8, 64), name="w")
    k = te.reduce_axis((0, 8), name="k")
    powers = te.compute((24, 8), lambda i, j: te.exp(x[i, j]), name="powers")
    func = te.create_prim_func(
        [x, w, te.compute((24, 64), lambda i, j: te.sum(powers[i, k] * w[k, j], axis=k), name="y")]
    )
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((24, 8), "float32"), rng.standard_normal((8, 64), "float32")
    _check(error, func, target, [a, b], np.exp(a.astype("float64")) @ b)
    (match,) = find_contractions(s_tir.Schedule(func))
    sch = s_tir.Schedule(func)
    register_tile(sch, match, target, next(tile for tile in tiles(match, target) if not tile.apart))
    assert sch.get_sblock("powers") is not None  # not inlined, which would compute it for every column


def test_an_epilogue_of_two_products_is_in_the_nest_of_neither(error):
    target = resolve_target("llvm", threads=2)
    x, v, w = (te.placeholder(shape, name=name) for shape, name in (((9, 8), "x"), ((8, 32), "v"), ((8, 32), "w")))

    def product(columns: te.Tensor, name: str) -> te.Tensor:
        k = te.reduce_axis((0, 8), name="k")
        return te.compute((9, 32), lambda i, j: te.sum(x[i, k] * columns[k, j], axis=k), name=name)

    up, gate = product(v, "up"), product(w, "gate")
    out = te.compute((9, 32), lambda i, j: up[i, j] * te.exp(gate[i, j]), name="out")
    func = te.create_prim_func([x, v, w, out])
    sch = s_tir.Schedule(func)
    taken = [register_tile(sch, match, target, tiles(match, target)[0]) for match in find_contractions(sch)]
    assert taken == [{"up"}, {"gate"}]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape, "float32") for shape in ((9, 8), (8, 32), (8, 32))]
    a, b, c = (array.astype("float64") for array in arrays)
    assert error(sch.mod, target, arrays, (a @ b) * np.exp(a @ c)) < 1e-5


def test_few_columns_that_cannot_be_padded_are_left_alone():
    func = te.create_prim_func(te_workload.conv2d_nhwc(1, 8, 8, 4, 3, 3, 1, 1))
    (match,) = find_contractions(s_tir.Schedule(func))
    assert tiles(match, resolve_target("llvm")) == []


def test_weights_by_columns_are_replayed_from_what_a_database_stores():
    func = _any_order(13, 40, 9, "ijk", "ik", "jk", False)
    target = resolve_target("llvm", threads=2)
    sch = s_tir.Schedule(func)
    (match,) = find_contractions(sch)
    register_tile(sch, match, target, tiles(match, target)[0])
    database = ms.database.MemoryDatabase()
    record = ms.database.TuningRecord(sch.trace, database.commit_workload(IRModule({"main": func})), [1.0], target)
    trace = json.loads(json.dumps(_tvm.record_json(record)))[0]
    again = s_tir.Schedule(func)
    s_tir.schedule.Trace.apply_json_to_schedule(trace, again)
    tvm.ir.assert_structural_equal(again.mod, sch.mod)
    assert any(inst.kind.name == "TransformLayout" for inst in sch.trace.insts)
