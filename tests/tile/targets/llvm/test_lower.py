"""Every word of the language on a CPU, against the interpreter: each program with and without bounds checks."""

import numpy as np
import pytest
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from on_cpu import agree, normal, poison, run, target
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.analysis.expressions import variables_of
from tvm_axe.tile.targets import llvm as cpu

FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn")
INTS = ("int8", "uint8", "int32", "int64")


@pytest.fixture
def rng():
    return np.random.default_rng(0)


# ---- Copies and fills --------------------------------------------------------------------------------------------


def through(m, n, rows, columns, source, chip, target, scope):
    """B = A, tile by tile through a tile of another type."""
    make = {"shared": tile.shared, "fragment": tile.fragment, "local": tile.local}[scope]

    @T.prim_func
    def copies(A: T.Buffer((m, n), source), B: T.Buffer((m, n), target)):
        with tile.kernel(tile.cdiv(m, rows), tile.cdiv(n, columns)) as (i, j):
            t = make((rows, columns), chip)
            tile.copy(A[i * rows, j * columns], t)
            tile.copy(t, B[i * rows, j * columns])

    return copies


@pytest.mark.parametrize("scope", ["shared", "fragment", "local"])
@pytest.mark.parametrize("shape", [(32, 64, 8, 32), (1, 1, 4, 4), (37, 45, 16, 32), (5, 3, 2, 3), (3, 129, 8, 128)])
def test_copies_with_tails(rng, scope, shape):
    func = through(*shape, "float32", "float32", "float32", scope)
    agree(func, normal(rng, shape[:2]), poison(shape[:2]))


@pytest.mark.parametrize("source", FLOATS)
def test_copies_cast_floats(rng, source):
    """From a tensor of each type through tiles of each type into tensors of each type."""

    @T.prim_func
    def copies(
        A: T.Buffer((13, 40), source),
        B: T.Buffer((13, 40), "float32"),
        C: T.Buffer((13, 40), "float16"),
        D: T.Buffer((13, 40), "bfloat16"),
        E: T.Buffer((13, 40), "float8_e4m3fn"),
    ):
        with tile.kernel(2) as i:
            t = tile.shared((8, 48), "float32")
            half = tile.fragment((8, 48), "float16")
            brain = tile.shared((8, 48), "bfloat16")
            byte = tile.shared((8, 48), "float8_e4m3fn")
            tile.copy(A[i * 8, 0], t)
            tile.copy(t, B[i * 8, 0])
            tile.copy(t, half)
            tile.copy(half, C[i * 8, 0])
            tile.cast(half, brain)
            tile.copy(brain, D[i * 8, 0])
            tile.copy(brain, byte)
            tile.copy(byte, E[i * 8, 0])

    outputs = [poison((13, 40), dtype) for dtype in FLOATS]
    agree(copies, normal(rng, (13, 40), source), *outputs)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_tile_rounds_to_its_type(rng, dtype):
    """What comes out of a float32 tensor through a narrower tile has been rounded, whatever the tile is held in."""
    a = normal(rng, (13, 40))
    _, found = run(through(13, 40, 8, 32, "float32", dtype, "float32", "shared"), a, poison((13, 40)))
    np.testing.assert_array_equal(found, a.astype(np.dtype(dtype)).astype("float32"))


@pytest.mark.parametrize("dtype", INTS)
def test_copies_of_integers(rng, dtype):
    func = through(13, 40, 8, 32, dtype, "int32", dtype, "fragment")
    agree(func, normal(rng, (13, 40), dtype), poison((13, 40), dtype))


def test_copies_between_tiles_and_dimensions_of_one(rng):
    @T.prim_func
    def copies(A: T.Buffer((3, 20, 40), "float32"), B: T.Buffer((20, 1, 40), "float16")):
        with tile.kernel(3) as b:
            whole = tile.shared((2, 20, 40), "float32")
            part = tile.fragment((10, 1, 16), "float32")
            half = tile.shared((20, 40), "float16")
            tile.fill(whole, 1)
            tile.copy(A[b, 0, 0], whole[1, 0:20, 0:40])
            tile.cast(whole[1, 0:20, 0:40], half)
            tile.copy(whole[1, 5:15, 8:24], part)
            tile.copy(part, half[10:20, 24:40])
            if b == 2:
                tile.copy(half, B)

    agree(copies, normal(rng, (3, 20, 40)), poison((20, 1, 40), "float16"))


