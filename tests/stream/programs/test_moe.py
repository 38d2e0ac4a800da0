"""A mixture of experts equals numpy however it is tiled and shared, and takes the same time with values and without."""

import numpy as np
import pytest

from tvm_axe.stream import Accelerator, StreamError
from tvm_axe.stream.programs.moe import MoECase, moe_inputs, moe_layer
from tvm_axe.stream.programs.reference import moe_reference
from tvm_axe.stream.programs.workloads import MoE, routing

LAYER = MoE(experts=8, chosen=3, width=24, hidden=20)


def arrays(batch, moe, rng):
    shapes = {
        "x": (batch, moe.width),
        "scale": (batch, moe.chosen),
        "w_gate": (moe.experts * moe.width, moe.hidden),
        "w_up": (moe.experts * moe.width, moe.hidden),
        "w_down": (moe.experts * moe.hidden, moe.width),
    }
    return {name: rng.standard_normal(shape, dtype="float32") for name, shape in shapes.items()}


@pytest.mark.parametrize("regions", [None, 4, 1])
@pytest.mark.parametrize("tile", [None, 1, 3, 16])
@pytest.mark.parametrize("batch", [1, 6, 33])
def test_equals_numpy(batch, tile, regions):
    rng = np.random.default_rng()
    given, chosen = arrays(batch, LAYER, rng), routing(batch, LAYER, seed=int(rng.integers(1 << 30)))
    program = moe_layer(LAYER, batch, tile, 5, regions)
    report = program.run({**moe_inputs(chosen), **given}, Accelerator())
    expected = moe_reference(given, chosen, LAYER)["y"]
    np.testing.assert_allclose(report.tensors["y"], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    without = program.run(moe_inputs(chosen), Accelerator(), values=False)
    assert (report.cycles, report.traffic, report.flops) == (without.cycles, without.traffic, without.flops)


def test_the_weights_of_experts_without_tokens_are_not_needed():
    rng = np.random.default_rng()
    given = arrays(4, LAYER, rng)
    chosen = np.tile([0, 3, 5], (4, 1))
    unused = np.setdiff1d(np.arange(LAYER.experts), chosen)
    for name, rows in (("w_gate", LAYER.width), ("w_up", LAYER.width), ("w_down", LAYER.hidden)):
        given[name].reshape(LAYER.experts, rows, -1)[unused] = np.nan
    report = moe_layer(LAYER, 4, None, 5).run({**moe_inputs(chosen), **given}, Accelerator())
    expected = moe_reference(given, chosen, LAYER)["y"]
    np.testing.assert_allclose(report.tensors["y"], expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    weights = 3 * LAYER.width * LAYER.hidden * 4
    edge = 4 * (2 * LAYER.width + LAYER.chosen) * 4
    assert report.traffic == 3 * weights + edge


def test_what_tiles_and_regions_cost():
    moe = MoE(experts=4, chosen=1, width=256, hidden=64)
    chosen = np.zeros((32, 1), dtype=np.int64)
    cases = {tile: MoECase(chosen, moe, tile, 64).simulate() for tile in (None, 8, 32)}
    # A tile at a time, the weights are loaded four times over; whole, once, as with dynamic tiles.
    weights = 3 * moe.width * moe.hidden * 2
    assert cases[8].off_chip - cases[32].off_chip == 3 * weights
    assert cases[None].off_chip == cases[32].off_chip
    assert cases[8].on_chip < cases[32].on_chip == cases[None].on_chip
    # Padding is computed, too: of four experts with 8 tokens each, as much again with tiles of 16.
    spread = np.arange(32).reshape(-1, 1) % 4
    whole, padded = (MoECase(spread, moe, tile, 64).simulate().flops for tile in (8, 16))
    per_token = 3 * 2 * moe.width * moe.hidden + 9 * moe.hidden  # three matmuls; silu and a product
    assert padded - whole == 32 * per_token


@pytest.mark.parametrize(
    ("columns", "regions", "message"),
    [(7, None, "columns=7 must divide the hidden dim, 20"), (5, 3, "regions=3 must divide the 8 experts")],
)
def test_sizes_that_do_not_fit(columns, regions, message):
    with pytest.raises(StreamError, match=message):
        moe_layer(LAYER, 4, None, columns, regions)


def test_an_expert_that_is_not_there():
    chosen = np.array([[0, 1, 8]])
    given = arrays(1, LAYER, np.random.default_rng())
    with pytest.raises(StreamError, match=r"'experts'.*different ones of 0 to 7, not tuple \(0, 1, 8\)"):
        moe_layer(LAYER, 1, None, 5).run({**moe_inputs(chosen), **given})
