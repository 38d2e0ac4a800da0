"""A NaN stays one in models: in maxima, minima, and all that is made of them, as PyTorch has it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch_modules import Called
from tvm import tirx
from tvm.relax.frontend.torch import from_exported_program

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.machines.threads import with_threads
from tvm_axe.pipeline import Work, run
from tvm_axe.relax import torch_converters
from tvm_axe.relax.alone import model_passes

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")
nn, F = torch.nn, torch.nn.functional
TYPES = ["float32", "float16", "bfloat16", "float64"]
CLOSE = {"float32": 2e-5, "float16": 5e-3, "bfloat16": 4e-2, "float64": 1e-12}
SPECIAL = (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, torch.nan)


def drawn(shape: tuple[int, ...], dtype: str, seed: int = 0, share: int = 4) -> Any:
    """Random numbers, one in `share` of which is NaN, an infinity or a zero of either sign."""
    generator = torch.Generator().manual_seed(seed)
    x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    places = torch.randperm(x.numel(), generator=generator)[: -(-x.numel() // share)]
    x.view(-1)[places] = torch.tensor(SPECIAL, dtype=torch.float64).repeat(len(places))[: len(places)]
    return x.to(getattr(torch, dtype))


def pointwise(x: Any, y: Any) -> Any:
    bounded = (
        F.relu(x), F.relu6(x), F.hardtanh(x), F.hardsigmoid(x), F.hardswish(x), F.leaky_relu(x),
        torch.clamp(x, -1.0, 2.0), torch.clamp(x, min=0.5), torch.clamp(x, max=0.5),
    )  # fmt: skip
    pairs = (torch.maximum(x, y), torch.minimum(x, y), torch.max(x, y), torch.fmax(x, y), torch.fmin(y, x))
    return (*bounded, *pairs, torch.relu(2 * x + 1) - 1, torch.relu(x).abs() + torch.maximum(x, y.abs()))


def asked(x: Any, y: Any) -> Any:
    """What asks for NaN, or is of one where it is computed of itself."""
    truths = (x != x, x != y, x != 0, ~(x == x), ~(x < y), ~((x < y) | (x > y)), (x != x) & (y == y), x.bool())
    named = (torch.isnan(x), torch.isfinite(x), torch.isinf(x), (x != x).any(-1), torch.count_nonzero(x))
    chosen = (torch.where(x != x, torch.zeros_like(x), x), torch.where(~(x >= y), x, y), x.masked_fill(~(x > 0), 7.0))
    return (*truths, *named, *chosen, x - x, x * 0.0, 0.0 * x + y, F.softshrink(x), F.hardshrink(x), x / x)


def divided(x: Any, y: Any) -> Any:
    """Divisions without fractions, by infinities and zeros, too, and whatever else."""
    tensors = (torch.remainder(x, y), torch.floor_divide(x, y), torch.fmod(x, y), x % x, x // x)
    infinite = (x % torch.inf, x % -torch.inf, torch.fmod(x, torch.inf), torch.inf % x)
    return (*tensors, *infinite, x % 3.0, x % -3.0, 7.0 % x, x / 0.0)


def with_zero(x: Any, y: Any) -> Any:
    products = (x * 0.0, -0.0 * x, 0.0 / x, -0.0 / x, torch.zeros_like(x) / x, torch.zeros_like(x) * x)
    return (*products, x + 0.0, 0.0 + x, x - (-0.0), x - 0.0, 0.0 - x, x + (-0.0), x + torch.zeros_like(x))


def of_rows(x: Any) -> Any:
    plain = (x.amax(-1), x.amin(-1), x.amax(0), x.amax(), x.max(-1).values, x.min(-1).values)
    return (*plain, torch.relu(x).amax(-1), torch.relu(x).sum(-1), x.clamp(-2, 2).amin(0), torch.softmax(x, -1))


def windows(x: Any) -> Any:
    pools = (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2), F.adaptive_max_pool2d(x, 2), F.max_pool1d(x[0], 3))
    nothing = torch.full_like(x, -torch.inf)
    return (*pools, torch.relu(F.max_pool2d(x, 2)), F.max_pool2d(nothing, 3, 1, 1), F.max_pool1d(nothing[0], 2))


def same(found: Any, wanted: Any, close: float) -> None:
    found = [found] if isinstance(wanted, torch.Tensor) else found
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else wanted
    assert len(found) == len(wanted)
    for n, (one, other) in enumerate(zip(found, wanted)):
        one = one.double().numpy() if isinstance(one, torch.Tensor) else np.asarray(one, "float64")
        np.testing.assert_allclose(one, other.double().numpy(), close, close, err_msg=f"result {n}")


def imported(function: Any, *given: Any) -> Any:
    program = torch.export.export(Called(function), given)
    return from_exported_program(program, custom_convert_map=torch_converters())


def check(function: Any, *given: Any) -> None:
    exe = axe.compile(imported(function, *given), work_dir=None)
    same(exe(*given), function(*given), CLOSE[str(given[0].dtype).removeprefix("torch.")])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("extent", [1, 7, 64, 1003])
def test_pointwise(dtype: str, extent: int) -> None:
    check(pointwise, drawn((extent,), dtype), drawn((extent,), dtype, 1, share=5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("extent", [1, 7, 64, 1003])
def test_questions(dtype: str, extent: int) -> None:
    check(asked, drawn((extent,), dtype), drawn((extent,), dtype, 1, share=5))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("function", [divided, with_zero])
def test_signs(function: Any, dtype: str) -> None:
    """Of every pair of some numbers; zeros have PyTorch's sign, too."""
    some = [0, -0.0, 1, -1, 2.5, -2.5, torch.inf, -torch.inf, torch.nan, 7, -7, 3, -3, 0.125, -0.1, 1000.25]
    x, y = torch.meshgrid(2 * [torch.tensor(some, dtype=getattr(torch, dtype))], indexing="ij")
    given = (x.contiguous(), y.contiguous())
    found, wanted = axe.compile(imported(function, *given), work_dir=None)(*given), function(*given)
    same(found, wanted, CLOSE[dtype] if dtype in ("float16", "bfloat16") else 0)
    for n, (one, other) in enumerate(zip(found, wanted)):
        number = ~torch.isnan(other)
        negative = torch.signbit(torch.as_tensor(one).double())
        assert torch.equal(negative[number], torch.signbit(other)[number]), f"result {n}"


