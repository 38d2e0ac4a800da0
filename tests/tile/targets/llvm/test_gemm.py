"""Products on a CPU: panels, register tiles, operands read in place, every type and tail."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_cpu import agree, normal, poison, target
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.layout import Layout
from tvm_axe.machines.register_tiles import half_cycles, register_tile
from tvm_axe.tile import read
from tvm_axe.tile.targets import llvm as cpu


def matmul(m, n, k, block, dtype="float32", out="float32", transpose_a=False, transpose_b=False, accumulate=True):
    """C = A B, or with each operand transposed; without `accumulate` only the last tile along k counts."""
    bm, bn, bk = block
    a_shape, b_shape = ((k, m) if transpose_a else (m, k)), ((n, k) if transpose_b else (k, n))
    a_tile, b_tile = ((bk, bm) if transpose_a else (bm, bk)), ((bn, bk) if transpose_b else (bk, bn))
    sums = "float32" if "float" in dtype else "int32"

    @T.prim_func
    def matmul(A: T.Buffer(a_shape, dtype), B: T.Buffer(b_shape, dtype), C: T.Buffer((m, n), out)):
        with tile.kernel(tile.cdiv(m, bm), tile.cdiv(n, bn)) as (i, j):
            a = tile.shared(a_tile, dtype)
            b = tile.shared(b_tile, dtype)
            c = tile.fragment((bm, bn), sums)
            tile.fill(c, 0)
            for p in tile.pipelined(tile.cdiv(k, bk)):
                if transpose_a:
                    tile.copy(A[p * bk, i * bm], a)
                else:
                    tile.copy(A[i * bm, p * bk], a)
                if transpose_b:
                    tile.copy(B[j * bn, p * bk], b)
                else:
                    tile.copy(B[p * bk, j * bn], b)
                tile.gemm(a, b, c, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate)
            tile.copy(c, C[i * bm, j * bn])

    return matmul, a_shape, b_shape


def check(m, n, k, block, dtype="float32", out="float32", mcpu=None, bounds=(False,), **how):
    func, a_shape, b_shape = matmul(m, n, k, block, dtype, out, **how)
    rng = np.random.default_rng(m * n + k)
    arrays = normal(rng, a_shape, dtype), normal(rng, b_shape, dtype), poison((m, n), out)
    agree(func, *arrays, mcpu=mcpu, bounds=bounds)


@pytest.mark.parametrize(
    "sizes",
    [
        (64, 96, 64, (32, 48, 32)),  # nothing is left over
        (100, 75, 50, (32, 48, 16)),  # every dimension has a tail
        (37, 200, 33, (40, 128, 16)),  # several register tiles in both dimensions, a tile longer than the tensor
        (5, 21, 9, (5, 21, 9)),  # columns that fill no vector
        (1, 1, 1, (16, 16, 16)),
        (1, 130, 70, (1, 64, 70)),
        (130, 1, 7, (64, 1, 3)),
    ],
)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(sizes, transpose_a, transpose_b):
    check(*sizes, transpose_a=transpose_a, transpose_b=transpose_b)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_stay_within_bounds(dtype, transpose):
    """Tails in every dimension; `a` read in place only where it is neither narrow nor transposed."""
    check(37, 70, 25, (16, 48, 16), dtype, bounds=(True,), transpose_a=transpose, transpose_b=transpose)


@pytest.mark.parametrize(
    "dtype, out",
    [
        ("float16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float8_e4m3fn", "float32"),
        ("float8_e5m2", "float16"),
        ("int8", "int32"),
        ("uint8", "int32"),
    ],
)
def test_mixed_precision(dtype, out):
    check(40, 50, 33, (16, 32, 16), dtype, out)
    check(40, 50, 33, (16, 32, 16), dtype, out, transpose_a=True, transpose_b=True)


@pytest.mark.parametrize("mcpu", ["x86-64-v3", "x86-64-v2"])
def test_other_instruction_sets(mcpu):
    check(45, 75, 20, (32, 48, 16), mcpu=mcpu)
    check(45, 75, 20, (32, 48, 16), "bfloat16", "float16", transpose_b=True, mcpu=mcpu)
    check(40, 70, 70, (32, 64, 64), "int8", "int32", transpose_b=True, mcpu=mcpu)


def test_overwriting_products():
    """Rows that `a` doesn't have are written as zeros where the product overwrites."""
    check(37, 40, 32, (16, 16, 32), accumulate=False)


