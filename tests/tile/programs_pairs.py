"""Products of 16-bit floats that overlap a collective, as the halves of a layer do."""

from __future__ import annotations

from collections.abc import Mapping

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule, with_layouts


def plain(m: int, n: int, k: int, transpose_b: bool, dtype: str, sums: str) -> tirx.PrimFunc:
    """out = X W, or X W^T, in the type of `sums`."""
    w_shape = (n, k) if transpose_b else (k, n)

    @T.prim_func(s_tir=True)
    def plain(X: T.Buffer((m, k), dtype), W: T.Buffer(w_shape, dtype), out: T.Buffer((m, n), sums)) -> None:
        for i, l, j in T.grid(m, k, n):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    out[vi, vj] = T.cast(0, sums)
                out[vi, vj] = out[vi, vj] + T.cast(X[vi, vk], sums) * T.cast(
                    W[vj, vk] if transpose_b else W[vk, vj], sums
                )

    return plain


def finished(m: int, n: int, k: int, transpose_b: bool, dtype: str, sums: str) -> tirx.PrimFunc:
    """out = relu(X W + bias) + residual, or of X W^T; the product is of the type of `sums`."""
    w_shape = (n, k) if transpose_b else (k, n)

    @T.prim_func(s_tir=True)
    def finished(
        X: T.Buffer((m, k), dtype),
        W: T.Buffer(w_shape, dtype),
        bias: T.Buffer((n,), "float32"),
        residual: T.Buffer((m, n), dtype),
        out: T.Buffer((m, n), dtype),
    ) -> None:
        C = T.sblock_alloc_buffer((m, n), sums)
        for i, l, j in T.grid(m, k, n):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    C[vi, vj] = T.cast(0, sums)
                C[vi, vj] = C[vi, vj] + T.cast(X[vi, vk], sums) * T.cast(W[vj, vk] if transpose_b else W[vk, vj], sums)
        for i, j in T.grid(m, n):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.cast(
                    T.max(T.cast(C[vi, vj], "float32") + bias[vj], T.float32(0)) + T.cast(residual[vi, vj], "float32"),
                    dtype,
                )

    return finished


def scheduled(
    form: str,
    mesh: Mesh,
    m: int,
    n: int,
    k: int,
    chunks: int = 2,
    tiles: Mapping[str, int] | None = None,
    dtype: str = "float16",
) -> Schedule:
    """The schedule of a form, over the mesh axis "tp".

    ``scatter``: the sum over k is shared, and rows are scattered. ``reduce``: the same, `finished`, and gathered in the
    same stage; ``stages``: in one of its own. ``whole``: all devices take the sum whole. ``gather``: rows of X are
    gathered, and columns shared. Each may be ``finished``, and ``transposed``: W is; and ``wide``: sums are float32.
    """
    kind, transposes = form.split()[0], "transposed" in form
    finishes = "finished" in form or kind in ("reduce", "stages")
    func = (finished if finishes else plain)(m, n, k, transposes, dtype, "float32" if "wide" in form else dtype)
    layouts = {"out": Layout.sharded((m, n), mesh, {0: "tp"})} if kind == "scatter" else {}
    if kind == "gather":
        layouts = {"X": Layout.sharded((m, k), mesh, {0: "tp"}), "out": Layout.sharded((m, n), mesh, {1: "tp"})}
    sch = Schedule(with_layouts(func, layouts), mesh=mesh)
    mm = sch.get_sblock("mm")
    if kind == "gather":
        sch.tile_kernel(mm, "matmul", **(tiles or {}))
        blocks = [mm, *([sch.get_sblock("epi")] if finishes else [])]
        for block in blocks:
            sch.shard(sch.get_loops(block)[-1], "tp")
        gather = sch.redistribute(mm, "X", "tp")
        if finishes:
            row, _, device, *_ = sch.get_loops(mm)
            sch.reorder(device, row)
            sch.reverse_compute_at(blocks[1], row)
        sch.overlap((gather, mm), "tp", chunks)
        return sch
    partial, reduce = sch.shard(sch.get_loops(mm)[1], "tp")
    sch.tile_kernel(partial, "matmul", **(tiles or {}))
    stages = [partial, reduce]
    if kind == "scatter":
        sch.shard(sch.get_loops(reduce)[0], "tp")
    elif kind == "whole":
        stages += [sch.get_sblock("epi")] if finishes else []
    else:
        reduce, gather = sch.split_collective(reduce)
        epi = sch.get_sblock("epi")
        (gather,) = sch.reorder_collective(gather, [epi])
        sch.fuse_collective([reduce, epi, *([gather] if kind == "reduce" else [])])
        stages = [partial, reduce, *([gather] if kind == "stages" else [])]
    sch.overlap(stages, "tp", chunks)
    return sch
