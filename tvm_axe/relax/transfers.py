"""Moves along one mesh axis, as operators of which what they move may be shared along another.

A device's part of a model that is shared along an axis is a model again: functions on what the device has, and moves
between it and its peers along the axis. What is moved may be shared along the next axis: whole where the move deals out
indices in a way of its own, in the same way before and after in the other dimensions. An all-gather puts the peers'
indices one behind the other, so that a share of what each has becomes as many blocks of shares.

>>> rows = Form(0, Share.blocks(8, 2))
>>> gathered = Carrying(Transfer("dp", rows, WHOLE, (8, 4), (8, 4), 4, 2), Link(1e-6, 1e9))
>>> for way in gathered.strategies(frozenset({(0, Form(0, Share.blocks(4, 2))), (1, Form(1, Share.blocks(4, 2)))})):
...     print(way.ins[0], "->", way.outs[0])
R -> R
S0[2@0 2@1] -> S0[2(2@0 2@1)]
S1[2@0 2@1] -> S1[2@0 2@1]
P[sum] -> P[sum]
"""

from __future__ import annotations

from typing import NamedTuple

from tvm_axe.layout import Link
from tvm_axe.layout.shares import Share
from tvm_axe.relax.forms import EXCHANGE, WHOLE, Form, Move, move
from tvm_axe.relax.sizes import Shape
from tvm_axe.relax.ways import Strategy

__all__ = ["Carrying", "Transfer"]


class Transfer(NamedTuple):
    """A move of a value between the devices along a mesh axis.

    Attributes
    ----------
    axis : str
        The axis.
    source, target : Form
        The value's forms along it.
    shape : Shape
        The shape of the value that is whole along it.
    typical : tuple[int, ...]
        What it is taken to be where costs are compared.
    itemsize : int
        Bytes of an element.
    devices : int
        How many the axis has.
    """

    axis: str
    source: Form
    target: Form
    shape: Shape
    typical: tuple[int, ...]
    itemsize: int
    devices: int

    def how(self, link: Link) -> Move:
        """The kind of the move, and what it takes."""
        found = move(self.source, self.target, self.typical, self.itemsize, self.devices, link)
        assert found is not None  # it was chosen
        return found

    def within(self, before: Form, after: Form) -> Transfer:
        """The same move of what a device has of the value, in forms along an inner axis."""
        if before.share is None or before.dim is None or after.share is None:
            return self
        dim = before.dim
        gathered, scattered = dim == self.source.dim, dim == self.target.dim
        form = after if gathered else before
        shape, typical = form.local(self.shape), form.local(self.typical)
        # What is moved here and shared there has constant extents.
        blocks = Form(dim, Share.blocks(typical[dim], self.devices))
        source, target = blocks if gathered else self.source, blocks if scattered else self.target
        return self._replace(source=source, target=target, shape=shape, typical=typical)


class Carrying:
    """The ways to make a transfer on the devices of another axis; an operator as `tvm_axe.relax.strategies` has them.

    Parameters
    ----------
    transfer : Transfer
        The move.
    link : Link
        Between two of the devices.
    """

    operations: tuple[int, ...] = (0,)

    def __init__(self, transfer: Transfer, link: Link) -> None:
        self.transfer, self.link = transfer, link

    def strategies(self, seeds: frozenset[tuple[int, Form]]) -> list[Strategy]:
        """The ways to make it, of forms that neighbours give (0) or want (1)."""
        found = {(WHOLE, WHOLE): None}
        for at, form in sorted(seeds, key=str):
            other = self._other(at, form)
            if other is not None:
                found[(form, other) if at == 0 else (other, form)] = None
        if self.transfer.source.partial in ("", "sum"):  # a sum of sums may be finished in any order
            terms = Form(partial="sum")
            found[terms, terms] = None
        return [Strategy((a,), (b,), self.transfer.within(a, b).how(self.link).seconds) for a, b in found]

    def _other(self, at: int, form: Form) -> Form | None:
        """The form on the other side of one that is before (0) or after (1) the move."""
        if form.share is None or form.dim is None:
            return None
        here, there = (self.transfer.source, self.transfer.target)[:: 1 if at == 0 else -1]
        share: Share | None = form.share
        if form.dim in (here.dim, there.dim):
            cut = here if form.dim == here.dim else there
            in_blocks = cut.share is not None and cut.share.is_even
            if here.dim == there.dim or not in_blocks or self.transfer.how(self.link).kind == EXCHANGE:
                return None
            blocks = cut.share
            assert blocks is not None  # it is even
            share = form.share.around(blocks.devices, 1) if cut is here else _one_of(form.share, blocks)
        return None if share is None or share.is_whole else Form(form.dim, share)


def _one_of(share: Share, blocks: Share) -> Share | None:
    """The share of each of some blocks that `share` repeats."""
    one = share.part(0, blocks.local)
    return one if one is not None and one.runs and one.around(blocks.devices, 1) == share else None
