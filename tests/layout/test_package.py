"""The worked examples in the docstrings run, and the folder stands below everything else, the compiler included."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import tvm_axe.layout


@pytest.mark.parametrize("name", ["layout", "mesh"])
def test_worked_examples(name):
    result = doctest.testmod(importlib.import_module(f"tvm_axe.layout.{name}"))
    assert result.attempted > 3 and result.failed == 0


def test_layouts_import_neither_the_compiler_nor_the_layers_above():
    modules = set()
    for file in Path(tvm_axe.layout.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module)
    ours = {name for name in modules if name.startswith("tvm")}
    assert "tvm_axe.layout.axes" in ours
    assert all(name == "tvm_axe.errors" or name.startswith("tvm_axe.layout.") for name in ours)
