"""Shape operators, routing and the higher-order operators, against the same on nested lists."""

import itertools

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
    View,
    functions,
    metrics,
    ragged,
    symbol,
)
from tvm_axe.stream.codec import EMPTY, encode
from tvm_axe.stream.operators.base import Operator

MANY = settings(derandomize=True, max_examples=80, deadline=None)


def nested(rank, element=None, least=0):
    element = st.integers(0, 99) if element is None else element
    for _ in range(rank):
        element = st.lists(element, min_size=least, max_size=3)
    return element


def kind(rank, data=None):
    """A stream's type whose dims are all dynamic."""
    return StreamType((symbol("N"), *(ragged(f"R{at}") for at in range(1, rank))), data or Scalar())


class Late(Operator):
    """Sends lists with some stops late and alone, as operators do that learn late of an end."""

    kind = "Late"

    def __init__(self, type, lists, choices):
        self.type, self.lists, self.choices = type, lists, choices

    def types(self, node, inputs):
        return [self.type]

    def process(self, node, unit):
        tokens = []
        for (value, stop), early in zip(encode(self.lists, self.type.rank), itertools.cycle(self.choices)):
            tokens += [(value, stop)] if value is EMPTY or early >= stop else [(value, early), (EMPTY, stop)]
        yield from unit.send_all(unit.outputs[0], tokens)


stops = st.lists(st.integers(0, 4), min_size=1, max_size=5)


def compute(build, *sources):
    """Run a program of `build` on streams given as (type, lists, choices of late stops)."""
    p = StreamProgram("test")
    streams = [p.add(Late(*source), [], f"in{number}")[0] for number, source in enumerate(sources)]
    built = build(p, *streams)
    for number, stream in enumerate(built if isinstance(built, tuple) else (built,)):
        stream.output(f"out{number}")
    outputs = p.run().outputs
    return list(outputs.values()) if isinstance(built, tuple) else outputs["out0"]


def at_depth(lists, depth, change):
    """Apply `change` to what is `depth` lists deep."""
    return change(lists) if depth == 0 else [at_depth(inner, depth - 1, change) for inner in lists]


def joined(lists, levels):
    """Lists of lists as one, `levels` times."""
    for _ in range(levels):
        lists = [element for inner in lists for element in inner]
    return lists


@MANY
@given(st.data(), stops)
def test_flatten_joins_lists(data, late):
    rank = data.draw(st.integers(2, 4))
    lists = data.draw(nested(rank))
    inner = data.draw(st.integers(0, rank - 2))
    outer = data.draw(st.integers(inner + 1, rank - 1))
    found = compute(lambda p, x: x.flatten(inner, outer), (kind(rank), lists, late))
    assert found == at_depth(lists, rank - 1 - outer, lambda part: joined(part, outer - inner))


@MANY
@given(st.data(), stops, st.integers(1, 3))
def test_reshape_splits_and_flatten_undoes_it(data, late, size):
    rank = data.draw(st.integers(1, 3))
    lists, level = data.draw(nested(rank)), data.draw(st.integers(0, rank - 1))
    pieces = compute(lambda p, x: x.reshape(size, level), (kind(rank), lists, late))

    def split(part):
        return [part[at : at + size] for at in range(0, len(part), size)]

    assert pieces == at_depth(lists, rank - 1 - level, split)
    back = compute(lambda p, x: x.reshape(size, level).flatten(level, level + 1), (kind(rank), lists, late))
    assert back == lists


@MANY
@given(st.data(), stops, st.integers(1, 3))
def test_padding_fills_the_last_piece_and_says_so(data, late, size):
    rank = data.draw(st.integers(1, 3))
    lists = data.draw(nested(rank))
    padded, marks = compute(lambda p, x: x.reshape(size, pad=-1), (kind(rank), lists, late))

    def split(part, value=None):
        full = part + [-1] * (-len(part) % size)
        return [full[at : at + size] for at in range(0, len(full), size)]

    assert padded == at_depth(lists, rank - 1, split)
    assert marks == at_depth(padded, rank + 1, lambda value: int(value == -1))


