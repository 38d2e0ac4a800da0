"""What a schedule says about its blocks and loops: the questions that the validity rules ask.

They are asked of the block tree (`tvm_axe.analysis`), and nothing is recorded in the trace but for what a primitive
then acts on: `loop_rv`, `loop_of`, `sole_block` and `outermost` take their handles from the schedule.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from tvm import s_tir, tirx
from tvm.error import InternalError
from tvm.s_tir.schedule import LoopRV, SBlockRV

from tvm_axe import _tvm
from tvm_axe.analysis import sharing
from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.tree import BlockTree, tree_of
from tvm_axe.errors import ScheduleError

P = ParamSpec("P")
T = TypeVar("T")


def all_or_nothing(
    primitive: Callable[Concatenate[s_tir.Schedule, P], T],
) -> Callable[Concatenate[s_tir.Schedule, P], T]:
    """Have `primitive` leave the schedule and its trace as they were when it raises.

    The rules are asked first, so that what raises later is one of upstream's instructions: the state, the trace and
    what the handles stand for are then put back as they were before the first.
    """

    @functools.wraps(primitive)
    def or_put_back(sch: s_tir.Schedule, /, *args: P.args, **kwargs: P.kwargs) -> T:
        before = sch.copy()
        try:
            return primitive(sch, *args, **kwargs)
        except BaseException:
            _tvm.put_back(sch, before)
            raise

    return or_put_back


def given(sch: s_tir.Schedule, rv: SBlockRV | LoopRV, primitive: str) -> s_tir.SBlock | tirx.For:
    """Return the statement of a block or loop that was given; an error if the schedule hasn't got it, or no longer."""
    try:
        return sch.get(rv)
    except (IndexError, ValueError) as error:  # upstream's: never of this schedule, and not any more
        kind, source = (
            ("block", "sch.get_sblock(name)") if isinstance(rv, SBlockRV) else ("loop", "sch.get_loops(block)")
        )
        raise ScheduleError(
            f"{primitive}: the {kind} given is not of this schedule, or was changed since; take it from {source}"
        ) from error


def block_of(sch: s_tir.Schedule, block: SBlockRV | str, primitive: str) -> SBlockRV:
    """Return the handle of a block that is given by its handle or its name.

    Raises
    ------
    ScheduleError
        If there is no block of that name, or more than one; or if something else was given.
    """
    if isinstance(block, SBlockRV):
        return block
    names = [str(nest.block.name_hint) for nest in tree(sch).nested]
    if not isinstance(block, str):
        what = "a loop" if isinstance(block, LoopRV) else f"a {type(block).__name__}"
        raise ScheduleError(
            f"{primitive}: {what} was given where a block is due; valid is what sch.get_sblock(name) gives, or its "
            f"name: {_listed(names)}"
        )
    if names.count(block) != 1:
        how = f"is the name of {names.count(block)} blocks" if block in names else "is no block"
        raise ScheduleError(
            f"{primitive}: {block!r} {how} of the function{_near(block, names)}; it has {_listed(names)}"
        )
    return sch.get_sblock(block)


def loop_named(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV | str, primitive: str) -> LoopRV:
    """Return the handle of a block's loop that is given by its handle or its variable's name.

    Raises
    ------
    ScheduleError
        If the block has no loop of that name, or more than one; or if something else was given.
    """
    if isinstance(loop, LoopRV):
        return loop
    given(sch, block, primitive)
    names = [str(own.loop_var.name) for own in nest_of(sch, block).loops]
    if not isinstance(loop, str):
        what = "a block" if isinstance(loop, SBlockRV) else f"a {type(loop).__name__}"
        raise ScheduleError(
            f"{primitive}: {what} was given where a loop of block {name_of(sch, block)!r} is due; valid is one that "
            f"sch.get_loops gives, or its variable's name: {_listed(names)}"
        )
    if names.count(loop) != 1:
        how = f"is the name of {names.count(loop)} loops" if loop in names else "is no loop"
        raise ScheduleError(
            f"{primitive}: {loop!r} {how} of block {name_of(sch, block)!r}{_near(loop, names)}; it has {_listed(names)}"
        )
    return sch.get_loops(block)[names.index(loop)]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"


def _near(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, 1) if name not in names else []
    return f" (did you mean {found[0]!r}?)" if found else ""


def tree(sch: s_tir.Schedule) -> BlockTree:
    """Return the blocks of the schedule's functions as they are now."""
    return tree_of(sch.mod)


