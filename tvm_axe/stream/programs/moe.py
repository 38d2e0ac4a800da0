"""A mixture of experts as a streaming program: static or dynamic tiles, a region an expert or regions that are shared.

Each token goes to some of the experts; an expert packs the tokens that it gets into tiles, computes its SwiGLU on each,
one tile of weights after the other, and sends the tokens back to be weighed and added up.

>>> layer = MoE(experts=4, chosen=2, width=8, hidden=16)
>>> program = moe_layer(layer, batch=6, tile=None, columns=4)
>>> [tensor.name for tensor in program.tensors.values()]
['x', 'y', 'scale', 'w_gate', 'w_up', 'w_down']

Source: Streaming Tensor Programs (arXiv 2511.07776), figures 7 and 11, sections 5.2 and 5.3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy bfloat16)
import numpy as np
from numpy.typing import NDArray

from tvm_axe.errors import StreamError
from tvm_axe.stream import functions
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.program import Stream, StreamProgram, Tensor
from tvm_axe.stream.programs.outcome import Outcome
from tvm_axe.stream.programs.workloads import MoE
from tvm_axe.stream.types import DataType, Scalar, Selector, StreamType, Tile, symbol
from tvm_axe.stream.views import View

__all__ = ["MoECase", "cut_rows", "mix", "moe_inputs", "moe_layer"]

ITEM_BYTES, STATE_BYTES = 2, 4
"""Bytes of an element of what is loaded, and of what units make, in the published accounting of memory and traffic.

