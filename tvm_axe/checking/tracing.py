"""The primitive that makes a schedule wrong, by replaying its trace up to each instruction."""

from __future__ import annotations

import re
from collections.abc import Callable

from tvm import s_tir, tirx

from tvm_axe.schedule import Schedule

__all__ = ["blamed", "up_to"]

_TAKEN = re.compile(
    r"(?P<left>[bl]\d+(?:, l\d+)*)(?:,)? = sch\.get_(?:(?P<kind>sblock)\(name=\"(?P<name>[^\"]*)\".*|"
    r"loops\(block=(?P<block>b\d+)\))"
)
"""A line of a printed trace by which a block is taken by its name, or its loops."""


def up_to(sch: Schedule, count: int) -> tirx.PrimFunc:
    """The function of a schedule after the first `count` instructions of its trace."""
    trace = sch.trace
    insts = list(trace.insts)[:count]
    decisions = {inst: choice for inst in insts if (choice := trace.get_decision(inst)) is not None}
    replayed = s_tir.Schedule(sch.origin)
    s_tir.schedule.Trace(insts, decisions).apply_to_schedule(replayed, remove_postproc=False)
    return replayed.mod["main"]


def blamed(sch: Schedule, wrong: Callable[[tirx.PrimFunc], bool | None]) -> str | None:
    """The instruction after which a schedule is wrong, with the primitive of this package that it belongs to.

    The trace is bisected, so `wrong` is asked of few prefixes. What it can't tell, None, counts as not wrong: between
    two instructions of one primitive a program needn't be one that can be lowered.

    Returns
    -------
    The primitive and the instruction in words; None if the whole trace, replayed, isn't wrong, or if it is already
    before the first.
    """
    count = len(sch.trace.insts)
    asked: dict[int, bool | None] = {}

    def is_wrong(length: int) -> bool:
        if length not in asked:
            asked[length] = wrong(up_to(sch, length))
        return bool(asked[length])

    if is_wrong(0) or not is_wrong(count):
        return None
    right, bad = 0, count
    while bad - right > 1:
        middle = (right + bad) // 2
        right, bad = (right, middle) if is_wrong(middle) else (middle, bad)
    before = "" if asked[right] is False else "; without it, it can't be run"
    return f"{_described(sch, bad - 1)}{before}"


def _described(sch: Schedule, place: int) -> str:
    """An instruction of a schedule's trace, and whose it is; blocks by their names where they were taken by them."""
    lines = str(s_tir.schedule.Trace(list(sch.trace.insts)[: place + 1], {})).strip().splitlines()
    names: dict[str, str] = {}
    for line in lines:
        taken = _TAKEN.fullmatch(line.strip())
        if taken is None:
            continue
        if taken["kind"] == "sblock":
            names[taken["left"]] = f'"{taken["name"]}"'
        else:
            block = names.get(taken["block"], taken["block"])
            names.update({loop: f"loop {n} of {block}" for n, loop in enumerate(taken["left"].split(", "))})
    said = lines[-1].strip().partition("sch.")[2]
    said = re.sub(r"\b[bl]\d+\b", lambda found: names.get(found[0], found[0]), said)
    line = f"`{said}`, instruction {place + 1} of {len(sch.trace.insts)}"
    for each in sch.applied:
        if each.first <= place < each.end:
            return f"`{each.name}(...)`: {line}"
    return line
