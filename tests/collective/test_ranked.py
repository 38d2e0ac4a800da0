"""Jobs whose ranks meet by TCP: the tests of every engine on their rank 0, and their faults; see test_mpi.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from jobs import ended, start

from tvm_axe.collective.cuda import driver

HERE = Path(__file__).parent
NAMES = f"""
import sys
from tvm_axe.processes import leave_out_torch
leave_out_torch()
sys.path.insert(0, {str(HERE)!r})
from test_faults import *
RANK = int(os.environ["RANK"])
"""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No rank outlives its job, but for a moment."""
    yield
    ours = []
    for process in psutil.process_iter():
        try:
            ours += [process] if process.environ().get("TVM_AXE_TEST_JOB") == str(os.getpid()) else []
        except psutil.Error:
            continue
    assert not psutil.wait_procs(ours, timeout=5)[1]


def run(ranks: int, script: str, hosts_of: int = 1) -> list[tuple[str, str, int]]:
    return ended(start(ranks, "-c", NAMES + textwrap.dedent(script), hosts_of=hosts_of), 240)


@pytest.mark.parametrize(("ranks", "hosts_of"), [(2, 1), (3, 2), (4, 2)])
@pytest.mark.parametrize("engine", ["ranks", "apart-ranks", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_every_engine_does(request: pytest.FixtureRequest, engine: str, ranks: int, hosts_of: int) -> None:
    """On the ranks' cores, and on devices with memory of their own, which those of a host map; also on GPUs."""
    if engine == "cuda":
        request.getfixturevalue("cuda")
        if driver.gpus() < ranks:
            pytest.skip(f"each of {ranks} ranks needs a GPU, and there are {driver.gpus()}")
    files = [str(HERE / name) for name in ("in_job.py", "test_workers.py", "test_recording.py")]
    others = "not at_once and not bound and not examples and not bad_launches"
    if engine != "ranks":  # these launch by name
        others += " and not closed_workers and not other_runs"
    if engine == "cuda":  # and these have programs for cores
        others += " and not shared_data and not whole_arrays and not failed_command and not each_collective_does"
    (output, errors, status), *rest = ended(
        start(ranks, str(HERE / "ranks.py"), *files, "-k", others, hosts_of=hosts_of, engine=engine), 300
    )
    assert status == 0, output + errors
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= 25, output
    assert rest == [("", "", 0)] * (ranks - 1)


@pytest.mark.parametrize("hosts_of", [3, 1])
def test_a_killed_rank_is_named(hosts_of: int) -> None:
    """As one of this machine, and as one of another, whose connection is closed."""
    (output, errors, status), _, _ = run(
        3,
        """
        with launch(Mesh({"tp": 3}), engine="ranks") as workers:
            out = workers.mesh_tensor((1,), "float32")
            program = workers.load(Spin, "llvm")
            victim = psutil.Process(workers._session._job.ranks[2].pid)
            later(0.3, victim.kill)
            began = time.monotonic()
            try:
                workers.time(program, [(out, "slab"), 2_000_000], repeat=10_000, function="meet")
            except WorkerError as error:
                print(error, time.monotonic() - began < 5, workers.closed)
            try:
                launch(Mesh({"tp": 3}), engine="ranks")
            except WorkerError as error:
                print(error)
        """,
        hosts_of=hosts_of,
    )
    first, second, *_ = output.splitlines()
    assert re.match(r"worker 2 \(tp=2; rank 2, pid \d+ on .*\) has ended True True", first), (output, errors)
    assert second == "launch: the job can't go on (rank 2 has ended); start it again"
    assert "tvm_axe: rank 2 has ended; ending the job" in errors and status != 0


def test_a_rank_on_another_host_whose_connection_is_closed_is_named() -> None:
    """Without what /proc says of it, as it is on another machine."""
    (output, errors, _), *_ = run(
        2,
        """
        from tvm_axe.collective import ranks
        if RANK == 1:
            own = ranks.Rank.own.__func__
            ranks.Rank.own = classmethod(lambda *given: dataclasses.replace(own(*given), machine="other"))
        with launch(Mesh({"tp": 2}), engine="ranks") as workers:
            x = workers.mesh_tensor((2,), "float32")
            os.kill(workers._session._job.ranks[1].pid, signal.SIGKILL)
            began = time.monotonic()
            try:
                for _ in range(100):
                    workers.all_reduce(x, x, "tp")
                    time.sleep(0.05)
            except WorkerError as error:
                print(error, time.monotonic() - began < 5)
        """.replace("from tvm_axe", "import dataclasses\n        from tvm_axe", 1),
    )
    assert re.match(r"worker 1 \(tp=1; rank 1, .*\) has ended True", output), (output, errors)


def test_the_others_end_with_rank_0() -> None:
    processes = start(
        3,
        "-c",
        NAMES
        + textwrap.dedent("""
        with launch(Mesh({"tp": 3}), engine="ranks") as workers:
            print("there", flush=True)
            time.sleep(60)
        """),
        hosts_of=1,
    )
    assert processes[0].stdout is not None and processes[0].stdout.readline() == "there\n"
    processes[0].send_signal(signal.SIGKILL)
    assert [status for *_, status in ended(processes, 20)] == [-signal.SIGKILL, 1, 1]


def test_a_stopped_rank_is_named() -> None:
    (output, errors, status), *_ = run(
        2,
        """
        with launch(Mesh({"tp": 2}), engine="ranks", timeout=3) as workers:
            x = workers.mesh_tensor((2,), "float32")
            workers.all_reduce(x, x, "tp")
            os.kill(workers._session._job.ranks[1].pid, signal.SIGSTOP)
            began = time.monotonic()
            try:
                workers.all_reduce(x, x, "tp")
            except WorkerError as error:
                print(str(error).replace("\\n", " "), time.monotonic() - began < 10)
        """,
    )
    assert re.match(r"worker 1 \(tp=1; .*\) did .*True", output) and status != 0, (output, errors)


def test_who_does_not_come_is_named() -> None:
    found = run(
        3,
        """
        if RANK == 1:
            sys.exit()
        try:
            launch(Mesh({"tp": 3}), engine="ranks", timeout=5)
        except WorkerError as error:
            print(error)
        """,
    )
    expected = r"launch: of the 3 ranks of the job, rank 1 did not come to 127.0.0.1:\d+ in 5 s\n"
    assert [bool(re.fullmatch(expected, output)) for output, _, _ in found] == [True, False, True], found


def test_a_process_of_no_job_is_told_how_to_start_one() -> None:
    code = 'import tvm_axe; tvm_axe.launch({"tp": 2}, engine="ranks")'
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "PMI_RANK")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "InputError: launch: this process is no rank of a job: start it by torchrun, by mpiexec" in found.stderr


@pytest.mark.parametrize("hosts", [[], ["--hosts", "localhost,localhost"]])
def test_the_command_line(tmp_path: Path, hosts: list[str]) -> None:
    """The command starts the ranks; of one host, and of two that are this one."""
    rng = np.random.default_rng(0)
    arrays = {"A": rng.standard_normal((12, 24), dtype="float32"), "B": rng.standard_normal((24, 9), dtype="float32")}
    np.savez(tmp_path / "in.npz", **arrays)
    options = ["--mesh", "tp=2", "--schedule", f"{HERE / 'in_job.py'}:on_slices", "--inputs", str(tmp_path / "in.npz")]
    command = ["-m", "tvm_axe", "run", f"{HERE / 'in_job.py'}:product", *options, "--output", str(tmp_path / "out.npz")]
    found = subprocess.run(
        [sys.executable, *command, "--engine", "ranks", *hosts],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"TVM_AXE_TEST_JOB": str(os.getpid())},
        check=False,
    )
    assert (found.stderr, found.returncode) == ("", 0)
    assert "on tp=2 (ranks, llvm): out: float32[12, 9] to" in found.stdout and found.stdout.count("\n") == 1
    expected = np.maximum(arrays["A"].astype("float64") @ arrays["B"], 0)
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["out"], expected, rtol=1e-5, atol=1e-5)


