"""Design-space search: simulate a program in all the ways that it can be built or rewritten, and keep the best.

>>> from tvm_axe.stream.explore import Design, front
>>> points = ((1, 90, 8), (2, 50, 9), (4, 60, 20))
>>> a, b, c = (Design({"tile": tile}, cycles, memory, 0, 0.0) for tile, cycles, memory in points)
>>> [design.choices["tile"] for design in front([a, b, c])]
[2, 1]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_axe.errors import StreamError
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.metrics import evaluate, on_chip_memory
from tvm_axe.stream.program import StreamProgram
from tvm_axe.stream.report import Report


@dataclass(frozen=True, eq=False)
class Design:
    """One way to build a program, simulated.

    Attributes
    ----------
    choices : Mapping
        What was chosen, by name.
    cycles : int
        How long it takes.
    on_chip : int
        Bytes of on-chip memory that it needs.
    traffic : int
        Bytes to and from off-chip memory.
    utilization : float
        The part of its units' FLOPs that it uses.
    """

    choices: Mapping[str, Any]
    cycles: int
    on_chip: int
    traffic: int
    utilization: float


def explore(
    build: Callable[..., StreamProgram],
    choices: Mapping[str, Sequence[Any]],
    inputs: Mapping[str, Any] | Callable[..., Mapping[str, Any]],
    accelerator: Accelerator,
    memory: Callable[[StreamProgram, Report], int] | None = None,
) -> list[Design]:
    """Simulate every combination of choices, without values.

    Parameters
    ----------
    build : Callable
        A function from the choices, as keywords, to the program, with its rewrites applied.
    choices : Mapping
        The values of each choice.
    inputs : Mapping or Callable
        The inputs that `StreamProgram.run` takes, or a function that gives them for the choices.
    accelerator : Accelerator
        The accelerator that is simulated.
    memory : Callable, optional
        A function from a program and its run to its bytes on chip; `metrics.on_chip_memory` with the run's bindings by
        default.

    Returns
    -------
    list[Design]
        The designs in the order of the choices. Those that don't fit the accelerator's on-chip memory are left out.

    Raises
    ------
    StreamError
        If no choice is given.
    """
    if not choices:
        raise StreamError("explore: there is nothing to choose from")
    found = []
    for values in itertools.product(*choices.values()):
        chosen = dict(zip(choices, values))
        program = build(**chosen)
        given = inputs(**chosen) if callable(inputs) else inputs
        report = program.run(given, accelerator, values=False)
        needed = memory(program, report) if memory else evaluate(on_chip_memory(program), report.bindings)
        if accelerator.capacity is None or needed <= accelerator.capacity:
            found.append(Design(chosen, report.cycles, needed, report.traffic, report.utilization))
    return found


def front(designs: Sequence[Design]) -> list[Design]:
    """Return the designs that no other beats in cycles without needing more on-chip memory, the fastest first."""
    found: list[Design] = []
    for design in sorted(designs, key=lambda design: (design.cycles, design.on_chip)):
        if not found or design.on_chip < found[-1].on_chip:
            found.append(design)
    return found
