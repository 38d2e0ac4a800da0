"""A row-parallel matmul before a residual and an RMSNorm: sequence parallel, if each device normalizes its tokens.

(Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022.)
"""

from __future__ import annotations

import numpy as np
from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.recipes import matmul_then, received
from tvm_axe.schedule import Schedule

__all__ = ["NORM"]

EPSILON = 1e-6
_EXTENTS = {"test": (12, 24, 8), "uneven": (7, 11, 5), "bench": (2048, 3072, 768)}


def norm(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program Y = RMSNorm(X W + residual) gamma (Zhang and Sennrich, 2019)."""
    tokens, inner, outer = _EXTENTS[size]

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((tokens, inner), "float32"),
        W: T.Buffer((inner, outer), "float32"),
        residual: T.Buffer((tokens, outer), "float32"),
        gamma: T.Buffer((outer,), "float32"),
        Y: T.Buffer((tokens, outer), "float32"),
    ) -> None:
        C = T.sblock_alloc_buffer((tokens, outer), "float32")
        H = T.sblock_alloc_buffer((tokens, outer), "float32")
        squares = T.sblock_alloc_buffer((tokens,), "float32")
        for i, k, j in T.grid(tokens, inner, outer):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, k, j])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vk, vj]
        for i, j in T.grid(tokens, outer):
            with T.sblock("hidden"):
                vi, vj = T.axis.remap("SS", [i, j])
                H[vi, vj] = C[vi, vj] + residual[vi, vj]
        for i, j in T.grid(tokens, outer):
            with T.sblock("squares"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    squares[vi] = T.float32(0)
                squares[vi] = squares[vi] + H[vi, vj] * H[vi, vj]
        for i, j in T.grid(tokens, outer):
            with T.sblock("norm"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = (
                    H[vi, vj]
                    * (T.float32(1) / T.sqrt(squares[vi] * T.float32(1 / outer) + T.float32(EPSILON)))
                    * gamma[vj]
                )

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        weight = normal(rng, inner, outer, scale=inner**-0.5)
        return normal(rng, tokens, inner), weight, normal(rng, tokens, outer), normal(rng, outer)

    def compute(x: np.ndarray, w: np.ndarray, residual: np.ndarray, gamma: np.ndarray) -> tuple[np.ndarray, ...]:
        hidden = x @ w + residual
        scale = 1 / np.sqrt(np.square(hidden).mean(axis=1, keepdims=True) + EPSILON)
        return (hidden * scale * gamma,)

    def share(sch: Schedule) -> tuple[SBlockRV, SBlockRV]:
        partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
        return partial, reduce

    schedules = matmul_then(share, ["hidden", "squares", "norm"], tokens, 0, "Norm")
    product = Rows(tokens, outer, "float32", mesh["tp"])
    moved = {name: received(name, product) for name in schedules}
    return DistributedProgram(
        name="norm",
        func=kernel,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="tp",
        reduced=((tokens, outer), "float32"),
    )


NORM = ProgramFactory(("tp",), norm)
