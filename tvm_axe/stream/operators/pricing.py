"""What it takes to apply a function: cycles and FLOPs by the shapes of its arguments, for all units alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy

from tvm_axe.errors import StreamError
from tvm_axe.stream.engine import Unit
from tvm_axe.stream.operators.base import Cost, bandwidth, byte_counter
from tvm_axe.stream.types import DataType, StreamType, Tile, Tuple, data_differ
from tvm_axe.stream.values import seen

if TYPE_CHECKING:
    from tvm_axe.stream.functions import TileFunction
    from tvm_axe.stream.graph import Node

Price = tuple[int, Any, int]  # cycles, the result's shape if it is made of tiles, FLOPs


def arguments_of(inputs: list[StreamType]) -> list[DataType]:
    """Return the types of a function's arguments: of one stream of tuples, their parts."""
    if len(inputs) == 1 and isinstance(inputs[0].data, Tuple):
        return list(inputs[0].data.items)
    return [type.data for type in inputs]


def result_of(node: Node, function: TileFunction, arguments: list[DataType]) -> DataType:
    """Return the type of what a function makes of arguments of these types.

    Raises
    ------
    StreamError
        If they don't fit, with the operator's name.
    """
    try:
        return function.result(*arguments)
    except Exception as error:
        said = str(error) if isinstance(error, StreamError) else f"{type(error).__name__}: {error}"
        raise node.fail(f"{said}; its inputs are {' and '.join(map(str, arguments))}") from error


def calling(unit: Unit, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a user's function so that what it raises says which operator called it, on what."""

    def call(*values: Any) -> Any:
        try:
            return function(*values)
        except Exception as error:
            given = ", ".join(map(seen, values))
            raise unit.fail(f"{name} raised {type(error).__name__}: {error}; it was given {given}") from error

    return call


def price_list(node: Node, unit: Unit) -> dict[tuple, Price]:
    """Return the prices that are known of a unit's function, by the arguments' shapes; units alike share them."""
    return {} if node.likeness is None else unit.engine.prices.setdefault(node.likeness, {})


def price(node: Node, unit: Unit, function: TileFunction, compute: int | None, writes: bool, shapes: tuple) -> Price:
    """Return the cycles of a unit for arguments of these shapes, the result's shape and the FLOPs."""
    data = arguments_of([channel.wire.type for channel in unit.inputs])
    stored = tuple(channel.wire.stored for channel in unit.inputs) * (len(data) if len(unit.inputs) == 1 else 1)
    accelerator, declared = unit.engine.accelerator, node.outputs[0].type.data
    types = [_concrete(item, shape) for item, shape in zip(data, shapes)]
    result = result_of(node, function, types)
    shape = shape_without_values(result)
    flops = int(calling(unit, f"flops of {function.name}", function.flops)(*types))
    if function.grows is None and _mistaken(result, declared):
        raise node.fail(f"{function.name} makes {result} of {' and '.join(map(str, types))}, not {declared}")
    if accelerator is None:
        return 0, shape, flops
    reading = sum(
        -(-byte_counter(item)(shape) // bandwidth(unit, item))
        for item, shape, here in zip(data, shapes, stored)
        if here
    )
    writing = writing_cost(node, unit)(shape) if writes else 0
    computing = function.cycles if function.cycles is not None else -(-flops // (compute or accelerator.compute))
    return max(reading, computing, writing), shape, flops


def _mistaken(result: DataType, declared: DataType) -> bool:
    """Return whether a result surely differs from the declared type; of tiles, numbers are compared quickly."""
    if not (isinstance(result, Tile) and isinstance(declared, Tile) and result.static):
        return data_differ(result, declared)
    if not all(isinstance(size, (int, sympy.Symbol)) for size in declared.shape):
        return data_differ(result, declared)
    known = [(size, made) for size, made in zip(declared.shape, result.shape) if isinstance(size, int)]
    return result.dtype != declared.dtype or any(size != made for size, made in known)


def writing_cost(node: Node, unit: Unit) -> Cost:
    """Return what it costs to write a result to on-chip memory."""
    accelerator, size = unit.engine.accelerator, byte_counter(node.outputs[0].type.data)
    return lambda value: -(-size(value) // accelerator.on_chip_bandwidth) if accelerator else 0


def shapes_of(values: tuple) -> tuple:
    """Return what the cost of a function depends on: the shapes of tiles, nothing of numbers."""
    return tuple(
        [item.shape if hasattr(item, "shape") else _parts(item) if type(item) is tuple else None for item in values]
    )


def _parts(value: tuple) -> tuple:
    """Return a tile's shape, or a selector, as it is, and the shapes of tiles that travel together."""
    return shapes_of(value) if any(hasattr(part, "shape") for part in value) else value


def shape_without_values(data: DataType) -> Any:
    """Return the value of a type in a run without values: of tiles; None of what has another value there."""
    if isinstance(data, Tile):
        return data.shape
    parts = tuple(shape_without_values(item) for item in data.items) if isinstance(data, Tuple) else (None,)
    return None if None in parts else parts


def _concrete(data: DataType, shape: Any) -> DataType:
    if isinstance(data, Tuple):
        return Tuple(tuple(map(_concrete, data.items, shape)))
    return Tile(shape[0], shape[1], data.dtype) if isinstance(data, Tile) else data
