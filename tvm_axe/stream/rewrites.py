"""Optimizations as rewrites: from a program to another that computes the same.

Each replays the program's operators into a new one, in which some are replaced; so every shape rule is checked again.
Source: Streaming Tensor Programs (arXiv 2511.07776), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tvm_axe.errors import StreamError
from tvm_axe.stream.functions import TileFunction, number
from tvm_axe.stream.operators.endpoints import FeedbackEdge, Input
from tvm_axe.stream.operators.higher import Accum
from tvm_axe.stream.operators.loops import LoopHead
from tvm_axe.stream.operators.off_chip import LinearLoad
from tvm_axe.stream.operators.routing import Partition
from tvm_axe.stream.operators.shape import Reshape
from tvm_axe.stream.program import Feedback, Node, Stream, StreamProgram
from tvm_axe.stream.types import Scalar, Selector, StreamType
from tvm_axe.stream.views import View

Hook: TypeAlias = Callable[[StreamProgram, Node, list[Stream]], Sequence[Stream] | None]
"""What a node becomes in the new program, given its inputs there; None for the same operator again."""


def dynamic_tiling(program: StreamProgram) -> StreamProgram:
    """Pack rows into one tile of all there are, instead of tiles of a fixed height whose last one is filled up.

    ::

        rows, padding = x.reshape(16, pad=zero)        rows = x.reshape(None)
        tile = rows.accum(retile())               ->   padding = rows.map(0)
                                                       tile = rows.accum(retile())

    Raises
    ------
    StreamError
        If the program packs nothing into filled-up tiles.
    """
    found = False

    def hook(new: StreamProgram, node: Node, inputs: list[Stream]) -> Sequence[Stream] | None:
        nonlocal found
        if not isinstance(node.operator, Reshape) or node.operator.pad is None:
            return None
        if not any(isinstance(c.operator, Accum) and c.operator.function.grows == 0 for c in node.outputs[0].consumers):
            return None
        found = True
        rows = inputs[0].reshape(None, name=node.name)
        real = number("no_padding", lambda _: 0, Scalar("int8"), cycles=0)
        return rows, rows.map(real, name=f"{node.name}_padding")

    rewritten = _Replay(program, hook).program
    if not found:
        raise StreamError(f"dynamic_tiling: program {program.name!r} has no padded Reshape whose pieces a retile packs")
    return rewritten


def dynamic_parallelization(program: StreamProgram, selector: str, finished: Sequence[str]) -> StreamProgram:
    """Send each request to the region that is the first to be free, instead of where an input says.

    ::

        parts = x.partition(p.input("region", ...))        free = p.feedback("region", ..., initial=one a region)
        ...                                           ->   parts = x.partition(free.stream)
                                                           ...
                                                           signals, region = p.eager_merge(finished)
                                                           free.close(region)

    Parameters
    ----------
    selector : str
        The input whose selectors partition the requests among the regions.
    finished : Sequence[str]
        The stream of each region of which one tensor, of all but its outermost dim, ends when a request is dealt with.

    Raises
    ------
    StreamError
        If there are no such streams, or the selectors do more than partition: the order of results depends on them.
    """
    origin = program.stream(selector)
    data = origin.type.data
    if not isinstance(origin.node.operator, Input) or not isinstance(data, Selector) or origin.type.rank != 1:
        raise StreamError(f"dynamic_parallelization: {selector!r} must be an input of selectors [n], not {origin}")
    if len(finished) != data.outputs:
        raise StreamError(f"dynamic_parallelization: finished must name {data.outputs} streams, not {len(finished)}")
    for taker in origin.consumers:
        if not isinstance(taker.operator, Partition):
            raise StreamError(
                f"dynamic_parallelization: {taker.kind} {taker.name!r} takes the selectors too, in the order of "
                "the requests; collect results by eager_merge or store_at"
            )
    for at, name in enumerate(finished):
        heads = [taker.outputs[at] for taker in origin.consumers]
        if not any(program.stream(name).node in _behind(head) for head in heads):
            raise StreamError(
                f"dynamic_parallelization: finished stream {name!r} comes of nothing that region {at} gets, "
                f"{', '.join(head.name for head in heads)}"
            )
    kind = StreamType((program.stream(finished[0]).type.shape[0],), data)
    loop: list[Feedback] = []

    def hook(new: StreamProgram, node: Node, inputs: list[Stream]) -> Sequence[Stream] | None:
        if node is not origin.node:
            return None
        initial = [(region,) for region in range(data.outputs)]
        loop.append(new.feedback(node.name, kind, 2 * data.outputs, initial))
        return (loop[0].stream,)

    replay = _Replay(program, hook)
    replay.streams[origin].depth = 2 * data.outputs
    done = number("finished", lambda *_: 1, initial=0, cycles=0)
    signals = []
    for name in finished:
        stream = replay.streams[program.stream(name)]
        rank = stream.type.rank
        signals.append(stream.accum(done, rank=rank - 1) if rank > 1 else stream.map(done))
    merged, region = replay.program.eager_merge(signals, name=f"{selector}_free")
    merged.discard()
    loop[0].close(region)
    return replay.program


def time_multiplexing(program: StreamProgram, regions: Sequence[tuple[str, str]], share: int) -> StreamProgram:
    """Let `share` regions that compute the same with different weights be one, which takes whichever has something.

    ::

        y0 = f(x0, x0.load(w, tile, View(shape, strides, 0)))      x, origin = p.eager_merge([x0, x1])
        y1 = f(x1, x1.load(w, tile, View(shape, strides, n)))  ->  y = f(x, origin.flat_map(addresses).load_at(w, tile))
                                                                   y0, y1 = y.partition(origin)

    Parameters
    ----------
    regions : Sequence[tuple[str, str]]
        The stream that enters each region and the one that leaves it.
    share : int
        How many, one after the other, become one.

    Raises
    ------
    StreamError
        If the number of regions isn't a multiple, or regions differ in more than the offsets of what they load.
    """
    if share < 1 or not regions or len(regions) % share:
        raise StreamError(f"time_multiplexing: share={share} must divide the number of regions, {len(regions)}")
    every = [_Region(program.stream(entry), program.stream(out)) for entry, out in regions]
    groups = [every[at : at + share] for at in range(0, len(every), share)]
    for group in groups:
        for other in group[1:]:
            group[0].check_alike(other)
    return _Replay(program, lambda new, node, inputs: None, groups).program


def _behind(stream: Stream) -> set[Node]:
    """Return the operators that what a stream carries can reach."""
    found = set(stream.consumers)
    for node in stream.program.nodes:
        if any(taken.node in found for taken in node.inputs):
            found.add(node)
    return found


class _Region:
    """The operators between a stream that enters and one that leaves."""

    def __init__(self, entry: Stream, out: Stream) -> None:
        self.entry, self.out = entry, out
        before, after = {out.node}, _behind(entry)
        for node in reversed(entry.program.nodes):
            if any(taker in before for stream in node.outputs for taker in stream.consumers):
                before.add(node)
        inside = before & after
        self.nodes = [node for node in entry.program.nodes if node in inside]
        self.name = f"the region from {entry.name!r} to {out.name!r}"
        if out.node not in inside:
            raise StreamError(f"time_multiplexing: {out.name!r} doesn't come of {entry.name!r}")
        for node in self.nodes:
            if isinstance(node.operator, LoopHead):
                raise StreamError(
                    f"time_multiplexing: {self.name} has loop {node.name!r} in it, where elements of several regions "
                    "would end in another order than they came in"
                )
            for stream in node.inputs:
                if stream is not entry and stream.node not in inside:
                    raise StreamError(f"time_multiplexing: {self.name} takes {stream.name!r} too, from outside")
            for stream in node.outputs:
                if stream is not out and any(taker not in inside for taker in stream.consumers):
                    raise StreamError(f"time_multiplexing: {self.name} sends {stream.name!r} too, to the outside")

    def check_alike(self, other: _Region) -> None:
        """Raise an error unless the two differ only in the offsets of what they load."""
        alike = len(self.nodes) == len(other.nodes)
        partners = {self.entry: other.entry}
        for node, partner in zip(self.nodes, other.nodes):
            alike &= _same_operator(node, partner) and [partners.get(s) for s in node.inputs] == partner.inputs
            partners.update(zip(node.outputs, partner.outputs))
            if not alike:
                raise StreamError(
                    f"time_multiplexing: {self.name} and {other.name} must be alike but for the offsets of what they "
                    f"load, and differ in {node.kind} {node.name!r} and {partner.kind} {partner.name!r}"
                )
        if not alike or partners.get(self.out) is not other.out:
            raise StreamError(f"time_multiplexing: {self.name} and {other.name} don't have the same operators")


def _same_operator(node: Node, other: Node) -> bool:
    if type(node.operator) is not type(other.operator):
        return False
    mine, others = vars(node.operator), vars(other.operator)
    return mine.keys() == others.keys() and all(_same(mine[name], others[name]) for name in mine)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, View) and isinstance(b, View):
        return (a.shape, a.strides) == (b.shape, b.strides)
    if isinstance(a, TileFunction) and isinstance(b, TileFunction):
        return a.name == b.name
    if callable(a) and callable(b):
        return getattr(a, "__code__", a) == getattr(b, "__code__", b)
    return a is b or (not isinstance(a, np.ndarray) and bool(a == b))


class _Replay:
    """A program built again from another's operators.

    Attributes
    ----------
    program : StreamProgram
        The new one; it shares the tensors.
    streams : dict
        What each stream of the old one has become.
    """

    def __init__(self, old: StreamProgram, hook: Hook, groups: Sequence[Sequence[_Region]] = ()) -> None:
        self.program, self.hook = StreamProgram(old.name), hook
        self.program.tensors = dict(old.tensors)
        self.streams: dict[Stream, Stream] = {}
        inside = {node for group in groups for region in group for node in region.nodes}
        left: list[Node | Sequence[_Region]] = [node for node in old.nodes if node not in inside]
        left += groups
        while left:
            # A region that several share needs all of what enters it, so operators are moved behind their inputs.
            ready = [item for item in left if all(stream in self.streams for stream in _needs(item))]
            for item in ready:
                if isinstance(item, Node):
                    self._copy(item)
                else:
                    self._share(item)
            left = [item for item in left if item not in ready]
        self._close(old)

    def _copy(self, node: Node) -> None:
        inputs = [] if isinstance(node.operator, FeedbackEdge) else [self.streams[stream] for stream in node.inputs]
        made = self.hook(self.program, node, inputs)
        if made is None and isinstance(node.operator, FeedbackEdge):
            (stream,) = node.outputs
            made = (Feedback(self.program, node.name, stream.type, stream.depth or 1, node.operator.initial).stream,)
        if made is None:
            made = self.program.add(node.operator, inputs, node.name)
        self._know(node.outputs, made)

    def _know(self, old: Sequence[Stream], new: Sequence[Stream]) -> None:
        for before, after in zip(old, new):
            after.depth, after.discarded = before.depth, before.discarded
            self.streams[before] = after

    def _share(self, group: Sequence[_Region]) -> None:
        """Build one region for a group."""
        first = group[0]
        entries = [self.streams[region.entry] for region in group]
        if len(group) == 1:
            for node in first.nodes:
                self._copy(node)
            return
        merged, origin = self.program.eager_merge(entries, name=f"{first.entry.name}_shared")
        inside: dict[Stream, Stream] = {first.entry: merged}
        for at, node in enumerate(first.nodes):
            inputs = [inside[stream] for stream in node.inputs]
            views = [getattr(region.nodes[at].operator, "view", None) for region in group]
            if isinstance(node.operator, LinearLoad) and len(set(views)) > 1:
                made: Sequence[Stream] = (self._load(node, inputs[0], origin, views),)
            else:
                made = self.program.add(node.operator, inputs, node.name)
            for before, after in zip(node.outputs, made):
                after.depth, after.discarded = before.depth, before.discarded
                inside[before] = after
        out = inside[first.out]
        parts = out.partition(origin, out.type.rank - 1, name=f"{first.out.name}_shared")
        for region, part in zip(group, parts):
            self._know([region.out], [part])

    def _load(self, node: Node, like: Stream, origin: Stream, views: Sequence[Any]) -> Stream:
        """Load at the addresses of the region that the element comes from, instead of a view of its own."""
        operator = node.operator
        assert isinstance(operator, LinearLoad)
        across = operator.grid(node)[1]
        whole = View((operator.grid(node)[0], across), (across, 1)) if None in views else views[0]
        tables = [np.reshape((view or whole).positions(), whole.shape).tolist() for view in views]
        wanted = origin.expand(like) if like.type.rank > 1 else origin
        kind = StreamType(whole.shape, Scalar())
        addresses = wanted.flat_map(lambda chosen: tables[chosen[0]], kind, name=f"{node.name}_addresses")
        return addresses.load_at(operator.tensor, operator.data, name=node.name)

    def _close(self, old: StreamProgram) -> None:
        for node in old.nodes:
            if isinstance(node.operator, FeedbackEdge) and node.inputs:
                loop = self.streams[node.outputs[0]].node.operator
                assert isinstance(loop, FeedbackEdge)
                loop.feedback.close(self.streams[node.inputs[0]])


def _needs(item: Node | Sequence[_Region]) -> list[Stream]:
    if isinstance(item, Node):
        return [] if isinstance(item.operator, FeedbackEdge) else item.inputs
    return [region.entry for region in item]
