"""The parts that data-parallel optimizers share: their parameters, their blocks, and the same in numpy.

Blocks are ``T.inline`` functions, made afresh for each kernel: upstream numbers the blocks of one that is used again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm.script import tirx as T

from tvm_axe.programs.bucket import Bucket

__all__ = ["BETA1", "BETA2", "EPSILON", "bucket_of", "mean_block", "mean_of", "moment_blocks", "moments_of"]

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
_BUCKETS = {"test": (3, 25, 8), "uneven": (3, 29, 7), "bench": (1024, 4083, 1024), "large": (4096, 16371, 4096)}


def bucket_of(size: str) -> Bucket:
    """Return the parameters of an embedding and a transformer layer: in 36 rows or 41; of 2^24 elements, or 2^28."""
    hidden, vocabulary, width = _BUCKETS[size]
    matrices = {
        "embedding": (vocabulary, hidden),
        "attention.in": (3 * hidden, hidden),
        "attention.out": (hidden, hidden),
        "mlp.up": (4 * hidden, hidden),
        "mlp.down": (hidden, 4 * hidden),
    }
    biases = {f"{name}.bias": (shape[0],) for name, shape in matrices.items() if name != "embedding"}
    norms = {f"norm{number}.{part}": (hidden,) for number in (1, 2) for part in ("scale", "shift")}
    return Bucket({**matrices, **biases, **norms}, width)


def mean_block() -> Callable[..., None]:
    """Blocks "sum" and "mean": total = sum of g over its dimension 0, mean = total / n, in float32."""

    @T.inline
    def blocks(g, total, mean):  # type: ignore[no-untyped-def]
        for i, j, k in T.grid(g.shape[1], g.shape[2], g.shape[0]):
            with T.sblock("sum"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    total[vi, vj] = T.float32(0)
                total[vi, vj] = total[vi, vj] + g[vk, vi, vj].astype("float32")
        for i, j in T.grid(g.shape[1], g.shape[2]):
            with T.sblock("mean"):
                vi, vj = T.axis.remap("SS", [i, j])
                mean[vi, vj] = total[vi, vj] * T.float32(1 / int(g.shape[0]))

    return blocks


def mean_of(g: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the mean over dimension 0, in `dtype`; a lone term isn't copied."""
    if len(g) == 1:
        return g[0].astype(dtype, copy=False)
    return g.sum(axis=0, dtype=dtype) / dtype.type(len(g))


def moment_blocks() -> Callable[..., None]:
    """Blocks "m" and "v": the running means of the gradient and of its square (Kingma and Ba, 2015)."""

    @T.inline
    def blocks(mean, m, v, m_out, v_out):  # type: ignore[no-untyped-def]
        for i, j in T.grid(mean.shape[0], mean.shape[1]):
            with T.sblock("m"):
                vi, vj = T.axis.remap("SS", [i, j])
                m_out[vi, vj] = T.float32(BETA1) * m[vi, vj] + T.float32(1 - BETA1) * mean[vi, vj]
        for i, j in T.grid(mean.shape[0], mean.shape[1]):
            with T.sblock("v"):
                vi, vj = T.axis.remap("SS", [i, j])
                v_out[vi, vj] = T.float32(BETA2) * v[vi, vj] + T.float32(1 - BETA2) * mean[vi, vj] * mean[vi, vj]

    return blocks


def moments_of(mean: np.ndarray, m: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same in numpy."""
    return BETA1 * m + (1 - BETA1) * mean, BETA2 * v + (1 - BETA2) * mean * mean
