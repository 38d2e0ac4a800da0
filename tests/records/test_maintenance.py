"""Merging, pruning and validating databases; and that upstream can use what is written."""

from __future__ import annotations

import json

import pytest
from tvm import relax, s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.script import from_source

from tvm_axe.errors import TuneError
from tvm_axe.machines.target import resolve_target
from tvm_axe.records import apply_best
from tvm_axe.records.database import RECORDS, WORKLOADS, Database, find_databases, normalize
from tvm_axe.records.folders import folder_for, target_name
from tvm_axe.records.maintenance import find, merge, prune, tuned, validate
from tvm_axe.records.provenance import PROVENANCE, Provenance
from tvm_axe.schedule.tiles import tile_kernel

OTHER = {"kind": "llvm", "mcpu": "alderlake", "num-cores": 3}  # its name comes before that of any other CPU


@pytest.fixture
def logs(tmp_path, matmul, target, commit):
    """Two matmuls, one of them for two targets, with provenance for one."""
    root = tmp_path / "logs"
    for n, where in ((4, target), (5, target), (4, resolve_target(OTHER))):
        mod = normalize(matmul(n, n, n))
        folder = folder_for(root, where, "mm", mod)
        commit(folder, matmul(n, n, n), where, [0.8, 0.5, 1e10, 0.25, 0.125])
        if n == 5:
            Provenance(folder, where, seed=7, trials=4).record(str(tuned(folder)[0].workload[0]), name="product")
    return root


def _seconds(root) -> dict[tuple[str, str], list[float]]:
    return {(target_name(e.target), e.name): [r.seconds for r in e.records] for e in tuned(root)}


def test_what_is_there_is_told_by_target_and_workload(logs, target):
    entries = tuned(logs)
    assert [(target_name(e.target), e.name.rsplit("-", 1)[0]) for e in entries] == [
        ("llvm-alderlake-3cores", "mm-4x4x4"),
        (target_name(target), "mm-4x4x4"),
        (target_name(target), "mm-5x5x5"),
    ]
    entry = entries[-1]
    assert [record.seconds for record in entry.candidates] == [0.125, 0.25, 0.5, 1e10]
    assert (entry.untuned.seconds, entry.best.seconds) == (0.8, 0.125)
    assert [run["seed"] for run in entry.runs] == [7]
    assert (entry.date, entry.function) == (entry.runs[0]["date"], "product")
    assert (entries[0].date, entries[0].function) == (None, "mm")
    for text in ("llvm-alderlake-3cores", json.dumps(OTHER)):
        assert [e.name for e in tuned(logs, text)] == [entries[0].name]


def test_a_workload_is_found_by_a_part_of_its_name(logs, target):
    assert [e.name for e in find(logs, "5x5")] == [tuned(logs)[-1].name]
    assert len(find(logs, tuned(logs)[0].name)) == 2
    with pytest.raises(TuneError, match=r"mm: is a part of several workloads' names: mm-4x4x4-\w+, mm-5x5x5-"):
        find(logs, "mm")
    with pytest.raises(TuneError, match=r"conv: no workload of .* for llvm-alderlake-3cores is called so; there are"):
        find(logs, "conv", "llvm-alderlake-3cores")
    with pytest.raises(TuneError, match="nothing: there is no such folder"):
        find(logs / "nothing", "mm")


def test_merging_copies_each_record_once(logs, tmp_path, matmul, target, commit):
    old = tmp_path / "old"  # one database of everything, as before there were folders
    for n in (5, 6):
        commit(old, matmul(n, n, n), target, [0.8, 0.0625])
    destination = tmp_path / "all"
    assert merge([logs, old], destination) == {"records": 18, "known": 1, "left_out": 0}
    assert merge([old, logs], destination) == {"records": 0, "known": 19, "left_out": 0}
    seconds = {name.split("-")[1]: s for (where, name), s in _seconds(destination).items() if "alderlake" not in where}
    measured = [0.8, 0.5, 1e10, 0.25, 0.125]
    assert seconds == {"4x4x4": measured, "5x5x5": [*measured, 0.0625], "6x6x6": [0.8, 0.0625]}
    (entry,) = find(destination, "5x5x5")
    assert [run["seed"] for run in entry.runs] == [7]
    assert validate(destination) == (18, [])
    # What has no name is called after its block.
    names = {folder.name.rsplit("-", 1)[0] for folder in find_databases(destination)}
    assert names == {"mm-4x4x4", "product-5x5x5", "mm_rf-6x6x6"}


