"""Random schedules for `fuzz_schedules`: actions that can be replayed, and layouts declared at random.

A `Case` is a program, a mesh, layouts of its parameters and the actions that a schedule accepted, in order. An action
names blocks by name, loops by their place in the block's nest.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuzz_drawing import draw_program
from fuzz_programs import Program
from tvm.tirx import PrimFunc

import tvm_axe as axe
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.schedule import query, with_layouts

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
OURS = frozenset(
    (
        "shard",
        "all_reduce",
        "split_collective",
        "reorder_collective",
        "as_slice",
        "redistribute",
        "send",
        "fuse_collective",
        "overlap",
        "set_layout",
    )
)
"""The primitives of this package; the others are upstream's."""


@dataclass(frozen=True)
class Action:
    """A primitive and its arguments: names of blocks, places of loops, numbers."""

    primitive: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.primitive}({', '.join(map(repr, self.arguments))})"


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


# ---- Actions ---------------------------------------------------------------------------------------------------------


def apply(sch: axe.Schedule, action: Action) -> None:
    """Do an action; raises what the primitive raises."""
    _APPLY[action.primitive](sch, *action.arguments)


def labelled(sch: axe.Schedule) -> dict[str, Any]:
    """The blocks by name, in program order; ``@1`` behind the name of the second block that has it."""
    found: dict[str, Any] = {}
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        name = str(sch.get(block).name_hint)
        count = sum(label.split("@")[0] == name for label in found)
        found[f"{name}@{count}" if count else name] = block
    return found


def _block(sch: axe.Schedule, label: str) -> Any:
    return labelled(sch)[label]


def _loop(sch: axe.Schedule, block: str, at: int) -> Any:
    return sch.get_loops(_block(sch, block))[at]


def _blocks(sch: axe.Schedule, labels: Sequence[str]) -> list[Any]:
    found = labelled(sch)
    return [found[label] for label in labels]


def _reorder(sch: axe.Schedule, block: str, order: Sequence[int]) -> None:
    loops = sch.get_loops(_block(sch, block))
    sch.reorder(*(loops[at] for at in order))


def _fuse(sch: axe.Schedule, block: str, at: int) -> None:
    loops = sch.get_loops(_block(sch, block))
    sch.fuse(loops[at], loops[at + 1])


_APPLY: dict[str, Callable[..., Any]] = {
    "shard": lambda sch, block, at, axis: sch.shard(_loop(sch, block, at), axis, _block(sch, block)),
    "all_reduce": lambda sch, block, at, axis: sch.all_reduce(_loop(sch, block, at), axis),
    "split_collective": lambda sch, block, dim, root: sch.split_collective(_block(sch, block), dim, root),
    "reorder_collective": lambda sch, gather, readers: sch.reorder_collective(
        _block(sch, gather), _blocks(sch, readers)
    ),
    "as_slice": lambda sch, gather: sch.as_slice(_block(sch, gather)),
    "redistribute": lambda sch, block, buffer, axis, dim: sch.redistribute(_block(sch, block), buffer, axis, dim),
    "send": lambda sch, block, axis: sch.send(_block(sch, block), axis),
    "fuse_collective": lambda sch, blocks: sch.fuse_collective(_blocks(sch, blocks)),
    "overlap": lambda sch, blocks, axis, chunks: sch.overlap(_blocks(sch, blocks), axis, chunks),
    "set_layout": lambda sch, buffer, layout: sch.set_layout(buffer, layout),
    "split": lambda sch, block, at, factor: sch.split(_loop(sch, block, at), [None, factor]),
    "reorder": _reorder,
    "fuse": _fuse,
    "unroll": lambda sch, block, at: sch.unroll(_loop(sch, block, at)),
    "vectorize": lambda sch, block, at: sch.vectorize(_loop(sch, block, at)),
    "parallel": lambda sch, block, at: sch.parallel(_loop(sch, block, at)),
    "cache_read": lambda sch, block, at: sch.cache_read(_block(sch, block), at, "global"),
    "cache_write": lambda sch, block: sch.cache_write(_block(sch, block), 0, "global"),
    "compute_at": lambda sch, block, other, at: sch.compute_at(_block(sch, block), _loop(sch, other, at)),
    "reverse_compute_at": lambda sch, block, other, at: sch.reverse_compute_at(
        _block(sch, block), _loop(sch, other, at)
    ),
    "compute_inline": lambda sch, block: sch.compute_inline(_block(sch, block)),
    "reverse_compute_inline": lambda sch, block: sch.reverse_compute_inline(_block(sch, block)),
    "rfactor": lambda sch, block, at: sch.rfactor(_loop(sch, block, at), 0),
    "decompose_reduction": lambda sch, block, at: sch.decompose_reduction(
        _block(sch, block), _loop(sch, block, at)
    ),
}


