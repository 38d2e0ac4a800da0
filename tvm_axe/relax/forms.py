"""Forms of a model's values along a mesh axis, and what it takes to make one of another.

>>> from tvm_axe.layout import Link
>>> from tvm_axe.layout.shares import Share
>>> rows, link = Form(0, Share.blocks(8, 2)), Link(latency=1e-6, bandwidth=1e9)
>>> print(rows, "->", WHOLE, ":", move(rows, WHOLE, (8, 4), 4, 2, link).kind)
S0[4@0 4@1] -> R : all_gather
>>> move(Form(partial="sum"), rows, (8, 4), 4, 2, link).bytes
64

On a mesh of several axes a value has a form along each, outer axes first: what it is along an axis is said of what the
outer ones have left of it.

>>> columns = Form(1, Share.blocks(4, 2))
>>> for piece in spots((("dp", rows), ("tp", columns)), (8, 4), {"dp": 1, "tp": 0}):
...     print(*piece)
(slice(4, 8, None), slice(0, 2, None)) (slice(0, 4, None), slice(0, 2, None))
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tvm_axe.layout import Link
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.shares import Share, spans_of
from tvm_axe.lower.told import part_of
from tvm_axe.relax.sizes import Extent, Shape

__all__ = [
    "EXCHANGE",
    "SLICE",
    "WHOLE",
    "Form",
    "Forms",
    "Move",
    "are_whole",
    "blocks",
    "form_of",
    "local_shape",
    "move",
    "spots",
]

E = TypeVar("E")

SLICE, EXCHANGE = "slice", "exchange"
"""What isn't a collective: a device takes a part of its own, or what it lacks out of its peers' slabs."""


@dataclass(frozen=True)
class Form:
    """How a value lies along a mesh axis: one dimension is shared, or none; or devices hold terms of it.

    Attributes
    ----------
    dim : int or None
        The dimension that is shared.
    share : Share or None
        How.
    partial : str
        What the devices' values are to be combined with; empty if they are values.
    """

    dim: int | None = None
    share: Share | None = None
    partial: str = ""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.dim, self.share, self.partial)))

    def __hash__(self) -> int:
        return self._hash  # the search asks for it millions of times

    @property
    def cut(self) -> tuple[int, Share] | None:
        """The dimension that is shared and how, as `tvm_axe.lower.taking` asks for it; None where none is."""
        return None if self.share is None or self.dim is None else (self.dim, self.share)

    def local(self, shape: Sequence[E]) -> tuple[E | int, ...]:
        """The shape of what a device holds. What isn't shared needn't be a number."""
        return tuple(_part(self.share, n) if at == self.dim and self.share else n for at, n in enumerate(shape))

    def fraction(self) -> float:
        """How much of the value a device holds."""
        return 1.0 if self.share is None else self.share.local / self.share.extent

    def __str__(self) -> str:
        return f"P[{self.partial}]" if self.partial else "R" if self.share is None else f"S{self.dim}[{self.share}]"


def _part(share: Share, extent: object) -> Any:
    """How many indices a device has of a dimension of an extent, which is of the extent's kind if calls decide it."""
    if not share.is_symbolic:
        return share.local
    if isinstance(extent, int):
        return share.at(extent).local
    return extent.part(share.devices) if isinstance(extent, Extent) else part_of(extent, share.devices)


WHOLE = Form()
Forms = tuple[tuple[str, Form], ...]
"""The form of a value along each of some mesh axes, outer ones first."""


def are_whole(forms: Forms) -> bool:
    """Whether every device holds all of a value."""
    return all(form == WHOLE for _, form in forms)


def local_shape(forms: Forms, shape: Sequence[E]) -> tuple[E | int, ...]:
    """The shape of what a device holds of a value in a form along each axis."""
    found: tuple[E | int, ...] = tuple(shape)
    for _, form in forms:
        found = form.local(found)
    return found


