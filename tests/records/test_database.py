"""Databases with broken lines: what is whole is kept, what isn't is moved aside and reported."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from pathlib import Path

import pytest
import tvm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.records import database as records
from tvm_axe.records.database import (
    RECORDS,
    WORKLOADS,
    Database,
    find_databases,
    normalize,
    read_records,
    read_workloads,
)
from tvm_axe.records.maintenance import prune, validate


def repair(folder) -> list[str]:
    """What opening a database finds to move."""
    return [*Database(folder).repaired]


def _write(folder, funcs, target, seconds=(0.5, 0.25)):
    """A database with a record for each function and time."""
    folder.mkdir(parents=True, exist_ok=True)
    database = ms.database.JSONDatabase(work_dir=str(folder))
    for func in funcs:
        mod = normalize(func)
        workload = database.commit_workload(mod)
        for s in seconds:
            sch = s_tir.Schedule(mod)
            sch.parallel(sch.get_loops(sch.get_sblock("mm_rf"))[0])
            info = ms.arg_info.ArgInfo.from_entry_func(mod)
            database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [s], target, info))


@pytest.fixture
def database(tmp_path, matmul, target):
    _write(tmp_path, [matmul(4, 4, 4), matmul(5, 5, 5)], target)
    return tmp_path


def test_what_upstream_writes_is_read(database, target):
    workloads = read_workloads(database)
    records = read_records(database, workloads)
    assert [(r.workload, r.seconds) for r in records] == [(0, 0.5), (0, 0.25), (1, 0.5), (1, 0.25)]
    assert all(r.is_for(target) for r in records)
    assert not records[0].is_for(tvm.target.Target({"kind": "llvm", "num-cores": 7}))


def test_a_database_in_order_is_left_alone(database):
    before = [(database / name).read_bytes() for name in (WORKLOADS, RECORDS)]
    assert repair(database) == []
    assert [(database / name).read_bytes() for name in (WORKLOADS, RECORDS)] == before
    assert repair(database / "nothing here") == []


@settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(1, 400))
def test_a_record_cut_anywhere_costs_itself_only(tmp_path, matmul, target, cut):
    folder = tmp_path / str(cut)
    _write(folder, [matmul(4, 4, 4)], target, (0.5, 0.25, 0.125))
    path = folder / RECORDS
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    path.write_bytes(whole[: -min(cut, last - 1)])
    tail = path.read_bytes().splitlines()[-1]
    moved = repair(folder)
    kept = 3 if cut == 1 else 2  # without its newline a record is still whole
    assert len(moved) == (0 if kept == 3 else 1)
    assert len(ms.database.JSONDatabase(work_dir=str(folder))) == kept
    if kept == 2:
        assert (folder / f"{RECORDS}.broken").read_bytes().rstrip(b"\n") == tail
    # What is appended next is a line of its own.
    _write(folder, [matmul(4, 4, 4)], target, (0.0625,))
    assert [r.seconds for r in read_records(folder, read_workloads(folder))][-1] == 0.0625


@pytest.mark.parametrize("junk", [b"{cut", b'["1", "bm90IGEgZnVuY3Rpb24="]', b"\xff\xfe\x00", b""])
def test_a_broken_workload_takes_its_records_along(database, junk):
    path = database / WORKLOADS
    lines = path.read_bytes().splitlines()
    path.write_bytes(junk + b"\n" + lines[1] + b"\n")
    moved = repair(database)
    assert [line.split(" moved")[0] for line in moved] == [
        f"2 broken line(s) of {database / RECORDS}",
        f"1 broken line(s) of {path}",
    ]
    loaded = ms.database.JSONDatabase(work_dir=str(database))
    assert [int(r.args_info[0].shape[0]) for r in loaded.get_all_tuning_records()] == [5, 5]
    assert repair(database) == []


def test_a_database_without_a_whole_workload_is_emptied(database):
    (database / WORKLOADS).write_text("{cut\n{cut\n")
    assert len(repair(database)) == 2
    assert [(database / name).read_bytes() for name in (WORKLOADS, RECORDS)] == [b"", b""]
    assert len((database / f"{RECORDS}.broken").read_text().splitlines()) == 4
    assert len(ms.database.JSONDatabase(work_dir=str(database))) == 0


def test_reading_skips_and_names_what_is_broken(database):
    path = database / RECORDS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        lines[0] + b'{"not": "a record"}\n' + b"\xff\xfe\n" + lines[1] + b"[9, [[[], []], [0.1], {}, []]]\n"
    )
    with pytest.warns(UserWarning, match="skipped a broken tuning record") as caught:
        records = read_records(database, read_workloads(database))
    assert [r.seconds for r in records] == [0.5, 0.25]
    assert [str(w.message).split(" ")[0] for w in caught] == [f"{path}:{n}:" for n in (2, 3, 5)]
    assert (database / f"{RECORDS}.broken").exists() is False


def test_databases_are_found_in_subfolders(tmp_path, matmul, target):
    for name in ("b/deep", "a"):
        _write(tmp_path / name, [matmul(4, 4, 4)], target)
    assert find_databases(tmp_path) == [tmp_path / "a", tmp_path / "b/deep"]
    assert find_databases(tmp_path / "missing") == []


def test_databases_are_not_looked_for_everywhere(tmp_path, matmul, target, monkeypatch):
    """Not behind links, which may lead in a circle, not in /proc, and not in a whole machine's folders."""
    _write(tmp_path / "a", [matmul(4, 4, 4)], target)
    (tmp_path / "a/up").symlink_to(tmp_path)
    assert find_databases(tmp_path) == [tmp_path / "a"]
    for number in range(5):
        (tmp_path / f"more/{number}").mkdir(parents=True)
    monkeypatch.setattr(records, "_MOST_FOLDERS", 6)
    with pytest.raises(TuneError, match=rf"{tmp_path}: has more than 6 folders below it, .* name one nearer to them"):
        find_databases(tmp_path)
    monkeypatch.undo()
    entered = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: ((entered.append(each[0]) or each) for each in walk(top)))
    with contextlib.suppress(TuneError):  # a small machine has no more than 20,000
        find_databases(Path("/"))
    assert len(entered) > 100 and not [at for at in entered if at.startswith(("/proc", "/sys", "/dev/"))]


