"""What a run is given, checked beside the types and made tokens: inputs, tensors, the symbols that they determine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import sympy

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import EMPTY, Token, encode
from tvm_axe.stream.engine import Engine
from tvm_axe.stream.operators.base import shape_of
from tvm_axe.stream.operators.endpoints import FeedbackEdge, Input
from tvm_axe.stream.operators.off_chip import LinearLoad, LinearStore, RandomLoad, RandomStore
from tvm_axe.stream.program import Node, StreamProgram
from tvm_axe.stream.types import DataType, Selector, StreamType, Tile
from tvm_axe.stream.values import lengths_fault, value_check, wanted


class Meter:
    """What counts the tokens of a stream, to find out how long dynamic dims were."""

    __slots__ = ("_before", "_filled", "_outer", "_uneven", "_values", "rows", "type")

    def __init__(self, type: StreamType) -> None:
        self.type = type
        self.rows = 0
        self._values = self._before = 0  # elements, and those before the last stop
        self._outer = [0] * type.rank  # how many lists of each rank, from 1 on
        self._filled = [False] * (type.rank + 1)
        self._uneven = isinstance(type.data, Tile) and not isinstance(type.data.rows, int)

    @property
    def counts(self) -> list[int]:
        """How many elements of each dim, innermost first."""
        return [self._values, *self._outer[1:]]

    def count(self, tokens: Iterable[Token]) -> None:
        """Count tokens, and the lists that their stops close: those that something is in, and the stop's own."""
        outer, filled, rank, uneven, found = self._outer, self._filled, self.type.rank, self._uneven, self._values
        for value, stop in tokens:
            if value is not EMPTY:
                found += 1
                if uneven:
                    self.rows += shape_of(value)[0]
            if stop and rank > 1:
                filled[1] = found > self._before
                self._before = found
                for level in range(1, min(stop + 1, rank)):
                    if filled[level] or level == stop:
                        outer[level] += 1
                        filled[level], filled[level + 1] = False, True
        self._values = found

    def bind(self, bindings: dict[sympy.Symbol, Any]) -> None:
        """Add the values of the symbols that are sizes of this stream."""
        outer = 1
        for dim, found in zip(self.type.shape, reversed(self.counts)):
            if isinstance(dim.size, sympy.Symbol):
                bindings.setdefault(dim.size, found if dim.ragged else sympy.Rational(found, outer) if outer else 0)
            outer = found
        data = self.type.data
        if isinstance(data, Tile) and isinstance(data.rows, sympy.Symbol):
            bindings.setdefault(data.rows, sympy.Rational(self.rows, outer) if outer else 0)


def feed(program: StreamProgram, inputs: dict[str, Any], engine: Engine) -> dict[sympy.Symbol, Any]:
    """Give the engine the inputs; return the symbols that they determine."""
    bindings: dict[sympy.Symbol, Any] = {}
    wanted = {node.name: node for node in program.nodes if isinstance(node.operator, Input)}
    unknown = set(inputs) - set(wanted) - set(program.tensors)
    if unknown:
        known = ", ".join(sorted([*wanted, *program.tensors]))
        raise StreamError(f"program {program.name!r} has no input or tensor {sorted(unknown)[0]!r}; it has {known}")
    for name, node in wanted.items():
        if name not in inputs:
            raise node.fail("it isn't given; pass nested lists of its values")
        engine.fed[name] = _tokens(node, inputs[name], engine.values, bindings)
    for node in program.nodes:
        if isinstance(node.operator, FeedbackEdge):
            _check_values(node, node.operator.initial, engine.values)
        elif isinstance(node.operator, (LinearLoad, RandomLoad, LinearStore, RandomStore)):
            _take_tensor(node, node.operator, inputs.get(node.operator.tensor.name), engine, bindings)
    return bindings


