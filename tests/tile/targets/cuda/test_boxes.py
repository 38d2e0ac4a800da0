"""Parallels that move boxes: which do, and that the copies in their place do the same."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
from generator import Maker
from generator_words import boxed_gemm
from interpreter import interpret
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.tile.nodes import Copy, Parallel
from tvm_axe.tile.targets.cuda.boxes import with_boxes

HOPPER, AMPERE = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_90a", "sm_80"))


def loading(condition, index=None, shape=(5, 9, 16), extents=(4, 2, 16)):
    """A program that loads 8 x 16 elements of X at `index`, where `condition` holds; both take y, x and q, r, v."""
    index = index or (lambda y, x, q, r, v: (y * 4 + q - 1, x * 2 + r, v))

    @T.prim_func
    def func(X: T.Buffer(shape, "float32"), Y: T.Buffer((16, 80), "float32")) -> None:
        with tile.kernel(2, 5) as (y, x):
            a = tile.shared((8, 16), "float32")
            with tile.parallel(*extents) as (q, r, v):
                at = T.meta_var(index(y, x, q, r, v))
                place = T.meta_var(q * extents[1] + r)
                a[place, v] = T.if_then_else(condition(*at), X[at[0], at[1], at[2]], T.float32(0))
            tile.copy(a, Y[y * 8, x * 16])

    return tile.read(func)


def storing(condition):
    """A program that stores 8 x 16 elements of a fragment as a box of Y where `condition` of the place holds."""

    @T.prim_func
    def func(X: T.Buffer((16, 32), "float32"), Y: T.Buffer((5, 9, 16), "float16")) -> None:
        with tile.kernel(2, 5) as (y, x):
            c = tile.fragment((8, 16), "float32")
            tile.copy(X[y * 8, 0], c)
            with tile.parallel(8, 16) as (i, v):
                at = T.meta_var((y * 4 + i // 2, x * 2 + i % 2, v))
                if condition(*at):
                    Y[at[0], at[1], at[2]] = T.cast(c[i, v], "float16")

    return tile.read(func)


def copies(program):
    return [node for node in program.nodes() if isinstance(node, Copy)]


def exact(y, x, v):
    return T.And(T.And(y >= 0, y < 5), x < 9)


BOXES = {
    "exact": exact,
    "in other words": lambda y, x, v: T.And(T.And(y > -1, y <= 4), T.And(x < 9, x >= 0)),
    "with what always holds": lambda y, x, v: T.And(exact(y, x, v), T.And(v < 16, x >= -3)),
}
OTHERS = {
    "a bound is narrower": lambda y, x, v: T.And(T.And(y >= 0, y < 5), x < 8),
    "a bound is asked twice, once narrower": lambda y, x, v: T.And(exact(y, x, v), y < 4),
    "something else is asked": lambda y, x, v: T.And(exact(y, x, v), x % 2 == 0),
    "either is enough": lambda y, x, v: T.And(T.And(y >= 0, y < 5), T.And(x < 9, T.Or(v < 3, x > 2))),
}


def same(program):
    """Whether a program and that with boxes do the same on random data."""
    rng = np.random.default_rng(3)
    arrays = [rng.integers(-9, 9, tuple(p.shape)).astype(p.dtype) for p in program.params]
    for one, other in zip(interpret(program, *arrays), interpret(with_boxes(program), *arrays), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("said", BOXES)
def test_boxes_are_copies(said):
    for program in (loading(BOXES[said]), storing(BOXES[said])):
        found = with_boxes(program)
        assert len(copies(found)) == 2 and not any(isinstance(node, Parallel) for node in found.nodes())
        same(program)


def test_where_a_box_begins():
    load = next(copy for copy in copies(with_boxes(loading(exact))) if copy.src.in_front)
    assert (str(load.src), load.src.extents) == ("X[y * 4 + -1:y * 4 + -1 + 4, x * 2:x * 2 + 2, 0:16]", (4, 2, 16))


@pytest.mark.parametrize("said", OTHERS)
def test_other_conditions_are_none(said):
    for program in (loading(OTHERS[said]), storing(OTHERS[said])):
        assert with_boxes(program) is program


@pytest.mark.parametrize(
    "index",
    [
        lambda y, x, q, r, v: (y * 4 + 3 - q, x * 2 + r, v),  # from below
        lambda y, x, q, r, v: (y * 4 + r, x * 2 + q, v),  # columns before rows
        lambda y, x, q, r, v: (y * 4 + q // 2, x * 2 + r, v),  # rows twice
        lambda y, x, q, r, v: (y + q * y, x * 2 + r, v),  # as far apart as a block says
        lambda y, x, q, r, v: (q * 2, x * 2 + r, v),  # every second row
    ],
)
def test_other_places_are_none(index):
    program = loading(exact, index)
    assert with_boxes(program) is program


def test_random_boxes_are_the_same():
    """Of programs that gather boxes, or almost that; what is a copy then does what the parallel did."""
    boxed, others = 0, 0
    for seed in range(12):
        maker = Maker(random.Random(seed).choice, name=f"boxed{seed}", sizes=(16, 32), depths=(16,), blocks=(4, 16))
        maker.operation = functools.partial(boxed_gemm, maker)
        made = maker.make()
        program = made.program
        found = with_boxes(program)
        boxed += sum(region.in_front for node in copies(found) for region in (node.src, node.dst))
        others += sum(isinstance(node, Parallel) for node in found.nodes())
        for one, other in zip(interpret(program, *made.arrays), interpret(found, *made.arrays), strict=True):
            np.testing.assert_array_equal(one, other)
    assert boxed > 20 and others > 5


def test_of_any_number_of_images():
    """Whose bound is a variable."""

    @T.prim_func
    def func(x: T.handle, y: T.handle) -> None:
        n = T.int32()
        X = T.match_buffer(x, (n, 9, 16), "float32")
        Y = T.match_buffer(y, (n, 18, 16), "float32")
        with tile.kernel(tile.cdiv(n, 4), 5) as (i, j):
            a = tile.shared((8, 16), "float32")
            with tile.parallel(4, 2, 16) as (q, r, v):
                inside = T.meta_var(T.And(i * 4 + q < n, T.And(j * 2 + r >= 1, j * 2 + r - 1 < 9)))
                a[q * 2 + r, v] = T.if_then_else(inside, X[i * 4 + q, j * 2 + r - 1, v], T.float32(0))
            for q in range(4):
                tile.copy(a[q * 2 : q * 2 + 2, :], Y[i * 4 + q, j * 2, 0])

    program = tile.read(func)
    (load,) = (copy for copy in copies(with_boxes(program)) if copy.src.in_front)
    assert load.src.extents == (4, 2, 16)


# ---- In specialized kernels ------------------------------------------------------------------------------------------


def product(out, store, sides=(2, 8, 8), channels=64):
    """A product of boxes of X, of `sides` images, rows and columns, whose sums `store` stores in Y of type `out`."""
    images, rows, columns = sides
    pixels = images * rows * columns

    @T.prim_func
    def func(
        X: T.Buffer((4, 20, 20, channels), "float16"),
        W: T.Buffer((64, 64), "float16"),
        Y: T.Buffer((4, 20, 20, 64), out),
    ) -> None:
        with tile.kernel(4 // images, tile.cdiv(20, rows), tile.cdiv(20, columns)) as (z, y, x):
            a = tile.shared((pixels, 64), "float16")
            b = tile.shared((64, 64), "float16")
            c = tile.fragment((pixels, 64), "float32")
            tile.fill(c, 0)
            for k in tile.pipelined(2):
                with tile.parallel(images, rows, columns, 8, 8) as (p, q, r, u, v):
                    at = T.meta_var((z * images + p, y * rows + q - k, x * columns + r))
                    inside = T.meta_var(T.And(T.And(at[1] >= 0, at[1] < 20), at[2] < 20))
                    value = T.meta_var(X[at[0], at[1], at[2], u * 8 + v])
                    a[(p * rows + q) * columns + r, u * 8 + v] = T.if_then_else(inside, value, T.float16(0))
                tile.copy(W, b)
                tile.gemm(a, b, c, transpose_b=True)
            with tile.parallel(pixels, 64) as (i, j):
                at = T.meta_var(
                    (z * images + i // (rows * columns), y * rows + i // columns % rows, x * columns + i % columns)
                )
                if T.And(at[1] < 20, at[2] < 20):
                    store(Y, (*at, j), c[i, j])

    return tile.read(func)


def plain(Y, at, value):
    T.buffer_store(Y, T.cast(value, str(Y.dtype)), at)


def doubled(Y, at, value):
    T.buffer_store(Y, T.cast(value * 2, str(Y.dtype)), at)


def test_a_producer_warp_loads_boxes_and_tma_stores_them():
    text = tile.explain(product("float16", plain), HOPPER)
    assert "a producer warp and 2 warpgroups that consume" in text and "stored by TMA" in text
    assert "to a: by TMA  (a parallel that loads a box" in text
    source = tile.compile(product("float16", plain), HOPPER).source
    assert "cp.async.bulk.tensor.4d.shared" in source and "cp.async.bulk.tensor.4d.global" in source


@pytest.mark.parametrize("out, store", [("float32", plain), ("float16", doubled)])
def test_what_is_no_box_of_16_bits_is_stored_by_threads(out, store):
    text = tile.explain(product(out, store), HOPPER)
    assert "a producer warp" in text and "stored by TMA" not in text


def test_boxes_of_which_warpgroups_have_no_boxes_are_stored_by_threads():
    """64 of 192 pixels are five rows of 12 and a part."""
    text = tile.explain(product("float16", plain, (1, 16, 12)), HOPPER)
    assert "a producer warp and 3 warpgroups" in text and "stored by TMA" not in text


def test_boxes_that_tma_does_not_load_are_loaded_by_threads():
    """Rows of 136 bytes aren't aligned."""
    assert "uniform: every warp loads" in tile.explain(product("float16", plain, channels=68), HOPPER)


