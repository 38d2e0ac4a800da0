"""A transpose through shared memory on a GPU, the tile row-major, padded or swizzled: a layout is all that differs.

Each block of threads reads a 32 x 32 tile row by row into shared memory and writes it column by column. Row-major, the
32 lanes that read a column meet in one bank. Padded by a word a row, or swizzled (the column index xor the row), they
don't:

    tvm-axe layout show "S[(32, 32) : (32, 1)]" --shape 32x32 --kind banks --access column

Needs no GPU to print the CUDA source; `scripts/bench_transpose.py` times all three on one.
"""

import tvm
from tvm import s_tir, tirx
from tvm.script import tirx as T

from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.schedule import set_layout

TILE = 32
ROW_MAJOR = Layout.parse("S[(32, 32) : (32, 1)]")
LAYOUTS = {
    "row-major": None,
    "padded": Layout.parse("S[(32, 32) : (33, 1)]"),
    "swizzled": ComposeLayout(0, 5, 5, ROW_MAJOR),
}


def transpose(rows: int, columns: int) -> tirx.PrimFunc:
    """``C[i, j] = A[j, i]`` for A of rows x columns, float32."""

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((rows, columns), "float32"), C: T.Buffer((columns, rows), "float32")):
        for i, j in T.grid(columns, rows):
            with T.sblock("transpose"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vj, vi]

    return main


def tiled(rows: int, columns: int, layout: Layout | ComposeLayout | None) -> s_tir.Schedule:
    """The transpose by 32 x 32 tiles and 256 threads, the tile in shared memory laid out as `layout` says."""
    sch = s_tir.Schedule(transpose(rows, columns))
    block = sch.get_sblock("transpose")
    shared = sch.cache_read(block, 0, "shared")
    i, j = sch.get_loops(block)
    io, ii = sch.split(i, [None, TILE])
    jo, ji = sch.split(j, [None, TILE])
    sch.reorder(io, jo, ii, ji)
    sch.bind(io, "blockIdx.y")
    sch.bind(jo, "blockIdx.x")
    sch.compute_at(shared, jo)
    for row, lane in ((ii, ji), sch.get_loops(shared)[-2:]):
        sch.bind(lane, "threadIdx.x")
        # Eight rows at a time, so that a warp's lanes take consecutive elements and threads of a block differ in row.
        step, group = sch.split(row, [None, 8])
        sch.unroll(step)
        sch.bind(group, "threadIdx.y")
    if layout is not None:
        set_layout(sch, "A_shared", layout, tile=(TILE, TILE))
    return sch


if __name__ == "__main__":
    for name, layout in LAYOUTS.items():
        target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
        source = tvm.compile(tiled(1024, 1024, layout).mod, target=target).mod.imports[0].inspect_source()
        print(name, *(line.strip()[:150] for line in source.splitlines() if "A_shared" in line), sep="\n  ")
