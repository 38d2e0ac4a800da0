"""The boundary of two pipeline stages that are tensor parallel themselves: CoCoNet's pipeline-parallel example.

Dimension 0 counts the stages; each works on a micro-batch of its own and passes the sum of its partial products on to
the next, which adds bias and residual. Sending slices, before they are gathered, moves a part of the bytes.
"""

from __future__ import annotations

import numpy as np
from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.random import dropout, dropped
from tvm_axe.programs.recipes import Recipe, chunks_of, on_slices
from tvm_axe.schedule import Schedule, with_layouts

__all__ = ["PIPELINE"]

RATE = 0.1
_EXTENTS = {"test": (12, 24, 8), "uneven": (7, 11, 5), "bench": (2048, 3072, 768)}


def pipeline(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program out[s] = dropout(C[s - 1] + bias[s]) + residual[s], C[s] = X[s] W[s]; 0 follows the last."""
    stages = mesh["pp"]
    tokens, inner, outer = _EXTENTS[size]

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((stages, tokens, inner), "float32"),
        W: T.Buffer((stages, inner, outer), "float32"),
        bias: T.Buffer((stages, outer), "float32"),
        residual: T.Buffer((stages, tokens, outer), "float32"),
        seed: T.Buffer((1,), "uint32"),
        out: T.Buffer((stages, tokens, outer), "float32"),
    ) -> None:
        C = T.sblock_alloc_buffer((stages, tokens, outer), "float32")
        Z = T.sblock_alloc_buffer((stages, tokens, outer), "float32")
        for s, i, k, j in T.grid(stages, tokens, inner, outer):
            with T.sblock("mm"):
                vs, vi, vk, vj = T.axis.remap("SSRS", [s, i, k, j])
                with T.init():
                    C[vs, vi, vj] = T.float32(0)
                C[vs, vi, vj] = C[vs, vi, vj] + X[vs, vi, vk] * W[vs, vk, vj]
        for s, i, j in T.grid(stages, tokens, outer):
            with T.sblock("send"):
                vs, vi, vj = T.axis.remap("SSS", [s, i, j])
                Z[vs, vi, vj] = C[(vs + (stages - 1)) % stages, vi, vj]
        for s, i, j in T.grid(stages, tokens, outer):
            with T.sblock("epi"):
                vs, vi, vj = T.axis.remap("SSS", [s, i, j])
                out[vs, vi, vj] = (
                    dropped(Z[vs, vi, vj] + bias[vs, vj], seed[0], T.int64(outer) * (vs * tokens + vi) + vj, RATE)
                    + residual[vs, vi, vj]
                )

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        x, w = normal(rng, stages, tokens, inner), normal(rng, stages, inner, outer, scale=inner**-0.5)
        seed = rng.integers(1 << 32, size=1, dtype="uint32")
        return x, w, normal(rng, stages, outer), normal(rng, stages, tokens, outer), seed

    def compute(
        x: np.ndarray, w: np.ndarray, bias: np.ndarray, residual: np.ndarray, seed: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        received = np.roll(x @ w, 1, axis=0)
        index = np.arange(residual.size).reshape(residual.shape)
        return (dropout(received + bias[:, None], seed, index, RATE) + residual,)

    def share(sch: Schedule) -> SBlockRV:
        """Share the stages over their devices; return the all-reduce between them."""
        mm, send, epi = (sch.get_sblock(name) for name in ("mm", "send", "epi"))
        sch.shard(sch.get_loops(mm)[0], "pp")
        sch.send(send, "pp")
        sch.shard(sch.get_loops(epi)[0], "pp")
        _, reduce = sch.shard(sch.get_loops(mm)[3], "tp")
        return reduce

    def rs_p2p_c_ag(sch: Schedule) -> tuple[SBlockRV, list[SBlockRV], SBlockRV]:
        scatter, (blocks,), (gather,) = on_slices(sch, share(sch), [["send", "epi"]], 1)
        return scatter, blocks, gather

    def overlapped(sch: Schedule) -> None:
        scatter, blocks, gather = rs_p2p_c_ag(sch)
        sch.fuse_collective(blocks)
        sch.overlap([scatter, blocks[0], gather], "tp", chunks_of(tokens, mesh["tp"]))

    schedules: dict[str, Recipe] = {
        "AR-P2P-C": share,
        "RS-P2P-C-AG": rs_p2p_c_ag,
        "ol(RS, fuse(P2P-C), AG)": overlapped,
    }
    stage = Rows(tokens, outer, "float32", mesh["tp"])
    sends = int(stages > 1)
    moved = dict.fromkeys(schedules, stage.reduce_scattered + sends * stage.block + stage.all_gathered)
    moved["AR-P2P-C"] = stage.all_reduced + sends * stage.whole
    func = with_layouts(kernel, {"out": Layout.sharded((stages, tokens, outer), mesh, {0: "pp"})})
    return DistributedProgram(
        name="pipeline",
        func=func,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="tp",
        reduced=((tokens, outer), "float32"),
    )


PIPELINE = ProgramFactory(("pp", "tp"), pipeline)