@settings(max_examples=10)
@given(
    m=st.integers(1, 70),
    n=st.integers(1, 140),
    k=st.integers(1, 40),
    bm=st.integers(1, 40),
    bn=st.integers(1, 70),
    bk=st.integers(1, 24),
    transpose_b=st.booleans(),
)
def test_matmul_of_any_size(m, n, k, bm, bn, bk, transpose_b):
    check(m, n, k, (bm, bn, bk), transpose_b=transpose_b)


def test_float64_and_products_of_slices():
    """Operands that are parts of tiles, at places that depend on the loop."""

    @T.prim_func
    def slices(A: T.Buffer((24, 40), "float64"), B: T.Buffer((40, 50), "float64"), C: T.Buffer((24, 50), "float64")):
        with tile.kernel(1) as _:
            a = tile.fragment((24, 40), "float64")
            b = tile.shared((2, 40, 50), "float64")
            c = tile.fragment((24, 50), "float64")
            tile.copy(A, a)
            tile.copy(B, b[1, 0:40, 0:50])
            tile.fill(c, 0)
            for h in range(2):
                for p in range(5):
                    tile.gemm(
                        a[h * 12 : h * 12 + 12, p * 8 : p * 8 + 8],
                        b[1, p * 8 : p * 8 + 8, 3:30],
                        c[h * 12 : h * 12 + 12, 3:30],
                    )
            tile.gemm(a, b[1, 0:40, 30:50], c[0:24, 30:50], accumulate=False)
            tile.copy(c, C)

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in ((24, 40), (40, 50))]
    agree(slices, *arrays, poison((24, 50), "float64"))


def test_one_tile_as_both_operands_and_an_operand_from_registers():
    """Attention's two products: keys transposed, and the probabilities times the same keys."""

    @T.prim_func
    def attends(Q: T.Buffer((20, 32), "float16"), K: T.Buffer((50, 32), "float16"), O: T.Buffer((20, 32), "float32")):
        with tile.kernel(2) as i:
            q = tile.shared((16, 32), "float16")
            k = tile.shared((24, 32), "float16")
            s = tile.fragment((16, 24), "float32")
            p = tile.fragment((16, 24), "float16")
            o = tile.fragment((16, 32), "float32")
            tile.copy(Q[i * 16, 0], q)
            tile.fill(o, 0)
            for t in tile.pipelined(3):
                tile.copy(K[t * 24, 0], k)
                tile.gemm(q, k, s, transpose_b=True, accumulate=False)
                with tile.parallel(16, 24) as (r, c):
                    p[r, c] = T.Cast(
                        "float16", T.if_then_else(t * 24 + c < 50, T.exp2(s[r, c] * T.float32(0.1)), T.float32(0))
                    )
                tile.gemm(p, k, o)
            tile.copy(o, O[i * 16, 0])

    rng = np.random.default_rng(0)
    arrays = normal(rng, (20, 32), "float16"), normal(rng, (50, 32), "float16")
    agree(attends, *arrays, poison((20, 32)), epsilon=1e-3)


