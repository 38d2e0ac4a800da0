"""What every target refuses: each rule with a program that keeps it and one that doesn't."""

import re

import pytest
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout import Layout


def refused(func: tirx.PrimFunc, *words: str) -> None:
    """Assert that reading the program fails with all of the words in one message."""
    with pytest.raises(TileError) as caught:
        tile.read(func)
    for word in words:
        assert re.search(word, str(caught.value)), str(caught.value)


# ---- gemm ------------------------------------------------------------------------------------------------------------


def product(
    a: tuple = ((64, 32), "float16", "shared"),
    b: tuple = ((32, 48), "float16", "shared"),
    c: tuple = ((64, 48), "float32", "local.fragment"),
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> tirx.PrimFunc:
    """One gemm, of tiles that are filled before."""

    @T.prim_func
    def func(C: T.Buffer((64, 48), "float32")):
        with tile.kernel(1):
            x = T.alloc_buffer(a[0], a[1], scope=a[2])
            y = T.alloc_buffer(b[0], b[1], scope=b[2])
            z = T.alloc_buffer(c[0], c[1], scope=c[2])
            tile.fill(x, 0)
            tile.fill(y, 0)
            tile.fill(z, 0)
            tile.gemm(x, y, z, transpose_a=transpose_a, transpose_b=transpose_b)

    return func


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"a": ((32, 64), "float16", "shared"), "transpose_a": True},
        {"b": ((48, 32), "float16", "shared"), "transpose_b": True},
        {"a": ((64, 32), "float16", "local.fragment")},
        {"a": ((1, 64, 32), "float16", "shared")},
        {"c": ((64, 48), "float16", "local.fragment")},
        {
            "a": ((64, 32), "int8", "shared"),
            "b": ((32, 48), "int8", "shared"),
            "c": ((64, 48), "int32", "local.fragment"),
        },
    ],
)
def test_gemm(changes):
    (node,) = (node for node in tile.read(product(**changes)).nodes() if isinstance(node, tile.nodes.Gemm))
    assert node.shape == (64, 48, 32)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"a": ((64, 48), "float16", "shared")}, ["c is 64 x 48, a 64 x 48, b 32 x 48", "valid are m x n"]),
        ({"b": ((48, 32), "float16", "shared")}, ["b 48 x 32"]),
        ({"transpose_a": True}, ["a transposed 32 x 64"]),
        ({"b": ((32, 48), "float16", "local.fragment")}, ["b is fragment y", "valid is a shared tile"]),
        ({"a": ((64, 32), "float16", "local")}, ["a is local x", "shared or fragment"]),
        ({"c": ((64, 48), "float32", "shared")}, ["c is shared z", "valid is a fragment tile"]),
        ({"a": ((64, 32), "bfloat16", "shared")}, ["a is of bfloat16, b of float16"]),
        ({"c": ((64, 48), "int32", "local.fragment")}, ["summed in int32; valid is float32 or float16"]),
        ({"a": ((2, 64, 32), "float16", "shared")}, [r"a has shape \(2, 64, 32\)", "two dimensions, behind ones"]),
    ],
)
def test_gemm_refused(changes, words):
    refused(product(**changes), r"^gemm z \+= x", *words)


def test_gemm_of_itself():
    @T.prim_func
    def func(C: T.Buffer((32, 32), "float32")):
        with tile.kernel(1):
            b = tile.shared((32, 32), "float32")
            c = tile.fragment((32, 32), "float32")
            tile.fill(b, 0)
            tile.fill(c, 0)
            tile.gemm(c, b, c)

    refused(func, "c is an operand")


# ---- reduce and copy -------------------------------------------------------------------------------------------------


def reduction(src: tuple, dst: tuple, axis: int) -> tirx.PrimFunc:
    @T.prim_func
    def func(C: T.Buffer((4,), "float32")):
        with tile.kernel(1):
            s = tile.fragment(src, "float32")
            d = tile.fragment(dst, "float32")
            tile.fill(s, 0)
            tile.sum(s, d, axis)

    return func


