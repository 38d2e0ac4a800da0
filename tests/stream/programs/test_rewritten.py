"""Rewriting a program gives what is written by hand: the same work in about as many cycles."""

import pytest

from tvm_axe.stream import Accelerator, metrics
from tvm_axe.stream.programs import Heads, MoE, attention, attention_inputs, lengths, moe_inputs, moe_layer, routing
from tvm_axe.stream.programs.cached_attention import cached_tiles
from tvm_axe.stream.rewrites import dynamic_parallelization, dynamic_tiling, time_multiplexing

LAYER = MoE(experts=8, chosen=2, width=64, hidden=96)
ROUTING = routing(48, LAYER, seed=2)
REGIONS = [(f"pack{expert}", f"expert{expert}") for expert in range(LAYER.experts)]
HEADS = Heads(groups=1, queries=8, size=64)


def simulate(program, streams, depth=2):
    report = program.run(streams, Accelerator(depth=depth), values=False)
    return report.cycles, report.traffic, report.flops


def test_dynamic_tiling():
    written = simulate(moe_layer(LAYER, 48, None, 32), moe_inputs(ROUTING))
    rewritten = simulate(dynamic_tiling(moe_layer(LAYER, 48, 16, 32)), moe_inputs(ROUTING))
    assert rewritten[1:] == written[1:] and rewritten[0] == pytest.approx(written[0], rel=0.01)


def test_time_multiplexing():
    written = simulate(moe_layer(LAYER, 48, 16, 32, regions=2), moe_inputs(ROUTING))
    rewritten = simulate(time_multiplexing(moe_layer(LAYER, 48, 16, 32), REGIONS, share=4), moe_inputs(ROUTING))
    assert rewritten[1:] == written[1:] and rewritten[0] == pytest.approx(written[0], rel=0.01)


def test_dynamic_parallelization():
    cached = lengths(12, seed=4)
    tiles = int(cached_tiles(cached, 32).max())
    in_turn = attention(HEADS, 12, tiles, "interleaved")
    written = simulate(attention(HEADS, 12, tiles, "dynamic"), attention_inputs(cached, HEADS, "dynamic"), depth=1)
    rewritten = dynamic_parallelization(in_turn, "region", [f"keys{number}" for number in range(4)])
    assert simulate(rewritten, attention_inputs(cached, HEADS, "dynamic"), depth=1) == written


@pytest.mark.parametrize("regions", [None, 2])
@pytest.mark.parametrize("tile", [None, 16])
def test_symbolic_traffic_is_what_a_run_counts(tile, regions):
    program = moe_layer(LAYER, 48, tile, 32, regions)
    report = program.run(moe_inputs(ROUTING), Accelerator(), values=False)
    assert metrics.evaluate(metrics.off_chip_traffic(program), report.bindings) == report.traffic
