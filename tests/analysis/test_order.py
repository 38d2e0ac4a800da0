"""In what order blocks write and read."""

import pytest
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.analysis.blocks import nested_blocks
from tvm_axe.analysis.order import reads_what_is_written, shared_loops, unfinished_loop


def pair(offset: int, rows: int = 1) -> tirx.PrimFunc:
    """`b` reads rows i + offset .. i + offset + rows - 1 where `c` has written row i."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def func(A: T.Buffer((8, 6), "float32"), C: T.Buffer((8, 6), "float32"), B: T.Buffer((8, 6), "float32")):
        for i in range(8):
            for j in range(6):
                with T.sblock("c"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = A[vi, vj]
            for j in range(6):
                with T.sblock("b"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    T.reads(C[vi + offset : vi + offset + rows, vj])
                    T.writes(B[vi, vj])
                    B[vi, vj] = C[vi + offset, vj]

    return func


@pytest.mark.parametrize(("offset", "rows", "expected"), [(0, 1, True), (1, 1, False), (-1, 1, False), (0, 2, False)])
def test_reads_what_is_written(offset, rows, expected):
    func = pair(offset, rows)
    writer, reader = nested_blocks(func.body.block.body)
    assert [loop.loop_var.name for loop in shared_loops(writer, reader)] == ["i"]
    assert unfinished_loop(writer, reader) is None
    assert reads_what_is_written(writer, reader, func.params[1]) is expected


@pytest.mark.parametrize("around", ["spatial", "reduced"])
def test_unfinished_sums(around):
    """A reader below a loop over which a sum still runs sees a part of it; below one of its spatial loops all."""

    @T.prim_func(s_tir=True)
    def rows(A: T.Buffer((8, 6), "float32"), s: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
        for i in range(8):
            for j in range(6):
                with T.sblock("s"):
                    vi, vj = T.axis.remap("SR", [i, j])
                    with T.init():
                        s[vi] = T.float32(0)
                    s[vi] = s[vi] + A[vi, vj]
            with T.sblock("y"):
                vi = T.axis.spatial(8, i)
                Y[vi] = s[vi]

    @T.prim_func(s_tir=True)
    def columns(A: T.Buffer((8, 6), "float32"), s: T.Buffer((6,), "float32"), Y: T.Buffer((8, 6), "float32")):
        for i in range(8):
            for j in range(6):
                with T.sblock("s"):
                    vj, vi = T.axis.remap("SR", [j, i])
                    with T.init():
                        s[vj] = T.float32(0)
                    s[vj] = s[vj] + A[vi, vj]
            for j in range(6):
                with T.sblock("y"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    Y[vi, vj] = s[vj]

    func = rows if around == "spatial" else columns
    writer, reader = nested_blocks(func.body.block.body)
    loop = unfinished_loop(writer, reader)
    assert (loop is None) == (around == "spatial")
    assert loop is None or loop.loop_var.name == "i"
    assert reads_what_is_written(writer, reader, func.params[1]) == (around == "spatial")
