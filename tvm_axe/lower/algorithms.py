"""Which algorithm each collective of a lowered program takes, in words: what a table says of its bytes, and why."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm_axe.collective.choice import Table
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.side import BESIDE
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.lower.calls import Tensor
from tvm_axe.lower.lowered import Lowered

__all__ = ["described"]


def described(lowered: Lowered, table: Table, way: Callable[[str], str]) -> list[str]:
    """Return a line for each collective, and one on where the table is from; none where there is no collective.

    Parameters
    ----------
    lowered : Lowered
        The program.
    table : Table
        That of the devices.
    way : Callable[[str], str]
        How collectives along a mesh axis go, if not by the table (`Workers.way`).
    """
    found: dict[str, None] = {}
    for call in lowered.calls:
        name = call.function.removeprefix("axe.").removesuffix(BESIDE)
        if name not in VIEWS or call.stage is None:
            continue
        source, target, *_ = call.arguments
        assert isinstance(source, Tensor) and isinstance(target, Tensor)  # as emitted
        axis, dtype = str(call.arguments[-1]), lowered.buffers[(source, target)[VIEWS[name][1]].buffer].dtype
        nbytes = dtype_bytes(dtype, max(math.prod(source.slab), math.prod(target.slab)))
        what = f"{lowered.stages[call.stage].name}: {name} of {nbytes:,} bytes over {axis}"
        if way(axis):
            found[f"{what}: {way(axis)}"] = None
            continue
        algorithm = table.chosen(name, nbytes, in_place=source.buffer == target.buffer)
        found[f"{what}: {algorithm} ({table.row(name)})"] = None
    return [*found, f"by the table from {table.source}"] if found else []
