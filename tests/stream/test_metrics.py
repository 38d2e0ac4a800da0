"""Symbolic metrics, once bound, are what a run counts."""

import numpy as np
import pytest

from tvm_axe.stream import (
    Accelerator,
    Selector,
    StreamError,
    StreamProgram,
    StreamType,
    Tile,
    View,
    functions,
    ragged,
    symbol,
)
from tvm_axe.stream.metrics import evaluate, flops, off_chip_read, off_chip_traffic, off_chip_written, on_chip_memory


def layer(tile, batch=None):
    """Tokens go to two of three experts, which load their weights for each tile of tokens."""
    batch = symbol("B") if batch is None else batch
    p = StreamProgram("layer")
    rows = p.load(p.tensor("x", batch, 16, "bfloat16"), (1, 16)).flatten()
    selectors = p.input("routing", StreamType((batch,), Selector(3)))
    w = p.tensor("w", 48, 32, "bfloat16")
    made = []
    for expert, part in enumerate(rows.partition(selectors)):
        if tile is None:
            pieces = part.reshape(None)
        else:
            pieces, padding = part.reshape(tile, pad=np.zeros((1, 16), "float32"))
            padding.discard()
        tiles = pieces.accum(functions.retile())
        weights = tiles.load(w, (16, 8), View((4,), (1,), 4 * expert))
        made.append(tiles.expand(weights).map(functions.matmul(), weights).accum(functions.sum_tiles()))
    for number, stream in enumerate(made):
        stream.store(p.tensor(f"y{number}", symbol(f"rows{number}"), 8))
    return p


@pytest.mark.parametrize("tile", [None, 1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_bound_metrics_are_what_a_run_counts(tile, seed):
    p = layer(tile)
    rng = np.random.default_rng(seed)
    routing = [tuple(rng.choice(3, 2, replace=False).tolist()) for _ in range(rng.integers(1, 20))]
    report = p.run({"routing": routing, "x": (len(routing), 16)}, Accelerator(), values=False)
    assert evaluate(off_chip_read(p), report.bindings) == report.read
    assert evaluate(off_chip_written(p), report.bindings) == report.written
    assert evaluate(off_chip_traffic(p), report.bindings) == report.traffic
    assert evaluate(flops(p), report.bindings) == report.flops


def test_metrics_are_expressions_of_the_symbols():
    p = layer(4)
    names = {str(found) for found in off_chip_read(p).free_symbols}
    assert names == {"B", "routing_0", "routing_1", "routing_2"}
    tile, columns, weights = 4 * 16 * 2, 4 * 8 * 2, 16 * 8 * 2
    assert on_chip_memory(p) == 16 * 2 + 3 * (tile + columns + weights)
    with pytest.raises(StreamError, match="evaluate: B, routing_0, routing_1, routing_2 have no values"):
        evaluate(off_chip_read(p), {})


def test_buffers_are_counted_one_at_a_time():
    p = StreamProgram("buffers")
    x = p.input("x", StreamType((5, 6), Tile(2, 4)))
    x.bufferize().streamify().output("y")
    assert on_chip_memory(p) == 6 * 32
    q = StreamProgram("ragged")
    x = q.input("x", StreamType((symbol("n"), ragged("m")), Tile(2, 4)))
    x.bufferize().streamify().output("y")
    report = q.run({"x": [[(2, 4)] * 3, [(2, 4)] * 5]}, Accelerator(), values=False)
    assert evaluate(on_chip_memory(q), report.bindings) == 4 * 32  # the mean


def test_lengths_of_ragged_dims_are_measured():
    p = StreamProgram("lengths")
    x = p.input("x", StreamType((symbol("n"), ragged("m")), Tile(1, 4)))
    x.reshape(2).accum(functions.retile(), name="tile").output("y")
    report = p.run({"x": [[(1, 4)] * 3, [], [(1, 4)] * 4]}, Accelerator(), values=False)
    found = {str(name): value for name, value in report.bindings.items()}
    assert (found["n"], found["m"], found["Reshape0_pieces"]) == (3, 7, 4)
    assert found["tile_rows"] * 4 == 7
