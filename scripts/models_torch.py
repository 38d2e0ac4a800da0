"""Models in published shapes as torch modules with random weights: what `scripts/bench_models.py` imports and times.

Each is written as its reference implementation computes it (attention by `scaled_dot_product_attention`), from a table
of sizes; nothing is downloaded.

>>> sorted(MODELS)
['llama decode', 'llama prefill', 'minilm', 'moe decode', 'moe prefill', 'resnet18', 'vit', 'whisper']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MODELS", "made"]


class Attention(nn.Module):
    """Multi-head attention without a cache, every token attending to every other."""

    def __init__(self, width: int, heads: int, packed: bool = False) -> None:
        super().__init__()
        self.heads, self.packed = heads, packed
        if packed:
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within [batch, tokens, width]."""
        batch, tokens, width = x.shape
        parts = self.qkv(x).chunk(3, dim=-1) if self.packed else (self.q(x), self.k(x), self.v(x))
        q, k, v = (part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """A transformer's layer with norms behind (BERT) or in front of its halves (ViT, Whisper)."""

    def __init__(self, width: int, heads: int, hidden: int, first: bool, packed: bool = False) -> None:
        super().__init__()
        self.first = first
        self.attention, self.norm1, self.norm2 = (
            Attention(width, heads, packed),
            nn.LayerNorm(width),
            nn.LayerNorm(width),
        )
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of [batch, tokens, width]."""
        if self.first:
            x = x + self.attention(self.norm1(x))
            return x + self.down(F.gelu(self.up(self.norm2(x))))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    """sentence-transformers/all-MiniLM-L6-v2: BERT of 6 layers, 384 wide, and the mean of its tokens."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(30522, 384), nn.Embedding(512, 384), nn.Embedding(2, 384)
        self.norm = nn.LayerNorm(384)
        self.layers = nn.ModuleList(Layer(384, 12, 1536, first=False) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        """An embedding for [batch, tokens] of ids."""
        places = torch.arange(ids.shape[1])[None]
        x = self.norm(self.words(ids) + self.places(places) + self.kinds(torch.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1)


class ViT(nn.Module):
    """deit_tiny_patch16_224: 12 layers, 192 wide, 196 patches and a class token."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 16, stride=16)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 192)), nn.Parameter(torch.randn(1, 197, 192))
        self.layers = nn.ModuleList(Layer(192, 3, 768, first=True, packed=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Logits for [batch, 3, 224, 224]."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)[:, 0])


class Whisper(nn.Module):
    """The encoder of openai/whisper-tiny: two convolutions along time, 4 layers, 384 wide."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(80, 384, 3, padding=1), nn.Conv1d(384, 384, 3, stride=2, padding=1)
        self.places = nn.Parameter(torch.randn(1500, 384))
        self.layers = nn.ModuleList(Layer(384, 6, 1536, first=True) for _ in range(layers))
        self.norm = nn.LayerNorm(384)

    def forward(self, mel: Tensor) -> Tensor:
        """States for [batch, 80, 3000]."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Residual(nn.Module):
    """A basic block of a ResNet."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        apart = nn.Sequential(nn.Conv2d(channels, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))
        self.skip = nn.Identity() if (channels, stride) == (out, 1) else apart

    def forward(self, x: Tensor) -> Tensor:
        """The block of [batch, channels, height, width]."""
        return F.relu(self.skip(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet18(nn.Module):
    """ResNet-18 (He et al. 2015), as torchvision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)
        sizes = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        self.blocks = nn.Sequential(*(Residual(*size) for size in (*sizes, (256, 512, 2), (512, 512, 1))))
        self.head = nn.Linear(512, 1000)

    def forward(self, image: Tensor) -> Tensor:
        """Logits for [batch, 3, 224, 224]."""
        x = F.max_pool2d(F.relu(self.norm(self.conv(image))), 3, stride=2, padding=1)
        return self.head(self.blocks(x).mean(dim=(2, 3)))


class RMSNorm(nn.Module):
    """The norm of Llama, written out as its reference has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The norm of the last dimension, in float32."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Rotary(nn.Module):
    """Attention with rotary positions, fewer heads of keys and values, and a cache that is handed in and out."""

    def __init__(self, width: int, heads: int, kv_heads: int, dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.q, self.k, self.v = (nn.Linear(width, n * dim, bias=False) for n in (heads, kv_heads, kv_heads))
        self.out = nn.Linear(heads * dim, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: tuple[Tensor, Tensor] | None) -> Any:
        """The attended [batch, tokens, width], and the keys and values with those of the cache in front."""
        batch, tokens, _ = x.shape
        q = self._turned(self.q(x).view(batch, tokens, self.heads, self.dim).transpose(1, 2), turn)
        k = self._turned(self.k(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2), turn)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        times = self.heads // self.kv_heads
        shared = [each[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for each in (k, v)]
        y = F.scaled_dot_product_attention(q, *shared, is_causal=cache is None)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1)), k, v

    @staticmethod
    def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


class Gated(nn.Module):
    """The gated layer of Llama."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of [.., width]."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Experts of which each token takes some: all are computed, and weighed by what the router gives, mostly 0."""

    def __init__(self, width: int, hidden: int, experts: int, taken: int) -> None:
        super().__init__()
        self.taken = taken
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of [batch, tokens, width]."""
        tokens = x.flatten(0, 1)
        chances = F.softmax(self.router(tokens), dim=-1)
        least = torch.topk(chances, self.taken, dim=-1)[0][:, -1:]
        weights = torch.where(chances >= least, chances, torch.zeros_like(chances))
        weights = weights / weights.sum(dim=-1, keepdim=True)
        hidden = F.silu(torch.matmul(tokens, self.gate)) * torch.matmul(tokens, self.up)
        each = torch.matmul(hidden, self.down)
        return (each * weights.t()[:, :, None]).sum(dim=0).view_as(x)


class Decoder(nn.Module):
    """A decoder of Llama's or, with experts, of Qwen3-MoE's kind; `cached` tokens before those that come in."""

    def __init__(
        self, layers: int, width: int, heads: int, kv_heads: int, hidden: int, words: int, cached: int, experts: int = 0
    ) -> None:
        super().__init__()
        dim = width // heads
        self.cached = cached
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.attentions = nn.ModuleList(Rotary(width, heads, kv_heads, dim) for _ in range(layers))
        self.mlps = nn.ModuleList(
            Experts(width, hidden, experts, 2) if experts else Gated(width, hidden) for _ in range(layers)
        )
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2 * layers + 1))
        angles = torch.outer(torch.arange(2048.0), 500000.0 ** -(torch.arange(0.0, dim, 2) / dim)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor, *cache: Tensor) -> Any:
        """Logits of the last token of [batch, tokens], and the keys and values of each layer."""
        x, kept = self.words(ids), []
        span = slice(self.cached, self.cached + ids.shape[1])
        for n, (attention, mlp) in enumerate(zip(self.attentions, self.mlps)):
            own = (cache[2 * n], cache[2 * n + 1]) if cache else None
            y, k, v = attention(self.norms[2 * n](x), (self.cos[span], self.sin[span]), own)
            x, kept = x + y, [*kept, k, v]
            x = x + mlp(self.norms[2 * n + 1](x))
        return (self.head(self.norms[-1](x)[:, ids.shape[1] - 1]), *kept)  # -1 the importer takes for an index


@dataclass(frozen=True)
class Model:
    """How a model and its inputs are made, of so many layers if that is said."""

    module: Callable[..., nn.Module]
    inputs: Callable[..., tuple[Tensor, ...]]


def _ids(tokens: int, words: int) -> Tensor:
    return torch.randint(0, words, (1, tokens))


# A Llama-3-style decoder of 4 layers, 512 wide with 8 heads and 2 of keys and values; experts are narrower.
_LLAMA = {"layers": 4, "width": 512, "heads": 8, "kv_heads": 2, "hidden": 1792, "words": 8192}
_MOE = {"layers": 4, "width": 256, "heads": 8, "kv_heads": 2, "hidden": 192, "words": 4096, "experts": 8}
_CACHED = 64


def _decoder(sizes: dict[str, int], tokens: int, cached: int) -> Model:
    """A decoder of some tokens behind so many of a cache."""

    def module(layers: int = sizes["layers"]) -> nn.Module:
        return Decoder(**sizes | {"layers": layers}, cached=cached)

    def inputs(layers: int = sizes["layers"]) -> tuple[Tensor, ...]:
        shape = (1, sizes["kv_heads"], cached, sizes["width"] // sizes["heads"])
        return _ids(tokens, sizes["words"]), *(torch.randn(shape) for _ in range(2 * layers if cached else 0))

    return Model(module, inputs)


MODELS: dict[str, Model] = {
    "minilm": Model(MiniLM, lambda *_: (_ids(128, 30522),)),
    "vit": Model(ViT, lambda *_: (torch.randn(1, 3, 224, 224),)),
    "whisper": Model(Whisper, lambda *_: (torch.randn(1, 80, 3000),)),
    "resnet18": Model(ResNet18, lambda *_: (torch.randn(1, 3, 224, 224),)),
    "llama prefill": _decoder(_LLAMA, 64, 0),
    "llama decode": _decoder(_LLAMA, 1, _CACHED),
    "moe prefill": _decoder(_MOE, 64, 0),
    "moe decode": _decoder(_MOE, 1, _CACHED),
}


def made(name: str, layers: int | None = None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model, ready for inference, and its inputs; the same ones whenever asked.

    With `layers` a transformer has so many of the same width instead of those that are published.
    """
    torch.manual_seed(0)
    model, depth = MODELS[name], () if layers is None or name == "resnet18" else (layers,)
    return model.module(*depth).eval(), model.inputs(*depth)
