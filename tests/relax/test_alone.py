"""A Relax model on one device: tuned, compiled with what tuning found, and right."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.meta import apply_best, resolve_target
from tvm_axe.meta.workloads import fuse


class _Model(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.relu(self.up(x))) + x


@pytest.fixture(scope="module")
def model():
    mod, _ = _Model().export_tvm({"forward": {"x": nn.spec.Tensor([12, 24], "float32")}})
    return mod


def _check(executable) -> None:
    rng = np.random.default_rng(3)
    x, w1, b1, w2, b2 = (rng.standard_normal(s, "float32") for s in ((12, 24), (40, 24), 40, (24, 40), 24))
    machine = relax.VirtualMachine(executable, tvm.cpu())
    got = machine["forward"](*map(tvm.runtime.tensor, (x, w1, b1, w2, b2))).numpy()
    wide = x.astype("float64")
    want = np.maximum(wide @ w1.T + b1, 0) @ w2.T + b2 + wide
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5


def test_an_untuned_model_runs(model, tmp_path):
    _check(axe.compile(model, work_dir=None))
    _check(axe.compile(model, work_dir=tmp_path / "none"))


def test_a_tuned_model_runs_with_its_records(model, tmp_path):
    target = resolve_target("llvm", threads=1)
    result = axe.tune(model, target=target, trials=3, work_dir=tmp_path, seed=1, progress=False)
    assert len(result.tasks) == 2
    assert sum(task.trials for task in result.tasks) == 6
    tuned, seconds = apply_best(fuse(model, target), target, tmp_path)
    assert len(seconds) == 2
    # A tile kernel is an annotation, any other schedule has vectors.
    assert any(word in tuned.script() for word in ("vectorized", "axe.tile"))
    _check(axe.compile(model, target=target, work_dir=tmp_path))