def test_copies_that_start_beyond_a_tensor(rng):
    """The rows that a tensor says are used may be none of it: zeros are read and nothing is written."""

    @T.prim_func
    def copies(
        starts: T.Buffer((6,), "int32"),
        A: T.Buffer((10, 20), "float32"),
        B: T.Buffer((6, 4, 24), "float32"),
        C: T.Buffer((10, 20), "float32"),
    ):
        with tile.kernel(6) as b:
            t = tile.shared((4, 24), "float32")
            tile.copy(A[starts[b], starts[b]], t)
            tile.copy(t, B[b, 0, 0])
            tile.fill(t, -1)
            tile.copy(t[0, 0:24], C[starts[b], starts[b] + 1])

    starts = np.array([0, 9, 7, 13, 40, 4], "int32")
    agree(copies, starts, normal(rng, (10, 20)), poison((6, 4, 24)), poison((10, 20)))


def test_copies_from_tensor_to_tensor(rng):
    @T.prim_func
    def copies(A: T.Buffer((10, 20), "float32"), B: T.Buffer((11, 18), "float16")):
        with tile.kernel(3) as i:
            tile.copy(A[i * 4 : i * 4 + 4, 3:27], B[i * 4 : i * 4 + 4, 0:24])

    agree(copies, normal(rng, (10, 20)), poison((11, 18), "float16"))


def test_fill_sets_a_slice(rng):
    @T.prim_func
    def fills(A: T.Buffer((8, 8), "int32"), B: T.Buffer((4, 24), "float32")):
        with tile.kernel(1) as i:
            t = tile.shared((8, 8), "int32")
            tile.fill(t, 3)
            tile.fill(t[2:4, 1:8], i - 5)
            tile.copy(t, A)
            tile.fill(B[1:3, 0:24], 0.5)

    agree(fills, poison((8, 8), "int32"), poison((4, 24)))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint32"])
def test_atomic_copies_add_up(rng, dtype):
    """Many blocks add to the same elements at once; the sums of small whole numbers are exact in every order."""

    @T.prim_func
    def adds(A: T.Buffer((64, 40), dtype), B: T.Buffer((3, 40), dtype)):
        with tile.kernel(16) as i:
            t = tile.fragment((4, 48), dtype)
            tile.copy(A[i * 4, 0], t)
            tile.copy(t, B[0:4, 0:48], atomic="add")

    a = rng.integers(0, 4, (64, 40)).astype(np.dtype(dtype))
    agree(adds, a, np.ones((3, 40), np.dtype(dtype)))


def test_atomic_sums_of_bfloat16_are_rounded_to_nearest(rng):
    """Sums of any bits, denormals, infinities and NaNs among them; ties go to even."""

    @T.prim_func
    def adds(A: T.Buffer((64, 64), "bfloat16"), B: T.Buffer((64, 64), "bfloat16")):
        with tile.kernel(1) as _:
            t = tile.fragment((64, 64), "bfloat16")
            tile.copy(A, t)
            tile.copy(t, B, atomic="add")

    a, b = (rng.integers(0, 1 << 16, (64, 64)).astype("uint16").view("bfloat16") for _ in range(2))
    with np.errstate(all="ignore"):
        expected = (a.astype("float32") + b.astype("float32")).astype("bfloat16")
    tile.compile(adds)(a, b)
    nan = np.isnan(expected.astype("float32"))
    assert (np.isnan(b.astype("float32")) == nan).all() and 0 < nan.sum() < nan.size
    assert (b.view("uint16") == expected.view("uint16"))[~nan].all()


# ---- Reductions --------------------------------------------------------------------------------------------------


def reduction(shape, axis, kind, dtype, accumulate):
    kept = tuple(extent for dim, extent in enumerate(shape) if dim != axis)
    word = {"sum": tile.sum, "max": tile.max, "min": tile.min}[kind]

    @T.prim_func
    def reduces(A: T.Buffer(shape, dtype), B: T.Buffer(kept, "float32" if "float" in dtype else "int32")):
        with tile.kernel(1) as _:
            t = tile.fragment(shape, dtype)
            r = tile.fragment(kept, "float32" if "float" in dtype else "int32")
            tile.copy(A, t)
            tile.copy(B, r)
            word(t, r, axis, accumulate=accumulate)
            tile.copy(r, B)

    return reduces, kept


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    "shape, axis",
    [
        ((16, 64), 1),
        ((16, 64), 0),
        ((7, 33), 1),
        ((7, 33), 0),
        ((3, 5, 20), 1),
        ((3, 20, 7), 2),
        ((4, 1), 1),
        ((2, 131), 1),
    ],
)
def test_reductions(rng, kind, accumulate, shape, axis):
    func, kept = reduction(shape, axis, kind, "float32", accumulate)
    agree(func, normal(rng, shape), normal(rng, kept))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "int8", "int32"])
