"""The folder stands below everything else, the compiler included."""

import ast
import subprocess
import sys
from pathlib import Path

import tvm_axe.layout

FOLDER = Path(tvm_axe.layout.__file__).parent


def imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def test_layouts_import_neither_the_compiler_nor_the_layers_above():
    modules = set()
    for file in FOLDER.glob("*.py"):
        tree = ast.parse(file.read_text())
        # symbolic.py alone imports the compiler, within functions that are called with its expressions.
        modules |= set(imported(tree.body if file.stem == "symbolic" else ast.walk(tree)))
    ours = {name for name in modules if name.startswith("tvm")}
    assert "tvm_axe.layout.axes" in ours
    below = ("tvm_axe.errors", "tvm_axe.notebook", "tvm_axe.layout")
    assert all(name in below or name.startswith("tvm_axe.layout.") for name in ours)


def test_layouts_work_where_there_is_no_compiler():
    program = f"""
import sys, types
package = types.ModuleType("tvm_axe")  # in place of the package's own, which imports the compiler for the other folders
package.__path__ = [{str(FOLDER.parent)!r}]
sys.modules["tvm_axe"] = package
sys.modules["tvm"] = sys.modules["tvm_ffi"] = None
from tvm_axe.layout import Layout
inner = Layout.parse("S[(8, 4) : (4@laneid, 1)]")
print(inner.tile_to((16, 8), (8, 4)).slice((16, 8), [(0, 8), (4, 8)]).canonicalize())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "S[(8, 4) : (4@laneid, 1)] + 4\n", done.stderr
