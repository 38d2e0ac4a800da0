"""The transformers of `scripts/models_torch.py` with `relax.frontend.nn`, as a server's models are written.

Weights are parameters and have torch's names and shapes, so that a ``state_dict`` is what a session is loaded with.

>>> from models_torch import made
>>> func = exported("llama decode", *made("llama decode", layers=1), "float16")["main"]
>>> [str(param.name) for param in func.params][:4]
['input_0', 'input_1', 'input_2', 'words.weight']
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import tvm
from tvm.relax.frontend.nn import (
    Conv1D,
    Conv2D,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    ModuleList,
    Parameter,
    Tensor,
    op,
)
from tvm.relax.frontend.nn.spec import Tensor as Spec

__all__ = ["WRITTEN", "exported"]

WRITTEN = ("minilm", "vit", "whisper", "llama prefill", "llama decode", "moe prefill", "moe decode")


class Attention(Module):
    """`models_torch.Attention`."""

    def __init__(self, of: Any, width: int, dtype: str) -> None:
        self.heads, self.packed = of.heads, of.packed
        if of.packed:
            self.qkv = Linear(width, 3 * width, dtype=dtype)
        else:
            self.q, self.k, self.v = (Linear(width, width, dtype=dtype) for _ in range(3))
        self.out = Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within [batch, tokens, width]."""
        batch, tokens, width = x.shape
        parts = op.chunk(self.qkv(x), 3, dim=-1) if self.packed else (self.q(x), self.k(x), self.v(x))
        heads = [op.reshape(part, (batch, tokens, self.heads, width // self.heads)) for part in parts]
        return self.out(op.reshape(op.scaled_dot_product_attention(*heads), (batch, tokens, width)))


class Layer(Module):
    """`models_torch.Layer`."""

    def __init__(self, of: Any, dtype: str) -> None:
        width, hidden = of.down.out_features, of.down.in_features
        self.first, self.attention = of.first, Attention(of.attention, width, dtype)
        self.norm1, self.norm2 = (LayerNorm(width, dtype=dtype) for _ in range(2))
        self.up, self.down = Linear(width, hidden, dtype=dtype), Linear(hidden, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of [batch, tokens, width]."""
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.down(op.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(op.gelu(self.up(x))))


class MiniLM(Module):
    """`models_torch.MiniLM`."""

    def __init__(self, of: Any, dtype: str) -> None:
        self.words, self.places, self.kinds = (
            Embedding(each.num_embeddings, each.embedding_dim, dtype) for each in (of.words, of.places, of.kinds)
        )
        self.norm = LayerNorm(of.norm.normalized_shape[0], dtype=dtype)
        self.layers = ModuleList([Layer(layer, dtype) for layer in of.layers])

    def forward(self, ids: Tensor) -> Tensor:
        """An embedding for [batch, tokens] of ids."""
        tokens = ids.shape[1]
        places = op.reshape(op.arange(0, tokens, 1, "int64"), (1, tokens))
        x = self.norm(self.words(ids) + self.places(places) + self.kinds(op.zeros(ids.shape, "int64")))
        for layer in self.layers:
            x = layer(x)
        return _mean(x, 1)


class ViT(Module):
    """`models_torch.ViT`."""

    def __init__(self, of: Any, dtype: str) -> None:
        width = of.norm.normalized_shape[0]
        self.patches = Conv2D(3, width, 16, stride=16, dtype=dtype)
        self.token, self.places = Parameter((1, 1, width), dtype), Parameter((1, 197, width), dtype)
        self.layers = ModuleList([Layer(layer, dtype) for layer in of.layers])
        self.norm, self.head = LayerNorm(width, dtype=dtype), Linear(width, 1000, dtype=dtype)

    def forward(self, image: Tensor) -> Tensor:
        """Logits for [1, 3, 224, 224]."""
        x = self.patches(image)
        batch, width, *sides = x.shape
        x = op.permute_dims(op.reshape(x, (batch, width, sides[0] * sides[1])), [0, 2, 1])
        x = op.concat([self.token, x], dim=1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(op.reshape(op.split(self.norm(x), [1], axis=1)[0], (batch, width)))


class Whisper(Module):
    """`models_torch.Whisper`."""

    def __init__(self, of: Any, dtype: str) -> None:
        width = of.norm.normalized_shape[0]
        self.conv1, self.conv2 = (
            Conv1D(80, width, 3, padding=1, dtype=dtype),
            Conv1D(width, width, 3, stride=2, padding=1, dtype=dtype),
        )
        self.places, self.norm = Parameter((1500, width), dtype), LayerNorm(width, dtype=dtype)
        self.layers = ModuleList([Layer(layer, dtype) for layer in of.layers])

    def forward(self, mel: Tensor) -> Tensor:
        """States for [batch, 80, 3000]."""
        x = op.permute_dims(op.gelu(self.conv2(op.gelu(self.conv1(mel)))), [0, 2, 1]) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class RMSNorm(Module):
    """`models_torch.RMSNorm`."""

    def __init__(self, width: int, dtype: str) -> None:
        self.weight = Parameter((width,), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of the last dimension."""
        return op.rms_norm(x, self.weight, axes=-1, epsilon=1e-5)


class Rotary(Module):
    """`models_torch.Rotary`."""

    def __init__(self, of: Any, dtype: str) -> None:
        self.heads, self.kv_heads, self.dim = of.heads, of.kv_heads, of.dim
        width = of.q.in_features
        self.q, self.k, self.v = (
            Linear(width, n * of.dim, bias=False, dtype=dtype) for n in (of.heads, of.kv_heads, of.kv_heads)
        )
        self.out = Linear(of.heads * of.dim, width, bias=False, dtype=dtype)

    def attended(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor] | None) -> Any:
        """The attended [batch, tokens, width], and the keys and values with those of the cache in front."""
        batch, tokens, _ = x.shape
        heads = (op.reshape(part(x), (batch, tokens, -1, self.dim)) for part in (self.q, self.k, self.v))
        q, k, v = (op.permute_dims(each, [0, 2, 1, 3]) for each in heads)
        q, k = (self._turned(each, turn) for each in (q, k))
        if cache is not None:
            k, v = op.concat([cache[0], k], dim=2), op.concat([cache[1], v], dim=2)
        many = [op.repeat(each, self.heads // self.kv_heads, axis=1) for each in (k, v)]
        y = op.scaled_dot_product_attention(
            *(op.permute_dims(each, [0, 2, 1, 3]) for each in (q, *many)), is_causal=cache is None
        )
        return self.out(op.reshape(y, (batch, tokens, self.heads * self.dim))), k, v

    @staticmethod
    def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        first, second = op.split(x, 2, axis=-1)
        return x * turn[0] + op.concat([op.negative(second), first], dim=-1) * turn[1]


class Gated(Module):
    """`models_torch.Gated`."""

    def __init__(self, of: Any, dtype: str) -> None:
        width, hidden = of.up.in_features, of.up.out_features
        self.gate, self.up = (Linear(width, hidden, bias=False, dtype=dtype) for _ in range(2))
        self.down = Linear(hidden, width, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of [.., width]."""
        return self.down(op.silu(self.gate(x)) * self.up(x))


class Experts(Module):
    """`models_torch.Experts`."""

    def __init__(self, of: Any, dtype: str) -> None:
        experts, width, hidden = of.up.shape
        self.taken, self.router = of.taken, Linear(width, experts, bias=False, dtype=dtype)
        self.gate, self.up = (Parameter((experts, width, hidden), dtype) for _ in range(2))
        self.down = Parameter((experts, hidden, width), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of [batch, tokens, width]."""
        shape = x.shape
        tokens = op.reshape(x, (shape[0] * shape[1], shape[2]))
        chances = op.softmax(self.router(tokens), axis=-1)
        best, _ = op.topk(chances, self.taken, axis=-1)
        least = op.split(best, [self.taken - 1], axis=-1)[1]
        none = op.zeros(chances.shape, chances.dtype)
        weights = op.where(op.greater_equal(chances, least), chances, none)
        weights = weights / op.sum(weights, axis=-1, keepdims=True)
        hidden = op.silu(op.matmul(tokens, self.gate)) * op.matmul(tokens, self.up)
        weighed = op.matmul(hidden, self.down) * op.unsqueeze(op.permute_dims(weights, [1, 0]), 2)
        return op.reshape(op.sum(weighed, axis=0), shape)


class Decoder(Module):
    """`models_torch.Decoder`."""

    def __init__(self, of: Any, dtype: str) -> None:
        words, width = of.words.num_embeddings, of.words.embedding_dim
        self.cached, self.words, self.head = (
            of.cached,
            Embedding(words, width, dtype),
            Linear(width, words, bias=False, dtype=dtype),
        )
        self.attentions = ModuleList([Rotary(each, dtype) for each in of.attentions])
        self.mlps = ModuleList([(Experts if hasattr(each, "router") else Gated)(each, dtype) for each in of.mlps])
        self.norms = ModuleList([RMSNorm(width, dtype) for _ in of.norms])
        self.cos, self.sin = (Parameter(tuple(each.shape), dtype) for each in (of.cos, of.sin))

    def forward(self, ids: Tensor, *cache: Tensor) -> Any:
        """Logits of the last token of [batch, tokens], and the keys and values of each layer."""
        x, kept = self.words(ids), []
        places = op.arange(self.cached, self.cached + ids.shape[1], 1, "int64")
        turn = op.take(self.cos, places, axis=0), op.take(self.sin, places, axis=0)
        for n, (attention, mlp) in enumerate(zip(self.attentions, self.mlps)):
            own = (cache[2 * n], cache[2 * n + 1]) if cache else None
            y, k, v = attention.attended(self.norms[2 * n](x), turn, own)
            x, kept = x + y, [*kept, k, v]
            x = x + mlp(self.norms[2 * n + 1](x))
        x, tokens = self.norms[len(self.norms) - 1](x), ids.shape[1]
        last = op.split(x, [tokens - 1], axis=1)[1] if tokens > 1 else x
        return (self.head(op.reshape(last, (ids.shape[0], x.shape[2]))), *kept)


_KINDS: dict[str, type[Module]] = {"minilm": MiniLM, "vit": ViT, "whisper": Whisper}


def _mean(x: Tensor, axis: int) -> Tensor:
    return op.sum(x, axis=axis) / float(x.shape[axis])


def exported(name: str, module: Any, inputs: Sequence[Any], dtype: str) -> tvm.IRModule:
    """``main`` of a model whose torch module and inputs are given: of inputs, then weights, all floats of one type."""
    written = _KINDS.get(name, Decoder)(module, dtype)
    specs = {
        f"input_{n}": Spec(list(each.shape), dtype if each.is_floating_point() else "int64")
        for n, each in enumerate(inputs)
    }

    def main(*given: Tensor) -> Any:
        return written.forward(*given)

    # The exporter reads the names of the inputs off the signature.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    main.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in specs])  # type: ignore[attr-defined]
    written.main = main
    return written.export_tvm({"main": {**specs, "$": {"param_mode": "plain", "effect_mode": "none"}}})[0]
