"""Products that several functions of a model call with other shapes of as many rows: one function, compiled once."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import IRModule, relax, tirx
from tvm.relax.frontend import nn
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.nests import with_equal_ones_once
from tvm_axe.nests.any_rows import for_any_rows
from tvm_axe.nests.kernel_ranges import kernels_by_rows
from tvm_axe.relax.fuse import fuse

GPU, CPU = resolve_target("cuda:sm_90a"), resolve_target("llvm")
K = N = 40


class Layer(nn.Module):
    def __init__(self) -> None:
        self.up = nn.Linear(K, N)

    def prefill(self, x: nn.Tensor, other: nn.Tensor) -> nn.Tensor:
        return nn.op.silu(self.up(x)) + other

    def decode(self, x: nn.Tensor, other: nn.Tensor) -> nn.Tensor:
        return nn.op.silu(self.up(x)) + other


def lowered(prefill: tuple[str | int, ...], decode: tuple[str | int, ...], others: int, target: Target) -> IRModule:
    """The model with tile kernels, for CPUs too; what is added is of the same shape but for so many leading 1s."""

    def given(lead: tuple[str | int, ...]) -> dict[str, nn.spec.Tensor]:
        other = [*(1 for _ in lead[:others]), *lead[others:], N]
        return {"x": nn.spec.Tensor([*lead, K], "float32"), "other": nn.spec.Tensor(other, "float32")}

    model = Layer().export_tvm({"prefill": given(prefill), "decode": given(decode)})[0]
    mod = fuse(model, GPU)
    for name, func in products(mod).items():
        mod[name] = kernels_by_rows(func, target, (2, 16))
    return with_tile_kernels(mod, target)


def products(mod: IRModule) -> dict[str, tirx.PrimFunc]:
    return {str(v.name_hint): func for v, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}


def test_equal_products_are_one() -> None:
    """A prompt's tokens and a token of each sequence are rows to a kernel."""
    mod = lowered((1, "tokens"), ("batch", 1), 0, GPU)
    assert len(products(mod)) == 2
    ((_, one),) = products(with_equal_ones_once(mod)).items()
    assert [len(param.shape) for param in one.params] == [3, 2, 1, 3, 3]
    assert not any(isinstance(extent, tirx.IntImm) for extent in one.params[0].shape[:2])


@pytest.mark.parametrize(
    ("prefill", "decode", "others"),
    [
        ((1, "tokens"), ("batch",), 0),  # of other numbers of dimensions
        (("b", "n"), ("batch", 1), 1),  # it is asked which row of its sequence a row is
    ],
)
def test_others_stay(prefill: tuple[str | int, ...], decode: tuple[str | int, ...], others: int) -> None:
    mod = lowered(prefill, decode, others, GPU)
    assert with_equal_ones_once(mod) is mod


def test_the_one_is_right_of_both() -> None:
    mod = with_equal_ones_once(lowered((1, "tokens"), ("b", "n"), 0, CPU))
    assert len(products(mod)) == 1
    rest = tvm.transform.Sequential(_tvm.relax_lowering(CPU, "cpu"))
    machine = relax.VirtualMachine(builder.build_program(mod, CPU, rest), tvm.cpu())
    rng = np.random.default_rng()
    w, bias = (rng.standard_normal(shape).astype("float32") for shape in ((N, K), (N,)))
    for name, lead in (("prefill", (1, 19)), ("decode", (3, 5)), ("decode", (2, 1)), ("prefill", (1, 1))):
        x, other = (rng.standard_normal((*lead, size)).astype("float32") for size in (K, N))
        y = x.astype("float64") @ w.T + bias
        found = machine[name](*map(tvm.runtime.tensor, (x, other, w, bias))).numpy()
        np.testing.assert_allclose(found, y / (1 + np.exp(-y)) + other, rtol=1e-4, atol=1e-4)


def test_what_reads_elements_itself_is_not_for_any_rows() -> None:
    mod = fuse(
        Layer().export_tvm({"decode": {k: nn.spec.Tensor(["b", 1, K], "float32") for k in ("x", "other")}})[0], CPU
    )
    assert all(for_any_rows(func) is None for func in products(mod).values())
