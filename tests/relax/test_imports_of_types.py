"""Operators imported from torch.export in other types and shapes than models' usual ones, beside PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch_modules import Called
from tvm.relax.frontend.torch import from_exported_program

import tvm_axe as axe
from tvm_axe.relax import torch_converters

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")
nn = torch.nn


def compiled(function: Any, given: tuple[Any, ...]) -> Any:
    program = torch.export.export(Called(function), given)
    return axe.compile(from_exported_program(program, custom_convert_map=torch_converters()), work_dir=None)


X = torch.randn(4, 5, 6, 7, generator=torch.Generator().manual_seed(0))


def extremes(x: Any) -> Any:
    return torch.cat([*torch.cummax(x, 2), *torch.cummin(x, 1), torch.logcumsumexp(x * 20, -1).nan_to_num(0.5)])


def of_truth_values(x: Any) -> Any:
    """Compared, ordered and added up as numbers."""
    mask, other = x > 0, x.flip(0) > 0
    pairs = (mask == other, mask != other, mask < other, mask >= other, torch.fmax(mask, other), mask.sgn())
    ordered = (mask.max(0).values, mask.amin(1, keepdim=True), mask.sort(1).values, mask.cummax(1).values, mask.any())
    return torch.stack([each.expand(mask.shape) for each in (*pairs, *ordered, mask.isnan())])


def of_one_element(x: Any) -> Any:
    """Of a tensor without dimensions along the one that it is taken to have."""
    return torch.stack([x.max(0).values, x.cumsum(0), x.cumprod(0), x.sort(0).values, x.topk(1).values, x.flip(0)])


def of_nothing(x: Any) -> Any:
    empty = x[:0, 0]
    return torch.stack([empty.mean(), empty.sum(), empty.var(), *torch.std_mean(empty), empty.max(1).values.sum()])


def of_integers(i: Any, n: Any) -> Any:
    wide = i * 2**30 + 1
    products = (wide @ i, torch.addmm(i, wide, i, beta=2, alpha=3), nn.functional.linear(wide, i), (i % 5) ** n, 2**n)
    small = i.to(torch.uint8)
    return torch.stack([*products, i.scatter_add(1, n % 3, i), small.sort(1).values.long(), n.prod(1)[:, None] + 0 * i])


def trained(x: Any, w: Any) -> Any:
    """The results of a norm in training behind the first."""
    made = torch.native_batch_norm(x, w, w, w * 1, w * 2, True, 0.3, 1e-5)
    return torch.cat([made[0].flatten(), made[1], made[2]])


def resized(x: Any) -> Any:
    sizes: tuple[dict[str, Any], ...] = (
        {"size": (3, 9, 4)},
        {"scale_factor": 1.7},
        {"size": (2, 7, 9), "align_corners": True},
    )
    return torch.cat([nn.functional.interpolate(x[None], mode="trilinear", **each).flatten() for each in sizes])


def sampled(x: Any, y: Any) -> Any:
    kinds = (("bilinear", "zeros", False), ("nearest", "border", True), ("bilinear", "reflection", False))
    return torch.stack([nn.functional.grid_sample(x[None], y[None], *kind) for kind in kinds])


def near_zero(x: Any) -> Any:
    y = x * 1e-5
    return torch.stack([torch.expm1(y), torch.log1p(y), nn.functional.elu(y)]) * 1e5


def shifts(i: Any, n: Any) -> Any:
    return torch.stack([i << n, i >> n, i << 3, i >> 1, i << 70, i >> 70, (i - 9) >> n])


def special(x: Any) -> Any:
    """Where PyTorch's results are infinite or no numbers, too."""
    x = torch.cat([x.flatten(), torch.tensor([0.0, 1.0, -1.0, 2.0, -2.0, 0.5, 1e-8, 1e10, torch.inf, torch.nan])])
    return torch.stack([torch.erfinv(x), torch.erfinv(torch.sin(x)), torch.lgamma(x), torch.lgamma(x * 3)])