def test_annotated_layouts():
    """Padded and column-major tiles; the layout of a warp says nothing about a CPU."""
    padded, columns = Layout.parse("S[(16, 24) : (25, 1)]"), Layout.parse("S[(24, 32) : (1, 24)]")
    warp = Layout.parse("S[(2, 8, 8, 4) : (8, 4@laneid, 2, 1@laneid)]")

    @T.prim_func
    def annotated(A: T.Buffer((16, 24), "float32"), B: T.Buffer((24, 32), "float32"), C: T.Buffer((16, 32), "float32")):
        with tile.kernel(1) as _:
            a = tile.shared((16, 24), "float32", layout=padded)
            b = tile.shared((24, 32), "float32", layout=columns)
            c = tile.fragment((16, 32), "float32", layout=warp)
            tile.copy(A, a)
            tile.copy(B, b)
            with tile.parallel(24, 32) as (i, j):
                b[i, j] = b[i, j] + T.float32(1)
            tile.gemm(a, b, c, accumulate=False)
            tile.copy(c, C)

    rng = np.random.default_rng(0)
    agree(annotated, normal(rng, (16, 24)), normal(rng, (24, 32)), poison((16, 32)))
    plan = cpu.decide(read(annotated), target())
    assert [str(s.layout) for s in plan.storage.values()][:2] == [str(padded), str(columns)]
    assert any(d.choice == "not as annotated" and str(warp) in d.reason for d in plan.decisions)


# ---- What is decided ---------------------------------------------------------------------------------------------


def test_an_operand_that_only_products_read_stays_where_it_is():
    plan = cpu.decide(read(matmul(64, 64, 64, (32, 32, 32))[0]), target())
    assert [tile.name for tile in plan.in_place] == ["a"]
    assert "a" not in {tile.name for tile in plan.storage}


@pytest.mark.parametrize("reason", ["transposed", "narrow", "read by another", "source is written", "read first"])
def test_an_operand_is_copied_where(reason):
    dtype = "float16" if reason == "narrow" else "float32"

    @T.prim_func
    def product(A: T.Buffer((64, 32), dtype), B: T.Buffer((32, 32), dtype), C: T.Buffer((32, 32), "float32")):
        with tile.kernel(1) as _:
            a = tile.shared((32, 32), dtype)
            b = tile.shared((32, 32), dtype)
            c = tile.fragment((32, 32), "float32")
            tile.copy(B, b)
            tile.fill(c, 0)
            for p in range(2):
                if reason == "read first":  # noqa: SIM102 (decided here; the next line at run time)
                    if p > 0:
                        tile.gemm(a, b, c)
                tile.copy(A[p * 32, 0], a)
                tile.gemm(a, b, c, transpose_a=reason == "transposed")
                if reason == "read by another":
                    with tile.parallel(32, 32) as (i, j):
                        c[i, j] = c[i, j] + a[i, j]
                elif reason == "source is written":
                    tile.copy(c, A[p * 32, 0])
            tile.copy(c, C)

    assert not cpu.decide(read(product), target()).in_place
    rng = np.random.default_rng(0)
    agree(product, normal(rng, (64, 32), dtype), normal(rng, (32, 32), dtype), poison((32, 32)))


@pytest.mark.parametrize("m, n, k", [(37, 203, 33), (5, 21, 9), (130, 64, 70), (64, 1, 8), (1, 130, 7), (96, 144, 48)])
@pytest.mark.parametrize("block", [(40, 128), (16, 48), (64, 112)])
@pytest.mark.parametrize("mcpu", ["x86-64-v3", None])
def test_sums_that_one_step_makes_are_stored_from_registers(m, n, k, block, mcpu):
    func, a_shape, b_shape = matmul(m, n, k, (*block, k))
    plan = cpu.decide(read(func), target(mcpu) if mcpu else target())
    assert len(plan.at_once) == 1 and "c" not in {tile.name for tile in plan.storage}
    rng = np.random.default_rng([m, n, k])
    agree(func, normal(rng, a_shape), normal(rng, b_shape), poison((m, n)), mcpu=mcpu, bounds=(False, True))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
def test_sums_of_integers_that_one_step_makes_are_stored_from_registers(dtype):
    func, _, _ = matmul(37, 70, 20, (32, 64, 20), dtype, "int32")
    assert len(cpu.decide(read(func), target()).at_once) == 1
    check(37, 70, 20, (32, 64, 20), dtype, "int32")