The published cycles are those of 2 bytes for all of them."""

REAL_ROWS = functions.number("real_rows", lambda found, padded: found + 1 - padded, initial=0, cycles=0)


def moe_layer(
    moe: MoE, batch: int, tile: int | None, columns: int, regions: int | None = None, dtype: str = "float32"
) -> StreamProgram:
    """Return the program of a layer.

    Tensors: ``x`` [batch, width], ``scale`` [batch, chosen], ``w_gate`` and ``w_up`` [experts * width, hidden],
    ``w_down`` [experts * hidden, width]; the result is ``y`` [batch, width]. Inputs: see `moe_inputs`.

    Parameters
    ----------
    moe : MoE
        The sizes of the layer.
    batch : int
        The number of tokens.
    tile : int or None
        Rows of the tiles that tokens are packed into, the last one filled up; None for tiles of all an expert has.
    columns : int
        Columns of the hidden dim that a tile of weights has.
    regions : int, optional
        How many regions the experts share, as many each (configuration time-multiplexing); one an expert by default.
    dtype : str
        The type of all the elements.

    Raises
    ------
    StreamError
        If the columns don't divide the hidden dim, or the regions the experts.
    """
    p = StreamProgram("moe")
    x = p.tensor("x", batch, moe.width, dtype)
    tokens = p.load(x, (1, moe.width), name="tokens").flatten()
    y = p.tensor("y", batch, moe.width, dtype)
    mix(p, tokens, moe, batch, tile, columns, regions, dtype).store(y, name="store")
    return p


def mix(
    p: StreamProgram,
    tokens: Stream,
    moe: MoE,
    batch: int,
    tile: int | None,
    columns: int,
    regions: int | None = None,
    dtype: str = "float32",
) -> Stream:
    """Add a layer's experts to a program: all of its tensors but ``x`` and ``y``, and its inputs.

    Parameters
    ----------
    tokens : Stream
        [batch] of (1, width); the others as `moe_layer` takes them.

    Returns
    -------
    Stream
        [batch] of (1, width): of each token its experts' results, weighed and added up.

    Raises
    ------
    StreamError
        If the columns don't divide the hidden dim, or the regions the experts.
    """
    regions = moe.experts if regions is None else regions
    if moe.hidden % columns:
        raise StreamError(f"columns={columns} must divide the hidden dim, {moe.hidden}")
    if regions < 1 or moe.experts % regions:
        raise StreamError(f"regions={regions} must divide the {moe.experts} experts")
    scale = p.tensor("scale", batch, moe.chosen, dtype)
    weights = Weights.of(p, moe, columns, dtype)
    # Kept until a token comes back from its experts.
    experts = p.input("experts", StreamType((batch,), Selector(moe.experts))).buffered(batch)
    choices = p.input("choices", StreamType((batch, moe.chosen), Selector(moe.experts)))

    routed = tokens.partition(experts, name="route")
    packed = [_pack(stream, tile, batch, f"pack{expert}") for expert, stream in enumerate(routed)]
    share = moe.experts // regions
    made: list[Stream] = []
    for region in range(regions):
        group = [tiles for tiles, _ in packed[region * share : (region + 1) * share]]
        if share == 1:
            made.append(_swiglu(group[0], weights.linear(group[0], region), weights.pieces, f"expert{region}"))
        else:
            # Whichever expert has a tile ready computes it; then each tile goes back to its expert.
            tiles, origin = p.eager_merge(group, name=f"share{region}")
            result = _swiglu(tiles, weights.random(origin, region * share), weights.pieces, f"region{region}")
            made += result.partition(origin)
    scales = p.load(scale, (1, 1), name="scales").partition(choices, name="route_scales")
    weighed = [
        factor.map(functions.mul(), _unpack(tiles, real)) for factor, tiles, (_, real) in zip(scales, made, packed)
    ]
    collected = p.reassemble(weighed, experts, in_order=True, name="collect")
    return collected.accum(functions.sum_tiles(), writes=True, name="add")


@dataclass(frozen=True)
class Weights:
    """The weights of all the experts, loaded in `pieces` tiles for each matrix of an expert."""

    gate: Tensor
    up: Tensor
    down: Tensor
    moe: MoE
    columns: int

    @property
    def pieces(self) -> int:
        """Tiles of each matrix of an expert."""
        return self.moe.hidden // self.columns

    @classmethod
    def of(cls, p: StreamProgram, moe: MoE, columns: int, dtype: str) -> Weights:
        """Declare the tensors of the weights."""
        wide, down = moe.experts * moe.width, moe.experts * moe.hidden
        gate, up = (p.tensor(name, wide, moe.hidden, dtype) for name in ("w_gate", "w_up"))
        return cls(gate, up, p.tensor("w_down", down, moe.width, dtype), moe, columns)

    def linear(self, tiles: Stream, expert: int) -> list[Stream]:
        """Load one expert's weights for each of its tiles: [tiles, pieces]."""
        view = View((self.pieces,), (1,), expert * self.pieces)
        return [tiles.load(tensor, shape, view) for tensor, shape in self._shapes]

    def random(self, origin: Stream, first: int) -> list[Stream]:
        """Load for each tile the weights of the expert that it comes from, where expert `first` is number 0."""
        addresses = origin.flat_map(
            lambda chosen: [(first + chosen[0]) * self.pieces + piece for piece in range(self.pieces)],
            StreamType((self.pieces,), Scalar()),
        )
        return [addresses.load_at(tensor, shape) for tensor, shape in self._shapes]

    @property
    def _shapes(self) -> list[tuple[Tensor, tuple[int, int]]]:
        wide = (self.moe.width, self.columns)
        return [(self.gate, wide), (self.up, wide), (self.down, (self.columns, self.moe.width))]


