"""Programs of two accumulators, needed at once or one after the other."""

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile


def two(m: int, n: int, dtype: str = "float16", instruction: str | None = None, **options: object) -> tirx.PrimFunc:
    """C = A B^T and E = A D^T in one loop: both accumulators are needed all the time."""

    @T.prim_func
    def func(
        A: T.Buffer((m, 256), dtype),
        B: T.Buffer((n, 256), dtype),
        D: T.Buffer((n, 256), dtype),
        C: T.Buffer((m, n), "float32"),
        E: T.Buffer((m, n), "float32"),
    ):
        with tile.kernel(1, **options):
            a = tile.shared((m, 32), dtype)
            b = tile.shared((n, 32), dtype)
            d = tile.shared((n, 32), dtype)
            c = tile.fragment((m, n), "float32")
            e = tile.fragment((m, n), "float32")
            tile.fill(c, 0)
            tile.fill(e, 0)
            for l in tile.pipelined(8):
                tile.copy(A[0, l * 32], a)
                tile.copy(B[0, l * 32], b)
                tile.copy(D[0, l * 32], d)
                tile.gemm(a, b, c, transpose_b=True, instruction=instruction)
                tile.gemm(a, d, e, transpose_b=True, instruction=instruction)
            tile.copy(c, C[0, 0])
            tile.copy(e, E[0, 0])

    return func


def in_turn(m: int, n: int, **options: object) -> tirx.PrimFunc:
    """The same in two loops: the first product is stored before the second begins."""

    @T.prim_func
    def func(
        A: T.Buffer((m, 256), "float16"),
        B: T.Buffer((n, 256), "float16"),
        D: T.Buffer((n, 256), "float16"),
        C: T.Buffer((m, n), "float32"),
        E: T.Buffer((m, n), "float32"),
    ):
        with tile.kernel(1, **options):
            a = tile.shared((m, 32), "float16")
            b = tile.shared((n, 32), "float16")
            f = tile.shared((m, 32), "float16")
            d = tile.shared((n, 32), "float16")
            c = tile.fragment((m, n), "float32")
            e = tile.fragment((m, n), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(8):
                tile.copy(A[0, l * 32], a)
                tile.copy(B[0, l * 32], b)
                tile.gemm(a, b, c, transpose_b=True)
            tile.copy(c, C[0, 0])
            tile.fill(e, 0)
            for l in tile.pipelined(8):
                tile.copy(A[0, l * 32], f)
                tile.copy(D[0, l * 32], d)
                tile.gemm(f, d, e, transpose_b=True)
            tile.copy(e, E[0, 0])

    return func


def summed(m: int, n: int, **options: object) -> tirx.PrimFunc:
    """Sums and maxima of blocks of columns, which threads keep around a loop."""

    @T.prim_func
    def func(A: T.Buffer((m, n * 8), "float32"), C: T.Buffer((m, n), "float32"), E: T.Buffer((m, n), "float32")):
        with tile.kernel(1, **options):
            c = tile.fragment((m, n), "float32")
            e = tile.fragment((m, n), "float32")
            x = tile.fragment((m, n), "float32")
            tile.fill(c, 0)
            tile.fill(e, 0)
            for l in range(8):
                tile.copy(A[0, l * n], x)
                with tile.parallel(m, n) as (i, j):
                    c[i, j] = c[i, j] + x[i, j]
                    e[i, j] = T.max(e[i, j], x[i, j])
            tile.copy(c, C[0, 0])
            tile.copy(e, E[0, 0])

    return func