@pytest.mark.parametrize(
    "src, dst, axis", [((8, 4), (8,), 1), ((8, 4), (4,), 0), ((8, 4), (8, 1), -1), ((4,), (1,), 0)]
)
def test_reduce(src, dst, axis):
    (node,) = (node for node in tile.read(reduction(src, dst, axis)).nodes() if isinstance(node, tile.nodes.Reduce))
    assert node.axis == axis % len(src)


@pytest.mark.parametrize(
    "src, dst, axis, words",
    [
        ((8, 4), (4,), 1, [r"without axis 1 is \(8,\)", r"dst has shape \(4,\)"]),
        ((8, 4), (8, 4), 1, [r"dst has shape \(8, 4\)"]),
        ((8, 4), (8,), 2, ["axis 2", "valid is -2 to 1"]),
    ],
)
def test_reduce_refused(src, dst, axis, words):
    refused(reduction(src, dst, axis), *words)


def test_reduce_of_a_tensor():
    @T.prim_func
    def func(A: T.Buffer((8, 4), "float32")):
        with tile.kernel(1):
            d = tile.fragment((8,), "float32")
            tile.sum(A, d)

    refused(func, "src is global A", "tiles on chip")


def test_reduce_into_itself():
    @T.prim_func
    def func(A: T.Buffer((8, 4), "float32")):
        with tile.kernel(1):
            s = tile.fragment((2, 4), "float32")
            tile.fill(s, 0)
            tile.sum(s[0, 0:4], s[0, 0:1], 1)

    refused(func, "dst is src")


def copying(start: int = 0, size: int = 64, extent: int = 32, shape: tuple = (32,), atomic: bool = False):
    """A tile from A[m * start] over three blocks; not by our words, as they check shapes themselves."""

    @T.prim_func
    def func(A: T.Buffer((size,), "float32"), B: T.Buffer((96,), "float32")):
        with tile.kernel(3) as m:
            a = tile.shared(shape, "float32")
            T.tile.cast(a, A[m * start : m * start + extent])
            tile.copy(a, B[m * 32], atomic="add" if atomic else None)

    return func


def test_copy():
    for func in (copying(), copying(start=31), copying(size=1), copying(atomic=True), copying(shape=(1, 32))):
        assert len(tile.read(func).body) == 2


def test_copy_refused():
    refused(copying(shape=(16,)), "src has shape", "equal up to ones")
    refused(copying(start=32), "A.* starts at 64 in dimension 0 of global A.*when m=2", "valid is 0 to 63")
    refused(copying(start=-1), "starts at -2 .* when m=2")


def test_copy_starts_where_conditions_and_loops_let_it():
    @T.prim_func
    def func(A: T.Buffer((4, 64), "float32"), B: T.Buffer((4, 64), "float32")):
        with tile.kernel(5) as m:
            a = tile.shared((1, 32), "float32")
            if m < 4:
                for k in range(m + 1):
                    tile.copy(A[k, 32], a)
                    tile.copy(a, B[m, 0])

    tile.read(func)

    @T.prim_func
    def beyond(A: T.Buffer((4, 64), "float32"), B: T.Buffer((5, 64), "float32")):
        with tile.kernel(5) as m:
            a = tile.shared((1, 32), "float32")
            for k in range(m + 1):
                tile.copy(A[k, 32], a)
                tile.copy(a, B[m, 0])

    refused(beyond, "starts at 4 in dimension 0 of global A", "m=4, k=4")


def test_copy_within_a_tile():
    def func(distance):
        @T.prim_func
        def func(A: T.Buffer((32,), "float32")):
            with tile.kernel(1):
                a = tile.shared((32,), "float32")
                tile.fill(a, 0)
                tile.copy(a[0:8], a[distance : distance + 8])

        return func

    tile.read(func(8))
    refused(func(7), "may overlap")


def test_copy_atomic_on_chip():
    @T.prim_func
    def func(A: T.Buffer((32,), "float32")):
        with tile.kernel(1):
            a = tile.shared((32,), "float32")
            tile.copy(A[0], a, atomic="add")

    refused(func, "atomically into shared a", "valid is a tile.fragment between them")