@pytest.mark.parametrize("rows", [33, 50])
def test_sums_are_stored_in_a_part_of_a_tensor_alone(rows):
    """`a` has fewer rows than the tensor has, or more; what lies around is as it was."""

    @T.prim_func
    def product(
        A: T.Buffer((rows, 20), "float32"), B: T.Buffer((20, 40), "float32"), C: T.Buffer((3, 37, 77), "float32")
    ):
        with tile.kernel(2) as i:
            a = tile.shared((32, 20), "float32")
            b = tile.shared((20, 48), "float32")
            c = tile.fragment((32, 48), "float32")
            tile.copy(A[i * 32, 0], a)
            tile.copy(B, b[:, 0:40])
            tile.fill(b[:, 40:48], 7)
            tile.gemm(a, b, c, accumulate=False)
            tile.copy(c, C[1, i * 32, 33])

    assert cpu.decide(read(product), target()).at_once
    rng = np.random.default_rng(rows)
    before = rng.standard_normal((3, 37, 77)).astype("float32")
    agree(product, normal(rng, (rows, 20)), normal(rng, (20, 40)), before, bounds=(False, True))


@pytest.mark.parametrize(
    "reason", ["two steps", "read by another", "not from zero", "another type", "named behind it", "tensor is read"]
)
def test_sums_are_kept_where(reason):
    out = "float16" if reason == "another type" else "float32"
    steps = 2 if reason == "two steps" else 1

    @T.prim_func
    def product(
        A: T.Buffer((32, 64), "float32"),
        B: T.Buffer((64, 32), "float32"),
        at: T.Buffer((1,), "int32"),
        C: T.Buffer((64, 32), out),
    ):
        with tile.kernel(1) as _:
            a = tile.shared((32, 32), "float32")
            b = tile.shared((32, 32), "float32")
            c = tile.fragment((32, 32), "float32")
            tile.fill(c, 1 if reason == "not from zero" else 0)
            for p in range(steps):
                tile.copy(A[0, p * 32], a)
                tile.copy(B[p * 32, 0], b)
                if reason == "tensor is read":
                    tile.copy(C[0, 0], b)
                tile.gemm(a, b, c)
            if reason == "read by another":
                with tile.parallel(32, 32) as (i, j):
                    c[i, j] = c[i, j] * T.float32(2)
            if reason == "named behind it":
                first = at[0]
                tile.copy(c, C[first, 0])
            else:
                tile.copy(c, C[0, 0])

    assert not cpu.decide(read(product), target()).at_once
    rng = np.random.default_rng(0)
    arrays = normal(rng, (32, 64)), normal(rng, (64, 32)), np.array([17], "int32")
    agree(product, *arrays, normal(rng, (64, 32), out), epsilon=1e-2 if out == "float16" else None)


def test_panels_are_layouts_of_the_layout_algebra():
    """A transposed b of 64 columns and 24 of the sum, on 512-bit vectors: panels of whole register tiles."""
    func, _, _ = matmul(64, 128, 24, (64, 128, 24), transpose_b=True)
    plan = cpu.decide(read(func), target("x86-64-v4"))
    (storage,) = (s for tile_, s in plan.storage.items() if tile_.name == "b")
    _, width = storage.panel
    assert width % 16 == 0 and 128 % width == 0
    assert storage.layout == Layout.parse(f"S[({128 // width}, {width}, 24) : ({24 * width}, 1, {width})]")
    assert any("shared b" in d.subject and d.choice == str(storage.layout) for d in plan.decisions)


@pytest.mark.parametrize("registers, lanes", [(32, 16), (16, 8), (16, 4), (32, 4)])
def test_register_tiles_fit_the_registers(registers, lanes):
    for m in (1, 3, 6, 64, 497):
        for n in (1, 16, 48, 64, 256, 1003):
            rows, vectors = register_tile(m, n, lanes, registers)
            assert 1 <= rows <= m and rows * vectors + vectors + 1 <= registers
            assert (vectors - 1) * lanes < n


def test_fewer_columns_than_a_register_tile_has_take_less_time():
    assert half_cycles(497, 1003, 16, 32) < half_cycles(497, 1024, 16, 32)
    assert half_cycles(6, 64, 16, 32) == 6 * 4 + 1
