"""Random schedules for `fuzz_schedules`: actions that can be replayed, and layouts declared at random.

A `Case` is a program, a mesh, layouts of its parameters and the actions that a schedule accepted, in order. An action
names blocks by name, loops by their place in the block's nest.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fuzz_actions import OURS, Action, apply, labelled
from fuzz_programs import Program, Stage, read_by
from fuzz_proposing import Proposer, memory_order
from fuzz_situations import SITUATIONS
from fuzz_stages import draw_pipeline, draw_program, draw_steps
from tvm.tirx import PrimFunc

import tvm_axe as axe
from tvm_axe.analysis.patterns import shift_of
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.schedule import with_layouts

MESHES: tuple[dict[str, int], ...] = (
    {"x": 1},
    {"x": 2},
    {"x": 2},
    {"x": 3},
    {"x": 3},
    {"x": 4},
    {"x": 2, "y": 2},
    {"x": 2, "y": 3},
    {"x": 2, "y": 2, "z": 2},
)


@dataclass(frozen=True)
class Case:
    """What is judged: a program, scheduled for a mesh."""

    program: Program
    mesh: tuple[tuple[str, int], ...]
    layouts: tuple[tuple[str, str], ...]
    actions: tuple[Action, ...]

    def function(self) -> PrimFunc:
        """The program with the declared layouts."""
        func = self.program.function()
        return with_layouts(func, dict(self.layouts)) if self.layouts else func

    def schedule(self) -> axe.Schedule:
        """The schedule before any action."""
        return axe.Schedule(self.function(), mesh=Mesh(dict(self.mesh)))


# ---- Layouts ---------------------------------------------------------------------------------------------------------


def draw_layouts(rng: random.Random, program: Program, mesh: Mesh, wanted: Mapping[str, str]) -> dict[str, str]:
    """Layouts for some parameters: sharded, mostly as `wanted` says, or in a memory order of their own."""
    found: dict[str, str] = {}
    if rng.random() < 0.5:
        return found
    for tensor in program.parameters:
        shape = program.shape(tensor)
        if not shape or rng.random() < 0.35:
            continue
        if rng.random() < 0.15:
            held = Layout.sharded(shape, mesh, {}).R  # by every device
            found[tensor.name] = str(Layout(Layout.parse(memory_order(rng, shape)).D, held))
            continue
        dims = {dim: wanted[extent] for dim, extent in enumerate(tensor.shape) if extent in wanted}
        dims = {dim: axis for i, (dim, axis) in enumerate(dims.items()) if axis not in list(dims.values())[:i]}
        if not dims or rng.random() < 0.15:
            dims = {rng.randrange(len(shape)): rng.choice(mesh.names)}
        found[tensor.name] = str(Layout.sharded(shape, mesh, dims))
    return found


# ---- Cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """An action that was proposed and not accepted, and why."""

    action: Action
    error: Exception


class _Making:
    """A schedule in the making: what it accepted and refused so far."""

    def __init__(self, rng: random.Random, case: Case, wanted: Mapping[str, str]) -> None:
        self.rng, self.case, self.wanted = rng, case, wanted
        self.sch = case.schedule()
        self.proposer = Proposer(rng, self.sch, wanted, case.program)
        self.accepted: list[Action] = []
        self.refused: list[Refusal] = []
        self.stopped = False

    @property
    def program(self) -> Program:
        """What is scheduled."""
        return self.case.program

    def attempt(self, primitive: str, *arguments: Any) -> bool:
        """Do an action, if the schedule accepts it; none behind one that raised what isn't the package's."""
        action = Action(primitive, arguments)
        if self.stopped:
            return False
        try:
            apply(self.sch, action)
        except Exception as error:  # judged by who asked for the case
            self.refused.append(Refusal(action, error))
            self.stopped = not isinstance(error, axe.AxeError) and primitive in OURS
            return False
        self.accepted.append(action)
        return True

    def propose(self) -> None:
        """One action of any kind."""
        action = self.proposer.action()
        if action is not None:
            self.attempt(action.primitive, *action.arguments)

    def share_alike(self) -> None:
        """Share the loops of every stage over the axis that is wanted of their extents."""
        for stage in self.case.program.stages:
            for at, extent in enumerate(stage.extents):
                sharded = labelled(self.sch).get(stage.name)
                if extent in self.wanted and sharded is not None and self.rng.random() < 0.9:
                    # Each loop that is shared makes one more in front of those that follow, or is gone.
                    place = at + len(self.sch.get_loops(sharded)) - len(stage.extents)
                    if 0 <= place < len(self.sch.get_loops(sharded)):
                        self.attempt("shard", stage.name, place, self.wanted[extent])

    def _is_read(self, stage: Stage) -> bool:
        """Whether another stage reads what a stage writes."""
        return any(stage.target in read_by(other) for other in self.case.program.stages if other is not stage)

    def sum_and_split(self) -> None:
        """A reduction over devices, as far as CoCoNet's way goes: split, reorder, fuse, overlap."""
        rng, proposer = self.rng, self.proposer
        stages = [stage for stage in self.case.program.stages if "R" in stage.kinds]
        rng.shuffle(stages)
        # Sums that are read on come first: those collectives can be split and moved.
        stages.sort(key=lambda each: (each.combine != "sum") + (not self._is_read(each)) if rng.random() < 0.8 else 0)
        axes = rng.sample(self.sch.mesh.names, len(self.sch.mesh.names))
        reduced = ((stage, axis) for stage in stages for axis in axes)
        for stage, axis in itertools.islice(reduced, 4):
            if self.attempt("shard", stage.name, stage.kinds.index("R"), axis):
                break
        else:
            return
        if rng.random() < 0.1:
            return
        root = rng.randrange(self.sch.mesh.axis_size(axis)) if rng.random() < 0.2 else None
        dims = max(len(stage.indices), 1)
        if not self.attempt("split_collective", stage.name, rng.randrange(dims), root) or rng.random() < 0.1:
            return
        proposer.blocks = labelled(self.sch)
        gathers = [name for name in proposer.readers(stage.name) if name in proposer.copies()]
        if gathers and root is None and self._is_read(stage) and rng.random() < 0.85:
            following = proposer.chain(gathers[0], rng.randint(2, 5))[1:]
            if not self.attempt("reorder_collective", gathers[0], tuple(following)):
                self.attempt("reorder_collective", gathers[0], tuple(proposer.readers(gathers[0])))
        proposer.blocks = labelled(self.sch)
        chain = proposer.chain(stage.name, rng.randint(2, 5))
        fused = len(chain) > 1 and rng.random() < 0.6 and self.attempt("fuse_collective", tuple(chain))
        proposer.blocks = labelled(self.sch)
        if rng.random() < 0.6:
            producers = proposer.labels(self.sch.get_producers(proposer.blocks[stage.name]))
            stages = (*producers[-1:], stage.name) if fused or rng.random() < 0.5 else (*producers[-1:], *chain)
            self.attempt("overlap", stages, axis, rng.choice((1, 1, 2, 2, 3)))

    def pipe(self) -> None:
        """Give each device of an axis a stage of the pipeline, and have it send on what is moved."""
        leading, count = self.case.program.extents[0]
        axis = self.rng.choice([axis for axis, size in self.case.mesh if size == count])
        stages = [stage for stage in self.case.program.stages if stage.extents[:1] == (leading,)]
        sent = None
        for stage in stages:
            moves = shift_of(self.sch.get(labelled(self.sch)[stage.name])) not in (None, 0)
            sent = stage.name if moves else sent
            if self.rng.random() < 0.95:
                self.attempt(*(("send", stage.name, axis) if moves else ("shard", stage.name, 0, axis)))
        if sent is not None and self.rng.random() < 0.3:
            self.proposer.blocks = labelled(self.sch)
            self.attempt("fuse_collective", tuple(self.proposer.chain(sent, self.rng.randint(2, 3))))

    def mend(self) -> bool:
        """Do what an error of lowering asks for; returns whether something was done."""
        try:
            lower(self.sch.mod["main"], self.sch.mesh)
        except axe.AxeError as error:
            block, text = re.match(r"block '(\w+)'", str(error)), str(error)
            if block is None or block[1] not in labelled(self.sch):
                return False
            if "put a gather behind it" in text:
                return self.attempt("cache_write", block[1])
            crossing = re.search(r"(reads|writes more of) '(\w+)'(?: across '(\w+)')?", text)
            over = re.search(r"shard its loops over '(\w+)'", text)
            if crossing is not None and crossing[1] == "reads":
                return self.attempt("redistribute", block[1], crossing[2], crossing[3], None)
            if over is not None:
                loops = self.sch.get_loops(labelled(self.sch)[block[1]])
                return bool(loops) and self.attempt("shard", block[1], self.rng.randrange(len(loops)), over[1])
        except Exception:  # the judge meets it again
            return False
        return False


