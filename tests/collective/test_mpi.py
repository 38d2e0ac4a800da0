"""Jobs of the engine `mpi`: the tests of every engine on their rank 0, how they start and end, and their faults."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from tvm_axe.collective import launch
from tvm_axe.collective.start import ranks_command, start_ranks
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

HERE = Path(__file__).parent

pytest.importorskip("mpi4py", reason="mpi4py is not installed: pip install tvm-axe[mpi]")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No rank and no shared memory outlives its job, but for a moment."""
    before = left_files()
    yield
    processes = [process for process in psutil.process_iter() if is_ours(process)]
    assert not psutil.wait_procs(processes, timeout=5)[1]
    assert not left_files() - before


def is_ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get("TVM_AXE_TEST_JOB") == str(os.getpid())
    except psutil.Error:
        return False


def left_files() -> set[Path]:
    """What MPICH's ranks shared, where it has a name that no process uses."""
    files = set(Path("/dev/shm").glob("mpich_shm_*"))
    for maps in Path("/proc").glob("[0-9]*/maps") if files else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            files = {file for file in files if str(file) not in text}
    return files


def start(
    ranks: int, *arguments: str, hosts_of: int | None = None, plain: bool = False, group: bool = False
) -> subprocess.Popen[str]:
    """Start Python with the same arguments as each rank of a job, with so many ranks on a simulated machine."""
    environment = os.environ | {"TVM_AXE_TEST_JOB": str(os.getpid()), "TVM_AXE_TEST_RANKS": str(ranks)}
    if hosts_of is not None:
        environment["TVM_AXE_RANKS_PER_HOST"] = str(hosts_of)
    command = ranks_command(ranks, [sys.executable, *arguments])
    if plain:
        command = [command[0], "-n", str(ranks), sys.executable, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True, start_new_session=group
    )


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a job with its ranks, which the tests after this one would find else."""
    for left in [*psutil.Process(process.pid).children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()


NAMES = f"""
import sys
from tvm_axe.processes import leave_out_torch
leave_out_torch()
sys.path.insert(0, {str(HERE)!r})
from test_faults import *
RANK = int(os.environ["PMI_RANK"])
"""


def run(ranks: int, script: str, hosts_of: int | None = None, plain: bool = False) -> tuple[str, str, int]:
    """Run a script, with the names of test_faults.py, in each rank; returns output, errors and the exit status."""
    process = start(ranks, "-c", NAMES + textwrap.dedent(script), hosts_of=hosts_of, plain=plain)
    try:
        output, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        kill(process)
        output, errors = process.communicate(timeout=10)
        raise AssertionError(f"the job doesn't end; it said:\n{output}\n{errors}") from None
    return output, errors, process.returncode


# One machine; then several, also of different sizes.
@pytest.mark.parametrize(("ranks", "hosts_of"), [(1, 1), (2, 2), (4, 4), (3, 2), (4, 2)])
def test_what_every_engine_does(ranks: int, hosts_of: int) -> None:
    """The tests of these files on rank 0, but for those of processes that the engine starts."""
    files = [str(HERE / name) for name in ("in_job.py", "test_workers.py", "test_recording.py")]
    others = "not at_once and not bound and not examples and not bad_launches"
    process = start(ranks, str(HERE / "ranks.py"), *files, "-k", others, hosts_of=hosts_of)
    output, errors = process.communicate(timeout=100)
    assert process.returncode == 0, output + errors
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None and int(passed[1]) >= 25, output


@pytest.mark.parametrize(("hosts_of", "function"), [(4, "main"), (2, "meet")])
def test_a_killed_rank_is_named(hosts_of: int, function: str) -> None:
    output, _, status = run(
        4,
        f"""
        with launch(Mesh({{"tp": 4}}), engine="mpi") as workers:
            out = workers.mesh_tensor((1,), "float32")
            program = workers.load(Spin, "llvm")
            victim = psutil.Process(workers._session._job.ranks[3].pid)
            later(0.3, victim.kill)
            try:
                workers.time(program, [(out, "slab"), 2_000_000], repeat=10_000, function="{function}")
            except WorkerError as error:
                print(error)
            for again in (lambda: check_usable(workers), lambda: launch(workers.mesh, engine="mpi")):
                try:
                    again()
                except WorkerError as error:
                    print(error)
            print(victim.pid)
        """,
        hosts_of,
    )
    died, closed, lost, pid = output.splitlines()
    assert re.fullmatch(rf"worker 3 \(tp=3; rank 3, pid {pid} on \S+\) has ended", died)
    assert closed == "the workers are closed; launch new ones"
    assert lost == "launch: the job can't go on (rank 3 has ended); start it again"
    assert status != 0


@pytest.mark.parametrize("victim", [1, 3])
def test_a_rank_killed_in_a_sum_between_hosts_is_named(victim: int) -> None:
    """Others of its host wait for it in memory, those of the other host for messages."""
    output, _, status = run(
        4,
        f"""
        with launch(Mesh({{"tp": 4}}), engine="mpi", timeout=20) as workers:
            x = workers.mesh_tensor((1 << 18,), "float32")
            victim = psutil.Process(workers._session._job.ranks[{victim}].pid)
            later(0.5, victim.kill)
            try:
                while True:
                    workers.all_reduce(x, x, "tp")
            except WorkerError as error:
                print(error)
        """,
        2,
    )
    assert re.match(rf"worker {victim} \(tp={victim}; rank {victim}, pid \d+ on \S+\) has ended\n", output), output
    assert status != 0


@pytest.mark.parametrize(("hosts_of", "victim", "function"), [(2, 1, "meet"), (1, 1, "meet"), (2, 2, "main")])
def test_a_stopped_rank_is_named(hosts_of: int, victim: int, function: str) -> None:
    """Rank 0 says so within the timeout, and the job ends with its script, though the rank can't."""
    output, errors, _ = run(
        max(2, hosts_of * (victim // hosts_of + 1)),
        f"""
        import tvm_axe.collective.mpi as mpi
        from tvm_axe.collective import session
        mpi.GRACE = session.GRACE = 0.5
        mesh = Mesh({{"tp": int(os.environ["PMI_SIZE"])}})
        with launch(mesh, engine="mpi", timeout=0.5) as workers:
            out = workers.mesh_tensor((1,), "float32")
            program = workers.load(Spin, "llvm")
            psutil.Process(workers._session._job.ranks[{victim}].pid).suspend()
            try:
                workers.call(program, [(out, "slab"), 1], "{function}")
            except WorkerError as error:
                print(error, flush=True)
        """,
        hosts_of,
    )
    assert re.match(
        rf"worker {victim} \(tp={victim}; rank {victim}, pid \d+ on \S+\) did not (arrive|answer)", output
    ), output
    assert f"rank {victim} did not come back from a command; ending the job" in errors


@pytest.mark.parametrize("hosts_of", [3, 1])
def test_a_rank_that_is_late_is_named_and_can_come_back(hosts_of: int) -> None:
    output, errors, status = run(
        3,
        """
        with launch(Mesh({"tp": 3}), engine="mpi", timeout=0.4) as workers:
            out = workers.mesh_tensor((1,), "float32")
            program = workers.load(Spin, "llvm")
            try:
                workers.call(program, [(out, "slab"), 1_000_000, Coord("tp")], "late")
            except WorkerError as error:
                print(error)
            check_usable(workers)
        """,
        hosts_of,
    )
    assert (errors, status) == ("", 0)
    assert re.fullmatch(
        r"(worker [12] \(tp=[12]; [^)]*\)(, )?){1,2} did not arrive at a barrier within 0.4 s\n", output
    )


@pytest.mark.parametrize("moment", ["idle", "close"])
def test_a_rank_killed_while_idle(moment: str) -> None:
    output, _, status = run(
        2,
        f"""
        with launch(Mesh({{"tp": 2}}), engine="mpi") as workers:
            psutil.Process(workers._session._job.ranks[1].pid).kill()
            time.sleep(0.2)
            if {moment!r} == "idle":
                try:
                    check_usable(workers)
                except WorkerError as error:
                    print(error, flush=True)
        """,
    )
    assert status != 0
    assert re.match(r"worker 1 .* has ended" if moment == "idle" else "", output)


def test_killing_at_any_moment() -> None:
    """The moments cover the start, the launch, the commands and the end; rank 0 names the rank or its job is over.

    Before all ranks have started MPI nobody can be named: the clock of the start ends the job.
    """
    for seconds in (0.5, 1.2):
        output, errors, status = run(
            2,
            f"""
            if RANK == 1:
                later({seconds}, lambda: os.kill(os.getpid(), signal.SIGKILL))
            try:
                with launch(Mesh({{"tp": 2}}), engine="mpi", timeout=15) as workers:
                    stop = time.monotonic() + 0.7
                    while time.monotonic() < stop:
                        check_usable(workers)
            except WorkerError as error:
                print(error, flush=True)
            """,
        )
        named = "worker 1" in output or "rank 1" in output + errors
        assert named or status == 0 or NOT_STARTED in errors, (seconds, output, errors)


NOT_STARTED = "tvm_axe: launch: MPI did not start within"


@pytest.mark.parametrize(("how", "hosts_of"), [("SIGKILL", 3), ("SIGINT", 1)])
def test_ranks_end_with_rank_0(how: str, hosts_of: int) -> None:
    """By Ctrl-C, which leaves the ranks usable, or without a word."""
    output, errors, status = run(
        3,
        f"""
        try:
            with launch(Mesh({{"tp": 3}}), engine="mpi") as workers:
                out = workers.mesh_tensor((1,), "float32")
                program = workers.load(Spin, "llvm")
                later(0.5, lambda: os.kill(os.getpid(), signal.{how}))
                workers.time(program, [(out, "slab"), 100_000], repeat=100_000, function="meet")
        except KeyboardInterrupt:
            with launch(Mesh({{"tp": 3}}), engine="mpi") as workers:
                check_usable(workers)
            print("interrupted")
        """,
        hosts_of,
    )
    if how == "SIGINT":
        assert (output, errors, status) == ("interrupted\n", "", 0)
    else:
        assert status == 9 and "worker" not in output


def test_workers_that_are_never_closed_end_with_the_program() -> None:
    output, errors, status = run(
        2, 'workers = launch(Mesh({"tp": 2}), engine="mpi")\ncheck_usable(workers)\nprint("end")'
    )
    assert (output, errors, status) == ("end\n", "", 0)


def test_an_error_of_rank_0_ends_the_job() -> None:
    script = 'with launch(Mesh({"tp": 2}), engine="mpi") as workers:\n    raise SystemExit(7)'
    assert run(2, script) == ("", "", 7)


def test_plain_mpiexec_ends_the_job_when_a_rank_dies() -> None:
    """Then rank 0 can't say which; mpiexec does."""
    output, errors, status = run(
        2,
        """
        with launch(Mesh({"tp": 2}), engine="mpi") as workers:
            os.kill(workers._session._job.ranks[1].pid, signal.SIGKILL)
            time.sleep(30)
        """,
        plain=True,
    )
    assert status == 9 and "Killed (signal 9)" in output + errors


def test_other_meshes_are_refused_everywhere() -> None:
    output, errors, status = run(
        3,
        """
        try:
            launch(Mesh({"tp": 3} if RANK != 1 else {"dp": 3}), engine="mpi")
        except ValueError as error:
            print(error)
        """,
    )
    expected = "launch: all the ranks must launch the same mesh; rank 0 launched with tp=3, rank 1 with dp=3"
    # The ranks' lines may run into each other.
    assert (output.replace("\n", ""), errors, status) == (expected * 3, "", 0)


def test_another_number_of_ranks_is_refused_everywhere() -> None:
    script = """
        try:
            launch(Mesh({"tp": 2, "dp": 2}), engine="mpi")
        except ValueError as error:
            print(error)
    """
    expected = "launch: mesh tp=2,dp=2 has 4 devices, but the job has {}; start one rank a device: mpiexec -n 4 "
    for ranks, names in ((3, "3 (ranks 0 to 2)"), (1, "1 (rank 0 alone)")):
        output, errors, status = run(ranks, script)
        assert output.replace("\n", "") == (expected.format(names) + "python ...") * ranks
        assert (errors, status) == ("", 0)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_launch_is_named_everywhere(missing: int) -> None:
    seconds = 5
    output, errors, status = run(
        3,
        f"""
        from mpi4py import MPI  # starts MPI: the clock of {seconds} s isn't for that, which can take longer
        MPI.COMM_WORLD.Barrier()
        if RANK == {missing}:
            time.sleep(30)
        try:
            launch(Mesh({{"tp": 3}}), engine="mpi", timeout={seconds})
        except WorkerError as error:
            print(error, flush=True)
            time.sleep(1)
        """,
    )
    expected = f"launch: of the 3 ranks of the job, rank 1 did not launch in {seconds} s"
    if missing == 0:
        expected = f"launch: rank 0 of the job did not launch in {seconds} s"
    assert output.replace("\n", "") == expected * 2 and f"rank {missing} did not launch; ending the job" in errors
    assert status != 0


@pytest.mark.parametrize("how", ["leaves", "fails", "is killed"])
def test_a_rank_that_does_not_come_at_all(how: str) -> None:
    """MPI itself can't start then, and can't be interrupted; the others end within the timeout, and say so."""
    action = {"leaves": "sys.exit()", "fails": "1 / 0", "is killed": "os.kill(os.getpid(), signal.SIGKILL)"}[how]
    began = time.monotonic()
    output, errors, status = run(
        3,
        f"""
        if RANK == 1:
            {action}
        print("came", flush=True)
        launch(Mesh({{"tp": 3}}), engine="mpi", timeout=5)
        """,
    )
    assert output.replace("\n", "") == "came" * 2 and status == 1
    assert errors.count(f"{NOT_STARTED} 5 s") == 2
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_while_it_launches(victim: int) -> None:
    """Behind MPI's own beginning, when some have said hello and others have not."""
    output, errors, status = run(
        3,
        f"""
        from mpi4py import MPI
        from tvm_axe.collective import job
        MPI.COMM_WORLD.Barrier()
        if RANK == {victim}:
            job.Job._duplicate = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            launch(Mesh({{"tp": 3}}), engine="mpi", timeout=20)
        except WorkerError as error:
            print(error, flush=True)
        """,
    )
    if victim == 0:
        assert status == 9 or "rank 0" in output + errors, (output, errors)
    else:
        assert "rank 1" in output + errors and status != 0, (output, errors)


MESHES = {"other": '{"tp": 3} if RANK != 1 else {"dp": 3}', "too small": '{"tp": 2}'}


@pytest.mark.parametrize(("mesh", "caught"), [("other", False), ("too small", True)])
def test_a_refused_launch_ends_as_python_does(mesh: str, caught: bool) -> None:
    """With the error's own exit status and no signal of MPI's."""
    script = f"""
        try:
            launch(Mesh({MESHES[mesh]}), engine="mpi", timeout=20)
        except ValueError:
            if {caught}:
                sys.exit(0)
            sys.exit(2)
    """
    output, errors, status = run(3, script)
    assert (output, errors, status) == ("", "", 0 if caught else 2)


SAID_BY_MPIEXEC = ["[mpiexec@", "Sending Ctrl-C", "Press Ctrl-C again"]


@pytest.mark.parametrize(
    "moment", ["at once", "while MPI starts", "while it launches", "in a command", "behind it all"]
)
@pytest.mark.parametrize("hosts_of", [2, 1])
def test_ctrl_c(moment: str, hosts_of: int) -> None:
    """As a terminal does it, to the whole job: each ends as Python does, and nobody speaks of a segmentation fault."""
    process = start(
        2,
        "-c",
        NAMES
        + textwrap.dedent(f"""
        from tvm_axe.collective import job

        def say_there():
            os.write(1, b"there\\n")  # At once: what print writes in two parts, ranks may write into each other.

        def wait(*_):
            say_there()
            time.sleep(30)

        moment = {moment!r}
        if moment == "at once":
            wait()
        if moment == "while MPI starts":
            if RANK == 1:
                wait()
        if moment == "while it launches" and RANK == 1:
            job.Job._greet = wait
        with launch(Mesh({{"tp": 2}}), engine="mpi", timeout=20) as workers:
            out = workers.mesh_tensor((1,), "float32")
            program = workers.load(Spin, "llvm")
            if moment == "in a command":
                print("there", flush=True)
                workers.time(program, [(out, "slab"), 100_000], repeat=1_000_000, function="meet")
        wait()
        """),
        hosts_of=hosts_of,
        group=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            kill(process)
    left = [line for line in output.splitlines() if line and not any(word in line for word in SAID_BY_MPIEXEC)]
    assert set(left) <= {"there"} and process.returncode == 130, (output, errors)
    assert "KeyboardInterrupt" in errors or moment == "while MPI starts", errors
    if moment == "while MPI starts":
        for file in left_files():  # MPICH takes the name away once all ranks have the memory, which they didn't come to
            file.unlink(missing_ok=True)
    assert "signal" not in output and "egmentation" not in output + errors, (output, errors)


@pytest.mark.parametrize("plain", [False, True])
def test_the_command_line(tmp_path: Path, plain: bool) -> None:
    """The command starts the ranks, or is one of them."""
    rng = np.random.default_rng(0)
    arrays = {"A": rng.standard_normal((12, 24), dtype="float32"), "B": rng.standard_normal((24, 9), dtype="float32")}
    np.savez(tmp_path / "in.npz", **arrays)
    options = ["--mesh", "tp=2", "--schedule", f"{HERE / 'in_job.py'}:on_slices", "--inputs", str(tmp_path / "in.npz")]
    command = ["-m", "tvm_axe", "run", f"{HERE / 'in_job.py'}:product", *options, "--output", str(tmp_path / "out.npz")]
    if plain:
        process = start(2, *command, "--engine", "mpi", plain=True)
    else:
        command = [sys.executable, *command, "--engine", "mpi", "-n", "2"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate(timeout=60)
    assert (errors, process.returncode) == ("", 0)
    assert f"on tp=2 (mpi, llvm): out: float32[12, 9] to {tmp_path / 'out.npz'}" in output and output.count("\n") == 1
    expected = np.maximum(arrays["A"].astype("float64") @ arrays["B"], 0)
    np.testing.assert_allclose(np.load(tmp_path / "out.npz")["out"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "mpi", "--inputs", "none.npz"], "none.npz: no such file"),
        (["--engine", "mpi", "-n", "3", "--inputs", "none.npz"], "-n 3: mesh tp=2 has 2 devices"),
        (["-n", "2", "--inputs", "none.npz"], "-n is for --engine mpi or ranks; processes has a worker for each"),
    ],
)
def test_errors_of_the_command_line(options: list[str], message: str) -> None:
    kernel = [f"{HERE / 'in_job.py'}:product", "--mesh", "tp=2", "--output", "none.npz"]
    command = [sys.executable, "-m", "tvm_axe", "run", *kernel, *options]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert process.returncode == 2 and process.stdout == ""
    assert process.stderr.count("tvm-axe: error:") == 1 and message in process.stderr


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mpi4py", None)
        with pytest.raises(InputError, match=r"engine 'mpi' needs mpi4py .*: pip install tvm-axe\[mpi\]"):
            launch(Mesh({"tp": 2}), engine="mpi")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(InputError, match=r"needs mpiexec, and there is none: pip install tvm-axe\[mpi\]"):
            start_ranks(Mesh({"tp": 2}), None, [])
    with pytest.raises(InputError, match="-n 3: mesh tp=2 has 2 devices, and there is one rank a device"):
        start_ranks(Mesh({"tp": 2}), 3, [])
    monkeypatch.setenv("TVM_AXE_RANKS_PER_HOST", "none")
    with pytest.raises(InputError, match="TVM_AXE_RANKS_PER_HOST must be a positive number, not 'none'"):
        launch(Mesh({"tp": 2}), engine="mpi")
