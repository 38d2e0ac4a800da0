"""`tvm-axe db`: what it prints, as text and as JSON, and what it refuses."""

from __future__ import annotations

import json

import pytest
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

from tvm_axe import cli
from tvm_axe.machines.target import resolve_target
from tvm_axe.records import shipped
from tvm_axe.records.database import RECORDS, Database, normalize
from tvm_axe.records.folders import folder_for
from tvm_axe.records.provenance import Provenance

TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}
OTHER = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 2}


@T.prim_func(s_tir=True)
def product(A: T.Buffer((4, 6), "float32"), B: T.Buffer((6, 5), "float32"), C: T.Buffer((4, 5), "float32")):
    for i, j, k in T.grid(4, 5, 6):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


def _write(root, target, seconds):
    target, mod = resolve_target(target), normalize(product)
    folder = folder_for(root, target, "product", mod)
    database = Database(folder)
    workload = database.commit_workload(mod)
    for n, s in enumerate(seconds):
        sch = s_tir.Schedule(workload.mod)
        if n > 0:
            sch.parallel(sch.get_loops(sch.get_sblock("C"))[0])
        infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
        database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [s], target, infos))
    Provenance(folder, target, 7, 3).record(str(workload.as_json()[0]), name="product", best_ms=1)
    return folder


@pytest.fixture
def logs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return _write(tmp_path / "tuning_logs/local", TARGET, [0.004, 0.002, 0.001, 1e10])


def _json(capsys, *argv: str, code: int = 0):
    assert cli.main(["db", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def _text(capsys, *argv: str, code: int = 0) -> str:
    assert cli.main(["db", *argv]) == code
    return capsys.readouterr().out


def test_list(logs, capsys):
    (row,) = _json(capsys, "list")["rows"]
    assert row.pop("date").startswith("20")
    assert row.pop("gflops") == pytest.approx(2 * 4 * 5 * 6 / 1e-3 / 1e9)
    assert row == {
        "target": "llvm-x86-64-v3-2cores",
        "workload": logs.name,
        "trials": 3,
        "failed": 1,
        "before_ms": 4.0,
        "best_ms": 1.0,
        "folder": f"tuning_logs/local/llvm-x86-64-v3-2cores/{logs.name}",
    }
    title, line = _text(capsys, "list", "tuning_logs/local").splitlines()
    assert title.split()[:4] == ["target", "workload", "trials", "failed"]
    assert line.split()[:6] == ["llvm-x86-64-v3-2cores", logs.name, "3", "1", "4", "1"]
    assert _json(capsys, "list", "--target", "cuda")["rows"] == []


def test_show_and_best(logs, capsys):
    (shown,) = _json(capsys, "show", "product")["rows"]
    assert (shown["workload"], shown["hash"], shown["runs"][0]["seed"]) == (logs.name, shown["hash"], 7)
    assert [record["ms"] for record in shown["records"]] == [1.0, 2.0, None]
    assert (shown["best"]["ms"], shown["best"]["place"]) == (1.0, f"{shown['folder']}/{RECORDS}:3")
    assert "sch.parallel" in shown["best"]["trace"]
    assert "T.parallel(4)" in shown["best"]["script"]
    text = _text(capsys, "show", "4x5x6")
    for words in ("seed 7", "apache-tvm 0.27.0.post1", "3 trials, 1 of them failed", "sch.parallel", "T.parallel(4)"):
        assert words in text
    best = _json(capsys, "best", "product", "--target", "llvm-x86-64-v3-2cores")
    assert {key: best[key] for key in shown["best"]} == shown["best"]
    first, *script = _text(capsys, "best", "product").splitlines()
    assert first == f"# {logs.name} for llvm-x86-64-v3-2cores: 1 ms ({shown['best']['place']})"
    assert "T.parallel(4)" in "\n".join(script)


def test_a_schedule_that_no_longer_applies_is_named_and_passed_over(logs, capsys):
    lines = (logs / RECORDS).read_text().splitlines(keepends=True)
    lines[2] = lines[2].replace('"C", "main"', '"gone", "main"')
    (logs / RECORDS).write_text("".join(lines))
    assert cli.main(["db", "best", "product", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ms"] == 2.0
    assert err.startswith("tvm-axe: warning: skipped tuning_logs/local/")
    assert f"{RECORDS}:3: a record that no longer applies" in err
    assert "2 ms  tuning_logs" in _text(capsys, "show", "product")


def test_best_needs_one_target_and_a_good_candidate(logs, tmp_path, capsys):
    _write(tmp_path / "tuning_logs/local", OTHER, [1e10, 1e10])
    assert cli.main(["db", "best", "product"]) == 2
    assert "was tuned for llvm-x86-64-v3-2cores, llvm-x86-64-v4-2cores; --target" in capsys.readouterr().err
    assert cli.main(["db", "best", "product", "--target", json.dumps(OTHER)]) == 2
    assert "every candidate failed" in capsys.readouterr().err
    assert "- ms at best" in _text(capsys, "show", "product", "--target", json.dumps(OTHER))


def test_merge_prune_and_validate(logs, tmp_path, capsys):
    _write(tmp_path / "more", OTHER, [0.004])
    assert _json(capsys, "merge", "tuning_logs/local", "more", "all") == {"records": 5, "known": 0, "left_out": 0}
    assert _text(capsys, "merge", "tuning_logs/local", "all") == "all: 0 new records, 4 were there\n"
    assert "all: 1 new records, 0 were there" in _text(capsys, "merge", "--flat", "more", "all/flat").replace(
        "/flat", ""
    )
    assert _json(capsys, "validate", "all") == {"good": 6, "problems": []}
    assert _json(capsys, "prune", "all", "--keep", "1") == {"kept": 4, "dropped": 2}
    assert _text(capsys, "validate", "all") == "4 records in order, 0 problems\n"
    path = logs / RECORDS
    path.write_text(path.read_text() + "{cut")
    problem = f"tuning_logs/local/{logs.parent.name}/{logs.name}/{RECORDS}:5: skipped a broken tuning record: '{{cut'"
    assert _json(capsys, "validate", code=1) == {"good": 4, "problems": [problem]}
    assert problem in _text(capsys, "validate", code=1)
    # The others go on, and say what they skip.
    assert cli.main(["db", "list"]) == 0
    assert capsys.readouterr().err == f"tvm-axe: warning: {problem}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list", "nothing"], "nothing: there is no such folder"),
        (["list", "--target", "abacus"], "target: 'abacus' names no target"),
        (["show", "conv"], "conv: no workload of tuning_logs/local is called so; there are product-4x5x6-"),
        (["merge", "tuning_logs/local", "tuning_logs/local"], "tuning_logs/local is both a source and the destination"),
        (["prune", "--keep", "0"], "keep: at least one schedule of each workload must stay, not 0"),
    ],
)
def test_what_cannot_be_done_is_said(logs, capsys, argv, message):
    assert cli.main(["db", *argv]) == 2
    assert f"tvm-axe: error: {message}" in capsys.readouterr().err.replace("merge: ", "")


def test_the_shipped_records_have_a_name(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "package")
    _write(tmp_path / "package", TARGET, [0.004])
    assert [row["trials"] for row in _json(capsys, "list", "shipped")["rows"]] == [0]
