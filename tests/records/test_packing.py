"""Weights that are packed once: the attribute, the design spaces, and the parts of a function."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.machines import resolve_target
from tvm_axe.meta import tune
from tvm_axe.meta.search.search import evolution
from tvm_axe.meta.spaces.postproc import RewriteFreeLayouts
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.nests.contraction import find_contractions
from tvm_axe.nests.registers import register_tile
from tvm_axe.nests.tiles import lanes_of, tiles
from tvm_axe.records import Packing, apply_best, split_packing
from tvm_axe.records.database import Database, normalize
from tvm_axe.records.packing import LAYOUT_FREE, PREPROC, layout_free


@T.prim_func(s_tir=True)
def two_layers(
    A: T.Buffer((12, 20), "float32"),
    W: T.Buffer((20, 36), "float32"),
    V: T.Buffer((28, 36), "float32"),
    out: T.Buffer((12, 28), "float32"),
):
    T.func_attr({"layout_free_buffers": [2, 1]})
    C = T.sblock_alloc_buffer((12, 36), "float32")
    for i, j, l in T.grid(12, 36, 20):
        with T.sblock("up"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, l])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j, l in T.grid(12, 28, 36):
        with T.sblock("down"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, l])
            with T.init():
                out[vi, vj] = T.float32(0)
            out[vi, vj] = out[vi, vj] + C[vi, vk] * V[vj, vk]


@T.prim_func(s_tir=True)
def reads_twice(A: T.Buffer((12, 32), "float32"), W: T.Buffer((32, 32), "float32"), out: T.Buffer((12, 32), "float32")):
    T.func_attr({"layout_free_buffers": [1]})
    C = T.sblock_alloc_buffer((12, 32), "float32")
    for i, j, l in T.grid(12, 32, 32):
        with T.sblock("first"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, l])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j, l in T.grid(12, 32, 32):
        with T.sblock("second"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, l])
            with T.init():
                out[vi, vj] = T.float32(0)
            out[vi, vj] = out[vi, vj] + C[vi, vk] * W[vj, vk]


# ---- The attribute ---------------------------------------------------------------------------------------------------


def test_the_attribute_makes_another_workload_and_an_empty_one_does_not(dense):
    with_it, without = normalize(dense(4, 5, 6)), normalize(dense(4, 5, 6, free=False))
    assert _tvm.workload_hash(with_it) != _tvm.workload_hash(without)
    empty = normalize(dense(4, 5, 6).with_attr(LAYOUT_FREE, []))
    tvm.ir.assert_structural_equal(empty, without)
    assert layout_free(two_layers) == (1, 2)
    assert list(normalize(two_layers)["main"].attrs[LAYOUT_FREE]) == [1, 2]


@pytest.mark.parametrize(
    "value, message",
    [
        ([4], r"has 4, which is no buffer parameter; valid are \[0, 1, 2, 3\]"),
        ([-1], "has -1, which is no buffer parameter"),
        ([1, 3], "has 3, but parameter 'out' is written"),
        (1, "is 1; a list of positions"),
        (["W"], "a list of positions among the parameters is needed"),
    ],
)
def test_a_wrong_attribute_is_refused(value, message, dense, target, tmp_path):
    func = dense(4, 5, 6).with_attr(LAYOUT_FREE, value)
    for use in (
        lambda: normalize(func),
        lambda: tune(func, target=target, trials=1, work_dir=tmp_path, progress=False),
        lambda: apply_best(IRModule({"main": func}), target, tmp_path),
    ):
        with pytest.raises(TuneError, match=message):
            use()


# ---- The spaces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("shape", [(32, 48, 64), (30, 250, 70), (1, 17, 3), (7, 5, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_tile_packs_all_of_the_weights_ahead(shape, transposed, threads, dense, packed_error):
    func, target = dense(*shape, transposed), resolve_target("llvm", threads=threads)
    mod = normalize(func)
    (match,) = find_contractions(s_tir.Schedule(mod))
    assert match.free
    options = tiles(match, target)
    for tile in {options[0], options[len(options) // 2], options[-1]}:
        assert tile.ahead
        sch, again = s_tir.Schedule(mod), s_tir.Schedule(mod)
        register_tile(sch, match, target, tile)
        trace = json.loads(json.dumps(_tvm.plain(sch.trace.as_json())))
        s_tir.schedule.Trace.apply_json_to_schedule(trace, again)
        tvm.ir.assert_structural_equal(again.mod, sch.mod)
        pack, main, places = split_packing(again.mod["main"])
        assert places == (1,)
        panels = [int(n) for n in main.params[1].ty.shape]
        assert panels[-1] == lanes_of(match, target)  # of one vector each, whatever the tile has
        columns = tile.vectors * panels[-1]  # of a tile, whole ones of which there are
        assert panels == [-(-shape[1] // columns) * tile.vectors, shape[2], panels[-1]]
        assert PREPROC not in main.script() + pack.script()

        def want(a, w, bias):
            return a @ (w.T if transposed else w) + bias

        assert packed_error(again.mod["main"], target, want) < 1e-5
        # Whoever doesn't split it has a right function still.
        assert packed_error(again.mod["main"], target, want, split=False) < 1e-5


def test_several_weights_are_packed_in_one_go(target, packed_error):
    sch = s_tir.Schedule(normalize(two_layers))
    for match in find_contractions(sch):
        register_tile(sch, match, target, tiles(match, target)[0])
    pack, main, places = split_packing(sch.mod["main"])
    assert sorted(places) == [1, 2]
    assert len(pack.params) == 4
    assert [main.params[place].ty.shape for place in places] == [param.ty.shape for param in pack.params[2:]]
    assert packed_error(sch.mod["main"], target, lambda a, w, v: a @ w @ v.T) < 1e-5


@T.prim_func(s_tir=True)
def transposes_first(
    A: T.Buffer((10, 14), "float32"), W: T.Buffer((50, 14), "float32"), C: T.Buffer((10, 50), "float32")
):
    T.func_attr({"layout_free_buffers": [1]})
    W_t = T.sblock_alloc_buffer((14, 50), "float32")
    for i, j in T.grid(14, 50):
        with T.sblock("transpose"):
            vi, vj = T.axis.remap("SS", [i, j])
            W_t[vi, vj] = W[vj, vi]
    for i, j, k in T.grid(10, 50, 14):
        with T.sblock("product"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W_t[vk, vj]


def test_weights_that_the_function_transposes_are_packed_as_they_come(target, packed_error):
    sch = s_tir.Schedule(normalize(transposes_first))
    (match,) = find_contractions(sch)
    register_tile(sch, match, target, tiles(match, target)[0])
    assert split_packing(sch.mod["main"]).places == (1,)
    assert "transpose" not in split_packing(sch.mod["main"]).main.script()
    ms.arg_info.ArgInfo.from_entry_func(sch.mod, remove_preproc=True)  # which upstream's search does
    assert packed_error(sch.mod["main"], target, lambda a, w: a @ w.T) < 1e-5


def test_weights_that_are_read_twice_stay_as_they_are():
    matches = find_contractions(s_tir.Schedule(normalize(reads_twice)))
    assert [match.free for match in matches] == [False, False]
    sch = s_tir.Schedule(normalize(reads_twice))
    copy = sch.cache_read(sch.get_sblock("first"), 1, "global", [sch.get_sblock("first")])
    sch.annotate(copy, PREPROC, True)
    with pytest.raises(TuneError, match="'W' is packed, and read by something else too"):
        split_packing(sch.mod["main"])


def test_what_packs_must_be_a_copy_of_a_parameter(dense):
    sch = s_tir.Schedule(normalize(dense(8, 8, 8)))
    sch.annotate(sch.get_sblock("bias"), PREPROC, True)
    with pytest.raises(TuneError, match="block 'bias' packs, but is no copy of one parameter"):
        split_packing(sch.mod["main"])


def test_a_function_without_packing_is_its_own_main(dense):
    func = dense(4, 4, 4)
    assert split_packing(func) == Packing(None, func, ())


@T.prim_func(s_tir=True)
def squares(A: T.Buffer((12, 30), "float32"), W: T.Buffer((30, 22), "float32"), C: T.Buffer((12, 22), "float32")):
    """No product, so that upstream's rules alone schedule it."""
    T.func_attr({"layout_free_buffers": [1]})
    for i, j, k in T.grid(12, 22, 30):
        with T.sblock("squares"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + (A[vi, vk] - W[vk, vj]) * (A[vi, vk] - W[vk, vj])


@T.prim_func(s_tir=True)
def squares_twice(A: T.Buffer((12, 30), "float32"), W: T.Buffer((30, 30), "float32"), C: T.Buffer((12, 30), "float32")):
    """The same, by two blocks that read the weights in different orders."""
    T.func_attr({"layout_free_buffers": [1]})
    B = T.sblock_alloc_buffer((12, 30), "float32")
    for i, j, k in T.grid(12, 30, 30):
        with T.sblock("first"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                B[vi, vj] = T.float32(0)
            B[vi, vj] = B[vi, vj] + (A[vi, vk] - W[vk, vj]) * (A[vi, vk] - W[vk, vj])
    for i, j, k in T.grid(12, 30, 30):
        with T.sblock("second"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + (B[vi, vk] - W[vj, vk]) * (B[vi, vk] - W[vj, vk])


def _squares(a: np.ndarray, w: np.ndarray) -> np.ndarray:
    return ((a[:, :, None] - w[None]) ** 2).sum(axis=1)


@pytest.mark.parametrize("func", [squares, squares_twice], ids=["once", "twice"])
def test_behind_upstreams_rules_layouts_are_rewritten(func, target, packed_error):
    mod = normalize(func)
    space = space_for(mod["main"], target)
    logger = logging.getLogger(__name__)
    context = _tvm.tune_context(mod, target, space, evolution(), "test", 1, 1, logger)
    want = _squares if func is squares else lambda a, w: _squares(_squares(a, w), w.T)
    for sch in context.generate_design_space():
        sch.enter_postproc()
        assert all(postproc.apply(sch) for postproc in space.postprocs)
        assert split_packing(sch.mod["main"]).places == (1,)
        assert packed_error(sch.mod["main"], target, want) < 1e-5
        once = sch.mod
        assert RewriteFreeLayouts().apply(sch)  # what packs already is left alone
        tvm.ir.assert_structural_equal(sch.mod, once)


def test_a_layout_that_cannot_be_rewritten_stays():
    """Upstream's own postprocessor would end the search: it takes names of blocks for unique."""
    sch = s_tir.Schedule(normalize(squares))
    copy = sch.cache_read(sch.get_sblock("squares"), 1, "global")
    sch.cache_read(copy, 0, "global")
    sch.transform_layout(copy, ("write", 0), lambda k, j: [k * 22 + j])
    before = sch.mod
    with pytest.raises(s_tir.ScheduleError, match="Found  2 blocks"):
        ms.postproc.RewriteLayout().apply(sch.copy())
    assert RewriteFreeLayouts().apply(sch)
    tvm.ir.assert_structural_equal(sch.mod, before)


def test_a_record_whose_packing_cannot_be_split_off_is_passed_over(target, tmp_path):
    database = Database(tmp_path)
    workload = database.commit_workload(normalize(reads_twice))
    sch = s_tir.Schedule(workload.mod)
    copy = sch.cache_read(sch.get_sblock("first"), 1, "global", [sch.get_sblock("first")])
    sch.annotate(copy, PREPROC, True)
    infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [1e-9], target, infos))
    with pytest.warns(UserWarning, match="database_tuning_record.json:1: skipped a record .* read by something else"):
        _, seconds = apply_best(IRModule({"main": reads_twice}), target, tmp_path)
    assert seconds == {}
