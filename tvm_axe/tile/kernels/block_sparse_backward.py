"""Gradients of attention over some blocks of keys alone: those of `attention_backward`, whose passes go over lists.

The pass over keys takes the lists that the forward pass has, the one over queries the same blocks by columns, as
FlexAttention does (Dong et al., "Flex Attention", 2024, whose block masks have `q_num_blocks` and `q_indices`).
Of both an operator of PyTorch with its gradients is made by their names::

    forward = KERNELS["block_sparse_attention"].recipe(target, {**problem, "logsumexp": True})
    backward = KERNELS["block_sparse_attention_backward"].recipe(target, problem)
    attend = tile.operator("mine::attend", forward.programs, outputs=forward.outputs, gradient=backward.programs)
    out, _ = attend(q, k, v, counts, indices, query_counts, query_indices)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels import attention_backward as dense
from tvm_axe.tile.kernels import gradients
from tvm_axe.tile.kernels.block_sparse import Lists, check_lists, inputs, listed, parts
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Knobs, Problem, Recipe, choose

_OF_KEYS = ("key_rows", "query_step")
"""The parameters that are numbers of keys; the other tiles are of queries."""


def block_sparse_attention_backward(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: str,
    query_block: int,
    key_block: int,
    width: int,
    query_width: int,
    mask_batch: int = 1,
    mask_heads: int = 1,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    sinks: bool = False,
    *,
    key_rows: int,
    key_step: int,
    query_rows: int,
    query_step: int,
    stages: int = 0,
) -> Recipe:
    """The gradients dQ, dK and dV, and dS with `sinks`, of a loss by what `block_sparse_attention` takes, from dO.

    Its problem is that one's and `query_width`, the room in a list of queries, which is as many rows of blocks as there
    are or less. `query_counts` (mask_batch, mask_heads, columns) of int32 says how many blocks of queries see each of
    the columns of blocks of keys, ``columns = ceil(keys / key_block)``, and the first so many of `query_indices`
    (mask_batch, mask_heads, columns, query_width) of int32 which, in any order, each at most once: the blocks that
    `counts` and `indices` have, by columns, as `lists_of_queries` makes them of these. A key that no query sees has the
    gradient zero. Q to dV, L, S and tiles are `attention_backward`'s, and like it this adds nothing atomically.

    Raises
    ------
    TileError
        kv_heads or mask_heads don't divide heads, mask_batch isn't 1 or batch, lists have no room, a causal query would
        see no key, tiles don't divide blocks, or a scale or a window is none.
    """
    name = "block_sparse_attention_backward"
    check_lists(name, batch, heads, mask_batch, mask_heads, min(width, query_width))
    tiles = {"key_rows": key_rows, "key_step": key_step, "query_rows": query_rows, "query_step": query_step}
    for each, size in tiles.items():
        block, extent = ("key_block", key_block) if each in _OF_KEYS else ("query_block", query_block)
        if extent % size:
            raise TileError(f"{name}: {each}={size}; valid is a number that divides {block}={extent}")
    return dense.attention_backward(
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        dim,
        dtype,
        causal,
        scale,
        window,
        sinks,
        True,
        **tiles,
        stages=stages,
        lists=Lists(query_block, key_block, width, query_width, mask_batch, mask_heads),
    )


def _knobs(target: Target, problem: Problem) -> Knobs:
    """`attention_backward`'s tiles, or the largest parts of blocks that are as large at most.

    Wide heads have 32 queries beside a tile of keys where 64 spill registers, which serializes Hopper's products: a
    list may be empty, and the sums have to be kept on the way around the loop, too. With a causal mask 64 fit there.
    """
    machine, found = machine_of(target), dense.knobs_of_passes(target, problem)
    if isinstance(machine, Gpu) and machine.by_tensor_cores(problem["dtype"]) and problem["dim"] > 64:
        wgmma = machine.tensor_cores == "wgmma"
        if not (wgmma and problem.get("causal", False)):
            found["key_step"] = choose(32, *found["key_step"])
        if not wgmma:
            found["query_step"] = choose(32, *found["query_step"])
    blocks = {name: problem["key_block" if name in _OF_KEYS else "query_block"] for name in found if name != "stages"}
    return {name: parts(blocks[name], *tried) if name in blocks else tried for name, tried in found.items()}


# ---- Data and reference ------------------------------------------------------------------------------------------


def _inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    arrays = inputs(rng, problem)
    return gradients.with_results(rng, problem, arrays, partial(listed, problem, arrays))


def _reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    return gradients.expected(problem, arrays, partial(listed, problem, arrays))


BLOCK_SPARSE_ATTENTION_BACKWARD = Kernel(
    name="block_sparse_attention_backward",
    summary="dQ, dK and dV of attention over the blocks of keys in lists",
    make=block_sparse_attention_backward,
    parameters=_knobs,
    inputs=_inputs,
    reference=_reference,
    cases=(
        {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 200, "keys": 300, "dim": 128, "dtype": "bfloat16",
         "query_block": 128, "key_block": 128, "width": 3, "query_width": 2, "mask_heads": 2},
        {"batch": 2, "heads": 2, "kv_heads": 1, "queries": 200, "keys": 260, "dim": 64, "dtype": "bfloat16",
         "query_block": 64, "key_block": 64, "width": 5, "query_width": 4, "mask_batch": 2, "causal": True,
         "window": 59, "sinks": True},
        {"batch": 1, "heads": 2, "kv_heads": 2, "queries": 130, "keys": 130, "dim": 32, "dtype": "float32",
         "query_block": 64, "key_block": 48, "width": 2, "query_width": 3, "mask_heads": 2, "causal": True,
         "scale": 0.25},
    ),
)  # fmt: skip
