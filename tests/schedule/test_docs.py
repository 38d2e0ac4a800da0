"""Every primitive says what it does, takes, returns and raises, and when it is valid."""

import inspect
import re
import runpy
from pathlib import Path

import pytest
from tvm import s_tir

import tvm_axe.schedule
from tvm_axe.schedule import Schedule

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/primitives.py"))
PRIMITIVES = SCRIPT["PRIMITIVES"]
SECTIONS = {"Parameters", "Returns", "Raises", "Examples"}


def sections(doc: str) -> dict[str, str]:
    """The text below each underlined heading of a docstring."""
    parts = re.split(r"^(\w+)\n-+\n", doc, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def documented(doc: str) -> list[str]:
    """The parameters that a docstring has."""
    return re.findall(r"^\**(\w+) : \S", sections(doc)["Parameters"], re.MULTILINE)


def test_there_are_primitives():
    assert {"shard", "overlap", "tile_kernel"} <= set(PRIMITIVES)
    own = {name for name, value in vars(Schedule).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert own - set(vars(s_tir.Schedule)) == set(PRIMITIVES), "a primitive is a function of tvm_axe.schedule too"


@pytest.mark.parametrize("owner", [Schedule, tvm_axe.schedule], ids=["method", "function"])
@pytest.mark.parametrize("name", PRIMITIVES)
def test_primitive_is_documented(name, owner):
    primitive = getattr(owner, name)
    doc, signature = inspect.getdoc(primitive), inspect.signature(primitive)
    assert set(sections(doc)) >= SECTIONS - ({"Returns"} if signature.return_annotation == "None" else set())
    assert documented(doc) == [parameter for parameter in signature.parameters if parameter != "self"]
    assert "ScheduleError" in sections(doc)["Raises"]
    assert " -> " in doc and ">>> " in sections(doc)["Examples"]
    assert f"sch.{name}(" in sections(doc)["Examples"]
    assert len(re.findall(r"^Valid when ", doc, re.MULTILINE)) == 1
    assert len(re.findall(r"^Leaves ", doc, re.MULTILINE)) == 1


@pytest.mark.parametrize("name", PRIMITIVES)
def test_method_says_what_the_function_says(name):
    method, function = (inspect.getdoc(getattr(owner, name)) for owner in (Schedule, tvm_axe.schedule))
    assert [line for line in method.splitlines() if line not in function.splitlines()] == []
    assert set(documented(function)) - set(documented(method)) <= {"sch", "mesh"}


def test_page_is_what_the_docstrings_say():
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert page == SCRIPT["page"](), "run python scripts/primitives.py"
