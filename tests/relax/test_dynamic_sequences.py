"""Models of torch.export of any sequence or batch, as they are usually written: right, on a mesh too."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from torch_modules import Called
from tvm.relax.frontend.torch import from_exported_program

import tvm_axe as axe
from tvm_axe.relax import torch_converters

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")
nn, F = torch.nn, torch.nn.functional
WIDTH, HEADS, VOCABULARY, MOST = 32, 4, 50, 64


def split(x: Any, heads: int = HEADS) -> Any:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def joined(x: Any) -> Any:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def attended(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return joined(torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias, -1) @ v)


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight lies the other way round."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer) / 6), nn.Parameter(torch.randn(outer) / 9)

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Gpt(nn.Module):
    """GPT-2: a causal mask that is cut out of a buffer, a table of positions, a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST, WIDTH)
        self.attn, self.proj = Conv1D(WIDTH, 3 * WIDTH), Conv1D(WIDTH, WIDTH)
        self.up, self.down = Conv1D(WIDTH, 4 * WIDTH), Conv1D(4 * WIDTH, WIDTH)
        self.one, self.two, self.last = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", torch.tril(torch.ones(MOST, MOST, dtype=torch.bool))[None, None])

    def forward(self, ids: Any) -> Any:
        h = self.tokens(ids) + self.places(torch.arange(0, ids.shape[1])[None])
        q, k, v = (split(x) for x in self.attn(self.one(h)).split(WIDTH, 2))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        seen = self.mask[:, :, : ids.shape[1], : ids.shape[1]]
        scores = torch.where(seen, scores, torch.full([], torch.finfo(scores.dtype).min))
        h = h + self.proj(joined(torch.softmax(scores, -1) @ v))
        h = h + self.down(F.gelu(self.up(self.two(h)), approximate="tanh"))
        return self.head(self.last(h))


class Bert(nn.Module):
    """Positions that are cut out of a buffer, and a mask of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST, WIDTH)
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("ids", torch.arange(MOST)[None])

    def forward(self, ids: Any, mask: Any) -> Any:
        h = self.tokens(ids) + self.places(self.ids[:, : ids.shape[1]])
        bias = (1.0 - mask[:, None, None, :].to(h.dtype)) * torch.finfo(h.dtype).min
        return h + attended(*(split(each(h)) for each in self.inner), bias)


class Llama(nn.Module):
    """Norms without means, rotary embeddings and a mask that are made inside, grouped heads, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2, "o": WIDTH, "gate": 3 * WIDTH, "up": 3 * WIDTH}
        self.tokens, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.inner = nn.ModuleDict({name: nn.Linear(WIDTH, size, bias=False) for name, size in sizes.items()})
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.register_buffer("turns", 1 / 10000 ** (torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)))

    def normed(self, h: Any) -> Any:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm

    def forward(self, ids: Any) -> Any:
        h = self.tokens(ids)
        angles = torch.outer(torch.arange(ids.shape[1]).float(), self.turns)
        angles, n = torch.cat([angles, angles], -1), self.normed(h)

        def turned(x: Any) -> Any:
            a, b = x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-b, a], -1) * angles.sin()

        q, k, v = (split(self.inner[name](n), heads) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
        k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for x in (turned(k), v))
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), float("-inf")), 1)
        h = h + self.inner["o"](attended(turned(q), k, v, mask))
        n = self.normed(h)
        return h + self.down(F.silu(self.inner["gate"](n)) * self.inner["up"](n))


class Decoder(nn.Module):
    """As Whisper's: PyTorch's own attention, to what a mask lets it see and to what an encoder made."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(MOST, WIDTH))
        self.own, self.cross = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("mask", torch.full((MOST, MOST), float("-inf")).triu_(1))

    def forward(self, ids: Any, encoded: Any) -> Any:
        count = ids.shape[1]
        h = self.tokens(ids) + self.places[:count]
        n = self.one(h)
        h = h + self.own(n, n, n, attn_mask=self.mask[:count, :count], need_weights=False)[0]
        h = h + self.cross(self.two(h), encoded, encoded, need_weights=False)[0]
        return h @ self.tokens.weight.T


class Pooled(nn.Module):
    """PyTorch's own layer, which attends with the sequence in front, and the mean of the tokens that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)

    def forward(self, ids: Any, mask: Any) -> Any:
        h, kept = self.layer(self.tokens(ids), src_key_padding_mask=mask == 0), mask[:, :, None].float()
        return (h * kept).sum(1) / kept.sum(1).clamp(min=1e-9)


