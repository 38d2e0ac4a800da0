"""Time: what units cost, back pressure, order of arrival, feedback, deadlocks, counters."""

import gc
import json
import tracemalloc

import numpy as np
import pytest

from tvm_axe.errors import InputError
from tvm_axe.layout import Layout
from tvm_axe.stream import (
    Accelerator,
    OffChip,
    Scalar,
    Selector,
    StreamError,
    StreamProgram,
    StreamType,
    Tile,
    View,
    engine,
    functions,
    ragged,
    symbol,
)
from tvm_axe.stream.operators import base, off_chip, on_chip, routing
from tvm_axe.stream.programs.samples import SMALL, make_sample

FAST = Accelerator(hop=0)


def busy(cycles):
    """A function of numbers that takes so long."""
    return functions.number(f"busy{cycles}", lambda value: value, cycles=cycles)


def numbers(p, count, name="x"):
    return p.input(name, StreamType((count,), Scalar()))


def test_a_pipeline_is_as_slow_as_its_slowest_unit():
    p = StreamProgram("pipeline")
    numbers(p, 100).map(busy(3)).map(busy(10)).map(busy(2)).output("y")
    report = p.run({"x": list(range(100))}, FAST)
    assert report.cycles == 3 + 100 * 10 + 2
    assert report.unit("busy100").busy == 1000
    assert report.unit("busy20").starved == report.cycles - 200
    # The first unit fills its channel and then waits for the slow one.
    assert report.unit("busy30").blocked > 600
    assert report.outputs["y"] == list(range(100))


def test_a_token_crosses_a_channel_in_a_hop():
    p = StreamProgram("hops")
    numbers(p, 1).map(busy(5)).map(busy(7)).output("y")
    assert p.run({"x": [1]}, Accelerator(hop=4)).cycles == 4 + 5 + 4 + 7 + 4


