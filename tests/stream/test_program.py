"""Shape rules, checked when a program is built; inputs, checked when it runs; each error says which and what."""

import numpy as np
import pytest

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
    View,
    functions,
    ragged,
    symbol,
)

N = symbol("N")


@pytest.fixture
def p():
    return StreamProgram("test")


def tiles(p, *shape, name="x"):
    return p.input(name, StreamType(shape, Tile(4, 8)))


def test_operators_type_what_they_send(p):
    x = tiles(p, 6, 10)
    s = p.input("s", StreamType((6,), Selector(2)))
    first, second = x.partition(s, rank=1)
    assert str(first) == "[s_0, 10] of Tile(4, 8, float32)"
    # Whatever the same selectors partition has the same number of elements.
    assert tiles(p, 6, name="y").partition(s)[0].type.shape[0] == first.type.shape[0]
    assert str(first.flatten()) == "[10*s_0] of Tile(4, 8, float32)"
    assert str(x.reshape(4)) == "[6, 3, ~60] of Tile(4, 8, float32)".replace("~60", "~Reshape0_total")
    assert str(x.reshape(5)) == "[6, 2, 5] of Tile(4, 8, float32)"
    assert str(first.flatten().reshape(None).accum(functions.retile()).type.shape[0]) == "Min(1, 10*s_0)"
    assert str(x.promote(0)) == "[6, 10, 1] of Tile(4, 8, float32)"
    assert str(x.accum(functions.retile())) == "[6] of Tile(40, 8, float32)"
    assert str(x.bufferize()) == "[6] of Buffer([10] of Tile(4, 8, float32))"
    assert str(x.bufferize(2).streamify(View((3,), (2,)))) == "[1, 3] of Tile(4, 8, float32)"
    back = p.reassemble([first, second], s, rank=1)
    assert str(back) == "[6, ~s_0 + s_1, 10] of Tile(4, 8, float32)"
    merged, origin = p.eager_merge([first, second])
    assert str(merged) == "[s_0 + s_1, 10] of Tile(4, 8, float32)" and str(origin) == "[s_0 + s_1] of Selector(2)"
    w = p.tensor("w", 16, 64)
    assert str(p.load(w, (8, 32))) == "[2, 2] of Tile(8, 32, float32)"
    assert str(merged.flatten().load(w, (8, 32), View((3,), (1,)))) == "[10*s_0 + 10*s_1, 3] of Tile(8, 32, float32)"
    assert isinstance(x.zip(x).type.data, Tuple)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda p: tiles(p, 4).zip(tiles(p, 5, name="y")),
            r"Zip 'Zip0': its inputs must have the same shape, and these are \[4\] of Tile.* and \[5\] of Tile",
        ),
        (
            lambda p: tiles(p, 4).map(functions.matmul(), tiles(p, 4, name="y")),
            r"Map 'matmul0': matmul: 8 columns meet 4 rows; its inputs are Tile\(4, 8, float32\) and Tile\(4, 8",
        ),
        (
            lambda p: tiles(p, 4).map(functions.add(), tiles(p, 4, 1, name="y")),
            r"these are \[4\] of .* and \[4, 1\] of",
        ),
        (lambda p: tiles(p, 4).accum(functions.retile(), rank=2), "rank=2 must be between 1 and the stream's rank, 1"),
        (lambda p: tiles(p, 4).flatten(), "inner=0 and outer=1 must be dims, 0 to 0 from the innermost"),
        (lambda p: tiles(p, 4).reshape(0), "size=0 must be a positive number"),
        (lambda p: tiles(p, 4).reshape(N), "size=N must be a positive number known when the program is built"),
        (lambda p: tiles(p, 4).reshape(2, level=1), r"level=1 must be one of 0 to 0, from the innermost dim: \[4\] of"),
        (lambda p: tiles(p, 4).promote(3), "level=3 must be between 0 and the stream's rank, 1"),
        (
            lambda p: tiles(p, 4).expand(tiles(p, 5, 2, name="y")),
            r"the dims of \[4\] .* must be the outer ones .*\[5, 2\]",
        ),
        (
            lambda p: tiles(p, 4, 2).partition(p.input("s", StreamType((4,), Selector(2)))),
            r"Partition 'Partition0': rank=0 of \[4, 2\] .* must leave dims outside, \[4, 2\], .* \[4\] of Sel",
        ),
        (lambda p: tiles(p, 4).partition(tiles(p, 4, name="y")), "its second stream must be one of selectors"),
        (
            lambda p: p.reassemble([tiles(p, 4)], p.input("s", StreamType((4,), Selector(2)))),
            r"needs selectors among its 1 streams, not \[4\] of Selector\(2\)",
        ),
        (
            lambda p: p.eager_merge([tiles(p, 4, 3), tiles(p, 4, 2, name="y")]),
            r"its streams must be alike but for their outermost dims, .*\[4, 3\] of .* and \[4, 2\] of",
        ),
        (lambda p: tiles(p, 4).streamify(), r"Streamify 'Streamify0': it reads buffers, and gets \[4\] of Tile"),
        (
            lambda p: tiles(p, 4, ragged("m")).bufferize().streamify(View((2,), (1,))),
            "a view needs a buffer of static shape, not Buffer",
        ),
        (
            lambda p: tiles(p, 4, 3).bufferize().streamify(View((2, 2), (2, 1))),
            "goes up to position 3, and .* has 3 tiles",
        ),
        (
            lambda p: p.load(p.tensor("w", 16, 8), (16, 3)),
            r"tiles of \(16, 3\) must divide tensor 'w' \(16, 8\) float32",
        ),
        (lambda p: p.load(p.tensor("w", 16, 8), (N, 8)), r"tiles of \(N, 8\) and the columns of .* must be static"),
        (lambda p: tiles(p, 4).load_at(p.tensor("w", 16, 8), (1, 8)), r"addresses are scalars, not \[4\] of Tile"),
        (lambda p: tiles(p, 4).store(p.tensor("w", 16, 12)), "columns must be static and divide those of tensor 'w'"),
        (
            lambda p: tiles(p, 4).store_at(p.tensor("w", 16, 8), p.input("a", StreamType((5,), Scalar()))),
            r"each tile needs a row .* \[4\] of Tile\(4, 8, float32\) and \[5\] of Scalar",
        ),
        (lambda p: (tiles(p, 4), tiles(p, 4)), "Input 'x': program 'test' has an operator, or a tensor, of that name"),
        (
            lambda p: tiles(p, 4).zip(tiles(StreamProgram("other"), 4)),
            "stream 'x' belongs to program 'other', not 'test'",
        ),
        (lambda p: p.feedback("f", StreamType((N, N), Scalar()), 2), "a stream of rank 1 and at most capacity=2"),
        (
            lambda p: p.feedback("f", StreamType((N,), Scalar()), 2).close(tiles(p, 4)),
            r"it was made for \[N\] of Scalar\(int64\), and 'x' is \[4\] of Tile",
        ),
    ],
)
def test_programs_that_break_a_shape_rule(p, build, message):
    with pytest.raises(StreamError, match=message):
        build(p)


