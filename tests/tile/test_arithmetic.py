"""Expressions as programs are read: the same values, and none that upstream computes wrongly."""

import random

import numpy as np
import pytest
import tvm
import tvm_ffi
from expressions import Evaluator
from formulas import Formulas
from interpreter import interpret
from tvm import ir, sym, tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.arithmetic import plain

I, J, K = (tirx.Var(name, "int32") for name in "ijk")
AT = {I: np.arange(4)[:, None, None], J: np.arange(8)[:, None], K: np.arange(-9, 10)}
TERMS = (("i", 3), ("j", 7), ("k", 9))


def value(expr):
    return Evaluator(dict(AT), lambda *_: pytest.fail("a load"))(expr)


def drawn(seed, depth):
    """An integer and a truth value of i, j and k."""
    formulas = Formulas(random.Random(seed).choice, TERMS)
    names = {"T": T, "i": I, "j": J, "k": K}
    return [eval(text, names) for text in (f"({formulas.integer(depth)[0]}) + i * 0", formulas.truth(depth))]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_every_value_stays(seed):
    for expr in drawn(seed, 2 + seed % 2):
        np.testing.assert_array_equal(value(plain(expr)), value(expr), err_msg=str(expr))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_bounds_hold(seed):
    """What the analyzer says of a plain expression is true of its values."""
    expr = plain(drawn(seed, 2)[0])
    analyzer = sym.Analyzer()
    for var, extent in ((I, 4), (J, 8)):
        analyzer.bind(var, ir.Range.from_min_extent(0, extent))
    found, bound, modular = value(expr), analyzer.const_int_bound(expr), analyzer.modular_set(expr)
    assert int(bound.min_value) <= found.min() and found.max() <= int(bound.max_value), expr
    step = int(modular.coeff)
    assert (found % step == int(modular.base) % step).all() if step else (found == int(modular.base)).all(), expr


@pytest.mark.parametrize(
    "expr",
    [
        T.shift_right(I, K - J),
        T.shift_left(1, I + 28),
        T.cast(T.cast(I - 5, "uint8"), "int32"),
        T.cast(T.cast(I * 100, "int8"), "int32"),
    ],
    ids=str,
)
def test_upstream_is_wrong_about_the_original(expr):
    """Where this fails, upstream has mended what `plain` is for."""
    analyzer = sym.Analyzer()
    analyzer.bind(I, ir.Range.from_min_extent(0, 4))
    at = {I: np.arange(4), J: np.zeros(4, int), K: np.asarray(0)}
    found, bound = Evaluator(at, lambda *_: None)(expr), analyzer.const_int_bound(expr)
    assert found.min() < int(bound.min_value) or int(bound.max_value) < found.max()
    bound = analyzer.const_int_bound(plain(expr))
    assert int(bound.min_value) <= found.min() and found.max() <= int(bound.max_value)


def program(stores):
    """A program that stores each of some values, texts of i, j, k, m and X, in a part of O of its own."""
    lines = [f"            O[{number}, m, i, j] = {text}" for number, text in enumerate(stores)]
    source = f"""@T.prim_func
def func(X: T.Buffer((4, 8), "int32"), O: T.Buffer(({len(stores)}, 2, 4, 8), "int32"), k: T.int32):
    with tile.kernel(2) as m:
        with tile.parallel(4, 8) as (i, j):
"""
    return tvm.script.from_source(source + "\n".join(lines) + "\n", extra_vars={"tile": tile, "T": T})


def run(stores, tmp_path, k=7):
    x = np.random.default_rng(0).integers(-100, 100, (4, 8)).astype("int32")
    out = np.full((len(stores), 2, 4, 8), -77, "int32")
    func = program(stores)
    expected = interpret(func, x, out, k)[1]
    tile.compile(func, "llvm", Cache(tmp_path))(x, out, k)
    np.testing.assert_array_equal(out, expected)
    return x, out


def test_the_remainder_of_a_shift_by_what_is_unknown(tmp_path):
    _, out = run(["T.shift_right(i, k - j) % 2"], tmp_path)
    i, j = np.indices((4, 8))
    np.testing.assert_array_equal(out[0, 0], (i >> (7 - j)) % 2)


