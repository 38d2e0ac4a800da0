"""The cost model: what it learns, what it keeps, and which files it refuses."""

from __future__ import annotations

import errno
import json
import logging

import numpy as np
import pytest
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.machines import resolve_target
from tvm_axe.meta.model.features import context_for
from tvm_axe.meta.model.model import MODEL, CostModel
from tvm_axe.meta.model.ranking import spearman
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.records.database import FAILED_SECONDS, normalize

TILES = [(a, b, c) for a in (1, 2, 4, 8) for b in (1, 4, 16) for c in (1, 2, 8)]


def tiled(mod, tile):
    sch = s_tir.Schedule(mod)
    block = sch.get_sblock("mm_rf")
    halves = [sch.split(loop, [None, factor]) for loop, factor in zip(sch.get_loops(block), tile)]
    sch.reorder(*(outer for outer, _ in halves), *(inner for _, inner in halves))
    return ms.MeasureCandidate(sch, ms.arg_info.ArgInfo.from_entry_func(mod))


def seconds(tile):
    """A made-up time: large tiles are fast, but not along k."""
    a, b, c = tile
    return 1e-3 * c / (a * b) ** 0.5


def results(times):
    return [ms.runner.RunnerResult(None if t is None else [t], "failed" if t is None else None) for t in times]


@pytest.fixture(scope="module")
def task(matmul, target):
    """A context, its candidates, and their made-up times."""
    mod = normalize(matmul(32, 48, 40))
    return context_for(mod, target), [tiled(mod, tile) for tile in TILES], [seconds(tile) for tile in TILES]


@pytest.fixture(scope="module")
def other(matmul, target):
    """Another workload, for what is learnt of one and asked of another."""
    mod = normalize(matmul(64, 32, 24))
    return context_for(mod, target), [tiled(mod, tile) for tile in TILES], [seconds(tile) for tile in TILES]


def taught(target, task, **options):
    context, candidates, times = task
    model = CostModel(target, **options)
    model.update(context, candidates, results(times))
    return model


def test_it_learns_the_order(task, target):
    context, candidates, times = task
    model = CostModel(target)
    model.update(context, candidates[::2], results(times[::2]))
    assert spearman(model.predict(context, candidates[1::2]), np.array(times[1::2])) > 0.8


def test_it_knows_a_new_workload_from_an_old_one(task, other, target):
    model = taught(target, task)
    context, candidates, times = other
    assert model.trained
    assert spearman(model.predict(context, candidates), np.array(times)) > 0.8


def test_before_it_has_learnt_the_seed_decides(task, target):
    context, candidates, _ = task
    models = [CostModel(target, seed) for seed in (1, 1, 2)]
    assert not any(model.trained for model in models)
    scores = []
    for model in models:
        np.random.seed(len(scores))
        scores.append(model.predict(context, candidates))
    np.testing.assert_array_equal(scores[0], scores[1])
    assert (scores[0] != scores[2]).all()


def test_the_same_lessons_give_the_same_scores(task, target):
    context, candidates, _ = task
    one, two = (taught(target, task, seed=3).predict(context, candidates) for _ in range(2))
    np.testing.assert_array_equal(one, two)


def test_a_lesson_repeated_is_passed_over(task, target):
    context, candidates, times = task
    model = taught(target, task)
    (samples,) = model.samples.values()
    before, trees = len(samples.rows), model.model.trees
    model.update(context, candidates[:9], results(times[:9]))
    (samples,) = model.samples.values()
    assert (len(samples.rows), model.model.trees) == (before, trees)


def test_failures_are_learnt(task, target):
    """Candidates with a deep k fail; others like them are expected to."""
    context, candidates, times = task
    fates = [None if tile[2] == 8 else t for tile, t in zip(TILES, times)]
    model = CostModel(target)
    model.update(context, candidates[::2], results(fates[::2]))
    scores = model.predict(context, candidates[1::2])
    failing = np.array([t is None for t in fates[1::2]])
    assert scores[failing].max() < scores[~failing].mean()
    recorded = CostModel(target)
    recorded.update(context, candidates[::2], results([t or FAILED_SECONDS for t in fates[::2]]))
    np.testing.assert_array_equal(recorded.predict(context, candidates[1::2]), scores)


def test_where_all_fail_none_is_praised(task, target):
    context, candidates, _ = task
    model = CostModel(target)
    model.update(context, candidates, results([None] * len(candidates)))
    assert np.abs(model.predict(context, candidates)).max() < 0.1


def test_it_is_the_same_from_its_file(task, other, target, tmp_path):
    path = tmp_path / MODEL
    model = taught(target, task)
    model.store(path)
    again = CostModel(target)
    again.restore(path)
    for context, candidates, _ in (task, other):
        np.testing.assert_array_equal(again.predict(context, candidates), model.predict(context, candidates))


