"""What a program is given and what functions make is what the types say; nothing is dropped; runs have an end."""

import numpy as np
import pytest

from tvm_axe.cli.entry import main
from tvm_axe.stream import (
    Accelerator,
    Dim,
    Scalar,
    Selector,
    StreamError,
    StreamProgram,
    StreamType,
    Tile,
    Tuple,
    functions,
    ragged,
    symbol,
)

N = symbol("N")
TILE = Tile(2, 4)
WIDE = np.arange(8, dtype="float32").reshape(2, 4)


@pytest.fixture
def p():
    return StreamProgram("test")


def tiles(p, *shape, name="x", data=TILE):
    return p.input(name, StreamType(shape, data))


def refused(p, given, message, **how):
    with pytest.raises(StreamError, match=message) as caught:
        p.run(given, **how)
    return caught.value


# ---- Inputs


@pytest.mark.parametrize(
    ("data", "given", "said"),
    [
        (Tile(2, 4), WIDE.astype("float64"), r"Tile\(2, 4, float32\), not an array of \(2, 4\) float64"),
        (Tile(2, 4), WIDE.T, r"not an array of \(4, 2\) float32"),
        (Tile(2, 4), WIDE[0], r"not an array of \(4,\) float32"),
        (Tile(2, 4), (2, 4), r"not the pair \(2, 4\)"),
        (Tile(N, 4), np.zeros((3, 5), "float32"), r"Tile\(N, 4, float32\), not an array of \(3, 5\) float32"),
        (Tile(2, 4, "bfloat16"), WIDE, r"Tile\(2, 4, bfloat16\), not an array of \(2, 4\) float32"),
        (Scalar("int8"), 200, r"Scalar\(int8\), not int 200"),
        (Scalar("uint8"), -1, r"Scalar\(uint8\), not int -1"),
        (Scalar(), 1.5, r"Scalar\(int64\), not float 1.5"),
        (Scalar("bool"), 2, r"Scalar\(bool\), not int 2"),
        (Scalar("float32"), "1", r"Scalar\(float32\), not str '1'"),
        (Selector(2), 2, r"Selector\(2\), different ones of 0 to 1, not tuple \(2,\)"),
        (Selector(2), 0.5, r"not float 0.5"),
        (Tuple((Scalar(), Tile(2, 4))), (1, WIDE.T), r"not an array of \(4, 2\) float32 as part 1"),
        (Tuple((Scalar(), Tile(2, 4))), (1,), r"not tuple \(1,\)"),
    ],
)
def test_inputs_are_what_their_types_say(p, data, given, said):
    tiles(p, 1, data=data).output("y")
    refused(p, {"x": [given]}, "Input 'x': value 0 must be .*" + said)


@pytest.mark.parametrize(
    ("dims", "given", "said"),
    [
        ((2, 3), [[1] * 2, [1] * 4], "lists of 2 and 4 elements where the dim is 3"),
        ((2, N), [[1] * 2, [1] * 4], "lists of 2 and 4 elements where the dim is N"),
        ((3, N), [[1] * 2, [1] * 2], "lists of 2 elements where the dim is 3"),
    ],
)
def test_lists_are_as_long_as_dims_say(p, dims, given, said):
    tiles(p, *dims, data=Scalar()).output("y")
    refused(p, {"x": given}, said)
    q = StreamProgram("ragged")
    tiles(q, dims[0] if dims[0] == len(given) else len(given), ragged("L"), data=Scalar()).output("y")
    assert q.run({"x": given}).outputs["y"] == given


def test_a_symbol_is_one_size(p):
    tiles(p, N, data=Scalar()).output("y")
    tiles(p, N, 2, name="z", data=Scalar()).output("again")
    w = p.tensor("w", N, 4)
    p.load(w, (1, 4)).output("rows")
    three = {"x": [1] * 3, "z": [[1, 2]] * 3, "w": np.zeros((3, 4), "float32")}
    assert len(p.run(three).outputs["rows"]) == 3
    refused(p, three | {"z": [[1, 2]] * 2}, "Input 'z': N is 2 here, and 3 in what was given before")
    refused(p, three | {"w": np.zeros((4, 4), "float32")}, "'w0': N is 4 here, and 3 in")


