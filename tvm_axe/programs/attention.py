"""A transformer's attention, its heads shared over tensor-parallel devices, with what comes behind it.

Each device has some of the heads from the projection of queries, keys and values to the weighted values; the output
projection reduces over heads, and is summed over the devices.
"""

from __future__ import annotations

import numpy as np
from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.random import dropout, dropped
from tvm_axe.programs.recipes import matmul_then, received
from tvm_axe.schedule import Schedule

__all__ = ["ATTENTION"]

RATE = 0.1
_EXTENTS = {"test": (2, 12, 8, 12, 2), "uneven": (2, 5, 6, 7, 3), "bench": (2, 256, 768, 12, 64)}


def attention(mesh: Mesh, size: str) -> DistributedProgram:
    """Return out = dropout(concat of heads' softmax(Q K^T / sqrt d) V times Wo + bias) + residual; Q, K, V = X Wqkv."""
    batch, seq, hidden, heads, d = _EXTENTS[size]
    scale = d**-0.5

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((batch, seq, hidden), "float32"),
        Wqkv: T.Buffer((3, heads, hidden, d), "float32"),
        Wo: T.Buffer((heads, d, hidden), "float32"),
        bias: T.Buffer((hidden,), "float32"),
        residual: T.Buffer((batch, seq, hidden), "float32"),
        seed: T.Buffer((1,), "uint32"),
        out: T.Buffer((batch, seq, hidden), "float32"),
    ) -> None:
        QKV = T.sblock_alloc_buffer((heads, 3, batch, seq, d), "float32")
        S = T.sblock_alloc_buffer((heads, batch, seq, seq), "float32")
        peak = T.sblock_alloc_buffer((heads, batch, seq), "float32")
        P = T.sblock_alloc_buffer((heads, batch, seq, seq), "float32")
        total = T.sblock_alloc_buffer((heads, batch, seq), "float32")
        O = T.sblock_alloc_buffer((heads, batch, seq, d), "float32")
        A = T.sblock_alloc_buffer((heads, batch, seq, d), "float32")
        C = T.sblock_alloc_buffer((batch, seq, hidden), "float32")
        for h, w, b, i, k, x in T.grid(heads, 3, batch, seq, hidden, d):
            with T.sblock("qkv"):
                vh, vw, vb, vi, vk, vx = T.axis.remap("SSSSRS", [h, w, b, i, k, x])
                with T.init():
                    QKV[vh, vw, vb, vi, vx] = T.float32(0)
                QKV[vh, vw, vb, vi, vx] = QKV[vh, vw, vb, vi, vx] + X[vb, vi, vk] * Wqkv[vw, vh, vk, vx]
        for h, b, i, j, x in T.grid(heads, batch, seq, seq, d):
            with T.sblock("scores"):
                vh, vb, vi, vj, vx = T.axis.remap("SSSSR", [h, b, i, j, x])
                with T.init():
                    S[vh, vb, vi, vj] = T.float32(0)
                S[vh, vb, vi, vj] = S[vh, vb, vi, vj] + QKV[vh, 0, vb, vi, vx] * QKV[vh, 1, vb, vj, vx]
        for h, b, i, j in T.grid(heads, batch, seq, seq):
            with T.sblock("peak"):
                vh, vb, vi, vj = T.axis.remap("SSSR", [h, b, i, j])
                with T.init():
                    peak[vh, vb, vi] = T.min_value("float32")
                peak[vh, vb, vi] = T.max(peak[vh, vb, vi], S[vh, vb, vi, vj])
        for h, b, i, j in T.grid(heads, batch, seq, seq):
            with T.sblock("weights"):
                vh, vb, vi, vj = T.axis.remap("SSSS", [h, b, i, j])
                P[vh, vb, vi, vj] = T.exp((S[vh, vb, vi, vj] - peak[vh, vb, vi]) * T.float32(scale))
        for h, b, i, j in T.grid(heads, batch, seq, seq):
            with T.sblock("total"):
                vh, vb, vi, vj = T.axis.remap("SSSR", [h, b, i, j])
                with T.init():
                    total[vh, vb, vi] = T.float32(0)
                total[vh, vb, vi] = total[vh, vb, vi] + P[vh, vb, vi, vj]
        for h, b, i, j, x in T.grid(heads, batch, seq, seq, d):
            with T.sblock("values"):
                vh, vb, vi, vj, vx = T.axis.remap("SSSRS", [h, b, i, j, x])
                with T.init():
                    O[vh, vb, vi, vx] = T.float32(0)
                O[vh, vb, vi, vx] = O[vh, vb, vi, vx] + P[vh, vb, vi, vj] * QKV[vh, 2, vb, vj, vx]
        for h, b, i, x in T.grid(heads, batch, seq, d):
            with T.sblock("normalize"):
                vh, vb, vi, vx = T.axis.remap("SSSS", [h, b, i, x])
                A[vh, vb, vi, vx] = O[vh, vb, vi, vx] / total[vh, vb, vi]
        for b, i, h, x, j in T.grid(batch, seq, heads, d, hidden):
            with T.sblock("mm"):
                vb, vi, vh, vx, vj = T.axis.remap("SSRRS", [b, i, h, x, j])
                with T.init():
                    C[vb, vi, vj] = T.float32(0)
                C[vb, vi, vj] = C[vb, vi, vj] + A[vh, vb, vi, vx] * Wo[vh, vx, vj]
        for b, i, j in T.grid(batch, seq, hidden):
            with T.sblock("epi"):
                vb, vi, vj = T.axis.remap("SSS", [b, i, j])
                out[vb, vi, vj] = (
                    dropped(C[vb, vi, vj] + bias[vj], seed[0], T.int64(hidden) * (vb * seq + vi) + vj, RATE)
                    + residual[vb, vi, vj]
                )

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x, residual = normal(rng, batch, seq, hidden), normal(rng, batch, seq, hidden)
        w_qkv = normal(rng, 3, heads, hidden, d, scale=hidden**-0.5)
        w_o = normal(rng, heads, d, hidden, scale=(heads * d) ** -0.5)
        return x, w_qkv, w_o, normal(rng, hidden), residual, rng.integers(1 << 32, size=1, dtype="uint32")

    def compute(
        x: np.ndarray, w_qkv: np.ndarray, w_o: np.ndarray, bias: np.ndarray, residual: np.ndarray, seed: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        q, k, v = x[None, :, None] @ w_qkv[:, None]  # each [batch, heads, seq, d]
        scores = q @ k.swapaxes(2, 3)
        weights = np.exp((scores - scores.max(axis=3, keepdims=True)) * scores.dtype.type(scale))
        values = (weights @ v) / weights.sum(axis=3, keepdims=True)
        product = values.swapaxes(1, 2).reshape(batch * seq, heads * d) @ w_o.reshape(heads * d, hidden)
        index = np.arange(residual.size).reshape(residual.shape)
        return (dropout(product.reshape(residual.shape) + bias, seed, index, RATE) + residual,)

    def share(sch: Schedule) -> tuple[SBlockRV, SBlockRV]:
        for name in ("qkv", "scores", "peak", "weights", "total", "values", "normalize"):
            sch.shard(sch.get_loops(sch.get_sblock(name))[0], "tp")
        partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
        return partial, reduce

    schedules = matmul_then(share, ["epi"], seq, 1, "C")
    product = Rows(seq, batch * hidden, "float32", mesh["tp"])
    moved = {name: received(name, product) for name in schedules}
    return DistributedProgram(
        name="attention",
        func=kernel,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="tp",
        reduced=((batch, seq, hidden), "float32"),
    )


ATTENTION = ProgramFactory(("tp",), attention)
