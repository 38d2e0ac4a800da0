"""Processes that import the compiler without PyTorch, which is a module that says when it is imported here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def ran(tmp_path: Path):
    """Runs Python with these arguments, and returns what it printed."""
    (tmp_path / "torch.py").write_text('print("PyTorch")\n')
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
        ).stdout

    return run


LEAVE = "import sys\nfrom tvm_axe.processes import leave_out_torch\nleave_out_torch()\n"


@pytest.mark.parametrize("before", ["", "import tvm_ffi"])
def test_the_compiler_comes_without_pytorch(before: str, ran) -> None:
    """Who imports it afterwards gets it, and what the compiler is loaded by is Python's."""
    behind = "import tvm\nprint(type(tvm.__loader__).__name__, type(tvm.__spec__.loader).__name__)\nimport torch\n"
    assert ran("-c", f"{LEAVE}{before}\n{behind}") == "SourceFileLoader SourceFileLoader\nPyTorch\n"


def test_who_has_pytorch_keeps_it(ran) -> None:
    assert ran("-c", f"import torch, sys\nbefore = list(sys.meta_path)\n{LEAVE}print(sys.meta_path == before)") == (
        "PyTorch\nTrue\n"
    )


def test_the_command_line_comes_without_pytorch(ran) -> None:
    assert "PyTorch" not in ran("-m", "tvm_axe", "kernels")
