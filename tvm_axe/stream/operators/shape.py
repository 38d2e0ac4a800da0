"""Flatten, Reshape, Promote, Expand and Zip: the same values, other stops."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import sympy

from tvm_axe.stream.codec import EMPTY, Token
from tvm_axe.stream.engine import Process, Unit
from tvm_axe.stream.operators.base import Operator, forms, pipe, transform
from tvm_axe.stream.types import Dim, Scalar, StreamType, Tuple, as_size, count, merged, shapes_differ
from tvm_axe.stream.values import value_check

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node


class Flatten(Operator):
    """See `Stream.flatten`."""

    kind = "Flatten"

    def __init__(self, inner: int, outer: int) -> None:
        self.inner, self.outer = inner, outer

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        shape, rank = inputs[0].shape, inputs[0].rank
        if not 0 <= self.inner < self.outer < rank:
            raise node.fail(
                f"inner={self.inner} and outer={self.outer} must be dims, 0 to {rank - 1} from the innermost, in that "
                f"order: {inputs[0]}"
            )
        first, last = rank - 1 - self.outer, rank - 1 - self.inner
        one = merged(shape[first : last + 1], outermost=first == 0)
        return [StreamType((*shape[:first], one, *shape[last + 1 :]), inputs[0].data)]

    def likeness(self, node: Node) -> Hashable:
        return self.kind, self.inner, self.outer, forms(node.inputs)

    def process(self, node: Node, unit: Unit) -> Process:
        inner, outer = self.inner, self.outer
        lost = outer - inner
        opened = False  # whether the innermost list that is kept, one of rank `inner`, has begun
        emptied = False  # whether the list that the dims become has nothing but empty lists in it, so that it is unseen

        def step(value: Any, stop: int) -> tuple[int, list[Token]]:
            nonlocal opened, emptied
            if stop <= inner:
                opened, emptied = stop < inner, False
                return 0, [(value, stop)]
            kept = stop - lost if stop > outer else inner
            if value is not EMPTY:
                opened = emptied = False
                return 0, [(value, kept)]
            made: list[Token] = []
            if kept == inner:
                if opened and inner:
                    made.append((EMPTY, inner))
                else:
                    emptied = True
            else:
                if emptied and kept > inner + 1:
                    made.append((EMPTY, inner + 1))
                emptied = False
                made.append((EMPTY, kept))
            opened = False
            return 0, made

        return transform(unit, step)


class Reshape(Operator):
    """See `Stream.reshape`."""

    kind = "Reshape"

    def __init__(self, size: int | None, level: int, pad: Any) -> None:
        self.size, self.level, self.pad = size, level, pad

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        (type,) = inputs
        if self.size is None and self.pad is not None:
            raise node.fail("one piece of everything, size=None, needs no pad")
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise node.fail(f"size={self.size!r} must be a positive number known when the program is built")
        if not 0 <= self.level < type.rank:
            raise node.fail(f"level={self.level} must be one of 0 to {type.rank - 1}, from the innermost dim: {type}")
        if self.pad is not None and self.level:
            raise node.fail(f"only the innermost dim, level 0, can be filled up, not level {self.level}")
        at = type.rank - 1 - self.level
        dim = type.shape[at]
        if dim.ragged:
            pieces = Dim(node.symbol("_pieces"), ragged=True)
        elif self.size is None:
            pieces = Dim(min(1, dim.size) if isinstance(dim.size, int) else sympy.Min(1, dim.size, evaluate=False))
        else:
            pieces = Dim(as_size("pieces", sympy.ceiling(dim.size / sympy.Integer(self.size)), least=0))
        whole = self.pad is not None or (self.size is not None and not dim.ragged and dim.size % self.size == 0)
        # The sizes of the pieces add up to the dim's, times what is outside of it.
        rest = Dim(self.size) if whole and self.size is not None else Dim(_total(node, type, at), ragged=True)
        shape = (*type.shape[:at], pieces, rest, *type.shape[at + 1 :])
        padding = [] if self.pad is None else [StreamType(shape, Scalar("int8"))]
        return [StreamType(shape, type.data), *padding]

    def likeness(self, node: Node) -> Hashable:
        pad = getattr(self.pad, "shape", self.pad)
        return self.kind, self.size, self.level, pad, type(self.pad), forms(node.inputs)

    def process(self, node: Node, unit: Unit) -> Process:
        if self.pad is not None:
            return self._padded(unit)
        size, level = self.size, self.level
        found = 0
        opened = False  # whether something is in the list of rank `level` that is under way

        def step(value: Any, stop: int) -> tuple[int, tuple[Token, ...]]:
            nonlocal found, opened
            if stop < level:
                opened = True
                return 0, ((value, stop),)
            empty, opened = value is EMPTY and not opened, False
            if stop > level:
                found = 0
                return 0, ((value, stop + 1),)
            found = found + 1 if size is None else (found + 1) % size
            if empty and not found:
                return 0, ((EMPTY, level), (EMPTY, level + 1))
            return 0, ((value, level if found else level + 1),)

        return transform(unit, step)

    def _padded(self, unit: Unit) -> Process:
        (source,), (data, padding) = unit.inputs, unit.outputs
        assert self.size is not None
        pad = self.pad if unit.engine.values else getattr(self.pad, "shape", self.pad)
        fault = value_check(source.wire.type.data, unit.engine.values)(pad)
        if fault is not None:
            raise unit.fail(f"pad must be {source.wire.type.data}, not {fault}")
        found = 0
        while True:
            value, stop = yield from unit.peek(source)
            made: list[tuple[Any, int]] = []
            if value is not EMPTY:
                made.append((value, 0))
                found += 1
            missing = -found % self.size if stop else 0
            made += [(pad, 1)] * missing
            ends = stop + 1 if stop else int(found == self.size)
            if ends:
                found = 0
            if not made:
                made.append((EMPTY, 0))
            for number, (item, mark) in enumerate(made, start=1):
                after = ends if number == len(made) else 0
                for sink, sent in ((data, item), (padding, item if item is EMPTY else mark)):
                    unit.send(sink, sent, after)
            unit.free(source)
            if stop == source.rank:
                return


class Promote(Operator):
    """See `Stream.promote`."""

    kind = "Promote"

    def __init__(self, level: int) -> None:
        self.level = level

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        (type,) = inputs
        if not 0 <= self.level <= type.rank:
            raise node.fail(f"level={self.level} must be between 0 and the stream's rank, {type.rank}: {type}")
        at = type.rank - self.level
        return [StreamType((*type.shape[:at], Dim(1), *type.shape[at:]), type.data)]

    def likeness(self, node: Node) -> Hashable:
        return self.kind, self.level, forms(node.inputs)

    def process(self, node: Node, unit: Unit) -> Process:
        level = self.level
        opened = False  # whether something is in the list of rank `level` that is under way

        def step(value: Any, stop: int) -> tuple[int, tuple[Token, ...]]:
            nonlocal opened
            if stop < level:
                opened = True
                return 0, ((value, stop),)
            empty = value is EMPTY and stop == level and not opened and level > 0
            opened = False
            return 0, ((EMPTY, level), (EMPTY, level + 1)) if empty else ((value, stop + 1),)

        return transform(unit, step)


class Expand(Operator):
    """See `Stream.expand`."""

    kind = "Expand"

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        type, like = inputs
        if type.rank >= like.rank or shapes_differ(type.shape, like.shape[: type.rank]):
            raise node.fail(f"the dims of {type} must be the outer ones of what it is expanded to, {like}")
        return [StreamType(like.shape, type.data)]

    def likeness(self, node: Node) -> Hashable:
        return self.kind, forms(node.inputs)

    def stored(self, inputs: list[bool]) -> bool:
        return inputs[0]

    def process(self, node: Node, unit: Unit) -> Process:
        (source, like), (sink,) = unit.inputs, unit.outputs
        rank = like.rank - source.rank
        value: Any = EMPTY  # what is repeated; EMPTY between the tensors of `like`
        while True:
            mark, stop = yield from unit.peek(like)
            if value is EMPTY and (mark is not EMPTY or stop <= rank):
                while value is EMPTY:
                    value, ends = yield from unit.peek(source)
                    if value is EMPTY and ends == source.rank:
                        raise unit.fail(f"the stream that is expanded has ended, and {like.wire.source!r} goes on")
                    if value is EMPTY:
                        unit.free(source)
            unit.send(sink, EMPTY if mark is EMPTY else value, stop)
            unit.free(like)
            if stop >= rank and value is not EMPTY:
                unit.free(source)
                value = EMPTY
            if stop == like.rank:
                return


class Zip(Operator):
    """See `Stream.zip`."""

    kind = "Zip"

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        for other in inputs[1:]:
            if shapes_differ(inputs[0].shape, other.shape):
                raise node.fail(f"its inputs must have the same shape, and these are {inputs[0]} and {other}")
        if len(inputs) < 2:
            raise node.fail("it takes at least two streams")
        return [StreamType(inputs[0].shape, Tuple(tuple(type.data for type in inputs)))]

    def likeness(self, node: Node) -> Hashable:
        return self.kind, forms(node.inputs)

    def process(self, node: Node, unit: Unit) -> Process:
        return pipe(unit, lambda value, stop: (0, ((value, stop),)))


def _total(node: Node, type: StreamType, at: int) -> Any:
    """Return the size of a dim, added up over the dims outside of it, as a symbol if that is known already."""
    size = count(type.shape[: at + 1])
    return node.symbol("_total") if isinstance(size, int) else size
