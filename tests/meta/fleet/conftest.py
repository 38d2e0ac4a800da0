"""Fleets on this machine: a tracker and workers, each a process of its own, which the tests of a process share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tvm_axe.meta.fleet.fleet import Fleet

ODD = Path(__file__).with_name("odd_worker.py")
"""A worker that says something else of its machine than is true."""
_LONGEST = 120.0  # seconds until a server is up on a machine that does much else
EASY = {"drift": 1e9, "noise": 1e9, "silent": 60.0}
"""What a fleet asks of machines that do much else."""


class Started:
    """A server, up once it has printed its first line.

    Attributes
    ----------
    first
        That line.
    """

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        folder.mkdir()
        self.folder, self._out, self._errors = folder, folder / "out", folder / "errors"
        with self._out.open("w") as out, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                env={**os.environ, "TMPDIR": str(folder), **environment},
                start_new_session=True,
            )
        until = time.monotonic() + _LONGEST
        while "\n" not in self.said():
            if self.process.poll() is not None or time.monotonic() > until:
                self.end()
                pytest.fail(f"{' '.join(command)} didn't start: {self.errors()}")
            time.sleep(0.05)
        self.first = self.said().splitlines()[0]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.first.partition("listening on ")[2].split(",")[0].rpartition(":")[2])

    def said(self) -> str:
        """What it has printed."""
        return self._out.read_text()

    def errors(self) -> str:
        """What it has printed to standard error."""
        return self._errors.read_text()

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal and wait until it has ended."""
        self.process.send_signal(number)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


class Servers:
    """A tracker, and workers that are started as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, []
        self.tracker = f"127.0.0.1:{self.start('fleet', 'tracker', '--port', '0').port}"

    def start(self, *arguments: str, command: tuple[str, ...] = ("-m", "tvm_axe"), **environment: str) -> Started:
        """Start a command of the package, or another one of Python's."""
        folder = self._folder / str(len(self._started))
        self._started.append(Started([sys.executable, *command, *arguments], folder, environment))
        return self._started[-1]

    def worker(self, key: str, name: str, *arguments: str, odd: str = "") -> Started:
        """Start a worker; an odd one says that its fingerprint has these fields, as JSON."""
        command = (str(ODD),) if odd else ("-m", "tvm_axe")
        place = ("--tracker", self.tracker, "--key", key, "--port", "0", "--name", name)
        return self.start("worker", *place, *arguments, command=command, **({"TVM_AXE_ODD": odd} if odd else {}))

    def fleet(self, key: str, **options: Any) -> Fleet:
        """The workers of a key."""
        return Fleet(self.tracker, key, **{**EASY, **options})

    def close(self) -> None:
        """End all that runs still."""
        for server in reversed(self._started):
            if server.process.poll() is None:
                server.end()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """A tracker."""
    servers = Servers(tmp_path_factory.mktemp("servers"))
    try:
        yield servers
    finally:
        servers.close()


@pytest.fixture(scope="session")
def board(servers: Servers) -> tuple[Started, Started]:
    """Two workers of the key ``board``, whose processes may have 3 GiB and whose candidates 6 s."""
    limits = ("--memory", "3", "--seconds", "6")
    return servers.worker("board", "first", *limits), servers.worker("board", "second", *limits)


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait until something is so: ``until(lambda: ...)``."""

    def wait(is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + _LONGEST
        while not is_so():
            assert time.monotonic() < end, "it never was"
            time.sleep(0.1)

    return wait
