"""Extents and strides known at run time: what holds for every value is proved, and what isn't proved is refused."""

import itertools

import numpy as np
import pytest
from tvm import tirx

from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError

n, k, i, j = (tirx.Var(name, "int32") for name in "nkij")
VALUES = [dict(zip((n, k), pair)) for pair in itertools.product((1, 2, 3, 5), repeat=2)]


def at(value, values):
    """The int that an extent, a stride or a position is where the variables have values."""
    if isinstance(value, int):
        return value
    return int(eval(str(value), {var.name: number for var, number in values.items()}))


def where(layout, values):
    """The layout of ints that a symbolic one is where the variables have values."""
    parts = [
        [Iter(at(it.extent, values), at(it.stride, values), it.axis) for it in part] for part in (layout.D, layout.R)
    ]
    return Layout(*parts, {axis: at(amount, values) for axis, amount in layout.O.items()})


def check(make):
    """What `make` makes of symbolic sizes is, for every value of them, what it makes of the value."""
    symbolic = make(n, k)
    for values in VALUES:
        assert where(symbolic, values).equivalent(make(values[n], values[k]))


def rows(n):
    return Layout([Iter(n, 4, "m"), Iter(4, 1, "m")])


def batch(n, k):
    shard = [Iter(n, 32 * k, "m"), Iter(k, 32, "m"), Iter(32, 1, "laneid")]
    return Layout(shard, [Iter(2, 1, "dp")], {"m": 3 * k, "warpid": 1})


@pytest.mark.parametrize(
    "make",
    [
        lambda n, k: batch(n, k).canonicalize(),
        lambda n, k: rows(n * k).group((n, 2 * k, 2))[0],
        lambda n, k: rows(n * k).group_many([(n, 4 * k), (n * k, 4), (n * k, 2, 2)])[0],
        lambda n, k: batch(n, k).permute((n, k, 32), (1, 0, 2)),
        lambda n, k: rows(n).tile(Layout([Iter(k, 1, "m"), Iter(2, 1, "tp")]), (k, 2), (n, 4)),
        lambda n, k: rows(n).tile_to((n * k, 8), (n, 4)),
        lambda n, k: rows(n).is_tile_inner(rows(n).tile_to((n * k, 8), (n, 4)), (n * k, 8), (n, 4)),
        lambda n, k: rows(n).direct_sum(Layout([Iter(k, 4 * n, "m")], (), {"m": k}), (k, 1), (n, 4)),
        lambda n, k: batch(n, k).slice((n, k, 32), [(n - 1, n), (0, k), (8, 16)]),
        lambda n, k: batch(n, k).unpack(2),
        lambda n, k: batch(n, 2 * k).project(["m"]),
        lambda n, k: Layout([Iter(n, 6, "m"), Iter(6 * k, 1, "tp"), Iter(6, 1, "m")], (), {"m": 3 * n}).pack(3),
        lambda n, k: rows(n).broadcast(k, "m"),
        lambda n, k: Layout([Iter(n, 1, "tp"), Iter(4 * k, 1, "m")]).compose(rows(n * k)),
        lambda n, k: Layout([Iter(n, 1, "m"), Iter(k, n, "m")]).inverse(),
        lambda n, k: Layout([Iter(n, 1, "m"), Iter(k, -2 * n, "m")]).inverse({"m": 4 * n * k}),
    ],
)
def test_what_is_made_of_symbolic_sizes_is_right_for_every_value(make):
    check(make)


def test_sizes_spans_and_collisions_are_proved():
    layout = batch(n, k)
    for values in VALUES:
        numbers = batch(values[n], values[k])
        assert at(layout.size(), values) == numbers.size() and at(layout.size("m"), values) == numbers.size("m")
        assert at(layout.span("m"), values) == numbers.span("m")
        assert [at(bound, values) for bound in layout.bounds("m")] == list(numbers.bounds("m"))
    assert layout.is_injective() and layout.admits((k, n, 32)) and not layout.admits((n, k, 33))
    assert layout.equivalent(layout.canonicalize())