def test_tensors_are_of_their_type(p):
    p.load(p.tensor("w", N, 4), (2, 4)).flatten().store(p.tensor("v", N, 4))
    rows = np.ones((6, 4), "float32")
    np.testing.assert_array_equal(p.run({"w": rows}).tensors["v"], rows)
    refused(p, {"w": rows.astype("float16")}, r"tensor 'w' \(N, 4\) float32 is given as float16; convert it")
    refused(p, {"w": rows[:5]}, r"is given with 5 rows, which tiles of \(2, 4\) leave a part of")
    refused(p, {"w": (6, 4)}, "is given as its shape, .* runs without values only")
    refused(p, {"w": rows, "v": rows.astype("int8")}, "'store_v0': tensor 'v' .* is given as int8")


def test_a_tensor_without_rows_is_an_empty_stream(p):
    p.load(p.tensor("w", N, 4), (2, 4)).output("y")
    assert p.run({"w": np.zeros((0, 4), "float32")}).outputs["y"] == []
    assert p.run({"w": (0, 4)}, Accelerator(), values=False).outputs["y"] == []


def test_addresses_and_rows_are_checked_without_values_too(p):
    found = tiles(p, 1, name="at", data=Scalar()).load_at(p.tensor("w", 4, 4), (2, 4))
    found.store_at(p.tensor("v", 4, 4), tiles(p, 1, name="to", data=Scalar())).discard()
    p.run({"at": [1], "to": [2]}, values=False)
    refused(p, {"at": [2], "to": [2]}, "tile 2 is outside of tensor 'w'", values=False)
    refused(p, {"at": [0], "to": [3]}, "a tile of 2 x 4 at row 3, column 0 is outside of tensor 'v'", values=False)


# ---- Functions


def made(call, rows=2, dtype="float32", **more):
    """A function that says it makes tiles of so many rows."""
    return functions.TileFunction("mine", call, lambda a: Tile(rows, 4, dtype), lambda a: 0, **more)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a: a.astype("float16"), r"returned an array of \(2, 4\) float16"),
        (lambda a: a[:1], r"returned an array of \(1, 4\) float32"),
        (lambda a: a.sum(), "returned float32 "),
        (lambda a: a.tolist(), "returned list "),
        (lambda a: None, "returned NoneType None"),
    ],
)
@pytest.mark.parametrize("kind", ["map", "scan", "accum"])
def test_results_are_what_their_types_say(p, kind, call, said):
    getattr(tiles(p, 2), kind)(made(call), name="unit").output("y")
    refused(p, {"x": [WIDE, WIDE]}, f"'unit': mine must return Tile\\(2, 4, float32\\) of \\(2, 4\\), and {said}")


def test_numbers_are_what_their_types_say(p):
    tiles(p, 2, data=Scalar()).map(functions.number("half", lambda n: n / 2)).output("y")
    refused(p, {"x": [2, 3]}, r"Map 'half0': half must return Scalar\(int64\), and returned float 1.0")
    q = StreamProgram("sums")
    tiles(q, 3, data=Scalar()).accum(functions.number("sum", lambda s, n: s + n, Scalar("int8"), initial=0)).output("y")
    assert q.run({"x": [50, 50, 27]}).outputs["y"] == [127]
    refused(q, {"x": [50, 50, 28]}, r"sum must return Scalar\(int8\), and returned int 128")


def test_states_may_grow_in_one_dim_and_say_in_which(p):
    def beside(grows):
        return made(lambda a: a, combine=lambda a, b: np.concatenate([a, b], axis=1), grows=grows)

    x = tiles(p, 3)
    assert str(x.accum(beside(1)).output("y")) == "[1] of Tile(2, 12, float32)"
    assert x.scan(beside(1), name="each").output("z").tile.rows == 2
    found = p.run({"x": [WIDE] * 3}).outputs
    np.testing.assert_array_equal(found["y"][0], np.concatenate([WIDE] * 3, axis=1))
    assert [tile.shape for tile in found["z"]] == [(2, 4), (2, 8), (2, 12)]
    assert p.run({"x": [(2, 4)] * 3}, values=False).outputs == {"y": [(2, 12)], "z": [(2, 4), (2, 8), (2, 12)]}
    for wrong, said in ((None, r"\(2, 4\), and returned an array of \(2, 8\)"), (0, "Tile.* an array of .2, 8. f")):
        q = StreamProgram("wrong")
        tiles(q, 3).accum(beside(wrong), name="unit").output("y")
        refused(q, {"x": [WIDE] * 3}, f"Accum 'unit': mine must return .*{said}")
    with pytest.raises(StreamError, match=r"mine puts parts of dim 2 behind each other, and makes Tile"):
        x.accum(beside(2))