# ---- What is proposed ------------------------------------------------------------------------------------------------


class Proposer:
    """Proposes actions for a schedule as it is.

    Parameters
    ----------
    rng : Random
        What is drawn from.
    sch : Schedule
        The schedule.
    wanted : Mapping[str, str]
        The mesh axis over which loops of an extent (as the program names it) are to be shared mostly.
    program : Program
        What it schedules.
    """

    def __init__(self, rng: random.Random, sch: axe.Schedule, wanted: Mapping[str, str], program: Program) -> None:
        self.rng, self.sch, self.wanted = rng, sch, wanted
        self.stages = {stage.name: stage for stage in program.stages}
        self.blocks = labelled(sch)

    def names(self) -> list[str]:
        """The blocks, in program order."""
        return list(self.blocks)

    def action(self) -> Action | None:
        """One proposal, or None if what was drawn has no place here."""
        self.blocks = labelled(self.sch)
        kind = self.rng.choices(list(_PROPOSALS), weights=[weight for _, weight in _PROPOSALS.values()])[0]
        found = _PROPOSALS[kind][0](self)
        return None if found is None else Action(kind, found)

    # ---- What there is ----

    def block(self) -> str:
        return self.rng.choice(self.names())

    def depth(self, name: str) -> int:
        return len(self.sch.get_loops(self.blocks[name]))

    def labels(self, blocks: Sequence[Any]) -> list[str]:
        found = [self.sch.get(block) for block in blocks]
        return [
            label for label, block in self.blocks.items() if any(self.sch.get(block).same_as(each) for each in found)
        ]

    def loop(self, name: str) -> int | None:
        depth = self.depth(name)
        return self.rng.randrange(depth) if depth else None

    def axis(self) -> str:
        return self.rng.choice(self.sch.mesh.names)

    def chain(self, start: str, longest: int) -> list[str]:
        """A block and some that read on from it, in program order."""
        names, found = self.names(), [start]
        for name in names[names.index(start) + 1 :]:
            before = set(self.labels(self.sch.get_producers(self.blocks[name])))
            if before & set(found) and len(found) < longest and self.rng.random() < 0.9:
                found.append(name)
        return found

    def readers(self, name: str) -> list[str]:
        return self.labels(self.sch.get_consumers(self.blocks[name]))

    def copies(self) -> list[str]:
        return [name for name in self.names() if query.is_copy(self.sch.get(self.blocks[name]))]

    def reduces(self) -> list[str]:
        """The blocks that sum over devices."""
        return [
            name for name in self.names() if query.bound_loops(self.sch, self.blocks[name], query.REDUCE)
        ]

    # ---- Primitives of the package ----

    def shard(self) -> tuple[Any, ...] | None:
        name = self.block()
        stage = self.stages.get(name)
        loops = self.sch.get_loops(self.blocks[name])
        if not loops:
            return None
        if stage is not None and self.rng.random() < 0.75 and len(loops) == len(stage.extents):
            wanted = [i for i, extent in enumerate(stage.extents) if extent in self.wanted]
            if wanted:
                at = self.rng.choice(wanted)
                return name, at, self.wanted[stage.extents[at]]
        return name, self.rng.randrange(len(loops)), self.axis()

    def all_reduce(self) -> tuple[Any, ...] | None:
        name = self.block()
        at = self.loop(name)
        return None if at is None else (name, at, self.axis())

    def split_collective(self) -> tuple[Any, ...] | None:
        reduces = self.reduces()
        name = self.rng.choice(reduces) if reduces else self.block()
        if not reduces and self.rng.random() < 0.9:
            return None
        root = self.rng.randrange(4) if self.rng.random() < 0.25 else None
        return name, self.rng.choice((0, 0, 1, 2)), root

    def reorder_collective(self) -> tuple[Any, ...] | None:
        copies = self.copies()
        if not copies:
            return None
        gather = self.rng.choice(copies)
        following = self.chain(gather, self.rng.randint(2, 5))[1:]
        return gather, tuple(following)

    def as_slice(self) -> tuple[Any, ...] | None:
        copies = self.copies()
        return (self.rng.choice(copies),) if copies else None

    def redistribute(self) -> tuple[Any, ...] | None:
        name = self.block()
        reads = [region.source.name for region in self.sch.get(self.blocks[name]).reads]
        if not reads:
            return None
        return name, self.rng.choice(reads), self.axis(), self.rng.choice((None, None, 0, 1))

    def send(self) -> tuple[Any, ...] | None:
        return self.block(), self.axis()

    def fuse_collective(self) -> tuple[Any, ...] | None:
        bound = [n for n in self.names() if query.bound_loops(self.sch, self.blocks[n], query.SPATIAL)]
        chain = self.chain(self.rng.choice(bound or self.names()), self.rng.randint(2, 4))
        return (tuple(chain),) if len(chain) > 1 else None

    def overlap(self) -> tuple[Any, ...] | None:
        chain = self.chain(self.block(), self.rng.randint(2, 4))
        return (tuple(chain), self.axis(), self.rng.choice((1, 2, 2, 3))) if len(chain) > 1 else None

    def set_layout(self) -> tuple[Any, ...] | None:
        func = self.sch.mod["main"]
        local = [buffer for buffer in func.body.block.alloc_buffers if len(buffer.shape) > 0]
        if not local:
            return None
        buffer = self.rng.choice(local)
        return buffer.name, memory_order(self.rng, [int(extent) for extent in buffer.shape])

    # ---- Upstream's ----

    def one_loop(self) -> tuple[Any, ...] | None:
        name = self.block()
        at = self.loop(name)
        return None if at is None else (name, at)

    def last_loop(self) -> tuple[Any, ...] | None:
        name = self.block()
        depth = self.depth(name)
        return (name, depth - 1) if depth else None

    def split(self) -> tuple[Any, ...] | None:
        found = self.one_loop()
        return None if found is None else (*found, self.rng.choice((1, 2, 2, 3, 4)))

    def reorder(self) -> tuple[Any, ...] | None:
        name = self.block()
        depth = self.depth(name)
        if depth < 2:
            return None
        return name, tuple(self.rng.sample(range(depth), self.rng.randint(2, depth)))

    def fuse(self) -> tuple[Any, ...] | None:
        name = self.block()
        depth = self.depth(name)
        return (name, self.rng.randrange(depth - 1)) if depth > 1 else None

    def cache_read(self) -> tuple[Any, ...] | None:
        name = self.block()
        reads = self.sch.get(self.blocks[name]).reads
        return (name, self.rng.randrange(len(reads))) if reads else None

    def one_block(self) -> tuple[Any, ...]:
        return (self.block(),)

    def at_reader(self) -> tuple[Any, ...] | None:
        name = self.block()
        readers = self.readers(name)
        other = self.rng.choice(readers) if readers else None
        at = None if other is None else self.loop(other)
        return None if at is None else (name, other, at)

    def at_producer(self) -> tuple[Any, ...] | None:
        name = self.block()
        producers = self.labels(self.sch.get_producers(self.blocks[name]))
        other = self.rng.choice(producers) if producers else None
        at = None if other is None else self.loop(other)
        return None if at is None else (name, other, at)