def test_two_jobs_that_store_lose_nothing(task, other, target, tmp_path):
    path = tmp_path / MODEL
    for lessons in (task, other, other):
        taught(target, lessons).store(path)
    both = CostModel(target)
    both.restore(path)
    assert sorted(len(samples.rows) for samples in both.samples.values()) == sorted(
        len(next(iter(taught(target, lessons).samples.values())).rows) for lessons in (task, other)
    )
    assert [p.name for p in tmp_path.glob("*.new")] == []


def test_the_oldest_workload_makes_room(task, other, target, tmp_path, monkeypatch):
    monkeypatch.setattr("tvm_axe.meta.model.model._KNOWN", len(TILES))
    path = tmp_path / MODEL
    for lessons in (task, other):
        model = CostModel(target)
        model.restore(path)
        context, candidates, times = lessons
        model.update(context, candidates, results(times))
        model.store(path)
    again = CostModel(target)
    again.restore(path)
    assert list(again.samples) == list(taught(target, other).samples)


def test_a_file_that_is_not_there_teaches_nothing(target, tmp_path):
    model = CostModel(target)
    model.restore(tmp_path / MODEL)
    assert not model.trained


@pytest.mark.parametrize("junk", [b"", b"\x00\xff junk", b"PK\x03\x04 not all of an archive"])
def test_a_broken_file_is_named_and_replaced(task, target, tmp_path, junk):
    path = tmp_path / MODEL
    path.write_bytes(junk)
    model = CostModel(target)
    with pytest.warns(UserWarning, match=f"{path}: not a cost model that can be read"):
        model.restore(path)
    assert not model.trained
    with pytest.warns(UserWarning, match="not a cost model"):
        taught(target, task).store(path)
    model.restore(path)
    assert model.trained


def test_a_file_cut_anywhere_is_refused(task, target, tmp_path):
    path = tmp_path / MODEL
    taught(target, task).store(path)
    whole = path.read_bytes()
    for size in np.linspace(1, len(whole) - 1, 12, dtype=int):
        path.write_bytes(whole[:size])
        model = CostModel(target)
        with pytest.warns(UserWarning, match="it is not used"):
            model.restore(path)
        assert not model.trained


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("target", {"kind": "llvm", "num-cores": 77}, "of other target.*77"),
        ("columns", [164, "something"], "of other columns"),
        ("apache-tvm", "0.1", "of other apache-tvm 0.1, not 0.27"),
        ("format", 0, "of other format"),
    ],
)
def test_a_foreign_or_stale_file_is_named_and_ignored(task, target, tmp_path, name, value, said):
    path = tmp_path / MODEL
    taught(target, task).store(path)
    with np.load(path) as file:
        arrays = dict(file)
    arrays["about"] = np.array(json.dumps({**json.loads(str(arrays["about"])), name: value}))
    np.savez(path, **arrays)
    model = CostModel(target)
    with pytest.warns(UserWarning, match=said):
        model.restore(path)
    assert not model.trained


def test_models_of_two_targets_do_not_mix(task, target, tmp_path):
    path = tmp_path / MODEL
    taught(target, task).store(path)
    model = CostModel(resolve_target("llvm", threads=2))
    with pytest.warns(UserWarning, match="of other target"):
        model.restore(path)
    assert not model.trained


def test_a_full_disk_leaves_the_old_file(task, other, target, tmp_path, monkeypatch):
    path = tmp_path / MODEL
    taught(target, task).store(path)
    before = path.read_bytes()

    def full(file, **_):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(TuneError, match=f"{path}: the cost model cannot be written: No space left on device"):
        taught(target, other).store(path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == [MODEL]


def test_it_guides_upstreams_search(matmul, target):
    """Within MetaSchedule's evolutionary search, which asks it for scores by way of C++."""
    mod = normalize(matmul(32, 48, 40))
    model = CostModel(target)
    strategy = ms.search_strategy.EvolutionarySearch(population_size=8, init_min_unmeasured=8, genetic_num_iters=1)
    space = space_for(mod["main"], target)
    context = _tvm.tune_context(mod, target, space, strategy, "main", 1, 1, logging.getLogger(__name__))
    spaces = context.generate_design_space()
    context.pre_tuning(64, 8, spaces, ms.database.MemoryDatabase(), model)
    for _ in range(2):
        candidates = context.generate_measure_candidates()
        times = results([1e-3 * (n + 1) for n in range(len(candidates))])
        model.update(context, candidates, times)
        context.notify_runner_results(candidates, times)
    assert model.trained
    assert len(context.generate_measure_candidates()) > 0