def test_initial_states_are_of_the_states_type(p):
    tiles(p, 3).accum(functions.sum_tiles().starting(np.zeros((1, 4), "float32"))).output("y")
    refused(
        p, {"x": [WIDE] * 3}, r"sum_tiles has states of Tile\(2, 4, float32\), and its initial one is an array of \(1"
    )
    q = StreamProgram("grows")
    tiles(q, ragged_rows := symbol("R"), data=Tile(1, 4)).accum(
        functions.retile().starting(np.zeros((0, 4), "float32"))
    ).output("y")
    assert q.run({"x": []}).outputs["y"][0].shape == (0, 4) and ragged_rows in q.run({"x": []}).bindings


@pytest.mark.parametrize(
    ("type", "make", "said"),
    [
        (StreamType((2,), Tile(1, 4)), lambda a: [a[:1]] * 3, "returned lists of 3 elements where the dim is 2"),
        (StreamType((N,), Tile(1, 4)), lambda a: [a[:1], a], r"returned an array of \(2, 4\) float32"),
        (StreamType((N,), Tile(1, 4)), lambda a: 5, "5 is no list"),
        (StreamType((N, 2), Scalar()), lambda a: [[1, 2], [3]], "returned lists of 1 and 2 elements"),
        (StreamType((N,), Selector(2)), lambda a: [(0,), (2,)], r"returned tuple \(2,\)"),
    ],
)
def test_what_flat_map_makes_is_what_its_type_says(p, type, make, said):
    tiles(p, 2).flat_map(make, type).output("y")
    refused(p, {"x": [WIDE] * 2}, f"FlatMap 'FlatMap0': its function must return .*{said}")


def test_flat_map_takes_a_type_made_of_the_elements(p):
    twice = tiles(p, 3).flat_map(lambda tile: [tile, tile], lambda data: StreamType((2,), data))
    assert str(twice) == "[3, 2] of Tile(2, 4, float32)"


def test_padding_is_of_the_streams_type(p):
    for stream in tiles(p, 3).reshape(2, pad=np.zeros((2, 4))):
        stream.discard()
    refused(p, {"x": [WIDE] * 3}, r"Reshape 'Reshape0': pad must be Tile\(2, 4, float32\), not an array of .* float64")


def test_initial_values_of_feedback_are_of_its_type(p):
    loop = p.feedback("loop", StreamType((N,), Selector(2)), 2, [(0,), (5,)])
    left, right = tiles(p, 2).partition(loop.stream)
    merged, origin = p.eager_merge([left, right])
    loop.close(origin)
    merged.output("y")
    refused(
        p, {"x": [WIDE] * 2}, r"Feedback 'loop': value 1 must be Selector\(2\), different ones of 0 to 1, not tuple"
    )


def fails(*values):
    raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize("kind", ["map", "scan", "accum"])
def test_what_a_function_raises_names_its_operator(p, kind):
    getattr(tiles(p, 2), kind)(made(fails), name="unit").output("y")
    said = r"'unit': mine raised ZeroDivisionError: by nothing; it was given .*an array of \(2, 4\) float32"
    assert isinstance(refused(p, {"x": [WIDE, WIDE]}, said).__cause__, ZeroDivisionError)


def test_what_a_flat_map_or_the_cost_raises_names_its_operator(p):
    tiles(p, 2).flat_map(fails, StreamType((N,), Tile(1, 4)), name="cut").output("y")
    assert isinstance(refused(p, {"x": [WIDE] * 2}, "FlatMap 'cut': fails raised Zero").__cause__, ZeroDivisionError)
    q = StreamProgram("cost")
    tiles(q, 2).map(made(lambda a: a).costing(flops=fails), name="unit").output("y")
    refused(q, {"x": [WIDE] * 2}, "Map 'unit': flops of mine raised ZeroDivisionError")
    with pytest.raises(StreamError, match=r"Map 'unit': ZeroDivisionError: by nothing; its inputs are Tile\(2, 4, f"):
        tiles(StreamProgram("type"), 2).map(functions.TileFunction("mine", fails, fails, fails), name="unit")


