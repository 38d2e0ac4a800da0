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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import nested_blocks, statements
from tvm_axe.analysis.expressions import substitute, variables_of
from tvm_axe.defaults import VALUES
from tvm_axe.machines import backend_of
from tvm_axe.nests.contraction import find_contractions
from tvm_axe.nests.default import RANGES, by_blocks, in_order, is_unscheduled, with_cores_for
from tvm_axe.nests.forms import Change, forms_of, possible
from tvm_axe.nests.registers import Tile
from tvm_axe.records.packing import LAYOUT_FREE, PREPROC

__all__ = ["Values", "ranges_of", "specialized", "unknown_extents", "values_of", "with_ranges"]

_BY_BLOCKS = "block by block"
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)

Values = Mapping[str, Sequence[int]]
"""The representatives of a model's unknown extents, by the names of their variables."""


def with_ranges(
    mod: tvm.IRModule, target: Target, values: Values | None = None, tuned: Collection[str] = ()
) -> tvm.IRModule:
    """The module with a schedule for each of its functions of unknown extents that nobody scheduled, on a CPU.

    Parameters
    ----------
    mod : IRModule
        Functions.
    target : Target
        Resolved; on a GPU nothing is done.
    values : mapping, optional
        Representatives of the variables, by name; `tvm_axe.defaults.VALUES` of those that it leaves out.
    tuned : collection of str
        The names of functions that are as a record has them.
    """
    if not backend_of(target).on_host:
        return mod
    found: dict[ir.GlobalVar, ir.BaseFunc] = {
        variable: _ranged(func, target, values or {})
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc)
        and str(variable.name_hint) not in tuned
        and unknown_extents(func)
        and is_unscheduled(func)
    }
    if not found:
        return mod
    return tvm.IRModule({**dict(mod.functions_items()), **found}, attrs=mod.attrs, global_infos=mod.global_infos)


def ranges_of(func: tirx.PrimFunc) -> list[str]:
    """What a function that `with_ranges` made runs for which values, a line for each variant."""
    return [str(line) for line in (func.attrs or {}).get(RANGES, ())]


def unknown_extents(func: tirx.PrimFunc) -> list[tirx.Var]:
    """The variables in the shapes of a function's parameters, in the order in which they occur there."""
    extents = [extent for param in func.params if tirx.is_buffer_var(param) for extent in param.shape]
    found = [var for extent in extents for var in sorted(variables_of(extent), key=lambda var: str(var.name))]
    return list(dict.fromkeys(found))


def specialized(func: tirx.PrimFunc, values: Mapping[tirx.Var, int]) -> tirx.PrimFunc:
    """The function for these values of its unknown extents; what is computed of them is a number, too.

    One that is a parameter by itself is no parameter of what is returned, whose weights aren't packed ahead then.
    """
    given = {param: tirx.const(values[param], str(param.ty)) for param in func.params if param in values}
    if given:
        func = func.specialize(given).without_attr(LAYOUT_FREE)

    def known(var: tirx.Var) -> tirx.Expr:
        return tirx.const(values[var], str(var.ty)) if var in values else var

    def folded(expr: tirx.Expr) -> tirx.Expr:
        both = isinstance(expr.a, tirx.IntImm) and isinstance(expr.b, tirx.IntImm)
        return Analyzer().simplify(expr) if both else expr

    return _tvm.structural_map(func, [(tirx.Var, known), (_ARITHMETIC, folded)])


