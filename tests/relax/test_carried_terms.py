"""Sums of what devices have terms of: linear functions leave terms, so that less is moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import te, tirx
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.analysis.accesses import leaf_blocks
from tvm_axe.analysis.partials import carries_terms
from tvm_axe.relax import tradeoffs

EXPERTS, ROWS, WIDTH, INNER = 4, 16, 32, 24


class Experts(nn.Module):
    """Every expert sees every token; a weight each of what they leave."""

    def __init__(self) -> None:
        self.up = nn.Parameter((EXPERTS, WIDTH, INNER), "float32")
        self.down = nn.Parameter((EXPERTS, INNER, WIDTH), "float32")

    def main(self, x: nn.Tensor, share: nn.Tensor) -> nn.Tensor:
        inner = nn.op.matmul(nn.op.reshape(x, (1, ROWS, WIDTH)), self.up)
        each = nn.op.matmul(nn.op.relu(inner), self.down)
        return nn.op.relu(
            nn.op.reshape(nn.op.sum(each * share, axis=0), (1, ROWS, WIDTH)) + nn.op.reshape(x, (1, ROWS, WIDTH))
        )


@pytest.mark.parametrize("devices", [2, 3])
def test_what_experts_leave_is_summed_before_it_is_moved(
    devices: int, workers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three devices don't divide four experts, so that each has a part of all."""
    monkeypatch.setattr(tradeoffs, "TOLLS", (1 << 20,))
    monkeypatch.setattr(tradeoffs, "NEAR", 100.0)
    spec = {"x": nn.spec.Tensor([ROWS, WIDTH], "float32"), "share": nn.spec.Tensor([EXPERTS, ROWS, 1], "float32")}
    model, _ = Experts().export_tvm({"main": spec})  # type: ignore[attr-defined]
    exe: Any = axe.compile(model, mesh={"tp": devices}, pins={"down": 1}, work_dir=None, keep=False)
    chosen = exe.shared.functions["main"].chosen
    carried = [choice for choice in chosen.choices if any(form.partial for form in choice.strategy.ins)]
    assert len(carried) == 1 and all(form.partial == "sum" for form in carried[0].strategy.outs)
    assert chosen.bytes <= 2 * ROWS * WIDTH * 4
    rng = np.random.default_rng(0)
    x, share = rng.standard_normal((ROWS, WIDTH)), rng.standard_normal((EXPERTS, ROWS, 1))
    up, down = rng.standard_normal((EXPERTS, WIDTH, INNER)), rng.standard_normal((EXPERTS, INNER, WIDTH))
    want = np.maximum((np.maximum(x @ up, 0) @ down * share).sum(0) + x, 0)[None]
    weights = {"up": up.astype("float32"), "down": down.astype("float32")}
    with exe.load(workers(devices), weights) as session:
        got = np.asarray(session.main(x.astype("float32"), share.astype("float32")))
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5


def test_what_is_linear_carries_terms() -> None:
    """In one parameter alone, without what is added on every device."""

    def function(of: Any) -> Any:
        a, b = te.placeholder((4, 8), name="a"), te.placeholder((8,), name="b")
        term = te.reduce_axis((0, 4), "k")
        sums = te.compute((8,), lambda j: te.sum(a[term, j] * b[j], term), "sums")
        return te.create_prim_func([a, b, te.compute((8,), lambda j: of(sums, b, j), "out")])

    for of, wanted in (
        (lambda s, b, j: s[j] * 2.0 - s[j], True),
        (lambda s, b, j: s[j] + b[j], False),
        (lambda s, b, j: s[j] * s[j], False),
        (lambda s, b, j: tirx.max(s[j], tirx.const(0, "float32")), False),
    ):
        func = function(of)
        a, _, out = func.params
        assert carries_terms(leaf_blocks(func, {}), a, [out]) == wanted
