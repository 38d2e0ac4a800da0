"""A Llama-style decoder over upstream's paged cache, as its frontend writes one, and the same in numpy."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm.target import Target

KV = "vm.builtin.kv_state_"
THETA, EPSILON = 10000.0, 1e-5
CPU = Target("llvm")


@dataclass(frozen=True)
class Sizes:
    """What a decoder is: heads of queries, groups of keys and values, columns of a head, and the rest."""

    heads: int = 8
    groups: int = 4
    size: int = 16
    hidden: int = 64
    inner: int = 96
    layers: int = 2
    words: int = 50
    scaling: tuple[tuple[str, Any], ...] = ()
    dtype: str = "float32"
    rope: RopeMode = RopeMode.NORMAL

    @property
    def packed(self) -> int:
        """The heads of packed queries, keys and values."""
        return self.heads + 2 * self.groups


class Cached(nn.Module):
    """A module with the function that makes its cache, whose functions are those of a target."""

    of: Sizes
    target: Target

    def create(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ) -> PagedKVCache:
        of = self.of
        return TIRPagedKVCache(
            attn_kind="mha", max_batch_size=max_batch_size, max_total_seq_len=max_total_seq_len,
            prefill_chunk_size=prefill_chunk_size, page_size=page_size, support_sliding_window=support_sliding_window,
            layer_partition=relax.ShapeExpr([0, of.layers]), num_hidden_layers=of.layers,
            num_attention_heads=of.heads, num_key_value_heads=of.groups, qk_head_dim=of.size, v_head_dim=of.size,
            mla_original_qk_head_dim=of.size, mla_original_v_head_dim=of.size, rope_mode=of.rope, rope_scale=1,
            rope_theta=THETA, rope_scaling=dict(of.scaling), rope_ext_factors=tirx.IntImm("int64", 0),
            rotary_dim=of.size, enable_disaggregation=False, dtype=of.dtype, target=self.target,
        )  # fmt: skip

    def exported_with(self, functions: dict[str, dict[str, Any]]) -> tvm.IRModule:
        """The module with these functions, what each takes given, and the one that makes the cache."""
        sizes = inspect.signature(self.create).parameters
        return self.export_tvm({**functions, "create": dict.fromkeys(sizes, int)})[0]


class Layer(nn.Module):
    """A decoder's layer, with packed projections."""

    def __init__(self, of: Sizes, number: int) -> None:
        self.of, self.number = of, number
        self.qkv_proj = nn.Linear(of.hidden, of.packed * of.size, bias=False)
        self.o_proj = nn.Linear(of.heads * of.size, of.hidden, bias=False)
        self.gate_up_proj = nn.Linear(of.hidden, 2 * of.inner, bias=False)
        self.down_proj = nn.Linear(of.inner, of.hidden, bias=False)
        self.before, self.behind = (nn.RMSNorm(of.hidden, -1, EPSILON, bias=False) for _ in range(2))

    def forward(self, x: nn.Tensor, cache: PagedKVCache) -> nn.Tensor:
        of = self.of
        batch, tokens, _ = x.shape
        qkv = nn.op.reshape(self.qkv_proj(self.before(x)), (batch, tokens, of.packed, of.size))
        out = cache.attention_with_fused_qkv(self.number, qkv, of.heads, of.size**-0.5)
        x = x + self.o_proj(nn.op.reshape(out, (batch, tokens, of.heads * of.size)))
        gate, up = nn.op.split(self.gate_up_proj(self.behind(x)), 2, axis=-1)
        return x + self.down_proj(nn.op.silu(gate) * up)


class Decoder(Cached):
    """A decoder: all logits of several sequences, one behind the other, or of a token of each; and its cache."""

    def __init__(self, of: Sizes, target: Target = CPU) -> None:
        self.of, self.target = of, target
        self.embed = nn.Embedding(of.words, of.hidden)
        self.layers = nn.ModuleList([Layer(of, number) for number in range(of.layers)])
        self.norm = nn.RMSNorm(of.hidden, -1, EPSILON, bias=False)
        self.lm_head = nn.Linear(of.hidden, of.words, bias=False)
        self.to(of.dtype)

    def _logits(self, ids: nn.Tensor, cache: PagedKVCache) -> nn.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cache)
        return self.lm_head(self.norm(x))

    def prefill(self, ids: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
        return self._logits(ids, cache), cache

    def decode(self, ids: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
        return self._logits(ids, cache), cache

    def exported(self) -> tvm.IRModule:
        """The model."""
        cache = nn.spec.Object(object_type=PagedKVCache)
        return self.exported_with(
            {
                "prefill": {"ids": nn.spec.Tensor([1, "tokens"], "int32"), "cache": cache},
                "decode": {"ids": nn.spec.Tensor(["batch", 1], "int32"), "cache": cache},
            }
        )


def weights_of(model: tvm.IRModule, seed: int) -> dict[str, np.ndarray]:
    """Random weights, by name."""
    rng = np.random.default_rng(seed)
    function = model["prefill"]
    params = list(function.params)[int(function.attrs["num_input"]) :]
    kinds = {str(param.name): (tuple(map(int, param.ty.shape)), str(param.ty.dtype)) for param in params}
    return {
        name: (rng.standard_normal(shape) * shape[-1] ** -0.5 + (len(shape) == 1)).astype(dtype)
        for name, (shape, dtype) in kinds.items()
    }


def frequencies(of: Sizes) -> np.ndarray:
    """By what positions turn pairs of columns; Llama 3.1's scaling of low ones, if asked for."""
    plain, scaling = THETA ** (-np.arange(0, of.size, 2) / of.size), dict(of.scaling)
    if not scaling:
        return plain
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    part = (scaling["original_max_position_embeddings"] * plain / (2 * np.pi) - low) / (high - low)
    part = np.clip(part, 0, 1)
    return plain * (part + (1 - part) / scaling["factor"])


def in_numpy(of: Sizes, weights: Mapping[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """The logits of all tokens of one sequence, in float64."""
    w = {name: value.astype("float64") for name, value in weights.items()}

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILON) * weight

    angles = np.arange(len(ids))[:, None] * frequencies(of)
    cos, sin = (np.tile(f(angles), 2)[:, None] for f in (np.cos, np.sin))

    def turned(x: np.ndarray) -> np.ndarray:
        low, high = np.split(x, 2, -1)
        return x * cos + np.concatenate([-high, low], -1) * sin

    x = w["embed.weight"][ids]
    for at in range(of.layers):
        layer = f"layers.{at}."
        packed = norm(x, w[f"{layer}before.weight"]) @ w[f"{layer}qkv_proj.weight"].T
        q, k, v = np.split(packed.reshape(len(ids), -1, of.size), [of.heads, of.heads + of.groups], 1)
        q, k, v = turned(q), *(each.repeat(of.heads // of.groups, 1) for each in (turned(k), v))
        scores = np.einsum("qhd,khd->hqk", q, k) * of.size**-0.5 + np.triu(np.full((len(ids),) * 2, -np.inf), 1)
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", chances / chances.sum(-1, keepdims=True), v).reshape(len(ids), -1)
        x = x + out @ w[f"{layer}o_proj.weight"].T
        gate, up = np.split(norm(x, w[f"{layer}behind.weight"]) @ w[f"{layer}gate_up_proj.weight"].T, 2, -1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}down_proj.weight"].T
    return norm(x, w["norm.weight"]) @ w["lm_head.weight"].T