def values_of(
    func: tirx.PrimFunc, values: Values | None = None
) -> tuple[tirx.Var, tuple[int, ...], dict[tirx.Var, int]]:
    """The variable that a function of unknown extents is dispatched on, its representatives, and one of each other.

    It is the variable of the innermost loop over rows of a contraction, of which register tiles take some; where there
    is none, the first.
    """
    unknown = unknown_extents(func)
    own = {var: tuple(sorted({*(values or {}).get(str(var.name), VALUES)})) for var in unknown}
    typical = {var: each[len(each) // 2] for var, each in own.items()}
    driving = unknown[0]
    if len(unknown) > 1:
        sch = s_tir.Schedule(tvm.IRModule({"main": func}))  # with the same variables
        for match in find_contractions(_schedule(specialized(func, typical))):
            nest = [sch.get(loop).extent for loop in sch.get_loops(sch.get_sblock(match.block))]
            driving = next((nest[n] for n in reversed(match.rows) if nest[n] in own), driving)
    return driving, own[driving], {var: value for var, value in typical.items() if not var.same_as(driving)}


@dataclass(frozen=True)
class _Variant:
    """A schedule of the function, for values up to that of its representative."""

    value: int
    sch: s_tir.Schedule
    tiles: tuple[Tile, ...]
    form: str


def _ranged(func: tirx.PrimFunc, target: Target, values: Values) -> tirx.PrimFunc:
    base = _schedule(func)
    driving, own, others = values_of(base.mod["main"], values)
    variants: list[_Variant] = []
    for value in reversed(own):  # the largest has the most to do, and has weights packed as it likes them
        variants.insert(0, _variant(base, {driving: value, **others}, target, value, variants[0] if variants else None))
    distinct = [
        each for each, larger in zip(variants, [*variants[1:], None]) if larger is None or not _are_same(each, larger)
    ]
    ends = [f"{driving.name} <= {each.value}" for each in distinct[:-1]]
    ends.append(f"{driving.name} > {distinct[-2].value}" if ends else f"any {driving.name}")
    lines = [f"{end}: {each.form}" for end, each in zip(ends, distinct)]
    return _merged([(each.value, each.sch.mod["main"]) for each in distinct], driving).with_attr(RANGES, lines)


def _are_same(some: _Variant, other: _Variant) -> bool:
    return some.sch is other.sch or _tvm.structural_equal(some.sch.mod, other.sch.mod)


def _schedule(func: tirx.PrimFunc) -> s_tir.Schedule:
    return s_tir.Schedule(tvm.IRModule({"main": s_tir.renew_defs(func)}))


def _variant(
    base: s_tir.Schedule, values: Mapping[tirx.Var, int], target: Target, value: int, larger: _Variant | None
) -> _Variant:
    known = specialized(base.mod["main"], values)
    own = with_cores_for(known, target)
    forms = forms_of(_schedule(known), own, _open(base))
    # Weights that the variants share are packed for all of them.
    vectors = [tile.vectors for tile in larger.tiles] if larger and any(tile.ahead for tile in larger.tiles) else None
    for change in in_order(forms, vectors):
        for sch in possible(base, [change]):
            return _Variant(value, sch, *_told(change))
    # Nothing of that depends on the value.
    sch = larger.sch if larger is not None and larger.form == _BY_BLOCKS else by_blocks(base, target)
    return _Variant(value, sch, (), _BY_BLOCKS)


def _told(change: Change) -> tuple[tuple[Tile, ...], str]:
    """The register tiles of a change, and what it is in words."""
    tiles = tuple(change.keywords.get("taken", ()))
    return tiles, ", ".join(map(str, tiles)) or str(change.func.__name__).strip("_").replace("_", " ")


def _open(base: s_tir.Schedule) -> dict[str, frozenset[int]]:
    """The loops of each block whose extents aren't known, by their positions."""
    return {
        str(base.get(block).name_hint): frozenset(
            n for n, loop in enumerate(base.get_loops(block)) if not isinstance(base.get(loop).extent, tirx.IntImm)
        )
        for block in base.get_child_blocks(base.get_sblock("root"))
    }


# ---- One function of several -----------------------------------------------------------------------------------------


def _merged(variants: Sequence[tuple[int, tirx.PrimFunc]], driving: tirx.Var) -> tirx.PrimFunc:
    """The function that goes on as that variant does which is for the value of `driving`; what packs comes first."""
    first = variants[0][1]
    packed, body, buffers = _parts(first)
    branches, bounds = [body], [value for value, _ in variants]
    for _, other in variants[1:]:
        own, body, more = _parts(other)
        assert len(own) == len(packed)  # each packs as the first does
        fresh = {var: tirx.Var(var.name, var.ty) for var in _defined(body)}
        fresh |= {block.writes[0].source: ours.writes[0].source for (_, block), (_, ours) in zip(own, packed)}
        branches.append(substitute(body, fresh))
        buffers += [buffer for buffer in more if buffer not in fresh and buffer not in buffers]
    chosen = branches[-1]
    for bound, branch in reversed([*zip(bounds, branches[:-1])]):
        chosen = tirx.IfThenElse(driving <= bound, branch, chosen)
    root = first.body.block
    whole = tirx.SeqStmt([*(nest for nest, _ in packed), chosen]) if packed else chosen
    block = s_tir.SBlock([], root.reads, root.writes, root.name_hint, whole, None, buffers, [], root.annotations)
    return s_tir.renew_defs(first.with_body(s_tir.SBlockRealize([], True, block)))


def _defined(body: tirx.Stmt) -> list[tirx.Var]:
    """The variables of loops and blocks, which two schedules of a function may have in common."""
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(
        body,
        [(tirx.For, lambda loop: found.append(loop.loop_var)), (tirx.IterVar, lambda it: found.append(it.var))],
    )
    return found


def _parts(func: tirx.PrimFunc) -> tuple[list[tuple[tirx.Stmt, s_tir.SBlock]], tirx.Stmt, list[tirx.Buffer]]:
    """The nests that pack weights, each with its block; all others; and what the root allocates."""
    root = func.body.block
    packing: list[tuple[tirx.Stmt, s_tir.SBlock]] = []
    rest = []
    for nest in statements(root.body):
        (block, *more) = [nested.block for nested in nested_blocks(nest)]
        if not more and PREPROC in block.annotations:
            packing.append((nest, block))
        else:
            rest.append(nest)
    return packing, tirx.SeqStmt(rest) if len(rest) > 1 else rest[0], list(root.alloc_buffers)
