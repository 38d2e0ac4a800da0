"""What a convolution of images is: which pixels a window of the kernel covers, boxes of its results, what is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvm_axe import tile
from tvm_axe.errors import TileError

_TYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Windows:
    """A convolution's extents and how its windows step.

    Attributes
    ----------
    batch, height, width, channels : int
        The images' extents.
    out_channels, kernel_height, kernel_width : int
        Those of the weights.
    dtype : str
        The type of images, weights and results.
    strides, padding, dilation : sequence of int
        Along the height and the width: how far windows are apart, how many zeros stand on each side of an image, how
        far the pixels of a window are apart.
    groups : int
        Into how many groups the channels fall, each of which has its own part of the results' channels.

    Raises
    ------
    TileError
        It is none.
    """

    batch: int
    height: int
    width: int
    channels: int
    out_channels: int
    kernel_height: int
    kernel_width: int
    dtype: str
    strides: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    dilation: Sequence[int] = (1, 1)
    groups: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in _TYPES:
            raise TileError(f"conv2d: dtype is one of {', '.join(_TYPES)}, got {self.dtype!r}")
        for name in ("batch", "height", "width", "channels", "out_channels", "kernel_height", "kernel_width"):
            if not _whole(getattr(self, name), 1):
                raise TileError(f"conv2d: {name}={getattr(self, name)!r}; valid is a number from 1 on")
        for name, least in (("strides", 1), ("padding", 0), ("dilation", 1)):
            pair = getattr(self, name)
            if not isinstance(pair, Sequence) or len(pair) != 2 or not all(_whole(each, least) for each in pair):
                raise TileError(f"conv2d: {name}={pair!r}; valid is a pair of numbers from {least} on")
        if not _whole(self.groups, 1) or self.channels % self.groups or self.out_channels % self.groups:
            raise TileError(
                f"conv2d: groups divides channels and out_channels, got {self.groups} of {self.channels} and "
                f"{self.out_channels}"
            )
        if self.out_height < 1 or self.out_width < 1:
            raise TileError(
                f"conv2d: images of {self.height} x {self.width} pixels with padding={tuple(self.padding)} for windows "
                f"of {self.span[0]} x {self.span[1]}; valid are images as large as a window with their padding"
            )

    @cached_property
    def span(self) -> tuple[int, int]:
        """The extents of a window in pixels."""
        return (
            (self.kernel_height - 1) * self.dilation[0] + 1,
            (self.kernel_width - 1) * self.dilation[1] + 1,
        )

    @property
    def out_height(self) -> int:
        """How many windows there are along the height."""
        return (self.height + 2 * self.padding[0] - self.span[0]) // self.strides[0] + 1

    @property
    def out_width(self) -> int:
        """How many there are along the width."""
        return (self.width + 2 * self.padding[1] - self.span[1]) // self.strides[1] + 1

    @property
    def pixels(self) -> int:
        """How many windows there are in all images: the rows of the product."""
        return self.batch * self.out_height * self.out_width

    @property
    def depth(self) -> int:
        """The channels of a group, of which each pixel of a window has so many terms."""
        return self.channels // self.groups

    @property
    def columns(self) -> int:
        """The results' channels of a group."""
        return self.out_channels // self.groups

    @property
    def terms(self) -> int:
        """The terms of a sum."""
        return self.kernel_height * self.kernel_width * self.depth

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Those of the images, the weights and the results."""
        return (
            (self.batch, self.height, self.width, self.channels),
            (self.out_channels, self.kernel_height, self.kernel_width, self.depth),
            (self.batch, self.out_height, self.out_width, self.out_channels),
        )

    def inside(self, y: Any, x: Any) -> list[Any]:
        """What holds where the pixel under a window is one of the image, and no padding."""
        found = []
        for at, size, axis, windows in ((y, self.height, 0, self.out_height), (x, self.width, 1, self.out_width)):
            found += [at >= 0] if self.padding[axis] else []
            last = (windows - 1) * self.strides[axis] + self.span[axis] - 1 - self.padding[axis]
            found += [at < size] if last >= size else []
        return found

    def is_pixel(self, image: Any, y: Any, x: Any) -> list[Any]:
        """What holds where the images have a pixel, which may be in front of them or behind."""
        return [image < self.batch, y >= 0, y < self.height, x >= 0, x < self.width]

    def is_result(self, image: Any, y: Any, x: Any) -> list[Any]:
        """What holds where the results have one, which may be behind them."""
        return [image < self.batch, y < self.out_height, x < self.out_width]


@dataclass(frozen=True)
class Boxes:
    """The boxes of a convolution: `rows` x `columns` pixels of the results of each of `images` images."""

    windows: Windows
    rows: int
    columns: int
    images: int

    @property
    def count(self) -> int:
        """How many boxes there are."""
        return tile.cdiv(self.windows.batch, self.images) * math.prod(self._along)

    @property
    def _along(self) -> tuple[int, int]:
        return tile.cdiv(self.windows.out_height, self.rows), tile.cdiv(self.windows.out_width, self.columns)

    def corner(self, box: Any) -> tuple[Any, Any, Any]:
        """The image, the row and the column with which a box begins."""
        down, right = self._along
        return box // (down * right) * self.images, box // right % down * self.rows, box % right * self.columns


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
