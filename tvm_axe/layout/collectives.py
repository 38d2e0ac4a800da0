"""The collectives that devices of a mesh axis take part in, each with its names.

>>> Collective.REDUCE_SCATTER.operation, Collective.REDUCE_SCATTER.letters, str(Collective.REDUCE_SCATTER)
('reduce_scatter', 'RS', 'reduce-scatter')
>>> Collective("all-gather") is Collective.ALL_GATHER
True
"""

from __future__ import annotations

import enum

__all__ = ["Collective"]


class Collective(str, enum.Enum):
    """What devices of a mesh axis do together; as a string it is its name in stages, traces and saved files."""

    ALL_REDUCE = "all-reduce"
    """Everyone gets the sum of all slabs."""
    REDUCE_SCATTER = "reduce-scatter"
    """Each gets its block of the sum."""
    ALL_GATHER = "all-gather"
    """Everyone gets all blocks, joined."""
    ALL_TO_ALL = "all-to-all"
    """Each gets a block of everyone's: what was cut along one dimension is cut along another."""
    REDUCE = "reduce"
    """One device gets the sum."""
    BROADCAST = "broadcast"
    """Everyone gets what one device has."""
    SEND = "send"
    """Each gets the slab of the peer that is so many places before it."""

    @property
    def operation(self) -> str:
        """The name that engines and the planner of redistributions give it; ``axe.all_reduce`` is a worker's."""
        return _OPERATIONS[self]

    @property
    def letters(self) -> str:
        """CoCoNet's name (Jangda et al., ASPLOS 2022, section 6), and A2A for the one that it hasn't."""
        return _LETTERS[self]

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


_OPERATIONS = {collective: collective.value.replace("-", "_") for collective in Collective}
_LETTERS = dict(zip(Collective, ("AR", "RS", "AG", "A2A", "R", "B", "P2P"), strict=True))
