"""Programs that the fuzzer found, each as small as it got."""

import shutil

import numpy as np
import pytest
from interpreter import interpret
from tvm.script import from_source
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.machines.cache import Cache


def test_remainders_in_two_places_of_a_product_whose_rows_end_early(tmp_path):
    @T.prim_func
    def func(A: T.Buffer((96, 100), "float32"), B: T.Buffer((257, 100), "float32"), Y: T.Buffer((96, 257), "float32")):
        with tile.kernel(2, 3) as (m, n):
            a = tile.shared((64, 32), "float32")
            b = tile.shared((128, 32), "float32")
            c = tile.fragment((64, 128), "float32")
            tile.fill(c, 0)
            for k in range(4):
                tile.copy(A[m * 64, k * 32], a)
                tile.copy(B[n * 128, k * 32], b)
                tile.gemm(a, b, c, transpose_b=True)
            tile.copy(c, Y[m * 64, n * 128])

    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, shape).astype("float32") for shape in ((96, 100), (257, 100))]
    out = np.full((96, 257), np.nan, "float32")
    expected = interpret(func, *arrays, out)[2]
    tile.compile(func, "llvm", Cache(tmp_path))(*arrays, out)
    np.testing.assert_array_equal(out, expected)


def test_vectors_of_a_swizzled_tile_are_loaded_as_one_piece(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")

    @T.prim_func
    def func(
        X: T.Buffer((64, 64), "bfloat16"),
        A: T.Buffer((64, 64), "float16"),
        B: T.Buffer((64, 64), "float16"),
        Y: T.Buffer((64, 64), "float16"),
        Z: T.Buffer((64, 64), "float32"),
    ):
        with tile.kernel(1):
            t = tile.shared((64, 64), "bfloat16")
            x = tile.fragment((64, 64), "bfloat16")
            a = tile.shared((64, 64), "float16")
            b = tile.shared((64, 64), "float16")
            c = tile.fragment((64, 64), "float32")
            tile.copy(X, x)
            with tile.parallel(64, 64) as (i, j):
                t[i, j] = x[i, j]
            tile.fill(c, 0)
            for k in tile.pipelined(1):
                tile.copy(A[0, k * 64], a)
                tile.copy(B[k * 64, 0], b)
                tile.gemm(a, b, c)
            tile.copy(t, Y)
            tile.copy(c, Z)

    assert "longlong4" not in tile.compile(func, "cuda:sm_90a", Cache(tmp_path)).source  # a vector of indices


def test_a_division_that_an_unrolled_loop_reaches_with_a_zero(tmp_path):
    """Under its own condition it is not computed, and nobody may compute it beforehand."""

    @T.prim_func
    def func(Y: T.Buffer((16, 17), "float16")):
        with tile.kernel(1):
            t = tile.fragment((16, 17), "float16")
            with tile.parallel(16, 17) as (i, j):
                t[i, j] = T.cast(T.if_then_else(j != 0, T.truncdiv(i, j), 7), "float16")
            tile.copy(t, Y)

    out = np.full((16, 17), np.nan, "float16")
    tile.compile(func, "llvm", Cache(tmp_path))(out)
    i, j = np.indices((16, 17))
    np.testing.assert_array_equal(out, np.where(j == 0, 7, i // np.maximum(j, 1)))
    if shutil.which("nvcc") is not None:
        tile.compile(func, "cuda:sm_90a", Cache(tmp_path))


def right(func, tmp_path, *inputs: np.ndarray, outputs: int) -> None:
    """The program on inputs and poisoned outputs, the last parameters, beside the interpreter."""
    params = tile.read(func).params[len(inputs) :]
    assert len(params) == outputs
    poisoned = [np.full(p.shape, np.nan if "float" in p.dtype else 1).astype(p.dtype) for p in params]
    expected = interpret(func, *inputs, *poisoned)[len(inputs) :]
    tile.compile(func, "llvm", Cache(tmp_path))(*inputs, *poisoned)
    for out, want in zip(poisoned, expected, strict=True):
        np.testing.assert_array_equal(out.astype(want.dtype), want)


def test_a_divisor_that_a_condition_keeps_from_0_computed_before_the_condition(tmp_path):
    @T.prim_func
    def func(
        X: T.Buffer((96, 384), "float16"),
        A: T.Buffer((96, 64), "bfloat16"),
        B: T.Buffer((64, 384), "bfloat16"),
        bins: T.Buffer((64,), "int32"),
        H: T.Buffer((2, 128), "int32"),
        Y: T.Buffer((96, 384), "float32"),
        Z: T.Buffer((96, 384), "bfloat16"),
    ):
        with tile.kernel(2, 3) as (m, n):
            t = tile.fragment((64, 128), "float32")
            a = tile.shared((64, 64), "bfloat16")
            b = tile.shared((64, 128), "bfloat16")
            held = tile.fragment((64, 64), "bfloat16")
            c = tile.fragment((64, 128), "float32")
            z = tile.shared((64, 128), "bfloat16")
            h = tile.shared((64, 128), "int32")
            tile.copy(X[m * 64, n * 128], t)
            tile.fill(c, 0)
            for k in range(1):
                tile.copy(A[m * 64, k * 64], a)
                tile.copy(B[k * 64, n * 128], b)
                tile.copy(a, held)
                tile.gemm(held, b, c)
            with tile.parallel(64, 128) as (i, j):
                z[i, j] = T.cast(
                    T.floormod(
                        T.if_then_else(
                            T.NE(m, 0),
                            T.floormod(T.bitwise_xor(T.Select(T.LE(n, j), m, T.int32(-1)), n), m),
                            7,
                        ),
                        61,
                    )
                    - 20,
                    "bfloat16",
                )
            tile.copy(c, h)
            for row in range(64):
                tile.copy(h[row, 0:128], H[bins[row], 0], atomic="add")
            tile.copy(t, Y[m * 64, n * 128])
            tile.copy(z, Z[m * 64, n * 128])

    rng = np.random.default_rng(0)
    tensors = [(96, 384, "float16"), (96, 64, "bfloat16"), (64, 384, "bfloat16")]
    inputs = [rng.integers(-3, 4, shape).astype(dtype) for *shape, dtype in tensors]
    right(func, tmp_path, *inputs, rng.integers(0, 2, 64).astype("int32"), outputs=3)


def test_a_quotient_by_a_negative_number_in_bounds_that_upstream_has_wrong(tmp_path):
    @T.prim_func
    def func(X: T.Buffer((256, 96), "int32"), Y: T.Buffer((256, 96), "int32"), Z: T.Buffer((256, 96), "int32")):
        with tile.kernel(2, 2) as (m, n):
            t = tile.shared((128, 64), "int32")
            z = tile.fragment((128, 64), "int32")
            tile.copy(X[m * 128, n * 64], t)
            with tile.parallel(128, 64) as (i, j):
                if m * 128 + i < 256 and j != 1:
                    t[i, j] = T.if_then_else(i > j, t[i, j] - t[i, j], t[i, j])
            with tile.parallel(128, 64) as (i, j):
                z[i, j] = T.cast(
                    T.floormod(
                        T.cast(
                            T.cast((T.cast(T.cast((T.floordiv(n, T.int32(-2))) + i, "uint16"), "int32")) + n, "int8"),
                            "int32",
                        ),
                        61,
                    )
                    - 20,
                    "int32",
                )
            tile.copy(t, Y[m * 128, n * 64], atomic="add")
            tile.copy(z, Z[m * 128, n * 64])

    right(func, tmp_path, np.random.default_rng(0).integers(-3, 4, (256, 96)).astype("int32"), outputs=2)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "to", "drawn"),
    [
        ("min", "float32", "int8", (-100, 400)),
        ("max", "float32", "int8", (-400, 100)),
        ("min", "int32", "int8", (-100, 400)),
        ("max", "int32", "uint8", (-400, 100)),
        ("sum", "float16", "int32", (0, 9)),
    ],
)
def test_what_is_reduced_to_integers_is_converted_once(kind, dtype, to, drawn, accumulate, tmp_path):
    """134 is no number of int8, and was compared as -122; of 0.5 + 0.5 each half was converted to 0."""
    func = from_source(
        f"""@T.prim_func
def func(X: T.Buffer((20, 33), "{dtype}"), Y: T.Buffer((20,), "{to}"), Z: T.Buffer((33,), "{to}")):
    with tile.kernel(1):
        x = tile.fragment((20, 33), "{dtype}")
        y = tile.fragment((20,), "{to}")
        z = tile.fragment((33,), "{to}")
        tile.copy(X, x)
        tile.fill(y, 3)
        tile.fill(z, 5)
        tile.{kind}(x, y, 1, accumulate={accumulate})
        tile.{kind}(x, z, 0, accumulate={accumulate})
        tile.copy(y, Y)
        tile.copy(z, Z)
""",
        extra_vars={"tile": tile, "T": T},
    )
    x = np.random.default_rng(1).integers(*drawn, (20, 33)).astype(dtype)
    x[:, 7], x[4] = 9, 11  # each result is a number of the type
    if kind == "sum":
        x += np.float16(0.5)
    right(func, tmp_path, x, outputs=2)
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        tile.compile(func, target, Cache(tmp_path))


def test_choices_between_truth_values_are_conditions_of_others(tmp_path):
    """As a choice between 1 and 0 each took upstream several times as long: this took a minute to compile."""

    @T.prim_func
    def func(I: T.Buffer((70,), "int32"), Y: T.Buffer((70, 40), "int32"), Z: T.Buffer((70, 40), "bfloat16")):
        with tile.kernel(5, 3) as (m, n):
            y = tile.shared((16, 16), "int32")
            z = tile.shared((16, 16), "bfloat16")
            with tile.parallel(16, 16) as (i, j):
                within = T.Select(n < m, m >= n, n > I[m * 14])
                y[i, j] = T.Select(
                    T.Select(j < 3, T.Select(i > 2, within, I[j] > 0), within),
                    T.if_then_else(j != 0, T.floordiv(8, j), 7),
                    m // 2 + j + n,
                )
                z[i, j] = T.Cast("bfloat16", T.Select(T.Select(I[i] < j, j < n, within), i, -j))
            tile.copy(y, Y[m * 16, n * 16])
            tile.copy(z, Z[m * 16, n * 16])

    right(func, tmp_path, np.random.default_rng(0).integers(-3, 4, 70).astype("int32"), outputs=2)
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        tile.compile(func, target, Cache(tmp_path))
