"""The examples in the tuner's docstrings."""

import doctest
from importlib import import_module

import pytest


@pytest.mark.parametrize(
    "name", ["meta.search.policy", "meta.measure.builder", "records.folders", "records.shipped", "records.packing"]
)
def test_examples_run(name):
    found = doctest.testmod(import_module(f"tvm_axe.{name}"))
    assert found.failed == 0
