"""What blocks compute: which are sums, copies, shifts, contractions and pointwise."""

import pytest
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.analysis.patterns import (
    Pattern,
    factors_of,
    is_copy,
    is_move,
    is_pointwise,
    is_sum,
    pattern_of,
    shift_of,
    summed,
)


def block_of(statement, init=0.0):
    """The block `X[i] = statement(A, X, i, k)` with an init."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 4), "float32"), X: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 4):
            with T.sblock("b"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    X[vi] = T.float32(init)
                X[vi] = statement(A, X, vi, vk)

    sch = s_tir.Schedule(program)
    return sch.get(sch.get_sblock("b"))


SUMS = {
    "sum": (lambda A, X, i, k: X[i] + A[i, k], 0.0, True),
    "turned round": (lambda A, X, i, k: A[i, k] + X[i], 0.0, True),
    "from one": (lambda A, X, i, k: X[i] + A[i, k], 1.0, False),
    "of a product": (lambda A, X, i, k: X[i] + A[i, k] * A[k, i], 0.0, False),
    "maximum": (lambda A, X, i, k: T.max(X[i], A[i, k]), 0.0, False),
    "doubled": (lambda A, X, i, k: X[i] + X[i], 0.0, False),
}


@pytest.mark.parametrize("name", SUMS)
def test_is_sum(name):
    statement, init, expected = SUMS[name]
    assert is_sum(block_of(statement, init)) is expected


COPIES = {
    "copy": (lambda A, i, j: A[i, j], True),
    "transposed": (lambda A, i, j: A[j, i], False),
    "shifted": (lambda A, i, j: A[i, 3 - j], False),
    "scaled": (lambda A, i, j: A[i, j] * T.float32(2), False),
    "constant": (lambda A, i, j: T.float32(2), False),
}


@pytest.mark.parametrize("name", COPIES)
def test_is_copy(name):
    statement, expected = COPIES[name]

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = statement(A, vi, vj)

    sch = s_tir.Schedule(program)
    assert is_copy(sch.get(sch.get_sblock("b"))) is expected


def test_reduction_is_no_copy():
    assert not is_copy(block_of(lambda A, X, i, k: X[i] + A[i, k]))


def copying(statement, extents=(3, 4)):
    """The block `B[i, j] = statement(A, i, j)`."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((3, 4), "float32"), B: T.Buffer(extents, "float32")):
        for i, j in T.grid(*extents):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = statement(A, vi, vj)

    sch = s_tir.Schedule(program)
    return sch.get(sch.get_sblock("b"))


