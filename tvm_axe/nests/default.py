"""The schedule of a CPU's function that nobody scheduled: the first of those that tuning would start from.

What tuning would choose among by measuring (`tvm_axe.nests.forms`) is taken in the order of promise, and blocks that
no form takes are scheduled one by one (`tvm_axe.nests.loops`). Work that is done sooner than cores are told of it is
left to one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.s_tir import dlight
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import DROPS_NAN, KERNEL
from tvm_axe.analysis.blocks import says_what_it_touches
from tvm_axe.analysis.shifted import sums_show_nan
from tvm_axe.analysis.sizes import sides
from tvm_axe.analysis.tree import has_threads, why_unschedulable, with_functions
from tvm_axe.machines import backend_of
from tvm_axe.nests.conditions import with_conditions_inside
from tvm_axe.nests.contraction import Contraction, is_own_nest
from tvm_axe.nests.forms import Change, Forms, forms_of, possible
from tvm_axe.nests.loops import is_loops, loop_schedules
from tvm_axe.nests.registers import register_tile
from tvm_axe.nests.rows import inline_cheap
from tvm_axe.nests.tiles import Tile, tiles
from tvm_axe.schedule.tiles import has_choice

__all__ = ["RANGES", "by_blocks", "in_order", "is_unscheduled", "with_cores_for", "with_default_schedules"]

_ALONE = 1 << 17  # operations that one core has done when another one would begin
_DEAR = 16  # operations that a function, such as exp, counts as
RANGES = "axe.ranges"
"""The attribute of a function that has a variant for each range of its extents (`tvm_axe.nests.ranges`)."""

_SCHEDULED = "tirx.is_scheduled"  # upstream's attribute of functions


def with_default_schedules(mod: tvm.IRModule, target: Target, tuned: Collection[str] = ()) -> tvm.IRModule:
    """The module with a schedule for each of its functions that nobody scheduled.

    On a GPU these are functions with symbolic extents alone, by upstream's rules (`tvm.s_tir.dlight`): others get their
    threads when they are built (`tvm_axe.machines.threads`). Blocks of both have their conditions in them
    (`tvm_axe.nests.conditions`).

    Parameters
    ----------
    mod : IRModule
        Functions.
    target : Target
        Resolved.
    tuned : collection of str
        The names of functions that are as a record has them.
    """
    on_host = backend_of(target).on_host
    functions = {
        variable: func if on_host or why_unschedulable(func) is not None else with_conditions_inside(func)
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and str(variable.name_hint) not in tuned
    }
    unscheduled = {variable: func for variable, func in functions.items() if is_unscheduled(func)}
    if on_host:
        found = {variable: _scheduled(func, target) for variable, func in unscheduled.items()}
    else:
        changed = {variable: func for variable, func in functions.items() if not func.same_as(mod[variable])}
        symbolic = {variable: func for variable, func in unscheduled.items() if math.isinf(_operations(func))}
        found = changed | _by_upstream(symbolic, target)
    return with_functions(mod, found)


def _by_upstream(functions: Mapping[ir.GlobalVar, tirx.PrimFunc], target: Target) -> dict[ir.GlobalVar, tirx.PrimFunc]:
    """The functions as upstream's rules for GPUs have them."""
    if not functions:
        return {}
    rules = [dlight.gpu.Matmul(), dlight.gpu.GEMV(), dlight.gpu.Reduction(), dlight.gpu.GeneralReduction()]
    with target:
        done = dlight.ApplyDefaultSchedule(*rules, dlight.gpu.Fallback())(tvm.IRModule(dict(functions)))
    return {variable: done[str(variable.name_hint)] for variable in functions}


def is_unscheduled(func: tirx.PrimFunc) -> bool:
    """Whether a function is as it was written, for its blocks to run: below its root, each in a nest of its own.

    Blocks that don't say what they touch stay where they are, and so do those around them, which they may read or
    write.
    """
    if why_unschedulable(func) is not None or has_threads(func) or has_choice(func) or KERNEL in (func.attrs or {}):
        return False
    attrs = func.attrs or {}
    if bool(attrs.get(_SCHEDULED, False)) or RANGES in attrs or func.body.block.name_hint != "root":
        return False
    sch = s_tir.Schedule(func)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    inner: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(func.body.block.body, (s_tir.SBlock, inner.append))
    return (
        bool(blocks)
        and len(inner) == len(blocks)
        and not any(block.alloc_buffers or block.match_buffers for block in inner)
        and all(says_what_it_touches(block) for block in inner)
        and all(
            is_own_nest([sch.get(loop) for loop in sch.get_loops(block)], _tvm.block_realize(sch, block))
            for block in blocks
        )
    )


def _scheduled(func: tirx.PrimFunc, target: Target) -> tirx.PrimFunc:
    if any(0 in sides(buffer.shape) for buffer in filter(tirx.is_buffer_var, func.params)):
        return func  # a loop has nothing to do, and no stride to divide by
    base = s_tir.Schedule(tvm.IRModule({"main": s_tir.renew_defs(func)}))
    target = with_cores_for(func, target)
    forms = forms_of(base, target)
    found = next(possible(base, [*in_order(forms)]), None)
    scheduled = (found or by_blocks(base, target)).mod["main"]
    return scheduled.with_attr(DROPS_NAN, 1) if sums_show_nan(func) else scheduled


def with_cores_for(func: tirx.PrimFunc, target: Target) -> Target:
    """The target with as many of its cores as it takes for a function: one where that is done at once."""
    return Target({**target.export(), "num-cores": 1}) if _operations(func) < _ALONE else target


def in_order(forms: Forms, vectors: Sequence[int] | None = None) -> Iterator[Change]:
    """The schedules of a function's forms, the most promising first; `vectors` as `Forms.registers` takes them."""
    yield from forms.registers(vectors)
    yield from forms.kernels()[:1]
    yield from forms.others()


def by_blocks(base: s_tir.Schedule, target: Target, contractions: Sequence[Contraction] = ()) -> s_tir.Schedule:
    """Every block by itself, but for cheap ones, which are inlined; of `contractions` register tiles where possible."""
    sch = base.copy()
    # What moves a contraction's operands goes into their copies; in the sum it would compute where each element is.
    moved = [b for match in contractions for b in sch.get_producers(sch.get_sblock(match.block))]
    inline_cheap(sch, {str(sch.get(block).name_hint) for block in moved})
    taken: set[str] = set()
    for match in contractions:
        for tile in tiles(match, target)[:1]:
            for done in possible(sch, [partial(_tiled, match=match, target=target, tile=tile, taken=taken)]):
                sch = done
    for name in [str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))]:
        if name not in taken and is_loops(sch, sch.get_sblock(name)):
            sch = next(possible(sch, loop_schedules(sch, name, target)), sch)
    return sch


def _tiled(sch: s_tir.Schedule, match: Contraction, target: Target, tile: Tile, taken: set[str]) -> None:
    taken |= register_tile(sch, match, target, tile)


def _operations(func: tirx.PrimFunc) -> float:
    """How much there is to do, in multiply-adds of a vector's lane or so; infinite where extents are symbolic."""
    total = 0.0

    def on_block(block: s_tir.SBlock) -> None:
        nonlocal total
        count = 1.0
        for iterator in block.iter_vars:
            extent = iterator.dom.extent
            count *= int(extent) if isinstance(extent, tirx.IntImm) else float("inf")
        dear: list[object] = []
        tvm_ffi.structural_walk(block.body, ((ir.Call, tirx.Div), dear.append))
        total += count * (_DEAR if dear else 1)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, on_block))
    return total
