"""The examples in the docstrings are right."""

import doctest

import pytest

from tvm_axe.stream import codec, explore, functions, kernels, loops, memory, metrics, program, types, views
from tvm_axe.stream.tiled import translating


@pytest.mark.parametrize(
    "module", [codec, explore, functions, kernels, loops, memory, metrics, program, types, views, translating]
)
def test_examples(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed
