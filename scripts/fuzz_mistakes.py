"""Mistakes that `fuzz_injecting` makes in the package, to show that `fuzz_schedules` finds them.

Each is what somebody could have written: a check left out, a neighbour's slice, a barrier too few. It is made by
exchanging a function for as long as its patch is entered. Workers on threads meet it too.

Of the primitives' checks some aren't here, as leaving them out makes no answer wrong: a primitive is made of stock
instructions, which keep what a function computes, and lowering refuses or gathers what a device doesn't own. So it is
with the links of `fuse_collective`, with what is live out of `reorder_collective` or isn't pointwise in it, and with
the dimensions over which a gather is shared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.patterns import loads_of
from tvm_axe.collective import plan, sync, worker
from tvm_axe.lower import derive, emit, localize, parsing, plain, reaching
from tvm_axe.schedule import caching, fusing, overlapping, query, redistributing, reordering, sharding


@dataclass(frozen=True)
class Mistake:
    """A patch, what it is in words, and whether workers must stumble for it to show."""

    area: str
    words: str
    patch: Callable[[], AbstractContextManager[Any]]
    delays: bool = False


def _nothing(*_: Any, **__: Any) -> None:
    """What a check that was left out does."""


def _without(owner: Any, name: str) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, _nothing)


def _instead(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Exchange a function by one that gets it as its first argument."""
    before = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, lambda *args, **kwargs: change(before, *args, **kwargs))


def _planned(name: str, change: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Exchange the plan of a collective by one that gets it as its first argument."""
    before = plan._PLANS[name]
    return lambda: mock.patch.dict(plan._PLANS, {name: lambda *args, **kwargs: change(before, *args, **kwargs)})


# ---- Lowering --------------------------------------------------------------------------------------------------------


def _is_any_load(block: s_tir.SBlock) -> bool:
    store = block.body
    return isinstance(store, tirx.BufferStore) and isinstance(store.value, ir.TensorLoad) and not block.init


def _last_peer_left_out(whole: Callable[..., Any], localizer: Any, block: Any) -> Any:
    wrap = whole(localizer, block)
    if wrap is None:
        return None

    def shorter(body: tirx.Stmt) -> tirx.Stmt:
        loop = wrap(body)
        return tirx.For(loop.loop_var, 0, max(int(loop.extent) - 1, 1), loop.kind, loop.body)

    return shorter


def _unmasked(whole: Callable[..., Any], localizer: Any, block: Any) -> Any:
    always = tirx.IntImm("bool", 1)
    return tvm_ffi.structural_map(
        whole(localizer, block),
        (s_tir.SBlockRealize, lambda realize: s_tir.SBlockRealize(realize.iter_values, always, realize.block)),
    )


@contextlib.contextmanager
def _any_reduction_is_a_sum() -> Iterator[None]:
    def foreign(block: s_tir.SBlock) -> ir.TensorLoad | None:
        loads = [
            load for region in block.reads for load in loads_of(block, region.source)
            if not load.source.same_as(block.body.buffer)
        ]  # fmt: skip
        return loads[0] if block.init is not None and len(loads) == 1 else None

    with (
        mock.patch.object(plain, "summed", foreign),
        mock.patch.object(plain, "is_sum", lambda block: foreign(block) is not None),
    ):
        yield


@contextlib.contextmanager
def _any_load_is_a_copy() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module in (derive, plain, reaching):
            stack.enter_context(mock.patch.object(module, "is_copy", _is_any_load))
        yield


LOWERING = {
    "push unseen": Mistake(
        "derive",
        "a slice that is stored to what all devices hold is stored on its own device only",
        lambda: mock.patch.object(reaching, "push_axes", lambda *_: []),
    ),
    "read unseen": Mistake(
        "derive",
        "a read beyond the device's own piece is taken for one of it",
        lambda: mock.patch.object(reaching, "remote_axes", lambda *_: []),
    ),
    "two phases": Mistake(
        "derive", "a kernel may exchange what it touches elsewhere, too", _without(derive, "_check_one_phase")
    ),
    "any load is a copy": Mistake(
        "derive",
        "a transposed or shifted copy is taken for a plain one",
        _any_load_is_a_copy,
    ),
    "a max is a sum": Mistake("derive", "any reduction over devices is done by adding", _any_reduction_is_a_sum),
    "shift backwards": Mistake(
        "derive",
        "a send goes to the place before, not behind",
        _instead(plain, "shift_of", lambda whole, block: None if (k := whole(block)) is None else -k),
    ),
    "last peer left out": Mistake(
        "localize",
        "a store for all devices reaches all but the last",
        _instead(localize._Localizer, "peer_loop", _last_peer_left_out),
    ),
    "masks dropped": Mistake(
        "localize",
        "a device with less than the others goes on beyond its share",
        _instead(localize._Localizer, "block", _unmasked),
    ),
    "stride of one axis": Mistake(
        "localize",
        "the next slab along an axis is looked for right behind, whatever other axes the mesh has",
        lambda: mock.patch.object(
            localize, "flat_stride", lambda sharding, dtype, axis: localize.slab_stride(sharding.slab, dtype)
        ),
    ),
    "domains unchecked": Mistake("program", "iterators may leave their domains", _without(parsing, "_check_domains")),
}


# ---- Barriers --------------------------------------------------------------------------------------------------------


def _no_write_after_read(whole: Callable[..., Any], groups: Any, *others: Any) -> list[bool]:
    """Barriers before what reads others' alone, none before what overwrites what others may still read."""
    found = whole(groups, *others)
    return [barrier and any(step.pulled for step in group) for barrier, group in zip(found, groups)]


BARRIERS = {
    "no barrier": Mistake(
        "emit",
        "no stage waits for another",
        lambda: mock.patch.object(emit, "barriers_before", lambda groups, *_: [False for _ in groups]),
        delays=True,
    ),
    "only reads wait": Mistake(
        "order",
        "what others may still read is overwritten, or read before they pushed it",
        _instead(emit, "barriers_before", _no_write_after_read),
        delays=True,
    ),
    "chunks don't wait": Mistake(
        "order",
        "an overlapping stage doesn't wait for its peers' chunks",
        _instead(emit, "pipeline", lambda whole, *args: [replace(work, behind=None) for work in whole(*args)]),
        delays=True,
    ),
    "barrier arrives only": Mistake(
        "engine",
        "a barrier says that its worker is there and waits for nobody",
        lambda: mock.patch.object(worker.Worker, "barrier", worker.Worker.arrive),
        delays=True,
    ),
    "a generation behind": Mistake(
        "engine",
        "a wait ends an arrival too early",
        _instead(
            sync.Control, "wait", lambda whole, self, rank, behind, timeout: whole(self, rank, behind + 1, timeout)
        ),
        delays=True,
    ),
}


# ---- Collectives -----------------------------------------------------------------------------------------------------


def _floored(extent: int, parts: int, rank: int) -> slice:
    size = extent // parts
    return slice(rank * size, extent if rank == parts - 1 else (rank + 1) * size)


def _of_the_next(whole: Callable[..., Any], *args: Any, parts: int, rank: int) -> Any:
    return whole(*args, parts=parts, rank=(rank + 1) % parts)


def _one_term_less(whole: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    moves = whole(*args, **kwargs)
    return [replace(m, source=replace(m.source, slabs=m.source.slabs[:-1] or m.source.slabs)) for m in moves]


COLLECTIVES = {
    "pieces by floor": Mistake(
        "plan",
        "an uneven extent is shared in pieces of its floor, the rest to the last device",
        lambda: mock.patch.object(plan, "chunk", _floored),
    ),
    "gathered to one place": Mistake(
        "plan",
        "an all-gather's blocks all go to the first place",
        _planned("all_gather", lambda whole, *args, parts, rank: whole(*args, parts=parts, rank=0)),
    ),
    "a neighbour's slice": Mistake(
        "plan",
        "a reduce-scatter sums the next device's slice",
        _planned(
            "reduce_scatter", lambda whole, *args, parts, rank: whole(*args, parts=parts, rank=(rank + 1) % parts)
        ),
    ),
    "a term less": Mistake("plan", "an all-reduce leaves out the last device", _planned("all_reduce", _one_term_less)),
    "root is 0": Mistake(
        "plan",
        "a reduce is always to device 0",
        _planned("reduce", lambda whole, source, target, root, **where: whole(source, target, 0, **where)),
    ),
    "exchanged to the wrong slice": Mistake(
        "plan",
        "an all-to-all takes the next device's share",
        _planned("all_to_all", _of_the_next),
    ),
}


# ---- Primitives ------------------------------------------------------------------------------------------------------


def _of_others(block: s_tir.SBlock, buffer: tirx.Buffer) -> list[ir.TensorLoad]:
    """A block's loads of a buffer; none of one that it stores to."""
    return [] if block.body.buffer.same_as(buffer) else loads_of(block, buffer)


def _nothing_is_written(sch: s_tir.Schedule) -> Any:
    """The schedule's block tree, in whose order of blocks none says that it writes anything."""
    tree = query.tree(sch)
    silent = [SimpleNamespace(block=SimpleNamespace(writes=[], same_as=b.block.same_as)) for b in tree.blocks]
    return Silent(tree, silent)


class Silent:
    """A block tree with other blocks."""

    def __init__(self, tree: Any, blocks: list[Any]) -> None:
        self._tree, self.blocks = tree, blocks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)


PRIMITIVES = {
    "fuse: masks unchecked": Mistake("fusing", "a mask is lost on the way", _without(fusing, "_check_mask")),
    "fuse: unfinished sums": Mistake(
        "fusing", "a reader is moved into the loop of a sum that isn't complete", _without(fusing, "_check_finished")
    ),
    "overlap: chunks not carried": Mistake(
        "overlapping", "a stage may read beyond its chunk", _without(overlapping, "_check_carried")
    ),
    "reorder: in place": Mistake(
        "reordering",
        "a consumer that updates what it stores to is given slices to gather",
        lambda: mock.patch.object(reordering, "loads_of", _of_others),
    ),
    "split: copies too much": Mistake(
        "caching",
        "a gather copies more of a parameter than its block stores to",
        lambda: mock.patch.object(caching, "_stores_all", lambda _: True),
    ),
    "redistribute: written later": Mistake(
        "redistributing",
        "what is written only behind the reader is copied in front of it",
        lambda: mock.patch.object(
            redistributing, "query", SimpleNamespace(**{**vars(query), "tree": _nothing_is_written})
        ),
    ),
    "shard: devices without work": Mistake(
        "sharding", "a reduction leaves devices without a term", _without(sharding, "_check_every_device_works")
    ),
}


MISTAKES: dict[str, Mistake] = {**LOWERING, **BARRIERS, **COLLECTIVES, **PRIMITIVES}
"""All of them, by name."""
