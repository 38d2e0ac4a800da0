"""The examples in the docstrings of the programs are right."""

import doctest
import importlib
import pkgutil

import pytest

import tvm_axe.stream.programs as package
from tvm_axe.stream import published, reproduce


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(package.__path__)])
def test_programs(name):
    assert doctest.testmod(importlib.import_module(f"tvm_axe.stream.programs.{name}")).failed == 0


@pytest.mark.parametrize("module", [published, reproduce])
def test_results(module):
    assert doctest.testmod(module).failed == 0