def test_what_tma_does_not_load_leaves_the_rest_to_a_producer_warp():
    """So it was before boxes were known: threads load the scales, of 124 bytes a row, while TMA loads operands."""

    @T.prim_func
    def func(
        A: T.Buffer((128, 256), "float16"),
        B: T.Buffer((64, 256), "float16"),
        E: T.Buffer((128, 62), "float16"),
        C: T.Buffer((128, 64), "float32"),
    ) -> None:
        with tile.kernel(2) as m:
            a = tile.shared((64, 64), "float16")
            b = tile.shared((64, 64), "float16")
            e = tile.shared((64, 64), "float16")
            c = tile.fragment((64, 64), "float32")
            tile.fill(c, 0)
            for k in tile.pipelined(4):
                tile.copy(A[m * 64, k * 64], a)
                tile.copy(B[0, k * 64], b)
                tile.gemm(a, b, c, transpose_b=True)
            with tile.parallel(64, 64) as (i, j):
                e[i, j] = T.if_then_else(j < 62, E[m * 64 + i, j], T.float16(0))
            with tile.parallel(64, 64) as (i, j):
                c[i, j] = c[i, j] * T.cast(e[i, j], "float32")
            tile.copy(c, C[m * 64, 0])

    program = tile.read(func)
    assert with_boxes(program) is not program
    assert "a producer warp and 1 warpgroups" in tile.explain(program, HOPPER)


def test_elsewhere_threads_load_them():
    assert "uniform: every warp loads and computes" in tile.explain(product("float16", plain), AMPERE)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "out, store, options",
    [
        ("float16", plain, {}),
        ("float32", plain, {}),
        ("float16", doubled, {}),
        ("float16", plain, {"sides": (1, 16, 12)}),
        ("float16", plain, {"sides": (4, 4, 4)}),
        ("float16", plain, {"channels": 68}),
    ],
)
def test_on_a_gpu(cuda, out, store, options):
    program, rng = product(out, store, **options), np.random.default_rng(4)
    shape = (4, 20, 20, options.get("channels", 64))
    x, w = (rng.integers(-4, 5, shape).astype("float16") for shape in (shape, (64, 64)))
    y = np.full((4, 20, 20, 64), np.nan, out)
    tile.compile(program, "cuda")(x, w, y)
    np.testing.assert_array_equal(y, interpret(program, x, w, np.full(y.shape, np.nan, out))[2])