def searched(x: Any, i: Any) -> Any:
    rows, value = x.sort(-1).values, torch.where(x > 2, torch.nan, x.flip(-1))
    found = [torch.searchsorted(rows, value), torch.searchsorted(rows, value, side="right")]
    found += [torch.bucketize(value, rows[0, 0], right=right) for right in (True, False)]
    isin = torch.isin(i, i[:2] * 2), torch.isin(i, i[0], invert=True), torch.isin(i, 3)
    return torch.cat([*(each.flatten() for each in found), *(each.flatten().long() for each in isin)])


W = torch.rand(5, generator=torch.Generator().manual_seed(0))
SOME = torch.cat(
    [X[0, :2, :, :5], torch.tensor([torch.nan, 1.0]).repeat(1, 2, 3, 1).reshape(1, 6, 2).repeat(2, 1, 1)], 2
)
N = torch.arange(9).reshape(3, 3)
OTHERS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "extremes": (extremes, (SOME,)),
    "truth values": (of_truth_values, (X[0, 0],)),
    "one element": (of_one_element, (X[0, 0, 0, 0],)),
    "nothing": (of_nothing, (X,)),
    "integers": (of_integers, (N - 3, N)),
    "trained": (trained, (X, W)),
    "pooled": (lambda x: nn.functional.adaptive_max_pool2d(x, (4, 3)), (X,)),
    "distances": (lambda x: torch.stack([torch.cdist(x[0], x[1], p) for p in (1.0, 2.0, 3.0)]), (X,)),
    "resized": (resized, (X,)),
    "sampled": (sampled, (X, X.reshape(5, 7, 24)[:, :6, :9].reshape(5, 6, 3, 3))),
    "near zero": (near_zero, (X,)),
    "groups": (lambda x: nn.functional.group_norm(x[:, :4], 2), (X,)),
    "shifts": (shifts, (N * 12345 - 40000, N)),
    "special": (special, (X[0, 0],)),
    "searched": (searched, (X[0], N)),
    "given back": (lambda x: x.clone(), (X,)),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_operators_of_other_types_and_shapes(name: str) -> None:
    function, given = OTHERS[name]
    want = function(*given).numpy()
    got = np.asarray(compiled(function, given)(*given))
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


HALVES: dict[str, Callable[[Any], Any]] = {
    "median": lambda x: x.median(2).values,
    "sampled": lambda x: nn.functional.grid_sample(x, x[..., :2], align_corners=False),
    "expand": lambda x: x[:, :1, :1, :1].expand(4, 3, 16, 16).clone(),
    "sums": lambda x: torch.stack([x.flatten().cumsum(0), x.flatten().logcumsumexp(0)]),
    "near zero": lambda x: torch.stack([torch.expm1(x / 64), torch.log1p(x.abs() / 64), nn.functional.elu(x / 64)]),
    "groups": lambda x: nn.functional.group_norm(x[:, :4], 2),
    "trained": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x, x.flip(0), x * 2),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", HALVES)
@torch.no_grad()
def test_operators_in_half_precision_are_as_exact_as_the_type(name: str, dtype: str) -> None:
    """Within four roundings of the largest, beside float64."""
    function, x = HALVES[name], X.to(getattr(torch, dtype))
    got = compiled(function, (x,))(x)
    assert str(got.dtype).removeprefix("torch.") == dtype
    want = function(x.double())
    assert float((got.double() - want).abs().max() / want.abs().max()) < 2 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: nn.functional.conv2d(x.int(), x.int()), "convolution.default is imported as float32, where PyTorch"),
        (lambda x: x.scatter_reduce(0, x.long() * 0, x, "mean"), "reduce='mean' isn't imported; valid are sum"),
        (lambda x: torch.as_strided(x, (2, 2), (1, 2)), "as_strided.default isn't imported of these arguments"),
    ],
)
def test_what_is_not_imported_is_refused_by_its_name(function: Any, message: str) -> None:
    with pytest.raises(axe.InputError, match=message):
        compiled(function, (X[:, :, 0, 0],) if "strided" in message else (X,))