def test_outputs_must_be_used(p):
    x = tiles(p, 2)
    x.map(functions.exp(), name="left")
    given = {"x": [np.ones((4, 8), "float32")] * 2}
    with pytest.raises(
        StreamError, match=r"Map 'left': output 'left', \[2\] of Tile\(4, 8, float32\), isn't connected"
    ):
        p.run(given)
    p.stream("left").discard()
    x.output("y")
    assert len(p.run(given).outputs["y"]) == 2


def test_feedback_must_be_closed_and_used(p):
    loop = p.feedback("loop", StreamType((N,), Scalar()), 2, [1])
    with pytest.raises(StreamError, match="Feedback 'loop': nothing closes it"):
        p.run()
    x = p.input("x", StreamType((N,), Scalar()))
    loop.close(x)
    with pytest.raises(StreamError, match="Feedback 'loop': it carries 'x' already"):
        loop.close(x)
    with pytest.raises(StreamError, match="Feedback 'loop': nobody takes it"):
        p.run({"x": [2]})


@pytest.mark.parametrize("chosen", [(0, 2), (-1,), (1, 1)])
def test_selectors_out_of_range(p, chosen):
    s = p.input("s", StreamType((1,), Selector(2)))
    for number, part in enumerate(p.input("x", StreamType((1,), Scalar())).partition(s)):
        part.output(f"y{number}")
    with pytest.raises(StreamError, match=r"Input 's': value 0 must be Selector\(2\), different ones of 0 to 1, not "):
        p.run({"x": [5], "s": [chosen]})


def test_inputs_must_fit(p):
    tiles(p, 2, Dim(3)).output("y")
    one = np.ones((4, 8), "float32")
    with pytest.raises(StreamError, match="Input 'x': it isn't given"):
        p.run()
    with pytest.raises(StreamError, match="has no input or tensor 'z'; it has x"):
        p.run({"x": [[one] * 3] * 2, "z": 1})
    with pytest.raises(StreamError, match=r"lists of 2 and 3 elements where the dim is 3; it is a stream \[2, 3\] of"):
        p.run({"x": [[one] * 3, [one] * 2]})
    with pytest.raises(StreamError, match="must be lists nested as deep as its rank; 5 is no list"):
        p.run({"x": [5, 5]})