def spots(
    forms: Forms, shape: Sequence[int], coords: Mapping[str, int]
) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield the pieces of a whole value that the device at `coords` holds: where in it, and where in the slab.

    Parameters
    ----------
    forms : Forms
        How the value lies; terms of a sum aren't pieces.
    shape : Sequence[int]
        The value's.
    coords : Mapping[str, int]
        The device's coordinate on each axis.
    """
    held = [np.arange(extent) for extent in shape]
    for axis, form in forms:
        if form.share is not None and form.dim is not None:
            held[form.dim] = held[form.dim][form.share.at(len(held[form.dim])).indices(coords[axis])]
    pairs = []
    for at in held:
        begin, found = 0, []
        for span in spans_of(at):
            found.append((span, slice(begin, begin + span.stop - span.start)))
            begin += span.stop - span.start
        pairs.append(found)
    for piece in itertools.product(*pairs):
        yield tuple(whole for whole, _ in piece), tuple(local for _, local in piece)


def form_of(shares: Sequence[Share]) -> Form | None:
    """The form of these shares of the dimensions; None where more than one is shared."""
    cut = [(dim, share) for dim, share in enumerate(shares) if not share.is_whole]
    return None if len(cut) > 1 else Form(*cut[0]) if cut else WHOLE


def blocks(shape: Shape, typical: Sequence[int], dim: int | None, devices: int) -> Form:
    """The form of a value of which a dimension is shared in blocks, or none; what its shape typically is."""
    if dim is None:
        return WHOLE
    of = Share.blocks if isinstance(shape[dim], int) else Share.of_any
    share = of(typical[dim], devices)
    return WHOLE if share.is_whole else Form(dim, share)


class Move(NamedTuple):
    """How one form is made of another: by a collective, ``slice`` or ``exchange``; empty if nothing is to be done."""

    kind: str
    bytes: int
    seconds: float


@functools.lru_cache(maxsize=1 << 16)
def move(
    source: Form,
    target: Form,
    shape: tuple[int, ...],
    itemsize: int,
    devices: int,
    link: Link,
) -> Move | None:
    """What makes `target` of `source`, the bytes that the busiest device receives, and the time; None if nothing does.

    Parameters
    ----------
    source, target : Form
        The forms.
    shape : tuple[int, ...]
        The value's shape.
    itemsize : int
        Bytes of an element.
    devices : int
        How many the axis has.
    link : Link
        Between two of them.
    """
    size = math.prod(shape) * itemsize
    if source == target:
        return Move("", 0, 0.0)
    if target.partial:
        return None
    local = round(size * target.fraction())
    if source.partial:
        if source.partial == "sum" and target == WHOLE:
            return _moved(Collective.ALL_REDUCE.operation, 2 * -(-size * (devices - 1) // devices), link, 2)
        if source.partial == "sum" and target.share is not None and target.share.is_even:
            return _moved(Collective.REDUCE_SCATTER.operation, local * (devices - 1), link, 1)
        return _moved(EXCHANGE, local * (devices - 1), link, 1)
    if source == WHOLE:
        return Move(SLICE, 0, link.latency / 16)
    assert source.share is not None  # it is neither whole nor partial
    if target == WHOLE:
        kind = Collective.ALL_GATHER.operation if source.share.is_even else EXCHANGE
        return _moved(kind, size - round(size * source.fraction()), link, 1)
    assert target.share is not None
    if source.dim == target.dim:
        missing = max(_missing(source.share, target.share))
        if not missing:
            return Move(SLICE, 0, link.latency / 16)
        return _moved(EXCHANGE, missing * size // source.share.extent, link, 1)
    both = source.share.is_even and target.share.is_even
    kind = Collective.ALL_TO_ALL.operation if both else EXCHANGE
    return _moved(kind, round(local * (1 - source.fraction())), link, 1)


def _moved(kind: str, size: int, link: Link, waits: int) -> Move:
    return Move(kind, size, waits * link.latency + size / link.bandwidth)


@functools.lru_cache(maxsize=1 << 14)
def _missing(have: Share, need: Share) -> tuple[int, ...]:
    """How many indices each device lacks."""
    pairs = [(have.indices(device), need.indices(device)) for device in range(have.devices)]
    return tuple(int(np.setdiff1d(needed, held, assume_unique=True).size) for held, needed in pairs)