def test_region_of_a_tile():
    def func(step, guard):
        @T.prim_func
        def func(A: T.Buffer((32,), "float32")):
            with tile.kernel(1):
                a = tile.shared((32,), "float32")
                for k in range(5):
                    if k < guard:
                        tile.copy(A[0:8], a[k * step : k * step + 8])

        return func

    tile.read(func(6, 5))
    tile.read(func(8, 4))
    refused(func(8, 5), r"a\[k \* 8:k \* 8 \+ 8\] isn't shown to be inside of shared a", "valid is 0 to 32")


def test_region_from_a_tensor():
    @T.prim_func
    def func(A: T.Buffer((32,), "float32"), L: T.Buffer((1,), "int32")):
        with tile.kernel(1):
            a = tile.shared((32,), "float32")
            start = L[0]
            tile.copy(A[start], a)
            tile.copy(A[0:8], a[start : start + 8])

    refused(func, r"`?copy A\[0:8\] to a", "isn't shown to be inside")


def test_grid_and_layout():
    @T.prim_func
    def empty(A: T.Buffer((32,), "float32")):
        with tile.kernel(0):
            a = tile.shared((32,), "float32")
            tile.fill(a, 0)

    refused(empty, "extent along .* is 0; valid is 1 or more")


# ---- Scalars and what was never written ------------------------------------------------------------------------------


def test_scalar_of_a_fragment():
    def func(scope):
        @T.prim_func
        def func(A: T.Buffer((32,), "float32")):
            with tile.kernel(1):
                a = T.alloc_buffer((32,), "float32", scope=scope)
                tile.fill(a, 0)
                if a[0] > T.float32(0):
                    tile.copy(a, A[0])

        return func

    tile.read(func("shared"))
    refused(func("local.fragment"), r"if a\[0\] > .*scalar is read from fragment a")


def test_unwritten():
    @T.prim_func
    def func(A: T.Buffer((32, 32), "float32")):
        with tile.kernel(1):
            a = tile.shared((32, 32), "float32")
            c = tile.fragment((32, 32), "float32")
            tile.copy(A[0, 0], a)
            tile.gemm(a, a, c)

    refused(func, r"`c \+= a @ a` reads fragment c", "nothing has written before")


def test_unwritten_in_parallel():
    def func(first):
        @T.prim_func
        def func(A: T.Buffer((32,), "float32")):
            with tile.kernel(1):
                a = tile.fragment((32,), "float32")
                with tile.parallel(32) as i:
                    if first:
                        a[i] = T.float32(1)
                        A[i] = a[i]
                    else:
                        A[i] = a[i]
                        a[i] = T.float32(1)

        return func

    tile.read(func(True))
    refused(func(False), "reads fragment a")


def test_unwritten_by_the_first_iteration():
    def func(guarded):
        @T.prim_func
        def func(A: T.Buffer((32,), "float32")):
            with tile.kernel(1):
                a = tile.shared((32,), "float32")
                for k in range(3):
                    if k >= guarded:
                        tile.copy(a, A[0])
                    tile.fill(a, 0)

        return func

    tile.read(func(1))

    @T.prim_func
    def unguarded(A: T.Buffer((32,), "float32")):
        with tile.kernel(1):
            a = tile.shared((32,), "float32")
            for _ in range(3):
                tile.copy(a, A[0])
                tile.fill(a, 0)

    refused(unguarded, "`copy a to A` reads shared a")


def test_assignment_outside():
    @T.prim_func
    def func(A: T.Buffer((32,), "float32")):
        with tile.kernel(2) as m:
            a = tile.local((2,), "int32")
            a[m + 1] = 0

    refused(func, r"a\[m \+ 1\] = 0: it is element 2 of dimension 0 of local a.*when m=1; valid is 0 to 1")


# ---- parallel --------------------------------------------------------------------------------------------------------


