"""Tiles of shared memory that leave as a whole: on CPUs beside the interpreter, and what sends them on Hopper."""

import random

import numpy as np
import pytest
from interpreter import interpret
from programs_sent import overwriting, sent
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
COUNTS = np.array([2, 4, 3, 0], "int32")


def arguments(program, seed):
    """Small integers, counts, and outputs: zeros where tiles are added, else poison."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(-1, 2, shape).astype("float16") for shape in ((256, 320), (64, 320))]
    made += [rng.integers(-9, 10, 320).astype("float32"), COUNTS]
    added = {node.dst.tile.name for node in program.nodes() if getattr(node, "atomic", None)}
    for param in program.params:
        if param.name.startswith("O"):
            made.append(np.full(param.shape, 0 if param.name in added else np.nan, param.dtype))
    return made


@pytest.mark.parametrize("seed", range(12))
def test_on_a_cpu(seed):
    program = tile.read(sent(random.Random(seed)))
    given = arguments(program, seed)
    expected = interpret(program, *given)
    tile.compile(program, "llvm")(*given)
    for got, want in zip(given, expected, strict=True):
        np.testing.assert_array_equal(got.astype("float64"), want.astype("float64"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_on_a_gpu(seed, cuda):
    program = tile.read(sent(random.Random(seed)))
    given = arguments(program, seed)
    expected = interpret(program, *given)
    compiled = tile.compile(program, "cuda")
    for _ in range(3):
        got = [each.copy() for each in given]
        compiled(*got)
        for each, want in zip(got, expected, strict=True):
            np.testing.assert_array_equal(each.astype("float64"), want.astype("float64"))


def given_for_overwriting(seed):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(-1, 2, shape).astype("float16") for shape in ((256, 320), (64, 320)))
    return [a, b, np.array([1, 4, 0, 3], "int32"), np.full((1280, 128), -7, "float16")]


@pytest.mark.parametrize("seed", range(12))
def test_stores_to_one_place_on_a_cpu(seed):
    program = tile.read(overwriting(random.Random(seed)))
    given = given_for_overwriting(seed)
    *_, expected = interpret(program, *given)
    tile.compile(program, "llvm")(*given)
    np.testing.assert_array_equal(given[3].astype("float64"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_stores_to_one_place_on_a_gpu(seed, cuda):
    program = tile.read(overwriting(random.Random(seed)))
    given = given_for_overwriting(seed)
    *_, expected = interpret(program, *given)
    compiled = tile.compile(program, "cuda")
    for _ in range(3):
        got = [each.copy() for each in given]
        compiled(*got)
        np.testing.assert_array_equal(got[3].astype("float64"), expected)


def product(dtype, atomic, announced=False):
    """A product whose tile leaves through shared memory, announced by a flag or not."""

    @T.prim_func
    def func(
        A: T.Buffer((256, 64), "float16"),
        O: T.Buffer((256, 64), dtype),
        C: T.Buffer((256, 64), "float16"),
        F: T.Buffer((2,), "int32"),
    ):
        with tile.kernel(2) as b:
            a = tile.shared((128, 64), "float16")
            w = tile.shared((64, 64), "float16")
            o = tile.shared((128, 64), dtype)
            c = tile.fragment((128, 64), "float32")
            tile.copy(A[b * 128, 0], a)
            tile.copy(A[0, 0], w)
            tile.gemm(a, w, c, transpose_b=True, accumulate=False)
            with tile.parallel(128, 64) as (x, y):
                o[x, y] = T.cast(c[x, y], dtype)
            tile.copy(o, O[b * 128, 0], atomic=atomic)
            if announced:
                tile.copy(c, C[b * 128, 0])
                tile.signal(F[b], 1, ordered=False)

    return tile.read(func)


def summed(columns, dtype):
    """Products of which each block adds its own to the same sums."""

    @T.prim_func
    def func(
        A: T.Buffer((1024, 64), "float16"), B: T.Buffer((columns, 64), "float16"), O: T.Buffer((128, columns), dtype)
    ):
        with tile.kernel(8) as b:
            a = tile.shared((128, 64), "float16")
            w = tile.shared((columns, 64), "float16")
            c = tile.fragment((128, columns), "float32")
            tile.copy(A[b * 128, 0], a)
            tile.copy(B, w)
            tile.gemm(a, w, c, transpose_b=True, accumulate=False)
            tile.atomic_add(c, O)

    return tile.read(func)


@pytest.mark.parametrize(
    ("columns", "dtype", "pieces"),
    [(32, "float32", "1 x 32"), (128, "float32", "2 x 64"), (256, "bfloat16", "2 x 128"), (96, "float16", "1 x 96")],
)
def test_sums_that_are_added_leave_by_tma(columns, dtype, pieces):
    compiled = tile.compile(summed(columns, dtype), HOPPER)
    assert f"through {pieces} columns of shared memory a warpgroup, added in memory by TMA" in compiled.explain()
    assert "cp.reduce.async.bulk.tensor" in compiled.source


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_on_a_gpu(columns, dtype, cuda):
    rng = np.random.default_rng()
    a, b = (rng.integers(-1, 2, shape).astype("float16") for shape in ((1024, 64), (columns, 64)))
    out = np.ones((128, columns), dtype)
    tile.compile(summed(columns, dtype), "cuda")(a, b, out)
    expected = 1 + sum(part @ b.T.astype("float64") for part in a.astype("float64").reshape(8, 128, 64))
    np.testing.assert_array_equal(out.astype("float64"), expected)


@pytest.mark.parametrize(
    ("dtype", "atomic", "announced", "instruction"),
    [
        ("float32", "add", False, "cp.reduce.async.bulk.tensor"),
        ("float16", "add", False, "cp.reduce.async.bulk.tensor"),
        ("int32", "add", False, "cp.reduce.async.bulk.tensor"),
        ("float32", None, False, "cp.async.bulk.tensor.3d.global.shared::cta"),
        ("int32", "max", False, None),  # threads do
        ("float32", "add", True, None),  # a warp of its own stores, and waits for no other thread's
    ],
)
def test_what_sends(dtype, atomic, announced, instruction):
    compiled = tile.compile(product(dtype, atomic, announced), HOPPER)
    text = compiled.explain()
    by_tma = "a whole tile of shared memory" in text
    assert by_tma == (instruction is not None)
    assert ("added in memory by TMA" in text) == (by_tma and atomic == "add")
    if instruction is not None:
        assert instruction in compiled.source
