"""Situations for `fuzz_schedules` that a primitive's rule is there for: a program, and the schedule that asks it.

A rule that is asked once in a thousand cases isn't tried by five hundred. So some cases begin where one decides: a sum
behind a sum, a store that leaves something out, an update of what was read. What is stored where, read how and shared
over what is drawn in these, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from fuzz_actions import labelled
from fuzz_drawing import Drawing
from fuzz_evaluating import Malformed
from fuzz_programs import Program
from fuzz_proposing import Proposer
from fuzz_stages import contraction, drawn, halo, iterators, normed, permuted, pointwise, reduction, transposed

import tvm_axe as axe
from tvm_axe.layout import Layout, Mesh


class Making(Protocol):
    """A schedule in the making, as `fuzz_scheduling` has it."""

    rng: random.Random
    sch: axe.Schedule
    proposer: Proposer

    @property
    def program(self) -> Program:
        """What is scheduled."""

    def attempt(self, primitive: str, *arguments: Any) -> bool:
        """Do an action, if the schedule accepts it."""


@dataclass(frozen=True)
class Situation:
    """The stages that it takes, what is done to them, and a parameter that is declared to lie shared."""

    draw: Callable[[Drawing], None]
    follow: Callable[[Making], None]
    shared: str | None = None

    def program(self, rng: random.Random, devices: Sequence[int]) -> Program:
        """A program with these stages, and perhaps a reader more."""

        def stages(drawing: Drawing) -> None:
            self.draw(drawing)
            if rng.random() < 0.3:
                pointwise(drawing)

        return drawn(rng, devices, stages)

    def layouts(self, rng: random.Random, program: Program, mesh: Mesh) -> dict[str, str]:
        """The layout of the parameter."""
        shapes = {tensor.name: program.shape(tensor) for tensor in program.parameters}
        if self.shared is None:
            return {}
        shape = shapes[self.shared]
        return {self.shared: str(Layout.sharded(shape, mesh, {rng.randrange(len(shape)): rng.choice(mesh.names)}))}


# ---- What they have in common ----------------------------------------------------------------------------------------


def _sum(d: Drawing, rank: int = 1) -> None:
    """A sum that leaves so many dimensions at least."""
    d.rng.choice((contraction, contraction, reduction))(d)
    if d.stages[-1].combine != "sum" or len(d.stages[-1].indices) < rank:
        raise Malformed("no sum")


def _axis(making: Making) -> str:
    return making.rng.choice(making.sch.mesh.names)


def _split_sum(making: Making) -> tuple[str, str | None]:
    """Share the first stage's sum and split what it exchanges; its axis, and the block that gathers."""
    first, names = making.program.stages[0], making.sch.mesh.names
    for axis in making.rng.sample(names, len(names)):
        if making.attempt("shard", first.name, first.kinds.index("R"), axis):
            break
    root = making.rng.randrange(making.sch.mesh.axis_size(axis)) if making.rng.random() < 0.1 else None
    making.attempt("split_collective", first.name, making.rng.randrange(len(first.indices)), root)
    proposer = making.proposer
    proposer.blocks = labelled(making.sch)
    gathers = [name for name in proposer.readers(first.name) if name in proposer.copies()]
    return axis, gathers[0] if gathers else None


def _share(making: Making, at: int) -> str:
    """Share the loop at a place of all stages over an axis."""
    axis = _axis(making)
    for stage in making.program.stages:
        if at < len(stage.extents) and making.rng.random() < 0.9:
            making.attempt("shard", stage.name, at, axis)
    making.proposer.blocks = labelled(making.sch)
    return axis


# ---- The situations --------------------------------------------------------------------------------------------------


def _sum_behind_sum(d: Drawing) -> None:
    _sum(d, rank=2)
    normed(d)


def _fuse_behind_sum(making: Making) -> None:
    """A reader of a sum goes into the loop around what that sums."""
    _, gather = _split_sum(making)
    first, proposer = making.program.stages[0].name, making.proposer
    if gather is not None:
        making.attempt("reorder_collective", gather, tuple(proposer.chain(gather, making.rng.randint(2, 4))[1:]))
        proposer.blocks = labelled(making.sch)
    making.attempt("fuse_collective", tuple(proposer.chain(first, making.rng.randint(2, 5))))


def _sum_into_part(d: Drawing) -> None:
    """Every second element, or some in the middle."""
    _sum(d)
    stage = d.stages[-1]
    target, dim = d.tensors[stage.target], d.rng.randrange(len(stage.indices))
    if stage.indices[dim] not in iterators(9):
        raise Malformed("stored so already")
    shape, indices, off = list(target.shape), list(stage.indices), d.rng.randrange(2)
    step = d.rng.choice((2, 2, 1))
    shape[dim] = f"{step} * ({shape[dim]}) + 1"
    indices[dim] = f"{step} * {indices[dim]} + {off}"
    d.tensors[target.name] = replace(target, shape=tuple(shape))
    d.stages[-1] = replace(stage, indices=tuple(indices))


def _split_part(making: Making) -> None:
    """The gather behind what stores to a part."""
    _split_sum(making)


