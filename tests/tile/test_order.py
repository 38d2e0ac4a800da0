"""Order within a row: argmax, argmin, sort, top_k and cumsum, beside numpy, in every type and place they take."""

import itertools
import shutil

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import pytest
import tvm
import tvm_ffi
from on_cpu import EPSILONS, agree, close, poison, run
from tvm.error import DiagnosticError
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.tile import keys

TARGETS = ("cuda:sm_80", "cuda:sm_90a")
PLACES = ("fragment", "shared")


def made(source: str):
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def data(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Many equal elements; of floats also NaN, infinities and zeros of both signs."""
    rng = np.random.default_rng([seed, len(dtype), *shape])
    kind = np.dtype(dtype)
    low = 0 if dtype.startswith("u") else -4
    found = rng.integers(low, 5, shape).astype(dtype)
    far = rng.random(shape)
    if kind.kind in "iu":
        found = np.where(far < 0.05, np.iinfo(kind).max, np.where(far > 0.95, np.iinfo(kind).min, found))
    else:
        special = rng.choice([np.nan, np.inf, -np.inf, -0.0, 0.0], shape).astype(dtype)
        found = np.where(far < 0.2, special, found)
    return found.astype(dtype)


def first(x: np.ndarray, axis: int, count: int, descending: bool, nan_first: bool) -> tuple[np.ndarray, np.ndarray]:
    """The first elements of each line and their places, by comparing each two elements."""
    lines = np.moveaxis(x.astype("float64"), axis, -1)
    number = np.where(np.isnan(lines), np.inf, lines) * (1 if descending else -1)
    level = np.where(np.isnan(lines), 1 if nan_first else -1, 0)
    place = np.arange(lines.shape[-1])
    a, b = [v[..., :, None] for v in (level, number)], [v[..., None, :] for v in (level, number)]
    same = (a[0] == b[0]) & ((a[0] != 0) | (a[1] == b[1]))
    before = (b[0] > a[0]) | ((b[0] == a[0]) & (a[0] == 0) & (b[1] > a[1])) | (same & (place[None, :] < place[:, None]))
    rank = before.sum(axis=-1)
    order = np.argsort(rank, axis=-1)[..., :count]
    return np.take_along_axis(np.moveaxis(x, axis, -1), order, -1), order.astype("int32")


def ordering(word: str, dtype: str, shape, results, options="", place="fragment", out="fragment", which="vi"):
    """A program that gives both results of a word, or one of them."""
    names = {"v": ("values", dtype), "i": ("indices", "int32")}
    allocs = "".join(f'        {c} = tile.{out}({results}, "{names[c][1]}")\n' for c in which)
    given = ", ".join(f"{names[c][0]}={c}" for c in which)
    zeros, at = ", ".join("0" for _ in results), ", ".join("0" for _ in shape)
    copies = "".join(f"        tile.copy({c}, {c.upper()}[{zeros}])\n" for c in which)
    params = "".join(f', {c.upper()}: T.Buffer({results}, "{names[c][1]}")' for c in which)
    return made(f"""@T.prim_func
def {word}(X: T.Buffer({shape}, "{dtype}"){params}):
    with tile.kernel(1) as m:
        x = tile.{place}({shape}, "{dtype}")
{allocs}        tile.copy(X[{at}], x)
        tile.{word}(x, {given}{options})
{copies}""")


def check(func, x: np.ndarray, values: np.ndarray, indices: np.ndarray, which: str = "vi") -> None:
    """On the CPU, and as the interpreter says: to the bit, but for the sign of zeros and what a NaN is."""
    wanted = {"v": values, "i": indices}
    outputs = [poison(wanted[c].shape, wanted[c].dtype) for c in which]
    agree(func, x, *outputs, bounds=(True,))
    for found, c in zip(run(func, x, *outputs)[1:], which):
        np.testing.assert_array_equal(found.astype("float64"), wanted[c].astype("float64"))


@pytest.mark.parametrize("dtype", keys.ORDERED)
@pytest.mark.parametrize("word", ["argmax", "argmin"])
@pytest.mark.parametrize("axis", [0, 1])
def test_arg(word, dtype, axis):
    x = data(dtype, (7, 40))
    values, indices = (part[..., 0] for part in first(x, axis, 1, word == "argmax", True))
    np.testing.assert_array_equal(indices, getattr(np, word)(x.astype("float64"), axis=axis))  # numpy's own rule
    check(ordering(word, dtype, x.shape, indices.shape, f", axis={axis}"), x, values, indices)


@pytest.mark.parametrize("dtype", keys.ORDERED)
@pytest.mark.parametrize("largest", [False, True])
def test_top_k(dtype, largest):
    x = data(dtype, (5, 33), 1)
    for count in (1, 3, keys.PASSES, keys.PASSES + 1, 33):
        values, indices = first(x, 1, count, largest, largest)
        check(ordering("top_k", dtype, x.shape, indices.shape, f", largest={largest}"), x, values, indices)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32"])
@pytest.mark.parametrize("descending", [False, True])
def test_sort(dtype, descending):
    for length in (1, 2, 5, 16, 61):
        x = data(dtype, (4, length), 2)
        values, indices = first(x, 1, length, descending, descending)
        if not descending and dtype == "float32":
            np.testing.assert_array_equal(values, np.sort(x, axis=1))
        check(ordering("sort", dtype, x.shape, indices.shape, f", descending={descending}"), x, values, indices)


@pytest.mark.parametrize("place, out", [*itertools.product(PLACES, PLACES)])
@pytest.mark.parametrize("which", ["v", "i", "vi"])
def test_top_k_of_any_tile(place, out, which):
    x = data("float32", (2, 1, 3, 20), 3)
    values, indices = (part.reshape(2, 3, 4) for part in first(x, -1, 4, True, True))
    check(ordering("top_k", "float32", x.shape, (2, 3, 4), "", place, out, which), x, values, indices, which)


def test_parts_of_shared_tiles():
    @T.prim_func
    def parts(X: T.Buffer((8, 64), "float32"), V: T.Buffer((8, 6), "float32"), I: T.Buffer((2, 16), "int32")):
        with tile.kernel(1):
            x = tile.shared((8, 64), "float32")
            v = tile.shared((8, 6), "float32")
            i = tile.shared((2, 16), "int32")
            tile.copy(X[0, 0], x)
            tile.fill(v, 7)
            tile.fill(i, 7)
            tile.top_k(x[2:5, 10:30], v[1:4, 2:6])
            tile.argmin(x[0:8, 3:19], i[1, 0:16], axis=0)
            tile.copy(v, V[0, 0])
            tile.copy(i, I[0, 0])

    x = data("float32", (8, 64), 4)
    values, indices = np.full((8, 6), 7, "float32"), np.full((2, 16), 7, "int32")
    values[1:4, 2:6] = first(x[2:5, 10:30], 1, 4, True, True)[0]
    indices[1] = first(x[:, 3:19], 0, 1, False, True)[1][..., 0]
    for found, want in zip(run(parts, x, poison((8, 6)), poison((2, 16), "int32"))[1:], (values, indices)):
        np.testing.assert_array_equal(found, want)


def summing(dtype: str, out: str, axis: int, options: str, place: str = "fragment", to: str = "fragment"):
    return made(f"""@T.prim_func
def cumsum(X: T.Buffer((6, 70), "{dtype}"), Y: T.Buffer((6, 70), "{out}")):
    with tile.kernel(1) as m:
        x = tile.{place}((6, 70), "{dtype}")
        y = tile.{to}((6, 70), "{out}")
        tile.copy(X[0, 0], x)
        tile.cumsum(x, y, {axis}{options})
        tile.copy(y, Y[0, 0])
""")


def sums(x: np.ndarray, axis: int, reverse: bool, exclusive: bool) -> np.ndarray:
    wide = x.astype("float64" if x.dtype.kind not in "iu" else "int64")
    wide = np.flip(wide, axis) if reverse else wide
    total = np.cumsum(wide, axis) - (wide if exclusive else 0)
    return np.flip(total, axis) if reverse else total


@pytest.mark.parametrize("dtype, out", [
    ("float32", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("float64", "float64"), ("int32", "int32"),
    ("int8", "int32"), ("int8", "int8"), ("int64", "int64"),
])  # fmt: skip
@pytest.mark.parametrize("reverse, exclusive", [*itertools.product([False, True], [False, True])])
def test_cumsum(dtype, out, reverse, exclusive):
    rng = np.random.default_rng(5)
    x = (rng.integers(-5, 6, (6, 70)) if "int" in dtype else rng.standard_normal((6, 70))).astype(dtype)
    for axis, (place, to) in zip((0, 1, -1, -2), itertools.product(PLACES, PLACES)):
        func = summing(dtype, out, axis, f", reverse={reverse}, exclusive={exclusive}", place, to)
        found = run(func, x, poison((6, 70), out))[1]
        wanted = sums(x, axis, reverse, exclusive)
        # A sum's rounding is relative to what was added up, which is more than the sum.
        close(found, wanted, 70 * EPSILONS.get(out, 0.0))
        agree(func, x, poison((6, 70), out), bounds=(True,), epsilon=70 * EPSILONS.get(out, 0.0))


def test_a_whole_number_wraps():
    x = np.full((6, 70), 100, "int8")
    found = run(summing("int8", "int8", 1, ""), x, poison((6, 70), "int8"))[1]
    np.testing.assert_array_equal(found, np.cumsum(x, axis=1, dtype="int64").astype("int8"))


# ---- What is written, read and decided -------------------------------------------------------------------------------


@T.prim_func
def words(X: T.Buffer((16, 64), "float32"), Out: T.Buffer((16, 12), "float32")):
    """Every word, with and without what it may have."""
    with tile.kernel(1):
        x = tile.shared((16, 64), "float32")
        y = tile.fragment((16, 64), "float32")
        at = tile.fragment((16,), "int32")
        best = tile.fragment((16,), "float32")
        most = tile.fragment((16, 12), "float32")
        i = tile.fragment((16, 4), "int32")
        rows = tile.shared((16, 64), "int32")
        tile.copy(X[0, 0], x)
        tile.argmax(x, at, values=best)
        tile.argmin(x[0:16, 32:64], at, 1)
        tile.sort(x, indices=rows, descending=True)
        tile.sort(x, y)
        tile.top_k(x, most)
        tile.top_k(x, indices=i, largest=False)
        tile.cumsum(x, y)
        tile.cumsum(x, y, 0, reverse=True, exclusive=True)
        tile.copy(most, Out[0, 0])


def test_reads_as_it_is_written():
    assert str(tile.read(words)).split("\n")[-9:-1] == [
        "    best, at = values and indices of argmax of x along 1",
        "    at = indices of argmin of x[0:16, 32:64] along 1",
        "    rows = indices of sort of x along 1, descending",
        "    y = values of sort of x along 1",
        "    most = values of top_k of x along 1",
        "    i = indices of top_k of x along 1, smallest",
        "    y = sums of x along 1",
        "    y = sums of x along 0, reverse, exclusive",
    ]


def test_round_trip():
    printed = words.script()
    parsed = tvm.script.from_source(printed)
    assert tvm_ffi.structural_equal(parsed, words)
    assert str(tile.read(parsed)) == str(tile.read(words))
    assert tvm_ffi.structural_equal(tvm.ir.load_json(tvm.ir.save_json(words)), words)


@pytest.mark.parametrize("target", ["llvm", *TARGETS])
def test_explained(target):
    text = tile.explain(words, target)
    assert "most = values of top_k of x along 1: a network of 21 stages  (more than 8 results of a row)" in text
    assert "at = indices of argmin of x[0:16, 32:64] along 1: 1 pass over each line" in text
    assert "i = indices of top_k of x along 1, smallest: 4 passes over each line" in text
    assert ("y = sums of x along 1: a warp a line" in text) == (target != "llvm")


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 13, 64])
def test_the_network_sorts_all_zeros_and_ones(length):
    """Which is to sort everything (Knuth, section 5.3.4, the 0-1 principle); drawn where there are too many."""
    rng = np.random.default_rng(length)
    rows = rng.integers(0, 2, (4096, length)) if length > 12 else np.array([*itertools.product((0, 1), repeat=length)])
    for half, mirrored in keys.stages(length):
        for number in range(keys.pairs(length)):
            front, back = keys.pair(number, half, mirrored)
            if back < length:
                a, b = rows[:, front].copy(), rows[:, back].copy()
                rows[:, front], rows[:, back] = np.maximum(a, b), np.minimum(a, b)
    np.testing.assert_array_equal(rows, -np.sort(-rows, axis=1))


# ---- CUDA ------------------------------------------------------------------------------------------------------------


@T.prim_func
def router(
    X: T.Buffer((256, 128), "bfloat16"),
    W: T.Buffer((64, 128), "bfloat16"),
    V: T.Buffer((256, 6), "float32"),
    I: T.Buffer((256, 6), "int32"),
    S: T.Buffer((256, 64), "float32"),
):
    """Scores by a product, of which the largest are searched, and summed up, where they are."""
    with tile.kernel(2) as m:
        x = tile.shared((128, 64), "bfloat16")
        w = tile.shared((64, 64), "bfloat16")
        c = tile.fragment((128, 64), "float32")
        v = tile.fragment((128, 6), "float32")
        i = tile.fragment((128, 6), "int32")
        s = tile.fragment((128, 64), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(2):
            tile.copy(X[m * 128, k * 64], x)
            tile.copy(W[0, k * 64], w)
            tile.gemm(x, w, c, transpose_b=True)
        tile.top_k(c, v, i)
        tile.cumsum(c, s)
        tile.copy(v, V[m * 128, 0])
        tile.copy(i, I[m * 128, 0])
        tile.copy(s, S[m * 128, 0])


def test_a_product_ordered_where_it_is():
    assert "producer warp" in tile.explain(router, "cuda:sm_90a")
    rng = np.random.default_rng(6)
    x, w = (rng.integers(-3, 4, shape).astype("bfloat16") for shape in ((256, 128), (64, 128)))
    scores = x.astype("float32") @ w.astype("float32").T
    values, indices = first(scores, 1, 6, True, True)
    outputs = [poison((256, 6)), poison((256, 6), "int32"), poison((256, 64))]
    found = run(router, x, w, *outputs)[2:]
    for got, want in zip(found, (values, indices, np.cumsum(scores, axis=1))):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("target", TARGETS)
def test_on_cuda_all_of_them_compile(tmp_path, target):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    programs = [words, router]
    for number, dtype in enumerate(keys.ORDERED):
        for word, results, options in (
            ("argmin", (33,), ", axis=0"),
            ("top_k", (5, 4), ""),
            ("sort", (5, 33), ", descending=True"),
        ):
            func = ordering(word, dtype, (5, 33), results, options, PLACES[number % 2], PLACES[number // 2 % 2])
            programs.append(func.with_attr("global_symbol", f"{word}_{dtype}"))
    for dtype in ("float16", "bfloat16", "float64", "int8", "int64", "uint32"):
        programs.append(summing(dtype, dtype, 0, ", exclusive=True").with_attr("global_symbol", f"cumsum_{dtype}"))
    assert len(tile.compile_all(programs, target, Cache(tmp_path))) == len(programs)


@pytest.mark.gpu
@pytest.mark.parametrize("place, out", [*itertools.product(PLACES, PLACES)])
def test_on_a_gpu(cuda, tmp_path, place, out):
    for dtype in ("float32", "bfloat16", "int32", "uint8"):
        # Threads hold as many elements of a fragment each, so its rows are of factors that they have.
        x = data(dtype, (40 if "fragment" in (place, out) else 37, 200), 7)
        for word, count, options in (("top_k", 4, ""), ("top_k", 20, ", largest=False"), ("sort", 200, "")):
            descending = word == "top_k" and not options
            values, indices = first(x, 1, count, descending, descending)
            func = ordering(word, dtype, x.shape, indices.shape, options, place, out)
            found = poison(values.shape, dtype), poison(indices.shape, "int32")
            tile.compile(func, "cuda", Cache(tmp_path))(x, *found)
            np.testing.assert_array_equal(found[0].astype("float64"), values.astype("float64"))
            np.testing.assert_array_equal(found[1], indices)
    x = np.random.default_rng(8).integers(-9, 9, (6, 70)).astype("float32")
    for axis, reverse in itertools.product((0, 1), (False, True)):
        y = poison((6, 70))
        tile.compile(summing("float32", "float32", axis, f", reverse={reverse}", place, out), "cuda", Cache(tmp_path))(
            x, y
        )
        np.testing.assert_array_equal(y, sums(x, axis, reverse, False))


# ---- What is refused -------------------------------------------------------------------------------------------------

HEAD = """@T.prim_func
def func(X: T.Buffer((8, 16), "float32"), Y: T.Buffer((8, 16), "float32")):
    with tile.kernel(1) as m:
        x = tile.shared((8, 16), "float32")
        y = tile.fragment((8, 16), "float32")
        d = tile.fragment((8, 16), "float64")
        at = tile.fragment((8,), "int32")
        few = tile.fragment((8, 4), "float32")
        i = tile.fragment((8, 4), "int32")
        row = tile.fragment((8,), "float32")
        tile.copy(X[0, 0], x)
        tile.fill(d, 0)
"""

REFUSED = [
    ("tile.argmax(X[0:8, 0:16], at)", "global X: .*; valid are shared tiles and fragments"),
    ("tile.argmax(x, row)", "indices are of float32; valid is a tile of int32"),
    ("tile.argmax(x, at, 0)", r"src has shape \(8, 16\), and at \(8,\); valid is \(16,\)"),
    ("tile.argmax(x, at, 2)", "argmax of x: along axis 2; valid is -2 to 1"),
    ("tile.argmin(x, at, values=i[0:8, 0])", "values are of int32; valid is a tile of float32"),
    ("tile.argmin(d, at)", "src is fragment d: float64.*; valid are tiles of float16, bfloat16, float32, int8"),
    ("tile.top_k(x, few, at)", r"src has shape \(8, 16\), and at \(8,\); valid is \(8, 4\)"),
    ("tile.top_k(y[0:8, 0:2], few)", r"4 elements of each row of 2 in a result; valid is 1 to 2"),
    ("tile.sort(x, few)", "4 elements of each row of 16 in a result; valid is 16"),
    ("tile.sort(x, x)", "x is in two places, and would change while it is read; valid is another tile"),
    ("tile.cumsum(x, x)", "x is in two places"),
    ("tile.cumsum(x, few)", r"src has shape \(8, 16\), dst \(8, 4\); they must be equal up to ones"),
    ("tile.cumsum(i, few)", "sums of int32 in float32; valid are floats in floats"),
    ("tile.cumsum(x, y, -3)", "cumsum of x: along axis -3; valid is -2 to 1"),
    ("tile.cumsum(x[0:8, m + 8:m + 24], y)", "isn't shown to be inside of shared x"),
    ("tile.argmax(y, at)", "reads fragment y: .*, which nothing has written before"),
]


@pytest.mark.parametrize("line, message", REFUSED, ids=[line for line, _ in REFUSED])
def test_refused(line, message):
    filled = "" if line.endswith("(y, at)") else "        tile.fill(y, 0)\n        tile.fill(i, 0)\n"
    with pytest.raises(TileError, match=message):
        tile.read(made(f"{HEAD}{filled}        {line}\n        tile.copy(y, Y[0, 0])\n"))


def test_refused_in_parallel():
    text = f"{HEAD}        with tile.parallel(8) as r:\n            tile.cumsum(x, y)\n"
    with pytest.raises(TileError, match="parallel: cumsum in its body; valid is a cumsum before or behind it"):
        tile.read(made(text))


@pytest.mark.parametrize("line, message", [
    ("tile.top_k(x)", "top_k: nothing to write; valid are values, indices, or both"),
    ("tile.argmax(x, 3)", "argmax: takes tiles and slices of tiles, got int"),
])  # fmt: skip
def test_refused_where_it_is_written(line, message):
    with pytest.raises(DiagnosticError, match=message):
        made(f"{HEAD}        {line}\n")
