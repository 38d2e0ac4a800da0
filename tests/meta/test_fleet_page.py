"""docs/fleet.md, tried line by line on loopback: what it says to write is written, and what it says to run is run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "fleet.md"
PORTS = ("9190", "9090", "9091")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def free_ports() -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    found = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return found


@pytest.fixture
def shell(tmp_path: Path):
    """What runs commands in a shell that has the page's ports and this Python's commands; all of it ends at last."""
    # A machine that runs tests is noisy, and may have one core.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if '-c' not in sys.orig_argv:  # what forks processes must have one thread\n"
        "    from tvm_axe.meta.fleet.fleet import Fleet\n"
        "    Fleet.__init__.__defaults__ = (None, 1e9, 1e9, 120.0, 60.0)  # drift, noise, every and silent\n"
    )
    scripts = tmp_path / "bin"
    scripts.mkdir()
    (scripts / "tvm-axe").write_text(f'#!/bin/sh\nexec {sys.executable} -m tvm_axe "$@"\n')
    (scripts / "tvm-axe").chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": path,
        "TMPDIR": str(tmp_path),
    }
    cores = sorted(os.sched_getaffinity(0))
    places = dict(zip(PORTS, map(str, free_ports())))
    begun: list[subprocess.Popen[str]] = []

    def run(text: str) -> str:
        for port, own in places.items():
            text = text.replace(port, own)
        for number, own in {"--cores 0": cores[0], "--cores 1": cores[min(1, len(cores) - 1)]}.items():
            text = text.replace(number, f"--cores {own}")
        printed = tmp_path / "printed"
        with printed.open("w") as file:
            begun.append(
                subprocess.Popen(
                    ["bash", "-e"],
                    cwd=tmp_path,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
            begun[-1].communicate(text, timeout=600)
        assert begun[-1].returncode == 0, printed.read_text()
        return printed.read_text()

    yield run
    for process in begun:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def test_the_page_runs(shell, tmp_path: Path) -> None:
    start, tune = blocks("sh")
    kernel, script = blocks("python")
    (tmp_path / "matmul.py").write_text(kernel)
    shell(start)
    waiting = "until tvm-axe fleet status --tracker 127.0.0.1:9190 | grep -q '2 there'; do sleep 0.5; done\n"
    printed = shell(waiting + tune)
    assert "matmul: " in printed and "(16 trials)" in printed
    assert "cpu: 2 there, 2 free, 0 requests waiting" in printed
    measured = {name: int(count) for name, count in re.findall(r"^machine (\w+): (\d+) measured", printed, re.M)}
    assert set(measured) <= {"first", "second"} and sum(measured.values()) == 16
    printed = shell(f"{sys.executable} - <<'END'\n{script}END\n")
    assert '"num-cores":1' in printed
    assert re.search(r"^(first|second): \d+ measured, 0 failed", printed, re.M)
