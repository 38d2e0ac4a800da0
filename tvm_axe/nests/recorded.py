"""Which form a record's schedule has, so that a function of unknown extents takes what was measured at one value.

A record is of the function of a value, whose extents are known; its trace is one that a form of that function made
(`tvm_axe.nests.forms`), with decisions that the search drew. Under the function of unknown extents the same form is
scheduled, with the same tiles and the same decisions about loops that are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import s_tir
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.nests.forms import Change, Forms, forms_of, possible
from tvm_axe.nests.tiles import Tile, samples_known
from tvm_axe.records.record import Record

__all__ = ["as_recorded", "tiles_of"]

_SAMPLES = ("SamplePerfectTile", "SampleCategorical")


def tiles_of(change: Change) -> tuple[Tile, ...]:
    """The register tiles that a change takes; none of another form."""
    return tuple(change.keywords.get("taken", ()))


def as_recorded(
    base: s_tir.Schedule,
    forms: Forms,
    record: Record,
    workload: IRModule,
    target: Target,
    vectors: Sequence[int] | None,
) -> tuple[s_tir.Schedule, Change] | None:
    """A function of unknown extents as a record has it of one value, and the form; None where it can't be.

    Parameters
    ----------
    base
        The function as it was written.
    forms
        Its forms at the value.
    record, workload
        What was measured, and of which function.
    target
        What for.
    vectors
        As `Forms.registers` takes them.
    """
    try:
        trace = record.schedule(workload).trace.simplified(remove_postproc=True)
    except TuneError:  # which `tvm_axe.records.apply_best` says of the function of the value
        return None
    instructions, decisions = _tvm.plain(trace.as_json())
    measured = _change_of(instructions, workload, target)
    same = None if measured is None else _like(measured, forms, vectors)
    if same is None:
        return None
    for sch in possible(base, [same]):
        return _decided(base, sch, _of_known_loops(forms, same, [decision for _, decision in decisions])), same
    return None


def _change_of(instructions: list[Any], workload: IRModule, target: Target) -> Change | None:
    """The change that makes the function that was measured what the instructions make of it, but for decisions."""
    base = s_tir.Schedule(workload)
    forms, told = forms_of(base, target), _told(instructions)
    cuts = {tuple(each[1][1:3]) for each in instructions if each[0] == "Split"}
    for change in [*forms.registers(), *forms.others()]:
        # Most tiles are of other sizes than what the trace cuts loops into.
        if not all(("None", factor) in cuts for tile in tiles_of(change) for factor in _factors(tile)):
            continue
        for sch in possible(base, [change]):
            if _told(_tvm.plain(sch.trace.simplified(remove_postproc=True).as_json())[0]) == told:
                return change
    return None


def _factors(tile: Tile) -> list[int]:
    return [tile.vectors, *(factor for _, factor in tile.rows)]


def _told(instructions: list[Any]) -> list[Any]:
    """What instructions do to which of a schedule's values; maps of indices may be written in several ways."""
    return [[name, inputs if name != "TransformLayout" else inputs[:1], made] for name, inputs, _, made in instructions]


def _like(measured: Change, forms: Forms, vectors: Sequence[int] | None) -> Change | None:
    """The same change among the forms of a function of unknown extents: the same tiles, or what says the same of rows.

    Where that packs in panels what was read in place, since columns aren't known, the tile counts.
    """
    tiles = tiles_of(measured)
    if tiles:
        sizes = [(tile.rows, tile.vectors) for tile in tiles]
        found = [each for each in forms.registers(vectors) if [(t.rows, t.vectors) for t in tiles_of(each)] == sizes]
        return next((each for each in found if tiles_of(each) == tiles), next(iter(found), None))

    def said(change: Change) -> tuple[Any, ...]:
        return change.func, {name: value for name, value in change.keywords.items() if name != "match"}

    return next((each for each in forms.others() if said(each) == said(measured)), None)


def _of_known_loops(forms: Forms, change: Change, decisions: list[Any]) -> list[Any]:
    """The decisions that there are without those about loops of unknown extents."""
    tiles = tiles_of(change)
    known = [each for match, tile in zip(forms.contractions, tiles) for each in samples_known(match, tile)]
    return [decision for decision, is_known in zip(decisions, known) if is_known] if tiles else decisions


def _decided(base: s_tir.Schedule, sch: s_tir.Schedule, decisions: list[Any]) -> s_tir.Schedule:
    """The schedule with other decisions, if there are as many of them."""
    trace = sch.trace
    drawn = _tvm.drawn(trace, *_SAMPLES)
    if len(drawn) != len(decisions):
        return sch
    for instruction, decision in zip(drawn, decisions):
        trace = trace.with_decision(instruction, decision, remove_postproc=True)
    again = s_tir.Schedule(base.mod)
    trace.apply_to_schedule(again, remove_postproc=True)
    return again
