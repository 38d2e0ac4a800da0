"""Names say what they name: no function hides a module, no two classes of a package have one name."""

import ast
import importlib
import pkgutil
import types
from collections import defaultdict
from pathlib import Path

import tvm_axe

FOLDER = Path(tvm_axe.__file__).parent
HIDDEN: set[str] = set()
"""Modules that are still hidden by a function of theirs; to be emptied, never added to."""
PLAIN_PROGRAMS: set[str] = set()
"""Packages with a class that is still called plain Program; one may stay."""
TWICE = {("tile", "Epilogue")}
"""Classes of one name that a package still has, each where it is; to be emptied."""


def modules(package: types.ModuleType):
    """The package's modules, each with the package that has it as an attribute."""
    for found in pkgutil.iter_modules(package.__path__):
        yield package, found.name
        if found.ispkg:
            yield from modules(importlib.import_module(f"{package.__name__}.{found.name}"))


def classes() -> dict[str, list[str]]:
    """By the name of a class, the folder of each that has it."""
    found = defaultdict(list)
    for file in FOLDER.rglob("*.py"):
        package = str(file.parent.relative_to(FOLDER))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(package)
    return found


def test_no_function_or_class_hides_a_module_of_its_name():
    hidden = {
        f"{package.__name__}.{name}"
        for package, name in modules(tvm_axe)
        if name != "__main__" and not isinstance(getattr(package, name, package), types.ModuleType)
    }
    assert hidden <= HIDDEN, "name the module otherwise, as schedule/sharding.py has shard"


def test_a_program_says_of_what():
    assert set(classes()["Program"]) <= PLAIN_PROGRAMS


def test_no_package_has_two_classes_of_one_name():
    twice = {
        (package, name) for name, packages in classes().items() for package in packages if packages.count(package) > 1
    }
    assert {(package, name) for package, name in twice if not name.startswith("_")} <= TWICE