def test_divisions_of_integers() -> None:
    x = torch.tensor([7, -7, 9, 0], dtype=torch.int32)
    exe = axe.compile(imported(lambda x: (x % 4, x // 4, x % -4, x // -4, x % 2.5, x * 0, x + 0), x), work_dir=None)
    for one, other in zip(exe(x), (x % 4, x // 4, x % -4, x // -4, x % 2.5, x * 0, x + 0), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other.numpy())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(3, 1), (4, 7), (3, 64), (4, 1003)])
def test_reductions(dtype: str, shape: tuple[int, int]) -> None:
    """Of rows with and without NaN."""
    x = drawn(shape, dtype, share=3)
    x[-1] = drawn(shape[-1:], dtype, 1).nan_to_num(1.0)
    check(of_rows, x)


@pytest.mark.parametrize("dtype", TYPES)
def test_windows(dtype: str) -> None:
    check(windows, drawn((1, 3, 9, 14), dtype, share=12))


@pytest.mark.parametrize("dtype", TYPES)
def test_behind_products(dtype: str) -> None:
    """Which the importer computes in float32 whatever they are of; so the results are to that."""
    generator, close = torch.Generator().manual_seed(2), 40 * max(CLOSE[dtype], CLOSE["float32"])
    weight = torch.randn(37, 48, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    kernel = torch.randn(5, 3, 3, 3, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    x = torch.randn(19, 37, generator=generator, dtype=torch.float64).to(weight.dtype)
    image = torch.randn(1, 3, 12, 12, generator=generator, dtype=torch.float64).to(weight.dtype)
    x[3, 5], image[0, 1, 4, 6] = torch.nan, torch.nan
    got = axe.compile(imported(lambda x: torch.relu(x @ weight), x), work_dir=None)(x)
    want = torch.relu(x.double() @ weight.double())
    same(got, want, close)
    got = axe.compile(imported(lambda x: torch.relu(F.conv2d(x, kernel)), image), work_dir=None)(image)
    same(got, torch.relu(F.conv2d(image.double(), kernel.double())), close)


@pytest.mark.parametrize("dtype", TYPES)
def test_order(dtype: str) -> None:
    """NaN is the largest number, behind infinity, and equal elements stay in their order."""

    def ordered(x: Any) -> Any:
        both = [torch.sort(x, dim=-1, descending=down, stable=True) for down in (False, True)]
        return (*both[0], *both[1], torch.argsort(x, dim=0, stable=True), torch.sort(x)[0], x.kthvalue(3)[0])

    check(ordered, drawn((5, 67), dtype, share=3))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(6, 5), (5, 8), (4, 67)])
def test_selected(dtype: str, shape: tuple[int, int]) -> None:
    """The largest few, NaN among them, and the middle one; which place one of several equals has is open."""

    def selected(x: Any) -> Any:
        few = (torch.topk(x, 3, dim), torch.topk(x, 2, dim, largest=False), torch.median(x, dim, keepdim=True))
        return (*(each for found in few for each in found), torch.median(x), x[0, :4].median())

    x = drawn(shape, dtype, share=3)
    x[-1] = drawn(shape[-1:], dtype, 1).nan_to_num(1.0)
    x[0], x[0, 2:4] = 1.0, torch.nan
    for dim in (-1, 0):
        found, wanted = axe.compile(imported(selected, x), work_dir=None)(x), selected(x)
        same([found[n] for n in (0, 2, 4, 6, 7)], [wanted[n] for n in (0, 2, 4, 6, 7)], 0)
        for values, places in ((0, 1), (2, 3), (4, 5)):
            same(torch.take_along_dim(x, torch.as_tensor(found[places]), dim), wanted[values], 0)
            assert all(len(row) == len(set(row.tolist())) for row in torch.as_tensor(found[places]).movedim(dim, -1))
        first = torch.isnan(x).to(torch.int8).argmax(dim, keepdim=True)
        is_none = torch.isnan(x).any(dim, keepdim=True)
        assert torch.equal(torch.as_tensor(found[5])[is_none], first[is_none])


def test_the_middle_of_any_rows() -> None:
    x, rows = drawn((6, 33), "float32", share=40), torch.export.Dim("rows")

    def middle(x: Any) -> Any:
        return x.median(0).values, x.median(-1).values

    program = torch.export.export(Called(middle), (x,), dynamic_shapes=(({0: rows},),))
    exe = axe.compile(from_exported_program(program, custom_convert_map=torch_converters()), work_dir=None)
    for count in (1, 6, 50):
        x = drawn((count, 33), "float32", count, share=40)
        same(exe(x), middle(x), 0)


def places(x: Any) -> Any:
    """The first place of what is largest, or least, of which NaN is both."""
    whole = (x.argmax(), x.argmin(), x.argmax(0, keepdim=True), x.argmin(0))
    return (*whole, x.argmax(-1), x.argmin(-1, keepdim=True), *x.max(-1), *x.min(0), *x.max(-1, keepdim=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(4, 1), (5, 7), (5, 64), (5, 1003), (37, 40)])
def test_places(dtype: str, shape: tuple[int, int]) -> None:
    x = drawn(shape, dtype, share=3)
    x[-1] = drawn(shape[-1:], dtype, 1).nan_to_num(1.0)  # some infinities are the largest number of the type then
    x[-2], x[-3] = -torch.inf, torch.inf
    x[0, : shape[1] // 2] = x[1, : shape[1] // 2] = torch.inf  # in front of any NaN
    check(places, x)
    check(places, x.nan_to_num(0.5))
    check(places, (3 * x.nan_to_num(0.5, 2, -2)).round())  # many are equal


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_places_of_whole_numbers(dtype: str) -> None:
    kind, generator = getattr(torch, dtype), torch.Generator().manual_seed(0)
    x = torch.randint(0 if dtype == "uint8" else -9, 9, (5, 203), generator=generator).to(kind)
    x[0], x[1], x[2, 3] = torch.iinfo(kind).min, torch.iinfo(kind).max, torch.iinfo(kind).max
    exe = axe.compile(imported(places, x), work_dir=None)
    for one, other in zip(exe(x), places(x), strict=True):
        np.testing.assert_array_equal(np.asarray(one), other.numpy())


def test_places_of_any_rows() -> None:
    x = drawn((6, 33), "float32", share=7)
    rows = torch.export.Dim("rows")
    program = torch.export.export(Called(places), (x,), dynamic_shapes=(({0: rows},),))
    exe = axe.compile(from_exported_program(program, custom_convert_map=torch_converters()), work_dir=None)
    for count in (1, 6, 50):
        x = drawn((count, 33), "float32", count, share=7)
        same(exe(x), places(x), 0)


class Shared(nn.Module):
    """Products behind which elements are bounded, and maxima of what devices share."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Any) -> Any:
        y = self.down(F.relu(self.up(x)))
        found = self.up(x)
        placed = (found.argmax(-1), found.argmin(0), y.argmax(-1))
        few = (y.median(-1).values, found.topk(3, -1).values, torch.floor(y) % torch.inf, 0.0 / y, y * 0.0 + 0.0)
        return y.clamp(-1, 1), y.amax(-1), y.amax(0), found.amax(-1), found.amin(), torch.softmax(y, -1), *placed, *few


@torch.no_grad()
def test_on_a_mesh(workers: Any) -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(16, 32)
    x[5, 7], x[9] = torch.nan, torch.inf
    program = from_exported_program(torch.export.export(model, (x,)), custom_convert_map=torch_converters())
    exe = axe.compile(program, mesh={"tp": 2}, work_dir=None)
    same(exe.run(workers(2), x), model(x), 1e-5)


def moved(x: Any) -> Any:
    """Few elements of many, which the threads of a block find together, and many of few."""
    return (*places(x), x.amax(-1), x.amin(0), x.amax(), F.relu(x).amax(-1))


def test_places_are_found_by_threads() -> None:
    """By those of a block, whatever the type; no thread goes through a row of a vocabulary."""
    for x in torch.zeros(8, 5000), torch.zeros(8, 5000, dtype=torch.int32):
        mod = imported(lambda x: (x.argmax(-1), x.argmin(-1)), x)
        work = run(Work(mod, resolve_target("cuda:sm_90a"), work_dir=None), model_passes()[:-1])
        for _, func in with_threads(work.module).functions_items():
            if isinstance(func, tirx.PrimFunc):
                assert func.script().count('T.thread_binding(T.int64(8), thread="blockIdx.x")') == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 7), (8, 5003), (3000, 40)])
def test_on_a_gpu(dtype: str, shape: tuple[int, int], cuda: Any) -> None:
    x = drawn(shape, dtype, share=max(3, shape[1] // 4))
    exe = axe.compile(imported(moved, x), target="cuda", work_dir=None)
    same(exe(x), moved(x), CLOSE[dtype])
