"""A decoder on one device: weights in a safetensors file, its functions called by name, its cache where it is computed.

Run it with ``python examples/relax_session.py``. A small decoder of Llama's kind, with random weights that this writes
to a file first, has two functions that share them: ``prefill`` takes a prompt of any length, ``decode`` one token and
the keys and values of those before it. `axe.compile` makes an executable of both, ``exe.load`` puts the weights in
place once, and what functions return stays there: the cache is handed on without a copy.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import tvm
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

import tvm_axe as axe
from tvm_axe.executable import write_safetensors

VOCABULARY, WIDTH, HEADS, GROUPS, HIDDEN = 64, 32, 4, 2, 48
SIZE = WIDTH // HEADS
PROMPT, NEW = 9, 6  # tokens


class Layer(nn.Module):
    """Attention with fewer heads of keys and values than of queries, and a gated MLP, each behind a norm."""

    def __init__(self, dtype: str) -> None:
        self.norm1 = nn.RMSNorm(WIDTH, -1, 1e-5, bias=False, dtype=dtype)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE, bias=False, dtype=dtype)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)
        self.norm2 = nn.RMSNorm(WIDTH, -1, 1e-5, bias=False, dtype=dtype)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False, dtype=dtype)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False, dtype=dtype)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's result, and the keys and values of all tokens so far."""
        batch, tokens, _ = x.shape
        rows = op.reshape(self.qkv(self.norm1(x)), (batch, tokens, HEADS + 2 * GROUPS, SIZE))
        q, k, v = op.split(rows, [HEADS, HEADS + GROUPS], axis=2)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        if cache is not None:
            k, v = op.concat([cache[0], k], dim=1), op.concat([cache[1], v], dim=1)
        keys, values = (op.permute_dims(op.repeat(t, HEADS // GROUPS, axis=2), (0, 2, 1, 3)) for t in (k, v))
        scores = op.matmul(op.permute_dims(q, (0, 2, 1, 3)), op.permute_dims(keys, (0, 1, 3, 2))) * SIZE**-0.5
        weights = op.softmax(scores if mask is None else scores + mask, -1)
        x = x + self.out(op.reshape(op.permute_dims(op.matmul(weights, values), (0, 2, 1, 3)), (batch, tokens, WIDTH)))
        gate, up = op.split(self.gate_up(self.norm2(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up), k, v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = op.split(x, 2, axis=-1)
    return x * cos + op.concat([op.negative(high), low], dim=-1) * sin


class Decoder(nn.Module):
    """Two layers between an embedding and the logits."""

    def __init__(self, dtype: str = "float32") -> None:
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList([Layer(dtype), Layer(dtype)])
        self.norm = nn.RMSNorm(WIDTH, -1, 1e-5, bias=False, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)

    def prefill(self, ids: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Logits of a prompt's tokens, and the keys and values of each layer."""
        return self._run(ids, cos, sin, mask, [None, None])

    def decode(
        self, ids: Tensor, cos: Tensor, sin: Tensor, k0: Tensor, v0: Tensor, k1: Tensor, v1: Tensor
    ) -> tuple[Tensor, ...]:
        """Logits of one token behind others, and the keys and values of each layer."""
        return self._run(ids, cos, sin, None, [(k0, v0), (k1, v1)])

    def _run(
        self, ids: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, caches: list[tuple[Tensor, Tensor] | None]
    ) -> tuple[Tensor, ...]:
        x, kept = self.embedding(ids), []
        for layer, cache in zip(self.layers, caches):
            x, k, v = layer(x, cos, sin, mask, cache)
            kept += [k, v]
        return self.head(self.norm(x)), *kept


def export(dtype: str = "float32") -> tvm.IRModule:
    """The decoder in Relax: a prompt of ``n`` tokens, and one token behind ``past`` others."""

    def spec(*shape: int | str) -> nn.spec.Tensor:
        return nn.spec.Tensor(list(shape), dtype)

    caches = {name: spec(1, "past", GROUPS, SIZE) for name in ("k0", "v0", "k1", "v1")}
    prompt = {"ids": nn.spec.Tensor([1, "n"], "int32"), "cos": spec("n", 1, SIZE), "sin": spec("n", 1, SIZE)}
    token = {"ids": nn.spec.Tensor([1, 1], "int32"), "cos": spec(1, 1, SIZE), "sin": spec(1, 1, SIZE)}
    model, _ = Decoder(dtype).export_tvm({"prefill": {**prompt, "mask": spec("n", "n")}, "decode": {**token, **caches}})
    return model


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights by name, of a size that keeps results near 1."""
    rng = np.random.default_rng(seed)
    shapes = {name: tuple(map(int, param.shape)) for name, param in Decoder().named_parameters()}
    return {
        name: rng.standard_normal(shape, dtype="float32") / np.float32(shape[-1] ** 0.5 if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }


def rotations(start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the positions from `start` to `stop`."""
    angles = np.arange(start, stop)[:, None] / 10000.0 ** (np.arange(0, SIZE, 2) / SIZE)
    both = np.concatenate([angles, angles], axis=1)[:, None]
    return np.cos(both).astype("float32"), np.sin(both).astype("float32")


def causal(tokens: int) -> np.ndarray:
    """What is added to the scores, so that no token sees those behind it."""
    return np.triu(np.full((tokens, tokens), -1e9, "float32"), 1)


def main() -> float:
    """Generate tokens; return the largest difference from a prefill of all of them, relative to the largest logit."""
    path = Path(tempfile.mkdtemp()) / "model.safetensors"
    write_safetensors(path, weights())
    exe = axe.compile(export())
    with exe.load(path) as model:
        print(model.show())
        placed = model.copied
        ids = np.random.default_rng(1).integers(0, VOCABULARY, (1, PROMPT), dtype="int32")
        logits, *caches = model.prefill(ids, *rotations(0, PROMPT), causal(PROMPT))
        rows = [np.asarray(logits)[0]]
        for n in range(PROMPT, PROMPT + NEW):
            token = rows[-1][-1:].argmax(-1).astype("int32")[None]
            ids = np.concatenate([ids, token], axis=1)
            logits, *caches = model.decode(token, *rotations(n, n + 1), *caches)
            rows.append(np.asarray(logits)[0])
        print(f"tokens: {' '.join(map(str, ids[0]))}")
        print(f"copied for {NEW + 1} calls: {model.copied - placed} bytes, beside {placed} of weights once")
        whole, *_ = model.prefill(ids, *rotations(0, PROMPT + NEW), causal(PROMPT + NEW))
        want = np.asarray(whole)[0]
    difference = float(np.abs(np.concatenate(rows) - want).max() / np.abs(want).max())
    print(f"largest relative difference from a prefill of all: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