def test_truth_values_compared_and_chosen(tmp_path):
    a, b = "(i < 3)", "(X[i, j] < j)"
    x, out = run(
        [
            f'T.cast({text}, "int32")'
            for text in (f"{a} == {b}", f"{a} != {b}", f"{a} < {b}", f"T.Select({a}, {b}, i == j)", f"T.max({a}, {b})")
        ],
        tmp_path,
    )
    i, j = np.indices((4, 8))
    first, second = i < 3, x < j
    for found, want in zip(
        out, (first == second, first != second, first < second, np.where(first, second, i == j), first | second)
    ):
        np.testing.assert_array_equal(found[1], want)


def test_a_division_by_zero_ends_no_process_and_spoils_no_other_element(tmp_path):
    """All lanes are divided, those that are not chosen too."""
    x, out = run(["T.if_then_else(j != 0, T.truncdiv(X[i, j], j), 7)", "T.Select(j == 0, 1, X[i, j] // j)"], tmp_path)
    j = np.arange(1, 8)
    np.testing.assert_array_equal(out[0, 0, :, 1:], np.trunc(x[:, 1:] / j))
    np.testing.assert_array_equal(out[1, 0, :, 1:], x[:, 1:] // j)
    assert (out[0, :, :, 0] == 7).all() and (out[1, :, :, 0] == 1).all()
    func = program(["X[i, j] // (k - 7)"])
    tile.compile(func, "llvm", Cache(tmp_path))(x, np.zeros((1, 2, 4, 8), "int32"), 7)


def test_sums_of_uint32_and_shifts_left_wrap_where_they_are_compared(tmp_path):
    """Upstream's sums of uint32 stay in the type by promise, so that LLVM compares what was added to, and 1 << 31."""
    a, b = 'T.cast(X[i, j], "uint32")', "T.uint32(50)"
    texts = [f"{a} + {b} < {b}", f"{a} - {b} < {b}", f"{a} * {b} < {b}", "T.shift_left(1, X[i, j] & 31) > 0"]
    x, out = run([f'T.cast({text}, "int32")' for text in texts], tmp_path)
    u = x.astype("uint32")
    for found, want in zip(out, (u + 50 < 50, u - 50 < 50, u * 50 < 50, (1 << (x & 31)).astype("int32") > 0)):
        np.testing.assert_array_equal(found[0], want)


@pytest.mark.parametrize("seed", range(8))
def test_formulas_on_a_cpu(tmp_path, seed):
    terms = (("i", 3), ("j", 7), ("k", 9), ("m", 1), ("X[i, j]", 100), ("X[i, 7 - j]", 100))
    formulas = Formulas(random.Random(seed).choice, terms)
    truths = [f'T.cast({formulas.truth(2)}, "int32")' for _ in range(2)]
    run([formulas.integer(2)[0] for _ in range(6)] + truths, tmp_path, k=random.Random(seed).randrange(-9, 10))


@pytest.mark.parametrize(
    "text, says",
    [
        ('T.cast(T.shift_right(T.cast(X[i, j], "uint32"), T.uint32(40)), "int32")', "valid is 0 to 31"),
        ('T.cast((i < 3) + (j < 2), "int32")', "arithmetic on truth values"),
    ],
)
def test_refused(text, says):
    with pytest.raises(TileError, match=says):
        tile.read(program([text]))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
def test_no_divisor_is_0_or_takes_a_number_out_of_its_type(dtype):
    """And none is a choice, of which upstream asks for the signs wherever the quotient goes."""
    by, info = tirx.Var("by", dtype), np.iinfo(dtype)
    values = np.unique([info.min, info.min + 1, -2, -1, 0, 1, 2, 1 << 6, info.max // 2, info.max - 1, info.max])
    values = values[values >= info.min]
    divisors, choices = [], []
    expr = plain(tirx.truncmod(tirx.const(100, dtype), by))
    tvm_ffi.structural_walk(expr, ((tirx.Mod, lambda mod: divisors.append(mod.b)), (tirx.Select, choices.append)))
    (divisor,) = divisors
    found = Evaluator({by: values}, lambda *_: None)(divisor)
    np.testing.assert_array_equal(found, np.where((values == 0) | (values == -1), 1, values))
    assert not choices


@pytest.mark.parametrize("by", [-1, -2, -6, -7])
@pytest.mark.parametrize("kind", [tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod])
def test_divisions_by_negative_numbers_are_by_positive_ones(kind, by):
    at = {I: np.arange(-20, 20)}
    expr = kind(I, tirx.const(by, "int32"))
    found = Evaluator(at, lambda *_: None)
    np.testing.assert_array_equal(found(plain(expr)), found(expr))
    assert f"-{abs(by)}" not in str(plain(expr)), "no divisor is negative"
