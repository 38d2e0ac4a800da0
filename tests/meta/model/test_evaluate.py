"""Asking the cost model about records that it wasn't trained on: the metrics, the table, the command."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms

from tvm_axe.cli import main
from tvm_axe.meta.model.evaluate import ARMS, LEAST, evaluate, read_samples
from tvm_axe.meta.model.features import PER_STORE, own_names
from tvm_axe.meta.model.ranking import METRICS, grade, kendall, ranks, recall, spearman, yielded
from tvm_axe.records.database import RECORDS, Database, normalize
from tvm_axe.records.folders import folder_for
from tvm_axe.schedule import tile_kernel

NAMES = ("block_m", "block_n", "block_k")
CHOICES = list(itertools.product((32, 64, 96, 128), (32, 64, 128), (64, 128)))


def test_perfect_and_reversed_scores():
    seconds = np.array([3.0, 1.0, 2.0, 5.0, 4.0, 6.0])
    assert dict(zip(METRICS, grade(-seconds, seconds))) == dict.fromkeys(METRICS, pytest.approx(1))
    worst = dict(zip(METRICS, grade(seconds, seconds)))
    assert (worst["spearman"], worst["kendall"]) == pytest.approx((-1, -1))
    assert (worst["recall_1"], worst["best_1"]) == (0, pytest.approx(1 / 6))


@pytest.mark.parametrize("seed", range(5))
def test_correlations_as_counted_pair_by_pair(seed):
    """Ties on both sides, and two failures, which are slower than all others and tie."""
    random = np.random.default_rng(seed)
    scores, seconds = random.integers(0, 6, 20).astype(float), random.integers(1, 8, 20).astype(float)
    seconds[:2] = np.inf
    agree = differ = scored = timed = 0
    for a, b in itertools.combinations(range(20), 2):
        by_score = np.sign(scores[a] - scores[b])
        by_time = float(seconds[b] > seconds[a]) - float(seconds[b] < seconds[a])
        agree, differ = agree + (by_score * by_time > 0), differ + (by_score * by_time < 0)
        scored, timed = scored + (by_score != 0), timed + (by_time != 0)
    assert kendall(scores, seconds) == pytest.approx((agree - differ) / np.sqrt(scored * timed))
    middle = [(np.sum(scores < s) + np.sum(scores <= s) - 1) / 2 for s in scores]
    np.testing.assert_allclose(ranks(scores), middle)
    finite = np.where(np.isinf(seconds), 100, seconds)
    assert spearman(scores, seconds) == pytest.approx(np.corrcoef(middle, ranks(-finite))[0, 1])


def test_one_score_for_all_says_nothing():
    seconds = np.arange(1.0, 9)
    assert spearman(np.ones(8), seconds) == kendall(np.ones(8), seconds) == 0


def test_the_first_few():
    seconds, scores = np.array([1.0, 2, 4, 8]), np.array([0.1, 0.9, 0.8, 0.0])
    assert [recall(scores, seconds, n) for n in (1, 2, 3, 9)] == pytest.approx([0, 1 / 2, 1, 1])
    assert [yielded(scores, seconds, n) for n in (1, 2, 3)] == pytest.approx([1 / 2, 1 / 2, 1])
    assert yielded(scores, np.array([1.0, np.inf, 4, 8]), 1) == 0


def _commit(work_dir, func, name, target, choices, failed=()):
    """Records of tile kernels: their times depend on the parameters alone, which upstream's features don't see."""
    mod = normalize(func)
    database = Database(folder_for(work_dir, target, name, mod))
    workload = database.commit_workload(mod)
    for n, choice in enumerate([None, *choices]):
        sch = s_tir.Schedule(workload.mod)
        seconds = 1.0
        if choice is not None:
            tile_kernel(sch, sch.get_sblock("mm_rf"), "matmul", **dict(zip(NAMES, choice)))
            seconds = 1e10 if n in failed else 1e-3 * choice[1] / choice[0] + 1e-6 * choice[2]
        infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
        database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [seconds], target, infos))


@pytest.fixture(scope="module")
def databases(tmp_path_factory, matmul, target):
    work_dir = tmp_path_factory.mktemp("databases")
    for m in (128, 256, 512):
        _commit(work_dir, matmul(m, 128, 256), "mm", target, CHOICES, failed=(3,))
    _commit(work_dir, matmul(96, 128, 256), "small", target, CHOICES[:3])
    return work_dir


def test_records_become_samples(databases):
    ((_, workloads),) = read_samples(databases).items()
    assert sorted(len(samples.rows) for samples in workloads.values()) == [3, 24, 24, 24]
    for name, samples in workloads.items():
        assert name.startswith("mm-" if len(samples.rows) > 3 else "small-")
        assert all(rows.shape[1] == PER_STORE + len(own_names()) for rows in samples.rows)
        assert sum(np.isinf(samples.seconds)) == (1 if len(samples.rows) > 3 else 0)


def test_what_only_our_features_see_only_they_predict(databases):
    found = evaluate(databases, seeds=2)
    ((_, target), _) = found.questions()
    assert {question for question, _ in found.questions()} == {"across", "within"}
    without, ours = (dict(zip(METRICS, found.mean("across", target, arm)[0])) for arm in ARMS)
    assert abs(without["spearman"]) < 0.3
    assert ours["spearman"] > 0.8
    assert ours["best_5"] > 0.9
    assert found.wins("across", target) == (3, 3)
    assert {s.candidates for s in found.scores if s.question == "across"} == {24}
    assert {s.candidates for s in found.scores if s.question == "within"} == {12}
    ((left, why),) = found.left_out.items()
    assert left.startswith(f"{target}, small-96x")
    assert why.startswith(f"3 candidate(s), 3 of them good; at least {LEAST}")


def test_the_same_seeds_give_the_same_table(databases):
    folder = next(path.parent for path in databases.rglob(RECORDS) if "mm-" in path.parent.name)
    assert evaluate(folder, seeds=1).as_json() == evaluate(folder, seeds=1).as_json()


def test_one_workload_has_no_other_to_learn_from(tmp_path, matmul, target):
    _commit(tmp_path, matmul(128, 128, 256), "mm", target, CHOICES)
    found = evaluate(tmp_path, seeds=1)
    assert [question for question, _ in found.questions()] == ["within"]
    assert list(found.left_out.values()) == ["there is one workload, and no other to learn from"]


def test_a_record_that_no_longer_applies_is_named(tmp_path, matmul, target):
    _commit(tmp_path, matmul(128, 128, 256), "mm", target, CHOICES)
    (path,) = tmp_path.rglob(RECORDS)
    path.write_text(path.read_text().replace('"mm_rf"', '"gone"', 1))
    with pytest.warns(UserWarning, match=f"{path}:2: "):
        ((_, workloads),) = read_samples(tmp_path).items()
    (samples,) = workloads.values()
    assert len(samples.rows) == len(CHOICES) - 1


def test_the_command(databases, capsys):
    assert main(["meta", "evaluate", str(databases), "--seeds", "1"]) == 0
    text = capsys.readouterr().out
    assert "across, llvm-" in text
    assert all(arm in text for arm in ARMS)
    assert "left out: llvm-" in text
    assert main(["meta", "evaluate", str(databases), "--seeds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {entry["question"] for entry in found["summary"]} == {"across", "within"}
    assert {entry["workloads"] for entry in found["summary"]} == {3}
    assert set(found["summary"][0]["with ours"]["mean"]) == set(METRICS)
    assert len(found["workloads"]) == 3 * 2 * 2


def test_what_the_command_refuses(tmp_path, capsys):
    assert main(["meta", "evaluate", str(tmp_path / "missing")]) == 2
    assert "missing: not a folder; one with tuning databases in it is needed" in capsys.readouterr().err
    assert main(["meta", "evaluate", str(tmp_path)]) == 2
    assert "there is no tuning database at or below it" in capsys.readouterr().err
    assert main(["meta", "evaluate", str(tmp_path), "--seeds", "0"]) == 2
    assert "--seeds: a question is asked at least once, not 0 times" in capsys.readouterr().err


def test_broken_lines_are_named_and_an_end_without_any_good_one_too(tmp_path, matmul, target, capsys):
    _commit(tmp_path, matmul(128, 128, 256), "mm", target, CHOICES[:2])
    (path,) = tmp_path.rglob(RECORDS)
    good = path.read_text()
    path.write_text("{]\n" + good)
    assert main(["meta", "evaluate", str(tmp_path), "--seeds", "1"]) == 0
    assert f"tvm-axe: warning: {path}:1: skipped a broken tuning record" in capsys.readouterr().err
    path.write_text("{]\n")
    assert main(["meta", "evaluate", str(tmp_path), "--seeds", "1"]) == 2
    assert f"{tmp_path}: none of its 1 tuning databases has a record that can be read" in capsys.readouterr().err