def test_merging_refuses_what_makes_no_sense(logs, tmp_path):
    with pytest.raises(TuneError, match="is both a source and the destination"):
        merge([logs], logs)
    with pytest.raises(TuneError, match="missing: there is no such folder"):
        merge([tmp_path / "missing"], tmp_path / "all")
    with pytest.raises(TuneError, match="there are no records in"):
        merge([logs], tmp_path / "all", target="cuda")
    with pytest.raises(TuneError, match="a flat database is for one target, not llvm-alderlake-3cores, llvm-"):
        merge([logs], tmp_path / "all", flat=True)
    assert not (tmp_path / "all").exists()


def test_upstream_applies_a_flat_database(logs, tmp_path, matmul, target):
    flat = tmp_path / "flat"
    merge([logs], flat, flat=True, target=target_name(target))
    with pytest.raises(TuneError, match="a flat database is for one target"):
        merge([logs], flat, flat=True, target="llvm-alderlake-3cores")
    assert len(ms.database.JSONDatabase(work_dir=str(flat))) == 10
    # As a Relax model holds them: private.
    mod = IRModule({f"mm{n}": matmul(n, n, n).without_attr("global_symbol") for n in (4, 5, 6)})
    with target:
        applied = relax.transform.MetaScheduleApplyDatabase(str(flat))(mod)
    assert ["T.parallel" in applied[f"mm{n}"].script() for n in (4, 5, 6)] == [True, True, False]


def test_upstream_opens_a_flat_database_whatever_was_merged(logs, tmp_path, target):
    (entry,) = find(logs, "5x5x5")
    path = entry.folder / RECORDS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[3].replace("mm_rf", "gone"), lines[4].replace("TENSOR", "TENS")]))
    with pytest.raises(RuntimeError):
        ms.database.JSONDatabase(work_dir=str(entry.folder))
    with pytest.warns(UserWarning, match="left out") as caught:
        assert merge([entry.folder], tmp_path / "flat", flat=True) == {"records": 2, "known": 0, "left_out": 2}
    assert [str(warning.message).split(" ")[2] for warning in caught] == [f"{path}:{n}:" for n in (3, 4)]
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path / "flat"))) == 2
    # Pruning mends it, too.
    prune(entry.folder, 9)
    assert len(ms.database.JSONDatabase(work_dir=str(entry.folder))) == 2


def test_upstream_applies_the_folder_of_a_workload_and_adds_to_it(logs, matmul, target):
    (entry,) = find(logs, "5x5x5")
    with target:
        mod = IRModule({"mm": matmul(5, 5, 5).without_attr("global_symbol")})
        assert "T.parallel" in relax.transform.MetaScheduleApplyDatabase(str(entry.folder))(mod)["mm"].script()
    stock = ms.database.JSONDatabase(work_dir=str(entry.folder))
    record = stock.get_all_tuning_records()[0]
    stock.commit_tuning_record(
        ms.database.TuningRecord(record.trace, record.workload, [0.01], target, record.args_info)
    )
    (entry,) = find(logs, "5x5x5")
    assert (len(entry.records), entry.best.seconds) == (6, 0.01)


def test_schedules_with_tile_kernels_are_not_for_upstream(tmp_path, matmul, target, commit):
    commit(tmp_path / "logs", matmul(64, 64, 64), target, [0.8, 0.5])
    database = Database(tmp_path / "logs")
    workload = database.commit_workload(normalize(matmul(64, 64, 64)))
    sch = s_tir.Schedule(workload.mod)
    tile_kernel(sch, sch.get_sblock("mm_rf"), "matmul")
    infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [0.1], target, infos))
    assert merge([tmp_path / "logs"], tmp_path / "flat", flat=True) == {"records": 2, "known": 0, "left_out": 1}
    assert merge([tmp_path / "logs"], tmp_path / "all") == {"records": 3, "known": 0, "left_out": 0}
    records = ms.database.JSONDatabase(work_dir=str(tmp_path / "flat")).get_all_tuning_records()
    assert sorted(float(record.run_secs[0]) for record in records) == [0.5, 0.8]


