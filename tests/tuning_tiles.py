"""Tile programs with knobs, which the tests tune, or which can't be tuned."""

from tvm.script import tirx as T

from tvm_axe import tile


@T.prim_func
def product(A: T.Buffer((70, 90), "float32"), B: T.Buffer((90, 50), "float32"), C: T.Buffer((70, 50), "float32")):
    bm = tile.knob("bm", (8, 16, 32))
    bk = tile.knob("bk", (32, 96))
    tile.require(bm * bk <= 2048)
    with tile.kernel(tile.cdiv(70, bm)) as m:
        a = tile.shared((bm, bk), "float32")
        b = tile.shared((bk, 64), "float32")
        c = tile.fragment((bm, 64), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(tile.cdiv(90, bk)):
            tile.copy(A[m * bm, k * bk], a)
            tile.copy(B[k * bk, 0], b)
            tile.gemm(a, b, c)
        tile.copy(c, C[m * bm, 0])


@T.prim_func
def wrong(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    """Right with the first value alone: with the second all is wrong, with the third two elements aren't written."""
    way = tile.knob("way", (0, 1, 2))
    with tile.kernel(1):
        a = tile.fragment((64,), "float32")
        tile.copy(A[0], a)
        with tile.parallel(64) as i:
            a[i] = a[i] * 2.0
        if way == 0:
            tile.copy(a, B[0])
        if way == 1:
            tile.fill(a, 7)
            tile.copy(a, B[0])
        if way == 2:
            with tile.parallel(64) as i:
                if i < 64 - way:
                    B[i] = a[i]


@T.prim_func
def rows(table: T.Buffer((40,), "int32"), A: T.Buffer((500, 64), "float32"), B: T.Buffer((40, 64), "float32")):
    """Rows chosen by numbers that are indices."""
    columns = tile.knob("columns", (32, 64))
    with tile.kernel(40, 64 // columns) as (m, n):
        a = tile.fragment((columns,), "float32")
        tile.copy(A[table[m], n * columns], a)
        tile.copy(a, B[m, n * columns])


@T.prim_func
def scaled(A: T.Buffer((64,), "float32"), s: T.float32):
    block = tile.knob("block", (16, 32))
    with tile.kernel(64 // block) as m:
        a = tile.fragment((block,), "float32")
        tile.copy(A[m * block], a)
        with tile.parallel(block) as i:
            a[i] = a[i] * s
        tile.copy(a, A[m * block])


@T.prim_func
def waiting(flags: T.Buffer((4,), "int32"), A: T.Buffer((4, 64), "float32")):
    block = tile.knob("block", (32, 64))
    with tile.kernel(4, 64 // block) as (m, n):
        tile.wait(flags[m], 1)
        a = tile.fragment((block,), "float32")
        tile.fill(a, 1)
        tile.copy(a, A[m, n * block])


@T.prim_func
def plain(A: T.Buffer((64,), "float32")):
    with tile.kernel(1):
        a = tile.fragment((64,), "float32")
        tile.fill(a, 1)
        tile.copy(a, A[0])


@T.prim_func
def unknown(a_handle: T.handle):
    n = T.int32()
    A = T.match_buffer(a_handle, (n,), "float32")
    block = tile.knob("block", (32, 64))
    with tile.kernel(tile.cdiv(n, block)) as m:
        a = tile.fragment((block,), "float32")
        tile.fill(a, 1)
        tile.copy(a, A[m * block])


@T.prim_func
def two_passes(A: T.Buffer((64, 256), "float32"), B: T.Buffer((64, 256), "float32")):
    """Rows divided by their sums, which are summed in pieces; a knob for both kernels, and one for the second."""
    block = tile.knob("block", (8, 16))
    pieces = tile.knob("pieces", (2, 1))
    sums = tile.scratch((pieces, 64), "float32")
    with tile.kernel(64 // block, pieces) as (m, p):
        a = tile.fragment((block, 256 // pieces), "float32")
        s = tile.fragment((block,), "float32")
        tile.copy(A[m * block, p * (256 // pieces)], a)
        tile.sum(a, s)
        tile.copy(s, sums[p, m * block])
    with tile.kernel(64 // block) as m:
        every = tile.fragment((pieces, block), "float32")
        whole = tile.fragment((block,), "float32")
        rows = tile.fragment((block, 256), "float32")
        tile.copy(sums[0, m * block], every)
        tile.sum(every, whole, axis=0)
        tile.copy(A[m * block, 0], rows)
        with tile.parallel(block, 256) as (i, j):
            rows[i, j] = rows[i, j] / (whole[i] + 1000.0)
        tile.copy(rows, B[m * block, 0])
