"""What wins a task: with a clock whose noise is made up, nothing that is only lucky; and no kill loses anything."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms

from tvm_axe.errors import TuneError
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.measure.runner import Runner
from tvm_axe.meta.model.model import CostModel
from tvm_axe.meta.report.page import page
from tvm_axe.meta.search.finals import FINALISTS, TURNS, Finals
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.policy import KERNELS, winner
from tvm_axe.meta.search.search import Tools
from tvm_axe.meta.task import Task, Workload
from tvm_axe.records import apply_best
from tvm_axe.records.database import RECORDS, normalize, read_records, read_workloads
from tvm_axe.records.provenance import read_runs
from tvm_axe.records.trials import key_of, read_trials, revise_trials


class Noisy:
    """Measures candidate n as `truth` says, at first times `luck` where n has any, and again with `noise` in each turn.

    The untuned function can't be run, as on a GPU, unless it has a time.
    """

    def __init__(self, truth, luck=None, noise=0.0, untuned=None):
        self.conditions, self.machines = {"clock": "made up"}, {}
        self.truth, self.luck, self.noise, self.untuned = truth, luck or {}, noise, untuned
        self.random = random.Random(0)
        self.measured, self.finals = [], []

    def prepare(self, mod):
        return Measurement(self.untuned)

    def measure_all(self, mods):
        for mod in mods:
            self.measured.append(_number(mod))
            yield Measurement(self.truth(self.measured[-1]) * self.luck.get(self.measured[-1], 1.0))

    def in_turns(self, mods, turns):
        numbers = [_number(mod) for mod in mods]
        self.finals.append(numbers)
        true = [self.untuned if n is None else self.truth(n) for n in numbers]
        return [[s * (1 + self.noise * self.random.uniform(-1, 1)) for _ in range(turns)] for s in true]


def _number(mod) -> int | None:
    found = re.search(r'"number": (\d+)', mod.script())
    return int(found[1]) if found else None


def _numbered(count):
    """A space of `count` candidates, all openers."""

    def space(func, target):
        def annotate(sch):
            spaces = [sch.copy() for _ in range(count)]
            for n, each in enumerate(spaces):
                each.annotate(each.get_sblock("mm_rf"), "number", n)
            return spaces

        return ms.space_generator.ScheduleFn(annotate, sch_rules=[], postprocs=[], mutator_probs={})

    return space


@pytest.fixture
def job(tmp_path, matmul, target):
    def make(clock, count=8, trials=None):
        tools = Tools(clock, CostModel(target, 0), _numbered(count), opening=count)
        workload = Workload("mm", normalize(matmul(64, 64, 64)))
        return Job([workload], tools, target, tmp_path, trials or count, seed=1)

    return make


@pytest.fixture
def applied(tmp_path, matmul, target):
    """The number of the candidate that `apply_best` takes, None for the function as it is, and its seconds."""

    def get():
        best, seconds = apply_best(IRModule({"main": matmul(64, 64, 64)}), target, tmp_path)
        return _number(best), seconds["main"]

    return get


def _upstreams(folder) -> int | None:
    """The number of the candidate that upstream takes."""
    database = ms.database.JSONDatabase(str(folder / "database_workload.json"), str(folder / RECORDS))
    workload = ms.database.Workload.from_json(list(read_workloads(folder)[0])).mod
    (best,) = database.get_top_k(database.commit_workload(workload), 1)
    trace = json.dumps([str(value) for inst in best.trace.insts for value in inst.inputs])
    found = re.findall(r"\d+", trace)
    return int(found[-1]) if found else None


def _lines(folder):
    return read_records(folder, read_workloads(folder))


def test_a_lucky_candidate_does_not_win_over_the_default(job, applied):
    clock = Noisy(lambda n: 1e-3, luck={n: 1 - n / 100 for n in range(1, 8)}, noise=0.02)
    (result,) = job(clock).run(progress=False)
    assert clock.finals[0] == [0, 4, 5, 6, 7]
    number, seconds = applied()
    assert (number, seconds) == (0, result.best_ms / 1e3)
    assert seconds == pytest.approx(1e-3, rel=0.02)  # and not the 0.93 that was recorded at first
    assert _upstreams(result.folder) == 0
    assert all(line.seconds > seconds for line in _lines(result.folder)[1:])


def test_one_that_is_faster_wins_in_spite_of_a_luckier_one(job, applied):
    truth = {3: 0.9e-3}
    clock = Noisy(lambda n: truth.get(n, 1e-3), luck={5: 0.7, 6: 0.8}, noise=0.02)
    (result,) = job(clock).run(progress=False)
    assert applied() == (3, pytest.approx(0.9e-3, rel=0.02))
    assert _upstreams(result.folder) == 3
    assert result.best_ms == pytest.approx(applied()[1] * 1e3)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_worse_than_the_default_never_wins(job, applied, seed):
    clock = Noisy(lambda n: 1e-3 * (1 + n / 50), luck=dict.fromkeys(range(1, 8), 0.5), noise=0.05)
    clock.random.seed(seed)
    job(clock).run(progress=False)
    assert applied()[0] == 0


def test_the_function_as_it_is_has_the_right_of_way(job, applied):
    clock = Noisy(lambda n: 1e-3, luck={2: 0.9}, noise=0.01, untuned=1.005e-3)
    (result,) = job(clock).run(progress=False)
    assert clock.finals[0][:2] == [None, 0]
    assert applied() == (None, result.before_ms / 1e3)
    assert result.best_ms == result.before_ms


def test_a_slow_function_as_it_is_takes_no_part(job):
    clock = Noisy(lambda n: 1e-3, untuned=1e-2)
    (result,) = job(clock).run(progress=False)
    assert None not in clock.finals[0]
    assert result.before_ms == 10


def test_more_that_only_look_better_are_timed_too_and_what_is_left_is_not_believed(job, applied):
    clock = Noisy(lambda n: 1e-3, luck={n: 0.6 + n / 100 for n in range(1, 20)})
    (result,) = job(clock, count=20).run(progress=False)
    assert len(clock.finals) == 3
    assert {*itertools.chain(*clock.finals)} == {*range(1 + 3 * FINALISTS)}
    number, seconds = applied()
    assert (number, seconds) == (0, pytest.approx(1e-3))
    left = [line.seconds for line in _lines(result.folder)[13:]]
    assert left == sorted(left)  # they keep their order
    assert left[0] > seconds
    assert left[-1] / left[0] == pytest.approx((0.6 + 0.19) / (0.6 + 0.13))


def test_a_machine_that_is_slower_by_then_changes_nothing(job, applied):
    clock = Noisy(lambda n: 1e-3 * (1 + n / 100), luck=dict.fromkeys(range(20), 0.7), noise=0.001)
    (result,) = job(clock, count=20).run(progress=False)
    assert clock.finals == [[0, 1, 2, 3]]
    assert applied() == (0, pytest.approx(1e-3, rel=0.001))
    times = [line.seconds for line in _lines(result.folder)]
    assert times == pytest.approx([clock.truth(n) for n in range(20)], rel=0.002)


def test_a_job_that_goes_on_confirms_what_is_new(job, applied):
    truth = {9: 0.8e-3}
    first, second, third = (Noisy(lambda n: truth.get(n, 1e-3), luck={5: 0.9, 11: 0.85}, noise=0.01) for _ in range(3))
    job(first, count=16, trials=8).run(progress=False)
    assert applied()[0] == 0
    (result,) = job(second, count=16, trials=16).run(progress=False)
    assert sorted(second.measured) == [*range(8, 16)]
    assert {0, 9, 11} <= {*second.finals[0]}
    assert not {*second.finals[0]} & {*first.finals[0][1:]}  # they have lost
    assert applied() == (9, pytest.approx(0.8e-3, rel=0.01))
    (again,) = job(third, count=16, trials=16).run(progress=False)
    assert (third.measured, third.finals) == ([], [])
    assert again == result


def test_each_record_keeps_its_line_in_the_log(job):
    (result,) = job(Noisy(lambda n: 1e-3 + n * 1e-6, luck={6: 0.9}, noise=0.01)).run(progress=False)
    trials = read_trials(result.folder)
    assert [trial.record for trial in trials] == [key_of(line.entry) for line in _lines(result.folder)]
    assert [trial.seconds for trial in trials] == [line.seconds for line in _lines(result.folder)]
    assert [n for n, trial in enumerate(trials) if trial.turns == TURNS] == [0, 1, 2, 6]
    assert all(trial.elapsed is not None for trial in trials)


def test_the_provenance_has_the_revised_times(job):
    (result,) = job(Noisy(lambda n: 1e-3, luck={3: 0.9}, noise=0.01, untuned=1e-3)).run(progress=False)
    (run,) = read_runs(result.folder)
    (about,) = run["tasks"].values()
    assert (about["before_ms"], about["best_ms"]) == (result.before_ms, result.best_ms)
    assert result.before_ms != 1  # its turns had noise


class Killed(BaseException):
    """Nothing catches it, as nothing catches SIGKILL."""


@pytest.mark.parametrize("moment", ["in the turns", "revise_trials", "choose_records", "after choose_records"])
def test_a_kill_in_between_loses_nothing(job, applied, monkeypatch, moment):
    def clock():
        return Noisy(lambda n: 1e-3, luck={5: 0.9}, noise=0.01)

    killed = clock()
    with monkeypatch.context() as patch:
        if moment == "in the turns":
            patch.setattr(killed, "in_turns", _raise, raising=False)
        elif moment == "after choose_records":
            calls = iter([revise_trials, _raise])
            patch.setattr("tvm_axe.meta.task.revise_trials", lambda *a, **k: next(calls)(*a, **k))
        else:
            patch.setattr(f"tvm_axe.meta.task.{moment}", _raise)
        with pytest.raises(Killed):
            job(killed).run(progress=False)
    second = clock()
    (result,) = job(second).run(progress=False)
    assert second.measured == []
    assert bool(second.finals) == (moment != "after choose_records")
    assert result.trials == len(_lines(result.folder)) == 8
    assert applied() == (0, result.best_ms / 1e3)
    lines = {trial.record: trial for trial in read_trials(result.folder)}
    assert all(lines[key_of(line.entry)].elapsed is not None for line in _lines(result.folder))


def _raise(*args, **kwargs):
    raise Killed


def test_finals_that_fail_leave_the_records_and_say_why(job, applied):
    clock = Noisy(lambda n: 1e-3, luck={5: 0.9})

    def fails(mods, turns):
        raise TuneError("turns: crashed (SIGSEGV)")

    clock.in_turns = fails
    (result,) = job(clock).run(progress=False)
    assert result.failures == ("its best could not be timed again: turns: crashed (SIGSEGV)",)
    assert applied() == (5, pytest.approx(0.9e-3))


def test_records_of_others_meanwhile_stay(job, tmp_path, matmul, target):
    clock = Noisy(lambda n: 1e-3, luck={5: 0.9}, noise=0.01)
    in_turns = clock.in_turns

    def beside_another(mods, turns):
        other = Task(Workload("mm", normalize(matmul(64, 64, 64))), target, tmp_path, 1, 1)
        candidate = next(line for line in _lines(other.folder) if _in_trace(line) == 2)
        text = json.dumps([candidate.workload, [candidate.trace, [5e-3], *candidate.entry[2:]]])
        if not clock.finals:
            with open(other.folder / RECORDS, "a") as file:
                file.write(text + "\n")
        return in_turns(mods, turns)

    clock.in_turns = beside_another
    (result,) = job(clock).run(progress=False)
    assert [line.seconds for line in _lines(result.folder)][8:] == [5e-3]


def _in_trace(line) -> int:
    """The number with which the record annotates, by an instruction ``["Annotate", [block, n], ...]``."""
    (number,) = [int(inputs[1]) for kind, inputs, *_ in line.trace[0] if kind == "Annotate"]
    return number


def test_one_candidate_has_nothing_to_be_timed_beside(job):
    clock = Noisy(lambda n: 1e-3)
    job(clock, trials=1).run(progress=False)
    assert clock.finals == []


def test_the_rule():
    same = [10.0, 10.1, 9.9, 10.0, 10.2, 9.8, 10.0]
    assert winner([same, [s * 0.98 for s in same]], KERNELS) == 1
    assert winner([same, [s * 0.995 for s in same]], KERNELS) == 0  # too little to be sure of
    assert winner([same, [5.0, 5.0, 5.0, 5.0, 10.3, 10.3, 10.3]], KERNELS) == 0  # faster in four turns of seven
    assert (
        winner([same, [s * 0.95 for s in same], [s * 0.945 for s in same]], KERNELS) == 1
    )  # the earlier of two as good
    noise = random.Random(0)
    drawn = [[[noise.gauss(1, 0.05) for _ in range(TURNS)] for _ in range(2)] for _ in range(1000)]
    assert sum(winner(times, KERNELS) for times in drawn) < 100


def test_the_worker_times_in_turns(target, matmul, tmp_path):
    func = normalize(matmul(64, 64, 64))
    with Runner(target, tmp_path / "worker.log", timeout=10.0) as worker:
        with pytest.raises(TuneError, match="no function is prepared, or it could not be"):
            worker.in_turns([func], 3)
        assert worker.prepare(func).failure is None
        times = worker.in_turns([func, func], 3)
        assert [len(turns) for turns in times] == [3, 3]
        assert all(s > 0 for turns in times for s in turns)
        with pytest.raises(TuneError, match=r"^turns: "):
            worker.in_turns([normalize(matmul(32, 64, 64)), func], 3)
        (measured,) = worker.measure_all([func])  # by a new process
        assert measured.failure is None


def test_finals_read_records_once_they_are_due(job, tmp_path, matmul, target):
    job(Noisy(lambda n: 1e-3, noise=0.01)).run(progress=False)
    task = Task(Workload("mm", normalize(matmul(64, 64, 64))), target, tmp_path, 1, 8)
    assert not Finals(task).due


def test_the_report_says_so(job, target):
    (result,) = job(Noisy(lambda n: 1e-3 - n * 5e-5)).run(progress=False)
    assert "The best schedule, 0.65 ms, the median of 7 turns with the next best, is " in page(
        target, (result,), {}, {}
    )