def test_units_take_the_longest_of_reading_computing_and_writing():
    def cycles(compute, writes, stored):
        p = StreamProgram("roofline")
        tile = (
            p.load(p.tensor("w", 4, 32, "bfloat16"), (4, 32))
            if stored
            else p.input("x", StreamType((1, 1), Tile(4, 32, "bfloat16")))
        )
        tile.map(functions.exp(), compute=compute, writes=writes, name="unit").output("y")
        given = {} if stored else {"x": [[(4, 32)]]}
        return p.run(given, Accelerator(), values=False).unit("unit").busy

    flops, size = 4 * 4 * 32, 4 * 32 * 2
    assert cycles(100, False, False) == -(-flops // 100)
    assert cycles(1000, False, False) == 1
    assert cycles(1000, True, False) == size // 64
    assert cycles(1000, False, True) == size // 64


def test_a_load_waits_for_the_whole_tile():
    p = StreamProgram("load")
    p.load(p.tensor("x", 8, 48, "bfloat16"), (4, 48)).output("y")
    accelerator = Accelerator(hop=0, off_chip=OffChip(latency=16))
    report = p.run({}, accelerator, values=False)
    # 4 rows of 96 B are 8 requests; two tiles, one after the other.
    assert report.cycles == 2 * (8 - 1 + 16)
    assert report.read == 8 * 96 and report.unit("x0").memory == report.cycles


def test_many_loads_share_the_off_chip_bandwidth():
    def cycles(loads):
        p = StreamProgram("loads")
        for number in range(loads):
            p.load(p.tensor(f"t{number}", 1024, 32, "bfloat16"), (1024, 32)).discard()
        return p.run({}, Accelerator(hop=0), values=False).cycles

    alone = cycles(1)
    assert cycles(16) == alone  # 16 requests a cycle
    assert cycles(64) == pytest.approx(4 * alone, rel=0.02)


def test_bank_conflicts_slow_down_reading():
    def cycles(layout, banked):
        p = StreamProgram("banks")
        tile = Tile(32, 32, layout=Layout.parse(layout))
        p.load(p.tensor("x", 32, 32), tile).map(functions.add(), compute=10**6, name="unit").output("y")
        return p.run({}, Accelerator(banked=banked), values=False).unit("unit").busy

    row, column = "S[(32, 32) : (32, 1)]", "S[(32, 32) : (1, 32)]"
    assert cycles(row, True) == cycles(row, False) == 64
    assert cycles(column, False) == 64 and cycles(column, True) == 32 * 64


def merged(slow, fast):
    p = StreamProgram("merge")
    a = numbers(p, 3, "a").map(busy(slow))
    b = numbers(p, 3, "b").map(busy(fast))
    data, origin = p.eager_merge([a, b])
    data.output("data")
    origin.output("origin")
    report = p.run({"a": [1, 2, 3], "b": [11, 12, 13]}, FAST)
    return report.outputs["data"], [origin for (origin,) in report.outputs["origin"]]


def test_eager_merge_takes_what_comes_first():
    assert merged(100, 10) == ([11, 12, 13, 1, 2, 3], [1, 1, 1, 0, 0, 0])
    assert merged(10, 14) == ([1, 11, 2, 12, 3, 13], [0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize("in_order", [False, True])
def test_reassemble_takes_what_comes_first_but_whole(in_order):
    p = StreamProgram("reassemble")
    selectors = p.input("s", StreamType((2,), Selector(2)))
    pieces = StreamType((3,), Scalar())
    slow = numbers(p, 2, "a").map(busy(50)).flat_map(lambda n: [n] * 3, pieces, cycles=9)
    fast = numbers(p, 2, "b").flat_map(lambda n: [n] * 3, pieces, cycles=9)
    p.reassemble([slow.buffered(6), fast.buffered(6)], selectors, rank=1, in_order=in_order).output("y")
    report = p.run({"a": [1, 2], "b": [11, 12], "s": [(0, 1), (0, 1)]}, FAST)
    assert report.outputs["y"] == [[[11] * 3, [1] * 3], [[12] * 3, [2] * 3]]


def test_reassemble_in_order_waits_for_all():
    def cycles(in_order):
        p = StreamProgram("wait")
        s = p.input("s", StreamType((1,), Selector(2)))
        slow, fast = numbers(p, 1, "a").map(busy(100)), numbers(p, 1, "b")
        p.reassemble([slow, fast], s, in_order=in_order).map(busy(30)).output("y")
        return p.run({"a": [1], "b": [2], "s": [(0, 1)]}, FAST).cycles

    # Either the first is worked on while the second is waited for, or it is sent when the second is there.
    assert cycles(False) == 101 + 30
    assert cycles(True) == 100 + 30 + 30


def test_a_merge_says_where_something_came_from_when_it_came():
    p = StreamProgram("merge")
    a, b = (numbers(p, 2, name).map(busy(100)) for name in "ab")
    data, origin = p.eager_merge([a, b])
    data.discard()
    origin.map(functions.number("address", lambda chosen: chosen[0])).load_at(p.tensor("w", 2, 32), (1, 32)).output("y")
    report = p.run({"a": [1, 2], "b": [1, 2]}, FAST, values=False)
    # Four loads of 128 bytes one after the other, two once the first results are there.
    assert report.cycles >= 200 + 2 * 16
    assert report.unit("w0").starved >= 100


def test_feedback_sends_work_to_whoever_is_free():
    p = StreamProgram("dispatch")
    free = p.feedback("free", StreamType((symbol("n"),), Selector(2)), 4, initial=[(0,), (1,)])
    parts = numbers(p, 20).partition(free.stream)
    done = [part.map(busy(cycles)) for part, cycles in zip(parts, (10, 30))]
    data, origin = p.eager_merge(done)
    data.output("y")
    free.close(origin)
    report = p.run({"x": list(range(20))}, FAST)
    assert sorted(report.outputs["y"]) == list(range(20))
    assert report.unit("busy100").busy // 10 == 15 and report.unit("busy300").busy // 30 == 5
    assert report.cycles <= 20 * 7.5 + 40


def test_a_selector_keeps_its_slot_until_there_is_something_to_send():
    p = StreamProgram("slots")
    chosen = p.input("s", StreamType((2,), Selector(1)))
    chosen = chosen.map(functions.number("chosen", lambda choice: choice, Selector(1), cycles=1))
    (part,) = numbers(p, 2).map(busy(100)).partition(chosen.buffered(1))
    part.output("y")
    report = p.run({"x": [5, 6], "s": [0, 0]}, FAST)
    assert report.outputs["y"] == [5, 6]
    assert (
        report.unit("chosen0").blocked == 100 - 2
    )  # it has the second selector after 2 cycles, the data come after 100


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("hop", [0, 1])
def test_requests_come_in_the_order_of_time(depth, hop):
    """With channels of one token, selectors hold the addresses of a shared region back."""
    sample = make_sample("moe-shared", SMALL, batch=24, seed=1)
    with_values = sample.program.run({**sample.streams, **sample.arrays()}, Accelerator(depth=depth, hop=hop))
    assert sample.error(with_values) < 1e-5
    shapes = sample.program.run(sample.streams, Accelerator(depth=depth, hop=hop), values=False)
    assert shapes.cycles == with_values.cycles


def test_a_deadlock_says_who_waits_for_what():
    p = StreamProgram("loop")
    x = numbers(p, 8)
    even, odd = x.partition(p.input("s", StreamType((8,), Selector(2))))
    a, b = even.promote(), odd.promote()
    a.accum(functions.number("sum", lambda s, v: s + v, initial=0)).output("even")
    late = b.accum(functions.number("sum", lambda s, v: s + v, initial=0), name="late")
    late.expand(b).output("odd")
    with pytest.raises(StreamError) as caught:
        p.run({"x": list(range(8)), "s": [1] * 8})
    message = str(caught.value)
    assert message.startswith("deadlock: ")
    assert "Broadcast 'Promote1 to 2' waits for room in the channel to 'Expand0' (full, 2 tokens)" in message
    assert "Expand 'Expand0' waits for a token from 'late' (empty)" in message
    b.buffered(20)
    assert p.run({"x": list(range(8)), "s": [1] * 8}).outputs["odd"] == [[28] * 8]


def test_buffers_are_kept_from_the_first_write_to_the_last_read():
    p = StreamProgram("buffers")
    tiles = p.input("x", StreamType((3, 4), Tile(2, 8)))
    again = tiles.bufferize().streamify(View((2, 4), (0, 1)))
    again.output("y")
    xs = [[np.full((2, 8), 10 * row + at, "float32") for at in range(4)] for row in range(3)]
    report = p.run({"x": xs}, Accelerator())
    for row, (first, second) in zip(xs, report.outputs["y"]):
        np.testing.assert_array_equal(first, row)
        np.testing.assert_array_equal(second, row)
    assert 4 * 64 <= report.peak_on_chip <= 3 * 4 * 64
    assert report.occupancy[-1][1] == 0
    with pytest.raises(
        StreamError, match=r"Bufferize 'Bufferize0': a buffer of .* is larger than the on-chip memory, 200"
    ):
        p.run({"x": xs}, Accelerator(capacity=200))


def test_buffers_together_must_fit_too():
    p = StreamProgram("buffers")
    x = p.input("x", StreamType((1, 4), Tile(2, 8)))
    for name in "ab":
        x.bufferize().streamify().map(functions.exp(), compute=1).output(name)
    given = {"x": [[(2, 8)] * 4]}
    assert p.run(given, Accelerator(), values=False).peak_on_chip == 2 * 256
    with pytest.raises(StreamError, match="its buffers take up 512 bytes at a time, more than the on-chip memory, 300"):
        p.run(given, Accelerator(capacity=300), values=False)


def test_ragged_buffers_come_back_as_they_were():
    p = StreamProgram("ragged")
    x = p.input("x", StreamType((symbol("n"), ragged("m")), Tile(1, 2)))
    x.bufferize().streamify().map(functions.row_sum()).output("y")
    xs = [[np.full((1, 2), value, "float32") for value in row] for row in ([1, 2, 3], [], [4])]
    found = p.run({"x": xs}).outputs["y"]
    assert [[float(tile[0, 0]) for tile in row] for row in found] == [[2, 4, 6], [], [8]]


def test_runs_with_and_without_values_take_the_same_time():
    p = StreamProgram("both")
    x, w = p.tensor("x", 16, 8), p.tensor("w", 8, 8)
    parts = p.load(x, (1, 8)).flatten().partition(p.input("s", StreamType((16,), Selector(2))))
    for number, part in enumerate(parts):
        rows = part.reshape(None).accum(functions.retile())
        rows.map(functions.matmul(), rows.load(w, (8, 8)).flatten().flatten()).output(f"y{number}")
    rng = np.random.default_rng(1)
    given = {"s": [0, 1, 1, 0] * 4}
    arrays = {"x": rng.standard_normal((16, 8), "float32"), "w": rng.standard_normal((8, 8), "float32")}
    full, shapes = p.run(given | arrays, Accelerator()), p.run(given, Accelerator(), values=False)
    assert full.cycles == shapes.cycles > 0 and full.units == shapes.units
    assert shapes.outputs == {"y0": [(8, 8)], "y1": [(8, 8)]}
    assert p.run(given | arrays).cycles == 0


def test_a_trace_has_a_track_a_unit(tmp_path):
    p = StreamProgram("trace")
    numbers(p, 5).map(busy(7)).map(busy(3)).output("y")
    report = p.run({"x": [1] * 5}, Accelerator(), trace=True)
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [(names[event["tid"]], event["dur"]) for event in events if event["ph"] == "X"]
    assert sorted(spans) == [("busy30", 3)] * 5 + [("busy70", 7)] * 5
    with pytest.raises(InputError, match="kept no times"):
        p.run({"x": [1] * 5}, Accelerator()).save_trace(tmp_path / "none.json")


def test_events_grow_linearly_with_the_stream():
    p = StreamProgram("linear")
    p.input("x", StreamType((symbol("n"),), Scalar())).map(busy(1)).output("y")
    few, many = (p.run({"x": [0] * count}, FAST).tokens for count in (100, 1000))
    assert (few, many) == (200, 2000)


def test_units_alike_share_what_a_function_costs():
    asked = []

    def flops(a):
        asked.append(a.shape)
        return a.rows * a.columns

    function = functions.exp().costing(flops=flops)
    p = StreamProgram("shared")
    for number in range(3):
        x = p.input(f"x{number}", StreamType((2,), Tile(symbol(f"R{number}"), 8)))
        x.map(function, name=f"f{number}").output(f"y{number}")
    asked.clear()
    shapes = [(4, 8), (6, 8)]
    report = p.run({f"x{number}": shapes for number in range(3)}, Accelerator(compute=1), values=False)
    assert asked == shapes
    assert [report.unit(f"f{number}").busy for number in range(3)] == [80] * 3


def test_units_that_share_costs_still_check_what_they_declare():
    p = StreamProgram("declared")
    anything = functions.TileFunction("cut", lambda a: a[:2], lambda a: Tile(a.rows, a.columns), lambda a: 0)
    rows = symbol("R")
    p.input("x", StreamType((1,), Tile(rows, 8))).map(anything).output("y")
    p.input("z", StreamType((1,), Tile(2 * rows, 8))).map(anything).output("w")
    found = p.run({"x": [(3, 8)], "z": [(6, 8)]}, Accelerator(), values=False)
    assert found.outputs == {"y": [(3, 8)], "w": [(6, 8)]}


def test_a_run_leaves_the_garbage_collector_nothing():
    sample = make_sample("attention-dynamic", SMALL, batch=8, seed=1)
    sample.run()
    gc.collect()
    before = gc.isenabled()
    gc.disable()
    try:
        report = sample.run()
        found = gc.collect()
    finally:
        if before:
            gc.enable()
    assert report.cycles and found < len(report.units)


@pytest.mark.parametrize(("worst", "found"), [(1, "Accum 'late': sum raised ValueError: no"), (2, "deadlock: ")])
def test_an_error_is_raised_if_it_comes_before_a_deadlock(worst, found):
    def add(state, value):
        if value == worst:
            raise ValueError("no")
        return state + value

    p = StreamProgram("either")
    a = numbers(p, 8).promote()
    a.accum(functions.number("sum", add, initial=0), name="late").expand(a).output("y")
    with pytest.raises(StreamError, match=found):
        p.run({"x": list(range(8))})


@pytest.mark.parametrize("name", ["moe-shared", "attention-dynamic"])
def test_how_far_generators_run_ahead_changes_nothing(monkeypatch, name):
    sample = make_sample(name, SMALL, batch=8, seed=2)
    known = sample.run(values=False, trace=True)
    for module in (engine, base, on_chip, routing):
        monkeypatch.setattr(module, "AHEAD", 40)
    for module in (engine, off_chip):
        monkeypatch.setattr(module, "BATCH", 3)
    assert sample.run(values=False, trace=True) == known


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    def peak(tiles):
        p = StreamProgram("chain")
        p.load(p.tensor("x", tiles, 8), (1, 8)).flatten().map(functions.exp()).discard()
        tracemalloc.start()
        p.run({}, Accelerator(), values=False)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(100)
    assert peak(80_000) < 1.5 * peak(20_000)
