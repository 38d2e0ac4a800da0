"""Loops that run as often as their data say, against the same in plain Python."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.stream import (
    Accelerator,
    Scalar,
    Selector,
    StreamError,
    StreamProgram,
    StreamType,
    Tile,
    Tuple,
    functions,
    metrics,
    ragged,
    symbol,
)
from tvm_axe.stream.draw import graph_svg
from tvm_axe.stream.functions import TileFunction, number
from tvm_axe.stream.rewrites import dynamic_parallelization, dynamic_tiling, time_multiplexing

FAST = Accelerator(hop=0)
SCALARS = StreamType((symbol("n"),), Scalar())
ROW = StreamType((symbol("rows"),), Tile(1, 4))


def numbers(p, rank=1, name="x"):
    return p.input(name, StreamType((symbol("N"), *(ragged(f"R{at}") for at in range(1, rank))), Scalar()))


def halved(p, x, capacity=8, **more):
    """A loop that halves numbers until they are 1 or less."""
    loop = x.loop(capacity, **more)
    half = loop.stream.map(number("half", lambda n: n // 2))
    return loop.close(half, half.map(number("more", lambda n: n > 1)))


def around(elements, body):
    """What a list becomes in a loop: `body` makes of a round what it makes, and whether each goes on."""
    done, rounds = [], []
    while elements:
        rounds.append(elements)
        made = body(elements)
        done += [value for value, again in made if not again]
        elements = [value for value, again in made if again]
    return done, rounds


def halve(elements):
    return [(value // 2, value // 2 > 1) for value in elements]


def at_depth(lists, depth, change):
    return change(lists) if depth == 0 else [at_depth(inner, depth - 1, change) for inner in lists]


@pytest.mark.parametrize("accelerator", [None, Accelerator(), Accelerator(depth=1)])
@pytest.mark.parametrize(
    "lists",
    [[[16, 2, 5], [], [1], [300]], [], [[]], [[], []], [[7]], [[1, 1, 1], [1]], [[], [2, 900, 3, 4]]],
)
def test_each_list_goes_around_until_none_of_it_goes_on(lists, accelerator):
    p = StreamProgram("halve")
    halved(p, numbers(p, 2)).output("y")
    report = p.run({"x": lists}, accelerator)
    expected = [around(elements, halve) for elements in lists]
    assert report.outputs["y"] == [done for done, _ in expected]
    assert report.bindings[symbol("Loop0_rounds")] == sum(len(rounds) for _, rounds in expected)
    assert report.bindings[symbol("Loop0_left")] == sum(len(one) for _, rounds in expected for one in rounds)


@pytest.mark.parametrize("lists", [[[0]], [[0], [0]], [[0], []], [[], [0]], [[0], [3]], [[3], [0, 0]]])
def test_a_list_whose_elements_are_all_dropped_is_empty(lists):
    for accelerator in (None, Accelerator(), Accelerator(depth=1)):
        p = StreamProgram("drop")
        loop = numbers(p, 2).loop(4)
        kept = loop.stream.flat_map(lambda value: [value] * (value > 0), SCALARS).flatten()
        loop.close(kept, kept.map(number("again", lambda value: 0))).output("y")
        assert p.run({"x": lists}, accelerator).outputs["y"] == [[v for v in own if v] for own in lists]


# ---- Random bodies. An element is 100 * how often it still goes around + something.


def fuel(change):
    """A function of the second part of an element."""
    return lambda value: value // 100 * 100 + change(value % 100) % 100


def mapped(stream, random):
    by = random.integers(1, 50)
    step = fuel(lambda rest: rest * 3 + by)
    return stream.map(number("step", step)), lambda round: [step(value) for value in round]


def routed(stream, random):
    steps = [fuel(lambda rest: rest + 7), fuel(lambda rest: rest * 5)]
    odd = stream.map(number("odd", lambda value: (value % 2,), Selector(2)))
    parts = stream.partition(odd.buffered(40))
    made = [part.map(number("step", step)) for part, step in zip(parts, steps)]
    back = stream.program.reassemble(made, odd).flatten()
    return back, lambda round: [steps[value % 2](value) for value in round]


def summed(stream, random):
    total = number("total", lambda state, value: value // 100 * 100 + (state + value) % 100, initial=0)

    def step(round):
        found = [0]
        for value in round:
            found.append(value // 100 * 100 + (found[-1] + value) % 100)
        return found[1:]

    return stream.scan(total), step


def spawned(stream, random):
    def copies(value):
        return [value % 100 + at * 100 for at in range(value // 100, 0, -2)][:2]

    def step(round):
        return [copy for value in round for copy in copies(value)]

    return stream.flat_map(copies, SCALARS).flatten(), step


def looped(stream, random):
    down = fuel(lambda rest: rest - 1)

    def go(value):
        return value % 100 % 4 != 0

    inner = stream.loop(40)
    lower = inner.stream.map(number("down", down))
    return inner.close(lower, lower.map(number("go", go))), lambda round: around(
        round, lambda values: [(down(value), go(down(value))) for value in values]
    )[0]


BODIES = [mapped, routed, summed, spawned, looped]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.data())
def test_random_bodies(data):
    rank = data.draw(st.integers(1, 3))
    lists = st.integers(0, 499)
    for _ in range(rank):
        lists = st.lists(lists, max_size=4)
    lists = data.draw(lists)
    random = np.random.default_rng(data.draw(st.integers(0, 999)))
    p = StreamProgram("random")
    loop = numbers(p, rank).loop(40)
    stream, steps = loop.stream, []
    for choose in data.draw(st.lists(st.sampled_from(BODIES), min_size=1, max_size=3)):
        stream, step = choose(stream, random)
        steps.append(step)
    state = stream.map(number("once", lambda value: max(0, value - 100)))
    loop.close(state, state.map(number("again", lambda value: value >= 100))).output("y")

    def body(round):
        for step in steps:
            round = step(round)
        return [(max(0, value - 100), value >= 200) for value in round]

    expected = at_depth(lists, rank - 1, lambda elements: around(elements, body)[0])
    for accelerator in (None, Accelerator(depth=1), FAST):
        assert p.run({"x": lists}, accelerator).outputs["y"] == expected


# ---- Tiles


def test_an_iteration_ends_when_it_has_converged():
    rng = np.random.default_rng(2)
    wanted = rng.uniform(1e-3, 1e3, (6, 2, 3)).astype("float32")
    p = StreamProgram("roots")
    a = p.input("a", StreamType((6,), Tile(2, 3)))
    loop = a.zip(a).loop(capacity=6)

    def newton(a, x):
        return a, ((x + a / x) / 2).astype("float32")

    step = TileFunction("newton", newton, lambda a, x: Tuple((a, x)), lambda a, x: 3 * a.rows * a.columns)
    state = loop.stream.map(step)

    def far(a, x):
        return bool((np.abs(x * x - a) > 1e-5 * a).any())

    done = loop.close(state, state.map(number("far", far)))
    done.map(TileFunction("root", lambda a, x: x, lambda a, x: x, lambda *_: 0)).output("x")
    report = p.run({"a": list(wanted)}, Accelerator())

    def body(round):
        made = [newton(*pair) for pair in round]
        return [(pair, far(*pair)) for pair in made]

    expected, rounds = around([(each, each) for each in wanted], body)
    np.testing.assert_array_equal(report.outputs["x"], [x for _, x in expected])
    assert metrics.evaluate(metrics.flops(p), report.bindings) == report.flops == 18 * sum(map(len, rounds))


def decoded(p, tokens, left):
    """Rows are multiplied by weights, all of a round as one tile, as often as `left` says of each."""
    loop = tokens.zip(left).loop(capacity=8, name="decode")
    rest = loop.stream.map(number("rest", lambda tile, left: left - 1))
    rows = loop.stream.map(TileFunction("row", lambda tile, left: tile, lambda tile, left: tile, lambda *_: 0))
    packed = rows.reshape(None).accum(functions.retile())
    weights = packed.load(p.tensor("w", 4, 4), (4, 4)).flatten(0, 1).flatten(0, 1)
    made = packed.map(functions.matmul(), weights).flat_map(cut, ROW).flatten()
    return loop.close(made.zip(rest), rest.map(number("more", lambda left: left > 0)))


def cut(tile):
    return [(1, 4)] * tile[0] if isinstance(tile, tuple) else [tile[at : at + 1] for at in range(len(tile))]


def test_what_goes_around_together_is_computed_together():
    p = StreamProgram("decode")
    done = decoded(p, p.input("x", StreamType((5,), Tile(1, 4))), p.input("left", StreamType((5,), Scalar())))
    done.output("y")
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((5, 1, 4), "float32"), rng.standard_normal((4, 4), "float32")
    left = [3, 1, 4, 1, 2]
    report = p.run({"x": list(x), "left": left, "w": w}, Accelerator())
    order = sorted(range(5), key=lambda at: (left[at], at))
    for at, (row, rest) in zip(order, report.outputs["y"], strict=True):
        assert rest == 0
        np.testing.assert_allclose(row, x[at] @ np.linalg.matrix_power(w, left[at]), rtol=1e-4, atol=1e-5)
    # The weights are loaded once a round, of which there are as many as the longest takes.
    assert report.read == 4 * w.nbytes == metrics.evaluate(metrics.off_chip_read(p), report.bindings)
    shapes = p.run({"x": [(1, 4)] * 5, "left": left}, Accelerator(), values=False)
    assert (shapes.cycles, shapes.units) == (report.cycles, report.units)


# ---- Time


def test_a_round_begins_while_the_one_before_is_under_way():
    p = StreamProgram("time")
    loop = numbers(p).loop(8)
    slow = loop.stream.map(number("slow", lambda n: n - 1, cycles=10))
    loop.close(slow, slow.map(number("more", lambda n: n > 0, cycles=0))).output("y")
    together = p.run({"x": [5] * 4}, FAST).cycles
    assert 4 * 5 * 10 <= together <= 4 * 5 * 10 + 10
    one = p.run({"x": [5]}, FAST).cycles
    assert 5 * 10 < one <= 5 * 13  # each time through the head, the slow unit and the end


def test_loops_read_what_lies_on_chip():
    def cycles(writes):
        p = StreamProgram("stored")
        loop = p.input("x", StreamType((1,), Tile(8, 64))).loop(1)
        made = loop.stream.map(functions.scale(0.5).costing(cycles=0), writes=writes)
        again = made.map(number("again", lambda tile: False, cycles=0))
        loop.close(made, again).output("y")
        return p.run({"x": [(8, 64)]}, FAST, values=False).cycles

    # 2 KiB at 64 bytes a cycle: written by the function, read for the decision and by the end of the loop.
    assert cycles(True) == cycles(False) + 3 * 32


# ---- Errors


def test_a_loop_without_room_says_so():
    p = StreamProgram("full")
    halved(p, numbers(p), capacity=2, name="small").output("y")
    with pytest.raises(
        StreamError, match=r"deadlock: 'y' .*; loop 'small' needs a larger capacity than 2 for its list"
    ):
        p.run({"x": [64] * 40})
    # A shorter list finds room in the body.
    assert p.run({"x": [64] * 6}).outputs["y"] == [1] * 6


def test_capacity_for_the_longest_list_is_enough():
    p = StreamProgram("enough")
    halved(p, numbers(p, 2), capacity=40).output("y")
    lists = [[2**at for at in range(40)], [], [2**at for at in range(39, 0, -1)]]
    for accelerator in (None, Accelerator(depth=1)):
        found = p.run({"x": lists}, accelerator).outputs["y"]
        assert found == [around(elements, halve)[0] for elements in lists]


def test_a_body_that_waits_for_all_rounds_is_a_deadlock():
    p = StreamProgram("waits")
    loop = numbers(p).loop(4)
    total = number("total", lambda state, value: state + value, initial=0)
    body = loop.stream.map(number("more", lambda n: 0), loop.stream.accum(total, rank=2).expand(loop.stream))
    loop.close(body, body).output("y")
    with pytest.raises(StreamError, match=r"deadlock: [^$]*Loop 'Loop0' waits for a token from 'Loop0_end' \(empty\)"):
        p.run({"x": [1]})


def test_a_loop_may_be_bounded():
    p = StreamProgram("bounded")
    halved(p, numbers(p, 2), most=3).output("y")
    assert p.run({"x": [[15, 3], [15]]}).outputs["y"] == [[1, 1], [1]]
    with pytest.raises(StreamError, match="Loop 'Loop0': after most=3 rounds there are elements of a list that go on"):
        p.run({"x": [[3, 16]]})


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda p, x: x.loop(0), "loop 'Loop0': capacity must be a whole number from 1 on"),
        (lambda p, x: x.loop(2, most=0), "loop 'Loop0': most must be a whole number from 1 on"),
        (
            lambda p, x: (lambda loop: loop.close(x, x))(x.loop(2)),
            r"\[Loop0_rounds, ~Loop0_left\] of .* goes into the loop's body, and \[N\] of Scalar\(int64\) comes out",
        ),
        (
            lambda p, x: (
                lambda loop: loop.close(loop.stream.map(number("tile", lambda n: n, Scalar("int8"))), loop.stream)
            )(x.loop(2)),
            r"goes into the loop's body, and .* of Scalar\(int8\) comes out",
        ),
        (
            lambda p, x: (
                lambda loop: loop.close(loop.stream, loop.stream.map(number("go", lambda n: (0,), Selector(2))))
            )(x.loop(2)),
            "which elements go on must be a scalar for each of .*, not .* of Selector",
        ),
    ],
)
def test_loops_that_break_a_rule(build, message):
    p = StreamProgram("wrong")
    with pytest.raises(StreamError, match=message):
        build(p, numbers(p))


def test_a_loop_is_closed_once():
    p = StreamProgram("open")
    loop = numbers(p).loop(2)
    loop.stream.discard()
    with pytest.raises(StreamError, match="nothing comes back to loop 'Loop0'; call Loop"):
        p.run({"x": [1]})
    never = loop.stream.map(number("never", lambda n: 0))
    loop.close(loop.stream, never)
    with pytest.raises(StreamError, match="has an operator, or a tensor, of that name already"):
        loop.close(loop.stream, never)


def test_a_body_that_isnt_one_is_found():
    p = StreamProgram("else")
    x = numbers(p)
    loop = x.loop(4)
    loop.stream.discard()
    other = p.input("other", StreamType((symbol("a"), ragged("b")), Scalar()))
    loop.close(other, other).output("y")
    with pytest.raises(StreamError, match="LoopEnd 'Loop0_end': 'other to 2' ends with an element that goes on"):
        p.run({"x": [1], "other": [[1]]})


# ---- Pictures and rewrites


def test_a_loop_in_a_picture():
    p = StreamProgram("picture")
    halved(p, numbers(p), name="halving").output("y")
    svg = graph_svg(p)
    assert svg.count("stroke-dasharray") == 1 and "Loop halving" in svg and "LoopEnd halving_end" in svg


def test_rewrites_keep_loops():
    p = StreamProgram("tiles")
    rows, padding = p.input("x", StreamType((6,), Tile(1, 4))).reshape(4, pad=np.zeros((1, 4), "float32"))
    padding.discard()
    loop = rows.accum(functions.retile()).loop(2, name="grow")
    doubled = loop.stream.map(functions.scale(2.0))
    loop.close(doubled, doubled.map(number("small", lambda tile: bool(tile.max() < 100)))).output("y")
    x = list(np.arange(24, dtype="float32").reshape(6, 1, 4))
    (tile,) = dynamic_tiling(p).run({"x": x}).outputs["y"]
    np.testing.assert_array_equal(tile, np.concatenate(x) * 8)
    static = p.run({"x": x}).outputs["y"]
    assert [tile.shape for tile in static] == [(4, 4)] * 2


def test_requests_that_loop_go_to_the_first_region_that_is_free():
    p = StreamProgram("regions")
    parts = numbers(p).partition(p.input("region", StreamType((symbol("N"),), Selector(2))))
    done = []
    for number_, part in enumerate(parts):
        loop = part.promote(0).loop(1, name=f"loop{number_}")
        slow = loop.stream.map(number("slow", lambda n: n - 1, cycles=10))
        done.append(loop.close(slow, slow.map(number("more", lambda n: n > 0))))
    p.eager_merge(done)[1].discard()
    p.stream("EagerMerge0.0").output("y")
    times = [40, 1, 1, 1, 1, 1, 40, 1]
    fixed = p.run({"x": times, "region": [0, 1] * 4}, FAST)
    free = dynamic_parallelization(p, "region", ["loop0_end.0", "loop1_end.0"]).run({"x": times}, FAST)
    assert fixed.outputs["y"] == free.outputs["y"] == [[0]] * 8
    assert free.cycles < 0.7 * fixed.cycles


def test_regions_with_loops_are_not_shared():
    p = StreamProgram("shared")
    parts = numbers(p).partition(p.input("s", StreamType((symbol("N"),), Selector(2))))
    for number_, part in enumerate(parts):
        entry = part.map(number("entry", lambda n: n), name=f"in{number_}")
        halved(p, entry, name=f"loop{number_}").map(number("out", lambda n: n), name=f"out{number_}").output(
            f"y{number_}"
        )
    with pytest.raises(StreamError, match=r"region from 'in0' to 'out0' has loop 'loop0' in it"):
        time_multiplexing(p, [("in0", "out0"), ("in1", "out1")], 2)
