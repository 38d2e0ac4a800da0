"""Loads from and stores to off-chip memory, in order or at addresses."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Sequence
from typing import TYPE_CHECKING, Any

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import EMPTY, Token
from tvm_axe.stream.engine import BATCH, Channel, Process, Unit
from tvm_axe.stream.operators.base import Operator, forms, shape_of
from tvm_axe.stream.types import Dim, Scalar, StreamType, Tile, Tuple, as_dims, differ, shapes_differ
from tvm_axe.stream.views import View

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node, Tensor


class _Load(Operator):
    """What the loads share: tiles of a tensor."""

    def __init__(self, tensor: Tensor, tile: tuple[int, int] | Tile) -> None:
        self.tensor = tensor
        if not isinstance(tile, Tile) and len(tile) != 2:
            raise StreamError(f"a tile of {tensor} has rows and columns, such as (16, 32), not {tile!r}")
        self.data = tile if isinstance(tile, Tile) else Tile(*tile, tensor.dtype)
        self.tile = self.data.shape

    elements = False  # whether addresses are those of elements, at which tiles begin, instead of tiles

    @property
    def label(self) -> str:
        return self.tensor.name

    def grid(self, node: Node) -> tuple[Any, int]:
        """Return how many tiles the tensor has, down and across."""
        (rows, columns), tensor = self.tile, self.tensor
        if self.data.dtype != tensor.dtype:
            raise node.fail(f"{tensor} has no tiles of {self.data.dtype}")
        if not (isinstance(rows, int) and isinstance(columns, int) and isinstance(tensor.columns, int)):
            raise node.fail(f"tiles of {self.tile} and the columns of {tensor} must be static")
        if tensor.columns % columns or (isinstance(tensor.rows, int) and tensor.rows % rows):
            raise node.fail(f"tiles of {self.tile} must divide {tensor}")
        down = tensor.rows // rows if isinstance(tensor.rows, int) or rows > 1 else tensor.rows
        return down, tensor.columns // columns

    def loader(self, node: Node, unit: Unit) -> tuple[Any, int]:
        """Return the function from a tile's number to the tile, and the requests of one."""
        (rows, columns), engine = self.tile, unit.engine
        across = self.across(node)
        row_bytes = columns * self.data.itemsize
        requests = engine.accelerator.off_chip.requests(rows, row_bytes) if engine.accelerator else 0
        held = engine.rows_of(self.tensor)
        array = engine.tensors[self.tensor.name] if engine.values else None
        shape = rows, columns

        def tile(number: int) -> Any:
            down, right = divmod(number, across)
            if held is not None and not 0 <= down * rows < held:
                raise unit.fail(f"tile {number} is outside of {self.tensor}, which has {held // rows * across}")
            if array is None:
                return shape
            return array[down * rows : (down + 1) * rows, right * columns : (right + 1) * columns]

        def tile_from(element: int) -> Any:
            row, column = divmod(element, across)
            if row < 0 or (held is not None and row + rows > held) or column + columns > across:
                raise unit.fail(f"a tile of {rows} x {columns} from element {element} on is outside of {self.tensor}")
            return shape if array is None else array[row : row + rows, column : column + columns]

        return tile_from if self.elements else tile, requests

    def across(self, node: Node) -> int:
        """Return how many of what addresses count are in a row."""
        return self.grid(node)[1]

    @property
    def size(self) -> int:
        """Bytes of a tile."""
        return self.tile[0] * self.tile[1] * self.data.itemsize


