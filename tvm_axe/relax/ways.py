"""What a way to run an operator on the devices of a mesh axis is."""

from __future__ import annotations

from typing import NamedTuple

from tvm_axe.layout.shares import Share
from tvm_axe.relax.forms import Form, Move

__all__ = ["Stage", "Strategy"]


class Stage(NamedTuple):
    """A reduction inside a function whose terms devices combine before it goes on.

    Attributes
    ----------
    buffer : int
        What it reduces to, by position among the parameters and what is allocated.
    combiner : str
        What with.
    how : Move
        What it takes.
    """

    buffer: int
    combiner: str
    how: Move


class Strategy(NamedTuple):
    """One way to run an operator.

    Attributes
    ----------
    ins, outs : tuple[Form, ...]
        The forms of what it takes and gives.
    seconds : float
        What it takes a device.
    share : float
        Of the operations of products, what a device does.
    assigned : tuple
        Which factors are shared, and how, as (factors, share) pairs.
    stages : tuple[Stage, ...]
        What is combined inside.
    """

    ins: tuple[Form, ...]
    outs: tuple[Form, ...]
    seconds: float = 0.0
    share: float = 1.0
    assigned: tuple[tuple[tuple[str, ...], Share], ...] = ()
    stages: tuple[Stage, ...] = ()
