"""Processes that a server forks: what they inherit, how they end, and who ends with whom."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tvm_axe.processes import Process, interpreter, process, start

HERE = Path(__file__).parent
NAMES = ["AXE_TEST", "TVM_AXE_TEST", "HOME", "PATH"]


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def written(entry: str, environment: dict[str, str] | None = None, **arguments: Any) -> tuple[Process, str]:
    """Start a process with a pipe; returns it and all that it wrote to the pipe."""
    read, write = os.pipe()
    with open(read) as pipe:
        try:
            started = start(f"entries:{entry}", arguments, [write], environment or {})
        finally:
            os.close(write)
        return started, pipe.read()


def told(names: Sequence[str] = (), environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What a process says that it is like."""
    started, text = written("tell", environment, names=names)
    assert started.wait(20) == 0
    found = json.loads(text)
    assert found.pop("leads") and found.pop("threads") == 1
    return found


def fresh(names: Sequence[str] = ()) -> dict[str, Any]:
    """What a process says that is started as the others should seem to be."""
    read, write = os.pipe()
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); import entries; "
    code += "entries.tell([int(sys.argv[2])], json.loads(sys.argv[3]))"
    with open(read) as pipe:
        started = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), str(write), json.dumps(names)],
            stdin=subprocess.DEVNULL,
            pass_fds=(write,),
            start_new_session=True,
        )
        os.close(write)
        found = json.load(pipe)
    assert started.wait(20) == 0
    return {name: value for name, value in found.items() if name not in ("leads", "threads")}


def server() -> psutil.Process:
    """The server that is asked."""
    assert process._current is not None
    return psutil.Process(process._current.process.pid)


def gone(pids: Sequence[int], seconds: float = 10) -> bool:
    """Whether these processes end; one that nobody has collected yet has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid)]
        with contextlib.suppress(psutil.NoSuchProcess):
            if all(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in alive):
                return True
        time.sleep(0.01)
    return False


@pytest.fixture
def staying() -> Iterator[Callable[[], tuple[Process, list[int]]]]:
    """Starts processes that stay whatever they are asked, and returns each with its id and that of one that it runs."""
    with contextlib.ExitStack() as stack:

        def get() -> tuple[Process, list[int]]:
            read, write = os.pipe()
            pipe = stack.enter_context(open(read))
            started = start("entries:stay", {}, [write])
            os.close(write)
            return started, [started.pid, int(pipe.readline())]

        yield get


def test_a_fresh_python_finds_modules_where_this_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the current folder first; paths that are objects are paths, too."""
    (tmp_path / "json.py").write_text("raise SystemExit(5)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path / "further", None])
    command = interpreter("import json; print(json.dumps([sys.argv[1:], sys.path]))", "one", "two three")
    arguments, path = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert arguments == ["one", "two three"]
    assert path == [*(entry for entry in sys.path if isinstance(entry, str)), str(tmp_path / "further")]


# ---- What they inherit -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def changed(what: str, folder: Path) -> Iterator[None]:
    """Change something about this process that the ones that it starts inherit."""
    if what == "environment":
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AXE_TEST", "a value, \udcff")
            patch.setenv("TVM_AXE_TEST", "another")
            patch.delenv("HOME", raising=False)
            yield
    elif what == "directory":
        before = os.getcwd()
        os.chdir(folder)
        yield
        os.chdir(before)
    elif what == "umask":
        umask = os.umask(0o027)
        yield
        os.umask(umask)
    elif what == "path":
        sys.path.append(str(folder))
        yield
        sys.path.remove(str(folder))
    elif what == "affinity":
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(cores)})
        yield
        os.sched_setaffinity(0, cores)
    elif what == "blocked":
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGCHLD])
        yield
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    elif what == "ignored":
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGUSR2)}
        yield
        for number, handler in handlers.items():
            signal.signal(number, handler)
    elif what == "handled":
        handler = signal.signal(signal.SIGUSR1, lambda *_: None)
        yield
        signal.signal(signal.SIGUSR1, handler)
    elif what == "outputs":
        kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            with open(folder / str(number), "w") as file:
                os.dup2(file.fileno(), number)
        yield
        for number, copy in zip((1, 2), kept):
            os.dup2(copy, number)
            os.close(copy)
    else:
        yield


