"""Back through two layers on data-parallel devices: the gradients of one travel beside the products of the other.

Dimension 0 of activations counts the devices, which have tokens of their own. A layer's gradient is summed over them,
and updates weights that all devices hold; what the layer before needs of it is a product of what each device has. So
the second layer's all-reduce has nothing to do with the first layer's products, and the first layer's runs beside the
update of the second.
"""

from __future__ import annotations

import numpy as np
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.recipes import Recipe
from tvm_axe.schedule import Schedule, with_layouts

__all__ = ["LAYERS"]

# Tokens a device, and the widths of what comes in, is between, and goes out.
_EXTENTS = {"test": (6, 8, 12, 4), "uneven": (5, 7, 9, 3), "bench": (512, 512, 2048, 512)}
_RATE = 0.1


def layers(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program w_out = w - rate * sum of x^T d, for w2 with d2, and for w1 with d1 = d2 w2^T."""
    n = mesh["dp"]
    tokens, width, inner, out = _EXTENTS[size]

    @T.prim_func(s_tir=True)
    def kernel(
        x1: T.Buffer((n, tokens, width), "float32"),
        x2: T.Buffer((n, tokens, inner), "float32"),
        d2: T.Buffer((n, tokens, out), "float32"),
        w1: T.Buffer((width, inner), "float32"),
        w2: T.Buffer((inner, out), "float32"),
        w1_out: T.Buffer((width, inner), "float32"),
        w2_out: T.Buffer((inner, out), "float32"),
    ) -> None:
        g2 = T.sblock_alloc_buffer((n, inner, out), "float32")
        total2 = T.sblock_alloc_buffer((inner, out), "float32")
        d1 = T.sblock_alloc_buffer((n, tokens, inner), "float32")
        g1 = T.sblock_alloc_buffer((n, width, inner), "float32")
        total1 = T.sblock_alloc_buffer((width, inner), "float32")
        for s, i, t, j in T.grid(n, inner, tokens, out):
            with T.sblock("part2"):
                vs, vi, vt, vj = T.axis.remap("SSRS", [s, i, t, j])
                with T.init():
                    g2[vs, vi, vj] = T.float32(0)
                g2[vs, vi, vj] = g2[vs, vi, vj] + x2[vs, vt, vi] * d2[vs, vt, vj]
        for i, j, s in T.grid(inner, out, n):
            with T.sblock("sum2"):
                vi, vj, vs = T.axis.remap("SSR", [i, j, s])
                with T.init():
                    total2[vi, vj] = T.float32(0)
                total2[vi, vj] = total2[vi, vj] + g2[vs, vi, vj]
        for i, j in T.grid(inner, out):
            with T.sblock("step2"):
                vi, vj = T.axis.remap("SS", [i, j])
                w2_out[vi, vj] = w2[vi, vj] - T.float32(_RATE) * total2[vi, vj]
        for s, t, i, j in T.grid(n, tokens, inner, out):
            with T.sblock("back"):
                vs, vt, vi, vj = T.axis.remap("SSSR", [s, t, i, j])
                with T.init():
                    d1[vs, vt, vi] = T.float32(0)
                d1[vs, vt, vi] = d1[vs, vt, vi] + d2[vs, vt, vj] * w2[vi, vj]
        for s, i, t, j in T.grid(n, width, tokens, inner):
            with T.sblock("part1"):
                vs, vi, vt, vj = T.axis.remap("SSRS", [s, i, t, j])
                with T.init():
                    g1[vs, vi, vj] = T.float32(0)
                g1[vs, vi, vj] = g1[vs, vi, vj] + x1[vs, vt, vi] * d1[vs, vt, vj]
        for i, j, s in T.grid(width, inner, n):
            with T.sblock("sum1"):
                vi, vj, vs = T.axis.remap("SSR", [i, j, s])
                with T.init():
                    total1[vi, vj] = T.float32(0)
                total1[vi, vj] = total1[vi, vj] + g1[vs, vi, vj]
        for i, j in T.grid(width, inner):
            with T.sblock("step1"):
                vi, vj = T.axis.remap("SS", [i, j])
                w1_out[vi, vj] = w1[vi, vj] - T.float32(_RATE) * total1[vi, vj]

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        scale = (n * tokens) ** -0.5
        activations = [normal(rng, n, tokens, extent, scale=scale) for extent in (width, inner, out)]
        return *activations, normal(rng, width, inner), normal(rng, inner, out, scale=out**-0.5)

    def compute(
        x1: np.ndarray, x2: np.ndarray, d2: np.ndarray, w1: np.ndarray, w2: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        g1 = np.einsum("sti,stj->ij", x1, d2 @ w2.T)
        return w1 - w1.dtype.type(_RATE) * g1, w2 - w2.dtype.type(_RATE) * np.einsum("sti,stj->ij", x2, d2)

    def ar(sch: Schedule) -> None:
        for name in ("part2", "back", "part1"):
            sch.shard(sch.get_loops(sch.get_sblock(name))[0], "dp")
        for name in ("sum2", "sum1"):
            sch.all_reduce(sch.get_loops(sch.get_sblock(name))[-1], "dp")

    def beside(sch: Schedule) -> None:
        ar(sch)
        for name in ("sum2", "sum1"):
            sch.beside(sch.get_sblock(name))

    schedules: dict[str, Recipe] = {"MM-AR-C": ar, "MM-beside(AR)-C": beside}
    moved = sum(Rows(*shape, "float32", n).all_reduced for shape in ((inner, out), (width, inner)))
    shared = {name: Layout.sharded((n, tokens, extent), mesh, {0: "dp"})
              for name, extent in (("x1", width), ("x2", inner), ("d2", out))}  # fmt: skip
    return DistributedProgram(
        name="layers",
        func=with_layouts(kernel, shared),
        mesh=mesh,
        schedules=schedules,
        bytes=dict.fromkeys(schedules, moved),
        inputs=inputs,
        compute=compute,
        axis="dp",
        reduced=((width, inner), "float32"),
    )


LAYERS = ProgramFactory(("dp",), layers)