def test_a_workload_is_what_is_computed_not_what_it_is_called(matmul):
    @T.prim_func(s_tir=True)
    def other(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((6, 5), "float32"), Z: T.Buffer((4, 5), "float32")):
        T.func_attr({"axe.layouts": "Z: S[4:1]"})
        for a, b, c in T.grid(4, 5, 6):
            with T.sblock("product"):
                p, q, r = T.axis.remap("SSR", [a, b, c])
                with T.init():
                    Z[p, q] = T.float32(0)
                Z[p, q] = Z[p, q] + X[p, r] * Y[r, q]

    one, two = normalize(matmul(4, 5, 6)), normalize(other)
    assert _tvm.workload_hash(one) == _tvm.workload_hash(two)
    assert _tvm.workload_hash(one) != _tvm.workload_hash(normalize(matmul(4, 6, 5)))
    assert ms.database.Workload(one).as_json()[0] == _tvm.workload_hash(two)


@settings(derandomize=True, deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1), length=st.integers(0, 30), junk=st.binary(max_size=30))
def test_junk_anywhere_costs_the_lines_that_it_hits(tmp_path, matmul, target, place, length, junk):
    """Bytes in the middle of the records are replaced, removed or added to; the other lines are read as before."""
    folder = tmp_path / f"{place}-{length}-{junk.hex()}"
    if folder.exists():
        return
    _write(folder, [matmul(4, 4, 4)], target, (0.5, 0.25, 0.125))
    path = folder / RECORDS
    whole = path.read_bytes()
    start = round(place * len(whole))
    path.write_bytes(whole[:start] + junk + whole[start + length :])
    ends = [n for n, byte in enumerate(whole) if byte == ord("\n")]
    begins = [0, *(n + 1 for n in ends[:-1])]
    untouched = {whole[b:e] for b, e in zip(begins, ends) if e < start or b > start + length}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        database = Database(folder)
        workload = database.commit_workload(normalize(matmul(4, 4, 4)))
        kept = {float(record.run_secs[0]) for record in database.records(workload, target)}
        assert kept >= {json.loads(line)[1][1][0] for line in untouched}
        prune(folder, 9)
    assert validate(folder)[1] == []
    assert len(ms.database.JSONDatabase(work_dir=str(folder))) >= len(untouched)