_PROPOSALS: dict[str, tuple[Callable[[Proposer], tuple[Any, ...] | None], int]] = {
    "shard": (Proposer.shard, 40),
    "all_reduce": (Proposer.all_reduce, 3),
    "split_collective": (Proposer.split_collective, 14),
    "reorder_collective": (Proposer.reorder_collective, 12),
    "as_slice": (Proposer.as_slice, 3),
    "redistribute": (Proposer.redistribute, 5),
    "send": (Proposer.send, 2),
    "fuse_collective": (Proposer.fuse_collective, 10),
    "overlap": (Proposer.overlap, 8),
    "set_layout": (Proposer.set_layout, 3),
    "split": (Proposer.split, 4),
    "reorder": (Proposer.reorder, 3),
    "fuse": (Proposer.fuse, 3),
    "unroll": (Proposer.one_loop, 2),
    "vectorize": (Proposer.last_loop, 2),
    "parallel": (Proposer.one_loop, 1),
    "cache_read": (Proposer.cache_read, 4),
    "cache_write": (Proposer.one_block, 10),
    "compute_at": (Proposer.at_reader, 2),
    "reverse_compute_at": (Proposer.at_producer, 2),
    "compute_inline": (Proposer.one_block, 2),
    "reverse_compute_inline": (Proposer.one_block, 1),
    "rfactor": (Proposer.one_loop, 1),
    "decompose_reduction": (Proposer.one_loop, 1),
}


