"""Notebooks' kernels: of the interpreter that runs the tests, with folders of their own, over files as sockets."""

import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from jupyter_client import AsyncKernelManager, KernelManager
from jupyter_client.kernelspec import KernelSpecManager

import tvm_axe

NAME = "axe"
AGAIN = 30.0  # seconds
PACKAGE = str(Path(tvm_axe.__file__).parent.parent)


class Outcome(NamedTuple):
    """What became of a cell: the error's class, if it raised one, and all that it printed, the traceback too."""

    error: str | None
    text: str


class Kernel:
    """A kernel that runs, and its client."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str, interrupt_after: float | None = None) -> Outcome:
        """Run a cell; if it is to be interrupted, so many seconds after it printed something first.

        A signal that comes while Python collects garbage is lost, so it is sent again as who waits would send it.
        """
        printed: list[str] = []
        begun, ended = threading.Event(), threading.Event()

        def interrupt() -> None:
            begun.wait()
            pause = interrupt_after
            while not ended.wait(pause):
                self.manager.interrupt_kernel()
                pause = AGAIN

        def hear(message: dict) -> None:
            content = message["content"]
            if message["msg_type"] == "error":
                printed.extend(content["traceback"])
            elif message["msg_type"] == "stream":
                printed.append(content["text"])
                begun.set()

        interrupting = threading.Thread(target=interrupt if interrupt_after is not None else begun.wait)
        interrupting.start()
        try:
            reply = self.client.execute_interactive(code, output_hook=hear, timeout=120)
        finally:
            ended.set()
            begun.set()
            interrupting.join()
        return Outcome(reply["content"].get("ename"), re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(printed)))

    def works(self, code: str) -> None:
        """Run a cell that must not raise."""
        outcome = self.run(code)
        assert outcome.error is None, outcome.text

    def close(self) -> None:
        """End it."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Where kernels are described, work and keep what they keep; its name is short, as a socket's must be."""
    with tempfile.TemporaryDirectory(prefix="axe", ignore_cleanup_errors=True) as name:
        spec = Path(name) / "kernels" / NAME / "kernel.json"
        spec.parent.mkdir(parents=True)
        command = [sys.executable, "-m", "ipykernel_launcher", "--HistoryManager.enabled=False", "-f"]
        described = {"argv": [*command, "{connection_file}"], "display_name": NAME, "language": "python"}
        spec.write_text(json.dumps(described), encoding="utf-8")
        yield Path(name)


@pytest.fixture(scope="session")
def environment(folder: Path) -> dict[str, str]:
    """The variables of a kernel, whose home is its folder."""
    homes = ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME")
    path = os.pathsep.join(filter(None, [PACKAGE, os.environ.get("PYTHONPATH")]))
    return {**os.environ, **dict.fromkeys(homes, str(folder)), "PYTHONPATH": path}


@pytest.fixture(scope="session")
def managed(folder: Path) -> Callable[[type[KernelManager | AsyncKernelManager]], KernelManager | AsyncKernelManager]:
    """Make a manager of a kernel that is to be started."""
    made: list[KernelManager | AsyncKernelManager] = []

    def make(kind: type[KernelManager | AsyncKernelManager]) -> KernelManager | AsyncKernelManager:
        specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")], ensure_native_kernel=False)
        sockets = str(folder / f"k{len(made)}")
        made.append(
            kind(
                kernel_name=NAME,
                kernel_spec_manager=specs,
                transport="ipc",
                ip=sockets,
                connection_file=f"{sockets}.json",
            )
        )
        return made[-1]

    return make


@pytest.fixture(scope="module")
def kernel(folder: Path, environment: dict[str, str], managed: Callable[..., KernelManager]) -> Iterator[Kernel]:
    """A kernel for the tests of a module."""
    manager = managed(KernelManager)
    manager.start_kernel(cwd=str(folder), env=environment)
    kernel = Kernel(manager)
    yield kernel
    kernel.close()
