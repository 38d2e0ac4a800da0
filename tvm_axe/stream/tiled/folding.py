"""The functions of streams that steps become: of one step, or of all that a loop hands on to its next iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from tvm_axe.stream.functions import TileFunction
from tvm_axe.stream.tiled.blocks import Content, Flow
from tvm_axe.stream.tiled.boxes import Box
from tvm_axe.stream.tiled.step import Step
from tvm_axe.stream.types import DataType, Tile, Tuple
from tvm_axe.tile.regions import Tile as TileBuffer


@dataclass(frozen=True, eq=False)
class Slot:
    """What comes on one stream: contents, a box of a step, or a variable's value.

    Attributes
    ----------
    of : Content or tuple
        The contents; a step and the box; or a step and the variable.
    part : int, optional
        The number among values that travel together; None of a value that comes alone.
    """

    of: Content | tuple[Step, Box | tirx.Var]
    part: int | None = None


class Computing:
    """Computes steps one after the other.

    Parameters
    ----------
    steps : Sequence[Step]
        The steps, in order.
    flow : Flow
        The contents that they take and make.
    streams : Sequence[Sequence[Slot]]
        What comes on each stream.
    results : Sequence[Content]
        What is sent, in order; under None what the one step stores.
    stored : tuple[int, int], optional
        Rows and columns of what is stored.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        flow: Flow,
        streams: Sequence[Sequence[Slot]],
        results: Sequence[Content | None],
        stored: tuple[int, int] | None = None,
    ) -> None:
        self._steps, self._flow, self._streams, self._results = steps, flow, streams, results
        self._stored = stored

    def __call__(self, *values: Any, handed: dict[Content, np.ndarray] | None = None) -> Any:
        """Return the results, one alone or several as a tuple; `handed` has what is handed on."""
        held: dict[Any, Any] = dict(handed or {})
        for slots, value in zip(self._streams, values):
            for slot in slots:
                found = value if slot.part is None else value[slot.part]
                if isinstance(slot.of, Content):
                    held.setdefault(slot.of, found.reshape(slot.of.tile.shape))
                else:
                    held[slot.of] = found
        stored: Any = None
        for step in self._steps:
            taken = self._flow.taken[step]
            arrays: dict[TileBuffer, Any] = {
                tile: held.get(content, content.constant) for tile, content in taken.items()
            }
            boxes = [held[step, box] for box in step.boxes]
            variables = {var: held[step, var] for var in step.variables}
            made = step.call(arrays, boxes, variables)
            stored = made.get(None)
            for tile, content in self._flow.made[step].items():
                held[content] = made[tile]
        found = tuple(
            np.ascontiguousarray(stored.reshape(self._stored)) if content is None else flat(held[content], content)
            for content in self._results
        )
        return found if len(found) > 1 else found[0]


def flat(array: np.ndarray, content: Content) -> np.ndarray:
    """Return a tile's elements as the matrix that streams carry."""
    return np.ascontiguousarray(array.reshape(matrix_shape(content.tile)))


def matrix_shape(tile: TileBuffer) -> tuple[int, int]:
    """Return rows and columns of the matrix that carries a tile: a row of one of one dimension."""
    columns = int(tile.shape[-1])
    return int(np.prod(tile.shape[:-1], dtype=int)), columns


def data_of(contents: Sequence[Content]) -> Tile | Tuple:
    """Return the type of what carries contents: a tile, or several that travel together."""
    tiles = tuple(Tile(*matrix_shape(content.tile), content.tile.dtype) for content in contents)
    return tiles[0] if len(tiles) == 1 else Tuple(tiles)


def mapping(name: str, computing: Computing, result: DataType, flops: int) -> TileFunction:
    """Return the function of each iteration by itself."""
    return TileFunction(name, computing, lambda *_: result, lambda *_: flops)


def folding(
    name: str,
    computing: Computing,
    results: Sequence[Content],
    flops: int,
    handed: Sequence[Content],
    starting: Any | None,
) -> TileFunction:
    """Return the function from what an iteration begins with, and what comes, to what it hands on, as an accumulation.

    Parameters
    ----------
    results : Sequence[Content]
        What is sent, what is handed on among it.
    handed : Sequence[Content]
        What is handed on, as an iteration begins with it.
    starting : Any, optional
        The state before the first iteration; without, what comes with the first one says what it begins with.
    """
    places = [results.index(content.after) for content in handed if content.after is not None]
    return _Folding(
        name,
        computing,
        lambda *_: data_of(results),
        lambda *_: flops,
        initial=starting,
        handed=tuple(zip(handed, places)),
    )


@dataclass(frozen=True, eq=False)
class _Folding(TileFunction):
    """A function that gets what is handed on out of the state.

    Attributes
    ----------
    handed : tuple
        What is handed on, each with its place among the parts of the state.
    """

    handed: tuple[tuple[Content, int], ...] = ()

    def accumulate(self, state: Any, *values: Any) -> Any:
        if state is None:
            return self.call(*values)
        parts = state if type(state) is tuple else (state,)
        return self.call(
            *values, handed={content: parts[place].reshape(content.tile.shape) for content, place in self.handed}
        )


def last(data: Tile | Tuple) -> TileFunction:
    """Return the function that keeps what came last, as an accumulation; it takes no time."""

    def call(*values: Any) -> Any:
        return values if isinstance(data, Tuple) else values[0]

    return TileFunction("last", call, lambda *_: data, lambda *_: 0, combine=lambda state, value: value, cycles=0)