def _updated_behind(d: Drawing) -> None:
    """A state that a stage reads and a later one updates or replaces."""
    state = d.tensor("P", d.shape(1))
    names = iterators(len(state.shape))
    y = d.result(state.shape, state.dtype)
    for target, source in ((y, state), (state, d.rng.choice((state, y, d.tensor("X", state.shape))))):
        value = d.mixed(d.load(source, names, state.dtype), state.shape, state.dtype)
        d.stage(state.shape, "S" * len(names), target, names, value)


def _redistribute_updated(making: Making) -> None:
    """Have a stage read the state through a copy, which may be the one that updates it."""
    first, second = making.program.stages[:2]
    if making.rng.random() < 0.4:
        _share(making, making.rng.randrange(len(first.extents)))
    names, reader = making.sch.mesh.names, making.rng.choice((first.name, second.name))
    for axis in making.rng.sample(names, len(names)):
        if making.attempt("redistribute", reader, second.target, axis, making.rng.choice((None, None, 0, 1))):
            break


def _sum_read_elsewhere(d: Drawing) -> None:
    """The reader of a sum takes other rows than those that it stores, or these and others."""
    _sum(d)
    if d.rng.random() < 0.3:
        d.rng.choice((permuted, transposed, halo))(d)
        return
    total = d.tensors[d.stages[-1].target]
    names, y = iterators(len(total.shape)), d.result(total.shape)
    dim = d.rng.randrange(len(names))
    moved = list(names)
    moved[dim] = d.rng.choice((f"{total.shape[dim]} - 1 - {names[dim]}", f"({names[dim]} + 1) % {total.shape[dim]}"))
    value = f"{d.load(total, names, y.dtype)} + {d.load(total, moved, y.dtype)}"
    d.stage(total.shape, "S" * len(names), y, names, value)


def _overlap_read(making: Making) -> None:
    """What is summed, scattered, gathered and read in turn, chunk by chunk."""
    axis, _ = _split_sum(making)
    first, proposer = making.program.stages[0].name, making.proposer
    producers = proposer.labels(making.sch.get_producers(proposer.blocks[first]))
    chain = proposer.chain(first, making.rng.randint(2, 4))
    making.attempt("overlap", (*producers[-1:], *chain), axis, making.rng.choice((1, 2, 2, 3)))


def _sum_into_state(d: Drawing) -> None:
    """A sum that a state goes on by."""
    _sum(d)
    total = d.tensors[d.stages[-1].target]
    state, names = d.tensor("P", total.shape, total.dtype), iterators(len(total.shape))
    own, sums = d.load(state, names, state.dtype), d.load(total, names, state.dtype)
    form = d.rng.choice(("{} - {}", "T.max({}, {})", "{} + {}"))
    d.stage(total.shape, "S" * len(names), state, names, d.mixed(form.format(own, sums), total.shape, state.dtype))


def _reorder_state(making: Making) -> None:
    """The state computes on slices."""
    _, gather = _split_sum(making)
    if gather is not None:
        making.attempt("reorder_collective", gather, (making.program.stages[1].name,))


def _any_stage(d: Drawing) -> None:
    d.rng.choice((pointwise, contraction, reduction))(d)


def _copy_behind_split(making: Making) -> None:
    """A copy of what a loop computes that was split in more than there is, and a share of either."""
    first = making.program.stages[0]
    at = making.rng.randrange(len(first.extents))
    making.attempt("split", first.name, at, making.rng.choice((2, 3, 4, 5)))
    if making.rng.random() < 0.5:
        making.attempt("shard", first.name, at, _axis(making))
    making.attempt("cache_write", first.name)
    making.proposer.blocks = labelled(making.sch)
    name = making.rng.choice(making.proposer.names())
    depth = making.proposer.depth(name)
    if depth:
        making.attempt("shard", name, making.rng.randrange(depth), _axis(making))


def _terms_and_sum(making: Making) -> None:
    """One kernel for the terms that devices have and for their sum."""
    first = making.program.stages[0].name
    if making.rng.random() < 0.5:
        _split_sum(making)
    else:
        making.attempt("shard", first, making.program.stages[0].kinds.index("R"), _axis(making))
    proposer = making.proposer
    proposer.blocks = labelled(making.sch)
    terms = proposer.labels(making.sch.get_producers(proposer.blocks[first]))
    if terms and making.rng.random() < 0.6:
        making.attempt("compute_at", terms[-1], first, making.rng.randrange(proposer.depth(first)))
    elif terms:
        making.attempt("reverse_compute_at", first, terms[-1], making.rng.randrange(proposer.depth(terms[-1])))


SITUATIONS = (
    Situation(_sum_behind_sum, _fuse_behind_sum),
    Situation(_sum_into_part, _split_part),
    Situation(_updated_behind, _redistribute_updated, shared="P0"),
    Situation(_sum_read_elsewhere, _overlap_read),
    Situation(_sum_into_state, _reorder_state),
    Situation(_any_stage, _copy_behind_split),
    Situation(_sum, _terms_and_sum),
)
"""All of them, each as likely as the others."""