def test_tensors_must_fit(p):
    w = p.tensor("w", N, 8)
    p.load(w, (1, 8)).output("y")
    with pytest.raises(StreamError, match=r"tensor 'w' \(N, 8\) float32 isn't given; pass an array"):
        p.run(accelerator=Accelerator())
    with pytest.raises(StreamError, match=r"is given with shape \(4, 9\)"):
        p.run({"w": np.ones((4, 9))})
    report = p.run({"w": (5, 8)}, Accelerator(), values=False)
    assert report.outputs["y"] == [[(1, 8)]] * 5 and report.bindings == {N: 5}
    values = np.arange(40, dtype="float32").reshape(5, 8)
    np.testing.assert_array_equal(np.concatenate([row for (row,) in p.run({"w": values}).outputs["y"]]), values)


def test_stores_put_tiles_where_they_belong(p):
    values = np.random.default_rng(2).standard_normal((4, 8)).astype("float32")
    x = p.load(p.tensor("x", 4, 8), (2, 4))
    x.store(p.tensor("copy", 4, 8, "float64"))
    rows = p.load(p.tensor("again", 4, 8), (1, 8)).flatten()
    rows.store_at(p.tensor("swapped", 6, 8), p.input("at", StreamType((4,), Scalar()))).discard()
    report = p.run({"x": values, "again": values, "at": [5, 0, 2, 1]}, Accelerator())
    np.testing.assert_array_equal(report.tensors["copy"], values)
    swapped = report.tensors["swapped"]
    np.testing.assert_array_equal(swapped[[5, 0, 2, 1]], values)
    assert np.isnan(swapped[[3, 4]]).all()
    # Bytes are those of the tensor that is written.
    assert (report.read, report.written) == (2 * 4 * 8 * 4, 4 * 8 * (8 + 4))
    assert report.tensors["copy"].dtype == np.float64
    with pytest.raises(StreamError, match="a tile of 1 x 8 at row 6, column 0 is outside of tensor 'swapped'"):
        p.run({"x": values, "again": values, "at": [6, 0, 2, 1]})


def test_random_loads_take_tiles_by_their_number(p):
    values = np.random.default_rng(2).standard_normal((4, 8)).astype("float32")
    p.input("at", StreamType((3,), Scalar())).load_at(p.tensor("x", 4, 8), (2, 4)).output("y")
    found = p.run({"x": values, "at": [3, 0, 2]}).outputs["y"]
    for tile, (row, column) in zip(found, ((2, 4), (0, 0), (2, 0))):
        np.testing.assert_array_equal(tile, values[row : row + 2, column : column + 4])
    with pytest.raises(StreamError, match="RandomOffChipLoad 'x0': tile 4 is outside of tensor 'x'"):
        p.run({"x": values, "at": [3, 0, 4]})


def test_a_program_prints_its_graph(p):
    tiles(p, 2).map(functions.exp()).output("y")
    assert str(p).splitlines() == [
        "program 'test'",
        "  x = Input(): [2] of Tile(4, 8, float32)",
        "  exp0 = Map(x): [2] of Tile(4, 8, float32)",
        "  y = Output(exp0)",
    ]


def test_what_changes_behind_a_run_is_in_the_next(p):
    """Units and channels are found out once; another reader, operator or depth is another program."""
    x, machine, given = tiles(p, 64), Accelerator(depth=4), {"x": [np.full((4, 8), at, "float32") for at in range(64)]}
    first = x.map(functions.add(), x)
    first.output("first")
    once = p.run(given, machine)
    assert p.run(given, machine).cycles == once.cycles
    first.map(functions.mul(), x).output("second")
    both = p.run(given, machine)
    for at, (one, two) in enumerate(zip(both.outputs["first"], both.outputs["second"], strict=True)):
        assert (one == once.outputs["first"][at]).all() and (two == 2.0 * at * at).all()
    assert len(both.units) > len(once.units)
    p.eager_merge([first, x])
    with pytest.raises(StreamError, match=r"isn't connected; use it, or say Stream.discard"):
        p.run(given, machine)
    for stream in p.nodes[-1].outputs:
        stream.discard()
    assert len(p.run(given, machine).units) > len(both.units)


def test_depths_changed_behind_a_run_are_those_of_the_next(p):
    x, given = tiles(p, 4, 8), {"x": [[np.ones((4, 8), "float32")] * 8] * 4}
    one, two = x.map(functions.add(), x), x.bufferize(1).streamify()
    one.map(functions.mul(), two).output("y")  # which needs room for a whole buffer beside it
    with pytest.raises(StreamError, match="deadlock"):
        p.run(given, Accelerator(depth=2))
    one.buffered(40), x.buffered(40)
    assert p.run(given, Accelerator(depth=2)).cycles > 0
