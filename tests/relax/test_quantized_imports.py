"""PyTorch's quantized numbers as its export has them: to integers and back, of all, channels, rows and groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_weights_of_eight_bits import BOUND, GPU, kernels

import tvm_axe as axe
from tvm_axe.relax import torch_converters
from tvm_axe.relax.quantized import with_decoding_products

torch = pytest.importorskip("torch", reason="it exports the models and is the judge")
pytest.importorskip("torch.ao.quantization.fx._decomposed", reason="it has these operators")
Q = torch.ops.quantized_decomposed
INT8 = (-128, 127, torch.int8)

_RNG = torch.Generator().manual_seed(3)
X = torch.randint(-600, 600, (6, 64), generator=_RNG) / 2
SCALES = torch.tensor([0.5, 1, 2, 0.25, 4, 8])  # so that ties are ties whatever is contracted
ZEROS = torch.randint(-20, 20, (6,), generator=_RNG)
OF_GROUPS = 2.0 ** torch.randint(-2, 3, (6, 4), generator=_RNG)
ZEROS_OF_GROUPS = torch.randint(-5, 5, (6, 4), generator=_RNG)
ROWS = (SCALES[:, None].double(), ZEROS[:, None])

BOTH: dict[str, Callable[[Any], Any]] = {
    "of all": lambda x: Q.dequantize_per_tensor(Q.quantize_per_tensor(x, 0.5, 3, *INT8), 0.5, 3, *INT8),
    "to bytes": lambda x: Q.quantize_per_tensor(x, 0.5, 100, 0, 255, torch.uint8),
    "of tensors": lambda x: Q.dequantize_per_tensor.tensor(
        Q.quantize_per_tensor.tensor(x, SCALES[3], ZEROS[0], *INT8), SCALES[3], ZEROS[0], *INT8
    ),
    "of channels": lambda x: Q.dequantize_per_channel(
        Q.quantize_per_channel(x, SCALES, ZEROS, 0, *INT8), SCALES, ZEROS, 0, *INT8
    ),
    "of channels, no zeros": lambda x: Q.dequantize_per_channel(
        Q.quantize_per_channel(x.half(), SCALES, ZEROS, 0, *INT8), SCALES, None, 0, *INT8, out_dtype=torch.float16
    ),
    "of rows": lambda x: Q.dequantize_per_token(Q.quantize_per_token(x, *ROWS, *INT8), *ROWS, *INT8, torch.float32),
    "of groups": lambda x: Q.dequantize_per_channel_group(
        Q.quantize_per_channel_group(x, OF_GROUPS, ZEROS_OF_GROUPS, -8, 7, torch.int8, 16),
        OF_GROUPS, ZEROS_OF_GROUPS, -8, 7, torch.int8, 16, torch.float16,
    ),
}  # fmt: skip


def imported(of: Callable[..., Any], *inputs: Any) -> tuple[Any, Any]:
    """A function as a model, and what PyTorch makes of the inputs."""
    from tvm.relax.frontend.torch import from_exported_program

    class Module(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return of(*given)

    exported = torch.export.export(Module().eval(), inputs)
    return from_exported_program(exported, custom_convert_map=torch_converters()), of(*inputs)


@pytest.mark.parametrize("name", BOTH)
def test_numbers_are_quantized_and_back(name: str) -> None:
    model, want = imported(BOTH[name], X)
    found = axe.compile(model, work_dir=None)(X)
    (found,) = found if isinstance(found, list | tuple) else (found,)
    assert found.dtype == want.dtype
    assert torch.equal(found, want)


@pytest.mark.parametrize("of", ["channels", "groups"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_layers_with_such_weights_are_kernels(of: str, dtype: Any) -> None:
    weight = torch.randint(-128, 128, (48, 64), dtype=torch.int8, generator=_RNG)
    shape = (48,) if of == "channels" else (48, 2)
    scale, zero = torch.rand(shape, generator=_RNG) * 0.02 + 0.01, torch.randint(-9, 9, shape, generator=_RNG)

    def layer(x: Any) -> Any:
        if of == "channels":
            wide = Q.dequantize_per_channel(weight, scale, zero, 0, *INT8, out_dtype=dtype)
        else:
            wide = Q.dequantize_per_channel_group(weight, scale, zero, *INT8, 32, dtype)
        return torch.nn.functional.linear(x, wide)

    x = torch.randn(5, 64, generator=_RNG).to(dtype)
    model, want = imported(layer, x)
    found = with_decoding_products(model, GPU)
    assert kernels(found) == ["w8a16_matmul"]
    got = axe.compile(found, work_dir=None)(x)
    got, want = (each.double().numpy() for each in ((got[0] if isinstance(got, list | tuple) else got), want))
    assert np.abs(got - want).max() / np.abs(want).max() < BOUND[str(dtype).removeprefix("torch.")]
