"""Streams that come back: feedback, and loops that run as often as their data say.

A loop's body is a graph of the usual operators. Here each number is halved until it is 1:

>>> from tvm_axe.stream import Scalar, StreamProgram, StreamType, functions
>>> p = StreamProgram("halve")
>>> loop = p.input("x", StreamType((3,), Scalar())).loop(capacity=3)
>>> half = loop.stream.map(functions.number("half", lambda n: n // 2))
>>> done = loop.close(half, half.map(functions.number("more", lambda n: n > 1))).output("y")
>>> print(half, "|", done)
[Loop0_rounds, ~Loop0_left] of Scalar(int64) | [3] of Scalar(int64)
>>> report = p.run({"x": [16, 2, 5]})
>>> report.outputs["y"], report.bindings[symbol("Loop0_rounds")], report.bindings[symbol("Loop0_left")]
([1, 1, 1], 4, 7)

Why loops are as they are: docs/decisions/0077-loops-of-streams.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm_axe.stream.operators.endpoints import FeedbackEdge
from tvm_axe.stream.operators.loops import LoopEnd, LoopHead
from tvm_axe.stream.types import StreamType, as_size, data_differ, ragged, symbol

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Stream
    from tvm_axe.stream.program import StreamProgram

__all__ = ["Feedback", "Loop"]


class Feedback:
    """A stream that is used before what it carries is made; see `StreamProgram.feedback`."""

    def __init__(
        self, program: StreamProgram, name: str, type: StreamType, capacity: int, initial: Sequence[Any] = ()
    ) -> None:
        operator = FeedbackEdge(type, tuple(initial))
        (self.stream,) = program.add(operator, [], name)
        self.stream.depth = capacity
        operator.feedback = self

    def close(self, stream: Stream) -> None:
        """Connect the stream that the feedback carries.

        Raises
        ------
        StreamError
            If that is another type of stream, or one is connected already.
        """
        node = self.stream.node
        if node.inputs:
            raise node.fail(f"it carries {node.inputs[0].name!r} already")
        kept, wanted = stream.type, self.stream.type
        if kept.rank != wanted.rank or data_differ(kept.data, wanted.data):
            raise node.fail(f"it was made for {wanted}, and {stream.name!r} is {kept}")
        node.inputs = [stream]
        stream.consumers.append(node)


class Loop:
    """A body that elements go through until it says of them that they are done; see `Stream.loop`.

    Attributes
    ----------
    stream : Stream
        What goes into the body: ``[a, rounds, left]`` for ``[a, b]`` that enters.
    """

    def __init__(self, entering: Stream, capacity: int, most: int | None, name: str | None) -> None:
        program = entering.program
        self.name = name or program.new_name(LoopHead.kind)
        as_size(f"loop {self.name!r}: capacity", capacity)
        head = LoopHead(None if most is None else int(as_size(f"loop {self.name!r}: most", most)))
        # One round after the other, also of different lists; the token besides is the end of one.
        back = StreamType((symbol(f"{self.name}_back_rounds"), ragged(f"{self.name}_back")), entering.type.data)
        self._back = Feedback(program, f"{self.name}_back", back, capacity + 1)
        (self.stream,) = program.add(head, [entering, self._back.stream], self.name)

    def close(self, state: Stream, again: Stream) -> Stream:
        """Connect what the body makes: the elements as they are after a round, and which of them go on.

        Shape: both ``[a, rounds, left]`` -> ``[a, b]`` of the elements that don't go on, those of a list in the order
        in which they end, and those that end in the same round in theirs. A body that makes several elements of one, or
        none, has another number of them in the innermost dim.

        Parameters
        ----------
        state : Stream
            Elements of the type that entered.
        again : Stream
            A scalar for each: whether it goes around again, not 0, or leaves, 0.

        Raises
        ------
        StreamError
            If they are of other shapes or types, or the loop is closed already.
        """
        done, back = state.program.add(LoopEnd(self.name), [state, again], f"{self.name}_end")
        self._back.close(back)
        return done
