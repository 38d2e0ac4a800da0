"""How many points meet conditions: closed forms beside going through all of them."""

import itertools

import pytest
from tvm import tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.counting import count
from tvm_axe.analysis.expressions import substitute

I, J, K = (tirx.Var(name, "int32") for name in "ijk")

CONDITIONS = {
    "one variable": [I < 3],
    "apart": [I < 3, J >= 1],
    "together": [I * 3 + J < 8],
    "of two and of one of them": [I * 2 + J < 5, J < 2],  # their values have different dimensions
    "a chain": [I + J < 4, J * 2 + K < 6, K >= 1],
    "never": [I < 0, J + K < 2],
    "always": [tirx.IntImm("bool", 1)],
}


@pytest.mark.parametrize("conditions", CONDITIONS.values(), ids=CONDITIONS)
def test_as_many_as_there_are(conditions):
    extents = {I: 4, J: 3, K: 5}

    def holds(at: dict) -> bool:
        return all(bool(Analyzer().simplify(substitute(each, at))) for each in conditions)

    points = itertools.product(*(range(extent) for extent in extents.values()))
    expected = sum(holds({var: tirx.IntImm("int32", at) for var, at in zip(extents, point)}) for point in points)
    assert count(conditions, extents) == expected
