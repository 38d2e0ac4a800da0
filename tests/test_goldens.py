"""`pytest --refresh-goldens`: what it writes, what it reports, and what a test says without it."""

import subprocess
import sys
from pathlib import Path

import pytest

TEST = """
from pathlib import Path

def test_it(golden):
    golden(Path({folder!r}), {{"same.svg": "1", "other.svg": "2", "new.svg": "3"}})
"""


@pytest.fixture
def run(tmp_path):
    """Run a test of a folder's texts in a pytest of its own, with this conftest."""
    for name, text in {"same.svg": "1", "other.svg": "1", "old.svg": "1", "notes.md": "1"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "test_it.py").write_text(TEST.format(folder=str(tmp_path)))

    def pytest_on(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
        conftest = ["--confcutdir", str(tmp_path), "-p", "conftest", *arguments, str(tmp_path / "test_it.py")]
        done = subprocess.run([*command, *conftest], capture_output=True, text=True, cwd=Path(__file__).parent)
        return done.returncode, done.stdout + done.stderr

    return pytest_on


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".svg", ".md")}


@pytest.mark.parametrize("processes", [[], ["-n", "1"]])
def test_refreshing(run, tmp_path, processes):
    status, said = run()
    assert status == 1 and "new.svg, old.svg, other.svg: not as made now" in said
    status, said = run("--refresh-goldens", *processes)
    assert status == 0
    listed = [line for line in said.splitlines() if line.startswith(str(tmp_path)) and line.endswith(".svg")]
    assert listed == [str(tmp_path / name) for name in ("new.svg", "old.svg", "other.svg")]
    assert texts(tmp_path) == {"same.svg": "1", "other.svg": "2", "new.svg": "3", "notes.md": "1"}
    assert run()[0] == 0
    status, said = run("--refresh-goldens")
    assert status == 0 and "none changed" in said