@pytest.mark.parametrize(
    "what",
    ["environment", "directory", "umask", "path", "affinity", "blocked", "ignored", "handled", "outputs", "nothing"],
)
def test_a_process_is_like_a_fresh_one(what: str, tmp_path: Path) -> None:
    """The server is up before the change, and stays."""
    told()
    before = server().pid
    with changed(what, tmp_path):
        expected, found = fresh(NAMES), told(NAMES)
    assert expected.pop("parent") == os.getpid() and found.pop("parent") == before == server().pid
    assert found.pop("descriptors") - 1 == expected.pop("descriptors")  # one is the pipe that says how it ended
    del expected["compiler"], found["compiler"]
    assert found == expected


def test_a_directory_that_was_removed(tmp_path: Path) -> None:
    before = os.getcwd()
    folder = tmp_path / "removed"
    folder.mkdir()
    os.chdir(folder)
    try:
        folder.rmdir()
        assert start("entries:exit_with_3", {}).wait(20) == 3
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "TVM_NUM_THREADS", "LD_BIND_NOT", "PYTHONNODEBUGRANGES"])
def test_a_variable_that_is_read_at_the_start_means_another_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told()
    first = server().pid
    monkeypatch.setenv(name, "1")
    found = told([name])
    assert found["variables"][name] == "1" and found["parent"] == server().pid != first
    assert gone([first])
    monkeypatch.delenv(name)
    assert told([name])["variables"][name] is None


def test_variables_for_the_process_alone() -> None:
    assert told(["AXE_TEST"], {"AXE_TEST": "here"})["variables"]["AXE_TEST"] == "here"
    assert told(["AXE_TEST"])["variables"]["AXE_TEST"] is None


def test_a_long_request() -> None:
    """Longer than a message between sockets may be."""
    name, value = "AXE_TEST", "x" * 100_000
    many = {f"AXE_TEST_{i}": value for i in range(10)}
    assert told([name], {name: value, **many})["variables"][name] == value


def test_processes_draw_numbers_of_their_own() -> None:
    environment = {"OPENBLAS_NUM_THREADS": "1"}
    drawn = [written("draw", environment)[1].split() for _ in range(3)]
    assert len({number for numbers in drawn for number in numbers}) == 9


def test_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert start("entries:say", {}).wait(20) == 0
    assert capfd.readouterr() == ("to output\n", "to error\n")


def test_output_to_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open(tmp_path / "log", "w") as log:
        assert start("entries:say", {}, output=log.fileno()).wait(20) == 0
    assert sorted((tmp_path / "log").read_text().split("\n")) == ["", "to error", "to output"]
    assert capfd.readouterr() == ("", "")


# ---- The server --------------------------------------------------------------------------------------------------


def test_the_server_has_the_compiler_and_one_thread() -> None:
    """What workers need is imported once, and not by this process's children."""
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    worker = start("tvm_axe.collective.serving:serve", {}, environment=environment, output=os.open("/dev/null", 1))
    assert worker.wait(60) == 1  # for want of arguments
    found = told((), environment)
    assert found["compiler"] and found["parent"] == server().pid
    assert server().num_threads() == 1


