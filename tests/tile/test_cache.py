"""What is kept on disk comes back whole or not at all, whoever else is at work in the folder."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import tvm_axe as axe
from tvm_axe.cli import main
from tvm_axe.collective.merging import merged
from tvm_axe.errors import InputError, TileError
from tvm_axe.layout import Mesh
from tvm_axe.machines import cache, nvcc, resolve_target
from tvm_axe.machines.builder import build_program
from tvm_axe.machines.cache import Cache, key
from tvm_axe.programs import PROGRAMS


@pytest.fixture
def store(tmp_path):
    return Cache(tmp_path / "kernels")


def refuse():
    raise AssertionError("made again")


def test_what_was_made_is_not_made_again(store):
    assert store.get("a") is None
    assert store.get_or_make("a", lambda: b"one") == b"one"
    assert store.get_or_make("a", refuse) == b"one"
    assert Cache(store.folder).get("a") == b"one"
    assert store.get("b") is None


def test_a_folder_may_be_named_by_a_string(tmp_path):
    Cache(str(tmp_path / "named")).put("a", b"something")
    assert Cache(tmp_path / "named").get("a") == b"something"


def test_keys_tell_apart_what_differs():
    assert key("a", "b") == key("a", b"b")
    assert len({key("ab"), key("a", "b"), key("b", "a"), key("", "ab"), key("ab", "")}) == 5


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_broken_artifact_is_dropped_and_made_again(store, damage):
    store.put("a", b"contents")
    ((path, *_),) = store.entries()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?" if damage is None else damage)
    assert store.get("a") is None
    assert not path.exists()
    assert store.get_or_make("a", lambda: b"contents") == b"contents"
    assert path.read_bytes() == whole


def test_what_was_used_longest_ago_goes_first(tmp_path):
    store = Cache(tmp_path, limit=400)
    for name in "abc":
        store.put(name, b"x" * 96)  # 128 bytes with the hash
    for age, (path, *_) in enumerate(sorted(store.entries())):
        os.utime(path, (1000 + age, 1000 + age))
    assert store.get("a") is not None  # now the last that was used
    store.put("d", b"x" * 96)
    assert [store.get(name) is not None for name in "abcd"] == [True, False, True, True]
    assert sum(size for _, size, _ in store.entries()) <= 400


def test_one_that_is_larger_than_the_limit_is_kept_alone(tmp_path):
    store = Cache(tmp_path, limit=100)
    store.put("a", b"x")
    store.put("b", b"x" * 200)
    assert store.get("a") is None
    assert store.get("b") == b"x" * 200


def test_processes_at_once(store):
    """Writers of the same names, one of which clears the folder all the time, never see each other's halves."""
    script = """
import sys
from pathlib import Path
from tvm_axe.machines.cache import Cache
store, number = Cache(Path(sys.argv[1]), limit=600_000), int(sys.argv[2])
for turn in range(150):
    name = str(turn % 5)
    want = name.encode() * 50_000
    if store.get_or_make(name, lambda: want) != want:
        sys.exit(f"another's contents for {name}")
    if number == 0 and turn % 10 == 0:
        store.clear()
"""
    workers = [
        subprocess.Popen([sys.executable, "-c", script, store.folder, str(number)], stderr=subprocess.PIPE)
        for number in range(3)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors.decode()
    assert not list(store.folder.glob(".tmp*"))


def counted(log, seconds):
    """What makes an artifact, slowly, and says so."""

    def make():
        with open(log, "a") as file:
            print(os.getpid(), file=file)
        time.sleep(seconds)
        return b"made"

    return make


def forked(*targets):
    """Processes that each call one of these."""
    processes = [multiprocessing.get_context("fork").Process(target=target) for target in targets]
    for process in processes:
        process.start()
    return processes


def test_what_many_want_at_once_is_made_once(store, tmp_path):
    log = tmp_path / "log"
    make = counted(log, 0.3)
    processes = forked(*[lambda: sys.exit(store.get_or_make("a", make) != b"made")] * 3)
    threads = [threading.Thread(target=store.get_or_make, args=("a", make)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for other in (*threads, *processes):
        other.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(log.read_text().split()) == 1
    assert not list(store.folder.glob(".lock*"))


def test_names_do_not_wait_for_each_other(store):
    began = threading.Event()

    def make():
        began.set()
        assert other.wait(timeout=60)
        return b"first"

    other = threading.Event()
    thread = threading.Thread(target=store.get_or_make, args=("a", make))
    thread.start()
    assert began.wait(timeout=60)
    assert store.get_or_make("b", lambda: b"second") == b"second"
    other.set()
    thread.join(timeout=60)
    assert store.get("a") == b"first"


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_who_dies_or_stops_with_a_lock_keeps_nobody(store, tmp_path, monkeypatch, fate):
    """A lock ends with its holder; of one that was stopped, others lose patience."""
    monkeypatch.setattr(cache, "PATIENCE", 60.0 if fate == signal.SIGKILL else 0.5)
    log = tmp_path / "log"
    (process,) = forked(lambda: store.get_or_make("a", counted(log, 600)))
    while not log.exists() or not log.read_text():
        time.sleep(0.01)
    os.kill(process.pid, fate)
    start = time.monotonic()
    assert store.get_or_make("a", lambda: b"mine") == b"mine"
    assert time.monotonic() - start < 30
    process.kill()
    process.join(timeout=60)
    assert store.get("a") == b"mine"


def test_a_maker_that_fails_leaves_the_next_to_make_it(store):
    def fail():
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        store.get_or_make("a", fail)
    assert store.get_or_make("a", lambda: b"one") == b"one"
    assert [path.name for path in store.folder.iterdir()] == ["a.kernel"]


def test_ranks_compile_a_program_for_gpus_once_between_them(tmp_path, monkeypatch):
    """The builder that ranks are told, in a process each; a second start finds all."""
    try:
        nvcc.find_compiler()
    except TileError:
        pytest.skip("neither nvcc nor nvrtc on this machine")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "kernels"))
    log = tmp_path / "log"
    for name in ("_nvcc", "_nvrtc"):
        monkeypatch.setattr(nvcc, name, compiling(getattr(nvcc, name), log))
    program = PROGRAMS["sgd"](Mesh({"dp": 3}))
    target = resolve_target("cuda:sm_90a")
    exe = axe.compile(program.schedule("fuse(RS-C-AG)"), target=target, work_dir=None, keep=False)

    def rank():
        build_program(merged(exe.runnable), target)

    for _start in range(2):
        processes = forked(rank, rank, rank)
        for process in processes:
            process.join(timeout=120)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        kernels = len(Cache().entries())
        assert kernels > 0 and len(log.read_text().split()) == kernels


def compiling(compile_it, log):
    """A compiler that counts what it compiles."""

    def counting(*arguments):
        with open(log, "a") as file:
            print(os.getpid(), file=file)
        return compile_it(*arguments)

    return counting


def test_a_folder_that_cannot_be_written_is_said_and_done_without(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Cache(tmp_path / "file" / "kernels")
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept there.*set TVM_AXE_CACHE"):
        assert store.get_or_make("a", lambda: b"one") == b"one"


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv(cache.FOLDER, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert Cache().folder == tmp_path / "home" / ".cache" / "tvm_axe"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Cache().folder == tmp_path / "xdg" / "tvm_axe"
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "own"))
    assert Cache().folder == tmp_path / "own"


def test_the_command(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    Cache().put("a", b"x" * 1000)
    (tmp_path / ".tmpleft").write_bytes(b"by a writer that was killed")
    (tmp_path / "mine.txt").write_text("not a kernel")
    assert main(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: 1 compiled kernels and programs, 1,032 bytes\n"
    assert main(["cache", "--clear"]) == 0
    assert "1 compiled kernels and programs removed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_cannot_be_removed_is_an_error(store, monkeypatch):
    store.put("a", b"x")

    def unlink(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.unlink", unlink)
    with pytest.raises(InputError, match="cannot be removed: Permission denied"):
        store.clear()
