"""What units that are alike do of equal streams is found out once a run.

The experts of a layer are the same operators in the same order, and many of them get as many tokens. In a run without
values those are equal, so that what one unit writes down, sends and counts is what another one would. A unit's steps
name its ports, not its channels (`tvm_axe.stream.steps`), so they are copied as they are.

That is for units that get all that they will ever get before they begin, and then go on to their end.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from tvm_axe.stream.codec import EMPTY, Token

if TYPE_CHECKING:
    from tvm_axe.stream.engine import Channel, Unit

MOST = 1 << 9
"""Tokens of a stream: longer ones are rarely equal, and to find that out takes as long as to work on them."""


class Whole:
    """A stream from its beginning to its end: in a run the same object for equal ones.

    Attributes
    ----------
    tokens : tuple[Token, ...]
        The stream.
    """

    __slots__ = ("tokens",)

    def __init__(self, tokens: tuple[Token, ...]) -> None:
        self.tokens = tokens


class Done:
    """What a unit has done of whole streams.

    Attributes
    ----------
    script : array[int]
        The steps that it wrote down.
    sent : list[Whole]
        What it sent to each output.
    flops, read : int
        FLOPs that it computed, and bytes that it loaded.
    """

    __slots__ = ("flops", "read", "script", "sent")

    def __init__(self, script: array[int], sent: list[Whole], flops: int, read: int) -> None:
        self.script, self.sent, self.flops, self.read = script, sent, flops, read


class Memo:
    """What the units of a run that are alike have done of which streams."""

    __slots__ = ("_done", "_wholes")

    def __init__(self, wholes: dict[tuple[Token, ...], Whole]) -> None:
        self._wholes = wholes
        self._done: dict[tuple[Whole, ...], Done] = {}

    def streams(self, unit: Unit) -> tuple[Whole, ...] | None:
        """Return what a unit gets that hasn't begun, if all of it is there and another one may get the same."""
        found = []
        for channel in unit.inputs:
            whole = channel.whole or self._whole(channel)
            if whole is None:
                return None
            found.append(whole)
        return tuple(found)

    def repeat(self, unit: Unit, streams: tuple[Whole, ...]) -> bool:
        """Have a unit do what one like it has done of the same; return whether there is one."""
        done = self._done.get(streams)
        if done is None:
            return False
        unit.script.extend(done.script)
        unit.flops, unit.read = done.flops, done.read
        for channel in unit.inputs:
            channel.items.clear()
        for channel, whole in zip(unit.outputs, done.sent):
            channel.items.extend(whole.tokens)
            channel.whole = whole
        return True

    def note(self, unit: Unit, streams: tuple[Whole, ...], start: int) -> None:
        """Note what a unit has done, which has written its steps from `start` on."""
        sent = []
        for channel in unit.outputs:
            channel.whole = whole = self._whole(channel)
            if whole is None:
                return
            sent.append(whole)
        if not any(channel.items for channel in unit.inputs):
            self._done[streams] = Done(unit.script[start:], sent, unit.flops, unit.read)

    def _whole(self, channel: Channel) -> Whole | None:
        """Return the stream that is in a channel, if it is there to its end, and nothing but equal ones equal it."""
        items = channel.items
        if not 0 < len(items) <= MOST or items[-1][1] != channel.rank:
            return None
        tokens = tuple(items)
        different = {id(value): value for value, _ in tokens}  # of tiles without values there are few
        if not all(map(exact, different.values())):
            return None
        found = self._wholes.get(tokens)
        if found is None:
            found = self._wholes[tokens] = Whole(tokens)
        return found


def exact(value: Any) -> bool:
    """Return whether a value is the same as any that it equals: ``1 == True == 1.0``, and ``0.0 == -0.0``."""
    kind = type(value)
    return kind is int or value is EMPTY or (kind is tuple and all(map(exact, value)))
