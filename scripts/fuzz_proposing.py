"""Proposes actions for a schedule as it is: where a primitive may have a place, and sometimes where it hasn't."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fuzz_actions import Action, labelled
from fuzz_programs import Program

import tvm_axe as axe
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, is_copy, shift_of
from tvm_axe.schedule import query


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
        return [name for name in self.names() if is_copy(self.sch.get(self.blocks[name]))]

    def reduces(self) -> list[str]:
        """The blocks that sum over devices."""
        return [name for name in self.names() if query.bound_loops(self.sch, self.blocks[name], REDUCE)]

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
        shifts = [name for name in self.names() if shift_of(self.sch.get(self.blocks[name])) is not None]
        return (self.rng.choice(shifts), self.axis()) if shifts else None

    def fuse_collective(self) -> tuple[Any, ...] | None:
        bound = [n for n in self.names() if query.bound_loops(self.sch, self.blocks[n], SPATIAL)]
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
    "all_reduce": (Proposer.all_reduce, 4),
    "split_collective": (Proposer.split_collective, 14),
    "reorder_collective": (Proposer.reorder_collective, 12),
    "as_slice": (Proposer.as_slice, 3),
    "redistribute": (Proposer.redistribute, 5),
    "send": (Proposer.send, 8),
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
