"""Windows of pictures of any sides, padded, rolled and merged, as Swin has them: right, on a mesh too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from test_dynamic_sequences import imported
from test_products_of_sizes import compared

import tvm_axe as axe

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")
nn, F = torch.nn, torch.nn.functional
WIDTH, HEADS, SIDE = 32, 2, 4
SIZES = ((5, 7), (8, 8), (12, 3), (6, 17))


class Attended(nn.Module):
    """Attention within each window of some, with a bias by places, and by a mask of windows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(HEADS, SIDE * SIDE, SIDE * SIDE))

    def forward(self, x: Any, mask: Any = None) -> Any:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) * (c // HEADS) ** -0.5 + self.bias
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(-1, windows, HEADS, n, n) + mask[:, None]
            scores = scores.view(-1, HEADS, n, n)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


def in_windows(x: Any) -> Any:
    b, h, w, c = x.shape
    x = x.view(b, h // SIDE, SIDE, w // SIDE, SIDE, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, SIDE * SIDE, c)


class Block(nn.Module):
    """A block of Swin: windows of a picture that is padded, shifted or not, and a product of each pixel."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm, self.attended, self.inner = nn.LayerNorm(width), Attended(width), nn.Linear(width, width)

    def apart(self, high: Any, wide: Any) -> Any:
        """What is added to scores of pixels that were no neighbours before the picture was rolled."""

        def regions(extent: Any) -> Any:
            at = torch.arange(extent)
            return (at >= extent - SIDE).long() + (at >= extent - self.shift).long()

        region = regions(high)[:, None] * 3 + regions(wide)
        rows = in_windows(region[None, :, :, None].float())[..., 0]
        return (rows[:, None] != rows[:, :, None]).float() * -100.0

    def forward(self, x: Any) -> Any:
        b, h, w, c = x.shape
        y = F.pad(self.norm(x), (0, 0, 0, (SIDE - w % SIDE) % SIDE, 0, (SIDE - h % SIDE) % SIDE))
        high, wide = y.shape[1:3]
        y = torch.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y
        rows = self.attended(in_windows(y), self.apart(high, wide) if self.shift else None)
        y = rows.view(b, high // SIDE, wide // SIDE, SIDE, SIDE, c).permute(0, 1, 3, 2, 4, 5).reshape(b, high, wide, c)
        y = torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y
        x = x + y[:, :h, :w]
        return x + self.inner(x)


class Merging(nn.Module):
    """Four pixels to one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        return self.inner(self.norm(torch.cat([x[:, i::2, j::2] for j in range(2) for i in range(2)], -1)))


class FourASide(nn.Module):
    """Four windows a side, of as many pixels as the picture has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        b, h, w, c = x.shape
        high, wide = (h + 3) // 4, (w + 3) // 4
        y = F.pad(x, (0, 0, 0, 4 * wide - w, 0, 4 * high - h))
        rows = y.view(b, 4, high, 4, wide, c).permute(0, 1, 3, 2, 4, 5).reshape(b * 16, -1, c)
        rows = torch.softmax(self.inner(rows) @ rows.transpose(1, 2), -1) @ rows
        y = rows.view(b, 4, 4, high, wide, c).permute(0, 1, 3, 2, 4, 5).reshape(b, 4 * high, 4 * wide, c)
        return x + y[:, :h, :w]


MODELS: dict[str, Any] = {
    "padded": lambda: Block(WIDTH, 0),
    "shifted": lambda: Block(WIDTH, SIDE // 2),
    "merged": Merging,
    "four a side": FourASide,
}


@functools.cache
def picture_of(name: str, known: tuple[int, int] | None = None) -> tuple[Any, Any]:
    """A model of pictures with any sides, or those that are known, imported."""
    torch.manual_seed(0)
    model, auto = MODELS[name]().eval(), torch.export.Dim.AUTO
    shapes = None if known else ({1: auto, 2: auto},)
    return model, imported(model, (torch.randn(2, *(known or (6, 10)), WIDTH),), shapes)


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_windows(workers: Any, name: str, devices: int) -> None:
    model, made = picture_of(name)
    exe = axe.compile(made, mesh=axe.Mesh({"tp": devices}) if devices > 1 else None, work_dir=None)
    given = [workers(devices)] if devices > 1 else []
    for size in SIZES:
        inputs = (torch.randn(2, *size, WIDTH),)
        compared(lambda *arrays: (exe.run if given else exe)(*given, *arrays), model, inputs)


@pytest.mark.parametrize("known", [(8, 12), (6, 9)])
def test_windows_of_known_sides(workers: Any, known: tuple[int, int]) -> None:
    model, made = picture_of("shifted", known)
    exe = axe.compile(made, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    compared(lambda *arrays: exe.run(workers(2), *arrays), model, (torch.randn(2, *known, WIDTH),))