class LinearLoad(_Load):
    """See `StreamProgram.load` and `Stream.load`."""

    kind = "LinearOffChipLoad"

    def __init__(self, tensor: Tensor, tile: tuple[int, int] | Tile, view: View | None) -> None:
        super().__init__(tensor, tile)
        self.view = view

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        down, across = self.grid(node)
        if self.view is not None and isinstance(down, int) and self.view.last >= down * across:
            raise node.fail(f"{self.view} goes up to tile {self.view.last}, and {self.tensor} has {down * across}")
        shape = (Dim(down), Dim(across)) if self.view is None else as_dims(self.view.shape)
        outer = inputs[0].shape if inputs else ()
        return [StreamType((*outer, *shape), self.data)]

    def stored(self, inputs: list[bool]) -> bool:
        return True

    def likeness(self, node: Node) -> Hashable | None:
        down, across = self.grid(node)
        if not isinstance(down, int):  # then tiles may be outside
            return None
        return (
            self.kind,
            self.data.itemsize,
            self.tile,
            self.view.shape if self.view else (down, across),
            forms(node.inputs),
        )

    def process(self, node: Node, unit: Unit) -> Process:
        (sink,) = unit.outputs
        tile, requests = self.loader(node, unit)
        positions, stops, rank = self._order(node, unit)
        count = len(positions)
        source = unit.inputs[0] if unit.inputs else None
        value, stop = None, 0
        first: list[Token] = []  # the first tiles are the same for each element
        while True:
            if source is not None:
                while not source.items:
                    yield source
                value, stop = unit.take(source)
            if value is EMPTY:
                unit.send(sink, EMPTY, stop + rank)
            else:
                unit.read += self.size * count
                for at in range(0, count, BATCH):
                    part = slice(at, at + BATCH)
                    tokens = first if first and not at else list(zip(map(tile, positions[part]), stops[part]))
                    first = first or tokens
                    if stop and at + BATCH >= count:
                        tokens = [*tokens[:-1], (tokens[-1][0], rank + stop)]
                    yield from unit.send_all(sink, tokens, requests)
                if not count:
                    unit.send(sink, EMPTY, rank + stop)
            if source is None or stop == source.rank:
                return

    def _order(self, node: Node, unit: Unit) -> tuple[Sequence[int], Sequence[int], int]:
        """Return the numbers of the tiles that are sent for an element, the stops behind them, and the highest stop."""
        if self.view is not None:
            return self.view.positions(), self.view.stops(), len(self.view.shape)
        down, across = self.grid(node)
        if not isinstance(down, int):
            down = unit.engine.rows[self.tensor.name] // self.tile[0]
        stops = bytearray(across)
        stops[-1] = 1
        stops *= down
        stops[-1:] = b"\2"[: len(stops)]
        return range(down * across), stops, 2


class RandomLoad(_Load):
    """See `Stream.load_at`."""

    kind = "RandomOffChipLoad"

    def __init__(self, tensor: Tensor, tile: tuple[int, int] | Tile, elements: bool) -> None:
        super().__init__(tensor, tile)
        self.elements = elements

    def across(self, node: Node) -> int:
        if not self.elements:
            return super().across(node)
        columns, tensor = self.tile[1], self.tensor
        if not (self.data.static and isinstance(tensor.columns, int) and columns <= tensor.columns):
            raise node.fail(f"tiles of {self.tile} must be static, and no wider than {tensor}")
        return tensor.columns

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        self.across(node)
        if not isinstance(inputs[0].data, Scalar):
            raise node.fail(f"addresses are scalars, not {inputs[0]}")
        return [StreamType(inputs[0].shape, self.data)]

    def stored(self, inputs: list[bool]) -> bool:
        return True

    def process(self, node: Node, unit: Unit) -> Process:
        (source,), (sink,) = unit.inputs, unit.outputs
        tile, requests = self.loader(node, unit)
        size = self.size
        while True:
            while not source.items:
                yield source
            number, stop = unit.take(source)
            value: Any = EMPTY
            if number is not EMPTY:
                unit.read += size
                unit.access(requests)
                value = tile(int(number))
            unit.send(sink, value, stop)
            if stop == source.rank:
                return