def test_an_error_on_rank_0_is_the_commands() -> None:
    kernel = [f"{HERE / 'in_job.py'}:product", "--mesh", "tp=2", "--output", "none.npz", "--inputs", "none.npz"]
    command = [sys.executable, "-m", "tvm_axe", "run", *kernel, "--engine", "ranks", "--hosts", "localhost,localhost"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 2 and "none.npz: no such file" in found.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "ranks", "--hosts", "a,b,c"], "mesh tp=2 has 2 devices, which 3 hosts can't share evenly"),
        (["--engine", "threads", "--hosts", "a,b"], "--hosts is for --engine mpi, ranks or cuda"),
        (["--engine", "mpi", "--hosts", "a,b", "-n", "3"], "-n 3: mesh tp=2 has 2 devices"),
        (["--engine", "ranks", "-n", "3"], "-n 3: mesh tp=2 has 2 devices"),
        (["--engine", "mpi", "--launcher", "x"], "--launcher is what reaches --hosts, and there are none"),
    ],
)
def test_hosts_that_do_not_fit_are_refused(options: list[str], message: str) -> None:
    kernel = [f"{HERE / 'in_job.py'}:product", "--mesh", "tp=2", "--output", "none.npz", "--inputs", "none.npz"]
    found = subprocess.run(
        [sys.executable, "-m", "tvm_axe", "run", *kernel, *options], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2 and message in found.stderr
