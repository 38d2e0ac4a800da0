"""The schedules of a program: what its collectives can be split into, moved behind, fused with and overlapped with.

Primitives are tried in the order split, reorder, as_slice, fuse, overlap, in which each makes room for the next; what a
validity rule refuses is no schedule. Two ways to the same function count once. Where devices have streams of their own,
collectives go beside what doesn't depend on them (`beside_others`); where kernels meet by themselves, an all-reduce
takes what follows it into one (`in_one_meeting`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir

from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.patterns import REDUCE, SPATIAL, is_copy, is_product
from tvm_axe.analysis.sharing import bound_loops, gathered, root_of, sharded_dims, sharded_over
from tvm_axe.analysis.tree import BlockTree
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower import Lowered
from tvm_axe.schedule import Schedule, query
from tvm_axe.schedule.overlapping import cuts_of


@dataclass(frozen=True, eq=False)
class Candidate:
    """A schedule of a program.

    Attributes
    ----------
    sch
        The schedule; never changed, as every primitive is tried on a copy.
    steps
        The primitives that led to it, in words.
    lowered
        What the devices run; None until it was lowered (`tvm_axe.meta.mesh.candidates.Candidates.with_lowered`).
    """

    sch: Schedule
    steps: tuple[str, ...] = ()
    lowered: Lowered | None = None

    def then(self, text: str, primitive: Callable[[Schedule], Any]) -> Candidate | None:
        """The candidate one primitive further, or None where its rule refuses.

        Also where two blocks are of one name then, as blocks go by name: a gather that moved behind another is one that
        has changed places with it, which is worth nothing.
        """
        sch = self.sch.copy()
        try:
            primitive(sch)
        except (ScheduleError, s_tir.ScheduleError):
            return None
        # Those where blocks had to be told apart, copies of one buffer split over two axes, are left out: with them a
        # program on two axes has two to six times as many schedules, of which the search would look at the same number.
        return None if sch.renamed else Candidate(sch, (*self.steps, text))

    def blocks(self) -> list[str]:
        """The names of the blocks in program order."""
        return [name for nest in self.nests() for name in nest]

    def nests(self) -> list[list[str]]:
        """The names of the blocks of each stage."""
        found: list[list[str]] = []
        last = None
        for nest in self.tree.blocks:
            outermost = nest.loops[0] if nest.loops else None
            if outermost is not None and last is not None and outermost.same_as(last):
                found[-1].append(str(nest.block.name_hint))
            else:
                found.append([str(nest.block.name_hint)])
            last = outermost
        return found

    @property
    def tree(self) -> BlockTree:
        """The blocks of the schedule."""
        return query.tree(self.sch)


def schedules(seed: Schedule, keep: Collection[str] = (), chunks: Sequence[int] = (2, 4)) -> Iterator[Candidate]:
    """Every schedule that the primitives make of `seed`, itself first, with every number of chunks.

    Parameters
    ----------
    seed, keep
        As `one_after_other` takes them.
    chunks
        As `spaces` takes it.
    """
    return itertools.chain.from_iterable(spaces(one_after_other(seed, keep), chunks))


def spaces(candidates: Iterable[Candidate], chunks: Sequence[int] = (2, 4)) -> Iterator[tuple[Candidate, ...]]:
    """The candidates, each followed by what overlaps its stages, by the shape of the trace.

    Candidates of one space differ in what their trace samples (`sample_categorical`) and in nothing else: the number of
    chunks where stages overlap. Any of them is the space to a search that draws and changes samples.

    Parameters
    ----------
    candidates : Iterable[Candidate]
        Schedules whose stages run one after the other.
    chunks : Sequence[int]
        Into how many chunks overlapping stages may cut a device's slice.
    """
    seen: set[int] = set()
    for candidate in candidates:
        for space in ((candidate,), *_overlaps(candidate, chunks)):
            new = {structure(candidate.sch): candidate for candidate in space}
            fresh = tuple(candidate for key, candidate in new.items() if key not in seen)
            seen.update(new)
            if fresh:
                yield fresh


def one_after_other(seed: Schedule, keep: Collection[str] = ()) -> Iterator[Candidate]:
    """What the primitives make of `seed` but for overlaps, itself first, none twice.

    Parameters
    ----------
    seed : Schedule
        The program, shared over the mesh: its collectives are as `shard` and `all_reduce` left them.
    keep : Collection[str]
        Parameters that may stay sharded: the state that one step leaves to the next.
    """
    seen: set[int] = set()
    for split in _each_in_turn(Candidate(seed), _all_reduces, _splits):
        for moved in _each_in_turn(split, _gathers, _reorders):
            for fused in _fusions(_with_slices(moved, keep)):
                key = structure(fused.sch)
                if key not in seen:
                    seen.add(key)
                    yield fused


def beside_others(candidate: Candidate) -> Candidate | None:
    """The candidate with each collective beside others that can be, as its lowered form says; None if none can."""
    assert candidate.lowered is not None  # it says which stages are collectives
    kinds = {str(kind) for kind in Collective}
    collectives = [stage.name for stage in candidate.lowered.stages if stage.kind in kinds]
    marked = candidate
    for name in collectives:
        further = marked.then(f"beside({name})", functools.partial(_mark, name=name))
        marked = marked if further is None else further
    return None if marked is candidate else marked


def _mark(sch: Schedule, name: str) -> None:
    sch.beside(sch.get_sblock(name))


def in_one_meeting(candidate: Candidate) -> Candidate | None:
    """The candidate with its last all-reduce and what follows it in one kernel, as far as that goes; or None."""
    nests, found = candidate.nests(), None
    for at, nest in enumerate(nests):
        if len(nest) > 1 or nest[0] not in _all_reduces(candidate):
            continue
        chain = list(nest)
        for other in nests[at + 1 :]:
            if len(other) > 1 or is_product(candidate.tree.named(other[0]).block):
                break
            further = candidate.then(
                f"fuse_collective([{', '.join([*chain, *other])}])", functools.partial(_fuse, names=[*chain, *other])
            )
            if further is None:
                break
            chain, found = [*chain, *other], further
    return found


def _fuse(sch: Schedule, names: Sequence[str]) -> None:
    sch.fuse_collective([sch.get_sblock(name) for name in names])


def structure(sch: s_tir.Schedule) -> int:
    """A hash of the scheduled function, whatever it is called: equal for two ways to one function."""
    return tvm_ffi.structural_hash(sch.mod["main"].without_attr("global_symbol"))


def _each_in_turn(
    candidate: Candidate,
    find: Callable[[Candidate], list[str]],
    options: Callable[[Candidate, str], Iterator[Candidate]],
    passed: frozenset[str] = frozenset(),
) -> Iterator[Candidate]:
    """Every choice for every block that `find` finds: to leave it, or one of its options, which may bring new ones."""
    name = next((name for name in find(candidate) if name not in passed), None)
    if name is None:
        yield candidate
        return
    yield from _each_in_turn(candidate, find, options, passed | {name})
    for option in options(candidate, name):
        yield from _each_in_turn(option, find, options, passed | {name})


def _all_reduces(candidate: Candidate) -> list[str]:
    """The all-reduces of more elements than there are devices: a smaller one only gets slower in two steps."""
    found = []
    for nest in candidate.tree.blocks:
        peers = bound_loops(nest, REDUCE)
        scattered = set(peers) & set(bound_loops(nest, SPATIAL))
        if peers and not scattered and root_of(nest.block) is None:
            size = math.prod(int(extent) for extent in nest.block.body.buffer.shape)
            found += [str(nest.block.name_hint)] if size > candidate.sch.mesh.size else []
    return found


def _splits(candidate: Candidate, name: str) -> Iterator[Candidate]:
    nest = candidate.tree.named(name)
    shape = [int(extent) for extent in nest.block.body.buffer.shape]
    (axis,) = bound_loops(nest, REDUCE)
    devices = candidate.sch.mesh.axis_size(axis)
    dims = [("dim", dim) for dim, extent in enumerate(shape) if extent >= devices]
    for which, number in [*dims, ("root", 0)]:

        def split(sch: Schedule, which: str = which, number: int = number) -> None:
            sch.split_collective(sch.get_sblock(name), **{which: number})

        found = candidate.then(f"split_collective({name}, {which}={number})", split)
        if found is not None:
            yield found


def _gathers(candidate: Candidate) -> list[str]:
    """The all-gathers that something reads."""
    tree = candidate.tree
    return [
        str(nest.block.name_hint) for nest in tree.blocks if tree.consumers(nest) and gathered(tree, nest) is not None
    ]


def _reorders(candidate: Candidate, gather: str) -> Iterator[Candidate]:
    """The gather behind its readers, behind theirs too, and so on as far as it goes."""
    tree, order = candidate.tree, candidate.blocks()
    consumers: list[str] = []
    frontier = _readers(tree, gather)
    while frontier:
        further = sorted({*consumers, *frontier}, key=order.index)
        found = _reordered(candidate, gather, further)
        if found is None:
            # What can't compute on slices is left behind, unless it reads the gathered buffer itself.
            along = [name for name in frontier if consumers and _reordered(candidate, gather, [*consumers, name])]
            if not along or len(along) == len(frontier):
                return
            frontier = along
            continue
        yield found
        consumers = further
        behind = {reader for name in consumers for reader in _readers(tree, name)}
        frontier = sorted(behind - set(consumers), key=order.index)


def _reordered(candidate: Candidate, gather: str, consumers: Sequence[str]) -> Candidate | None:
    def reorder(sch: Schedule) -> None:
        sch.reorder_collective(sch.get_sblock(gather), [sch.get_sblock(name) for name in consumers])

    return candidate.then(f"reorder_collective({gather}, [{', '.join(consumers)}])", reorder)


def _readers(tree: BlockTree, name: str) -> list[str]:
    return [str(reader.block.name_hint) for reader in tree.consumers(tree.named(name))]


def _with_slices(candidate: Candidate, keep: Collection[str]) -> Candidate:
    """The candidate with what may stay sharded left so: it saves a gather and costs nothing."""
    tree = candidate.tree
    for nest in tree.blocks:
        if nest.block.body.buffer.name in keep and gathered(tree, nest) is not None:
            name = str(nest.block.name_hint)

            def as_slice(sch: Schedule, name: str = name) -> None:
                sch.as_slice(sch.get_sblock(name))

            further = candidate.then(f"as_slice({name})", as_slice)
            candidate = candidate if further is None else further
    return candidate


def _fusions(candidate: Candidate, start: int = 0) -> Iterator[Candidate]:
    """Every way to fuse: from the first nest on, each alone, with as many as go without communicating, or with all."""
    nests = _chains(candidate)
    if start >= len(nests):
        yield candidate
        return
    tried: set[int] = set()
    for length in _lengths(candidate, nests, start):
        if length in tried:
            continue
        tried.add(length)
        fused = candidate if length == 1 else _fused(candidate, nests[start : start + length])
        if fused is not None:
            yield from _fusions(fused, start + 1)


def _chains(candidate: Candidate) -> list[list[str]]:
    """The nests in program order, but for copies that leave slices to the caller: each behind what it copies.

    `as_slice` leaves them where their gathers were, at the end, between others that could be one kernel.
    """
    tree, nests = candidate.tree, candidate.nests()
    order = list(nests)
    for nest in nests:
        block = tree.named(nest[0])
        if len(nest) == 1 and is_copy(block.block) and not _communicates(candidate.sch, nest[0]):
            sources = {str(producer.block.name_hint) for producer in tree.producers(block)}
            behind = next((other for other in order if sources & set(other) and other is not nest), None)
            if behind is not None and tree.is_parameter(block.block.body.buffer):
                order.remove(nest)
                order.insert(order.index(behind) + 1, nest)
    return order


def _lengths(candidate: Candidate, nests: Sequence[Sequence[str]], start: int) -> list[int]:
    """How many nests from `start` on may become one: 1, the most that compute only, the most of all.

    A matmul stays alone, as it is tuned.
    """
    most = start + 1
    while (
        most < len(nests)
        and not any(
            is_product(candidate.tree.named(name).block) for nest in (nests[start], nests[most]) for name in nest
        )
        and _fused(candidate, nests[start : most + 1]) is not None
    ):
        most += 1
    communicates = [any(_communicates(candidate.sch, name) for name in nest) for nest in nests]
    computing = next((i for i in range(start, most) if communicates[i]), most)
    # Computing of one kernel is never worse than of several.
    return [computing - start if computing > start + 1 else 1, most - start]


def _communicates(sch: Schedule, name: str) -> bool:
    """Whether a block reads its peers, or is a copy that gathers or broadcasts."""
    tree = query.tree(sch)
    return _exchanges(tree, tree.named(name), sch.mesh)


@functools.lru_cache(maxsize=4096)
def _exchanges(tree: BlockTree, nest: NestedBlock, mesh: Mesh) -> bool:
    stmt, own = nest.block, sharded_dims(nest)
    gathers = is_copy(stmt) and set(sharded_over(tree, nest, stmt.body.value.source, mesh)) - set(own)
    broadcasts = any(root_of(producer.block) is not None for producer in tree.producers(nest))
    return bool(gathers) or broadcasts or bool(bound_loops(nest, REDUCE))


def _fused(candidate: Candidate, nests: Sequence[Sequence[str]]) -> Candidate | None:
    """The candidate with neighbouring nests in one: a mesh kernel, or a loop over the rows of what is not shared."""
    if any(len(nest) > 1 for nest in nests):
        return None
    names = [nest[0] for nest in nests]
    blocks = [candidate.tree.named(name) for name in names]
    if bound_loops(blocks[0], SPATIAL):
        return candidate.then(f"fuse_collective([{', '.join(names)}])", functools.partial(_fuse, names=names))
    if (
        not all(nest.block.init is None for nest in blocks)
        or any(_communicates(candidate.sch, name) for name in names)
        or any(bound_loops(nest, SPATIAL) for nest in blocks)
    ):
        return None

    def fuse_rows(sch: Schedule) -> None:
        row = sch.get_loops(sch.get_sblock(names[0]))[0]
        for name in names[1:]:
            sch.reverse_compute_at(sch.get_sblock(name), row)

    return candidate.then(f"reverse_compute_at([{', '.join(names[1:])}], {names[0]})", fuse_rows)


def _overlaps(candidate: Candidate, chunks: Sequence[int]) -> Iterator[tuple[Candidate, ...]]:
    """Two or three neighbouring stages that communicate, chunk by chunk; with each number of chunks that divides."""
    nests = candidate.nests()
    for start in range(len(nests)):
        for length in (2, 3):
            window = nests[start : start + length]
            if len(window) < length or not any(_communicates(candidate.sch, name) for nest in window for name in nest):
                continue
            stages = [nest[0] for nest in window]
            blocks = [candidate.tree.named(name) for name in stages]
            for axis in candidate.sch.mesh.names:
                try:
                    cuts = cuts_of(candidate.tree, blocks, axis, candidate.sch.mesh)
                except ScheduleError:
                    continue
                counts = [count for count in chunks if all(cut.takes(count) for cut in cuts)]
                found = [_overlapped(candidate, stages, axis, counts, n) for n in range(len(counts))]
                if None in found:  # what upstream refuses isn't to be drawn either
                    counts = [count for count, overlap in zip(counts, found) if overlap is not None]
                    found = [_overlapped(candidate, stages, axis, counts, n) for n in range(len(counts))]
                space = tuple(overlap for overlap in found if overlap is not None)
                if space:
                    yield space


def _overlapped(
    candidate: Candidate, stages: Sequence[str], axis: str, chunks: Sequence[int], decision: int
) -> Candidate | None:
    """The stages overlapped in a sampled number of chunks, here the one of that position in `chunks`."""

    def overlap(sch: Schedule) -> None:
        count = sch.sample_categorical(list(chunks), [1 / len(chunks)] * len(chunks), decision)
        sch.overlap([sch.get_sblock(name) for name in stages], axis, count)

    return candidate.then(f"overlap([{', '.join(stages)}], {axis}, {chunks[decision]})", overlap)
