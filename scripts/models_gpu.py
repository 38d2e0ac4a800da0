"""Models of published widths with random weights, as a GPU serves them: torch modules, and their decoding in Relax.

MiniLM-L6 on 8 x 128 tokens in float16, and a layer as wide as those of Llama-3-8B in bfloat16: reading a prompt, and a
token of each of several sequences over a cache. A torch module writes the cache in place, and so does Relax's; either
is given the place.

>>> [name for name in CASES if name.startswith("llama")]
['llama prefill 2048', 'llama decode 1', 'llama decode 8', 'llama decode 64']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from models_torch import RMSNorm
from torch import Tensor, nn

__all__ = ["CASES", "Case", "Decode", "Llama", "Prefill", "decode_case", "decoder", "imported", "prefill_case"]


class Attention(nn.Module):
    """Attention of every token to every other."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Attend within [batch, tokens, width]."""
        batch, tokens, width = x.shape
        q, k, v = (part(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """A layer of BERT, with norms behind its halves."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width, heads), nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of [batch, tokens, width]."""
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    """sentence-transformers/all-MiniLM-L6-v2: BERT of 6 layers, 384 wide, and the mean of its tokens."""

    def __init__(self, layers: int = 6, words: int = 30522, width: int = 384, heads: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Layer(width, heads, 4 * width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        """An embedding for [batch, tokens] of ids."""
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return x.mean(dim=1)


@dataclass(frozen=True)
class Llama:
    """The sizes of a layer of a decoder; those of Llama-3-8B if left out."""

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    dim: int = 128
    dtype: str = "bfloat16"

    @property
    def weights(self) -> int:
        """How many elements the weights of its products have."""
        inner, shared = self.heads * self.dim, self.kv_heads * self.dim
        return self.width * (2 * inner + 2 * shared + 3 * self.hidden)

    def angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary positions 0 to `tokens`, each [tokens, dim]."""
        turns = torch.outer(torch.arange(float(tokens)), 500000.0 ** -(torch.arange(0.0, self.dim, 2) / self.dim))
        kind = getattr(torch, self.dtype)
        return turns.cos().repeat(1, 2).to(kind), turns.sin().repeat(1, 2).to(kind)


class LlamaLayer(nn.Module):
    """A layer of Llama: attention with rotary positions and fewer heads of keys and values, and a gated MLP."""

    def __init__(self, sizes: Llama) -> None:
        super().__init__()
        self.sizes = sizes
        inner, shared = sizes.heads * sizes.dim, sizes.kv_heads * sizes.dim
        self.q, self.k, self.v = (nn.Linear(sizes.width, n, bias=False) for n in (inner, shared, shared))
        self.out = nn.Linear(inner, sizes.width, bias=False)
        self.gate, self.up = (nn.Linear(sizes.width, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)
        self.norm1, self.norm2 = RMSNorm(sizes.width), RMSNorm(sizes.width)

    def heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [batch, tokens, width], each [batch, heads, tokens, dim]."""
        batch, tokens, _ = x.shape
        q, k, v = (p(x).view(batch, tokens, -1, self.sizes.dim).transpose(1, 2) for p in (self.q, self.k, self.v))
        return _turned(q, cos, sin), _turned(k, cos, sin), v

    def mlp(self, x: Tensor) -> Tensor:
        """The second half of [batch, tokens, width]."""
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Prefill(LlamaLayer):
    """The layer on a prompt."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The layer of [batch, tokens, width], and the keys and values for the cache."""
        q, k, v = self.heads_of(self.norm1(x), cos, sin)
        times = self.sizes.heads // self.sizes.kv_heads
        shared = [each[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for each in (k, v)]
        y = F.scaled_dot_product_attention(q, *shared, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.mlp(x), k, v


class Decode(LlamaLayer):
    """The layer on a token of each sequence; its key and value take the place `at` of the cache, in place."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        """The layer of [batch, 1, width] over caches [batch, kv_heads, cached, dim], all of whose places are seen."""
        q, k, v = self.heads_of(self.norm1(x), cos, sin)
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        y = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return self.mlp(x)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


# ---- Relax ----------------------------------------------------------------------------------------------------------


def imported(module: nn.Module, inputs: tuple[Tensor, ...], params: bool = False) -> Any:
    """A torch module in Relax, its weights constants, or parameters of the names that they have in torch."""
    from tvm import relax
    from tvm.relax.frontend.torch import from_exported_program

    def linear(node: Any, importer: Any) -> Any:
        """What upstream's importer makes of it, in the type of its operands instead of float32."""
        x, weight, *bias = importer.retrieve_args(node)
        return importer.block_builder.emit(relax.op.linear(x, weight, *bias))

    with torch.no_grad():
        return from_exported_program(
            torch.export.export(module, inputs),
            custom_convert_map={"linear.default": linear},
            run_ep_decomposition=False,
            keep_params_as_input=params,
        )


def decoder(sizes: Llama, batch: int, cached: int) -> tuple[Any, list[str]]:
    """`Decode` in Relax: the module, its weights parameters behind the inputs, and the weights' names in torch.

    It is written with `relax.frontend.nn`, as a server's models are; keys and values go into the cache in place.
    """
    from tvm.relax.frontend.nn import Linear, Module, Parameter, Tensor, op, spec
    from tvm.script import tirx as T

    dim, dtype, shared = sizes.dim, sizes.dtype, sizes.kv_heads

    @T.prim_func(s_tir=True)
    def append(own: T.handle, at: T.handle, cache: T.handle) -> None:
        T.func_attr({"tirx.noalias": True})
        O = T.match_buffer(own, (T.int64(batch), T.int64(shared), T.int64(1), T.int64(dim)), dtype)
        A = T.match_buffer(at, (T.int64(1),), "int64")
        C = T.match_buffer(cache, (T.int64(batch), T.int64(shared), T.int64(cached), T.int64(dim)), dtype)
        for b, h, d in T.grid(T.int64(batch), T.int64(shared), T.int64(dim)):
            with T.sblock("append"):
                vb, vh, vd = T.axis.remap("SSS", [b, h, d])
                C[vb, vh, A[0], vd] = O[vb, vh, 0, vd]

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = op.split(x, 2, axis=-1)
        return x * cos + op.concat([op.negative(second), first], dim=-1) * sin

    class Norm(Module):
        def __init__(self) -> None:
            self.weight = Parameter((sizes.width,), dtype)

        def forward(self, x: Tensor) -> Tensor:
            return op.rms_norm(x, self.weight, axes=-1, epsilon=1e-5)

    class Layer(Module):
        def __init__(self) -> None:
            inner = sizes.heads * dim
            self.q = Linear(sizes.width, inner, bias=False, dtype=dtype)
            self.k = Linear(sizes.width, shared * dim, bias=False, dtype=dtype)
            self.v = Linear(sizes.width, shared * dim, bias=False, dtype=dtype)
            self.out = Linear(inner, sizes.width, bias=False, dtype=dtype)
            self.gate = Linear(sizes.width, sizes.hidden, bias=False, dtype=dtype)
            self.up = Linear(sizes.width, sizes.hidden, bias=False, dtype=dtype)
            self.down = Linear(sizes.hidden, sizes.width, bias=False, dtype=dtype)
            self.norm1, self.norm2 = Norm(), Norm()

        def main(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
            y = self.norm1(x)
            q, k, v = (
                op.permute_dims(op.reshape(part(y), (batch, 1, -1, dim)), (0, 2, 1, 3))
                for part in (self.q, self.k, self.v)
            )
            q, k = turned(q, cos, sin), turned(k, cos, sin)
            whole = []
            for cache, own in ((keys, k), (values, v)):
                kept = Tensor.placeholder((batch, shared, cached, dim), dtype)
                cache = op.tensor_ir_inplace_op(append, "append", [own, at, cache], 2, kept)
                one = op.reshape(cache, (batch, shared, 1, cached, dim))
                every = op.broadcast_to(one, (batch, shared, sizes.heads // shared, cached, dim))
                whole.append(op.permute_dims(op.reshape(every, (batch, sizes.heads, cached, dim)), (0, 2, 1, 3)))
            attended = op.scaled_dot_product_attention(op.permute_dims(q, (0, 2, 1, 3)), *whole)
            x = x + self.out(op.reshape(attended, (batch, 1, sizes.heads * dim)))
            y = self.norm2(x)
            return x + self.down(op.silu(self.gate(y)) * self.up(y))

    cache = spec.Tensor((batch, shared, cached, dim), dtype)
    turn = spec.Tensor((1, dim), dtype)
    inputs = {
        "x": spec.Tensor((batch, 1, sizes.width), dtype), "cos": turn, "sin": turn, "keys": cache, "values": cache,
        "at": spec.Tensor((1,), "int64"),
    }  # fmt: skip
    module, weights = Layer().export_tvm({"main": {**inputs, "$": {"param_mode": "plain", "effect_mode": "none"}}})
    return module, [name for name, _ in weights]


# ---- What is measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model and inputs for it.

    Attributes
    ----------
    module : Callable[[], nn.Module]
        Makes the torch module, in float32.
    dtype : str
        What weights and inputs of floats are converted to.
    inputs : Callable[[str], tuple[Tensor, ...]]
        Makes inputs on a device.
    flops, bytes : float
        What it computes in products, and the fewest bytes that it moves: weights, inputs and results.
    decodes : tuple[Llama, int, int] or None
        What `decoder` is asked for where the model writes a cache; otherwise torch's module is imported.
    """

    module: Callable[[], nn.Module]
    dtype: str
    inputs: Callable[[str], tuple[Tensor, ...]]
    flops: float
    bytes: float
    decodes: tuple[Llama, int, int] | None = None

    def made(self, device: str = "cpu") -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module and inputs on a device; the same weights whenever asked."""
        torch.manual_seed(0)
        kind = getattr(torch, self.dtype)
        module = self.module().eval().to(device=device, dtype=kind)
        made = tuple(x.to(kind) if x.is_floating_point() else x for x in self.inputs(device))
        return module, made


def _minilm() -> Case:
    tokens = 8 * 128
    flops = 6 * (2.0 * tokens * 384 * 384 * 12 + 4.0 * tokens * 128 * 384)
    return Case(
        MiniLM, "float16", lambda device: (torch.randint(0, 30522, (8, 128), device=device),), flops,
        2.0 * 6 * 384 * 384 * 12,
    )  # fmt: skip


def prefill_case(tokens: int, sizes: Llama = Llama()) -> Case:
    """The layer on a prompt of so many tokens."""

    def inputs(device: str) -> tuple[Tensor, ...]:
        return (torch.randn(1, tokens, sizes.width, device=device), *(each.to(device) for each in sizes.angles(tokens)))

    attended = 4.0 * tokens * tokens / 2 * sizes.heads * sizes.dim
    return Case(
        lambda: Prefill(sizes), sizes.dtype, inputs, 2.0 * tokens * sizes.weights + attended, 2.0 * sizes.weights
    )


def decode_case(batch: int, cached: int, sizes: Llama = Llama()) -> Case:
    """The layer on a token of each of `batch` sequences, over caches of so many places."""

    def inputs(device: str) -> tuple[Tensor, ...]:
        turn = (each[-1:].to(device) for each in sizes.angles(cached))
        caches = (torch.randn(batch, sizes.kv_heads, cached, sizes.dim, device=device) for _ in range(2))
        return (
            torch.randn(batch, 1, sizes.width, device=device),
            *turn,
            *caches,
            torch.tensor([cached - 1], device=device),
        )

    moved = 2.0 * sizes.weights + 2.0 * 2 * batch * sizes.kv_heads * cached * sizes.dim
    flops = 2.0 * batch * sizes.weights + 4.0 * batch * cached * sizes.heads * sizes.dim
    return Case(lambda: Decode(sizes), sizes.dtype, inputs, flops, moved, (sizes, batch, cached))


CASES: dict[str, Case] = {
    "minilm 8x128": _minilm(),
    "llama prefill 2048": prefill_case(2048),
    **{f"llama decode {batch}": decode_case(batch, 2048) for batch in (1, 8, 64)},
}
