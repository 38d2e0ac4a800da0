"""Tile programs of others are tuned like everything else: their knobs are what schedules of them say."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import tvm
from tuning_tiles import plain, product, rows, scaled, two_passes, unknown, waiting, wrong
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms

from tvm_axe import _tvm, tile
from tvm_axe.analysis.annotations import KNOB
from tvm_axe.checking.comparing import summing_slack
from tvm_axe.checking.inputs import indices_of
from tvm_axe.errors import LowerError, TileError, TuneError
from tvm_axe.machines import nvcc, resolve_target
from tvm_axe.meta import tune
from tvm_axe.meta.model.features.knobs import knob_columns
from tvm_axe.meta.search.workloads import workloads_of
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.pipeline import build
from tvm_axe.records import apply_best
from tvm_axe.records.database import FAILED_SECONDS, Database, find_databases, normalize, read_records, read_workloads
from tvm_axe.records.knobs import recorded_knobs
from tvm_axe.tile.tunable import BLOCK, is_tile_program, knobs_in, program_of, tunable


def scheduled(func, **values) -> s_tir.Schedule:
    """A schedule of a program in which these knobs are set."""
    sch = s_tir.Schedule(normalize(tunable(func)))
    for name, value in values.items():
        sch.annotate(sch.get_sblock(BLOCK), f"{KNOB}.{name}", value)
    return sch


def records(folder):
    """The candidates on disk by their knobs, each with its seconds."""
    (database,) = find_databases(folder)
    workloads = read_workloads(database)
    found = {}
    for record in read_records(database, workloads):
        if record.trace[0]:
            mod = ms.database.Workload.from_json(list(workloads[record.workload])).mod
            found[tuple(knobs_in(record.schedule(mod).mod["main"]).values())] = record.seconds
    return found


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, target):
    """A folder in which all that `product` allows is measured, and what `tune` said of it."""
    folder = tmp_path_factory.mktemp("knobs")
    return folder, tune(product, target=target, trials=20, work_dir=folder, seed=0, progress=False)


def test_all_that_is_allowed_is_measured_once(tuned):
    folder, result = tuned
    (task,) = result.tasks
    assert (task.name, task.trials, task.failures) == ("product", 5, ())
    assert records(folder).keys() == {(8, 32), (8, 96), (16, 32), (16, 96), (32, 32)}
    assert task.best_ms <= task.before_ms and result.left_out == {}


def test_compile_takes_the_fastest(tuned, target):
    folder, result = tuned
    exe = tile.compile(product, target, work_dir=folder)
    values, seconds = recorded_knobs(product, target, folder)
    assert seconds * 1e3 == pytest.approx(result.tasks[0].best_ms)
    assert exe.knobs == {"bm": 8, "bk": 32} | values
    assert f"bm = {exe.knobs['bm']}  (the fastest recorded, {1e3 * seconds:.3g} ms; bm of 8, 16, 32)" in exe.explain()
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((70, 90), "float32"), rng.standard_normal((90, 50), "float32")
    c = np.full((70, 50), np.nan, "float32")
    exe(a, b, c)
    np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-4)


def test_what_is_set_goes_before_records(tuned, target):
    folder, _ = tuned
    exe = tile.compile(product, target, knobs={"bm": 16}, work_dir=folder)
    assert exe.knobs == {"bm": 16, "bk": 32}
    assert tile.compile(product, target, work_dir=None).knobs == {"bm": 8, "bk": 32}


def test_records_are_of_a_program_and_a_target(tuned, target):
    folder, _ = tuned
    assert recorded_knobs(rows, target, folder) is None
    assert recorded_knobs(product, resolve_target("llvm", threads=2), folder) is None
    renamed = product.with_attr("global_symbol", "other")
    assert recorded_knobs(renamed, target, folder) is not None
    parsed = tvm.script.from_source(product.script())
    assert recorded_knobs(parsed, target, folder) is not None


def test_kernels_of_a_function_are_tuned_together(tmp_path, target):
    result = tune(two_passes, target=target, trials=8, work_dir=tmp_path, seed=0, progress=False)
    (task,) = result.tasks
    assert (task.name, task.trials, task.failures) == ("two_passes", 4, ())
    assert records(tmp_path).keys() == {(8, 2), (8, 1), (16, 2), (16, 1)}
    assert "kernel main_2(A, B, sums) for m" in result.report.read_text()
    exe = tile.compile(two_passes, target, work_dir=tmp_path)
    values, _ = recorded_knobs(two_passes, target, tmp_path)
    assert exe.knobs == {"block": 8, "pieces": 2} | values
    assert "the fastest recorded, " in exe.explain()
    a, b = np.random.default_rng().random((64, 256), "float32"), np.full((64, 256), np.nan, "float32")
    exe(a, b)
    np.testing.assert_allclose(b, a / (a.sum(1, keepdims=True) + 1000), rtol=1e-5)


def test_the_page_shows_the_program(tuned):
    _, result = tuned
    assert "kernel main(A, B, C) for m" in result.report.read_text()


def test_a_record_of_a_slower_candidate_is_not_chosen(tmp_path, target):
    for seconds, chosen in ((1.0, 64), (2.0, 32)):
        database = Database(tmp_path / "database")
        workload = database.commit_workload(normalize(tunable(rows)))
        sch = s_tir.Schedule(workload.mod)
        sch.annotate(sch.get_sblock(BLOCK), f"{KNOB}.columns", chosen)
        infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
        database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [seconds], target, infos))
    assert recorded_knobs(rows, target, tmp_path) == ({"columns": 64}, 1.0)
    assert tile.compile(rows, target, work_dir=tmp_path).knobs == {"columns": 64}


def test_what_computes_something_else_is_never_recorded_as_good(tmp_path, target):
    (task,) = tune(wrong, target=target, trials=8, work_dir=tmp_path, seed=0, progress=False).tasks
    assert task.trials == 3
    assert len(task.failures) == 2 and all("wrong result" in failure for failure in task.failures)
    found = records(tmp_path)
    assert found[(0,)] < FAILED_SECONDS and found[(1,)] >= FAILED_SECONDS and found[(2,)] >= FAILED_SECONDS
    assert tile.compile(wrong, target, work_dir=tmp_path).knobs == {"way": 0}


def test_numbers_that_choose_rows_are_indices(tmp_path, target):
    assert dict(indices_of(tunable(rows)).most) == {"table": 499}
    (task,) = tune(rows, target=target, trials=4, work_dir=tmp_path, seed=0, progress=False).tasks
    assert (task.trials, task.failures) == (2, ())


def test_what_is_not_tuned_and_why(tmp_path, target):
    mod = IRModule({func.attrs["global_symbol"]: func for func in (plain, scaled, waiting, unknown, product)})
    found, left_out = workloads_of(mod, target)
    assert [workload.name for workload in found] == ["product"]
    assert left_out == {
        "plain": "it is a tile program without knobs (tile.knob)",
        "scaled": "it takes the scalars s, whose values nobody knows here: tune a program that has numbers for them",
        "waiting": "it waits for flags, which nobody would set",
        "unknown": "a parameter is not a buffer of constant shape and of a type that numpy has",
    }
    with pytest.raises(TuneError, match=r"no function can be tuned .*without knobs"):
        tune(plain, target=target, trials=1, work_dir=tmp_path, progress=False)


def test_what_stands_for_a_program():
    func = tunable(product)
    assert is_tile_program(product) and not is_tile_program(func)
    tvm.ir.assert_structural_equal(program_of(func).body, product.body, map_free_vars=True)
    assert program_of(product) is None
    again = tunable(tvm.script.from_source(product.script()))
    assert normalize(again).script() == normalize(func).script()
    assert knobs_in(scheduled(product, bm=16).mod["main"]) == {"bm": 16}


def test_a_space_begins_with_the_defaults_and_refuses_what_the_program_does(target):
    mod = normalize(tunable(product))
    space = space_for(mod["main"], target)
    (refuses,) = space.postprocs
    assert refuses.apply(scheduled(product, bm=16, bk=96)) and not refuses.apply(scheduled(product, bm=32, bk=96))
    (first,) = _tvm.tune_context(
        mod, target, space, ms.search_strategy.ReplayTrace(), "product", 1, 1, logging.getLogger("tvm")
    ).generate_design_space()
    assert knobs_in(first.mod["main"]) == {"bm": 8, "bk": 32}


def test_how_far_sums_may_be_off():
    assert summing_slack(tunable(product)) == pytest.approx(2 * 2.0**-24 * math.sqrt(3 * 32))
    assert summing_slack(tunable(rows)) == 0.0
    assert summing_slack(tunable(two_passes)) == pytest.approx(2 * 2.0**-24 * (math.sqrt(128) + math.sqrt(2)))


def test_columns_tell_candidates_apart():
    first, second = (knob_columns(scheduled(product, bm=bm).mod["main"]) for bm in (16, 32))
    assert first["knob_0"] == math.log2(17) and second["knob_0"] == math.log2(33)
    assert first["knob_1"] == second["knob_1"] == math.log2(33) and first["knob_2"] == 0
    assert first["knob_blocks"] == math.log2(1 + 5) and second["knob_blocks"] == math.log2(1 + 3)
    assert first["knob_shared"] == math.log2(1 + 4 * (16 * 32 + 32 * 64))
    assert first["knob_fragments"] == math.log2(1 + 4 * 16 * 64)
    assert first["knob_products"] == math.log2(1 + 16 * 32 * 64)
    assert (first["knob_steps"], first["knob_stages"]) == (2.0, 0.0)
    refused = knob_columns(scheduled(product, bm=32, bk=96).mod["main"])
    assert refused["knob_0"] == math.log2(33) and refused["knob_blocks"] == 0
    both = knob_columns(scheduled(two_passes, block=16).mod["main"])  # the blocks and tiles of two kernels
    assert both["knob_blocks"] == math.log2(1 + 4 * 2 + 4)
    assert both["knob_fragments"] == math.log2(1 + 4 * (16 * 128 + 16) + 4 * (2 * 16 + 16 + 16 * 256))
    nothing = knob_columns(plain)
    assert set(nothing.values()) == {0.0} and nothing.keys() == first.keys()


@pytest.mark.parametrize("name", ["llvm", "cuda:sm_90a", "cuda:sm_80"])
def test_candidates_are_built_for_every_target(name):
    target = resolve_target(name)
    if target.kind.name == "cuda":
        try:
            nvcc.find_compiler()
        except TileError as error:
            pytest.skip(f"no compiler for CUDA here: {error}")
    assert build(scheduled(product, bm=16).mod, target) is not None
    assert build(scheduled(two_passes, block=16).mod, target) is not None
    with pytest.raises(LowerError, match=r"main: main: tile.require\(bm \* bk <= 2048\) doesn't hold of bm=32, bk=96"):
        build(scheduled(product, bm=32, bk=96).mod, target)


def test_apply_best_gives_the_annotated_function(tuned, target):
    folder, _ = tuned
    mod, seconds = apply_best(IRModule({"p": tunable(product)}), target, folder)
    assert set(seconds) == {"p"} and program_of(mod["p"]) is not None
