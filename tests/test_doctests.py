"""Every example in a docstring runs: those of the package and of scripts/, a module a test."""

from __future__ import annotations

import ast
import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tvm_axe.layout

PACKAGE = Path(tvm_axe.__file__).parent
SCRIPTS = Path(__file__).parent.parent / "scripts"
PROMPT = ">>> "
NEEDED = {"models_": "torch", "tvm_axe.stream.": "sympy", "tvm_axe.tile.operators": "torch"}
"""What isn't always installed, by how the names of the modules begin whose examples need it."""
LAYOUT = {name: getattr(tvm_axe.layout, name) for name in tvm_axe.layout.__all__}


def files() -> Iterator[tuple[str, Path]]:
    """The modules that have examples: names that import them, and their sources."""
    for root, folder in ((PACKAGE.parent, PACKAGE), (SCRIPTS, SCRIPTS)):
        for file in sorted(folder.rglob("*.py")):
            if PROMPT in file.read_text(encoding="utf-8"):
                yield ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), file


FILES = dict(files())


def examples(module: ModuleType, file: Path) -> Iterator[doctest.DocTest]:
    """The examples of each docstring in a source, also where a decorator hides the function that has it.

    Those of modules of `tvm_axe.layout` know the names that users import from there.
    """
    known = vars(module) | (LAYOUT if module.__name__.rpartition(".")[0] == "tvm_axe.layout" else {})
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(ast.Constant(str(text))) if PROMPT in text:
                yield doctest.DocTestParser().get_doctest(text, known, module.__name__, str(file), node.lineno - 1)


@pytest.mark.parametrize("name", FILES)
def test_examples(name: str) -> None:
    for start, needed in NEEDED.items():
        if name.startswith(start):
            pytest.importorskip(needed, reason=f"the examples need {needed}, which is not installed")
    found = [*examples(importlib.import_module(name), FILES[name])]
    run = sum(doctest.SKIP not in example.options for each in found for example in each.examples)
    written = FILES[name].read_text(encoding="utf-8").count(PROMPT)
    assert run == written, f"of {written} times {PROMPT!r} in {name}, {run} are examples that run"
    wrong: list[str] = []
    for each in found:
        doctest.DocTestRunner(verbose=False).run(each, out=wrong.append)
    assert not wrong, "".join(wrong)
