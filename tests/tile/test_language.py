"""The words: what they read as, that programs print and parse back, and what each word refuses."""

import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.error import DiagnosticError
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout import Layout


@T.prim_func
def words(
    A: T.Buffer((250, 256), "float16"),
    L: T.Buffer((2,), "int32"),
    C: T.Buffer((250, 128), "float16"),
    S: T.Buffer((128,), "float32"),
):
    """Every word of the language."""
    with tile.kernel(2, 1, threads=256, persistent=True, swizzle=4, cluster=(2, 1), roles="specialized") as (m, n):
        a = tile.shared((128, 64), "float16", layout=Layout.parse("S[(128, 64) : (72, 1)]"))
        b = tile.shared((128, 64), "float16")
        p = tile.fragment((128, 64), "float16")
        c = tile.fragment((128, 128), "float32", layout=Layout.parse("S[(128, 128) : (1@tx, 1)]"))
        total = tile.fragment((128,), "float32")
        count = tile.local((1,), "int32")
        tile.fill(c, 0)
        tile.fill(total, T.float32(1))
        count[0] = 0
        steps = L[m]
        for k in tile.pipelined(steps, stages=2):
            tile.copy(A[m * 128, k * 64], a)
            tile.copy(A[m * 128 : m * 128 + 128, 0:64], b)
            if k > 0:
                tile.gemm(a, b, c, transpose_b=True, instruction="wgmma")
            else:
                tile.copy(a, p)
                tile.gemm(p, b, c, transpose_b=True, accumulate=False)
                count[0] = count[0] + 1
        for _ in tile.pipelined(1, 3):
            tile.max(c, total)
        for j in range(2):
            tile.sum(c, total, 0, accumulate=True)
            tile.min(c[0:128, j * 64 : j * 64 + 64], total, axis=1, accumulate=True)
        with tile.parallel(128, 128) as (i, j):
            scaled = c[i, j] * T.float32(2)
            if i > j:
                c[i, j] = T.max(scaled, total[i])
        tile.cast(c, C[m * 128, n * 128])
        tile.copy(total, S[0], atomic="add")


TREE = """\
kernel words(A, L, C, S) for m < 2, n < 1, threads=256, persistent=1, swizzle=4, cluster=[2, 1], roles=specialized
    global A: float16[250, 256]
    global L: int32[2]
    global C: float16[250, 128]
    global S: float32[128]
    shared a: float16[128, 64]
    shared b: float16[128, 64]
    fragment p: float16[128, 64]
    fragment c: float32[128, 128]
    fragment total: float32[128]
    local count: int32[1]
    local steps: int32[1]
    fill c with T.float32(0.0)
    fill total with T.float32(1.0)
    count[0] = 0
    steps[0] = L[m]
    for k in pipelined(steps, stages=2):
        copy A[m * 128:m * 128 + 128, k * 64:k * 64 + 64] to a
        copy A[m * 128:m * 128 + 128, 0:64] to b
        if k > 0:
            c += a @ b.T
        else:
            copy a to p
            c = p @ b.T
            count[0] = count + 1
    for _ in pipelined(1, 3):
        total = max of c along 1
    for j in range(2):
        total accumulates sum of c along 0
        total accumulates min of c[0:128, j * 64:j * 64 + 64] along 1
    parallel 128 x 128 into c
    copy c to C[m * 128:m * 128 + 128, n * 128:n * 128 + 128]
    copy total to S, adding atomically"""


def test_words():
    assert str(tile.read(words)) == TREE


def test_what_is_annotated():
    program = tile.read(words)
    layouts = {tile.name: str(tile.layout) for tile in program.tiles if tile.layout is not None}
    assert layouts == {"a": "S[(128, 64) : (72, 1)]", "c": "S[(128, 128) : (1@tx, 1)]"}
    assert [g.instruction for g in program.nodes() if isinstance(g, tile.nodes.Gemm)] == ["wgmma", None]
    assert [loop.stages for loop in program.nodes() if isinstance(loop, tile.nodes.Loop)] == [2, 0, None]


def test_round_trip():
    printed = words.script()
    parsed = tvm.script.from_source(printed)
    assert tvm_ffi.structural_equal(parsed, words)
    assert str(tile.read(parsed)) == TREE
    assert parsed.script() == printed
    assert tvm_ffi.structural_equal(tvm.ir.load_json(tvm.ir.save_json(words)), words)


