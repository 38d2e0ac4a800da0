"""Random programs of a mesh, beside the interpreter; scripts/fuzz_tiles.py --mesh runs as many as one likes."""

import pytest
from generator_mesh import MISTAKES, drawn, judge, results
from interpreter import Fault

from tvm_axe.collective import launch
from tvm_axe.layout import Mesh


@pytest.mark.parametrize("devices, programs", [(1, 4), (2, 10), (3, 12), (4, 8)])
def test_random_programs(devices, programs):
    with launch(Mesh({"tp": devices}), engine="threads") as workers:
        for seed in range(programs):
            judge(drawn(seed, devices), workers)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_random_mistakes_are_caught(mistake):
    """Each by the interpreter, whatever the order; when they are read, they are refused (test_clocks.py)."""
    for seed in range(20):
        made = drawn(seed, 3, mistake)
        with pytest.raises(Fault):
            for order in range(6):
                results(made, order, None, checked=False)