def given(kind: type, batch: int, count: int) -> tuple[Any, ...]:
    ids, mask = torch.randint(0, VOCABULARY, (batch, count)), torch.ones(batch, count, dtype=torch.int64)
    mask[0, count // 2 + 1 :] = 0
    return {Bert: (ids, mask), Pooled: (ids, mask), Decoder: (ids, torch.randn(batch, 9, WIDTH))}.get(kind, (ids,))


def imported(module: Any, inputs: tuple[Any, ...], shapes: Any) -> Any:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    return from_exported_program(program, custom_convert_map=torch_converters())


def model(kind: type, any_batch: bool) -> tuple[Any, Any]:
    """A model, and as it is imported with a sequence, and maybe a batch, that isn't known."""
    torch.manual_seed(0)
    module = kind().eval()
    sizes = {1: torch.export.Dim("count", min=2, max=MOST - 1)}
    of_batch = {0: torch.export.Dim("batch", min=1, max=8)} if any_batch else {}
    others = {Bert: ({**of_batch, **sizes},), Pooled: ({**of_batch, **sizes},), Decoder: (of_batch,)}.get(kind, ())
    return module, imported(module, given(kind, 2, 7), ({**of_batch, **sizes}, *others))


def one(found: Any) -> Any:
    """The only result."""
    return np.asarray(found[0] if isinstance(found, list | tuple) else found)


def compared(run: Any, module: Any, kind: type, any_batch: bool) -> None:
    for batch, count in ((2, 2), (2, 33), *(((1, 7), (3, 63)) if any_batch else ())):
        inputs = given(kind, batch, count)
        with torch.no_grad():
            want = module(*inputs).numpy()
        np.testing.assert_allclose(one(run(*(each.numpy() for each in inputs))), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind, any_batch", [(Gpt, False), (Bert, True), (Llama, False), (Decoder, True)])
def test_any_sequence(kind: type, any_batch: bool) -> None:
    module, made = model(kind, any_batch)
    exe = axe.compile(made, work_dir=None)
    compared(exe, module, kind, any_batch)


@pytest.mark.parametrize("kind, any_batch", [(Gpt, False), (Pooled, True)])
def test_any_sequence_on_a_mesh(kind: type, any_batch: bool) -> None:
    module, made = model(kind, any_batch)
    exe = axe.compile(made, mesh={"tp": 2}, work_dir=None)
    with axe.launch({"tp": 2}, engine="threads") as workers, exe.load(workers, {}) as session:
        compared(session.main, module, kind, any_batch)


def test_slices_by_sizes() -> None:
    """Of a sequence that isn't known, and of a table that is longer."""
    table = torch.randn(MOST, 3)

    def slices(x: Any) -> Any:
        count = x.shape[0]
        cut = table[:count], table[-count:], table[1:count:2], x[1:], x[:-1], x[-3:], x[::2], x[1::2]
        return torch.stack([each.cumsum(0)[-1] for each in cut])

    made = imported(Called(slices), (torch.randn(7, 3),), (({0: torch.export.Dim("count", min=4, max=60)},),))
    exe = axe.compile(made, work_dir=None)
    for count in (4, 5, 8, 33, 60):
        x = torch.randn(count, 3)
        np.testing.assert_allclose(one(exe(x.numpy())), slices(x).numpy(), rtol=1e-5, atol=1e-5)


def test_elements_at_sizes() -> None:
    """The last of a sequence that isn't known, one near it, and those of a table at its length and from its end."""
    table = torch.randn(MOST, 3)

    def elements(x: Any) -> Any:
        count = x.shape[0]
        return torch.stack([x[count - 1], x[count - 3], x[1 - count], x[-2], table[count], table[-count], x[2]])

    made = imported(Called(elements), (torch.randn(7, 3),), (({0: torch.export.Dim("count", min=4, max=60)},),))
    exe = axe.compile(made, work_dir=None)
    for count in (4, 5, 33, 60):
        x = torch.randn(count, 3)
        np.testing.assert_array_equal(one(exe(x.numpy())), elements(x).numpy())
