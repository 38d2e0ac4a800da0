"""Quantized weights as importers bring them: packed integers with a scale for each group, and 8-bit floats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import te, tirx
from tvm.relax.frontend import nn

import tvm_axe as axe

ROWS, COLUMNS, GROUP = 24, 64, 32
RNG = np.random.default_rng(4)


class Grouped(nn.Module):
    """A linear layer with eight integers of 4 bits in each uint32, and a scale for each group of 32."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.packed = nn.Parameter((ROWS, COLUMNS // 8), "uint32")
        self.scale = nn.Parameter((ROWS, COLUMNS // GROUP), dtype)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        def unpacked(packed: te.Tensor, scale: te.Tensor) -> te.Tensor:
            def element(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
                digits = tirx.shift_right(packed[i, j // 8], tirx.Cast("uint32", j % 8 * 4))
                number = tirx.Cast(self.dtype, tirx.bitwise_and(digits, tirx.const(15, "uint32")))
                return (number - tirx.const(7, self.dtype)) * scale[i, j // GROUP]

            return te.compute((ROWS, COLUMNS), element, name="unpacked")

        weight = nn.op.tensor_expr_op(unpacked, "unpack", [self.packed, self.scale])
        return nn.op.matmul(x, nn.op.permute_dims(weight))


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float16", 4e-3)])
@pytest.mark.parametrize("pack_weights", [False, True])
def test_groups_of_four_bits(dtype: str, bound: float, pack_weights: bool) -> None:
    model, _ = Grouped(dtype).export_tvm({"forward": {"x": nn.spec.Tensor(["n", COLUMNS], dtype)}})
    numbers = RNG.integers(0, 15, (ROWS, COLUMNS), dtype="uint32")
    packed = np.zeros((ROWS, COLUMNS // 8), "uint32")
    for n in range(8):
        packed |= numbers[:, n::8] << np.uint32(4 * n)
    scale = RNG.uniform(0.01, 0.1, (ROWS, COLUMNS // GROUP)).astype(dtype)
    x = RNG.standard_normal((5, COLUMNS)).astype(dtype)
    weight = (numbers.astype("float64") - 7) * scale.astype("float64").repeat(GROUP, 1)
    want = x.astype("float64") @ weight.T
    with axe.compile(model, work_dir=None, pack_weights=pack_weights).load(
        {"packed": packed, "scale": scale}
    ) as session:
        got = session.forward(x).numpy().astype("float64")
    assert np.abs(got - want).max() / np.abs(want).max() < bound


class Eighths(nn.Module):
    """A linear layer whose weights are 8-bit floats with one scale."""

    def __init__(self) -> None:
        self.weight = nn.Parameter((ROWS, COLUMNS), "float8_e4m3fn")
        self.scale = nn.Parameter((1,), "float32")

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        weight = nn.op.astype(self.weight, "float32") * self.scale
        return nn.op.matmul(x, nn.op.permute_dims(weight))


def test_floats_of_eight_bits() -> None:
    model, _ = Eighths().export_tvm({"forward": {"x": nn.spec.Tensor(["n", COLUMNS], "float32")}})
    weight = RNG.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.float8_e4m3fn)
    scale, x = np.array([0.5], "float32"), RNG.standard_normal((5, COLUMNS), dtype="float32")
    want = x.astype("float64") @ (weight.astype("float64") * 0.5).T
    with axe.compile(model, work_dir=None).load({"weight": weight, "scale": scale}) as session:
        got = session.forward(x).numpy()
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5