def test_cdiv():
    assert [tile.cdiv(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    n = tirx.Var("n", "int32")
    assert tvm.sym.Analyzer().can_prove_equal(tile.cdiv(n * 4 + 1, 4), n + 1)


def test_an_element_is_where_the_other_side_starts():
    @T.prim_func
    def func(A: T.Buffer((3, 64, 64), "float32")):
        with tile.kernel(1):
            a = tile.shared((1, 32), "float32")
            b = tile.shared((1, 1, 1, 8, 8), "float32")
            tile.copy(A[2, 0, 32], a)
            tile.copy(A[1, 8, 8], b)
            tile.copy(a[0, 8:16], A[0, 0, 0:8])

    assert [str(node) for node in tile.read(func).body] == [
        "copy A[2, 0, 32:64] to a",
        "copy A[1, 8:16, 8:16] to b",
        "copy a[0, 8:16] to A[0, 0, 0:8]",
    ]


# ---- What is refused where it is written -----------------------------------------------------------------------------


def parsed(build) -> TileError:
    """The package's own error behind the one that upstream's parser raises, which shows the line."""
    with pytest.raises(DiagnosticError) as caught:
        build()
    assert isinstance(caught.value.__context__, TileError)
    assert str(caught.value.__context__) in str(caught.value) and "test_language.py:" in str(caught.value)
    return caught.value.__context__


@pytest.mark.parametrize(
    "arguments, options, message",
    [
        ((), {}, "takes 1 to 3 extents, got 0"),
        ((1, 2, 3, 4), {}, "takes 1 to 3 extents, got 4"),
        ((2,), {"roles": "many"}, "roles is 'specialized' or 'uniform', got 'many'"),
        ((2,), {"threads": 0}, "threads must be positive, got 0"),
        ((2,), {"swizzle": -1}, "swizzle must be positive, got -1"),
        ((2,), {"cluster": (0,)}, "cluster has one positive extent for each of the grid's 1 dimensions"),
        ((2,), {"cluster": (1, 2)}, "cluster has one positive extent for each of the grid's 1 dimensions"),
    ],
)
def test_kernel_refused(arguments, options, message):
    with pytest.raises(TileError, match=message), tile.kernel(*arguments, **options):
        pass


def test_loops_refused():
    with pytest.raises(TileError, match="parallel: takes at least one extent"), tile.parallel():
        pass
    with pytest.raises(TileError, match="stages must be at least 1, got 0"):
        tile.pipelined(4, stages=0)


def test_copy_refused():
    def copying(case):
        @T.prim_func
        def func(A: T.Buffer((64, 64), "float32")):
            with tile.kernel(1):
                a = tile.shared((32, 32), "float32")
                if case == "elements":
                    tile.copy(A[0, 0], A[1, 1])
                if case == "shapes":
                    tile.copy(A[0:16, 0:32], a)
                if case == "dimensions":
                    tile.copy(a[0, 0], tile.shared((2, 2, 2), "float32"))
                if case == "atomic":
                    tile.copy(a, A[0, 0], atomic="or")
                if case == "extents":
                    for k in range(4):
                        tile.copy(A[0:k, 0:32], a)

        return func

    assert "both sides are elements; write one as a slice" in str(parsed(lambda: copying("elements")))
    assert "src has shape (16, 32), dst (32, 32)" in str(parsed(lambda: copying("shapes")))
    assert "can't start in a tensor of 2 dimensions" in str(parsed(lambda: copying("dimensions")))
    assert "atomic is 'add', 'max' or 'min', got 'or'" in str(parsed(lambda: copying("atomic")))
    assert "src has shape (k, 32), dst (32, 32); they must be equal" in str(parsed(lambda: copying("extents")))


def test_gemm_refused():
    def func():
        @T.prim_func
        def func(A: T.Buffer((64, 64), "float32")):
            with tile.kernel(1):
                a = tile.shared((32, 32), "float32")
                c = tile.fragment((32, 32), "float32")
                tile.gemm(a, a, c, instruction="dot")

    assert "instruction is 'wgmma', 'mma' or 'fma', got 'dot'" in str(parsed(func))
