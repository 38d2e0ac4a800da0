"""Where the script says that time goes, from samples made up, and which kernels sample."""

from __future__ import annotations

import bench_mesh_phases as script
import numpy as np
import pytest

from tvm_axe.collective.cuda import moving
from tvm_axe.collective.cuda.source import source


@pytest.mark.parametrize("twice", [False, True])
def test_phases_of_exchanges(twice: bool) -> None:
    """Three exchanges of two blocks, 5 us apart, of which the second block is the later; 2000 ticks a microsecond."""
    samples = np.zeros(
        (moving.KEPT, moving.BLOCKS),
        np.dtype([("ticks", "int64", moving.PHASES), ("nanoseconds", "uint64", 2), ("seen", "uint64")]),
    )
    for number, slot in enumerate((31, 0, 1)):
        for block in range(2):
            begins = 10_000_000 + number * 5_000 + block * 100  # nanoseconds
            phases = np.array(
                [0, 500, 600, 1700 + block * 200, 1800 + block * 200, 700, 1600, 1900 + block * 200, 2000 + block * 200]
            )
            samples[slot, block]["ticks"] = 2 * (begins + phases) * (1, 1, 1, 1, 1, block, block, twice, 1)
            samples[slot, block]["nanoseconds"] = begins, begins + phases[-1]
    found = script.summary(samples)
    assert found == pytest.approx(
        {
            "has its data": 0.5,
            "has sent it": 0.6,
            "has what peers sent": 1.9,
            "has stored the sum": 2.0,
            **({"has all sums": 2.1} if twice else {}),
            "has told a peer": 0.7,
            "has been told": 1.6,
            "ends": 2.2,
            "from the end of one to the next": 2.7,
            "from one to the next": 5.0,
            "ticks a microsecond": 2000,
        }
    )


def test_only_measurements_sample() -> None:
    assert not moving.Mover.phases
    assert source(True) == "#define AXE_PHASES\n" + source()
    assert "#define AXE_PHASES" not in source()
