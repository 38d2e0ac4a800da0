"""What programs are made of: tensors in off-chip memory, operators, streams between them.

A stream's methods are the operators that take it; they read as the paper's figures do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

import sympy

from tvm_axe.errors import StreamError
from tvm_axe.stream.types import DataType, Size, StreamType, Tile, as_size, symbol

if TYPE_CHECKING:
    from tvm_axe.stream.functions import TileFunction
    from tvm_axe.stream.loops import Loop
    from tvm_axe.stream.operators.base import Operator
    from tvm_axe.stream.program import StreamProgram
    from tvm_axe.stream.views import View


class Tensor:
    """A matrix in off-chip memory, given or read when the program runs.

    Attributes
    ----------
    name : str
        The name among the program's tensors.
    rows, columns : int or sympy.Expr
        The shape; what is loaded in tiles has static columns.
    dtype : str
        The type of the elements.
    """

    def __init__(self, name: str, rows: Size, columns: Size, dtype: str) -> None:
        self.name, self.dtype = name, dtype
        self.rows, self.columns = as_size(f"tensor {name!r}: rows", rows), as_size(f"tensor {name!r}: columns", columns)

    def __str__(self) -> str:
        return f"tensor {self.name!r} ({self.rows}, {self.columns}) {self.dtype}"


class Stream:
    """What an operator sends; the methods are the operators that take it.

    Attributes
    ----------
    type : StreamType
        Shape and data type.
    stored : bool
        Whether its tiles lie in on-chip memory: loaded ones, those of buffers, and what a function writes there.
    consumers : list[Node]
        The operators that take it; where several do, a broadcast is put in between when the program runs.
    depth : int or None
        Tokens that each of its channels holds, if not the accelerator's default.
    """

    def __init__(self, node: Node, number: int, type: StreamType, stored: bool) -> None:
        self.node, self.number, self.type, self.stored = node, number, type, stored
        self.consumers: list[Node] = []
        self.depth: int | None = None
        self.discarded = False

    @property
    def program(self) -> StreamProgram:
        """The program that it belongs to."""
        return self.node.program

    @property
    def name(self) -> str:
        """The operator's name, and the number of the output if it has several."""
        return self.node.name + (f".{self.number}" if len(self.node.outputs) > 1 else "")

    @property
    def tile(self) -> Tile:
        """The tiles that it carries.

        Raises
        ------
        StreamError
            If it carries something else.
        """
        if not isinstance(self.type.data, Tile):
            raise StreamError(f"stream {self.name!r} carries no tiles: {self}")
        return self.type.data

    def __str__(self) -> str:
        return str(self.type)

    def buffered(self, depth: int) -> Stream:
        """Let the stream's channels hold `depth` tokens; return the stream."""
        self.depth = int(as_size(f"stream {self.name!r}: depth", depth))
        return self

    def discard(self) -> None:
        """Declare that nobody takes the stream; what is sent is thrown away."""
        self.discarded = True

    def output(self, name: str) -> Stream:
        """Make the stream a result of the program under that name; return the stream."""
        from tvm_axe.stream.operators.endpoints import Output

        self.program.add(Output(), [self], name)
        return self

    # ---- Off-chip memory

    def load(
        self, tensor: Tensor, tile: tuple[int, int] | Tile, view: View | None = None, name: str | None = None
    ) -> Stream:
        """LinearOffChipLoad: for each element of this stream, load a view of a tensor; see `StreamProgram.load`."""
        from tvm_axe.stream.operators.off_chip import LinearLoad

        return self.program.add(LinearLoad(tensor, tile, view), [self], name)[0]

    def load_at(
        self, tensor: Tensor, tile: tuple[int, int] | Tile, elements: bool = False, name: str | None = None
    ) -> Stream:
        """RandomOffChipLoad: this stream's scalars are numbers of tiles of the tensor, row by row; load those.

        Shape: unchanged.

        Parameters
        ----------
        elements : bool
            Whether they are the numbers of elements instead, at which tiles begin, anywhere in the tensor.
        """
        from tvm_axe.stream.operators.off_chip import RandomLoad

        return self.program.add(RandomLoad(tensor, tile, elements), [self], name)[0]

    def store(self, tensor: Tensor, view: View | None = None, name: str | None = None) -> None:
        """LinearOffChipStore: write the tiles one after the other to the tensor: row by row, or to an affine view."""
        from tvm_axe.stream.operators.off_chip import LinearStore

        self.program.add(LinearStore(tensor, view), [self], name)

    def store_at(self, tensor: Tensor, addresses: Stream, elements: bool = False, name: str | None = None) -> Stream:
        """RandomOffChipStore: write each tile at the row that `addresses` gives; return acknowledgements.

        Shape: both the same, which is the result's.

        Parameters
        ----------
        addresses : Stream
            A scalar a tile; or a pair, of which the second says how many of the tile's rows are written.
        elements : bool
            Whether addresses are the numbers of elements, row by row, at which tiles begin, instead of rows.
        """
        from tvm_axe.stream.operators.off_chip import RandomStore

        return self.program.add(RandomStore(tensor, elements), [self, addresses], name)[0]

    # ---- On-chip memory

    def bufferize(self, rank: int = 1, name: str | None = None) -> Stream:
        """Bufferize: write each tensor of the `rank` inner dims to on-chip memory, and send a reference to it.

        Shape: ``[a, b]`` with b the inner dims -> ``[a]`` of ``Buffer(tile, b)``; ``[1]`` if nothing is left.
        """
        from tvm_axe.stream.operators.on_chip import Bufferize

        return self.program.add(Bufferize(rank), [self], name)[0]

    def streamify(self, view: View | None = None, name: str | None = None) -> Stream:
        """Streamify: read each buffer, whole and in order, or as an affine view of it.

        Shape: ``[a]`` of ``Buffer(tile, b)`` -> ``[a, b]``, or ``[a, view.shape]``.
        """
        from tvm_axe.stream.operators.on_chip import Streamify

        return self.program.add(Streamify(view), [self], name)[0]

    # ---- Routing

    def partition(self, selector: Stream, rank: int = 0, name: str | None = None) -> tuple[Stream, ...]:
        """Partition: send each tensor of the `rank` inner dims to the outputs that its selector names.

        Shape: ``[a, b]`` with b the inner dims, and selectors ``[a]`` -> for output i ``[D_i, b]``.
        """
        from tvm_axe.stream.operators.routing import Partition

        return self.program.add(Partition(rank), [self, selector], name)

    def loop(self, capacity: int, most: int | None = None, name: str | None = None) -> Loop:
        """Send each element through a body as often as this one says, which `Loop.close` connects.

        The elements of an innermost list go around together, in rounds: all of them in the first, in each one after it
        those that the body sent back. A list has no more rounds when none goes on; then the next one enters.

        Shape: ``[a, b]`` -> ``[a, rounds, left]``, with as many in the first round of a list as there are in b.

        Parameters
        ----------
        capacity : int
            Elements that the way back holds. As many as the longest list has always do; fewer may, where the body holds
            the others.
        most : int, optional
            Rounds of a list; more are an error.

        Raises
        ------
        StreamError
            If one of these is no positive number.
        """
        from tvm_axe.stream.loops import Loop

        return Loop(self, capacity, most, name)

    # ---- Functions

    def map(
        self,
        function: TileFunction,
        *others: Stream,
        compute: int | None = None,
        writes: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Map: apply a function to each element, of several streams to what comes together.

        Shape: all the same, which is the result's.

        Parameters
        ----------
        function : TileFunction
            The function, such as those of `tvm_axe.stream.functions`.
        compute : int, optional
            FLOPs a cycle of the unit, instead of the accelerator's.
        writes : bool
            Whether the unit writes what it sends to on-chip memory; else that goes straight to the next unit.
        """
        from tvm_axe.stream.operators.higher import Map

        return self.program.add(Map(function, compute, writes), [self, *others], name)[0]

    def accum(
        self,
        function: TileFunction,
        *others: Stream,
        rank: int = 1,
        compute: int | None = None,
        writes: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Accum: reduce the `rank` inner dims, ``state = function(state, *elements)`` from `function.initial` on.

        Shape: ``[a, b]`` with b the inner dims -> ``[a]``; ``[1]`` if nothing is left. The rest as `map`.
        """
        from tvm_axe.stream.operators.higher import Accum

        return self.program.add(Accum(function, rank, compute, writes), [self, *others], name)[0]

    def scan(
        self,
        function: TileFunction,
        *others: Stream,
        rank: int = 1,
        compute: int | None = None,
        writes: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Scan: as `accum`, but send each state.

        Shape: unchanged.
        """
        from tvm_axe.stream.operators.higher import Scan

        return self.program.add(Scan(function, rank, compute, writes), [self, *others], name)[0]

    def flat_map(
        self,
        function: Callable[[Any], Any],
        type: StreamType | Callable[[DataType], StreamType],
        cycles: int = 0,
        name: str | None = None,
    ) -> Stream:
        """FlatMap: `function` makes a tensor of each element, nested lists of `type.rank`.

        Shape: ``[a]`` -> ``[a, type.shape]``, flattened afterwards where one wants it.

        Parameters
        ----------
        function : Callable
            A function of the element's value. In runs without values a tile is its (rows, columns), and what a function
            made for one unit may be taken for another one that is alike.
        type : StreamType or Callable
            The type of what it returns, or a function to it from the type of the elements, so that programs can be
            rewritten to other tiles.
        cycles : int
            The cycles that each element of the result takes.
        """
        from tvm_axe.stream.operators.higher import FlatMap

        return self.program.add(FlatMap(function, type, cycles), [self], name)[0]

    # ---- Shapes

    def flatten(self, inner: int = 0, outer: int = 1, name: str | None = None) -> Stream:
        """Flatten: make one dim of the dims from `inner` to `outer`, counted from the innermost, 0.

        Shape: ``[a, d_outer, .., d_inner, b]`` -> ``[a, d, b]``.
        """
        from tvm_axe.stream.operators.shape import Flatten

        return self.program.add(Flatten(inner, outer), [self], name)[0]

    @overload
    def reshape(self, size: int | None, level: int = 0, pad: None = None, name: str | None = None) -> Stream: ...

    @overload
    def reshape(self, size: int, level: int = 0, *, pad: object, name: str | None = None) -> tuple[Stream, Stream]: ...

    def reshape(
        self, size: int | None, level: int = 0, pad: Any = None, name: str | None = None
    ) -> Stream | tuple[Stream, Stream]:
        """Reshape: split a dim, counted from the innermost, into pieces of `size`.

        Shape: ``[a, d, b]`` -> ``[a, ceil(d / size), size, b]``. Without `pad` the last piece may be shorter, and the
        inner dim is ragged unless d is a multiple; with it the piece is filled up with `pad`, and a second stream of
        the same shape says what is padding (1) and what not (0). A size of None makes one piece of all there is, none
        of nothing.
        """
        from tvm_axe.stream.operators.shape import Reshape

        outputs = self.program.add(Reshape(size, level, pad), [self], name)
        return outputs[0] if pad is None else (outputs[0], outputs[1])

    def promote(self, level: int | None = None, name: str | None = None) -> Stream:
        """Promote: insert a dim of 1 outside of the `level` inner dims; the outermost by default.

        Shape: ``[a, b]`` -> ``[a, 1, b]``.
        """
        from tvm_axe.stream.operators.shape import Promote

        return self.program.add(Promote(self.type.rank if level is None else level), [self], name)[0]

    def expand(self, like: Stream, name: str | None = None) -> Stream:
        """Expand: repeat each element for all the elements of `like` that it stands for.

        Shape: ``[a]`` and ``[a, b]`` -> ``[a, b]``.
        """
        from tvm_axe.stream.operators.shape import Expand

        return self.program.add(Expand(), [self, like], name)[0]

    def zip(self, *others: Stream, name: str | None = None) -> Stream:
        """Zip: send together what comes together.

        Shape: all the same, which is the result's; of tuples.
        """
        from tvm_axe.stream.operators.shape import Zip

        return self.program.add(Zip(), [self, *others], name)[0]


class Node:
    """An operator in a program: who feeds it and what it sends."""

    def __init__(self, program: StreamProgram, operator: Operator, name: str, inputs: list[Stream]) -> None:
        self.program, self.operator, self.name, self.inputs = program, operator, name, inputs
        self.outputs: tuple[Stream, ...] = ()

    @property
    def kind(self) -> str:
        """The operator's kind, as the paper writes it."""
        return self.operator.kind

    @functools.cached_property
    def likeness(self) -> int | None:
        """A number that the program's operators have in common which are alike; None of one that is like no other.

        See `Operator.likeness`.
        """
        # What feedback carries is known only when it is closed.
        if any(stream.node.kind == "Feedback" for stream in self.inputs):
            return None
        known, found = self.program.likenesses, self.operator.likeness(self)
        try:
            return None if found is None else known.setdefault(found, len(known))
        except TypeError:  # a user's function or padding that isn't hashable
            return None

    def symbol(self, suffix: str = "") -> sympy.Symbol:
        """Return a new symbol for a size that this node determines when it runs."""
        return symbol(f"{self.name}{suffix}")

    def fail(self, message: str) -> StreamError:
        """Return the error that says `message` of this node."""
        return StreamError(f"{self.kind} {self.name!r}: {message}")
