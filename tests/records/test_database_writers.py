"""Databases under several writers, kills and full disks: no committed record is lost or doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.script import from_source

from tvm_axe.errors import TuneError
from tvm_axe.records.database import RECORDS, WORKLOADS, Database, normalize, read_records, read_workloads
from tvm_axe.records.files import append_line, locked, replace_file
from tvm_axe.records.provenance import PROVENANCE

# Waits for a line, then commits records of two matmuls in turns, and says each number when it is committed.
HERE = os.path.dirname(__file__)

_WRITER = """
import sys
from pathlib import Path
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm_axe.records.database import Database, normalize
from tvm_axe.records.provenance import Provenance
from tuning_workloads import _matmul, _target

first, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
database, target = Database(folder), _target()
workloads = [database.commit_workload(normalize(_matmul(n, n, n))) for n in (4, 5)]
provenance = Provenance(folder, target, first, count)
print("ready", flush=True)
sys.stdin.readline()
for n in range(first, first + count):
    workload = workloads[n % 2]
    sch = s_tir.Schedule(workload.mod)
    sch.parallel(sch.get_loops(sch.get_sblock("mm_rf"))[0])
    infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [n * 1e-3], target, infos))
    print(n, flush=True)
    if n % 25 == 0:
        provenance.record(str(first), best_ms=n)
"""


def _start(first: int, count: int, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((HERE, os.path.dirname(HERE)))}
    command = [sys.executable, "-c", _WRITER, str(first), str(count), str(folder)]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _go(*writers: subprocess.Popen[str]) -> None:
    """Let them write, when all of them are ready."""
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * len(writers)
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()


def _numbers(folder: Path) -> list[int]:
    """What the records say, and that each stands with its own workload."""
    workloads = read_workloads(folder)
    records = read_records(folder, workloads)
    shapes = [int(record.entry[3][0][2][0]) for record in records]
    numbers = [round(record.seconds * 1e3) for record in records]
    assert shapes == [4 + n % 2 for n in numbers]
    by_shape = {shape: record.workload for shape, record in zip(shapes, records)}
    assert [record.workload for record in records] == [by_shape[shape] for shape in shapes]
    return numbers


def _record(workload, target, seconds):
    sch = s_tir.Schedule(workload.mod)
    sch.parallel(sch.get_loops(sch.get_sblock("mm_rf"))[0])
    infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    return ms.database.TuningRecord(sch.trace, workload, [seconds], target, infos)


def test_two_writers_at_once_lose_nothing(tmp_path):
    with _start(0, 150, tmp_path) as one, _start(1000, 150, tmp_path) as other:
        _go(one, other)
        said = [[int(line) for line in writer.stdout] for writer in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0)
    assert said == [[*range(150)], [*range(1000, 1150)]]
    numbers = _numbers(tmp_path)
    assert sorted(numbers) == sorted(said[0] + said[1])
    assert numbers != sorted(numbers), "they did not write at the same time"
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path))) == 300
    runs = json.loads((tmp_path / PROVENANCE).read_text())["runs"]
    assert {(run["seed"], *run["tasks"]) for run in runs} == {(0, "0"), (1000, "1000")}
    assert {task["best_ms"] for run in runs for task in run["tasks"].values()} == {125, 1125}
    assert all(run["command"].startswith(sys.executable) for run in runs)


def test_killed_at_any_moment_loses_and_doubles_nothing(tmp_path):
    rng, committed = random.Random(0), []
    for first in range(0, 4000, 1000):
        with _start(first, 999, tmp_path) as writer:
            _go(writer)
            said = [int(writer.stdout.readline())]
            time.sleep(rng.uniform(0, 0.2))
            writer.send_signal(signal.SIGKILL)
            said += [int(line) for line in writer.stdout if line.endswith("\n")]
        committed += said
        # The one that was being committed may be there without having been said.
        Database(tmp_path)
        numbers = _numbers(tmp_path)
        assert len(set(numbers)) == len(numbers)
        assert numbers[: len(committed)] == committed
        assert len(numbers) - len(committed) in (0, 1)
        committed = numbers
    assert len(ms.database.JSONDatabase(work_dir=str(tmp_path))) == len(committed)


@pytest.mark.parametrize("name", [WORKLOADS, RECORDS])
@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
def test_killed_within_a_line_or_between_the_files(tmp_path, matmul, target, name, part):
    """What a kill in the write of either file leaves: none, half, or all but the end of its last line."""
    database = Database(tmp_path)
    mods = [normalize(matmul(n, n, n)) for n in (4, 5)]
    for mod in mods:
        workload = database.commit_workload(mod)
        if not (name == WORKLOADS and mod is mods[1]):  # the workload is written before its first record
            database.commit_tuning_record(_record(workload, target, 0.5))
    path = tmp_path / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: round(part * (len(lines[-1]) - 1))])
    other = Database(tmp_path)
    workload = other.commit_workload(mods[1])
    other.commit_tuning_record(_record(workload, target, 0.25))
    seconds = [float(record.run_secs[0]) for record in other.records(workload, target)]
    assert seconds == ([0.25] if name == WORKLOADS or part < 1 else [0.5, 0.25])
    assert [float(r.run_secs[0]) for r in other.records(other.commit_workload(mods[0]), target)] == [0.5]
    stock = ms.database.JSONDatabase(work_dir=str(tmp_path))
    assert len(stock) == 1 + len(seconds)
    assert stock.has_workload(mods[1])
    assert bool(other.repaired) == (part == 0.5)


def test_a_writer_goes_on_behind_one_that_was_killed(tmp_path, matmul, target):
    """A database that is open, and whose file another process leaves with half a line."""
    database = Database(tmp_path)
    workload = database.commit_workload(normalize(matmul(4, 4, 4)))
    database.commit_tuning_record(_record(workload, target, 0.5))
    with open(tmp_path / RECORDS, "a") as file:
        file.write('[0, [[[["GetSB')
    with pytest.warns(UserWarning, match="1 broken line"):
        database.commit_tuning_record(_record(workload, target, 0.25))
    assert [float(r.run_secs[0]) for r in database.records(workload, target)] == [0.5, 0.25]
    assert (tmp_path / f"{RECORDS}.broken").read_text() == '[0, [[[["GetSB\n'


def test_a_workload_is_given_as_it_is_recorded(tmp_path, matmul, target):
    """A trace goes by names, so the same function with other names must be searched on under the recorded ones."""
    first = Database(tmp_path).commit_workload(normalize(matmul(4, 4, 4)))
    sch = s_tir.Schedule(normalize(matmul(4, 4, 4)))
    text = sch.mod["main"].script().replace("mm_rf", "product")
    renamed = normalize(from_source(text))
    assert "product" in renamed.script()
    again = Database(tmp_path).commit_workload(renamed)
    assert again.mod.script() == first.mod.script()
    assert len(read_workloads(tmp_path)) == 1


def test_records_that_do_not_apply_or_are_for_another_target_are_left_out(tmp_path, matmul, target):
    database = Database(tmp_path)
    workload = database.commit_workload(normalize(matmul(4, 4, 4)))
    database.commit_tuning_record(_record(workload, target, 0.5))
    line = (tmp_path / RECORDS).read_text()
    with open(tmp_path / RECORDS, "a") as file:
        file.write(line.replace("mm_rf", "gone"))
        file.write(line.replace(str(target.attrs["mcpu"]), "x86-64-v2"))
    with pytest.warns(UserWarning, match=rf"{RECORDS}:2: a record that no longer applies") as caught:
        records = database.records(workload, target)
    assert len(caught) == len(records) == 1
    assert records[0].workload.same_as(workload)


_FULL = """
import resource, sys
from pathlib import Path
import pytest
from tvm_axe.errors import TuneError
from tvm_axe.records.database import Database, RECORDS, WORKLOADS, normalize
from tvm_axe.records.provenance import Provenance
from tuning_workloads import _matmul, _target
from test_database_writers import _record

