"""A step: a statement of a tile program as a function of whole tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import tirx

from tvm_axe.stream.tiled.boxes import Box
from tvm_axe.tile.nodes import Node
from tvm_axe.tile.regions import Tile as TileBuffer

Arrays: TypeAlias = "Mapping[TileBuffer, np.ndarray]"
Values: TypeAlias = "Mapping[tirx.Var, Any]"
Made: TypeAlias = "dict[TileBuffer | None, np.ndarray]"
"""What a step makes of each tile that it writes, and under None what it stores in a tensor."""
Call: TypeAlias = "Callable[[Arrays, Sequence[np.ndarray], Values], Made]"

SETTLED = "what streams go where is settled before: pass the tensors that say so in `given`"


@dataclass(frozen=True, eq=False)
class Step:
    """A statement, or a part of one.

    Attributes
    ----------
    node : Node
        The statement.
    word : str
        What it does, for the names of units.
    reads, writes : tuple[Tile, ...]
        The tiles on chip that it needs the contents of, and those that it makes new contents of.
    call : Callable
        A function from the contents of tiles by tile, those of `boxes`, and the values of `variables` to what it makes.
    flops : int
        FLOPs of one call.
    boxes : tuple[Box, ...]
        What it loads of tensors.
    store : Box, optional
        What it stores to a tensor.
    variables : tuple[Var, ...]
        The variables of loops that it computes with.
    plain : str, optional
        ``"load"`` if the one tile that it writes is its box as it lies there, ``"name"`` if it is the tile that it
        reads, ``"store"`` if all elements of the one are stored in their order: nothing is computed.
    """

    node: Node
    word: str
    reads: tuple[TileBuffer, ...]
    writes: tuple[TileBuffer, ...]
    call: Call
    flops: int = 0
    boxes: tuple[Box, ...] = ()
    store: Box | None = None
    variables: tuple[tirx.Var, ...] = ()
    plain: str | None = None