def test_an_import_that_starts_a_thread_is_left_to_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded.py").write_text(
        textwrap.dedent(
            """
            import os, threading, time
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
            def run(descriptors):
                os.write(descriptors[0], str(len(os.listdir("/proc/self/task"))).encode())
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        read, write = os.pipe()
        with open(read) as pipe:
            started = start("threaded:run", {}, [write])
            os.close(write)
            assert (pipe.read(), started.wait(20)) == ("2", 0)
        assert server().num_threads() == 1


def test_the_compiler_comes_without_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which starts threads where a GPU is; who imports it in a process gets it."""
    (tmp_path / "torch.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    (tmp_path / "compiling.py").write_text(
        textwrap.dedent(
            """
            import os, sys
            import tvm
            before = "torch" in sys.modules
            def run(descriptors):
                import torch
                os.write(descriptors[0], f"{before} {torch.__file__}".encode())
            """
        )
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    read, write = os.pipe()
    with open(read) as pipe:
        started = start("compiling:run", {}, [write], environment)
        os.close(write)
        assert (pipe.read(), started.wait(60)) == (f"False {tmp_path / 'torch.py'}", 0)
    assert server().num_threads() == 1


def test_a_killed_server_takes_its_processes_along_and_is_replaced(
    staying: Callable[[], tuple[Process, list[int]]],
) -> None:
    started, (pid, other) = staying()
    before = server()
    before.kill()
    assert started.wait(10) == -signal.SIGKILL and gone([pid])
    again, _ = staying()
    assert again.poll() is None and server().pid != before.pid and gone([before.pid])
    again.kill()
    assert again.wait(10) == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.kill(other, signal.SIGKILL)


def test_a_server_that_never_stays_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_SERVE", "raise SystemExit")
    monkeypatch.setattr(process, "_current", None)
    with pytest.raises(ChildProcessError, match="no process for entries:say: 3 servers ended before they forked one"):
        start("entries:say", {})


def test_a_child_that_this_process_forks_has_a_server_of_its_own() -> None:
    told()
    mine = server().pid
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.write(write, f"{told()['parent']} {server().ppid() == os.getpid()}".encode())
            assert process._current is not None
            process._current.end()
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with open(read) as pipe:
        theirs, owned = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0 and owned == "True"
    assert int(theirs) != mine and gone([int(theirs)])
    assert told()["parent"] == server().pid == mine


def test_threads_that_python_starts_with_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ChildProcessError, match=r"no process for entries:stay: Python has other threads before it"):
        start("entries:stay", {})


def test_threads_start_processes_beside_each_other() -> None:
    """Their ends are not mixed up, nor tied to the threads'."""
    started: list[Process] = []
    threads = [threading.Thread(target=lambda: started.append(start("entries:exit_with_3", {}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ending = [start(f"entries:{name}", {}) for name in ("die", "exit_with_3")]
    assert [each.wait(20) for each in started] == [3] * 8
    assert [each.wait(20) for each in ending] == [-signal.SIGTERM, 3]


# ---- How they end ------------------------------------------------------------------------------------------------


def test_how_a_process_ended(capfd: pytest.CaptureFixture[str]) -> None:
    assert start("entries:exit_with_3", {"a": 1}).wait(20) == 3
    assert start("entries:die", {}).wait(20) == -signal.SIGTERM
    assert capfd.readouterr() == ("", "")
    for entry, message in (("entries:fail", "ValueError: this is the one"), ("no_such_module:f", "ModuleNotFoundErr")):
        assert start(entry, {}).wait(20) == 1
        assert message in capfd.readouterr().err


def test_waiting_and_killing(staying: Callable[[], tuple[Process, list[int]]]) -> None:
    started, pids = staying()
    with pytest.raises(TimeoutError, match=rf"process {started.pid} still runs after 0.1 s"):
        started.wait(0.1)
    assert started.poll() is None
    started.kill()
    assert started.wait() == started.poll() == -signal.SIGKILL and gone(pids)
    started.kill()  # nothing is left to kill


def test_a_process_without_a_handle_is_killed(staying: Callable[[], tuple[Process, list[int]]]) -> None:
    started, pids = staying()
    kept, others = staying()
    del started
    gc.collect()
    assert gone(pids) and kept.poll() is None and psutil.pid_exists(others[1])
    kept.kill()
    assert kept.wait(10) == -signal.SIGKILL


SCRIPT = """
    import os, sys, time
    from tvm_axe.processes import process, start
    read, write = os.pipe()
    started = start("entries:stay", {}, [write])
    print(process._current.process.pid, started.pid, open(read).readline(), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("sys.exit(0)", 0, ""),
        ("raise ValueError('this is the one')", 1, "this is the one"),
        ("time.sleep(600)", -signal.SIGKILL, ""),
        ("os.fork() or (time.sleep(3), os._exit(0)); time.sleep(600)", -signal.SIGKILL, ""),
        ("os.killpg(0, 2)\ntime.sleep(600)", -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=["returns", "raises", "killed", "killed with a forked child left", "interrupted"],
)
def test_nothing_outlives_who_started_it(end: str, status: int, error: str) -> None:
    """Nor says anything: Ctrl-C's signal goes to the whole process group."""
    code = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{textwrap.dedent(SCRIPT)}{end}"
    controller = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert controller.stdout is not None and controller.stderr is not None
    pids = [int(pid) for pid in controller.stdout.readline().split()]
    assert len(pids) == 3
    if status == -signal.SIGKILL:
        time.sleep(0.2)
        controller.kill()
    assert controller.wait(20) == status and gone(pids)
    errors = controller.stderr.read()
    assert error in errors if error else not errors


def test_no_descriptor_is_left() -> None:
    told()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        told()
        with pytest.raises(TypeError, match="not JSON serializable"):
            start("entries:say", {"this": object()})
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
