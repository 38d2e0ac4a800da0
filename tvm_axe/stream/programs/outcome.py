"""What simulating a program comes to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Outcome"]


@dataclass(frozen=True)
class Outcome:
    """The figures of a simulation that are compared with published results.

    Attributes
    ----------
    cycles : int
        Cycles until the last result is stored.
    off_chip : int
        Bytes loaded and stored, as the published simulations count them.
    on_chip : int or None
        Bytes of on-chip memory needed, as the published simulations count them, where they do.
    flops : int
        FLOPs of all the units.
    """

    cycles: int
    off_chip: int
    on_chip: int | None
    flops: int
