"""Which experts each token goes to, and with what weights: what a mixture of experts begins with.

A block has the scores of some tokens in registers, and searches the k largest of each. The softmax over all experts and
over the chosen ones are two conventions; both differ from each other by a factor a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import (
    ROUNDING,
    Expected,
    Kernel,
    Knobs,
    Problem,
    Recipe,
    choose,
    power_of_two,
    rounding_slack,
)
from tvm_axe.tile.kernels.rows import padded
from tvm_axe.tile.keys import PASSES

_HELD = 16
"""Scores that a thread holds, where there are tokens enough."""

_LANES = 32


def topk_gating(
    tokens: int, experts: int, k: int, dtype: str, renormalize: bool = True, *, block_rows: int, threads: int
) -> Recipe:
    """indices, weights (tokens, k): the k largest of each row of logits (tokens, experts), and their softmax.

    The largest is first, of equal ones the first expert's. Weights are float32; of each token they sum up to 1, or
    without `renormalize` to what the chosen experts have of the softmax over all.

    Source: Shazeer et al., "Outrageously large neural networks", 2017, section 2.1; the weights over all experts are
    those of Fedus, Zoph and Shazeer, "Switch transformers", 2022.

    Raises
    ------
    TileError
        There are fewer than `k` experts.
    """
    if not 1 <= k <= experts:
        raise TileError(f"topk_gating: the {k} largest of {experts} experts' scores; valid is 1 to {experts}")
    width = padded(experts)

    @T.prim_func
    def topk_gating(
        logits: T.Buffer((tokens, experts), dtype),
        indices: T.Buffer((tokens, k), "int32"),
        weights: T.Buffer((tokens, k), "float32"),
    ) -> None:
        with tile.kernel(tile.cdiv(tokens, block_rows), threads=threads) as i:
            x = tile.fragment((block_rows, width), "float32")
            best = tile.fragment((block_rows, k), "float32")
            chosen = tile.fragment((block_rows, k), "int32")
            top = tile.fragment((block_rows,), "float32")
            total = tile.fragment((block_rows,), "float32")
            tile.copy(logits[i * block_rows, 0], x)
            if width > experts:
                with tile.parallel(block_rows, width) as (r, c):
                    if c >= experts:
                        x[r, c] = T.float32("-inf")  # behind experts that are masked so
            tile.top_k(x, best, chosen)
            tile.max(best, top)
            with tile.parallel(block_rows, k) as (r, c):
                best[r, c] = T.exp2((best[r, c] - top[r]) * T.float32(LOG2E))
            if renormalize:
                tile.sum(best, total)
            else:
                with tile.parallel(block_rows, width) as (r, c):
                    x[r, c] = T.exp2((x[r, c] - top[r]) * T.float32(LOG2E))
                tile.sum(x, total)
            with tile.parallel(block_rows, k) as (r, c):
                best[r, c] = best[r, c] / total[r]
            tile.copy(chosen, indices[i * block_rows, 0])
            tile.copy(best, weights[i * block_rows, 0])

    return Recipe((tile.read(topk_gating),), ("logits",), ("indices", "weights"))


def _knobs(target: Target, problem: Problem) -> Knobs:
    """A warp a block where its lanes search few results: no warp then waits for another. A CPU has no threads."""
    width, on_gpu = padded(problem["experts"]), isinstance(machine_of(target), Gpu)
    threads = _LANES if problem["k"] <= PASSES and width <= _LANES * _HELD else 4 * _LANES
    held = max(1, threads * _HELD // width) if on_gpu else 4
    return {
        "block_rows": choose(min(held, power_of_two(problem["tokens"])), 1, 2, 4, 8, 16),
        "threads": choose(threads, 32, 64, 128) if on_gpu else (threads,),
    }


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    return {"logits": normal(rng, (problem["tokens"], problem["experts"]), problem["dtype"], 2.0)}


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """Indices are exact; a weight's exponent is rounded as a float32 of its size, and so is the sum, term by term."""
    x = arrays["logits"].astype("float64")
    order = np.argsort(-x, axis=1, kind="stable")[:, : problem["k"]]
    exponent = np.take_along_axis(x, order, 1) - x.max(axis=1, keepdims=True)
    chosen = np.exp(exponent)
    over = chosen if problem.get("renormalize", True) else np.exp(x - x.max(axis=1, keepdims=True))
    value = chosen / over.sum(axis=1, keepdims=True)
    unit = ROUNDING["float32"] * (problem["experts"] + 8 + 4 * np.abs(exponent))
    return {
        "indices": Expected(order.astype("float64"), np.zeros(order.shape)),
        "weights": Expected(value, rounding_slack("float32", unit, value)),
    }


TOPK_GATING = Kernel(
    name="topk_gating",
    summary="indices, weights = the k largest of each row of logits, and their softmax",
    make=topk_gating,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"tokens": 512, "experts": 256, "k": 8, "dtype": "float32"},
        {"tokens": 100, "experts": 64, "k": 6, "dtype": "bfloat16"},
        {"tokens": 33, "experts": 8, "k": 2, "dtype": "bfloat16", "renormalize": False},
        {"tokens": 7, "experts": 160, "k": 6, "dtype": "float16"},
        {"tokens": 1, "experts": 1, "k": 1, "dtype": "float32"},
        {"tokens": 5, "experts": 384, "k": 12, "dtype": "float32"},
    ),
)