def test_equal_sizes_make_equal_layouts():
    assert rows(n * k) == rows(k * n) and hash(rows(n * k)) == hash(rows(k * n))
    assert rows(2 * n - n) == rows(n) != rows(k) and rows(n * 0 + 8) == Layout.parse("S[(8, 4) : (4, 1)]")
    assert str(rows(n).canonicalize()) == "S[n * 4 : 1]" and "Symbolic(n)" in repr(rows(n))
    assert str(Layout([Iter(2, n * 4, "tp")])) == "S[2 : (n * 4)@tp]"


def test_apply_gives_expressions_for_the_compiler():
    layout = Layout.parse("S[(2, 4, 8) : (1@tp, 1@laneid, 1)] + R[2 : 1@dp] + 5")
    points = layout.apply(i, j, shape=(8, 8))
    assert len(points) == 2
    for row, column in np.ndindex(8, 8):
        found = {
            frozenset((axis, value) for axis, amount in p.items() if (value := at(amount, {i: row, j: column})))
            for p in points
        }
        assert found == {frozenset(p.items()) for p in layout.apply(row, column, shape=(8, 8))}
    swizzled = ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]"))
    (point,) = swizzled.apply(i, j, shape=(8, 64))
    for row, column in ((0, 0), (3, 17), (7, 63)):
        assert at(point["m"], {i: row, j: column}) == next(iter(swizzled.apply(row, column, shape=(8, 64))))["m"]
    (point,) = batch(n, k).project(["m", "laneid"]).apply(i, 0, j, shape=(n, k, 32))
    assert at(point["m"], {n: 5, k: 4, i: 2, j: 7}) == 2 * 32 * 4 + 3 * 4
    assert str(point["laneid"]) == "j"


def test_an_index_may_be_zero_although_an_extent_may_not():
    (point,) = Layout.parse("S[(4, 4) : (1@tp, 1)]").apply(i)
    assert [at(point["tp"], {i: x}) for x in range(16)] == [x // 4 for x in range(16)]
    with pytest.raises(LayoutError, match=r"neither i // 4 >= 1 nor its contrary was proved"):
        assert point["tp"] >= 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Iter(n - 1, 1, "m"), "neither n - 1 >= 1 nor its contrary was proved"),
        (lambda: Iter(-n, 1, "m"), "an iter's extent must be at least 1, and n \\* -1 is less"),
        (lambda: rows(n).group((2, 2 * n)), "it was not proved that it cuts it evenly"),
        (lambda: rows(n).group((k, 4)), "it places n \\* 4 elements, and the shape has k \\* 4"),
        (lambda: rows(n).slice((n, 4), [(0, 2), (0, 4)]), "neither n >= 2 nor its contrary was proved|2 <= n"),
        (lambda: Layout([Iter(n, 1, "m"), Iter(k, 1, "m")]).is_injective(), "not proved"),
        (lambda: Layout([Iter(4, 1, "m"), Iter(4, n - k, "m")]).bounds("m"), "neither n - k > 0 nor its contrary"),
        (lambda: Layout([], [Iter(n, 1, "dp")]).apply(0), "the number of points is the extents' product, and n is not"),
        (lambda: rows(n).covers({"m": 4}), "covers: nothing was proved about the positions of n : 4"),
        (lambda: rows(n).apply(100), "neither"),
        (lambda: Layout.parse(str(rows(n))), "at position 3 of .*: expected an int, found 'n'"),
        (lambda: range(rows(n).size()), r"an int is needed, and n \* 4 is known at run time only"),
        (lambda: Layout([Iter(tirx.Var("x", "float32"), 1, "m")]), "an iter's extent must be an int"),
    ],
)
def test_what_was_not_proved_is_named(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_points_of_indices_of_either_width(dtype):
    row, column = tirx.Var("i", dtype), tirx.Var("j", dtype)
    (point,) = Layout.parse("S[(8, 4, 4) : (4, 32, 1)]").apply(row, column, shape=(8, 16))
    address = str(point["m"].expr).replace("T.int64", "int").replace("//", " // ")
    for i, j in itertools.product(range(8), range(16)):
        assert eval(address, {"i": i, "j": j, "int": int}) == j // 4 * 32 + i * 4 + j % 4
