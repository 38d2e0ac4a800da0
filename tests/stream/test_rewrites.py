"""Rewrites compute the same; each pays off where it should."""

from itertools import pairwise

import numpy as np
import pytest

from tvm_axe.stream import (
    Accelerator,
    Scalar,
    Selector,
    StreamError,
    StreamProgram,
    StreamType,
    Tile,
    View,
    functions,
    symbol,
)
from tvm_axe.stream.explore import explore, front
from tvm_axe.stream.rewrites import dynamic_parallelization, dynamic_tiling, time_multiplexing

EXPERTS, BATCH, WIDTH, HIDDEN = 4, 12, 8, 16


def experts(tile=4):
    """Tokens go to one expert each, which multiplies tiles of them with its weights, in two pieces."""
    p = StreamProgram("experts")
    x, w = p.tensor("x", BATCH, WIDTH), p.tensor("w", EXPERTS * WIDTH, HIDDEN)
    selectors = p.input("routing", StreamType((BATCH,), Selector(EXPERTS))).buffered(BATCH)
    parts = p.load(x, (1, WIDTH)).flatten().partition(selectors)
    made = []
    for expert, part in enumerate(parts):
        rows, padding = part.reshape(tile, pad=np.zeros((1, WIDTH), "float32"))
        real = padding.accum(functions.number("real", lambda n, pad: n + 1 - pad, initial=0)).buffered(BATCH)
        tiles = rows.accum(functions.retile(), name=f"tile{expert}")
        weights = tiles.load(w, (WIDTH, HIDDEN // 2), View((2,), (1,), 2 * expert))
        out = (
            tiles.expand(weights).map(functions.matmul(), weights).accum(functions.retile(axis=1), name=f"out{expert}")
        )
        cut = StreamType((symbol("n"),), Tile(1, HIDDEN))
        made.append(out.zip(real).flat_map(first_rows, cut).flatten())
    p.reassemble(made, selectors, name="back").flatten().store(p.tensor("y", BATCH, HIDDEN))
    return p


def first_rows(both):
    tile, count = both
    if isinstance(tile, tuple):
        return [(1, HIDDEN)] * count
    return [tile[row : row + 1] for row in range(count)]


@pytest.fixture
def case():
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((BATCH, WIDTH)), rng.standard_normal((EXPERTS * WIDTH, HIDDEN))
    routing = [0, 1, 1, 3, 1, 1, 3, 1, 0, 1, 3, 1]  # expert 2 gets nothing
    want = np.stack([row @ w[WIDTH * e : WIDTH * (e + 1)] for row, e in zip(x, routing)])
    return {"x": x.astype("float32"), "w": w.astype("float32"), "routing": routing}, want


def regions():
    return [(f"tile{expert}", f"out{expert}") for expert in range(EXPERTS)]


REWRITES = {
    "as written": lambda p: p,
    "dynamic tiles": dynamic_tiling,
    "two regions": lambda p: time_multiplexing(p, regions(), 2),
    "one region": lambda p: time_multiplexing(p, regions(), 4),
    "both": lambda p: time_multiplexing(dynamic_tiling(p), regions(), 2),
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewritten_programs_compute_the_same(case, name):
    inputs, want = case
    # What `beside` makes is typed as one half; the store sees both.
    found = REWRITES[name](experts()).run(inputs, Accelerator()).tensors["y"]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_dynamic_tiles_compute_no_padding_and_load_no_more_often(case):
    inputs, _ = case
    static, dynamic = (program.run(inputs, Accelerator()) for program in (experts(2), dynamic_tiling(experts(2))))
    assert dynamic.flops == 2 * BATCH * WIDTH * HIDDEN < static.flops
    assert dynamic.read < static.read


def test_time_multiplexing_uses_fewer_units_better(case):
    inputs, _ = case
    alone, shared = (
        program.run(inputs, Accelerator()) for program in (experts(), time_multiplexing(experts(), regions(), 4))
    )
    assert shared.flops == alone.flops and shared.traffic == alone.traffic
    assert shared.compute < alone.compute
    assert shared.utilization > alone.utilization


def requests(count=12):
    """Requests of different lengths, dealt out to two regions that compute for as long as a request says."""
    p = StreamProgram("requests")
    lengths = p.input("lengths", StreamType((count,), Scalar()))
    rows = p.input("rows", StreamType((count,), Scalar()))
    region = p.input("region", StreamType((count,), Selector(2)))
    for number, (length, row) in enumerate(zip(lengths.partition(region), rows.partition(region))):
        pieces = length.flat_map(lambda n: list(range(n)), StreamType((symbol("pieces"),), Scalar()))
        slow = functions.number("slow", lambda state, piece: state + piece, initial=0, cycles=50)
        sums = pieces.accum(slow, name=f"sums{number}")
        one = functions.TileFunction(
            "as_tile", lambda n: np.array([[n]], "float32"), lambda n: Tile(1, 1), lambda n: 0, cycles=0
        )
        sums.map(one).store_at(p.tensor(f"y{number}", count, 1), row.buffered(count)).discard()
    return p


def test_dynamic_parallelization_balances_regions():
    lengths = [30, 1, 30, 1, 30, 1, 30, 1, 30, 1, 30, 1]
    inputs = {"lengths": lengths, "rows": list(range(12))}
    in_turn = {"region": [0, 1] * 6}
    static = requests().run(inputs | in_turn, Accelerator())
    dynamic = dynamic_parallelization(requests(), "region", ["sums0", "sums1"]).run(inputs, Accelerator())
    want = np.array([[n * (n - 1) / 2] for n in lengths])
    for report in (static, dynamic):
        both = np.stack([report.tensors["y0"], report.tensors["y1"]])
        assert (np.isnan(both).sum(axis=0) == 1).all()
        np.testing.assert_array_equal(np.nanmax(both, axis=0), want)
    assert dynamic.cycles < 0.7 * static.cycles


def test_the_front_has_what_nothing_beats(case):
    inputs, _ = case

    def build(tile, share):
        program = dynamic_tiling(experts()) if tile is None else experts(tile)
        return program if share == 1 else time_multiplexing(program, regions(), share)

    designs = explore(build, {"tile": [2, 8, None], "share": [1, 4]}, inputs, Accelerator())
    assert len(designs) == 6
    best = front(designs)
    assert best and all(a.cycles < b.cycles and a.on_chip > b.on_chip for a, b in pairwise(best))
    for design in designs:
        beaten = any(b.cycles <= design.cycles and b.on_chip <= design.on_chip for b in best if b is not design)
        assert beaten or design in best
    small = Accelerator(capacity=min(design.on_chip for design in designs))
    assert all(
        design.on_chip <= small.capacity for design in explore(build, {"tile": [2], "share": [1, 4]}, inputs, small)
    )


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (lambda: dynamic_tiling(requests()), "'requests' has no padded Reshape"),
        (lambda: time_multiplexing(experts(), regions(), 3), "share=3 must divide the number of regions, 4"),
        (lambda: time_multiplexing(experts(), [("tile0", "out1")], 1), "'out1' doesn't come of 'tile0'"),
        (
            lambda: time_multiplexing(experts(), [("routing", "back")], 1),
            "from 'routing' to 'back' takes 'Flatten0' too",
        ),
        (lambda: dynamic_parallelization(experts(), "routing", ["out0"] * 4), "'back' takes the selectors too"),
        (lambda: dynamic_parallelization(requests(), "region", ["sums0"]), "must name 2 streams, not 1"),
        (lambda: dynamic_parallelization(requests(), "rows", ["sums0"]), "'rows' must be an input of selectors"),
        (
            lambda: dynamic_parallelization(requests(), "region", ["sums1", "sums0"]),
            "'sums1' comes of nothing that region 0",
        ),
        (lambda: dynamic_parallelization(requests(), "other", ["sums0"]), "has no stream 'other'"),
    ],
)
def test_rewrites_that_do_not_apply(rewrite, message):
    with pytest.raises(StreamError, match=message):
        rewrite()


def test_regions_that_differ_are_not_shared():
    p = StreamProgram("two")
    x = p.tensor("x", 2, 4)
    a, b = p.load(x, (1, 4)).flatten().partition(p.input("which", StreamType((2,), Selector(2))))
    a.map(functions.exp(), name="ya").output("a")
    b.map(functions.silu(), name="yb").output("b")
    with pytest.raises(StreamError, match=r"must be alike .*differ in Map 'ya' and Map 'yb'"):
        time_multiplexing(p, [(a.name, "ya"), (b.name, "yb")], 2)
