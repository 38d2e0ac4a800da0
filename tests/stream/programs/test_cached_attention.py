"""Attention over caches equals numpy however requests are sent to regions; what the ways differ in is time."""

import numpy as np
import pytest

from tvm_axe.stream import Accelerator, StreamError
from tvm_axe.stream.programs.cached_attention import WAYS, AttentionCase, attention, attention_inputs, cached_tiles
from tvm_axe.stream.programs.reference import attention_reference
from tvm_axe.stream.programs.workloads import Heads

HEADS = Heads(groups=1, queries=3, size=8)
SIZES = {"regions": 2, "block": 4, "tile": 4}


def arrays(batch, cached, lengths, rng):
    shapes = {
        "q": (batch * HEADS.queries, HEADS.size),
        "k": (batch, HEADS.size),
        "v": (batch, HEADS.size),
        "k_cache": (batch * cached * SIZES["tile"], HEADS.size),
        "v_cache": (batch * cached * SIZES["tile"], HEADS.size),
    }
    found = {name: rng.standard_normal(shape, dtype="float32") for name, shape in shapes.items()}
    # What no token was written to must not matter.
    for name in ("k_cache", "v_cache"):
        for cache, length in zip(found[name].reshape(batch, -1, HEADS.size), lengths):
            cache[length:] = np.nan
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("batch", "block"), [(2, 4), (7, 4), (12, 4), (7, (1, 6)), (12, (5, 1, 6))])
def test_equals_numpy(batch, block, way):
    rng = np.random.default_rng()
    # Empty caches, caches that end with a tile, and others.
    lengths = np.concatenate([[0, 8], rng.integers(0, 30, batch - 2)])
    cached = int(cached_tiles(lengths, SIZES["tile"]).max())
    given = arrays(batch, cached, lengths, rng)
    sizes = {**SIZES, "block": block}
    program = attention(HEADS, batch, cached, way, **sizes)
    streams = attention_inputs(lengths, HEADS, way, **sizes)
    accelerator = Accelerator(depth=1)
    report = program.run({**streams, **given}, accelerator)
    for name, expected in attention_reference(given, lengths, HEADS).items():
        known = ~np.isnan(expected)
        np.testing.assert_allclose(report.tensors[name][known], expected[known], rtol=1e-4, atol=1e-5)
    without = program.run(streams, accelerator, values=False)
    assert (report.cycles, report.traffic, report.flops) == (without.cycles, without.traffic, without.flops)


def test_dynamic_goes_around_a_long_request():
    # In turn, the first region gets all the long requests, and the other waits for it.
    lengths = np.array([2000, 10] * 8)
    cycles = {way: AttentionCase(lengths, way, regions=2).simulate().cycles for way in ("interleaved", "dynamic")}
    assert cycles["dynamic"] < 0.7 * cycles["interleaved"]


def test_blocks_go_to_regions_of_their_own():
    lengths = np.full(16, 500)
    one, four = (AttentionCase(lengths, "coarse", block=block).simulate() for block in (16, 4))
    assert 3.8 < one.cycles / four.cycles < 4.2
    assert (one.off_chip, one.flops) == (four.off_chip, four.flops)


def test_blocks_may_differ():
    """The longest one says when all are done; as many as are alike are what one number says."""
    lengths = np.full(20, 500)
    cycles = {block: AttentionCase(lengths, "coarse", block=block).simulate().cycles for block in (8, (8, 8, 4))}
    assert cycles[8] == cycles[8, 8, 4]
    even, uneven = (AttentionCase(lengths, "coarse", block=block).simulate() for block in ((5, 5, 5, 5), (2, 2, 1, 15)))
    assert 2.8 < uneven.cycles / even.cycles < 3.1
    assert (even.off_chip, even.flops) == (uneven.off_chip, uneven.flops)


def test_regions_get_further_blocks_in_turn():
    lengths = np.array([100, 200, 300, 400, 500, 600])
    streams = attention_inputs(lengths, HEADS, "coarse", regions=2, block=(2, 1, 1, 2))
    assert streams["row0"].tolist() == [0, 3, 9] and streams["row1"].tolist() == [6, 12, 15]
    even = np.full(20, 500)
    one, two = (AttentionCase(even, "coarse", block=5, regions=regions).simulate() for regions in (2, 4))
    assert 1.9 < one.cycles / two.cycles < 2.1
    assert (one.off_chip, one.flops) == (two.off_chip, two.flops)


def test_a_request_that_ends_a_tile_gets_another():
    assert cached_tiles(np.array([0, 31, 32, 33]), 32).tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("way", "regions", "message"),
    [
        ("randomly", 2, "way='randomly' must be one of coarse, interleaved, dynamic"),
        ("dynamic", 9, "regions=9 must be between 1 and the number of requests, 8"),
    ],
)
def test_arguments_that_do_not_fit(way, regions, message):
    with pytest.raises(StreamError, match=message):
        attention(HEADS, 8, 2, way, regions)
    with pytest.raises(StreamError, match="block=0 must be 1 or more requests"):
        attention(HEADS, 8, 2, "coarse", block=0)
    with pytest.raises(StreamError, match=r"block=\(4, 0, 4\) must be 1 or more requests, or several such numbers"):
        attention(HEADS, 8, 2, "coarse", block=(4, 0, 4))
    with pytest.raises(StreamError, match=r"block=\(4, 3\): blocks of 7 requests in all, and there are 8"):
        attention(HEADS, 8, 2, "coarse", block=(4, 3))