def test_parallel_stores_of_its_own():
    @T.prim_func
    def func(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32"), B: T.Buffer((16, 8), "float32")):
        with tile.kernel(1):
            a = tile.shared((16, 8), "float32")
            r = tile.fragment((16,), "float32")
            flat = tile.shared((128,), "float32")
            with tile.parallel(16, 8, distinct=True) as (i, j):
                x = A[i, j] * T.float32(2)
                a[i, j] = x
                flat[i * 8 + (j ^ 3)] = a[i, j] + x
                B[index[i], j] = x
                if j == 0:
                    r[i] = a[i, j]
                if i + 1 < 16:
                    a[i, j] = A[i + 1, j]
            with tile.parallel(16, 8) as (i, j):
                a[i, j] = T.if_then_else(i > 0, flat[(i - 1) * 8 + j], r[i])

    tile.read(func)


def stores(body: str):
    """Programs with one racing or outlying statement in a parallel of 16 x 8 points, by name."""

    @T.prim_func
    def row(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            a = tile.shared((16, 8), "float32")
            r = tile.shared((16,), "float32")
            tile.fill(a, 0)
            with tile.parallel(16, 8) as (i, j):
                r[i] = a[i, j]

    @T.prim_func
    def diagonal(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            r = tile.shared((23,), "float32")
            with tile.parallel(16, 8) as (i, j):
                r[i + j] = A[i, j]

    @T.prim_func
    def neighbour(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            a = tile.shared((16, 8), "float32")
            tile.fill(a, 0)
            with tile.parallel(16, 8) as (i, j):
                if i > 0:
                    a[i, j] = a[i - 1, j]

    @T.prim_func
    def swapped(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            a = tile.shared((16, 16), "float32")
            with tile.parallel(16, 8) as (i, j):
                a[i, j] = T.float32(0)
                a[j, i] = T.float32(1)

    @T.prim_func
    def gather(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            a = tile.shared((16, 8), "float32")
            tile.fill(a, 0)
            with tile.parallel(16, 8) as (i, j):
                a[i, j] = a[index[i], j]

    @T.prim_func
    def scatter(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1), tile.parallel(16, 8) as (i, _j):
            A[index[i], 0] = T.float32(0)

    @T.prim_func
    def outside(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            a = tile.shared((16, 8), "float32")
            with tile.parallel(16, 8) as (i, j):
                a[i, j] = A[i, j + 1]

    @T.prim_func
    def both(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            a = tile.shared((16, 8), "float32")
            with tile.parallel(16, 8) as (i, j):
                if i > 0 and A[i - 1, j] > T.float32(0):
                    a[i, j] = T.float32(0)

    @T.prim_func
    def blocks(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(3) as m:
            a = tile.shared((16, 8), "float32")
            with tile.parallel(16, 8) as (i, j):
                a[i, j] = A[i + m * 7, j]

    @T.prim_func
    def local(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(1):
            a = tile.local((16,), "float32")
            with tile.parallel(16) as i:
                a[i] = A[i, 0]

    return locals()[body]


@pytest.mark.parametrize(
    "body, words",
    [
        ("row", [r"r\[i\] is stored at i=0, j=0, and that element, \[0\], is stored at i=0, j=7", "in no order"]),
        ("diagonal", [r"r\[i \+ j\] is stored at"]),
        ("neighbour", [r"a\[i - 1, j\] is read at i=2, j=0, and that element, \[1, 0\], is stored at i=1, j=0"]),
        ("swapped", [r"a\[j, i\] is stored at i=0, j=1", r"stored at i=1, j=0"]),
        (
            "gather",
            [r"a\[i, j\] is stored, and a\[index\[i\], j\] of the same tile is read beside it", "can't be shown"],
        ),
        ("scatter", [r"A\[index\[i\], 0\] is stored by all 8 points along _j", "depends on _j"]),
        ("outside", [r"A\[i, j \+ 1\] is element 8 of dimension 1 of global A.*at i=0, j=7; valid is 0 to 7"]),
        ("both", [r"A\[i - 1, j\] is element -1", "both sides of `and` are evaluated"]),
        ("blocks", [r"A\[i \+ m \* 7, j\] is element 16"]),
        ("local", ["local a: float32.* is stored for one point", "valid are fragments, shared tiles and tensors"]),
    ],
)
def test_parallel_refused(body, words):
    refused(stores(body), "parallel", *words)


def halves_at(distinct, apart):
    """Two stores to a tensor, at a row that is data: `apart` columns from each other, of 4 each."""

    @T.prim_func
    def func(A: T.Buffer((16, 8), "float32"), index: T.Buffer((16,), "int32")):
        with tile.kernel(16) as m:
            row = index[m]
            with tile.parallel(1, 4, distinct=distinct) as (i, j):
                A[row + i, j] = T.float32(1)
                A[row + i, j + apart] = T.float32(2)

    return func


def test_stores_at_data_are_told_apart_by_what_is_known_or_by_distinct():
    tile.read(halves_at(False, 4))
    tile.read(halves_at(True, 2))  # points meet in no element, says the author
    refused(halves_at(False, 2), "parallel", r"A\[row \+ i, j \+ 2\] is stored", "can't be shown", "or distinct=True")


def test_blocks_and_loops_of_unknown_number():
    @T.prim_func
    def func(A: T.handle, N: T.Buffer((1,), "int32")):
        n = T.int32()
        X = T.match_buffer(A, (2, n), "float32")
        with tile.kernel(tile.cdiv(n, 32)) as m:
            for k in range(N[0]):
                with tile.parallel(32) as i:
                    if m * 32 + i < n and k < 1:
                        X[k, m * 32 + i] = X[k, m * 32 + i] + X[k + 1, m * 32 + i]

    tile.read(func)


def test_unknown_conditions_are_no_excuse():
    @T.prim_func
    def func(A: T.Buffer((16, 8), "float32")):
        with tile.kernel(1):
            r = tile.shared((16,), "float32")
            with tile.parallel(16, 8) as (i, j):
                if A[i, j] > T.float32(0):
                    r[i] = A[i, j]

    refused(func, r"r\[i\] is stored at i=0")


@pytest.mark.parametrize("condition", ["k == 1", "index[k] > 0"])
def test_a_race_under_a_condition(condition):
    def func(place):
        @T.prim_func
        def func(A: T.Buffer((16, 8), "float32"), index: T.Buffer((4,), "int32")):
            with tile.kernel(1):
                r = tile.shared((16,), "float32")
                for k in range(4):
                    if k == 1 if condition == "k == 1" else index[k] > 0:
                        with tile.parallel(16, 8) as (i, j):
                            if j == 0 or place == "row":
                                r[i] = A[i, j]

        return func

    tile.read(func("one"))
    refused(func("row"), r"r\[i\] is stored at i=0, j=0, and that element")


# ---- Blocks ----------------------------------------------------------------------------------------------------------


def storing(where: str) -> tirx.PrimFunc:
    @T.prim_func
    def func(A: T.Buffer((4, 32), "float32"), index: T.Buffer((4,), "int32")):
        with tile.kernel(4, 2) as (m, n):
            a = tile.shared((1, 16), "float32")
            tile.fill(a, 0)
            row = index[m]
            if where == "place":
                tile.copy(a, A[m, n * 16])
            elif where == "loaded":
                tile.copy(a, A[row, n * 16])
            elif where == "condition":
                if m == 1 and n == 0:
                    tile.copy(a, A[0, 0])
            elif where == "atomic":
                tile.copy(a, A[0, 0], atomic="add")
            elif where == "same":
                tile.copy(a, A[m, 0])
            else:
                with tile.parallel(16) as i:
                    A[0, n * 16 + i] = T.float32(1)

    return func


def test_blocks():
    for where in ("place", "loaded", "condition", "atomic"):
        tile.read(storing(where))
    refused(
        storing("same"),
        r"copy a to A\[m, 0:16\]: all 2 blocks along n store to one part of global A",
        "tile.atomic_add",
    )
    refused(storing("parallel"), "parallel 16 into A: all 4 blocks along m")


# ---- Pipelines -------------------------------------------------------------------------------------------------------


def pipeline(case: str, stages: int = 2) -> tirx.PrimFunc:
    @T.prim_func
    def func(A: T.Buffer((256, 32), "float16"), C: T.Buffer((32, 32), "float32")):
        with tile.kernel(1):
            a = tile.shared((64, 32), "float16")
            c = tile.fragment((32, 32), "float32")
            tile.fill(c, 0)
            tile.fill(a, 0)
            for k in tile.pipelined(4, stages=stages):
                if case == "late":
                    tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
                    tile.copy(A[k * 64, 0], a)
                elif case == "halves":
                    tile.copy(A[k * 64, 0], a[32:64, 0:32])
                    tile.copy(A[k * 64 + 32, 0], a[0:32, 0:32])
                    with tile.parallel(32, 32) as (i, j):
                        c[i, j] = c[i, j] + T.cast(a[i + 32, j] + a[i, j], "float32")
                elif case == "half":
                    tile.copy(A[k * 64, 0], a[0:32, 0:32])
                    tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
                elif case == "maybe":
                    if k > 0:
                        tile.copy(A[k * 64, 0], a)
                    tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
                elif case == "either":
                    if k > 0:
                        tile.copy(A[k * 64, 0], a)
                    else:
                        tile.copy(A[0, 0], a)
                    tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
                elif case == "written":
                    tile.copy(A[k * 64, 0], a)
                    with tile.parallel(64, 32) as (i, j):
                        a[i, j] = a[i, j] * T.float16(2)
                    tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
                else:
                    tile.copy(A[k * 64, 0], a)
                    tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
            if case == "behind":
                tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
            if case == "again":
                tile.copy(A[0, 0], a)
                tile.gemm(a[0:32, 0:32], a[32:64, 0:32], c)
            tile.copy(c, C)

    return func


@pytest.mark.parametrize("case", ["plain", "halves", "either", "again"])
def test_pipeline(case):
    (loop,) = (node for node in tile.read(pipeline(case)).nodes() if isinstance(node, tile.nodes.Loop))
    assert loop.stages == 2


@pytest.mark.parametrize(
    "case, words",
    [
        ("late", [r"`c \+= a.*` reads a\[0:32, 0:32\], which the same iteration has not loaded", "the stages race"]),
        ("half", [r"reads a\[32:64, 0:32\], which the same iteration has not loaded"]),
        ("maybe", ["which the same iteration has not loaded"]),
        ("written", ["shared a.* is loaded, and `parallel 64 x 32 into a` writes it too"]),
        ("behind", [r"reads shared a.* behind for k in pipelined\(4, stages=2\)", "load it again"]),
    ],
)
def test_pipeline_refused(case, words):
    refused(pipeline(case), *words)


def test_more_stages_than_iterations():
    tile.read(pipeline("plain", stages=4))
    refused(pipeline("plain", stages=5), r"pipelined\(4, stages=5\): a pipeline of 5 stages has 4 iterations", "1 to 4")


def test_stages_of_a_dynamic_loop():
    @T.prim_func
    def func(A: T.Buffer((256, 32), "float16"), L: T.Buffer((1,), "int32"), C: T.Buffer((32, 32), "float32")):
        with tile.kernel(1):
            a = tile.shared((32, 32), "float16")
            c = tile.fragment((32, 32), "float32")
            tile.fill(c, 0)
            steps = L[0]
            for k in tile.pipelined(steps, stages=3):
                tile.copy(A[k * 32, 0], a)
                tile.gemm(a, a, c)
            tile.copy(c, C)

    (loop,) = (node for node in tile.read(func).nodes() if isinstance(node, tile.nodes.Loop))
    assert str(loop) == "for k in pipelined(steps, stages=3)"


def test_annotated_layout_admits_the_shape():
    def func(text):
        layout = Layout.parse(text)

        @T.prim_func
        def func(A: T.Buffer((4, 8), "float32")):
            with tile.kernel(1):
                a = tile.shared((4, 8), "float32", layout=layout)
                tile.fill(a, 0)

        return func

    assert str(tile.read(func("S[(4, 8) : (9, 1)]")).tiles[0].layout) == "S[(4, 8) : (9, 1)]"
    refused(func("S[(4, 4) : (4, 1)]"), "layout .* is of 16 elements; valid is one of 32")
