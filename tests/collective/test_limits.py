"""Launches where something of the process is in the way: its folder, its module path, its limits."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tvm_axe.collective import WorkerError, launch, local
from tvm_axe.layout import Mesh

SCRIPT = """
import json, sys
import tvm_axe as axe

size, engine = int(sys.argv[1]), sys.argv[2]
try:
    with axe.launch(axe.Mesh({"x": size}), engine=engine) as workers:
        x = workers.mesh_tensor((4,), "float32")
        for device in range(size):
            x.slab(device)[:] = 1
        workers.all_reduce(x, x, "x")
        print(x.slab(size - 1).tolist())
except axe.AxeError as error:
    print(f"{type(error).__name__}: {error}")
"""


def said(tmp_path: Path, size: int, engine: str, limit: str = "true") -> str:
    """What a script prints that launches, in a shell that a limit is set in, from an empty folder."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    command = ["/bin/bash", "-c", f'{limit}; exec "$@"', "sh", sys.executable, str(script), str(size), engine]
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    process = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}
    )
    assert (process.stderr, process.returncode) == ("", 0)
    return process.stdout.strip()


def sums(size: int) -> str:
    return str([float(size)] * 4)


def test_modules_of_the_current_folder_are_not_run(tmp_path: Path) -> None:
    """Neither the server that forks workers nor they look there, as `python -c` would."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("json", "os", "struct", "socket", "numpy", "tvm"):
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(5)\n"
        )
    assert said(tmp_path, 2, "processes") == sums(2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("engine", ["processes", "threads"])
@pytest.mark.parametrize(
    ("limit", "size"), [("ulimit -n 64", 16), ("ulimit -n 20", 4), ("ulimit -f 0", 2), ("ulimit -v 4000000", 2)]
)
def test_limits_are_kept_or_named(tmp_path: Path, engine: str, limit: str, size: int) -> None:
    found = said(tmp_path, size, engine, limit)
    if found != sums(size):
        assert found.startswith("WorkerError: ") and f"({limit[:9]})" in found, found


def test_few_descriptors_are_named(tmp_path: Path) -> None:
    found = said(tmp_path, 16, "processes", "ulimit -n 32")
    assert found.startswith("WorkerError: ") and "raise the limit of open files (ulimit -n)" in found


def test_a_small_address_space_is_enough(tmp_path: Path) -> None:
    """Less than the machine's memory, which an arena reserves where it can."""
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2048
    assert said(tmp_path, 2, "processes", f"ulimit -v {half}") == sums(2)


def test_paths_that_are_objects_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python itself passes over them, so the module is found by the workers only if they were given it as text."""
    (tmp_path / "its_worker.py").write_text("from tvm_axe.collective.serving import serve\n")
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path, None])
    monkeypatch.setattr(local, "_ENTRY", "its_worker:serve")
    with launch(Mesh({"tp": 2})) as workers:
        x = workers.mesh_tensor((1,), "float32")
        x.slab(0)[:] = x.slab(1)[:] = 2
        workers.all_reduce(x, x, "tp")
        assert x.slab(0).tolist() == [4]


def test_a_worker_that_dies_before_it_is_up_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "processes")
    monkeypatch.setattr(local, "_ENTRY", "entries:fail")
    with pytest.raises(
        WorkerError, match=r"worker 1 \(tp=1; pid \d+\) ended with exit status 1:\n(?s:.*)this is the one"
    ):
        launch(Mesh({"tp": 2}))


def test_what_a_worker_says_while_it_starts_is_not_lost(tmp_path: Path) -> None:
    """What it prints before it is up is printed when it is."""
    (tmp_path / "loud.py").write_text(
        "import sys\nfrom tvm_axe.collective import serving\n\n"
        "def serve(*arguments, **named):\n    print('heard', file=sys.stderr)\n    serving.serve(*arguments, **named)\n"
    )
    script = """
        import sys
        import tvm_axe as axe
        from tvm_axe.collective import local
        sys.path.insert(0, sys.argv[1])
        local._ENTRY = "loud:serve"
        axe.launch(axe.Mesh({"x": 2})).close()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (process.stderr, process.returncode) == ("heard\n", 0)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Its modules are found where this process finds them; here one of them raises."""
    (tmp_path / "struct.py").write_text("raise ImportError('struct is broken here')\n")
    script = """
        import sys
        import tvm_axe as axe
        sys.path.insert(0, sys.argv[1])
        try:
            axe.launch(axe.Mesh({"x": 2}))
        except axe.AxeError as error:
            print(error)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "worker 1 (x=1; no process yet) did not start: no process for" in process.stdout
    assert "ImportError: struct is broken here" in process.stdout and process.returncode == 0
