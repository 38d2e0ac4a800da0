"""Data-parallel optimizers over a bucket of parameters: SGD with momentum and Adam, the latter in mixed precision too.

Each device has its own gradients; their mean over the devices updates the parameters, which all devices hold. Updates
are functions: state goes in and comes out. In AR-C every device updates everything; in RS-C-AG each updates its own
rows, keeps their state for itself, and only new parameters travel; fused, that is one kernel (CoCoNet's data-parallel
example).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.programs.program import DistributedProgram, ProgramFactory, Rows, normal
from tvm_axe.programs.recipes import data_parallel, received
from tvm_axe.programs.updates import BETA1, BETA2, EPSILON, bucket_of, mean_block, mean_of, moment_blocks, moments_of

__all__ = ["ADAM", "ADAM_F16", "SGD"]

MOMENTUM = 0.9


def sgd(mesh: Mesh, size: str) -> DistributedProgram:
    """Return the program p_out = p - lr m_out, where m_out = 0.9 m + mean of g."""
    n, (rows, width) = mesh["dp"], bucket_of(size).shape
    mean_of_g = mean_block()

    @T.prim_func(s_tir=True)
    def kernel(
        g: T.Buffer((n, rows, width), "float32"),
        p: T.Buffer((rows, width), "float32"),
        m: T.Buffer((rows, width), "float32"),
        lr: T.Buffer((1,), "float32"),
        p_out: T.Buffer((rows, width), "float32"),
        m_out: T.Buffer((rows, width), "float32"),
    ) -> None:
        total = T.sblock_alloc_buffer((rows, width), "float32")
        mean = T.sblock_alloc_buffer((rows, width), "float32")
        mean_of_g(g, total, mean)
        for i, j in T.grid(rows, width):
            with T.sblock("m"):
                vi, vj = T.axis.remap("SS", [i, j])
                m_out[vi, vj] = T.float32(MOMENTUM) * m[vi, vj] + mean[vi, vj]
        for i, j in T.grid(rows, width):
            with T.sblock("p"):
                vi, vj = T.axis.remap("SS", [i, j])
                p_out[vi, vj] = p[vi, vj] - lr[0] * m_out[vi, vj]

    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        return normal(rng, n, rows, width), normal(rng, rows, width), normal(rng, rows, width), np.array([0.1], "f4")

    def compute(g: np.ndarray, p: np.ndarray, m: np.ndarray, lr: np.ndarray) -> tuple[np.ndarray, ...]:
        m_out = MOMENTUM * m + mean_of(g, p.dtype)
        return p - lr * m_out, m_out

    schedules = data_parallel(["mean", "m", "p"], states=["m"])
    bucket = Rows(rows, width, "float32", n)
    moved = {name: received(name, bucket) for name in schedules}
    return DistributedProgram(
        name="sgd",
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


def adam(mesh: Mesh, size: str) -> DistributedProgram:
    """Return Adam (Kingma and Ba, 2015, algorithm 1); beta_power is beta1 and beta2 to the number of the step."""
    n, (rows, width) = mesh["dp"], bucket_of(size).shape
    mean_of_g, moments, step = mean_block(), moment_blocks(), _step_block()

    @T.prim_func(s_tir=True)
    def kernel(
        g: T.Buffer((n, rows, width), "float32"),
        p: T.Buffer((rows, width), "float32"),
        m: T.Buffer((rows, width), "float32"),
        v: T.Buffer((rows, width), "float32"),
        lr: T.Buffer((1,), "float32"),
        beta_power: T.Buffer((2,), "float32"),
        p_out: T.Buffer((rows, width), "float32"),
        m_out: T.Buffer((rows, width), "float32"),
        v_out: T.Buffer((rows, width), "float32"),
    ) -> None:
        total = T.sblock_alloc_buffer((rows, width), "float32")
        mean = T.sblock_alloc_buffer((rows, width), "float32")
        mean_of_g(g, total, mean)
        moments(mean, m, v, m_out, v_out)
        step(p, m_out, v_out, lr, beta_power, p_out)

    schedules = data_parallel(["mean", "m", "v", "p"], states=["m", "v"])
    bucket = Rows(rows, width, "float32", n)
    moved = {name: received(name, bucket) for name in schedules}
    inputs = _adam_inputs(n, rows, width, "float32")
    reduced = ((rows, width), "float32")
    return DistributedProgram(
        name="adam",
        func=kernel,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=_adam_in_numpy,
        axis="dp",
        reduced=reduced,
        terms=frozenset({0}),
    )


def adam_f16(mesh: Mesh, size: str) -> DistributedProgram:
    """Return Adam in mixed precision: gradients and the next step's parameters f16, state and master parameters f32.

    The f32 parameters are state as well, so that an all-gather moves 2 bytes a parameter.
    """
    n, (rows, width) = mesh["dp"], bucket_of(size).shape
    mean_of_g, moments, step = mean_block(), moment_blocks(), _step_block()

    @T.prim_func(s_tir=True)
    def kernel(
        g: T.Buffer((n, rows, width), "float16"),
        p: T.Buffer((rows, width), "float32"),
        m: T.Buffer((rows, width), "float32"),
        v: T.Buffer((rows, width), "float32"),
        lr: T.Buffer((1,), "float32"),
        beta_power: T.Buffer((2,), "float32"),
        p_out: T.Buffer((rows, width), "float32"),
        m_out: T.Buffer((rows, width), "float32"),
        v_out: T.Buffer((rows, width), "float32"),
        p_f16: T.Buffer((rows, width), "float16"),
    ) -> None:
        total = T.sblock_alloc_buffer((rows, width), "float32")
        mean = T.sblock_alloc_buffer((rows, width), "float32")
        mean_of_g(g, total, mean)
        moments(mean, m, v, m_out, v_out)
        step(p, m_out, v_out, lr, beta_power, p_out)
        for i, j in T.grid(rows, width):
            with T.sblock("p_f16"):
                vi, vj = T.axis.remap("SS", [i, j])
                p_f16[vi, vj] = T.Cast("float16", p_out[vi, vj])

    def compute(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        p_out, m_out, v_out = _adam_in_numpy(*arrays)
        return p_out, m_out, v_out, p_out if p_out.dtype == "float64" else p_out.astype("float16")

    schedules = data_parallel(["mean", "m", "v", "p", "p_f16"], states=["p", "m", "v"])
    bucket = Rows(rows, width, "float16", n)
    moved = {name: received(name, bucket) for name in schedules}
    # A sum of casts is no all-reduce of the engine's: every device reads and adds up all of its peers' gradients.
    moved["AR-C"] = (n - 1) * 2 * rows * width
    inputs = _adam_inputs(n, rows, width, "float16")
    reduced = ((rows, width), "float16")
    return DistributedProgram(
        name="adam_f16",
        func=kernel,
        mesh=mesh,
        schedules=schedules,
        bytes=moved,
        inputs=inputs,
        compute=compute,
        axis="dp",
        reduced=reduced,
        terms=frozenset({0}),
        tolerance=2e-3,
    )


def _step_block() -> Callable[..., None]:
    """Block "p": p_out = p - lr m' / (sqrt(v') + epsilon), with m' and v' free of the bias towards zero."""

    @T.inline
    def blocks(p, m_out, v_out, lr, beta_power, p_out):  # type: ignore[no-untyped-def]
        for i, j in T.grid(p.shape[0], p.shape[1]):
            with T.sblock("p"):
                vi, vj = T.axis.remap("SS", [i, j])
                p_out[vi, vj] = p[vi, vj] - lr[0] / (T.float32(1) - beta_power[0]) * m_out[vi, vj] / (
                    T.sqrt(v_out[vi, vj] * (T.float32(1) / (T.float32(1) - beta_power[1]))) + T.float32(EPSILON)
                )

    return blocks


def _adam_in_numpy(
    g: np.ndarray, p: np.ndarray, m: np.ndarray, v: np.ndarray, lr: np.ndarray, beta_power: np.ndarray
) -> tuple[np.ndarray, ...]:
    m_out, v_out = moments_of(mean_of(g, p.dtype), m, v)
    p_out = p - lr / (1 - beta_power[0]) * m_out / (np.sqrt(v_out * (1 / (1 - beta_power[1]))) + EPSILON)
    return p_out, m_out, v_out


def _adam_inputs(n: int, rows: int, width: int, dtype: str) -> Callable[[np.random.Generator], tuple[np.ndarray, ...]]:
    def inputs(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
        g, p, m = normal(rng, n, rows, width).astype(dtype), normal(rng, rows, width), normal(rng, rows, width)
        powers = np.array([BETA1, BETA2], "float32") ** np.float32(7)
        return g, p, m, normal(rng, rows, width) ** 2, np.array([0.1], "float32"), powers

    return inputs


SGD, ADAM, ADAM_F16 = (ProgramFactory(("dp",), build) for build in (sgd, adam, adam_f16))
