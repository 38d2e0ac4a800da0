"""What a schedule says of itself: its notation, the primitives that were applied, and its trace."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_axe.schedule.schedule import Schedule

__all__ = ["described"]

_LOWERING = "tvm_axe.pipeline", "lowered_for"
"""Who knows a schedule's notation: by name, as it is above."""


def described(sch: Schedule) -> str:
    """Return the schedule in words; where it can't be lowered as it is, the reason takes the notation's place."""
    ((variable, func),) = sch.mod.functions_items()
    module, function = _LOWERING
    try:
        _, lowered = getattr(import_module(module), function)(func, sch.mesh)
        head, first = lowered.name, lowered.notation
    except Exception as error:  # of any kind: who looks at a schedule isn't to be stopped by what it lacks
        head, first = str(variable.name_hint), f"not to be lowered as it is: {error}"
    primitives = ", ".join(applied.name for applied in sch.applied) or "none yet"
    return f"schedule of {head} on mesh {sch.mesh}: {first}\n\nprimitives: {primitives}\n\n{sch.trace}"
