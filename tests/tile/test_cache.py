"""What is kept on disk comes back whole or not at all, whoever else is at work in the folder."""

import os
import subprocess
import sys

import pytest

from tvm_axe.cli import main
from tvm_axe.errors import InputError
from tvm_axe.machines import cache
from tvm_axe.machines.cache import Cache, key


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
    assert capsys.readouterr().out == f"{tmp_path}: 1 compiled kernels, 1,032 bytes\n"
    assert main(["cache", "--clear"]) == 0
    assert "1 compiled kernels removed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_what_cannot_be_removed_is_an_error(store, monkeypatch):
    store.put("a", b"x")

    def unlink(path, missing_ok=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.unlink", unlink)
    with pytest.raises(InputError, match="cannot be removed: Permission denied"):
        store.clear()
