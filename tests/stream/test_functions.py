"""Tile functions: values against numpy, types and FLOPs for symbolic tiles."""

import ml_dtypes
import numpy as np
import pytest

from tvm_axe.stream import Selector, StreamError, StreamProgram, StreamType, Tile, functions, symbol

R = symbol("R")
CASES = {
    "add": (functions.add, np.add, 2),
    "sub": (functions.sub, np.subtract, 2),
    "mul": (functions.mul, np.multiply, 2),
    "div": (functions.div, np.divide, 2),
    "maximum": (functions.maximum, np.maximum, 2),
    "exp": (functions.exp, np.exp, 1),
    "rsqrt": (functions.rsqrt, lambda a: 1 / np.sqrt(a), 1),
    "silu": (functions.silu, lambda a: a / (1 + np.exp(-a)), 1),
    "row_sum": (functions.row_sum, lambda a: a.sum(1, keepdims=True), 1),
    "row_max": (functions.row_max, lambda a: a.max(1, keepdims=True), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_types(name):
    make, want, arguments = CASES[name]
    f = make()
    rng = np.random.default_rng(4)
    arrays = [rng.uniform(0.5, 2, (3, 5)).astype("float32") for _ in range(arguments)]
    found = f(*arrays)
    np.testing.assert_allclose(found, want(*[array.astype("float64") for array in arrays]), rtol=1e-5)
    assert f.result(*[Tile(3, 5)] * arguments).shape == found.shape
    assert found.dtype == np.float32


def test_flops_of_symbolic_tiles():
    a = Tile(R, 16, "bfloat16")
    assert functions.silu().flops(a) == 8 * 16 * R and functions.exp().flops(a) == 4 * 16 * R
    assert functions.add().flops(a, a) == 16 * R and functions.row_sum().flops(a) == 16 * R
    assert functions.matmul().flops(a, Tile(16, 4)) == 2 * 16 * 4 * R
    assert functions.matmul(transposed=True).flops(a, Tile(R, 16)) == 2 * 16 * R * R
    assert functions.retile().flops(a) == functions.retile(axis=1).flops(a) == 0
    assert functions.exp().costing(flops=lambda a: 7).flops(a) == 7


def test_matmul_of_small_floats_is_computed_in_float32():
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((4, 64), (3, 64)))
    found = functions.matmul(transposed=True)(a, b)
    assert found.dtype == ml_dtypes.bfloat16
    want = a.astype("float64") @ b.astype("float64").T
    np.testing.assert_allclose(found.astype("float64"), want, rtol=0.01, atol=0.02)


def test_columns_and_rows_are_repeated():
    f = functions.mul()
    assert f.result(Tile(R, 8), Tile(R, 1)) == Tile(R, 8) and f.result(Tile(1, 8), Tile(R, 8)) == Tile(R, 8)
    with pytest.raises(StreamError, match="mul: sizes 8 and 7 don't fit"):
        f.result(Tile(2, 8), Tile(2, 7))
    with pytest.raises(StreamError, match=r"mul takes tiles, not Selector\(2\)"):
        f.result(Selector(2))


def test_accumulations_join_states():
    p = StreamProgram("accumulate")
    x = p.input("x", StreamType((1, 3), Tile(2, 4)))
    made = {
        "below": functions.retile(),
        "beside": functions.retile(axis=1),
        "sum": functions.sum_tiles(),
        "most": functions.max_tiles(),
        "rows": functions.row_max(),
    }
    for name, function in made.items():
        x.accum(function).output(name)
    arrays = np.random.default_rng(6).standard_normal((3, 2, 4)).astype("float32")
    found = {name: value for name, (value,) in p.run({"x": [list(arrays)]}).outputs.items()}
    np.testing.assert_array_equal(found["below"], np.concatenate(arrays))
    np.testing.assert_array_equal(found["beside"], np.concatenate(arrays, axis=1))
    np.testing.assert_allclose(found["sum"], arrays.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(found["most"], arrays.max(0))
    np.testing.assert_array_equal(found["rows"], arrays.max((0, 2))[:, None])


def test_tiles_are_put_beside_each_other_in_symbolic_numbers():
    """A row of as many columns as there are tiles, whatever comes; without values it is a shape."""
    p = StreamProgram("beside")
    p.input("x", StreamType((1, symbol("n")), Tile(R, 4))).accum(functions.retile(axis=1)).output("y")
    for count in (2, 5):
        arrays = [np.full((3, 4), at, "float32") for at in range(count)]
        np.testing.assert_array_equal(p.run({"x": [arrays]}).outputs["y"][0], np.concatenate(arrays, axis=1))
        assert p.run({"x": [[(3, 4)] * count]}, values=False).outputs["y"] == [(3, 4 * count)]


def test_a_tile_has_two_axes():
    with pytest.raises(StreamError, match="retile: axis 2 is none of a tile's; valid are 0, its rows, and 1"):
        functions.retile(2)


def test_an_empty_list_has_a_result_only_with_an_initial_state():
    p = StreamProgram("empty")
    x = p.input("x", StreamType((1, symbol("n")), Tile(2, 4)))
    x.accum(functions.sum_tiles()).output("y")
    with pytest.raises(StreamError, match="Accum 'sum_tiles0': sum_tiles has no result for an empty list"):
        p.run({"x": [[]]})
    q = StreamProgram("zero")
    x = q.input("x", StreamType((1, symbol("n")), Tile(2, 4)))
    x.accum(functions.sum_tiles().starting(np.zeros((2, 4), "float32"))).output("y")
    np.testing.assert_array_equal(q.run({"x": [[]]}).outputs["y"][0], np.zeros((2, 4)))
