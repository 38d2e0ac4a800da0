"""Map, Accum, Scan and FlatMap: functions on what streams carry."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import EMPTY, Token, encode
from tvm_axe.stream.engine import Process, Unit
from tvm_axe.stream.functions import TileFunction
from tvm_axe.stream.operators.base import Operator, form, forms, pipe, shape_of
from tvm_axe.stream.operators.pricing import (
    arguments_of,
    calling,
    price,
    price_list,
    result_of,
    shape_without_values,
    shapes_of,
    writing_cost,
)
from tvm_axe.stream.types import (
    DataType,
    Dim,
    Size,
    StreamType,
    Tile,
    Tuple,
    as_size,
    merged,
    shapes_differ,
)
from tvm_axe.stream.values import lengths_fault, seen, value_check

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node


def _checked(kind: str, function: object) -> TileFunction:
    """Return what an operator applies; refuse a function that says neither what it gives nor what it costs."""
    if not isinstance(function, TileFunction):
        raise StreamError(
            f"{kind}: {function!r} is no TileFunction; valid is one of tvm_axe.stream.functions, such as "
            "functions.matmul(), or functions.TileFunction(name, call, result, flops) of your own"
        )
    return function


class Map(Operator):
    """See `Stream.map`."""

    kind = "Map"

    def __init__(self, function: TileFunction, compute: int | None, writes: bool) -> None:
        self.function, self.compute, self.writes = _checked(self.kind, function), compute, writes

    @property
    def label(self) -> str:
        return self.function.name

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        _check_together(node, inputs)
        return [StreamType(inputs[0].shape, result_of(node, self.function, arguments_of(inputs)))]

    def likeness(self, node: Node) -> Hashable:
        return self.kind, self.function, self.compute, self.writes, forms([*node.inputs, *node.outputs])

    def stored(self, inputs: list[bool]) -> bool:
        return self.writes

    def process(self, node: Node, unit: Unit) -> Process:
        prices, function, compute, writes = price_list(node, unit), self.function, self.compute, self.writes
        single = len(unit.inputs) == 1 and not isinstance(unit.inputs[0].wire.type.data, Tuple)

        _check_computed(node, unit, function)

        def shaped(value: Any, stop: int) -> tuple[int, tuple[Token]]:
            if value is EMPTY:
                return 0, ((EMPTY, stop),)
            found = prices.get(value)
            if found is None:
                found = prices[value] = price(node, unit, function, compute, writes, (value,) if single else value)
            unit.flops += found[2]
            return found[0], ((found[1], stop),)

        if not (unit.engine.values or function.on_numbers):
            return pipe(unit, shaped)
        call, check = calling(unit, function.name, function), _result_check(node, unit, function)

        def valued(value: Any, stop: int) -> tuple[int, tuple[Token]]:
            if value is EMPTY:
                return 0, ((EMPTY, stop),)
            values = (value,) if single else value
            shapes = shapes_of(values)
            found = prices.get(shapes)
            if found is None:
                found = prices[shapes] = price(node, unit, function, compute, writes, shapes)
            unit.flops += found[2]
            made = call(*values)
            check(made, found[1], shapes)
            return found[0], ((made, stop),)

        return pipe(unit, valued)


class Scan(Operator):
    """See `Stream.scan`."""

    kind = "Scan"

    def __init__(self, function: TileFunction, rank: int, compute: int | None, writes: bool) -> None:
        self.function, self.rank, self.compute, self.writes = _checked(self.kind, function), rank, compute, writes

    @property
    def label(self) -> str:
        return self.function.name

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        _check_together(node, inputs)
        _check_rank(node, self.rank, inputs[0])
        last = _state(node, self.function, inputs, self.rank)
        return [StreamType(inputs[0].shape, _unfinished(node, self.function, last))]

    def likeness(self, node: Node) -> Hashable:
        known = forms([*node.inputs, *node.outputs])
        return self.kind, self.function, self.rank, self.compute, self.writes, known

    def stored(self, inputs: list[bool]) -> bool:
        return self.writes

    def process(self, node: Node, unit: Unit) -> Process:
        update = _updating(node, unit, self)
        rank = self.rank
        state = start = _start(node, unit, self.function)

        def step(value: Any, stop: int) -> tuple[int, tuple[Token]]:
            nonlocal state
            if value is EMPTY:
                cycles, found = 0, EMPTY
            else:
                cycles, found = update(state, value)
            state = start if stop >= rank else found if found is not EMPTY else state
            return cycles, ((found, stop),)

        return pipe(unit, step)


class Accum(Scan):
    """See `Stream.accum`."""

    kind = "Accum"

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        _check_together(node, inputs)
        _check_rank(node, self.rank, inputs[0])
        data = _state(node, self.function, inputs, self.rank)
        return [StreamType(inputs[0].shape[: -self.rank] or (Dim(1),), data)]

    def process(self, node: Node, unit: Unit) -> Process:
        update = _updating(node, unit, self)
        function, rank = self.function, self.rank
        whole = rank == unit.inputs[0].rank
        written = writing_cost(node, unit) if self.writes else None
        state = start = _start(node, unit, function)
        filled = False

        def step(value: Any, stop: int) -> tuple[int, tuple[Token, ...]]:
            nonlocal state, filled
            cycles = 0
            if value is not EMPTY:
                cycles, state = update(state, value)
            if stop < rank:
                filled = True
                return cycles, ()
            after = 1 if whole else stop - rank
            if filled or value is not EMPTY or stop == rank:
                if state is None:
                    raise unit.fail(f"{function.name} has no result for an empty list; give it an initial value")
                made: tuple[Token, ...] = ((state, after),)
                if written is not None:
                    cycles = max(cycles, written(state))
            else:
                made = ((EMPTY, after),)
            state, filled = start, False
            return cycles, made

        return pipe(unit, step, early=True)


class FlatMap(Operator):
    """See `Stream.flat_map`."""

    kind = "FlatMap"

    def __init__(
        self, function: Callable[[Any], Any], type: StreamType | Callable[[DataType], StreamType], cycles: int
    ) -> None:
        self.function, self.type, self.cycles = function, type, cycles

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        made = self.made(inputs[0].data)
        return [StreamType(tuple(inner_dims(node, inputs[0].shape, made.shape)), made.data)]

    def made(self, data: DataType) -> StreamType:
        """Return the type of what the function makes of an element of that type."""
        return self.type if isinstance(self.type, StreamType) else self.type(data)

    def likeness(self, node: Node) -> Hashable:
        made = self.made(node.inputs[0].type.data)
        dims = tuple((dim.size if dim.static else None, dim.ragged) for dim in made.shape)
        return self.kind, self.function, dims, form(made.data), self.cycles, forms(node.inputs)

    def stored(self, inputs: list[bool]) -> bool:
        return False

    def process(self, node: Node, unit: Unit) -> Process:
        type = self.made(unit.inputs[0].wire.type.data)
        rank, dims = type.rank, type.shape
        name = getattr(self.function, "__name__", "<lambda>").replace("<lambda>", "its function")
        function, check = calling(unit, name, self.function), value_check(type.data, unit.engine.values)
        cost = self.cycles if unit.engine.accelerator is not None else 0

        def step(value: Any, stop: int) -> tuple[int, list[Token]]:
            if value is EMPTY:
                return 0, [(EMPTY, stop + rank)]
            nested = function(value)
            try:
                made = encode(nested, rank)
            except StreamError as error:
                raise unit.fail(f"{name} must return {type}: {error}") from error
            fault = lengths_fault(nested, dims)
            for item in {id(item): item for item, _ in made}.values():  # of tiles without values there are few
                if item is not EMPTY:
                    fault = fault or check(item)
            if fault is not None:
                raise unit.fail(f"{name} must return {type}, and returned {fault}; it was given {seen(value)}")
            if stop and made[-1][0] is EMPTY:
                made.append((EMPTY, stop + rank))
            elif stop:
                made[-1] = (made[-1][0], stop + rank)
            return cost and cost * sum(item is not EMPTY for item, _ in made), made

        return pipe(unit, step)


def inner_dims(node: Node, outer: tuple[Dim, ...], inner: tuple[Dim, ...]) -> list[Dim]:
    """Return the dims of a tensor of `outer` tensors of `inner`, whose dynamic sizes may differ between them."""
    return [*outer, *(dim if dim.static else Dim(node.symbol(f"_{at}"), ragged=True) for at, dim in enumerate(inner))]


def _check_computed(node: Node, unit: Unit, function: TileFunction) -> None:
    """Refuse a run without values of a function that makes something else than tiles of them."""
    data = node.outputs[0].type.data
    if not unit.engine.values and not function.on_numbers and shape_without_values(data) is None:
        raise unit.fail(f"{function.name} makes {data} of values, and the run is without; see functions.number")


def _result_check(node: Node, unit: Unit, function: TileFunction) -> Callable[[Any, Any, tuple], None]:
    """Return the check of a function's result: of the stream's type, and a tile of the shape that is expected.

    That is the one which a run without values goes on with, and the cost counts.
    """
    data, name = _state_type(node, function), function.name
    check = value_check(data, unit.engine.values)
    shaped = isinstance(data, Tile)

    def checked(made: Any, expected: Any, shapes: tuple) -> None:
        fault = check(made)
        if fault is None and shaped and shape_of(made) != expected:
            fault = seen(made)
        if fault is not None:
            wanted = Tile(expected[0], expected[1], data.dtype) if isinstance(data, Tile) else data
            given = ", ".join(str(shape) for shape in shapes if shape is not None)
            raise unit.fail(f"{name} must return {wanted}" + f" of {given}" * bool(given) + f", and returned {fault}")

    return checked


def _check_together(node: Node, inputs: list[StreamType]) -> None:
    for other in inputs[1:]:
        if shapes_differ(inputs[0].shape, other.shape):
            raise node.fail(f"its inputs must have the same shape, and these are {inputs[0]} and {other}")


def _check_rank(node: Node, rank: int, type: StreamType) -> None:
    if not 1 <= rank <= type.rank:
        raise node.fail(f"rank={rank} must be between 1 and the stream's rank, {type.rank}: {type}")


def _state(node: Node, function: TileFunction, inputs: list[StreamType], rank: int) -> DataType:
    """Return the type of the last state: of a function that grows its state by what comes, after all of the dims."""
    arguments = arguments_of(inputs)
    first = result_of(node, function, arguments)
    if function.grows is None:
        return first
    if not isinstance(first, Tile) or function.grows not in (0, 1):
        raise node.fail(f"{function.name} puts parts of dim {function.grows} behind each other, and makes {first}")
    dims = inputs[0].shape[-rank:]
    if any(dim.ragged for dim in dims):
        return _unfinished(node, function, first)
    return _resized(first, function.grows, as_size("size", merged(dims, True).size * first.shape[function.grows], 0))


def _unfinished(node: Node, function: TileFunction, last: DataType) -> DataType:
    """Return the type of any state, given the last one's: while states grow they are shorter."""
    if function.grows is None or not isinstance(last, Tile):
        return last
    return _resized(last, function.grows, node.symbol(("_rows", "_columns")[function.grows]))


