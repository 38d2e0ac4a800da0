"""LAMB (You et al., 2020, algorithm 2), data parallel: Adam whose step each tensor scales by its own norms.

The norms are sums over a tensor's rows. Where rows are shared, so are those sums: a device adds up its own rows, and a
small all-reduce, two numbers a tensor, the devices' sums.
"""

from __future__ import annotations

import numpy as np
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.recipes import data_parallel
from tvm_axe.programs.updates import BETA1, BETA2, EPSILON, bucket_of, mean_block, mean_of, moment_blocks, moments_of

__all__ = ["LAMB"]

DECAY = 0.01


def lamb(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program ``p_out = p - lr |p| / |u| u`` for each tensor's p and its Adam step u with weight decay."""
    bucket = bucket_of(size)
    n, (rows, width), tensors = mesh["dp"], bucket.shape, len(bucket.shapes)
    mean_of_g, moments = mean_block(), moment_blocks()

    @T.prim_func(s_tir=True)
    def kernel(
        g: T.Buffer((n, rows, width), "float32"),
        p: T.Buffer((rows, width), "float32"),
        m: T.Buffer((rows, width), "float32"),
        v: T.Buffer((rows, width), "float32"),
        owner: T.Buffer((rows,), "int32"),
        lr: T.Buffer((1,), "float32"),
        beta_power: T.Buffer((2,), "float32"),
        p_out: T.Buffer((rows, width), "float32"),
        m_out: T.Buffer((rows, width), "float32"),
        v_out: T.Buffer((rows, width), "float32"),
    ) -> None:
        total = T.sblock_alloc_buffer((rows, width), "float32")
        mean = T.sblock_alloc_buffer((rows, width), "float32")
        u = T.sblock_alloc_buffer((rows, width), "float32")
        squares = T.sblock_alloc_buffer((rows, 2), "float32")
        norms = T.sblock_alloc_buffer((tensors, 2), "float32")
        ratio = T.sblock_alloc_buffer((tensors,), "float32")
        mean_of_g(g, total, mean)
        moments(mean, m, v, m_out, v_out)
        for i, j in T.grid(rows, width):
            with T.sblock("u"):
                vi, vj = T.axis.remap("SS", [i, j])
                u[vi, vj] = (T.float32(1) / (T.float32(1) - beta_power[0])) * m_out[vi, vj] / (
                    T.sqrt(v_out[vi, vj] * (T.float32(1) / (T.float32(1) - beta_power[1]))) + T.float32(EPSILON)
                ) + T.float32(DECAY) * p[vi, vj]
        for i, k, j in T.grid(rows, 2, width):
            with T.sblock("squares"):
                vi, vk, vj = T.axis.remap("SSR", [i, k, j])
                with T.init():
                    squares[vi, vk] = T.float32(0)
                squares[vi, vk] = squares[vi, vk] + T.Select(vk == 0, p[vi, vj] * p[vi, vj], u[vi, vj] * u[vi, vj])
        for t, k, i in T.grid(tensors, 2, rows):
            with T.sblock("norms"):
                vt, vk, vi = T.axis.remap("SSR", [t, k, i])
                with T.init():
                    norms[vt, vk] = T.float32(0)
                norms[vt, vk] = norms[vt, vk] + T.Select(owner[vi] == vt, squares[vi, vk], T.float32(0))
        for t in range(tensors):
            with T.sblock("ratio"):
                vt = T.axis.spatial(tensors, t)
                ratio[vt] = T.Select(
                    norms[vt, 0] * norms[vt, 1] > T.float32(0),
                    T.sqrt(norms[vt, 0]) / T.sqrt(norms[vt, 1]),
                    T.float32(1),
                )
        for i, j in T.grid(rows, width):
            with T.sblock("p"):
                vi, vj = T.axis.remap("SS", [i, j])
                p_out[vi, vj] = p[vi, vj] - lr[0] * ratio[owner[vi]] * u[vi, vj]

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        g, p, m, v = np.zeros((n, rows, width), "float32"), bucket.zeros(), bucket.zeros(), bucket.zeros()
        for matrix in (*g, p, m, v):
            for tensor in bucket.views(matrix).values():  # padding stays zero
                tensor[...] = normal(rng, *tensor.shape)
        powers = np.array([BETA1, BETA2], "float32") ** np.float32(7)
        return g, p, m, v**2, bucket.owners, np.array([0.1], "float32"), powers

    def compute(
        g: np.ndarray,
        p: np.ndarray,
        m: np.ndarray,
        v: np.ndarray,
        owner: np.ndarray,
        lr: np.ndarray,
        beta_power: np.ndarray,
    ) -> tuple[np.ndarray, ...]:
        m_out, v_out = moments_of(mean_of(g, p.dtype), m, v)
        u = m_out * (1 / (1 - beta_power[0])) / (np.sqrt(v_out * (1 / (1 - beta_power[1]))) + EPSILON) + DECAY * p
        p_out = np.empty_like(p)
        for rows_of in bucket.rows.values():
            of_p, of_u = (np.sqrt(np.vdot(matrix[rows_of], matrix[rows_of])) for matrix in (p, u))
            p_out[rows_of] = p[rows_of] - lr * (of_p / of_u if of_p * of_u > 0 else 1) * u[rows_of]
        return p_out, m_out, v_out

    schedules = data_parallel(["mean", "m", "v", "u", "squares"], ["p"], states=["m", "v"], sums=["norms"])
    parameters, norms = Rows(rows, width, "float32", n), Rows(tensors, 2, "float32", n)
    moved = dict.fromkeys(schedules, parameters.reduce_scattered + norms.all_reduced + parameters.all_gathered)
    moved["AR-C"] = parameters.all_reduced
    return DistributedProgram(
        name="lamb",
        func=kernel,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="dp",
        reduced=((rows, width), "float32"),
        terms=frozenset({0}),
    )


LAMB = ProgramFactory(("dp",), lamb)