folder, target = Path(sys.argv[1]), _target()
def limit(size):  # no file can grow beyond this
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

database = Database(folder)
workload = database.commit_workload(normalize(_matmul(4, 4, 4)))
record = _record(workload, target, 0.5)
database.commit_tuning_record(record)
provenance = Provenance(folder, target, 0, 1)
provenance.record("1", best_ms=1)
names = (RECORDS, WORKLOADS, "provenance.json")
before = {name: (folder / name).read_bytes() for name in names}
calls = {
    RECORDS: lambda: database.commit_tuning_record(record),
    WORKLOADS: lambda: database.commit_workload(normalize(_matmul(5, 5, 5))),
    "provenance.json": lambda: provenance.record("1", best_ms=2),
}
for name, call in calls.items():
    limit(max(1, len(before[name]) - 5) if name == "provenance.json" else len(before[name]) + 5)
    with pytest.raises(TuneError, match=f"{name}: cannot be written: File too large; it is as it was before"):
        call()
    limit(resource.RLIM_INFINITY)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before
for call in calls.values():
    call()
assert len(database.records(workload, target)) == 2
assert "best_ms\\": 2" in (folder / "provenance.json").read_text()
"""


def test_a_full_disk_is_said_and_leaves_the_files_as_they_were(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((HERE, os.path.dirname(HERE)))}
    command = [sys.executable, "-c", _FULL, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TuneError, match=r"work_dir: .*file/below cannot be used: Not a directory"):
        Database(tmp_path / "file" / "below")


def test_an_interrupt_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    append_line(path, "one")

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    for write in (append_line, replace_file):
        with pytest.raises(KeyboardInterrupt):
            write(path, "two")
        assert path.read_text() == "one\n"
        assert [*tmp_path.iterdir()] == [path]


def test_the_lock_ends_with_its_holder(tmp_path):
    script = "import sys, time; from pathlib import Path; from tvm_axe.records.files import locked\n"
    script += "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        holder.kill()
    with locked(tmp_path):
        pass