def _resized(tile: Tile, dim: int, size: Size) -> Tile:
    return Tile(tile.rows, size, tile.dtype) if dim else Tile(size, tile.columns, tile.dtype)


def _state_type(node: Node, function: TileFunction) -> DataType:
    return _unfinished(node, function, node.outputs[0].type.data)


def _start(node: Node, unit: Unit, function: TileFunction) -> Any:
    """Return the state before anything has come: None where the first element is the first state.

    Raises
    ------
    StreamError
        If it isn't of the type of the states, of those that grow but for the rows.
    """
    initial, data = function.initial, _state_type(node, function)
    if initial is None:
        return None
    if not (unit.engine.values or function.on_numbers):
        initial = shapes_of((initial,))[0]
    fault = value_check(data, unit.engine.values)(initial)
    if fault is not None:
        raise unit.fail(f"{function.name} has states of {data}, and its initial one is {fault}")
    return initial


def _updating(node: Node, unit: Unit, operator: Scan) -> Callable[[Any, Any], tuple[int, Any]]:
    """Return the function from a state and what comes to the cycles it takes and the next state."""
    function = operator.function
    compute, writes = operator.compute, operator.writes and not isinstance(operator, Accum)
    prices = price_list(node, unit)
    single = len(unit.inputs) == 1 and not isinstance(unit.inputs[0].wire.type.data, Tuple)
    _check_computed(node, unit, function)

    def shaped(state: Any, value: Any) -> tuple[int, Any]:
        found = prices.get(value)
        if found is None:
            found = prices[value] = price(node, unit, function, compute, writes, (value,) if single else value)
        unit.flops += found[2]
        return found[0], function.grown(state, found[1])

    if not (unit.engine.values or function.on_numbers):
        return shaped
    accumulate, check = calling(unit, function.name, function.accumulate), _result_check(node, unit, function)

    def update(state: Any, value: Any) -> tuple[int, Any]:
        values = (value,) if single else value
        shapes = shapes_of(values)
        found = prices.get(shapes)
        if found is None:
            found = prices[shapes] = price(node, unit, function, compute, writes, shapes)
        unit.flops += found[2]
        made = accumulate(state, *values)
        check(made, function.grown(None if state is None else shapes_of((state,))[0], found[1]), shapes)
        return found[0], made

    return update
