"""Tuning on a fleet: what comes of it is what comes of tuning here, and says where."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tuning_tiles import product
from tvm.ir import IRModule

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.cli import main
from tvm_axe.errors import TuneError
from tvm_axe.machines import resolve_target
from tvm_axe.meta.fleet.crew import Crew
from tvm_axe.meta.fleet.scale import FILE
from tvm_axe.meta.fleet.tracker import servers_of, tracker_summary
from tvm_axe.meta.search.job import tune_kernels
from tvm_axe.records import apply_best
from tvm_axe.records.database import find_databases, read_records, read_workloads
from tvm_axe.records.trials import key_of, read_trials

TRIALS = 8
ONE = {"kind": "llvm", "num-cores": 1}

SECOND = """
import sys
sys.path.insert(0, sys.argv[1])
import tvm_axe as axe
from tvm_axe.meta.fleet.fleet import Fleet
from tuning_workloads import _matmul
fleet = Fleet(sys.argv[2], "board", drift=1e9, noise=1e9, silent=60.0)
result = axe.tune(_matmul(32, 48, 16), target={"kind": "llvm", "num-cores": 1}, trials=6, work_dir=sys.argv[3],
                  seed=2, progress=False, fleet=fleet)
print(result.tasks[0].trials, sum(machine.measured for machine in result.machines))
"""


def once(folder, trials):
    """The machines of a database whose every record is there once, with a line each in the log of trials."""
    (database,) = find_databases(folder)
    records = [record for record in read_records(database, read_workloads(database)) if record.trace[0]]
    keys, lines = [key_of(record.entry) for record in records], read_trials(database)
    assert len({json.dumps(record.trace) for record in records}) == len(keys) == trials
    assert [line.record for line in lines] == keys
    return [line.machine for line in lines]


@pytest.fixture(scope="module")
def program(matmul):
    return matmul(61, 53, 67)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, program, servers, board):
    """A folder, and what `tune` said of a job on two workers."""
    folder = tmp_path_factory.mktemp("tuned")
    options = {"target": ONE, "trials": TRIALS, "work_dir": folder, "seed": 1, "progress": False}
    return folder, axe.tune(program, fleet=servers.fleet("board"), **options)


def test_each_trial_names_its_machine(tuned):
    folder, result = tuned
    (task,) = result.tasks
    assert (task.name, task.trials, task.failures) == ("main", TRIALS, ())
    machines = once(folder, TRIALS)
    assert set(machines) <= {"first", "second"}
    assert {machine.name: machine.measured for machine in result.machines if machine.measured} == {
        name: machines.count(name) for name in set(machines)
    }
    assert all((machine.failed, machine.events, machine.out) == (0, [], "") for machine in result.machines)


def test_the_target_is_completed_by_the_first_machine(tuned, program):
    folder, result = tuned
    assert result.target.attrs["mcpu"] == resolve_target(ONE).attrs["mcpu"]
    _, seconds = apply_best(IRModule({"main": program}), result.target, folder)
    assert seconds["main"] * 1e3 == pytest.approx(result.tasks[0].best_ms)


def test_the_provenance_has_the_machines(tuned):
    _, result = tuned
    (run,) = json.loads((result.tasks[0].folder / "provenance.json").read_text())["runs"]
    assert run["machines"] == {machine.name: machine.encode() for machine in result.machines}
    (about,) = run["tasks"].values()
    assert about["conditions"]["fleet"] == "board" and about["conditions"]["threads"] == 1
    for told in run["machines"].values():
        assert set(told) == {"scale", "measured", "failed", "events", "fingerprint"}
        assert told["fingerprint"]["model"] and told["scale"] > 0
    page = result.report.read_text()
    assert all(machine.name in page for machine in result.machines)


def test_the_best_was_timed_again_in_turns(tuned):
    (database,) = find_databases(tuned[0])
    assert any(trial.turns for trial in read_trials(database))


def test_the_scale_of_all_times_is_kept(tuned):
    _, result = tuned
    told = json.loads((result.tasks[0].folder.parent / FILE).read_text())
    assert told["board"]["machine"] in {machine.name for machine in result.machines}


def test_a_job_here_leaves_the_same_files_fields_and_candidates(tuned, tmp_path, program):
    folder, result = tuned
    local = axe.tune(program, target=result.target, trials=TRIALS, work_dir=tmp_path, seed=1, progress=False)
    assert once(tmp_path, TRIALS) == [os.uname().nodename] * TRIALS
    ours, theirs = result.tasks[0].folder, local.tasks[0].folder
    assert ours.relative_to(folder) == theirs.relative_to(tmp_path)
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    beside = {path.name for path in ours.parent.iterdir()} - {path.name for path in theirs.parent.iterdir()}
    assert beside == {FILE}
    traces = [
        [json.dumps(record.trace) for record in read_records(place, read_workloads(place))] for place in (ours, theirs)
    ]
    assert traces[0] == traces[1]
    trials = [[vars(trial).keys() for trial in read_trials(place)] for place in (ours, theirs)]
    assert trials[0] == trials[1]
    runs = [json.loads((place / "provenance.json").read_text())["runs"][0] for place in (ours, theirs)]
    assert runs[0].keys() - runs[1].keys() == {"machines"} and not runs[1].keys() - runs[0].keys()


def test_status_says_what_each_has_measured(tuned, servers, board, capsys, until):
    def found():
        assert main(["fleet", "status", "--tracker", servers.tracker, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    until(lambda: [one["state"] for one in found()["servers"] if one["key"] == "board"] == ["free"] * 2)
    told = found()
    ours = {one["name"]: one for one in told["servers"] if one["key"] == "board"}
    assert sorted(ours) == ["first", "second"]
    assert {one["address"] for one in ours.values()} == {f"127.0.0.1:{server.port}" for server in board}
    assert told["keys"]["board"] == {"servers": 2, "free": 2, "pending": 0}
    for machine in tuned[1].machines:
        assert ours[machine.name]["measured"] >= machine.measured
    assert main(["fleet", "status", "--tracker", servers.tracker]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["server", "key", "address", "state", "measured", "failed", "times", "by"]
    for name, one in ours.items():
        (row,) = (row.split() for row in rows if row.startswith(f"{name} "))
        assert row[:6] == [name, "board", one["address"], "free", str(one["measured"]), str(one["failed"])]
    assert "board: 2 there, 2 free, 0 requests waiting" in rows


def test_workers_listen_on_this_machine_alone(servers, board):
    for server in board:
        listening = [one for one in psutil.Process(server.process.pid).net_connections("tcp") if one.status == "LISTEN"]
        assert [(one.laddr.ip, one.laddr.port) for one in listening] == [("127.0.0.1", server.port)]
        assert server.errors() == ""


def test_one_that_listens_to_all_warns(servers, opened):
    assert f"tvm-axe: warning: listening on 0.0.0.0:{opened.port}: whoever can connect" in opened.errors()


def test_a_worker_that_is_terminated_ends_its_session_and_leaves_no_folder(servers, opened, tmp_path, limit):
    """Even if somebody has tidied up its folder meanwhile."""
    (place,) = opened.folder.glob("tvm-axe-worker-*")
    place.rmdir()
    with limit(240), Crew(servers.fleet("open"), json.dumps(ONE), tmp_path, tmp_path / "log") as crew:
        while "open" not in crew.machines:
            crew._turn()
        assert len(list(place.glob("job-*"))) == 1
        processes = psutil.Process(opened.process.pid).children(recursive=True)
        assert len(processes) >= 2
        opened.end(signal.SIGTERM)
        psutil.wait_procs(processes, 20)
    assert not any(process.is_running() for process in processes)
    assert not place.exists()


def test_nobody_comes_in_who_was_not_sent(board):
    """A client that doesn't say what the tracker tells."""
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"\x2b\xf2\x00\x00\x0b\x00\x00\x00client:open"):
        with socket.create_connection(("127.0.0.1", board[0].port), 20) as connection:
            connection.sendall(said)
            with contextlib.suppress(ConnectionResetError):  # it didn't read to the end
                assert len(connection.recv(100)) in (0, 4)
                assert connection.recv(100) == b""
    assert board[0].process.poll() is None


