"""Products with matrices that are taken by index, as of experts: no copy of these is made on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.lower.defaults import with_default_kernels
from tvm_axe.machines import resolve_target
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.kernels import with_kernels
from tvm_axe.schedule.tiles import choices_in

TOKENS, CHOICES, EXPERTS, HIDDEN, INNER = 5, 2, 4, 32, 48
GPU = resolve_target("cuda:sm_90a")


class Experts(nn.Module):
    """Each token by the experts that it chose, gated, written as columns or as rows."""

    def __init__(self, form: str, dtype: str) -> None:
        self.form = form
        first = (EXPERTS, HIDDEN, INNER) if form == "rows" else (EXPERTS, INNER, HIDDEN)
        self.gate, self.up = nn.Parameter(first, dtype), nn.Parameter(first, dtype)
        self.down = nn.Parameter((EXPERTS, INNER, HIDDEN) if form == "rows" else (EXPERTS, HIDDEN, INNER), dtype)

    def forward(self, x: nn.Tensor, chosen: nn.Tensor) -> nn.Tensor:
        op = nn.op
        columns = self.form == "columns"

        def times(value: nn.Tensor, weight: nn.Parameter) -> nn.Tensor:
            taken = op.take(weight, chosen, axis=0)
            if self.form == "permuted":
                taken = op.permute_dims(taken, [0, 1, 3, 2])
            return op.matmul(taken, value) if columns else op.matmul(value, taken)

        x = op.reshape(x, (TOKENS, 1, HIDDEN, 1) if columns else (TOKENS, 1, 1, HIDDEN))
        h = op.silu(times(x, self.gate)) * times(x, self.up)
        return op.reshape(times(h, self.down), (TOKENS, CHOICES, HIDDEN))


FORMS = ("rows", "columns", "permuted")


def model(form: str, dtype: str, index: str = "int32") -> tvm.IRModule:
    spec = {
        "x": nn.spec.Tensor((TOKENS, HIDDEN), dtype),  # type: ignore[attr-defined]
        "chosen": nn.spec.Tensor((TOKENS, CHOICES), index),  # type: ignore[attr-defined]
    }
    mod, _ = Experts(form, dtype).export_tvm({"forward": spec})
    return mod


def drawn(form: str, dtype: str, index: str) -> tuple[list[np.ndarray], np.ndarray]:
    """The arguments, and the result in float64."""
    rng = np.random.default_rng()
    gate, up = (rng.standard_normal((EXPERTS, HIDDEN, INNER)).astype(dtype) for _ in range(2))
    down = (rng.standard_normal((EXPERTS, INNER, HIDDEN)) / 8).astype(dtype)
    x = (rng.standard_normal((TOKENS, HIDDEN)) / 6).astype(dtype)
    chosen = rng.integers(0, EXPERTS, (TOKENS, CHOICES)).astype(index)
    wide: list[Any] = [array.astype("float64") for array in (x, gate, up, down)]
    a, b = (np.einsum("th,tchi->tci", wide[0], each[chosen]) for each in wide[1:3])
    expected = np.einsum("tci,tcih->tch", a / (1 + np.exp(-a)) * b, wide[3][chosen])
    weights = [w if form == "rows" else w.transpose(0, 2, 1).copy() for w in (gate, up, down)]
    return [x, chosen, *weights], expected


def compared(exe: axe.Executable, form: str, dtype: str, index: str) -> None:
    arguments, expected = drawn(form, dtype, index)
    found = np.asarray(exe(*arguments)).astype("float64")
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < {"float32": 1e-5, "float16": 5e-3}[dtype]


@pytest.mark.parametrize("form", FORMS)
def test_products_read_matrices_where_they_lie(form: str) -> None:
    """And take the kernel, with what is pointwise behind them."""
    made = with_default_kernels(fuse(model(form, "float16"), GPU), GPU)
    funcs = {v.name_hint: func for v, func in made.functions_items() if isinstance(func, tirx.PrimFunc)}
    assert not any("take" in name for name in funcs)
    chosen = [choice.kernel for func in funcs.values() for choice in choices_in(func)]
    assert chosen == ["gathered_matmul"] * len(chosen) and len(chosen) >= 2


@pytest.mark.parametrize(("form", "index"), [("rows", "int32"), ("columns", "int64"), ("permuted", "int32")])
def test_what_takes_its_place_computes_the_same(form: str, index: str) -> None:
    """Compiled for a CPU, which knows of no kernel here."""
    compared(
        axe.compile(with_kernels(model(form, "float32", index), GPU), target="llvm", work_dir=None),
        form,
        "float32",
        index,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "dtype"), [*((form, "float16") for form in FORMS), ("rows", "float32")])
def test_on_a_gpu(form: str, dtype: str, cuda: object) -> None:
    compared(axe.compile(model(form, dtype, "int64"), target="cuda", work_dir=None), form, dtype, "int64")
