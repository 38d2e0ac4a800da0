"""What every node of a tile program has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_axe.tile.regions import Region, Tile

if TYPE_CHECKING:
    from tvm_axe.tile.nodes import Node


class Statement:
    """What every node has; each derived class has `reads`, `writes`, and what it has of the rest.

    Invariants: `reads` and `writes` are all tiles and tensors whose elements the node loads and stores (those of its
    scalars are no part of `reads`, but for names and local tiles, which are made of nothing else); a node with `bodies`
    touches by itself its scalars only, and its `reads` and `writes` are the union of those of the nodes in them. Nodes
    are compared by identity: one node stands in one place of a program.
    """

    @property
    def regions(self) -> tuple[Region, ...]:
        """The regions that it moves or computes on, those that it writes first."""
        return ()

    @property
    def operands(self) -> tuple[Any, ...]:
        """Its expressions beside the starts of its regions that all threads of a block compute alike."""
        return ()

    @property
    def joins(self) -> tuple[tuple[Tile, str], ...]:
        """The tensors of `writes` whose elements it joins with values atomically, and how: add, max or min."""
        return ()

    @property
    def bodies(self) -> tuple[tuple[Node, ...], ...]:
        """The lists of nodes in it: one of a loop, two of a branch, none of what is no control flow."""
        return ()

    @property
    def starts(self) -> tuple[Any, ...]:
        """Where its regions start."""
        return tuple(start for region in self.regions for start in region.start)

    @property
    def scalars(self) -> tuple[Any, ...]:
        """All expressions that every thread of a block computes alike."""
        return (*self.starts, *self.operands)