@MANY
@given(st.data(), stops)
def test_promote_wraps(data, late):
    rank = data.draw(st.integers(1, 3))
    lists, level = data.draw(nested(rank)), data.draw(st.integers(0, rank))
    found = compute(lambda p, x: x.promote(level), (kind(rank), lists, late))
    assert found == at_depth(lists, rank - level, lambda part: [part])
    outer = min(level + 1, rank)
    back = compute(lambda p, x: x.promote(level).flatten(outer - 1, outer), (kind(rank), lists, late))
    assert back == lists


@MANY
@given(st.data(), stops, stops)
def test_expand_repeats_for_each_inner_element(data, late, later):
    rank, extra = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    like = data.draw(nested(rank + extra))
    values = itertools.count(1)
    lists = at_depth(like, rank, lambda part: next(values))
    found = compute(lambda p, x, y: x.expand(y), (kind(rank), lists, late), (kind(rank + extra), like, later))
    assert found == spread(lists, like, rank, extra)


def spread(values, like, rank, extra):
    if rank:
        return [spread(value, inner, rank - 1, extra) for value, inner in zip(values, like)]
    return at_depth(like, extra, lambda part: values)


@MANY
@given(st.data(), stops, stops)
def test_zip_and_map_take_what_comes_together(data, late, later):
    rank = data.draw(st.integers(1, 3))
    lists = data.draw(nested(rank))
    other = at_depth(lists, rank, lambda value: value * 7)
    sources = (kind(rank), lists, late), (kind(rank), other, later)
    pairs = compute(lambda p, x, y: x.zip(y), *sources)
    assert pairs == at_depth(lists, rank, lambda value: (value, value * 7))
    plus = functions.number("plus", lambda a, b: a + b)
    sums = at_depth(lists, rank, lambda value: value * 8)
    assert compute(lambda p, x, y: x.map(plus, y), *sources) == sums
    assert compute(lambda p, x, y: x.zip(y).map(plus), *sources) == sums


@MANY
@given(st.data(), stops)
def test_accum_and_scan_fold_the_inner_dims(data, late):
    rank = data.draw(st.integers(1, 3))
    lists, inner = data.draw(nested(rank)), data.draw(st.integers(1, rank))
    total = functions.number("total", lambda state, value: state + value, initial=0)
    found = compute(lambda p, x: x.accum(total, rank=inner), (kind(rank), lists, late))
    sums = at_depth(lists, rank - inner, lambda part: sum(joined(part, inner - 1)))
    assert found == (sums if inner < rank else [sums])
    scanned = compute(lambda p, x: x.scan(total, rank=inner), (kind(rank), lists, late))

    def scan(part):
        running = itertools.accumulate(joined(part, inner - 1))
        return at_depth(part, inner, lambda value: next(running))

    assert scanned == at_depth(lists, rank - inner, scan)


@MANY
@given(st.data(), stops)
def test_flat_map_puts_a_tensor_in_the_place_of_each_element(data, late):
    rank = data.draw(st.integers(1, 3))
    lists = data.draw(nested(rank, st.integers(0, 3)))

    def count(value):
        return [list(range(at)) for at in range(value)]

    made = kind(2)
    found = compute(lambda p, x: x.flat_map(count, made), (kind(rank), lists, late))
    assert found == at_depth(lists, rank, count)


@MANY
@given(st.data(), stops, stops)
def test_reassemble_undoes_partition(data, late, later):
    outer, inner = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 2))
    lists = data.draw(nested(outer + inner))
    draw = st.sets(st.integers(0, 2)).map(lambda chosen: tuple(sorted(chosen)))
    selectors = at_depth(lists, outer, lambda part: data.draw(draw))
    sources = (kind(outer + inner), lists, late), (kind(outer, Selector(3)), selectors, later)
    parts = compute(lambda p, x, s: x.partition(s, inner), *sources)
    flat = list(zip(joined(lists, outer - 1), joined(selectors, outer - 1)))
    assert parts == [[chunk for chunk, chosen in flat if number in chosen] for number in range(3)]

    def build(p, x, s):
        # A whole tensor has to fit: the first of two may be taken while the other is sent, too.
        return p.reassemble([part.buffered(20) for part in x.partition(s, inner)], s, inner)

    back = compute(build, *sources)
    assert back == copies(lists, selectors, outer)