class _Store(Operator):
    """What both stores share: the tiles' elements are converted to the tensor's dtype, which counts for the bytes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def label(self) -> str:
        return f"store_{self.tensor.name}"

    def check(self, node: Node, type: StreamType, anywhere: bool = False) -> Tile:
        """Return the tiles that are stored; those that are stored anywhere needn't divide the tensor.

        Raises
        ------
        StreamError
            If they aren't tiles of the tensor.
        """
        data, tensor = type.data, self.tensor
        if not isinstance(data, Tile):
            raise node.fail(f"it stores tiles, not {type}")
        static = isinstance(data.columns, int) and isinstance(tensor.columns, int)
        if not static or (tensor.columns % data.columns and not anywhere):
            raise node.fail(f"the tiles' columns must be static and divide those of {tensor}, not {data}")
        return data

    def write(self, unit: Unit, value: Any) -> None:
        """Wait until a tile is written."""
        rows, columns = shape_of(value)
        itemsize, accelerator = Tile(rows, columns, self.tensor.dtype).itemsize, unit.engine.accelerator
        unit.written += rows * columns * itemsize
        unit.access(accelerator.off_chip.requests(rows, columns * itemsize) if accelerator else 0)


class LinearStore(_Store):
    """See `Stream.store`."""

    kind = "LinearOffChipStore"

    def __init__(self, tensor: Tensor, view: View | None) -> None:
        super().__init__(tensor)
        self.view = view

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        tile, tensor, view = self.check(node, inputs[0]), self.tensor, self.view
        if view is None:
            return []
        if not (isinstance(tile.rows, int) and isinstance(tensor.rows, int)) or tensor.rows % tile.rows:
            raise node.fail(f"a view is of static tiles that divide {tensor}, not of {tile}")
        numbers = view.positions()
        tiles = tensor.rows // tile.rows * (tensor.columns // tile.columns)
        if view.last >= tiles:
            raise node.fail(f"{view} goes up to tile {view.last}, and {tensor} has {tiles}")
        if differ(inputs[0].count, len(numbers)) or len({*numbers}) < len(numbers):
            raise node.fail(f"{view} must have a place of its own for each tile of {inputs[0]}")
        return []

    def process(self, node: Node, unit: Unit) -> Process:
        engine, tensor = unit.engine, self.tensor
        if self.view is not None:
            filled = yield from self._scattered(unit, self.view.positions())
        else:
            filled = yield from self._in_order(unit)
        # How many rows a dynamic stream has is known when it has ended: its tensor has room for the most.
        static = isinstance(node.inputs[0].type.count, int)
        if static and filled < (engine.rows_of(tensor) or 0) and tensor.name not in engine.rows:
            raise unit.fail(f"the tiles fill {filled} rows of {tensor}; pass what is to be in the others as its input")

    def _in_order(self, unit: Unit) -> Generator[Channel | None, None, int]:
        """Write the tiles row by row; return the number of rows."""
        (source,) = unit.inputs
        engine, tensor = unit.engine, self.tensor
        row = column = height = 0
        while True:
            value, stop = yield from unit.peek(source)
            if value is not EMPTY:
                self.write(unit, value)
                rows, columns = shape_of(value)
                if column and rows != height:
                    raise unit.fail(f"a tile of {rows} rows comes beside one of {height}, at row {row} of {tensor}")
                engine.place(unit, tensor, row, column, value)
                height = rows
                column += columns
                if column == tensor.columns:
                    row, column = row + rows, 0
            unit.free(source)
            if stop == source.rank:
                break
        if column:
            raise unit.fail(f"the tiles end at column {column}, row {row} of {tensor}")
        return row

    def _scattered(self, unit: Unit, numbers: list[int]) -> Generator[Channel | None, None, int]:
        """Write the tiles to their places; return the number of rows that they would fill."""
        (source,) = unit.inputs
        tensor = self.tensor
        stop = elements = 0
        for number in numbers:
            while True:
                value, stop = yield from unit.peek(source)
                if value is not EMPTY:
                    break
                unit.free(source)
            self.write(unit, value)
            rows, columns = shape_of(value)
            down, right = divmod(number, tensor.columns // columns)
            unit.engine.place(unit, tensor, down * rows, right * columns, value)
            elements += rows * columns
            unit.free(source)
        while stop < source.rank:
            _, stop = yield from unit.get(source)
        return elements // tensor.columns


class RandomStore(_Store):
    """See `Stream.store_at`."""

    kind = "RandomOffChipStore"

    def __init__(self, tensor: Tensor, elements: bool) -> None:
        super().__init__(tensor)
        self.elements = elements

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        data, addresses = inputs
        tile = self.check(node, data, anywhere=self.elements)
        numbers = addresses.data.items if isinstance(addresses.data, Tuple) else (addresses.data,)
        if len(numbers) > 2 or not all(isinstance(number, Scalar) for number in numbers):
            raise node.fail(f"addresses are scalars, or pairs of these and of rows, not {addresses}")
        if shapes_differ(data.shape, addresses.shape):
            raise node.fail(f"each tile needs a row to be written at, a scalar; the streams are {data} and {addresses}")
        if differ(tile.columns, self.tensor.columns) and not self.elements:
            raise node.fail(f"tiles must be as wide as {self.tensor}, not {tile}")
        return [StreamType(data.shape, Scalar("int8"))]

    def stored(self, inputs: list[bool]) -> bool:
        return False

    def process(self, node: Node, unit: Unit) -> Process:
        (source, addresses), (sink,) = unit.inputs, unit.outputs
        ended = False  # the addresses
        while True:
            value, stop = yield from unit.peek(source)
            if value is EMPTY:
                unit.send(sink, EMPTY, stop)
            else:
                row: Any = EMPTY
                while row is EMPTY:
                    if ended:
                        raise unit.fail(f"its addresses, from {addresses.wire.source!r}, have ended before its tiles")
                    row, ends = yield from unit.peek(addresses)
                    ended = ends == addresses.rank
                    if row is EMPTY:
                        unit.free(addresses)
                first, rows = row if type(row) is tuple else (row, None)
                if rows is not None:
                    value = value[: int(rows)] if unit.engine.values else (min(int(rows), value[0]), value[1])
                first, column = divmod(int(first), self.tensor.columns) if self.elements else (int(first), 0)
                self.write(unit, value)
                unit.engine.place(unit, self.tensor, first, column, value)
                unit.free(addresses)
                unit.send(sink, 1, stop)
            unit.free(source)
            if stop == source.rank:
                return
