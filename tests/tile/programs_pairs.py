"""Products of 16-bit floats that overlap a collective, as the halves of a layer do."""

from __future__ import annotations

from collections.abc import Mapping

from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule, with_layouts


def multiplied(
    mesh: Mesh,
    m: int,
    n: int,
    k: int,
    kind: str = "scatter",
    transpose_b: bool = False,
    chunks: int = 2,
    tiles: Mapping[str, int] | None = None,
    dtype: str = "float16",
) -> Schedule:
    """out = X W, its sum over k shared over "tp" and overlapped with what follows.

    Its rows are scattered; with the kind ``"reduce"`` relu(. + bias) + residual is computed of them, and gathered.
    """
    w_shape = (n, k) if transpose_b else (k, n)

    @T.prim_func(s_tir=True)
    def plain(X: T.Buffer((m, k), dtype), W: T.Buffer(w_shape, dtype), out: T.Buffer((m, n), dtype)) -> None:
        for i, l, j in T.grid(m, k, n):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    out[vi, vj] = T.cast(0, dtype)
                out[vi, vj] = out[vi, vj] + X[vi, vk] * (W[vj, vk] if transpose_b else W[vk, vj])

    @T.prim_func(s_tir=True)
    def finished(
        X: T.Buffer((m, k), dtype),
        W: T.Buffer(w_shape, dtype),
        bias: T.Buffer((n,), "float32"),
        residual: T.Buffer((m, n), dtype),
        out: T.Buffer((m, n), dtype),
    ) -> None:
        C = T.sblock_alloc_buffer((m, n), dtype)
        for i, l, j in T.grid(m, k, n):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    C[vi, vj] = T.cast(0, dtype)
                C[vi, vj] = C[vi, vj] + X[vi, vk] * (W[vj, vk] if transpose_b else W[vk, vj])
        for i, j in T.grid(m, n):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.cast(
                    T.max(T.cast(C[vi, vj], "float32") + bias[vj], T.float32(0)) + T.cast(residual[vi, vj], "float32"),
                    dtype,
                )

    scattered = with_layouts(plain, {"out": Layout.sharded((m, n), mesh, {0: "tp"})})
    sch = Schedule(scattered if kind == "scatter" else finished, mesh=mesh)
    mm = sch.get_sblock("mm")
    partial, reduce = sch.shard(sch.get_loops(mm)[1], "tp")
    sch.tile_kernel(partial, "matmul", **(tiles or {}))
    if kind == "scatter":
        sch.shard(sch.get_loops(reduce)[0], "tp")
        sch.overlap([partial, reduce], "tp", chunks)
        return sch
    scatter, gather = sch.split_collective(reduce)
    epi = sch.get_sblock("epi")
    (gather,) = sch.reorder_collective(gather, [epi])
    sch.fuse_collective([scatter, epi, gather])
    sch.overlap([partial, scatter], "tp", chunks)
    return sch


def gathered(
    mesh: Mesh,
    m: int,
    n: int,
    k: int,
    kind: str = "gather",
    transpose_b: bool = False,
    chunks: int = 2,
    tiles: Mapping[str, int] | None = None,
    dtype: str = "float16",
) -> Schedule:
    """Y = X W of rows of X that each device has some of, and columns of W likewise, overlapped with the gather."""
    w_shape = (n, k) if transpose_b else (k, n)

    @T.prim_func(s_tir=True)
    def plain(X: T.Buffer((m, k), dtype), W: T.Buffer(w_shape, dtype), Y: T.Buffer((m, n), dtype)) -> None:
        for i, l, j in T.grid(m, k, n):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    Y[vi, vj] = T.cast(0, dtype)
                Y[vi, vj] = Y[vi, vj] + X[vi, vk] * (W[vj, vk] if transpose_b else W[vk, vj])

    shared = {"X": Layout.sharded((m, k), mesh, {0: "tp"}), "Y": Layout.sharded((m, n), mesh, {1: "tp"})}
    sch = Schedule(with_layouts(plain, shared), mesh=mesh)
    mm = sch.get_sblock("mm")
    sch.tile_kernel(mm, "matmul", **(tiles or {}))
    sch.shard(sch.get_loops(mm)[2], "tp")
    gather = sch.redistribute(mm, "X", "tp")
    sch.overlap((gather, mm), "tp", chunks)
    return sch