def test_reductions_of_other_types(rng, dtype):
    for axis in (0, 1):
        func, kept = reduction((12, 40), axis, "sum", dtype, True)
        agree(func, normal(rng, (12, 40), dtype), normal(rng, kept, "float32" if "float" in dtype else "int32"))


def test_maximum_of_infinities(rng):
    func, kept = reduction((4, 40), 1, "max", "float32", False)
    agree(func, np.full((4, 40), -np.inf, "float32"), poison(kept))


# ---- Points ------------------------------------------------------------------------------------------------------


def test_parallel_broadcasts_masks_and_names(rng):
    @T.prim_func
    def points(A: T.Buffer((20, 40), "float32"), bias: T.Buffer((40,), "float16"), B: T.Buffer((20, 40), "float32")):
        with tile.kernel(2) as b:
            t = tile.fragment((10, 40), "float32")
            kept = tile.fragment((10, 40), "float32")
            tile.copy(A[b * 10, 0], t)
            with tile.parallel(10, 40) as (i, j):
                y = t[i, j] + T.Cast("float32", bias[j])
                kept[i, j] = T.if_then_else(j <= i + b * 10, y, T.float32(float("-inf")))
                if y > T.float32(0):
                    t[i, j] = y * T.float32(2)
                    if j % 3 == 0:
                        t[i, j] = t[i, j] - T.float32(1)
                else:
                    t[i, j] = T.min(y, kept[i, j])
            with tile.parallel(10, 40) as (i, j):
                if kept[i, j] < T.float32(0):
                    t[i, j] = T.float32(0)
            tile.copy(t, B[b * 10, 0])

    agree(points, normal(rng, (20, 40)), normal(rng, (40,), "float16"), poison((20, 40)))


def test_parallel_gathers_and_scatters(rng):
    """Under a condition, an index may be out of bounds where it isn't used."""

    @T.prim_func
    def points(
        A: T.Buffer((50, 24), "float32"),
        rows: T.Buffer((30,), "int32"),
        B: T.Buffer((30, 24), "float32"),
        C: T.Buffer((50, 24), "float32"),
    ):
        with tile.kernel(2) as b:
            t = tile.shared((16, 24), "float32")
            with tile.parallel(16, 24) as (i, j):
                row = b * 16 + i
                t[i, j] = T.if_then_else(row < 30, A[rows[T.min(row, 29)], j], T.float32(0))
            with tile.parallel(16, 24, distinct=True) as (i, j):
                if b * 16 + i < 30:
                    B[b * 16 + i, j] = t[i, j]
                    C[rows[b * 16 + i], 23 - j] = t[i, j] + T.float32(1)
            with tile.parallel(24, 16, distinct=True) as (j, i):
                if b * 16 + i < 30 and t[i, j] > T.float32(0):
                    C[rows[b * 16 + i], 23 - j] = T.float32(0)

    rows = rng.permutation(50)[:30].astype("int32")
    agree(points, normal(rng, (50, 24)), rows, poison((30, 24)), normal(rng, (50, 24)))


