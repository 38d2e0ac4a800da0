"""The job's loop, with a measurer whose times follow from the candidates: nothing is compiled or run."""

from __future__ import annotations

import hashlib
import re

import pytest
from tvm.s_tir import meta_schedule as ms

from tvm_axe.errors import AxeError
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.model import model
from tvm_axe.meta.model.model import CostModel
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools, evolution
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.meta.task import Workload
from tvm_axe.records.database import normalize
from tvm_axe.records.trials import read_trials


class Clock:
    """Measures a candidate by its text: `scale` seconds times 1 to 2."""

    def __init__(self, scales=None, fails=()):
        self.conditions, self.machines = {"clock": "made up"}, {}
        self.scales, self.fails = scales or {}, fails
        self.prepared, self.current, self.texts = [], None, []

    def prepare(self, mod):
        self.current = _rows(mod)
        self.prepared.append(self.current)
        if self.current in self.fails:
            return Measurement(None, "crashed (SIGABRT)")
        return Measurement(10 * self._scale())

    def measure_all(self, mods):
        for mod in mods:
            text = mod.script()
            self.texts.append(text)
            yield Measurement(self._scale() * (1 + int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 16**6))

    def _scale(self):
        return self.scales.get(self.current, 1e-3)


def _rows(mod) -> int:
    return int(ms.arg_info.ArgInfo.from_entry_func(mod)[0].shape[0])


def _small():
    """A search that costs little."""
    return ms.search_strategy.EvolutionarySearch(
        population_size=24, init_min_unmeasured=16, genetic_num_iters=1, eps_greedy=0.15
    )


@pytest.fixture
def job(tmp_path, matmul, target):
    def make(
        clock,
        rows=(64,),
        trials=24,
        seed=1,
        patience=None,
        weights=None,
        folder=tmp_path,
        strategy=_small,
        space=space_for,
    ):
        weights = weights or [1] * len(rows)
        workloads = [Workload(f"mm{m}", normalize(matmul(m, 64, 64)), w) for m, w in zip(rows, weights)]
        return Job(
            workloads, Tools(clock, CostModel(target, seed), space, strategy), target, folder, trials, seed, patience
        )

    return make


def test_the_same_seed_and_times_give_the_same_candidates(job, tmp_path):
    runs = {}
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        clock = Clock()
        job(clock, trials=12, seed=seed, folder=tmp_path / name, strategy=evolution).run(progress=False)
        runs[name] = clock.texts
        assert len(set(clock.texts)) == 12
    assert runs["one"] == runs["again"]
    assert runs["one"] != runs["other"]


def test_a_job_that_goes_on_tries_nothing_twice(job):
    first, second = Clock(), Clock()
    job(first, trials=10).run(progress=False)
    (result,) = job(second, trials=20).run(progress=False)
    assert (len(first.texts), len(second.texts), result.trials) == (10, 10, 20)
    assert not set(first.texts) & set(second.texts)
    assert len(read_trials(result.folder)) == 20


def test_a_small_budget_opens_with_each_function_and_the_spaces_in_their_order(job):
    clock = Clock()
    results = job(clock, rows=(64, 32), trials=2, space=_six_annotations).run(progress=False)
    assert [result.trials for result in results] == [2, 2]
    numbers = [int(re.search(r'"number": (\d)', text)[1]) for text in clock.texts]
    assert numbers == [0, 1, 0, 1]


def test_trials_go_where_the_whole_gains_most(job):
    clock = Clock(scales={64: 1e-3, 32: 1e-5})
    large, small = job(clock, rows=(64, 32), trials=24).run(progress=False)
    assert large.trials + small.trials == 48
    assert large.trials >= 3 * small.trials >= 3 * 8
    # The opening round of each, and then as it pays: the worker is told whose candidates come.
    assert clock.prepared[:2] == [64, 32]


