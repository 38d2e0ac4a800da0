"""Programs of streams: built by calls that read as a dataflow graph, each of which checks its shape rule at once.

>>> from tvm_axe.stream import Accelerator, StreamProgram, StreamType, Tile, functions
>>> p = StreamProgram("double")
>>> x = p.input("x", StreamType((2, 3), Tile(1, 4)))
>>> print(x.map(functions.add(), x).accum(functions.sum_tiles()).output("y"))
[2] of Tile(1, 4, float32)

A program holds no state of a run: `StreamProgram.run` can be called again with other inputs, accelerators and tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvm_axe.errors import StreamError
from tvm_axe.notebook import with_picture
from tvm_axe.stream.graph import Node, Stream, Tensor
from tvm_axe.stream.loops import Feedback, Loop
from tvm_axe.stream.types import Size, StreamType, Tile

if TYPE_CHECKING:
    from tvm_axe.stream.memory import Accelerator
    from tvm_axe.stream.operators.base import Operator
    from tvm_axe.stream.report import Report
    from tvm_axe.stream.views import View
    from tvm_axe.stream.wiring import Wiring

__all__ = ["Feedback", "Loop", "Node", "Stream", "StreamProgram", "Tensor"]


class StreamProgram:
    """A dataflow graph of operators and the streams between them.

    Parameters
    ----------
    name : str
        The name in messages and pictures.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.tensors: dict[str, Tensor] = {}
        self.likenesses: dict[Hashable, int] = {}
        # Units and channels of its runs, and the depths and readers of streams that they are of (`wiring.wiring_of`).
        self.wired: tuple[list[tuple[int | None, bool, int]], Wiring] | None = None
        self._numbers: dict[str, int] = {}
        self._names: set[str] = set()

    def stream(self, name: str) -> Stream:
        """Return the stream of that name: its operator's, with the number of the output if that has several.

        Raises
        ------
        StreamError
            If there is none.
        """
        for node in self.nodes:
            for stream in node.outputs:
                if stream.name == name:
                    return stream
        raise StreamError(f"program {self.name!r} has no stream {name!r}; printing it shows what it has")

    def tensor(self, name: str, rows: Size, columns: Size, dtype: str = "float32") -> Tensor:
        """Declare a matrix in off-chip memory."""
        if name in self.tensors or any(node.name == name and node.kind == "Input" for node in self.nodes):
            raise StreamError(f"program {self.name!r} has a tensor or an input {name!r} already")
        self.tensors[name] = Tensor(name, rows, columns, dtype)
        return self.tensors[name]

    def input(self, name: str, type: StreamType) -> Stream:
        """Return a stream that is given when the program runs, one element a cycle: routing, lengths, addresses."""
        from tvm_axe.stream.operators.endpoints import Input

        return self.add(Input(type), [], name)[0]

    def load(
        self, tensor: Tensor, tile: tuple[int, int] | Tile, view: View | None = None, name: str | None = None
    ) -> Stream:
        """LinearOffChipLoad: load tiles of a tensor, row by row, or an affine view of them.

        Shape: ``[rows / tile rows, columns / tile columns]``, or the view's. A `Tile` instead of its shape can have a
        layout, whose bank conflicts slow down what reads it (`Accelerator.banked`).
        """
        from tvm_axe.stream.operators.off_chip import LinearLoad

        return self.add(LinearLoad(tensor, tile, view), [], name)[0]

    def reassemble(
        self,
        streams: Sequence[Stream],
        selector: Stream,
        rank: int = 0,
        in_order: bool = False,
        name: str | None = None,
    ) -> Stream:
        """Reassemble: for each selector, take a tensor of the `rank` inner dims from each of the streams that it names.

        Each is taken whole, the one that comes first before the others.

        Shape: ``[D_i, b]`` and selectors ``[a]`` -> ``[a, number selected, b]``.

        Parameters
        ----------
        in_order : bool
            Whether to wait until all that are selected have something, as the paper's simulator does.
        """
        from tvm_axe.stream.operators.routing import Reassemble

        return self.add(Reassemble(rank, in_order), [*streams, selector], name)[0]

    def eager_merge(self, streams: Sequence[Stream], name: str | None = None) -> tuple[Stream, Stream]:
        """EagerMerge: take whatever comes first, whole tensors of all but the outermost dim; say where it came from.

        Shape: ``[D_i, b]`` -> ``[sum of D_i, b]``, and selectors ``[sum of D_i]``.
        """
        from tvm_axe.stream.operators.routing import EagerMerge

        data, selector = self.add(EagerMerge(), list(streams), name)
        return data, selector

    def feedback(self, name: str, type: StreamType, capacity: int, initial: Sequence[Any] = ()) -> Feedback:
        """Return a stream of rank 1 to be used now; `Feedback.close` says later what it carries.

        Parameters
        ----------
        capacity : int
            Tokens that the channel holds.
        initial : Sequence
            Values that are in it at the start, before what it carries.
        """
        if len(initial) > capacity or capacity < 1 or type.rank != 1:
            raise StreamError(
                f"feedback {name!r}: a stream of rank 1 and at most capacity={capacity} initial values, not "
                f"{len(initial)} of rank {type.rank}"
            )
        return Feedback(self, name, type, capacity, initial)

    def add(self, operator: Operator, inputs: list[Stream], name: str | None = None) -> tuple[Stream, ...]:
        """Put an operator into the graph and return what it sends.

        Raises
        ------
        StreamError
            If the inputs break its shape rule, or the name is taken.
        """
        if name is None:
            name = self.new_name(operator.label)
        node = Node(self, operator, name, inputs)
        if name in self._names or (operator.kind == "Input" and name in self.tensors):
            raise node.fail(f"program {self.name!r} has an operator, or a tensor, of that name already")
        self._names.add(name)
        for stream in inputs:
            if stream.program is not self:
                raise node.fail(f"stream {stream.name!r} belongs to program {stream.program.name!r}, not {self.name!r}")
        types = operator.types(node, [stream.type for stream in inputs])
        stored = operator.stored([stream.stored for stream in inputs])
        node.outputs = tuple(Stream(node, number, type, stored) for number, type in enumerate(types))
        for stream in inputs:
            stream.consumers.append(node)
        self.nodes.append(node)
        return node.outputs

    def new_name(self, label: str) -> str:
        """Return the first name that no operator has, of those that are a label and a number."""
        while True:
            number = self._numbers[label] = self._numbers.get(label, -1) + 1
            if f"{label}{number}" not in self._names:
                return f"{label}{number}"

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        accelerator: Accelerator | None = None,
        values: bool = True,
        trace: bool = False,
        max_cycles: int | None = None,
    ) -> Report:
        """Compute the program, simulate it on an accelerator, or both.

        Parameters
        ----------
        inputs : Mapping
            The nested lists of values of each input stream, and an array for each tensor that is loaded; arrays aren't
            needed without values.
        accelerator : Accelerator, optional
            The accelerator that is simulated; without, the run computes and takes no time.
        values : bool
            Whether to compute tiles; without, they have shapes only, which is much faster.
        trace : bool
            Whether to keep when each unit worked.
        max_cycles : int, optional
            The cycles that the accelerator may take; by default any number.

        Returns
        -------
        Report
            Results and counters.

        Raises
        ------
        StreamError
            If an output isn't connected, an input is missing or doesn't fit, a function fails or returns something else
            than its type says, values are left that nobody takes, a tensor isn't stored whole, a buffer is larger than
            the on-chip memory, operators wait for each other, or `max_cycles` have passed.
        """
        from tvm_axe.stream.running import run

        if not isinstance(inputs, Mapping | None):
            raise StreamError(f"program {self.name!r}: inputs are a mapping from name to values, not {inputs!r}")
        return run(self, dict(inputs or {}), accelerator, values, trace, max_cycles)

    def __str__(self) -> str:
        lines = [f"program {self.name!r}"]
        for node in self.nodes:
            taken = ", ".join(stream.name for stream in node.inputs)
            sent = "; ".join(map(str, node.outputs))
            lines.append(f"  {node.name} = {node.kind}({taken})" + (f": {sent}" if sent else ""))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from tvm_axe.stream.draw import graph_svg

        return with_picture(graph_svg(self), str(self))
