"""Products of an unknown number of rows by tile kernels: for each range of rows one with the parameters for as many.

Every kernel is right for any number of rows, so that ranges are a matter of speed alone, as of schedules
(`tvm_axe.nests.ranges`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tvm import ir, tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.sizes import are_same, unknown_extents
from tvm_axe.analysis.tree import with_functions
from tvm_axe.lower.defaults import takes_kernels, with_kernels
from tvm_axe.nests.default import RANGES, is_unscheduled
from tvm_axe.nests.merging import merged, told
from tvm_axe.nests.representatives import representatives
from tvm_axe.schedule.tiles import choices_in, heights_in

_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of rows for which parameters are, where nobody says others: where the default kernels of known rows change.

Measured on an H200 with every second of them: products of 17 rows took 1.4 to 1.7 times as long as those of known rows,
of 256 up to 1.6, of 1,024 up to 1.45.
"""

__all__ = ["kernels_by_rows", "with_kernels_by_rows"]


def with_kernels_by_rows(
    mod: IRModule, target: Target, values: Mapping[str, Sequence[int]], tuned: Collection[str]
) -> IRModule:
    """The module whose products of unknown rows choose tile kernels, where the target wants that: for each range."""
    if not takes_kernels(target):
        return mod
    found: dict[ir.GlobalVar, tirx.PrimFunc] = {}
    for variable, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc) and str(variable.name_hint) not in tuned and unknown_extents(func):
            own = {rows for each in representatives(func, values, _ROWS).values() for rows in each}
            made = kernels_by_rows(func, target, sorted(own))
            if made is not None:
                found[variable] = made
    return with_functions(mod, found)


def kernels_by_rows(func: tirx.PrimFunc, target: Target, values: Sequence[int]) -> tirx.PrimFunc | None:
    """The function with tile kernels, others for each number of rows; None where a product isn't for kernels.

    Parameters
    ----------
    func : PrimFunc
        The function.
    target : Target
        Resolved.
    values : sequence of int
        The numbers of rows, in their order. A variant is for as many and fewer, the last one for all others.
    """
    if not is_unscheduled(func):
        return None
    variants = [(rows, with_kernels(func, target, rows)) for rows in values]
    found = [(rows, made) for rows, made in variants if made is not None]
    heights = heights_in(found[-1][1]) if found else []
    if not heights or not all(are_same([heights[0]], [height]) for height in heights):
        return None
    distinct = [
        (rows, made)
        for (rows, made), larger in zip(found, [*found[1:], None])
        if larger is None or not _tvm.structural_equal(made, larger[1])
    ]
    forms = [", ".join(map(str, choices_in(made))) for _, made in distinct]
    lines = told(str(heights[0]), [rows for rows, _ in distinct[:-1]], forms)
    return merged(distinct, heights[0]).with_attr(RANGES, lines)
