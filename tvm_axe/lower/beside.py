"""Collectives beside stages that don't depend on them: in what order all of them begin, and where each has to be done.

A schedule marks such collectives (`Schedule.beside`). Their stages begin as soon as what they move is there; others
follow in the order of the program, but those that want what a pending collective makes, or overwrite what it moves,
wait until nothing else is left. Then the oldest one is joined.

    part2                        part2
    sum2   (beside)              barrier, fork, sum2      beside:
    step2                 ->         part1
    part1                            barrier, sum1
    sum1                         join
    step1                        step2, step1

What a device does beside a collective touches nothing of it, on no device, as all run the same program. So the barrier
that peers need is the one that a stage behind the join has, as behind any collective (`order.barriers_before`), and one
that stands between the fork and the join says nothing of it. Kernels beside copies (`pairs`) fill the processors and
wait for the same side stream, so all collectives are joined before one of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tvm import tirx

from tvm_axe.analysis.sharing import bound_axis
from tvm_axe.errors import LowerError
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.derive import LOCAL, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.order import regions, touched_by

__all__ = ["Joins", "arranged", "joins_of"]


@dataclass(frozen=True)
class Joins:
    """Which groups of `order.regions` are collectives beside others, and where they are joined.

    Attributes
    ----------
    ended : Mapping[int, Sequence[int]]
        By the number of a group, or how many there are, the groups that are joined before it, in their order.
    forms : Sequence[str]
        For each that was marked, beside what it runs, or why it doesn't.
    """

    ended: Mapping[int, Sequence[int]] = field(default_factory=dict)
    forms: Sequence[str] = ()

    @property
    def beside(self) -> frozenset[int]:
        """The groups that run beside others."""
        return frozenset(group for groups in self.ended.values() for group in groups)


def arranged(steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> list[Step]:
    """Return the steps in the order in which they begin.

    Raises
    ------
    LowerError
        If one is marked to run beside others that is no collective.
    """
    for step in steps:
        bound = any(bound_axis(loop) is not None for block in step.stage.blocks for loop in block.loops)
        # Among the devices of an axis of one nothing moves.
        if step.stage.beside and not (isinstance(step.kind, Collective) or (step.kind == LOCAL and bound)):
            raise LowerError(
                f"stage {step.name!r} is to run beside others, and is no collective but {step.kind}; mark collectives "
                "alone, behind all that fuses, shards or moves them (beside)"
            )
    waiting = regions(steps)
    if not any(map(_is_marked, waiting)):
        return list(steps)
    found: list[Sequence[Step]] = []
    pending: list[Sequence[Step]] = []
    while waiting:
        ready = [
            group
            for at, group in enumerate(waiting)
            if not any(_conflict(group, other, shardings) for other in (*pending, *waiting[:at]))
        ]
        if not ready:
            del pending[0]
            continue
        first = next(filter(_is_marked, ready), ready[0])
        waiting = [group for group in waiting if group is not first]
        found.append(first)
        if _is_marked(first):
            pending.append(first)
    return [step for group in found for step in group]


def joins_of(
    groups: Sequence[Sequence[Step]], shardings: Mapping[tirx.Buffer, Sharding], filling: Collection[int]
) -> Joins:
    """Return where marked collectives are joined: before what depends on them, or at the end.

    Parameters
    ----------
    groups : sequence of sequence of Step
        Of `arranged` steps.
    shardings : Mapping[Buffer, Sharding]
        Where the program's buffers live.
    filling : collection of int
        The groups that are kernels beside copies.
    """
    ends: dict[int, int] = {}
    forms = []
    oldest = len(groups)  # what a stream was told first is done first
    for at in reversed(range(len(groups))):
        if not _is_marked(groups[at]):
            continue
        behind = range(at + 1, len(groups))
        wants = next((j for j in behind if j in filling or _conflict(groups[at], groups[j], shardings)), len(groups))
        end = min(wants, oldest)
        hidden = [step.name for j in range(at + 1, end) for step in groups[j] if j not in ends]
        (step,) = groups[at]
        if hidden:
            ends[at] = oldest = end
            forms.append(f"{step.name}: {_named(step)} beside {', '.join(hidden)}")
        else:
            why = "nothing is left beside it" if wants == len(groups) else f"{groups[wants][0].name} follows at once"
            forms.append(f"{step.name}: {_named(step)} in its place: {why}")
    ended: dict[int, list[int]] = {}
    for at in sorted(ends):
        ended.setdefault(ends[at], []).append(at)
    return Joins(ended, tuple(reversed(forms)))


def _is_marked(group: Sequence[Step]) -> bool:
    return any(step.stage.beside and step.kind != LOCAL for step in group)


def _named(step: Step) -> str:
    name = str(step.kind)
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _conflict(one: Sequence[Step], other: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> bool:
    """Whether one of two groups writes what the other touches, on whatever devices."""
    touched = [[touched_by(step, shardings) for step in group] for group in (one, other)]
    all_of, written = (
        [{buffer for each in group for key in keys for buffer in each[key]} for group in touched]
        for keys in (("read", "write", "pull", "push"), ("write", "push"))
    )
    return bool(all_of[0] & written[1] or all_of[1] & written[0])