def test_the_weight_of_many_calls_counts(job):
    clock = Clock(scales={64: 1e-4, 32: 1e-4})
    rare, frequent = job(clock, rows=(64, 32), trials=24, weights=(1, 50)).run(progress=False)
    assert frequent.trials >= 3 * rare.trials


def test_patience_ends_a_task_and_then_the_job(job):
    class Flat(Clock):
        def measure_all(self, mods):
            for _ in mods:
                yield Measurement(1e-3)

    results = job(Flat(), rows=(64, 32), trials=100, patience=12).run(progress=False)
    assert all(12 < result.trials <= 24 for result in results)  # an opening of up to 8 and one round of 16


def test_a_function_that_cannot_be_run_leaves_the_others_theirs(job):
    clock = Clock(fails={64})
    broken, whole = job(clock, rows=(64, 32), trials=10).run(progress=False)
    assert (broken.trials, whole.trials) == (0, 10)
    assert broken.failures == ("the untuned function: crashed (SIGABRT)",)
    assert broken.before_ms is broken.best_ms is None


def _eight_splits(func, target):
    """A design space of eight candidates: the ways to split 128 in two."""

    def split(sch):
        loop = sch.get_loops(sch.get_sblock("mm_rf"))[0]
        sch.split(loop, sch.sample_perfect_tile(loop, 2, 128))

    return ms.space_generator.ScheduleFn(split, sch_rules=[], postprocs=[], mutator_probs={})


def _six_annotations(func, target):
    """Six design spaces of one candidate each."""

    def annotate(sch):
        spaces = [sch.copy() for _ in range(6)]
        for n, each in enumerate(spaces):
            each.annotate(each.get_sblock("mm_rf"), "number", n)
        return spaces

    return ms.space_generator.ScheduleFn(annotate, sch_rules=[], postprocs=[], mutator_probs={})


def test_a_function_without_a_design_space_leaves_the_others_theirs(job):
    def space(func, target):
        def broken(sch):
            sch.get_sblock("nowhere")

        if int(ms.arg_info.ArgInfo.from_prim_func(func)[0].shape[0]) == 64:
            return ms.space_generator.ScheduleFn(broken, sch_rules=[], postprocs=[], mutator_probs={})
        return _six_annotations(func, target)

    broken, whole = job(Clock(), rows=(64, 32), trials=4, space=space).run(progress=False)
    assert (broken.trials, whole.trials) == (0, 4)
    (reason,) = broken.failures
    assert reason.startswith("its design space could not be generated: ")


def _own_faults():
    def attribute(sch):
        return sch.no_such_method()

    def name(sch):
        return no_such_name  # noqa: F821

    def assertion(sch):
        raise AssertionError("an invariant is broken")

    def kind(sch):
        return 1 + None

    return {
        "no_such_method": attribute,
        "no_such_name": name,
        "invariant": assertion,
        "unsupported operand": kind,
    }


@pytest.mark.parametrize("what", _own_faults())
def test_a_fault_in_a_design_space_stops_the_job(job, what):
    """It doesn't look like an empty space, though it passes through upstream's C++, where some lose their type."""

    def space(func, target):
        return ms.space_generator.ScheduleFn(_own_faults()[what], sch_rules=[], postprocs=[], mutator_probs={})

    with pytest.raises(Exception, match=what) as caught:
        job(Clock(), trials=4, space=space).run(progress=False)
    assert not isinstance(caught.value, AxeError)


def test_a_fault_in_the_cost_model_stops_the_job(job, monkeypatch):
    monkeypatch.setattr(model, "_packed", lambda rows: rows.nothing)
    with pytest.raises(AttributeError, match="nothing"):
        job(Clock(), trials=12).run(progress=False)


def test_an_exhausted_space_ends_the_job(job):
    clock = Clock()
    (result,) = job(clock, rows=(128,), trials=400, space=_eight_splits).run(progress=False)
    assert result.trials == len(set(clock.texts)) == 8
