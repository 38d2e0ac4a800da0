"""The second half of a transformer's MLP and what comes behind it, the reduction shared over tensor-parallel devices.

(Megatron's row-parallel layer, and CoCoNet's model-parallel example.)
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

__all__ = ["MLP"]

RATE = 0.1
_EXTENTS = {"test": (12, 24, 8), "uneven": (7, 11, 5), "bench": (4096, 3072, 768)}


def mlp(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program out = dropout(X W + bias) + residual."""
    tokens, inner, outer = _EXTENTS[size]

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((tokens, inner), "float32"),
        W: T.Buffer((inner, outer), "float32"),
        bias: T.Buffer((outer,), "float32"),
        residual: T.Buffer((tokens, outer), "float32"),
        seed: T.Buffer((1,), "uint32"),
        out: T.Buffer((tokens, outer), "float32"),
    ) -> None:
        C = T.sblock_alloc_buffer((tokens, outer), "float32")
        for i, k, j in T.grid(tokens, inner, outer):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, k, j])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vk, vj]
        for i, j in T.grid(tokens, outer):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = dropped(C[vi, vj] + bias[vj], seed[0], T.int64(outer) * vi + vj, RATE) + residual[vi, vj]

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        weight = normal(rng, inner, outer, scale=inner**-0.5)
        seed = rng.integers(1 << 32, size=1, dtype="uint32")
        return normal(rng, tokens, inner), weight, normal(rng, outer), normal(rng, tokens, outer), seed

    def compute(
        x: np.ndarray, w: np.ndarray, bias: np.ndarray, residual: np.ndarray, seed: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        index = np.arange(residual.size).reshape(residual.shape)
        return (dropout(x @ w + bias, seed, index, RATE) + residual,)

    def share(sch: Schedule) -> tuple[SBlockRV, SBlockRV]:
        partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
        return partial, reduce

    schedules = matmul_then(share, ["epi"], tokens, 0, "C")
    product = Rows(tokens, outer, "float32", mesh["tp"])
    moved = {name: received(name, product) for name in schedules}
    return DistributedProgram(
        name="mlp",
        func=kernel,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="tp",
        reduced=((tokens, outer), "float32"),
    )


MLP = ProgramFactory(("tp",), mlp)