def test_shapes_that_do_not_fit_while_running_name_their_operator(p):
    x, y = tiles(p, 1, data=Tile(symbol("R"), 4)), tiles(p, 1, name="y", data=Tile(symbol("S"), 4))
    x.map(functions.add(), y, name="sum").output("z")
    given = {"x": [np.zeros((2, 4), "float32")], "y": [np.zeros((3, 4), "float32")]}
    refused(p, given, "Map 'sum': add: sizes 2 and 3 don't fit")
    q = StreamProgram("declared")
    odd = functions.TileFunction("odd", lambda a: a, lambda a: Tile(a.rows if a.static else 8, 4), lambda a: 0)
    tiles(q, 1, data=Tile(symbol("R"), 4)).map(odd, name="unit").output("y")
    refused(q, {"x": [WIDE]}, r"Map 'unit': odd makes Tile\(2, 4, float32\) of Tile\(2, 4, float32\), not Tile\(8, 4")


def test_numbers_of_tiles_need_values(p):
    total = functions.TileFunction("total", lambda a: int(a.sum()), lambda a: Scalar(), lambda a: 0)
    tiles(p, 2).map(total).output("y")
    assert p.run({"x": [WIDE] * 2}).outputs["y"] == [28, 28]
    refused(p, {"x": [(2, 4)] * 2}, r"Map 'total0': total makes Scalar\(int64\) of values", values=False)


DTYPES = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "int8", "int32", "uint8")
ONE = {
    name: getattr(functions, name)
    for name in ("exp", "rsqrt", "silu", "row_sum", "row_max", "sum_tiles", "max_tiles", "retile")
} | {"retile_columns": lambda: functions.retile(axis=1), "scale": lambda: functions.scale(2)}
TWO = {name: getattr(functions, name) for name in ("add", "sub", "mul", "div", "maximum", "matmul")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_the_packages_functions_make_what_they_say(p, name, dtype):
    x = tiles(p, 2, data=Tile(4, 4, dtype))
    value = np.ones((4, 4)).astype(dtype)
    try:
        made = x.map(ONE[name](), name="unit") if name in ONE else x.map(TWO[name](), x, name="unit")
    except StreamError as error:
        assert dtype in ("int8", "int32", "uint8") and f"{name} takes tiles of floats, not of {dtype}" in str(error)
        return
    made.output("y")
    assert p.run({"x": [value, value]}).outputs["y"][0].dtype == value.dtype


def test_arithmetic_is_of_one_dtype(p):
    with pytest.raises(StreamError, match="add takes tiles of one dtype, not of float32 and float16"):
        tiles(p, 2).map(functions.add(), tiles(p, 2, name="y", data=Tile(2, 4, "float16")))


# ---- Nothing is dropped


def test_reassemble_says_what_is_left(p):
    parts = [tiles(p, symbol(name), name=name, data=Scalar()) for name in ("a", "b")]
    p.reassemble(parts, tiles(p, 2, name="s", data=Selector(2))).output("y")
    assert p.run({"a": [1], "b": [2], "s": [0, 1]}).outputs["y"] == [[1], [2]]
    refused(p, {"a": [1, 3, 4], "b": [2], "s": [0, 1]}, "Reassemble 'Reassemble0': 2 values of 'a' are left: it ended")
    refused(p, {"a": [1], "b": [], "s": [0, 1]}, "'b' has ended, and one more tensor of it was selected")


def test_partition_says_which_selectors_are_left(p):
    streams = tiles(p, N, data=Scalar()).partition(tiles(p, symbol("M"), name="s", data=Selector(2)))
    for number, stream in enumerate(streams):
        stream.output(f"y{number}")
    refused(p, {"x": [1, 2], "s": [0, 1, 1]}, "Partition 'Partition0': 1 values of 's' are left")
    refused(p, {"x": [1, 2, 3], "s": [0, 1]}, "its selectors, from 's', have ended before its data")


def test_expand_says_what_is_left(p):
    x, like = tiles(p, symbol("M"), data=Scalar()), tiles(p, N, ragged("L"), name="like", data=Scalar())
    x.expand(like).output("y")
    assert p.run({"x": [7, 8], "like": [[1], [2, 3]]}).outputs["y"] == [[7], [8, 8]]
    refused(p, {"x": [7, 8, 9], "like": [[1], [2, 3]]}, "Expand 'Expand0': 1 values of 'x' are left")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (3, "the tiles end at column 4, row 2 of tensor 'w'"),
        (5, "a tile of 2 x 4 at row 4, column 0 is outside of tensor 'w'"),
    ],
)
@pytest.mark.parametrize("values", [True, False])
def test_stores_fill_their_tensor(p, number, said, values):
    tiles(p, N).store(p.tensor("w", 4, 8))
    tile = WIDE if values else (2, 4)
    refused(p, {"x": [tile] * number}, f"LinearOffChipStore 'store_w0': {said}", values=values)
    p.run({"x": [tile] * 4}, values=values)


