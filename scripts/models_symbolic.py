"""A Llama-style decoder for any number of tokens, the one of `scripts/models_torch.py`, by the operators of Relax.

Upstream's importers of torch and ONNX don't read it with an unknown number of tokens, as keys are repeated for groups
of heads. What is computed, the logits of the last token, is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from torch import nn
from tvm import relax, tirx
from tvm.relax import op

__all__ = ["decoder"]

_EPSILON = 1e-5


def decoder(module: nn.Module, tokens: int | tirx.Var) -> tvm.IRModule:
    """``main(ids)`` of [tokens] numbers of words; the weights are constants."""
    weights = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    builder = relax.BlockBuilder()
    ids = relax.Var("ids", relax.TensorType((tokens,), "int64"))
    with builder.function("main", [ids]):
        with builder.dataflow():
            made = _Layers(builder.emit, weights, tokens)
            out = builder.emit_output(made.logits(ids, module))
        builder.emit_func_output(out)
    return builder.get()


class _Layers:
    def __init__(self, emit: Callable[[Any], Any], weights: dict[str, np.ndarray], tokens: int | tirx.Var) -> None:
        self.emit, self.weights, self.tokens = emit, weights, tokens

    def logits(self, ids: Any, module: Any) -> Any:
        emit, attention = self.emit, module.attentions[0]
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.dim
        turns = [self._shaped(self._part(self._const(name), 0, 0, self.tokens), 1, dim) for name in ("cos", "sin")]
        x = emit(op.take(self._const("words.weight"), ids, axis=0))
        for n in range(len(module.attentions)):
            own, inner = f"attentions.{n}", self._normed(x, 2 * n)
            q = self._turned(self._shaped(self._linear(inner, f"{own}.q"), heads, dim), turns)
            k = self._turned(self._shaped(self._linear(inner, f"{own}.k"), kv_heads, dim), turns)
            v = self._shaped(self._linear(inner, f"{own}.v"), kv_heads, dim)
            many = [q, *(emit(op.repeat(each, heads // kv_heads, 1)) for each in (k, v))]
            four = [emit(op.reshape(each, (1, self.tokens, heads, dim))) for each in many]
            y = emit(op.reshape(emit(op.nn.attention(*four, causal_mask="TopLeft")), (self.tokens, heads * dim)))
            x = emit(op.add(x, self._linear(y, f"{own}.out")))
            inner, own = self._normed(x, 2 * n + 1), f"mlps.{n}"
            gate = emit(op.nn.silu(self._linear(inner, f"{own}.gate")))
            x = emit(op.add(x, self._linear(emit(op.multiply(gate, self._linear(inner, f"{own}.up"))), f"{own}.down")))
        last = self._part(self._normed(x, 2 * len(module.attentions)), 0, self.tokens - 1, self.tokens)
        return self._linear(emit(op.reshape(last, (1, heads * dim))), "head")

    def _const(self, name: str) -> Any:
        return relax.const(self.weights[name])

    def _linear(self, x: Any, name: str) -> Any:
        return self.emit(op.matmul(x, self.emit(op.permute_dims(self._const(f"{name}.weight")))))

    def _normed(self, x: Any, n: int) -> Any:
        return self.emit(op.nn.rms_norm(x, self._const(f"norms.{n}.weight"), axes=[-1], epsilon=_EPSILON))

    def _shaped(self, x: Any, *last: int) -> Any:
        return self.emit(op.reshape(x, (self.tokens, *last)))

    def _part(self, x: Any, axis: int, begin: Any, end: Any) -> Any:
        return self.emit(op.strided_slice(x, [axis], [begin], [end]))

    def _turned(self, x: Any, turns: list[Any]) -> Any:
        emit, dim = self.emit, int(x.ty.shape[-1])
        first, second = self._part(x, 2, 0, dim // 2), self._part(x, 2, dim // 2, dim)
        turned = emit(op.concat([emit(op.negative(second)), first], 2))
        return emit(op.add(emit(op.multiply(x, turns[0])), emit(op.multiply(turned, turns[1]))))