@pytest.mark.parametrize("dtype", [*FLOATS, *INTS])
def test_parallel_computes_in_every_type(rng, dtype):
    @T.prim_func
    def points(A: T.Buffer((9, 40), dtype), B: T.Buffer((40, 9), dtype), C: T.Buffer((9, 40), "float32")):
        with tile.kernel(1) as _:
            t = tile.shared((9, 40), dtype)
            tile.copy(A, t)
            with tile.parallel(9, 40) as (i, j):
                C[i, j] = T.Cast("float32", t[i, j]) * T.float32(0.5) + T.Cast("float32", A[i, j])
                B[j, i] = T.Cast(dtype, T.Cast("float32", t[i, j]) * T.float32(2))

    agree(points, normal(rng, (9, 40), dtype), poison((40, 9), dtype), poison((9, 40)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_narrow_numbers_are_computed_with_in_float32(rng, dtype):
    """Expressions whose type is narrow are rounded once, where they are stored or cast."""
    two = 2.0

    @T.prim_func
    def points(A: T.Buffer((9, 40), dtype), B: T.Buffer((9, 40), dtype), C: T.Buffer((9, 40), "float32")):
        with tile.kernel(1) as _:
            t = tile.shared((9, 40), dtype)
            tile.copy(A, t)
            with tile.parallel(9, 40) as (i, j):
                y = T.max(t[i, j] * t[i, j], T.Cast(dtype, T.float32(two))) - A[i, j]
                if t[i, j] > A[i, 39 - j]:
                    B[i, j] = T.if_then_else(j < 20, y, T.sqrt(y + y))
                else:
                    B[i, j] = T.Select(j < 20, t[i, j], T.exp(t[i, j]))
                C[i, j] = T.Cast("float32", t[i, j]) + T.Cast("float32", T.min(t[i, j], A[0, j]))
            tile.copy(t, A)

    agree(points, np.abs(normal(rng, (9, 40), dtype)), poison((9, 40), dtype), poison((9, 40)))


def test_parallel_of_one_three_and_single_dimensions(rng):
    @T.prim_func
    def points(A: T.Buffer((3, 5, 7), "float32"), s: T.Buffer((5,), "float32"), B: T.Buffer((3, 5, 7), "float32")):
        with tile.kernel(1) as _:
            t = tile.fragment((3, 5, 7), "float32")
            r = tile.fragment((5, 1), "float32")
            tile.copy(A, t)
            with tile.parallel(5, 1) as (i, j):
                r[i, j] = s[i] * s[i]
            with tile.parallel(3, 5, 7) as (i, j, k):
                t[i, j, k] = t[i, j, k] / r[j, 0]
            tile.copy(t, B)

    agree(points, normal(rng, (3, 5, 7)), normal(rng, (5,)) + np.float32(3), poison((3, 5, 7)))


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"])
def test_bits_of_floats(dtype, signed):
    """A number by its bits, and its bits, of all that are finite: what is computed with as float32 is of its type."""
    width = np.dtype(dtype).itemsize
    whole = f"{'' if signed else 'u'}int{8 * width}"
    bits = np.arange(2 ** min(8 * width, 16), dtype="uint32") << (16 if width == 4 else 0)
    bits = bits.astype(f"uint{8 * width}").view(whole)
    with np.errstate(invalid="ignore"):
        bits = bits[np.isfinite(bits.view(dtype).astype("float64"))][:, None]

    @T.prim_func
    def both(
        B: T.Buffer(bits.shape, whole),
        X: T.Buffer(bits.shape, dtype),
        half: T.Buffer(bits.shape, "float32"),
        again: T.Buffer(bits.shape, whole),
        flipped: T.Buffer(bits.shape, whole),
    ):
        with tile.kernel(1), tile.parallel(*bits.shape) as (i, j):
            half[i, j] = T.cast(T.reinterpret(dtype, B[i, j]), "float32") * T.float32(0.5)
            again[i, j] = T.reinterpret(whole, X[i, j])
            flipped[i, j] = T.reinterpret(whole, T.reinterpret(dtype, B[i, j]) * T.cast(T.float32(-1), dtype))

    numbers = bits.view(dtype)
    results = [np.zeros(bits.shape, kind) for kind in ("float32", whole, whole)]
    for check_bounds in (False, True):
        _, _, half, again, flipped = run(both, bits, numbers, *results, check_bounds=check_bounds)
        np.testing.assert_array_equal(half, numbers.astype("float32") * np.float32(0.5))
        np.testing.assert_array_equal(again, bits)
        np.testing.assert_array_equal(flipped, bits ^ np.array(1 << 8 * width - 1).astype(whole))


# ---- Statements in order -----------------------------------------------------------------------------------------


def test_loops_whose_bounds_are_read(rng):
    @T.prim_func
    def loops(
        first: T.Buffer((4,), "int32"),
        count: T.Buffer((4,), "int32"),
        A: T.Buffer((64, 24), "float32"),
        B: T.Buffer((4, 24), "float32"),
        C: T.Buffer((4,), "int32"),
    ):
        with tile.kernel(4) as b:
            t = tile.shared((8, 24), "float32")
            total = tile.fragment((24,), "float32")
            seen = tile.local((2,), "int32")
            begin = first[b]
            tile.fill(total, 0)
            seen[0] = 0
            seen[1] = 0
            for k in tile.pipelined(begin, count[b]):
                tile.copy(A[k * 8, 0], t)
                tile.sum(t, total, 0, accumulate=True)
                seen[0] = seen[0] + k
                for _ in range(k):
                    seen[1] = seen[1] + 1
            if seen[0] > 5:
                tile.copy(total, B[b, 0])
            else:
                tile.fill(B[b, 0:24], -1)
            with tile.parallel(1) as i:
                C[b + i] = seen[0] + seen[1]

    first, count = np.array([0, 2, 3, 8], "int32"), np.array([8, 3, 5, 8], "int32")
    agree(loops, first, count, normal(rng, (64, 24)), poison((4, 24)), poison((4,), "int32"))


@pytest.mark.parametrize("rows", [1, 16, 45])
@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_sizes_known_at_run_time(rng, rows, kind):
    @T.prim_func
    def scales(a: T.handle, b: T.handle):
        n = T.int32() if kind == "int32" else T.int64()
        A = T.match_buffer(a, (n, 40), "float32")
        B = T.match_buffer(b, (n, 40), "float32")
        with tile.kernel(tile.cdiv(T.Cast("int32", n), 16)) as i:
            t = tile.fragment((16, 40), "float32")
            tile.copy(A[i * 16, 0], t)
            with tile.parallel(16, 40) as (j, k):
                t[j, k] = T.if_then_else(i * 16 + j < T.Cast("int32", n) - 1, t[j, k], T.float32(2))
            tile.copy(t, B[i * 16, 0])

    agree(scales, normal(rng, (rows, 40)), poison((rows, 40)))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_grids_and_their_options(dimensions):
    extents = (3, 4, 5)[:dimensions]

    @T.prim_func
    def numbers(A: T.Buffer(extents, "int32")):
        with tile.kernel(*extents, threads=128, swizzle=2, persistent=True) as point, tile.parallel(1) as i:
            if dimensions == 1:
                A[point] = point + i
            elif dimensions == 2:
                A[point[0], point[1]] = point[0] * 4 + point[1] + i
            else:
                A[point[0], point[1], point[2]] = (point[0] * 4 + point[1]) * 5 + point[2] + i

    (found,) = run(numbers, poison(extents, "int32"))
    np.testing.assert_array_equal(found.ravel(), np.arange(found.size))


def test_no_remainder_by_the_slowest_extent(rng):
    """Upstream's simplifier would be busy with one of an extent that isn't known for longer than LLVM."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    batches, rows = tirx.Cast("int32", n), tirx.Cast("int32", m)

    @T.prim_func
    def copied(A: T.Buffer((n, 3, m, 20), "float32"), B: T.Buffer((n, 3, m, 20), "float32")):
        with tile.kernel(batches, 3, tile.cdiv(rows, 4)) as (b, h, i):
            x = tile.shared((4, 20), "float32")
            tile.copy(A[b, h, i * 4, 0], x)
            tile.copy(x, B[b, h, i * 4, 0])

    divisors = []
    lowered = cpu.lower(cpu.decide(tile.read(copied), target()))
    tvm_ffi.structural_walk(lowered.body, (tirx.FloorMod, lambda node: divisors.append(variables_of(node.b))))
    assert divisors and not any(var.same_as(n) for found in divisors for var in found)
    for shape in ((1, 3, 4, 20), (5, 3, 7, 20), (2, 3, 8, 20)):
        given = normal(rng, shape)
        np.testing.assert_array_equal(run(copied, given, poison(shape))[1], given)


# ---- Any sizes ---------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(st.data())
def test_row_statistics_of_any_size(data):
    m, n = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 90))
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 3, 8, 16, 40, 64]))

    @T.prim_func
    def statistics(A: T.Buffer((m, n), "float32"), B: T.Buffer((m, n), "float32"), C: T.Buffer((m,), "float32")):
        with tile.kernel(tile.cdiv(m, rows)) as i:
            t = tile.shared((rows, columns), "float32")
            squares = tile.fragment((rows, columns), "float32")
            total = tile.fragment((rows,), "float32")
            tile.fill(total, 0)
            for k in tile.pipelined(tile.cdiv(n, columns)):
                tile.copy(A[i * rows, k * columns], t)
                with tile.parallel(rows, columns) as (r, c):
                    squares[r, c] = t[r, c] * t[r, c]
                tile.sum(squares, total, accumulate=True)
            tile.copy(total, C[i * rows])
            for k in range(tile.cdiv(n, columns)):
                tile.copy(A[i * rows, k * columns], t)
                with tile.parallel(rows, columns) as (r, c):
                    t[r, c] = t[r, c] + total[r]
                tile.copy(t, B[i * rows, k * columns])

    rng = np.random.default_rng(m * 100 + n)
    agree(statistics, normal(rng, (m, n)), poison((m, n)), poison((m,)))