def draw_case(seed: int, devices: int | None = None) -> tuple[Case, axe.Schedule, list[Refusal]]:
    """The case of a seed, its schedule, and what was refused on the way; on a mesh of so many devices, if that is said.

    The same seed gives the same case, and another one for each number of devices.
    """
    rng = random.Random(seed)
    axes = rng.choice([axes for axes in MESHES if devices in (None, math.prod(axes.values()))])
    mesh = Mesh(axes)
    kind = random.Random(f"pipeline {seed}").random()
    is_pipeline, situation = kind < 0.06, rng.choice(SITUATIONS) if kind > 0.8 else None
    draw = draw_pipeline if is_pipeline else draw_program if situation is None else situation.program
    if 0.06 <= kind < 0.12:
        draw = draw_steps
    program = draw(rng, list(axes.values()))
    wanted = {}
    for name in rng.sample([name for name, _ in program.extents], min(len(axes), len(program.extents))):
        wanted[name] = rng.choice(mesh.names)
    layouts = {} if is_pipeline or situation is not None else draw_layouts(rng, program, mesh, wanted)
    if situation is not None:
        layouts = situation.layouts(rng, program, mesh)
    case = Case(program, tuple(axes.items()), tuple(layouts.items()), ())
    making = _Making(rng, case, wanted)
    if situation is not None:
        situation.follow(making)
    elif is_pipeline:
        making.pipe()
    elif rng.random() < 0.6:
        making.sum_and_split()
    begun = is_pipeline or situation is not None
    if rng.random() < (0.1 if situation is not None else 0.35):
        making.share_alike()
    for _ in range(rng.choices((0, 2, 4, 8, 16, 24), weights=(4, 1, 0, 0, 0, 0) if begun else (4, 3, 3, 3, 2, 1))[0]):
        making.propose()
    if rng.random() < 0.7:
        for _ in range(5):
            if making.stopped or not making.mend():
                break
    return replace(case, actions=tuple(making.accepted)), making.sch, making.refused
