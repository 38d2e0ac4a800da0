"""Which machines a job is to measure on, and what it asks of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm_axe.defaults import TRACKER_PORT
from tvm_axe.errors import InputError

__all__ = ["Fleet", "address", "fleet_of"]


@dataclass(frozen=True)
class Fleet:
    """Machines that a tracker hands out.

    Attributes
    ----------
    tracker : str
        Where the tracker is, ``"host:port"``; port 9190 if it names none.
    key : str
        What the machines are called there. All of one key should be alike: one that isn't the first's is refused.
    workers : int or None
        How many are used at once at most; None: as many as there are, shared with other jobs evenly.
    drift : float
        The part of its first probe's time that a machine's later ones may differ by, before it is taken out.
    noise : float
        The part of its median time that the middle half of one probe's times may lie apart.
    every : float
        Seconds of measuring between two probes of a machine.
    silent : float
        Seconds without a word after which a machine is taken for lost. Each says once a second that it is there.

    Raises
    ------
    InputError
        If the address is none, the key is empty, or a number isn't positive.
    """

    tracker: str
    key: str
    workers: int | None = None
    drift: float = 0.1
    noise: float = 0.25
    every: float = 120.0
    silent: float = 15.0

    def __post_init__(self) -> None:
        address(self.tracker)
        if not self.key or any(character.isspace() or character == ":" for character in self.key):
            raise InputError(
                f"key: {self.key!r} names no machines; it is what their servers were started with, a word without "
                "spaces and colons: tvm-axe fleet status --tracker ... lists them"
            )
        for name in ("workers", "drift", "noise", "every", "silent"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and not math.isnan(value)):
                raise InputError(f"{name}: it must be positive, not {value}")

    @property
    def address(self) -> tuple[str, int]:
        """The tracker's host and port."""
        return address(self.tracker)


def address(text: str) -> tuple[str, int]:
    """The host and the port that a text names, a tracker's if it names no port.

    Raises
    ------
    InputError
        If it is no address.

    Examples
    --------
    >>> address("10.0.0.1:9000"), address("board")
    (('10.0.0.1', 9000), ('board', 9190))
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(TRACKER_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InputError(f"{text!r} is no address; host:port is needed, such as 127.0.0.1:{TRACKER_PORT}")
    return host, int(port)


def fleet_of(fleet: str | Fleet | None, key: str | None, workers: int | None) -> Fleet | None:
    """The fleet that the arguments of `tvm_axe.tune` name; None if that is none.

    Raises
    ------
    InputError
        If they don't fit each other.
    """
    if isinstance(fleet, str):
        if key is None:
            raise InputError(f"key: name the machines at {fleet} that are to measure; tvm-axe fleet status lists them")
        return Fleet(fleet, key, workers)
    for name, value in (("key", key), ("workers", workers)):
        if value is not None:
            where = "it is for a fleet, which is to be named too" if fleet is None else "it is a field of the Fleet"
            raise InputError(f"{name}: {where}")
    return fleet
