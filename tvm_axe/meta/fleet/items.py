"""What is to be done by a job's servers: each item by any of them, once more if its server is lost, and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["Items", "Outcome"]


class Outcome(NamedTuple):
    """What became of an item: on which machine and on which scale, and a result, or why there is none."""

    machine: str
    scale: float
    result: Any
    failure: str | None = None


class Items:
    """Items of one kind; each is to do, in somebody's hands, or done.

    Parameters
    ----------
    kind
        The kind of work (`tvm_axe.meta.fleet.session`); empty if there is no more to do than to be prepared.
    items
        What it takes.
    """

    def __init__(self, kind: str, items: Sequence[Any]) -> None:
        self.kind, self.items = kind, items
        self._todo = deque(range(len(items)))
        self._lost: dict[int, str] = {}
        self.done: dict[int, Outcome] = {}

    @property
    def left(self) -> int:
        """How many are to do and in nobody's hands."""
        return len(self._todo)

    def take(self, most: int) -> list[int]:
        """The numbers of some items, which are in the caller's hands then; one that was lost goes alone."""
        taken: list[int] = []
        while self._todo and len(taken) < most:
            if self._todo[0] in self._lost and taken:
                break
            taken.append(self._todo.popleft())
            if taken[0] in self._lost:
                break
        return taken

    def lose(self, numbers: Sequence[int], machine: str, reason: str) -> None:
        """Have items whose server is lost be done by another one; those that were lost before have failed."""
        again = []
        for number in numbers:
            here = f"{machine}: {reason}"
            if number in self._lost:
                failure = f"lost twice with its server; {self._lost[number]}; {here}"
                self.done[number] = Outcome(machine, 1.0, None, failure)
            else:
                self._lost[number] = here
                again.append(number)
        self._todo.extendleft(reversed(again))
