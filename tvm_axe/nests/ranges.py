"""Functions whose extents aren't known until they are called: a variant for each range of values, chosen by the value.

    if n <= 1:                                   # scheduled as the function of n = 1
      ..
    elif n <= 16:                                # as that of n = 16
      ..
    else:                                        # as that of the largest representative

A variant's loops have the extents that they had: what is taken from the function of the representative, whose extents
are known, are its form, tiles and vectors (`tvm_axe.nests.forms`). What a tile leaves over is padded or masked, so that
each variant is right for every value, and ranges are a matter of speed alone. Where several variables are unknown, one
of them is dispatched on, that of the loop of which a tile takes its rows; the others stand at a representative each.

Weights that are packed ahead are packed once for all variants, in the panels of the largest representative.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import unused_name
from tvm_axe.analysis.expressions import substitute
from tvm_axe.analysis.sizes import Sizes, at_sizes, number, unknown_extents
from tvm_axe.defaults import VALUES
from tvm_axe.machines import backend_of
from tvm_axe.nests.contraction import find_contractions
from tvm_axe.nests.default import RANGES, by_blocks, in_order, is_unscheduled, with_cores_for
from tvm_axe.nests.forms import Change, forms_of, possible
from tvm_axe.nests.kernel_ranges import with_kernels_by_rows
from tvm_axe.nests.merging import merged, parts, told
from tvm_axe.nests.recorded import as_recorded, tiles_of
from tvm_axe.nests.representatives import MADE_OF, Values, check_values, names_of, representatives
from tvm_axe.nests.tiles import Tile
from tvm_axe.records.apply import records_of
from tvm_axe.records.packing import LAYOUT_FREE
from tvm_axe.records.record import Record

__all__ = ["ranges_of", "specialized", "values_of", "with_ranges"]

_TRIED = 32  # records of a function, the fastest first, of which one has to be of a form that it can take
_FEW = 16  # values up to which tiles of contractions beside other blocks would mostly be empty
_MOST = 1 << 30  # elements: upstream simplifies some indices in 32 bits
_BY_BLOCKS = "block by block"


def with_ranges(
    mod: tvm.IRModule,
    target: Target,
    values: Values | None = None,
    tuned: Collection[str] = (),
    work_dir: str | Path | None = None,
) -> tuple[tvm.IRModule, dict[str, float]]:
    """The module with a schedule for each of its functions of unknown extents that nobody scheduled.

    On a GPU those that are products take tile kernels (`tvm_axe.nests.kernel_ranges`), others upstream's rules.

    Parameters
    ----------
    mod : IRModule
        Functions.
    target : Target
        Resolved.
    values : mapping, optional
        Representatives of the variables, by name; `tvm_axe.defaults.VALUES` of those that it leaves out.
    tuned : collection of str
        The names of functions that are as a record has them.
    work_dir : path, optional
        Where tuning results lie: a function that was tuned at a value takes the form that was the fastest there.

    Returns
    -------
    mod : IRModule
        The module; the same one if there is no such function.
    seconds : dict
        The recorded time of each function at a value, such as ``"matmul, n = 16"``.
    """
    check_values(values or {}, names_of(mod.functions.values()))
    if not backend_of(target).on_host:
        return with_kernels_by_rows(mod, target, values or {}, tuned), {}
    functions = {
        variable: _Unknown.of(func, values)
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
        and str(variable.name_hint) not in tuned
        and unknown_extents(func)
        and is_unscheduled(func)
    }
    if not functions:
        return mod, {}
    known = [func for each in functions.values() for func in each.known.values()]
    records = iter([[] for _ in known] if work_dir is None else records_of(known, target, work_dir))
    found: dict[ir.GlobalVar, ir.BaseFunc] = {}
    seconds: dict[str, float] = {}
    for variable, each in functions.items():
        found[variable], times = _ranged(each, {value: next(records) for value in each.known}, target)
        seconds |= {f"{variable.name_hint}, {each.driving.name} = {value}": time for value, time in times.items()}
    return tvm.IRModule(
        {**dict(mod.functions_items()), **found}, attrs=mod.attrs, global_infos=mod.global_infos
    ), seconds


def ranges_of(func: tirx.PrimFunc) -> list[str]:
    """What a function that `with_ranges` made runs for which values, a line for each variant."""
    return [str(line) for line in (func.attrs or {}).get(RANGES, ())]


def specialized(func: tirx.PrimFunc, values: Mapping[tirx.Var, int]) -> tirx.PrimFunc:
    """The function for these values of its unknown extents; what is computed of them is a number, too.

    One that is a parameter by itself is no parameter of what is returned, whose weights aren't packed ahead then.
    """
    known = at_sizes(func, values).without_attr(MADE_OF)
    return known if len(known.params) == len(func.params) else known.without_attr(LAYOUT_FREE)


def values_of(
    func: tirx.PrimFunc, values: Values | None = None
) -> tuple[tirx.Var, tuple[int, ...], dict[tirx.Var, int]]:
    """The variable that a function of unknown extents is dispatched on, its representatives, and one of each other.

    It is the variable of the innermost loop over rows of a contraction, of which register tiles take some; where there
    is none, the first. Of several that one tensor is counted in, all as large as they may be, there is no such tensor:
    representatives are lessened until its elements can be counted.
    """
    unknown = unknown_extents(func)
    own = representatives(func, values or {}, VALUES)
    typical = _lessened(func, {var: each[len(each) // 2] for var, each in own.items()}, own)
    driving = unknown[0]
    if len(unknown) > 1:
        sch = s_tir.Schedule(tvm.IRModule({"main": func}))  # with the same variables
        for match in find_contractions(_schedule(specialized(func, typical))):
            nest = [sch.get(loop).extent for loop in sch.get_loops(sch.get_sblock(match.block))]
            driving = next((nest[n] for n in reversed(match.rows) if nest[n] in own), driving)
    others = {var: value for var, value in typical.items() if not var.same_as(driving)}
    others = _lessened(func, {driving: own[driving][-1], **others}, others)
    others.pop(driving, None)
    # Where a result has no elements, as of an image smaller than a patch, there is nothing to schedule.
    at = {value: {driving: value, **others} for value in own[driving]}
    some = tuple(value for value, sizes in at.items() if _has_elements(func, sizes) and _is_counted(func, sizes))
    return driving, some or own[driving][-1:], others


def _lessened(func: tirx.PrimFunc, sizes: Sizes, which: Collection[tirx.Var]) -> dict[tirx.Var, int]:
    """Sizes, those of some variables halved until no parameter has more elements than upstream's indices count."""
    found = dict(sizes)
    while any(found[var] > 1 for var in which) and not _is_counted(func, found):
        found |= {var: max(1, found[var] // 2) for var in which}
    return found


def _is_counted(func: tirx.PrimFunc, sizes: Sizes) -> bool:
    for buffer in filter(tirx.is_buffer_var, func.params):
        found = [known for extent in buffer.shape if (known := number(extent, sizes)) is not None]
        if len(found) == len(buffer.shape) and math.prod(found) > _MOST:
            return False
    return True


def _has_elements(func: tirx.PrimFunc, sizes: Sizes) -> bool:
    """Whether no extent of a parameter is 0 or less at some sizes."""
    extents = [extent for buffer in filter(tirx.is_buffer_var, func.params) for extent in buffer.shape]
    return all(known is None or known > 0 for known in (number(extent, sizes) for extent in extents))


@dataclass(frozen=True)
class _Unknown:
    """A function of unknown extents, as it was written, and what it is at each representative of one of them."""

    base: s_tir.Schedule
    driving: tirx.Var
    known: Mapping[int, tirx.PrimFunc]

    @classmethod
    def of(cls, func: tirx.PrimFunc, values: Values | None) -> _Unknown:
        base = _schedule(func)
        func = base.mod["main"]
        driving, own, others = values_of(func, values)
        return cls(base, driving, {value: specialized(func, {driving: value, **others}) for value in own})


@dataclass(frozen=True)
class _Variant:
    """A schedule of the function, for values up to that of its representative.

    Attributes
    ----------
    value
        The representative.
    sch
        The schedule.
    tiles
        The register tiles that it takes, if it does.
    form
        What it is in words.
    seconds
        The time of the record that it is as; None without one.
    """

    value: int
    sch: s_tir.Schedule
    tiles: tuple[Tile, ...] = ()
    form: str = _BY_BLOCKS
    seconds: float | None = None


def _ranged(
    func: _Unknown, records: Mapping[int, Sequence[tuple[Record, tvm.IRModule]]], target: Target
) -> tuple[tirx.PrimFunc, dict[int, float]]:
    variants: list[_Variant] = []
    for value in reversed(func.known):  # the largest has the most to do, and has weights packed as it likes them
        larger = variants[0] if variants else None
        variants.insert(
            0, _recorded(func, value, records[value], target, larger) or _guessed(func, value, target, larger)
        )
    distinct = [
        each for each, larger in zip(variants, [*variants[1:], None]) if larger is None or not _are_same(each, larger)
    ]
    name = str(func.driving.name)
    lines = told(name, [each.value for each in distinct[:-1]], [each.form for each in distinct])
    whole = merged([(each.value, each.sch.mod["main"]) for each in distinct], func.driving).with_attr(RANGES, lines)
    return whole, {each.value: each.seconds for each in variants if each.seconds is not None}


def _are_same(some: _Variant, other: _Variant) -> bool:
    return some.sch is other.sch or _tvm.structural_equal(some.sch.mod, other.sch.mod)


def _schedule(func: tirx.PrimFunc) -> s_tir.Schedule:
    return s_tir.Schedule(tvm.IRModule({"main": _with_names(s_tir.renew_defs(func))}))


def _with_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, no two of whose buffers have the same name: primitives name what they make after them."""
    taken = {str(param.name) for param in func.params}
    named: dict[tirx.Var, tirx.Var] = {}
    for buffer in func.body.block.alloc_buffers:
        name = unused_name(str(buffer.name), taken)
        if name != str(buffer.name):
            named[buffer] = tirx.Var(name, buffer.ty)
        taken.add(name)
    return substitute(func, named) if named else func


def _vectors(larger: _Variant | None) -> list[int] | None:
    """The vectors of each tile, if weights are packed for them: variants share what is packed."""
    ahead = larger is not None and any(tile.ahead for tile in larger.tiles)
    return [tile.vectors for tile in larger.tiles] if larger is not None and ahead else None


def _agree(sch: s_tir.Schedule, larger: _Variant | None) -> bool:
    """Whether weights are packed as the larger variant has them."""
    if larger is None:
        return True
    some, other = (parts(each.mod["main"])[0] for each in (sch, larger.sch))
    return len(some) == len(other) and all(
        tvm_ffi.structural_equal(ours, theirs, map_free_vars=True) for (ours, _), (theirs, _) in zip(some, other)
    )


def _recorded(
    func: _Unknown,
    value: int,
    records: Sequence[tuple[Record, tvm.IRModule]],
    target: Target,
    larger: _Variant | None,
) -> _Variant | None:
    """The variant that is the fastest of those that were measured at the value."""
    if not records:
        return None
    forms = forms_of(_schedule(func.known[value]), target, _open(func.base))
    for record, workload in records[:_TRIED]:
        found = as_recorded(func.base, forms, record, workload, target, _vectors(larger))
        if found is not None and _agree(found[0], larger):
            sch, change = found
            told = f"{_told(change)}, tuned at {value}: {1e3 * record.seconds:.3f} ms"
            return _Variant(value, sch, tiles_of(change), told, record.seconds)
    return None


def _guessed(func: _Unknown, value: int, target: Target, larger: _Variant | None) -> _Variant:
    """The variant without measuring: the first form that is possible."""
    known = func.known[value]
    forms = forms_of(_schedule(known), with_cores_for(known, target), _open(func.base))
    for change in in_order(forms, _vectors(larger)):
        for sch in possible(func.base, [change]):
            if _agree(sch, larger):
                return _Variant(value, sch, tiles_of(change), _told(change))
    few = value <= _FEW
    if larger is not None and (larger.tiles or few == (larger.value <= _FEW)):
        return replace(larger, value=value, seconds=None)
    return _Variant(value, _blocks(func, target, few))


def _blocks(func: _Unknown, target: Target, few: bool) -> s_tir.Schedule:
    """The function block by block, contractions as a value in the middle has them unless rows are few."""
    if few:
        return by_blocks(func.base, target)
    known, open = _schedule([*func.known.values()][len(func.known) // 2]), _open(func.base)
    return by_blocks(func.base, target, [replace(match, open=open[match.block]) for match in find_contractions(known)])


def _told(change: Change) -> str:
    """What a change is in words."""
    return ", ".join(map(str, tiles_of(change))) or str(change.func.__name__).strip("_").replace("_", " ")


def _open(base: s_tir.Schedule) -> dict[str, frozenset[int]]:
    """The loops of each block whose extents aren't known, by their positions."""
    return {
        str(base.get(block).name_hint): frozenset(
            n for n, loop in enumerate(base.get_loops(block)) if not isinstance(base.get(loop).extent, tirx.IntImm)
        )
        for block in base.get_child_blocks(base.get_sblock("root"))
    }
