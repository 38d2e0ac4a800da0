"""Functions by the type of what they take: how each role of a target finds the one for a node.

A table has an entry a type, so that a new node is one entry more in each, and none is met that nobody thought of:

>>> area = TypeTable("areas", {int: lambda side: side * side})
>>> area.of(3)(3)
9
>>> area.of("3")
Traceback (most recent call last):
...
TypeError: areas: no entry for str; there are entries for int
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

Function = TypeVar("Function")


class TypeTable(Generic[Function]):
    """A function, or something else, for each of some types.

    Parameters
    ----------
    role : str
        What the functions are for, which an error names first.
    entries : mapping from type to Function
        The function for each type itself; those derived from it have entries of their own.
    """

    def __init__(self, role: str, entries: Mapping[type, Function]) -> None:
        self.role = role
        self._entries = dict(entries)

    @property
    def types(self) -> frozenset[type]:
        """The types that have an entry."""
        return frozenset(self._entries)

    def of(self, value: Any) -> Function:
        """The function for a value.

        Raises
        ------
        TypeError
            The value's type has no entry.
        """
        found = self._entries.get(type(value))
        if found is None:
            names = ", ".join(sorted(known.__name__ for known in self._entries))
            raise TypeError(f"{self.role}: no entry for {type(value).__name__}; there are entries for {names}")
        return found