def nest_of(sch: s_tir.Schedule, block: SBlockRV) -> NestedBlock:
    """Return a block with the loops around it.

    Raises
    ------
    ScheduleError
        If it stands below anything else than loops and blocks.
    """
    stmt = _tvm.statement(sch, block)
    found = tree(sch).at(stmt)
    if found is None:
        raise ScheduleError(f"block {stmt.name_hint!r} stands below a condition; valid are blocks below loops alone")
    return found


def name_of(sch: s_tir.Schedule, block: SBlockRV) -> str:
    """Return the block's name."""
    return str(_tvm.statement(sch, block).name_hint)


def loop_names(nest: NestedBlock) -> str:
    """Return the block's loops, outermost first, for messages."""
    return ", ".join(loop.loop_var.name for loop in nest.loops) or "none"


def bound_loops(sch: s_tir.Schedule, block: SBlockRV, kind: int) -> dict[str, tirx.For]:
    """Return the block's mesh-bound loops that drive iterators of `kind` (SPATIAL or REDUCE), by mesh axis."""
    return sharing.bound_loops(nest_of(sch, block), kind)


def gathered(sch: s_tir.Schedule, block: SBlockRV, primitive: str) -> tuple[str, int]:
    """Return the mesh axis and the dimension that the all-gather `block` gathers; an error if it is none."""
    found = sharing.gathered(tree(sch), nest_of(sch, block))
    if found is None:
        raise ScheduleError(
            f"{primitive}: block {name_of(sch, block)!r} is not an all-gather: valid is a copy of a buffer whose "
            "producer is bound to a mesh axis, as split_collective leaves it"
        )
    return found


def is_parameter(sch: s_tir.Schedule, buffer: tirx.Buffer) -> bool:
    """Return whether `buffer` is a parameter of the function."""
    return tree(sch).is_parameter(buffer)


def sole_block(sch: s_tir.Schedule, loop: LoopRV, primitive: str) -> SBlockRV:
    """Return the one block below `loop`; an error where there are several."""
    stmt = _tvm.statement(sch, loop)
    names = [str(nest.block.name_hint) for nest in tree(sch).blocks_below(stmt)]
    if len(names) != 1:
        raise ScheduleError(
            f"{primitive}: loop {stmt.loop_var.name!r} encloses the blocks {', '.join(names)}; name the one to act on"
        )
    return sch.get_child_blocks(loop)[0]


def loop_of_block(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV, primitive: str) -> tirx.For:
    """Return `loop`'s statement, if it is one of `block`'s loops; an error that lists them if not."""
    stmt, nest = given(sch, loop, primitive), nest_of(sch, block)
    if any(stmt.same_as(own) for own in nest.loops):
        return stmt
    raise ScheduleError(
        f"{primitive}: the loop given is not one of block {name_of(sch, block)!r}'s loops "
        f"({loop_names(nest)}); take it from sch.get_loops(block)"
    )


def loop_rv(sch: s_tir.Schedule, block: SBlockRV, loop: tirx.For) -> LoopRV:
    """Return the handle of a loop around `block`, by its variable, which stays as other loops are transformed."""
    at = next(n for n, own in enumerate(nest_of(sch, block).loops) if own.loop_var.same_as(loop.loop_var))
    return sch.get_loops(block)[at]


def loop_of(sch: s_tir.Schedule, block: SBlockRV, iterator: tirx.Var) -> LoopRV | None:
    """Return the handle of the loop whose variable alone drives `iterator`, or None."""
    loop = sharing.driving_loop(nest_of(sch, block), iterator)
    return None if loop is None else loop_rv(sch, block, loop)


def outermost(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV) -> None:
    """Move `loop` in front of the block's other loops."""
    stmt = _tvm.statement(sch, loop)
    others = [rv for rv, own in zip(sch.get_loops(block), nest_of(sch, block).loops) if not own.same_as(stmt)]
    if others:
        checked("reorder", name_of(sch, block), lambda: sch.reorder(loop, *others))


def checked(primitive: str, block: str, rewrite: Callable[[], T]) -> T:
    """Run upstream's rewrite; what it refuses becomes this package's error with the block's name."""
    try:
        return rewrite()
    except ScheduleError:
        raise
    except (s_tir.ScheduleError, ValueError, InternalError) as error:  # the last two: what upstream didn't foresee
        raise ScheduleError(f"{primitive}: block {block!r}: {_tvm.schedule_error_reason(error)}") from error
