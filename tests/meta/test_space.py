"""Which blocks count as matmuls, and that every tile of every one computes the right thing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.meta import resolve_target
from tvm_axe.meta.matmul import find_matmuls
from tvm_axe.meta.space import register_tile, space_for, tiles


def _any_order(m: int, n: int, k: int, order: str, left: str, swapped: bool) -> tirx.PrimFunc:
    """A matmul with its loops in `order`, A stored as ``ik`` or ``ki``, and the factors swapped or not."""
    extent = {"i": m, "j": n, "k": k}
    e0, e1, e2 = (extent[c] for c in order)
    pi, pj, pk = (order.index(c) for c in "ijk")
    a_shape = [extent[c] for c in left]
    a_first, a_second = (0, 1) if left == "ik" else (1, 0)

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer(a_shape, "float32"), B: T.Buffer((k, n), "float32"), C: T.Buffer((m, n), "float32")):
        for x, y, z in T.grid(e0, e1, e2):
            with T.sblock("C"):
                vi = T.axis.spatial(m, [x, y, z][pi])
                vj = T.axis.spatial(n, [x, y, z][pj])
                vk = T.axis.reduce(k, [x, y, z][pk])
                with T.init():
                    C[vi, vj] = T.float32(0)
                if swapped:
                    C[vi, vj] = B[vk, vj] * A[[vi, vk][a_first], [vi, vk][a_second]] + C[vi, vj]
                else:
                    C[vi, vj] = C[vi, vj] + A[[vi, vk][a_first], [vi, vk][a_second]] * B[vk, vj]

    return main


def _error(mod: tvm.IRModule, target: Target, arrays: list[np.ndarray], want: np.ndarray) -> float:
    """Largest difference from float64, relative to the largest value; the output starts as NaN."""
    out = np.full(want.shape, np.nan, arrays[0].dtype)
    tensors = [tvm.runtime.tensor(a) for a in (*arrays, out)]
    tvm.compile(mod, target=target)["main"](*tensors)
    return float(np.abs(tensors[-1].numpy() - want).max() / np.abs(want).max())


@settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    extents=st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 20)),
    order=st.sampled_from(["".join(p) for p in itertools.permutations("ijk")]),
    left=st.sampled_from(["ik", "ki"]),
    swapped=st.booleans(),
    threads=st.sampled_from([1, 2]),
    pick=st.integers(0, 1000),
)
def test_every_tile_is_right_for_all_extents_orders_and_transposes(extents, order, left, swapped, threads, pick):
    m, n, k = extents
    func = _any_order(m, n, k, order, left, swapped)
    target = resolve_target("llvm", threads=threads)
    sch = s_tir.Schedule(func, seed=pick + 1)
    (match,) = find_matmuls(sch)
    options = tiles(match, target)
    register_tile(sch, match, target, options[pick % len(options)])
    rng = np.random.default_rng(pick)
    a, b = rng.standard_normal((m, k), "float32"), rng.standard_normal((k, n), "float32")
    stored = a if left == "ik" else np.ascontiguousarray(a.T)
    assert _error(sch.mod, target, [stored, b], a.astype("float64") @ b) < 1e-5


def test_batches_and_double_precision(target):
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
    (match,) = find_matmuls(s_tir.Schedule(main))
    for tile in tiles(match, target)[::3]:
        sch = s_tir.Schedule(main)
        register_tile(sch, match, target, tile)
        assert _error(sch.mod, target, [a, b], a @ b) < 1e-13, tile


def test_a_tile_is_replayed_from_json(matmul, target):
    func = matmul(61, 53, 67)
    sch = s_tir.Schedule(func, seed=3)
    (match,) = find_matmuls(sch)
    register_tile(sch, match, target, tiles(match, target)[0])
    again = s_tir.Schedule(func)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), again)
    tvm.ir.assert_structural_equal(again.mod, sch.mod)


def test_tiles_fit_the_registers_and_the_matrix(matmul):
    for cpu, registers in (("znver4", 32), ("haswell", 16)):
        target = Target({"kind": "llvm", "mcpu": cpu, "num-cores": 1})
        for m, n in ((512, 768), (3, 768), (512, 5), (1, 1)):
            (match,) = find_matmuls(s_tir.Schedule(matmul(m, n, 16)))
            shapes = tiles(match, target)
            assert shapes
            for tile in shapes:
                assert tile.rows * tile.vectors + tile.vectors + 1 <= registers
                assert tile.rows <= m


@T.prim_func(s_tir=True)
def _nt(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vj, vk]


@T.prim_func(s_tir=True)
def _guarded(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            T.where(i < 7)
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def _square(A: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * A[vk, vj]


@T.prim_func(s_tir=True)
def _integer(A: T.Buffer((8, 8), "int32"), B: T.Buffer((8, 8), "int32"), C: T.Buffer((8, 8), "int32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = 0
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def _shifted(A: T.Buffer((8, 9), "float32"), B: T.Buffer((9, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk + 1] * B[vk, vj]


@pytest.mark.parametrize("func", [_guarded, _integer, _shifted])
def test_other_patterns_are_left_to_upstreams_rules(func, target):
    assert find_matmuls(s_tir.Schedule(func)) == []
    assert isinstance(space_for(func, target), ms.space_generator.PostOrderApply)


@pytest.mark.parametrize("func", [_nt, _square])
def test_products_for_which_there_are_tile_kernels_alone(func, target):
    assert find_matmuls(s_tir.Schedule(func)) == []
    spaces = space_for(func, target).generate_design_space(s_tir.Schedule(func).mod)
    assert spaces
    assert all("axe.tile" in str(space.trace) for space in spaces)


def test_an_elementwise_epilogue_is_scheduled_too(target):
    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((13, 7), "float32"),
        B: T.Buffer((7, 50), "float32"),
        bias: T.Buffer((50,), "float32"),
        out: T.Buffer((13, 50), "float32"),
    ):
        C = T.sblock_alloc_buffer((13, 50), "float32")
        for i, j, k in T.grid(13, 50, 7):
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
        for i, j in T.grid(13, 50):
            with T.sblock("out"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0))

    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s, "float32") for s in ((13, 7), (7, 50), (50,)))
    spaces = space_for(main, target).generate_design_space(tvm.IRModule({"main": main}))
    assert len(spaces) > 1
    for sch in spaces[::4]:
        assert _error(sch.mod, target, [a, b, c], np.maximum(a.astype("float64") @ b + c, 0)) < 1e-5