def test_merging_keeps_each_trace_with_the_names_that_it_goes_by(tmp_path, matmul, target, commit):
    commit(tmp_path / "a", matmul(4, 4, 4), target, [0.8, 0.5])
    renamed = from_source(matmul(4, 4, 4).script().replace("mm_rf", "product").replace("vi", "row"))
    database = Database(tmp_path / "b")
    workload = database.commit_workload(normalize(renamed))
    sch = s_tir.Schedule(workload.mod)
    sch.unroll(sch.get_loops(sch.get_sblock("product"))[2])
    infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [0.25], target, infos))
    assert merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")["records"] == 3
    (folder,) = find_databases(tmp_path / "all")
    assert validate(tmp_path / "all") == (3, [])
    assert len(ms.database.JSONDatabase(work_dir=str(folder))) == 3
    best, seconds = apply_best(IRModule({"mm": matmul(4, 4, 4)}), target, tmp_path / "all")
    assert seconds == {"mm": 0.25}
    assert "T.unroll" in best["mm"].script()
    # The next job finds all of them.
    merged = Database(folder)
    records = merged.records(merged.commit_workload(normalize(matmul(4, 4, 4))), target)
    assert [float(record.run_secs[0]) for record in records] == [0.8, 0.5, 0.25]


def test_pruning_keeps_the_best_that_apply_and_the_untuned(logs, target):
    (entry,) = find(logs, "5x5x5")
    path = entry.folder / RECORDS
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[-1].replace("mm_rf", "gone").replace("0.125", "0.001"), "{cut"]) + "\n")
    with pytest.raises(TuneError, match="keep: at least one"):
        prune(logs, 0)
    with pytest.warns(UserWarning, match=rf"{RECORDS}:7: skipped a broken tuning record: '{{cut'"):
        assert prune(logs, 2, target_name(target)) == (6, 5)
    assert [*_seconds(logs).values()] == [[0.8, 0.5, 1e10, 0.25, 0.125], [0.8, 0.25, 0.125], [0.8, 0.25, 0.125]]
    before = path.stat().st_ino
    assert prune(logs, 2, target_name(target)) == (6, 0)
    assert path.stat().st_ino == before
    assert (entry.folder / f"{RECORDS}.broken").read_text() == "{cut\n"
    assert validate(logs) == (11, [])


def test_validating_names_every_line_that_is_broken(logs, target):
    (entry,) = find(logs, "5x5x5")
    four = next(e for e in tuned(logs, target_name(target)) if "4x4x4" in e.name)
    path = entry.folder / RECORDS
    lines = path.read_text().splitlines()
    foreign = json.loads(lines[1])
    foreign[1][2]["mcpu"] = "alderlake"
    odd = json.loads(lines[2])
    odd[1][2] = {"kind": "abacus"}
    path.write_text(
        "\n".join([lines[0], lines[1].replace("mm_rf", "gone"), "{cut", json.dumps(foreign), json.dumps(odd)]) + "\n"
    )
    workloads = entry.folder / WORKLOADS
    digest, encoded = json.loads(workloads.read_text())
    workloads.write_text(json.dumps([digest, encoded]) + "\n" + json.dumps(["123", encoded]) + "\n\n")
    (entry.folder / PROVENANCE).write_text("{")
    good, problems = validate(logs)
    assert good == 5 + 5 + 1
    assert [problem.removeprefix(f"{entry.folder}/").split(" ")[0] for problem in problems] == [
        f"{WORKLOADS}:2:",
        f"{WORKLOADS}:3:",
        f"{RECORDS}:3:",
        f"{RECORDS}:5:",
        f"{PROVENANCE}:",
        f"{RECORDS}:2:",
        f"{RECORDS}:4:",
    ]
    assert "no longer applies" in problems[5]
    assert "is for llvm-alderlake-1core, and its folder for" in problems[6]
    assert four.folder.is_dir()