def _pack(tokens: Stream, tile: int | None, batch: int, name: str) -> tuple[Stream, Stream | None]:
    """Pack an expert's tokens into tiles; return these and, where they are filled up, how many of the rows are real."""
    if tile is None:
        return tokens.reshape(None).accum(functions.retile(), name=name), None
    row = tokens.tile
    rows, padding = tokens.reshape(tile, pad=np.zeros(row.shape, row.dtype))
    return rows.accum(functions.retile(), name=name), padding.accum(REAL_ROWS).buffered(-(-batch // tile))


def _swiglu(tiles: Stream, weights: list[Stream], pieces: int, name: str) -> Stream:
    """Compute (silu(x W_gate) * (x W_up)) W_down of each tile, a piece of the hidden dim at a time."""
    gate, up, down = weights
    x = tiles.flat_map(*_repeating(pieces))
    hidden = x.map(functions.matmul(), up)
    gated = x.map(functions.matmul(), gate).map(functions.silu())
    return hidden.map(functions.mul(), gated).accum(functions.matmul(), down, name=name)


@functools.cache
def _repeating(pieces: int) -> tuple[Callable[[Any], list[Any]], Callable[[DataType], StreamType]]:
    """Return what sends a tile once for each piece, and its type: the same functions for all the experts."""
    return lambda tile: [tile] * pieces, lambda data: StreamType((pieces,), data)


def _unpack(tiles: Stream, real: Stream | None) -> Stream:
    """Cut tiles into their rows, those that were filled up left out."""
    data = tiles.tile
    row = StreamType((symbol("rows"),), Tile(1, data.columns, data.dtype))
    if real is None:
        return tiles.flat_map(cut_rows, row).flatten()
    return tiles.zip(real).flat_map(_cut_real_rows, row).flatten()


def cut_rows(tile: Any, number: int | None = None) -> list[Any]:
    """Return the first rows of a tile, or all of them; without values a tile is its shape."""
    if isinstance(tile, tuple):
        return [(1, tile[1])] * (tile[0] if number is None else number)
    return [tile[at : at + 1] for at in range(len(tile) if number is None else number)]


def _cut_real_rows(both: tuple[Any, int]) -> list[Any]:
    return cut_rows(*both)


def moe_inputs(routing: NDArray[np.int64]) -> dict[str, Any]:
    """Return the input streams for tokens that go to these experts, [batch, chosen]."""
    return {
        "experts": [tuple(sorted(row)) for row in routing.tolist()],
        "choices": [[(expert,) for expert in row] for row in routing.tolist()],
    }


@dataclass(frozen=True, eq=False)
class MoECase:
    """One simulation of a layer, without values.

    Attributes
    ----------
    routing : numpy.ndarray
        [batch, chosen] of int64: the experts that each token goes to.
    moe : MoE
        The sizes of the layer.
    tile, columns, regions : int or None
        The arguments of `moe_layer` of these names.
    compute : int
        FLOPs a cycle of each unit.
    depth : int
        Tokens that each channel holds.
    """

    routing: NDArray[np.int64]
    moe: MoE
    tile: int | None
    columns: int
    regions: int | None = None
    compute: int = 1024
    depth: int = 2

    def simulate(self) -> Outcome:
        """Simulate the case."""
        program = moe_layer(self.moe, len(self.routing), self.tile, self.columns, self.regions, "bfloat16")
        accelerator = Accelerator(compute=self.compute, depth=self.depth)
        report = program.run(moe_inputs(self.routing), accelerator, values=False)
        off_chip = report.read + report.written // ITEM_BYTES * STATE_BYTES
        return Outcome(report.cycles, off_chip, self.on_chip(), report.flops)

    @property
    def loads(self) -> NDArray[np.int64]:
        """The tokens that each expert gets."""
        return np.bincount(self.routing.ravel(), minlength=self.moe.experts)

    @property
    def allocated_compute(self) -> int:
        """FLOPs a cycle of all the units: five a region, one an expert to weigh its results, one to add up."""
        return (5 * (self.regions or self.moe.experts) + self.moe.experts + 1) * self.compute

    def on_chip(self, idle_experts: bool = False) -> int:
        """Return the bytes of on-chip memory, as the published simulations count them.

        For each region the tiles of weights that are being loaded, what is read again for each of them, and the sum
        that is built up; for each expert the tile that is packed; and what goes in and out of the layer.

        Parameters
        ----------
        idle_experts : bool
            Whether experts (and regions) without tokens count, too.
        """
        width, loads = self.moe.width, self.loads
        used = loads > 0
        share = self.moe.experts // (self.regions or self.moe.experts)
        experts = self.moe.experts if idle_experts else int(used.sum())
        regions = self.moe.experts // share if idle_experts else int(used.reshape(-1, share).any(axis=1).sum())
        weights = regions * 3 * width * self.columns * ITEM_BYTES
        edge = width * (ITEM_BYTES + 2 * STATE_BYTES) + ITEM_BYTES
        if self.tile is None:
            # Each of an expert's three tiles is as high as it has tokens; the regions' are, in all, as high as that.
            return weights + 3 * int(loads.sum()) * width * STATE_BYTES + edge
        return weights + (experts + 2 * regions) * self.tile * width * STATE_BYTES + edge