def _take_tensor(
    node: Node,
    operator: LinearLoad | RandomLoad | LinearStore | RandomStore,
    given: Any,
    engine: Engine,
    bindings: dict[sympy.Symbol, Any],
) -> None:
    """Give the engine what is given of a tensor: an array, or without values its shape alone."""
    tensor, tile = operator.tensor, operator.tile if isinstance(operator, (LinearLoad, RandomLoad)) else None
    if given is None:
        if tile is not None and (engine.values or not isinstance(tensor.rows, int)):
            raise node.fail(f"{tensor} isn't given; pass an array, or without values its (rows, columns)")
        return
    array = None if isinstance(given, tuple) else np.asarray(given)
    shape = given if array is None else array.shape
    fits = len(shape) == 2 and shape[1] == tensor.columns
    if not fits or (isinstance(tensor.rows, int) and shape[0] != tensor.rows):
        raise node.fail(f"{tensor} is given with shape {tuple(shape)}")
    if array is None and engine.values:
        raise node.fail(f"{tensor} is given as its shape, {shape}, which is enough in runs without values only")
    if array is not None and array.dtype != np.dtype(tensor.dtype):
        raise node.fail(f"{tensor} is given as {array.dtype}; convert it, or declare the tensor so")
    rows = int(shape[0])
    if tile is not None and rows % tile[0] and not (isinstance(operator, RandomLoad) and operator.elements):
        raise node.fail(f"{tensor} is given with {rows} rows, which tiles of {tile} leave a part of")
    _bind(node, bindings, tensor.rows, rows)
    engine.rows[tensor.name] = rows
    if array is not None and engine.values:
        engine.tensors[tensor.name] = array


def _tokens(node: Node, given: Any, values: bool, bindings: dict[sympy.Symbol, Any]) -> list[Token]:
    (stream,) = node.outputs
    nested = given.tolist() if isinstance(given, np.ndarray) and not isinstance(stream.type.data, Tile) else given
    if isinstance(nested, np.ndarray):
        nested = list(nested)
    try:
        tokens = encode(nested, stream.type.rank)
    except StreamError as error:
        raise node.fail(f"{error}; it is a stream {stream}") from error
    fault = lengths_fault(nested, stream.type.shape)
    if fault is not None:
        raise node.fail(f"it is given as {fault}; it is a stream {stream}")
    meter = Meter(stream.type)
    for number, (value, stop) in enumerate(tokens):
        if value is not EMPTY:
            value = _as_value(value, stream.type.data, values)
            tokens[number] = (value, stop)
    _check_values(node, [value for value, _ in tokens if value is not EMPTY], values)
    meter.count(tokens)
    outer = 1
    for dim, found in zip(stream.type.shape, reversed(meter.counts)):
        if dim.ragged:
            _bind(node, bindings, dim.size, found)
        elif outer:
            _bind(node, bindings, dim.size, found // outer)
        outer = found
    return tokens


def _as_value(given: Any, data: DataType, values: bool) -> Any:
    """Return what is given as programs know it: a choice as a tuple, a tile without values as its shape."""
    if isinstance(data, Selector):
        if isinstance(given, (int, np.integer)):
            return (int(given),)
        return tuple(given) if isinstance(given, (list, np.ndarray)) else given
    if isinstance(data, Tile) and not values and isinstance(given, np.ndarray):
        return given.shape
    return given


def _check_values(node: Node, given: Iterable[Any], values: bool) -> None:
    (stream,) = node.outputs
    check = value_check(stream.type.data, values)
    for number, value in enumerate(given):
        fault = check(value)
        if fault is not None:
            raise node.fail(f"value {number} must be {wanted(stream.type.data)}, not {fault}")


def _bind(node: Node, bindings: dict[sympy.Symbol, Any], size: Any, found: int) -> None:
    """Say what a symbol stands for, or find that it stands for something else already."""
    if isinstance(size, sympy.Symbol) and bindings.setdefault(size, found) != found:
        raise node.fail(f"{size} is {found} here, and {bindings[size]} in what was given before")
