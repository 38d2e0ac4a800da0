"""A whole decoder layer equals numpy, its caches included."""

import numpy as np
import pytest

from tvm_axe.stream import Accelerator
from tvm_axe.stream.programs.cached_attention import cached_tiles
from tvm_axe.stream.programs.decoder import decoder_inputs, decoder_layer
from tvm_axe.stream.programs.reference import decoder_reference
from tvm_axe.stream.programs.workloads import Heads, Model, MoE, routing

MODEL = Model("small", MoE(experts=4, chosen=2, width=24, hidden=12), Heads(groups=2, queries=3, size=4))
TILE = 4


@pytest.mark.parametrize(("tile", "expert_regions"), [(None, None), (None, 2), (2, None), (3, 1)])
def test_equals_numpy(tile, expert_regions):
    rng = np.random.default_rng()
    batch, regions = 7, 3
    lengths = rng.integers(0, 20, batch)
    chosen = routing(batch, MODEL.moe, seed=int(rng.integers(1 << 30)))
    cached = int(cached_tiles(lengths, TILE).max())
    program = decoder_layer(MODEL, batch, cached, tile, 4, regions, TILE, expert_regions)
    given = {
        name: (rng.standard_normal((tensor.rows, tensor.columns)) / np.sqrt(MODEL.moe.width)).astype("float32")
        for name, tensor in program.tensors.items()
        if name != "y"
    }
    for name in ("k_cache", "v_cache"):
        for request, cache in enumerate(given[name].reshape(MODEL.heads.groups * batch, -1, MODEL.heads.size)):
            cache[lengths[request % batch] :] = np.nan
    streams = decoder_inputs(lengths, chosen, MODEL.heads, regions, TILE)
    report = program.run({**streams, **given}, Accelerator())
    for name, expected in decoder_reference(given, lengths, chosen, MODEL.heads, MODEL.moe).items():
        known = ~np.isnan(expected)
        np.testing.assert_allclose(report.tensors[name][known], expected[known], rtol=1e-4, atol=1e-5)
    assert report.cycles == program.run(streams, Accelerator(), values=False).cycles
