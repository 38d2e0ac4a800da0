"""AllGather and matmul: tokens are sharded before, columns after (the way into a sequence-parallel layer)."""

from __future__ import annotations

import numpy as np
from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.recipes import Recipe, chunks_of
from tvm_axe.schedule import Schedule, with_layouts

__all__ = ["AG_MM"]

_EXTENTS = {"test": (12, 8, 24), "uneven": (7, 5, 11), "bench": (2048, 768, 3072)}


def ag_mm(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program Y = X W, where a device has some rows of X, and computes some columns of Y, of these of W."""
    tokens, inner, outer = _EXTENTS[size]

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((tokens, inner), "float32"),
        W: T.Buffer((inner, outer), "float32"),
        Y: T.Buffer((tokens, outer), "float32"),
    ) -> None:
        for i, k, j in T.grid(tokens, inner, outer):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, k, j])
                with T.init():
                    Y[vi, vj] = T.float32(0)
                Y[vi, vj] = Y[vi, vj] + X[vi, vk] * W[vk, vj]

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return normal(rng, tokens, inner), normal(rng, inner, outer, scale=inner**-0.5)

    def compute(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, ...]:
        return (x @ w,)

    def gathered(sch: Schedule) -> tuple[SBlockRV, SBlockRV]:
        mm = sch.get_sblock("mm")
        sch.shard(sch.get_loops(mm)[2], "tp")
        return sch.redistribute(mm, "X", "tp"), mm

    def overlapped(sch: Schedule) -> None:
        sch.overlap(gathered(sch), "tp", chunks_of(tokens, mesh["tp"]))

    layouts = {
        "X": Layout.sharded((tokens, inner), mesh, {0: "tp"}),
        "Y": Layout.sharded((tokens, outer), mesh, {1: "tp"}),
    }
    schedules: dict[str, Recipe] = {"AG-MM": gathered, "ol(AG, MM)": overlapped}
    moved = dict.fromkeys(schedules, Rows(tokens, inner, "float32", mesh["tp"]).all_gathered)
    func = with_layouts(kernel, layouts)
    return DistributedProgram(
        name="ag_mm",
        func=func,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="tp",
        reduced=((tokens, inner), "float32"),
    )


AG_MM = ProgramFactory(("tp",), ag_mm)
