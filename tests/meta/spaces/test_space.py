"""Which design spaces a function has on a CPU."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tvm
from tvm import s_tir, te, topi
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing import te_workload
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.machines import resolve_target
from tvm_axe.meta.spaces.space import space_for


def _spaces(func, target) -> list[s_tir.Schedule]:
    mod = IRModule({"main": func.with_attr("global_symbol", "main")})
    strategy = ms.search_strategy.EvolutionarySearch()
    context = _tvm.tune_context(
        mod, target, space_for(mod["main"], target), strategy, "main", 1, 1, logging.getLogger(__name__)
    )
    return list(context.generate_design_space())


def _run(mod: IRModule, target, arrays: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    tensors = [tvm.runtime.tensor(a) for a in (*arrays, np.full(shape, np.nan, "float32"))]
    tvm.compile(mod, target=target)["main"](*tensors)
    return tensors[-1].numpy()


@T.prim_func(s_tir=True)
def _square(A: T.Buffer((8, 8), "float32"), C: T.Buffer((8, 8), "float32")):
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * A[vk, vj]


def test_a_product_for_which_there_are_tile_kernels_alone(target):
    spaces = _spaces(_square, target)
    assert spaces
    assert all("axe.tile" in str(space.trace) for space in spaces)


def test_what_has_no_space_of_ours_has_upstreams_rules(target):
    x = te.placeholder((64, 64), name="x")
    func = te.create_prim_func([x, topi.transpose(x)])
    assert isinstance(space_for(func, target), ms.space_generator.PostOrderApply)
    assert _spaces(func, target)


@pytest.mark.parametrize("name", ["C2D", "T2D", "NRM", "SFM"])
def test_ours_come_before_upstreams(name):
    target = resolve_target("llvm", threads=2)
    spaces = _spaces(te_workload.create_te_workload(name, 0), target)
    by_upstream = ["meta_schedule.unroll" in str(space.trace) for space in spaces]
    assert not by_upstream[0]
    assert by_upstream[-1]
    assert by_upstream == sorted(by_upstream)


def test_a_search_over_both_yields_candidates_that_are_right_and_replayed():
    target = resolve_target("llvm", threads=2)
    func = te.create_prim_func(te_workload.softmax_mn(16, 64)).with_attr("global_symbol", "main")
    mod = IRModule({"main": func})
    strategy = ms.search_strategy.EvolutionarySearch(population_size=16, init_min_unmeasured=8, genetic_num_iters=1)
    context = _tvm.tune_context(
        mod, target, space_for(func, target), strategy, "main", 3, 1, logging.getLogger(__name__)
    )
    database = ms.database.MemoryDatabase()
    database.commit_workload(mod)
    context.pre_tuning(8, 8, context.generate_design_space(), database, ms.cost_model.RandomModel())
    candidates = context.generate_measure_candidates()
    assert candidates
    x = np.random.default_rng(0).standard_normal((16, 64), "float32")
    powers = np.exp(x - x.max(axis=1, keepdims=True), dtype="float64")
    for candidate in candidates[:4]:
        again = s_tir.Schedule(mod)
        s_tir.schedule.Trace.apply_json_to_schedule(candidate.sch.trace.as_json(), again)
        got = _run(again.mod, target, [x], (16, 64))
        np.testing.assert_allclose(got, powers / powers.sum(axis=1, keepdims=True), rtol=1e-5)


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
    spaces = _spaces(main, target)
    assert len(spaces) > 1
    for sch in spaces[::4]:
        got = _run(sch.mod, target, [a, b, c], (13, 50))
        np.testing.assert_allclose(got, np.maximum(a.astype("float64") @ b + c, 0), atol=1e-5)


def test_two_products_take_their_tiles_in_step(target):
    @T.prim_func(s_tir=True)
    def main(
        x: T.Buffer((13, 7), "float32"),
        v: T.Buffer((7, 50), "float32"),
        w: T.Buffer((50, 19), "float32"),
        y: T.Buffer((13, 19), "float32"),
    ):
        h = T.sblock_alloc_buffer((13, 50), "float32")
        r = T.sblock_alloc_buffer((13, 50), "float32")
        for i, j, k in T.grid(13, 50, 7):
            with T.sblock("h"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    h[vi, vj] = T.float32(0)
                h[vi, vj] = h[vi, vj] + x[vi, vk] * v[vk, vj]
        for i, j in T.grid(13, 50):
            with T.sblock("r"):
                vi, vj = T.axis.remap("SS", [i, j])
                r[vi, vj] = T.max(h[vi, vj], T.float32(0))
        for i, j, k in T.grid(13, 19, 50):
            with T.sblock("y"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    y[vi, vj] = T.float32(0)
                y[vi, vj] = y[vi, vj] + r[vi, vk] * w[vk, vj]

    rng = np.random.default_rng(0)
    x, v, w = (rng.standard_normal(s, "float32") for s in ((13, 7), (7, 50), (50, 19)))
    ours = [space for space in _spaces(main, target) if "axe.tile" not in str(space.trace)]
    assert len(ours) > 5
    for sch in ours[::5]:
        # The block between them is where the first one's registers are written, and nothing else computes it again.
        assert len(sch.get_loops(sch.get_sblock("r"))) > 2
        got = _run(sch.mod, target, [x, v, w], (13, 19))
        np.testing.assert_allclose(got, np.maximum(x.astype("float64") @ v, 0) @ w, atol=1e-4)


def test_upstreams_rules_are_left_where_a_primitive_refuses_ours(target):
    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((16, 8), "float32"),
        B: T.Buffer((8, 32), "float32"),
        out: T.Buffer((31, 32), "float32"),
    ):
        C = T.sblock_alloc_buffer((31, 32), "float32")
        for i, j, k in T.grid(16, 32, 8):
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
        for i, j in T.grid(16, 32):
            with T.sblock("out"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi * 2, vj] = C[vi * 2, vj]

    assert isinstance(space_for(main, target), ms.space_generator.PostOrderApply)


def test_a_bias_that_another_block_makes_is_added_in_a_pass_of_its_own(target):
    shapes = {"x": (5, 40), "w": (24, 40), "bias": (24,)}
    x, w, bias = (te.placeholder(shape, name=name) for name, shape in shapes.items())
    doubled = te.compute((24,), lambda i: bias[i] * 2.0, name="doubled")
    func = te.create_prim_func([x, w, bias, topi.nn.dense(x, w, doubled)])
    spaces = _spaces(func, target)
    assert any("axe.tile" in str(space.trace) for space in spaces)
    ours = next(space for space in spaces if "axe.tile" not in str(space.trace))
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(shape, "float32") for shape in shapes.values())
    got = _run(ours.mod, target, [a, b, c], (5, 24))
    np.testing.assert_allclose(got, a.astype("float64") @ b.T + 2 * c, atol=1e-4)