def copies(values, selectors, depth):
    if depth:
        return [copies(value, chosen, depth - 1) for value, chosen in zip(values, selectors)]
    return [values] * len(selectors)


@MANY
@given(st.data(), stops)
def test_eager_merge_takes_everything_whole(data, late):
    inner = data.draw(st.integers(0, 2))
    parts = [data.draw(nested(inner + 1)) for _ in range(3)]
    merged, origins = compute(
        lambda p, *streams: p.eager_merge(streams), *[(kind(inner + 1), part, late) for part in parts]
    )
    left = [list(part) for part in parts]
    for chunk, (origin,) in zip(merged, origins):
        assert left[origin].pop(0) == chunk
    assert not any(left)


def test_streams_of_other_shapes_are_found_when_they_come():
    a, b = (kind(2), [[1, 2], [3]], [9]), (kind(2), [[1], [2, 3]], [9])
    with pytest.raises(StreamError, match="Zip 'Zip0': its inputs don't have the same shape; at cycle 0"):
        compute(lambda p, x, y: x.zip(y), a, b)
    with pytest.raises(
        StreamError, match=r"deadlock: .*\n  Expand 'Expand0' waits for a token from 'in0' \(which has ended\)"
    ):
        compute(lambda p, x, y: x.expand(y), (kind(1), [1], [9]), (kind(2), [[1], [2]], [9]))


# ---- Values that travel together, and stores to views ---------------------------------------------------------------


def extremes(x):
    """The least and the largest elements of tiles, as one function of two tiles."""
    return functions.TileFunction(
        "extremes",
        lambda tile: (tile, tile),
        lambda tile: Tuple((tile, tile)),
        lambda tile: 2 * tile.rows * tile.columns,
        lambda state, part: (np.minimum(state[0], part[0]), np.maximum(state[1], part[1])),
        initial=x,
    )


def width():
    """The difference of two tiles that come together, and of a third."""
    return functions.TileFunction(
        "width",
        lambda both, third: both[1] - both[0] - third,
        lambda both, third: both.items[0],
        lambda both, third: 2 * third.rows * third.columns,
    )


@pytest.mark.parametrize("start", [None, (np.full((2, 4), 0.5, "float32"), np.full((2, 4), -0.5, "float32"))])
def test_functions_may_make_several_tiles_that_travel_together(start):
    x = np.random.default_rng(0).standard_normal((6, 4), dtype="float32")
    p = StreamProgram("tuples")
    tiles = p.load(p.tensor("x", 6, 4), (2, 4))  # [3, 1]
    running = tiles.scan(extremes(start), rank=2)
    assert str(running) == "[3, 1] of Tuple(Tile(2, 4, float32), Tile(2, 4, float32))"
    running.map(width(), tiles).output("y")
    # Alone, what travels together comes as several arguments.
    running.map(functions.sub()).output("z")
    parts = x.reshape(3, 2, 4)
    least, most = (f.accumulate(parts, axis=0) for f in (np.minimum, np.maximum))
    if start is not None:
        least, most = np.minimum(least, start[0]), np.maximum(most, start[1])
    accelerator = Accelerator(compute=1)
    report = p.run({"x": x}, accelerator)
    np.testing.assert_allclose(np.array(report.outputs["y"])[:, 0], most - least - parts)
    np.testing.assert_allclose(np.array(report.outputs["z"])[:, 0], least - most)
    without = p.run({}, accelerator, values=False)
    assert (without.cycles, without.flops) == (report.cycles, report.flops)
    assert metrics.evaluate(metrics.flops(p), report.bindings) == report.flops


def test_numbers_do_not_travel_with_tiles_without_values():
    p = StreamProgram("tuples")
    function = functions.TileFunction(
        "both", lambda tile: (tile, 1), lambda tile: Tuple((tile, Scalar())), lambda tile: 0
    )
    p.load(p.tensor("x", 6, 4), (2, 4)).map(function).output("y")
    with pytest.raises(StreamError, match=r"both makes Tuple.* of values, and the run is without"):
        p.run({}, values=False)