def test_rows_that_are_not_stored_are_those_given(p):
    tiles(p, 1).store(p.tensor("w", 4, 4))
    found = p.run({"x": [WIDE], "w": np.full((4, 4), 5, "float32")}).tensors["w"]
    np.testing.assert_array_equal(found, np.concatenate([WIDE, np.full((2, 4), 5)]))
    refused(p, {"x": [WIDE]}, "the tiles fill 2 rows of tensor 'w' .*; pass what is to be in the others as its input")
    q = StreamProgram("room for the most")
    tiles(q, N).store(q.tensor("w", 4, 4))
    assert np.isnan(q.run({"x": [WIDE]}).tensors["w"][2:]).all()


def test_tiles_beside_each_other_are_equally_high(p):
    tiles(p, 2, data=Tile(symbol("R"), 4)).store(p.tensor("w", 2, 8))
    refused(p, {"x": [WIDE, WIDE[:1]]}, "a tile of 1 rows comes beside one of 2, at row 0 of tensor 'w'")


def test_each_stored_tile_has_an_address(p):
    tiles(p, N).store_at(p.tensor("w", 4, 4), tiles(p, symbol("M"), name="at", data=Scalar())).discard()
    refused(p, {"x": [WIDE] * 2, "at": [0]}, "its addresses, from 'at', have ended before its tiles")
    refused(p, {"x": [WIDE], "at": [0, 2]}, "'store_w0': 1 values of 'at' are left")


# ---- Runs have an end


def endless(p):
    """A number that goes round for ever, a cycle each time and what channels take."""
    loop = p.feedback("loop", StreamType((N,), Scalar()), 2, [1])
    merged, origin = p.eager_merge([tiles(p, 1, data=Scalar()), loop.stream])
    origin.discard()
    loop.close(merged.map(functions.number("same", lambda n: n), name="again"))
    merged.output("y")


def test_a_run_without_end_is_given_up(p):
    endless(p)
    error = str(refused(p, {"x": [1]}, "max_cycles=1,000: ", accelerator=Accelerator(), max_cycles=1000))
    assert "'y', 'EagerMerge0.1, discarded' didn't end" in error and "Map 'again' waits for a token from" in error


def test_the_limit_is_on_the_cycles_that_are_reported(p):
    tiles(p, Dim(20), data=Scalar()).map(functions.number("busy", lambda n: n, cycles=50)).output("y")
    cycles = p.run({"x": [1] * 20}, Accelerator()).cycles
    assert p.run({"x": [1] * 20}, Accelerator(), max_cycles=cycles).cycles == cycles > 1000
    refused(p, {"x": [1] * 20}, f"max_cycles={cycles - 1:,}", accelerator=Accelerator(), max_cycles=cycles - 1)


@pytest.mark.parametrize(
    ("limit", "accelerator", "said"),
    [
        (0, Accelerator(), "max_cycles must be a whole number from 1 on"),
        (5, None, "without an accelerator nothing takes"),
    ],
)
def test_limits_that_are_none(p, limit, accelerator, said):
    tiles(p, 1, data=Scalar()).output("y")
    refused(p, {"x": [1]}, said, accelerator=accelerator, max_cycles=limit)


def test_the_command_line_takes_a_limit(capsys):
    assert main(["stream", "run", "moe-dynamic", "--batch", "4", "--max-cycles", "100"]) != 0
    assert "max_cycles=100: " in capsys.readouterr().err
    assert main(["stream", "run", "moe-dynamic", "--batch", "4", "--max-cycles", "10000000"]) == 0
