"""Models that flatten two unknown sizes to one, as of pictures of any sides: right beside float64, on a mesh too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_dynamic_sequences import imported, one
from torch_modules import Called

import tvm_axe as axe

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")
nn, F = torch.nn, torch.nn.functional
WIDTH, MOST = 8, 4096
SIDES = ((5, 7), (2, 9), (12, 3), (16, 16))


class Attended(nn.Module):
    """Attention over the pixels of a picture that a convolution made, and back to a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        picture = self.into(x)
        tokens = picture.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(tokens)).chunk(3, -1)
        tokens = tokens + self.out(torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, -1) @ v)
        return tokens.transpose(1, 2).reshape(picture.shape) + picture


class Windows(nn.Module):
    """A product of the rows of each window of a picture that is padded to whole windows, which are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        b, h, w, c = x.shape
        y = F.pad(x, (0, 0, 0, (-w) % 4, 0, (-h) % 4))
        high, wide = y.shape[1:3]
        rows = y.view(b, high // 4, 4, wide // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        rows = rows + self.inner(rows)
        y = rows.view(b, high // 4, wide // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, high, wide, c)
        return x + y[:, :h, :w]


def compared(run: Any, module: Any, inputs: tuple[Any, ...], atol: float = 1e-5) -> None:
    with torch.no_grad():
        want = module.double()(*(each.double() for each in inputs)).numpy()
    module.float()
    found = one(run(*(each.numpy() for each in inputs)))
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, atol=atol * max(1.0, np.abs(want).max(initial=0)))


def picture_of(model: Any, least: int = 1) -> tuple[Any, Any]:
    """A model of pictures with sides from `least` on, imported."""
    torch.manual_seed(0)
    h, w = (torch.export.Dim(name, min=least, max=MOST) for name in "hw")
    shapes: Any = {2: h, 3: w}
    return model, imported(model, (torch.randn(2, 3, 16, 20),), ((shapes,) if type(model) is Called else shapes,))


@pytest.mark.parametrize("devices", [1, 2])
def test_attention_over_pixels(workers: Any, devices: int) -> None:
    """The bounds of the sides are such that memory for them isn't to be had: scores of 4096**4 pixels."""
    model, made = picture_of(Attended().eval())
    exe = axe.compile(made, mesh=axe.Mesh({"tp": devices}) if devices > 1 else None, work_dir=None)
    given = [workers(devices)] if devices > 1 else []
    for size in ((1, 1), (1, 9), *SIDES):
        compared(lambda *arrays: (exe.run if given else exe)(*given, *arrays), model, (torch.randn(2, 3, *size),))


@pytest.mark.parametrize("devices", [1, 2])
def test_windows_of_a_padded_picture(workers: Any, devices: int) -> None:
    model = Windows().eval()
    auto = torch.export.Dim.AUTO
    made = imported(model, (torch.randn(2, 6, 10, 3),), ({0: auto, 1: auto, 2: auto},))
    exe = axe.compile(made, mesh=axe.Mesh({"tp": devices}) if devices > 1 else None, work_dir=None)
    given = [workers(devices)] if devices > 1 else []
    for size in SIDES:
        compared(lambda *arrays: (exe.run if given else exe)(*given, *arrays), model, (torch.randn(3, *size, 3),))


COMPUTED = {
    "padded to whole windows": lambda x: F.pad(x, (0, (-x.shape[3]) % 4, 0, (-x.shape[2]) % 4)),
    "padded to a square": lambda x: F.pad(
        x, (0, max(x.shape[2:]) - x.shape[3], 0, max(x.shape[2:]) - x.shape[2]), value=2.0
    ),
    "padded behind rows": lambda x: F.pad(x.flatten(2), (x.shape[2], x.shape[3])),
    "neighbourhoods": lambda x: F.unfold(x, 3, padding=1),
    "a Gram matrix": lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2) / (x.shape[2] * x.shape[3]),
    "less than a size": lambda x: (x.shape[2] - x * x.shape[3]) % x.shape[2],
    "scaled by a power": lambda x: x * (x.shape[2] * x.shape[3]) ** -0.5,
    "coordinates": lambda x: (torch.arange(x.shape[2]) + 0.5)[:, None] / x.shape[2] * x,
}


@pytest.mark.parametrize("form", COMPUTED)
def test_what_is_computed_with_sizes(form: str) -> None:
    model, made = picture_of(Called(COMPUTED[form]), least=2)
    exe = axe.compile(made, work_dir=None)
    for size in SIDES:
        compared(exe, model, (torch.randn(2, 3, *size),))


def test_windows_of_sides_that_are_multiples() -> None:
    """A function has extents that are made of others: rows of windows, and of pictures."""

    def turned(x: Any) -> Any:
        y = x.unflatten(1, (-1, 4)).unflatten(3, (-1, 4)).transpose(2, 3)
        return torch.relu(y.flatten(0, 2).flatten(1, 2)).sum(1)

    h, w = (torch.export.Dim(name, min=1, max=16) for name in "hw")
    made = imported(Called(turned), (torch.randn(2, 8, 12, 3),), (({1: 4 * h, 2: 4 * w},),))
    exe = axe.compile(made, work_dir=None)
    for size in ((4, 4), (8, 20)):
        compared(exe, Called(turned), (torch.randn(2, *size, 3),))


def test_four_sizes_on_a_mesh(workers: Any) -> None:
    """Every pixel of a picture with every one of another: of typical sizes more elements than 32 bits count."""

    def matched(x: Any, y: Any) -> Any:
        return torch.einsum("bcn,bcm->bnm", x.flatten(2), y.flatten(2)).view(1, *x.shape[2:], *y.shape[2:])

    auto = torch.export.Dim.AUTO
    each = {2: auto, 3: auto}
    made = imported(Called(matched), (torch.randn(1, 8, 6, 5), torch.randn(1, 8, 7, 9)), ((each, each),))
    exe = axe.compile(made, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    for one_size, other in (((5, 7), (3, 2)), ((2, 3), (9, 4))):
        inputs = torch.randn(1, 8, *one_size), torch.randn(1, 8, *other)
        compared(lambda *arrays: exe.run(workers(2), *arrays), Called(matched), inputs)


def test_padding_by_what_is_mirrored() -> None:
    mirrored = Called(lambda x: F.pad(x, (0, x.shape[2] // 2), mode="reflect"))
    exe = axe.compile(imported(mirrored, (torch.randn(2, 3, 20),), (({2: torch.export.Dim.AUTO},),)), work_dir=None)
    for size in (5, 20, 31):
        compared(exe, mirrored, (torch.randn(2, 3, size),))
