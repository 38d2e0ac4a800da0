"""Objects of the runtime that programs leave on a worker between calls, such as a cache: known by number.

A program keeps one by `axe.keep`, another, or the same again, takes it by `axe.kept`; and the controller has functions
of the runtime called with them.

>>> objects = Objects()
>>> objects.keep(3, "a cache")
>>> objects.kept(3)
'a cache'
>>> objects.drop(3)
>>> objects.kept(3)
Traceback (most recent call last):
KeyError: 'no program has kept an object 3 on this worker'
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

__all__ = ["ANSWER", "Objects", "Plain", "answered", "plain"]

ANSWER = 128
"""Bytes of the text of what a function of the runtime returned."""
Plain = int | float | str | tuple[int, ...] | None
"""What such a function is called with beside objects."""


class Objects:
    """The objects of a worker."""

    def __init__(self) -> None:
        self._all: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self._all)

    def keep(self, number: int, value: Any) -> None:
        """Keep an object in the place of a number."""
        self._all[number] = value

    def kept(self, number: int) -> Any:
        """Return what was kept there."""
        if number not in self._all:
            raise KeyError(f"no program has kept an object {number} on this worker")
        return self._all[number]

    def drop(self, number: int) -> None:
        """Let go of what was kept there, if anything was."""
        self._all.pop(number, None)

    def clear(self) -> None:
        """Let go of all."""
        self._all.clear()

    def apply(self, function: str, said: Sequence[Any], answer: np.ndarray) -> None:
        """Call a global function, and write what it returns to `answer`, in JSON.

        Parameters
        ----------
        function : str
            Its name.
        said : sequence
            Of each argument, the number of an object in a list, or ``{"is": value}``; a list as a value is a shape.
        answer : ndarray
            `ANSWER` bytes.
        """
        found = tvm.get_global_func(function, allow_missing=True)
        if found is None:
            raise KeyError(f"the runtime has no function {function!r}")
        result = found(*(self.kept(each[0]) if isinstance(each, list) else plain(each["is"]) for each in said))
        if not isinstance(result, int | float | None):
            raise TypeError(f"{function} returned a {type(result).__name__}; only numbers come back from a mesh")
        text = json.dumps(result).encode().ljust(ANSWER)
        answer[:] = np.frombuffer(text, "uint8")


def plain(value: Any) -> Any:
    """Return what a function of the runtime takes for a value: sequences of integers are shapes there."""
    return tvm_ffi.Shape([int(each) for each in value]) if isinstance(value, list | tuple) else value


def answered(answer: np.ndarray) -> int | float | None:
    """Return what was written to an answer."""
    found: int | float | None = json.loads(answer.tobytes().decode())
    return found
