"""Docstrings read alike: a summary of one line, parameters with types, descriptions that say what they describe."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tvm_axe

FOLDER = Path(tvm_axe.__file__).parent
PACKAGES = ("analysis", "demo", "layout", "programs", "schedule", "stream")
"""The packages that are held to it."""
FRAGMENT = re.compile(r"(Of|That|By|Which|For|From|As|In|On|With|To|So|Its|It|They)\b")
NOUN = re.compile(r"(The|An?|Whether|How|What|Which|All|Every|Each|Where|When)\b")
TYPED = re.compile(r"\S.* : \S")


def documented(package: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Where a module, class or function stands, and its docstring."""
    for file in sorted((FOLDER / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                name = getattr(node, "name", "")
                yield f"{file.relative_to(FOLDER)}:{node.body[0].lineno} {name}", node, ast.get_docstring(node)


def entries(doc: str) -> Iterator[tuple[str, str, str]]:
    """Section, heading and text of each entry of a docstring's sections."""
    parts = re.split(r"^(\w+)\n-{4,}\n", doc, flags=re.MULTILINE)
    for section, body in zip(parts[1::2], parts[2::2]):
        if section in ("Parameters", "Attributes", "Returns", "Raises"):
            for found in re.finditer(r"^(\S.*)\n((?: {4}.*\n?)*)", f"{body}\n", re.MULTILINE):
                yield section, found[1], inspect.cleandoc(found[2])


def gives_a_value(node: ast.AST) -> bool:
    """Whether a node is a function that is called for what it returns."""
    if not isinstance(node, ast.FunctionDef) or node.returns is None:
        return False
    marks = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return ast.unparse(node.returns) != "None" and "property" not in marks and "contextmanager" not in marks


@pytest.mark.parametrize("package", PACKAGES)
def test_summaries(package):
    wrong = []
    for place, node, doc in documented(package):
        summary = doc.partition("\n\n")[0]
        if not isinstance(node, ast.Module) and ("\n" in summary or FRAGMENT.match(summary)):
            wrong.append(f"{place}: {summary}")
        if gives_a_value(node) and NOUN.match(summary):
            wrong.append(f"{place}: a function says what it does, Return ... at least: {summary}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_sections(package):
    wrong = []
    for place, _, doc in documented(package):
        for section, heading, text in entries(doc):
            if section in ("Parameters", "Attributes") and not TYPED.match(heading):
                wrong.append(f"{place}: {heading!r} has no type")
            if section == "Raises" and not text.startswith("If "):
                wrong.append(f"{place}: {heading}: {text!r} doesn't begin with If (more text needs a section, Notes)")
            if FRAGMENT.match(text) or (not text and section != "Returns"):
                wrong.append(f"{place}: {heading}: {text!r} doesn't say what it is")
    assert not wrong, "\n".join(wrong)
