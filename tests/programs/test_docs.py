"""The examples in the package's docstrings run."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["", ".bucket", ".random"])
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"tvm_axe.programs{module}"))
    assert result.attempted and not result.failed