@pytest.mark.parametrize("late", [[9], [0], [1, 2]])
def test_tiles_are_stored_to_a_view(late):
    """By columns: the third tile is the second of the first row."""
    x = np.arange(24, dtype="float32").reshape(6, 4)
    lists = [[x[row : row + 2, column : column + 2] for row in (0, 2, 4)] for column in (0, 2)]
    p = StreamProgram("columns")
    (tiles,) = p.add(Late(StreamType((2, 3), Tile(2, 2)), lists, late), [], "tiles")
    tiles.store(p.tensor("y", 6, 4), View((2, 3), (1, 2)))
    report = p.run({}, Accelerator())
    np.testing.assert_array_equal(report.tensors["y"], x)
    assert report.written == x.nbytes


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (View((2, 3), (1, 2), 1), "goes up to tile 6, and tensor 'y' .* has 6"),
        (View((2, 3), (0, 2)), "must have a place of its own for each tile"),
        (View((3,), (2,)), "must have a place of its own for each tile"),
    ],
)
def test_views_that_tiles_cannot_be_stored_to(view, message):
    p = StreamProgram("columns")
    tiles = p.input("tiles", StreamType((2, 3), Tile(2, 2)))
    with pytest.raises(StreamError, match=message):
        tiles.store(p.tensor("y", 6, 4), view)


def test_a_view_that_leaves_places_needs_what_is_there():
    p = StreamProgram("some")
    p.input("tiles", StreamType((2,), Tile(2, 2))).store(p.tensor("y", 6, 4), View((2,), (2,)))
    tiles = [np.ones((2, 2), "float32")] * 2
    with pytest.raises(StreamError, match="the tiles fill 2 rows of tensor 'y'"):
        p.run({"tiles": tiles})
    found = p.run({"tiles": tiles, "y": np.zeros((6, 4), "float32")}).tensors["y"]
    assert found.sum() == 8 and (found[:4, :2] == 1).all()


def test_tiles_that_begin_anywhere():
    x = np.arange(35, dtype="float32").reshape(5, 7)
    p = StreamProgram("anywhere")
    at = p.input("at", StreamType((3,), Scalar()))
    tiles = at.load_at(p.tensor("x", 5, 7), (2, 3), elements=True)
    tiles.output("tiles")
    places = p.input("places", StreamType((3,), Tuple((Scalar(), Scalar()))))
    tiles.store_at(p.tensor("y", 5, 7), places, elements=True).discard()
    begins, heights = [0, 11, 24], [2, 1, 0]
    given = {"at": begins, "places": list(zip([4, 22, 0], heights)), "y": np.zeros_like(x)}
    report = p.run({**given, "x": x}, Accelerator())
    corners = [divmod(element, 7) for element in begins]
    expected = [x[row : row + 2, column : column + 3] for row, column in corners]
    np.testing.assert_array_equal(report.outputs["tiles"], expected)
    y = np.zeros_like(x)
    y[0:2, 4:7], y[3, 1:4] = expected[0], expected[1][0]
    np.testing.assert_array_equal(report.tensors["y"], y)
    assert report.written == 3 * 3 * 4  # of the rows that are written alone
    without = p.run({**given, "y": (5, 7)}, Accelerator(), values=False)
    assert (without.cycles, without.traffic) == (report.cycles, report.traffic)


@pytest.mark.parametrize("element", [-1, 5, 28, 35])
def test_tiles_that_begin_where_they_do_not_fit(element):
    p = StreamProgram("anywhere")
    p.input("at", StreamType((1,), Scalar())).load_at(p.tensor("x", 5, 7), (2, 3), elements=True).output("tiles")
    with pytest.raises(StreamError, match=f"a tile of 2 x 3 from element {element} on is outside of tensor 'x'"):
        p.run({"at": [element]}, values=False)


def test_addresses_that_are_none():
    p = StreamProgram("anywhere")
    tiles = p.input("tiles", StreamType((2,), Tile(2, 3)))
    three = p.input("three", StreamType((2,), Tuple((Scalar(), Scalar(), Scalar()))))
    with pytest.raises(StreamError, match="addresses are scalars, or pairs of these and of rows"):
        tiles.store_at(p.tensor("y", 5, 7), three, elements=True)
    with pytest.raises(StreamError, match=r"tiles of \(2, 9\) must be static, and no wider than tensor 'x'"):
        p.input("at", StreamType((1,), Scalar())).load_at(p.tensor("x", 5, 7), (2, 9), elements=True)