# ---- Layouts ---------------------------------------------------------------------------------------------------------


def memory_order(rng: random.Random, shape: Sequence[int]) -> str:
    """A layout of a whole tensor in memory: dimensions in another order, or padded rows."""
    order = list(range(len(shape)))
    rng.shuffle(order)
    strides, stride = [0] * len(shape), 1
    for place, dim in enumerate(order):
        strides[dim] = stride
        stride *= shape[dim]
        if place == 0 and rng.random() < 0.4:
            stride += rng.randint(1, 2)
    return f"S[({', '.join(map(str, shape))}) : ({', '.join(map(str, strides))})]"


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

    def sum_and_split(self) -> None:
        """A reduction over devices, as far as CoCoNet's way goes: split, reorder, fuse, overlap."""
        rng, proposer = self.rng, self.proposer
        reduced = [stage for stage in self.case.program.stages if "R" in stage.kinds]
        if not reduced:
            return
        stage = rng.choice(reduced)
        at, axis = stage.kinds.index("R"), rng.choice(self.sch.mesh.names)
        if not self.attempt("shard", stage.name, at, axis) or rng.random() < 0.15:
            return
        root = rng.randrange(self.sch.mesh.axis_size(axis)) if rng.random() < 0.2 else None
        dims = max(len(stage.indices), 1)
        if not self.attempt("split_collective", stage.name, rng.randrange(dims), root) or rng.random() < 0.15:
            return
        proposer.blocks = labelled(self.sch)
        gathers = [name for name in proposer.readers(stage.name) if name in proposer.copies()]
        if gathers and rng.random() < 0.8:
            proposer.blocks = labelled(self.sch)
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
    program = draw_program(rng, list(axes.values()))
    wanted = {}
    for name in rng.sample([name for name, _ in program.extents], min(len(axes), len(program.extents))):
        wanted[name] = rng.choice(mesh.names)
    layouts = draw_layouts(rng, program, mesh, wanted)
    case = Case(program, tuple(axes.items()), tuple(layouts.items()), ())
    making = _Making(rng, case, wanted)
    if rng.random() < 0.35:
        making.share_alike()
    if rng.random() < 0.5:
        making.sum_and_split()
    for _ in range(rng.choices((0, 2, 4, 8, 16, 24), weights=(4, 3, 3, 3, 2, 1))[0]):
        making.propose()
    if rng.random() < 0.7:
        for _ in range(5):
            if making.stopped or not making.mend():
                break
    return replace(case, actions=tuple(making.accepted)), making.sch, making.refused
