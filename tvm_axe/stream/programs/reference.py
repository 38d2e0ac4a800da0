"""The programs' results in numpy, in float64: what they are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from tvm_axe.stream.programs.workloads import Heads, MoE

__all__ = ["attention_reference", "decoder_reference", "moe_reference"]

Arrays = Mapping[str, np.ndarray]
Array = NDArray[np.float64]


def moe_reference(arrays: Arrays, routing: NDArray[np.int64], moe: MoE) -> dict[str, Array]:
    """Return ``y`` of `moe_layer`, token by token."""
    given = {name: array.astype(np.float64) for name, array in arrays.items()}
    gate, up = (given[name].reshape(moe.experts, moe.width, moe.hidden) for name in ("w_gate", "w_up"))
    down = given["w_down"].reshape(moe.experts, moe.hidden, moe.width)
    y = np.zeros_like(given["x"])
    for token, experts in enumerate(routing):
        for choice, expert in enumerate(experts):
            x = given["x"][token]
            gated = x @ gate[expert]
            hidden = gated / (1 + np.exp(-gated)) * (x @ up[expert])
            y[token] += given["scale"][token, choice] * (hidden @ down[expert])
    return {"y": y}


def attention_reference(arrays: Arrays, lengths: NDArray[np.int64], heads: Heads) -> dict[str, Array]:
    """Return ``out`` of `attention`, and the caches with NaN where they hold nothing."""
    given = {name: array.astype(np.float64) for name, array in arrays.items()}
    batch = len(lengths)
    caches = {}
    for name in "kv":
        cache = given[f"{name}_cache"].reshape(batch, -1, heads.size).copy()
        for request, length in enumerate(lengths):
            cache[request, length] = given[name][request]
            cache[request, length + 1 :] = np.nan
        caches[name] = cache
    out = np.empty((batch, heads.queries, heads.size))
    for request, length in enumerate(lengths):
        keys, values = (caches[name][request, : length + 1] for name in "kv")
        scores = np.exp(given["q"].reshape(out.shape)[request] @ keys.T)
        out[request] = scores @ values / scores.sum(axis=1, keepdims=True)
    found = {f"{name}_cache": cache.reshape(-1, heads.size) for name, cache in caches.items()}
    return {"out": out.reshape(-1, heads.size), **found}


def decoder_reference(
    arrays: Arrays, lengths: NDArray[np.int64], routing: NDArray[np.int64], heads: Heads, moe: MoE
) -> dict[str, Array]:
    """Return ``y`` of `decoder_layer`, and the caches with NaN where they hold nothing."""
    given = {name: array.astype(np.float64) for name, array in arrays.items()}
    batch, groups = len(lengths), heads.groups
    x = given["x"]
    normed = _norm(x, given["norm_1"])
    projected = {
        name: np.concatenate([normed @ part for part in np.split(given[f"w_{name}"], groups)]).reshape(-1, heads.size)
        for name in "qkv"
    }
    caches = {f"{name}_cache": given[f"{name}_cache"] for name in "kv"}
    attended = attention_reference({**projected, **caches}, np.tile(lengths, groups), heads)
    rows = attended["out"].reshape(groups, batch, -1)
    residual = x + sum(rows[group] @ part for group, part in enumerate(np.split(given["w_o"], groups)))
    tokens = {**given, "x": _norm(residual, given["norm_2"])}
    y = residual + moe_reference(tokens, routing, moe)["y"]
    return {"y": y, **{name: attended[name] for name in caches}}


def _norm(x: Array, gain: Array) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(axis=1, keepdims=True)) * gain
    return normed
