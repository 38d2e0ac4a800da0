"""Upstream's paged cache of keys and values, which lives in a session as a handle: attention is that of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from paged_decoder import CPU, Cached, Sizes
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode

import tvm_axe as axe

HEADS, GROUPS, SIZE = 4, 2, 16


class Attention(Cached):
    """A layer's attention over a cache, and the function that makes the cache."""

    of, target = Sizes(HEADS, GROUPS, SIZE, layers=1, rope=RopeMode.NONE), CPU

    def attend(self, qkv: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
        batch, tokens, _, _ = qkv.shape
        rows = nn.op.reshape(qkv, (batch * tokens, HEADS + 2 * GROUPS, SIZE))
        out = cache.attention_with_fused_qkv(0, nn.op.reshape(rows, qkv.shape), HEADS, SIZE**-0.5)
        return nn.op.reshape(out, (batch, tokens, HEADS * SIZE)), cache


def in_numpy(qkv: np.ndarray) -> np.ndarray:
    q, k, v = np.split(qkv.astype("float64"), [HEADS, HEADS + GROUPS], axis=1)
    k, v = k.repeat(HEADS // GROUPS, 1), v.repeat(HEADS // GROUPS, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5
    weights = np.exp(scores + np.triu(np.full(scores.shape[1:], -1e9), 1))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(len(qkv), -1)


def test_a_paged_cache_stays_in_the_session() -> None:
    rows, cache = HEADS + 2 * GROUPS, nn.spec.Object(object_type=PagedKVCache)
    spec = {"qkv": nn.spec.Tensor([1, "n", rows, SIZE], "float32"), "cache": cache}
    model = Attention().exported_with({"attend": spec})
    qkv = np.random.default_rng(8).standard_normal((19, rows, SIZE), dtype="float32")
    want = in_numpy(qkv)
    add, begin = (tvm.get_global_func(f"vm.builtin.kv_state_{name}") for name in ("add_sequence", "begin_forward"))
    with axe.compile(model, work_dir=None).load() as session:
        other = session.create((2,), (64,), (32,), (4,), (0,))
        add(other.object, 0)
        begin(other.object, tvm_ffi.Shape([0]), tvm_ffi.Shape([1]))
        with pytest.raises(axe.LowerError, match=r"attend: the call failed: .*pages"):
            session.attend(qkv[None, :1], other)
        cache = session.create((2,), (64,), (32,), (16,), (0,))  # pages of 16, for which the kernels are
        assert cache.shape is None
        add(cache.object, 0)
        with pytest.raises(axe.LowerError, match=r"vm\.builtin\.kv_state_popn: the call failed: .*9"):
            cache.call("vm.builtin.kv_state_popn", 9, 1)
        with pytest.raises(axe.LowerError, match=r"the runtime has no function 'vm\.builtin\.nothing'"):
            cache.call("vm.builtin.nothing")
        got = []
        for part in (qkv[:14], qkv[14:15], qkv[15:16], qkv[16:]):
            cache.call("vm.builtin.kv_state_begin_forward", (0,), [len(part)])
            out, cache = session.attend(part[None], cache)
            cache.call("vm.builtin.kv_state_end_forward")
            got.append(out.numpy()[0])
    assert np.abs(np.concatenate(got) - want).max() / np.abs(want).max() < 1e-5