SHIFTS = {
    "none": (lambda A, i, j: A[i, j], 0),
    "to the next": (lambda A, i, j: A[(i + 2) % 3, j], 1),
    "from the next": (lambda A, i, j: A[(i + 1) % 3, j], 2),
    "by a negative": (lambda A, i, j: A[(i - 1) % 3, j], 1),
    "by more than once around": (lambda A, i, j: A[(i + 7) % 3, j], 2),
    "mirrored": (lambda A, i, j: A[2 - i, j], None),
    "past the end": (lambda A, i, j: A[i + 1, j], None),
    "of another period": (lambda A, i, j: A[(i + 1) % 4, j], None),
    "both dimensions": (lambda A, i, j: A[(i + 1) % 3, (j + 1) % 4], None),
    "scaled": (lambda A, i, j: A[(i + 1) % 3, j] * T.float32(2), None),
    "constant": (lambda A, i, j: T.float32(2), None),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_shift_of(name):
    statement, expected = SHIFTS[name]
    assert shift_of(copying(statement)) == expected


def test_shift_of_another_number_of_stages():
    assert shift_of(copying(lambda A, i, j: A[(i + 1) % 3, j], (2, 4))) is None


SUMMED = {
    "sum": (lambda A, X, i, k: X[i] + A[i, k], True),
    "of a cast": (lambda A, X, i, k: X[i] + T.Cast("float32", T.Cast("float16", A[i, k])), False),
    "of a product": (lambda A, X, i, k: X[i] + A[i, k] * A[k, i], False),
    "doubled": (lambda A, X, i, k: X[i] + X[i], False),
    "maximum": (lambda A, X, i, k: T.max(X[i], A[i, k]), False),
}


@pytest.mark.parametrize("name", SUMMED)
def test_summed(name):
    statement, expected = SUMMED[name]
    load = summed(block_of(statement))
    assert (load is not None and load.source.name == "A") is expected


PATTERNS = {
    "copy": (lambda A, B, i, j, k: A[i, j], None, Pattern.COPY),
    "transposed": (lambda A, B, i, j, k: A[j, i], None, Pattern.POINTWISE),
    "scaled": (lambda A, B, i, j, k: A[i, j] * T.float32(2), None, Pattern.POINTWISE),
    "in place": (lambda A, B, i, j, k: B[i, j] + A[i, j], None, Pattern.POINTWISE),
    "in place over a reduction": (lambda A, B, i, j, k: B[i, j] + A[i, k], 0, Pattern.OPAQUE),
    "sum": (lambda A, B, i, j, k: B[i, j] + A[i, k], 1, Pattern.REDUCTION),
    "sum of squares": (lambda A, B, i, j, k: B[i, j] + A[i, k] * A[i, k], 1, Pattern.REDUCTION),
    "maximum": (lambda A, B, i, j, k: T.max(B[i, j], A[i, k]), 1, Pattern.REDUCTION),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name):
    """The second is None without a reduction, and otherwise whether there is an init."""
    statement, init, expected = PATTERNS[name]

    @T.prim_func(s_tir=True)
    def spatial(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
        for i, j in T.grid(4, 4):
            with T.sblock("b"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = statement(A, B, vi, vj, vj)

    @T.prim_func(s_tir=True)
    def updating(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
        for i, j, k in T.grid(4, 4, 4):
            with T.sblock("b"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                B[vi, vj] = statement(A, B, vi, vj, vk)

    @T.prim_func(s_tir=True)
    def reducing(A: T.Buffer((4, 4), "float32"), B: T.Buffer((4, 4), "float32")):
        for i, j, k in T.grid(4, 4, 4):
            with T.sblock("b"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    B[vi, vj] = T.float32(0)
                B[vi, vj] = statement(A, B, vi, vj, vk)

    sch = s_tir.Schedule({None: spatial, 0: updating, 1: reducing}[init])
    block = sch.get(sch.get_sblock("b"))
    assert pattern_of(block) is expected
    assert is_pointwise(block) is (expected in (Pattern.COPY, Pattern.POINTWISE))
    assert is_move(block) is (name in ("copy", "transposed"))


PRODUCTS = {
    "plain": ("float32", lambda C, a, b: C + a * b, Pattern.CONTRACTION, True),
    "of casts": ("float16", lambda C, a, b: C + T.Cast("float32", a) * T.Cast("float32", b), Pattern.CONTRACTION, True),
    "scaled": ("float32", lambda C, a, b: C + a * b * T.float32(2), Pattern.CONTRACTION, False),
    "largest": ("float32", lambda C, a, b: T.max(C, a * b), Pattern.REDUCTION, False),
    "sum": ("float32", lambda C, a, b: C + (a + b), Pattern.REDUCTION, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_contraction(name):
    dtype, statement, expected, has_factors = PRODUCTS[name]

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 4), dtype), B: T.Buffer((4, 4), dtype), C: T.Buffer((4, 4), "float32")):
        for i, j, k in T.grid(4, 4, 4):
            with T.sblock("b"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = statement(C[vi, vj], A[vi, vk], B[vk, vj])

    sch = s_tir.Schedule(program)
    block = sch.get(sch.get_sblock("b"))
    assert pattern_of(block) is expected
    factors = factors_of(block)
    assert (factors is not None) is has_factors
    if factors is not None:
        assert [load.source.name for load in factors] == ["A", "B"]