def test_two_jobs_at_once_both_finish(servers, board, tmp_path, matmul):
    command = [sys.executable, "-c", SECOND, str(Path(__file__).parents[2]), servers.tracker, str(tmp_path / "second")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        try:
            options = {"target": ONE, "trials": 6, "work_dir": tmp_path / "first", "seed": 1, "progress": False}
            axe.tune(matmul(48, 32, 16), fleet=servers.fleet("board"), **options)
            out, _ = second.communicate(timeout=300)
        finally:
            second.kill()
    assert out.split() == ["6", "6"]
    for name in ("first", "second"):
        assert set(once(tmp_path / name, 6)) <= {"first", "second"}


@pytest.fixture(scope="module")
def opened(servers):
    """A worker that listens to all."""
    return servers.worker("open", "open", "--listen", "0.0.0.0")


@pytest.fixture(scope="module")
def mixed(servers, until):
    """Two workers that the tracker knows, of which one says that it has another version."""
    odd = servers.worker("mixed", "odd", odd='{"versions": {"tvm-axe": "0.0.1", "apache-tvm": "0.1"}}')
    even, address = servers.worker("mixed", "even"), servers.fleet("mixed").address
    until(lambda: len(servers_of(tracker_summary(address), "mixed")) == 2)
    return odd, even


def test_an_odd_machine_is_refused_by_name_and_measures_nothing(servers, mixed, tmp_path, matmul, limit):
    said = []
    with (
        limit(300),
        Crew(servers.fleet("mixed"), json.dumps(ONE), tmp_path, tmp_path / "log", said.append) as crew,
    ):
        while not ("odd" in crew.machines and crew.machines["odd"].out):
            crew._turn()
        result = tune_kernels(matmul(16, 32, 48), crew.target, 6, None, tmp_path, None, 1, False, False, crew=crew)
    odd = next(machine for machine in result.machines if machine.name == "odd")
    assert odd.measured == 0 and "it has tvm-axe 0.0.1, not" in odd.out and "it has apache-tvm 0.1, not" in odd.out
    (event,) = odd.events
    assert event == f"taken out: {odd.out}"
    assert f"fleet: odd is taken out: {odd.out}" in said
    assert once(tmp_path, 6) == ["even"] * 6


def test_where_all_are_odd_the_job_ends_with_the_reason(servers, mixed, tmp_path, program):
    mixed[1].end(signal.SIGINT)
    assert list(mixed[1].folder.glob("tvm-axe-worker-*")) == []
    with pytest.raises(
        TuneError, match=r"no server of key 'mixed' at .* can be used: odd is out: it has tvm-axe 0\.0\.1"
    ):
        axe.tune(program, target=ONE, trials=4, work_dir=tmp_path, fleet=servers.fleet("mixed"), progress=False)
    assert find_databases(tmp_path) == []


@contextlib.contextmanager
def upstreams(servers, folder, key):
    """A server of upstream's that offers itself; gives the file of what it says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tvm.exec.rpc_server", "--host", "127.0.0.1", "--tracker", servers.tracker]
    command += ["--port", str(port), "--port-end", str(min(port + 100, 1 << 16)), "--key", key]
    said, address = folder / "said", servers.fleet(key).address
    with said.open("w") as output:
        rpc = subprocess.Popen(command, start_new_session=True, stdout=output, stderr=output)
    try:
        end = time.monotonic() + 120
        while not tracker_summary(address)["queue_info"].get(key, {"free": 0})["free"]:
            if rpc.poll() is not None or time.monotonic() > end:
                pytest.fail(f"the server didn't offer itself; it said: {said.read_text()}")
            time.sleep(0.2)
        yield said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rpc.pid, signal.SIGKILL)
        rpc.wait()


def test_a_server_of_upstreams_is_accepted(servers, tmp_path, program, limit):
    """It builds nothing: candidates are built here and sent."""
    target = json.loads(str(resolve_target(ONE)))
    options = {"target": target, "trials": 5, "work_dir": tmp_path / "work", "seed": 1, "progress": False}
    with upstreams(servers, tmp_path, "plain") as said:
        try:
            with limit(200):
                result = axe.tune(program, fleet=servers.fleet("plain"), **options)
        except TimeoutError:
            there = tracker_summary(servers.fleet("plain").address)
            pytest.fail(f"the job hangs; the server said: {said.read_text()}; the tracker says: {there}")
    (machine,) = result.machines
    assert machine.name.startswith("127.0.0.1:") and machine.measured == 5
    assert once(tmp_path / "work", 5) == [machine.name] * 5
    assert result.tasks[0].failures == ()


def test_a_tile_program_is_measured_by_a_fleet(tmp_path, servers, board):
    options = {"target": ONE, "trials": 20, "work_dir": tmp_path, "seed": 1, "progress": False}
    result = axe.tune(product, fleet=servers.fleet("board"), **options)
    assert (result.tasks[0].trials, result.tasks[0].failures) == (5, ())
    assert "fastest recorded" in tile.compile(product, result.target, work_dir=tmp_path).explain()
