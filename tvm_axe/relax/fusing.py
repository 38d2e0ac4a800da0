"""Steps of a device as fewer kernels: what stays on the device between two of them needn't go through memory.

It is done when it is known what is moved between devices (`tvm_axe.relax.steps`), by three rules, each of which joins
the functions of two kernels (`tvm_axe.lower.joining`):

1. What goes on with each element of a product, such as a bias, a residual, an activation, is its epilogue.
2. Elements go into the one that reads them: into a norm or a softmax row by row, into other elements.
3. A kernel does what a collective would, where it computes what is gathered, or of what is scattered: it adds up its
   peers' terms as it reads them, and stores to all what it has of a result.

With the third, what stands behind a row-parallel product is one kernel between two barriers: the sum of the terms of
its rows, bias and residual, the norm, and the store to all. The bytes are those of the two collectives. Values of which
a device has nothing but terms are put together before anything else, so that a bias counts once.
"""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import tvm
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.blocks import nested_blocks, statements
from tvm_axe.analysis.expressions import alike
from tvm_axe.analysis.patterns import Pattern, is_move, is_pointwise, loads_of, pattern_of
from tvm_axe.collective import SLAB
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.joining import joined
from tvm_axe.lower.shares import is_sharable
from tvm_axe.relax.forms import WHOLE
from tvm_axe.relax.steps import COPIES, JOIN, Mover, Spot, Step

__all__ = ["explained", "fused"]


def fused(steps: Sequence[Step], results: Sequence[Spot], mover: Mover, meets: bool) -> list[Step]:
    """The steps, some of them put together.

    Parameters
    ----------
    steps : Sequence[Step]
        In order.
    results : Sequence[Spot]
        What is left.
    mover : Mover
        Of the function.
    meets : bool
        Whether kernels may do what collectives would.
    """
    fuser = _Fuser(steps, results, mover, meets)
    fuser.run()
    return fuser.order.steps


def explained(steps: Sequence[Step], meets: bool) -> list[str]:
    """In which form devices meet, and why, a line for each time that they do.

    Parameters
    ----------
    steps : Sequence[Step]
        What `fused` made.
    meets : bool
        As it was told.
    """
    lines = []
    for at, step in enumerate(steps):
        if step.moves:
            lines.append(f"{' and '.join(step.moves)}: in the kernel {step.name}, which spares a pass over memory each")
        elif step.kind == COPIES:
            lines.append(f"{steps[at + 1].name}: beside it rows are copied to whom they are for")
        elif step.kind == JOIN:
            continue
        elif step.kind:
            lines.append(f"{step.kind}: the engine's collective, {_why_alone(steps, at, meets)}")
        elif step.func is not None and any(view != SLAB for view in step.views):
            lines.append(f"{step.name}: a kernel that takes from the peers' slabs, as no collective deals that out")
    return lines


def _why_alone(steps: Sequence[Step], at: int, meets: bool) -> str:
    """Why a collective is in no kernel."""
    step = steps[at]
    if not meets:
        return "which of the two is faster there isn't known, or kernels see no peers"
    if step.kind == Collective.REDUCE_SCATTER.operation:
        return "as what reads it neither goes on with its elements nor has rows of them"
    if step.kind == Collective.ALL_GATHER.operation:
        return "as a product makes what is gathered, or another device"
    return "as no kernel has a part of it"


class _Nests(NamedTuple):
    """What a function's nests are, as far as the rules ask."""

    blocks: tuple[s_tir.SBlock, ...]
    pointwise: bool
    product: bool


@lru_cache(maxsize=4096)
def _nests(func: tirx.PrimFunc) -> _Nests | None:
    """A function's nests, if each is loops around one block, of one that isn't for a kernel to compute."""
    if KERNEL in (func.attrs or {}) or not is_sharable(func):
        return None
    blocks = tuple(nested_blocks(nest)[0].block for nest in statements(func.body.block.body))
    patterns = [pattern_of(block) for block in blocks]
    return _Nests(blocks, all(map(is_pointwise, blocks)), Pattern.CONTRACTION in patterns)


_Keys = tuple[int, ...]
_Place = tuple[list[tirx.Expr], list[tirx.Expr]]
"""Indices, and the extents of what they index."""


def _same(some: _Place, other: _Place) -> bool:
    """Whether two places are one, as far as there are more than one: extents of 1 may be here or there."""
    found, wanted = (
        [index for index, extent in zip(indices, extents) if not _is_one(extent)] for indices, extents in (some, other)
    )
    return len(found) == len(wanted) and alike(found, wanted)


def _of(access: tirx.BufferStore | ir.TensorLoad) -> _Place:
    buffer = access.buffer if isinstance(access, tirx.BufferStore) else access.source
    return list(access.indices), list(buffer.shape)


def _iteration(block: s_tir.SBlock) -> _Place:
    """The place that a block's iterators count."""
    return [iv.var for iv in block.iter_vars], [iv.dom.extent for iv in block.iter_vars]


def _is_one(extent: tirx.Expr) -> bool:
    return isinstance(extent, tirx.IntImm) and int(extent) == 1


# Steps of a recurrence and layers call the same functions: of each it is worked out once.


@lru_cache(maxsize=4096)
def _is_elementwise(func: tirx.PrimFunc) -> bool:
    """Whether each element of what a function writes is made by itself, element by element on the way, too."""
    nests = _nests(func)
    assert nests is not None  # it is to be joined
    inside = [*func.body.block.alloc_buffers]
    for block in nests.blocks:
        if not is_pointwise(block) or not _same(_of(block.body), _iteration(block)):
            return False
        loads = [load for buffer in inside for load in loads_of(block, buffer)]
        if not all(_same(_of(load), _of(block.body)) for load in loads):
            return False
    return True


@lru_cache(maxsize=4096)
def _goes_on(func: tirx.PrimFunc, param: int, moves: bool, computed: bool = False) -> bool:
    """Whether a function goes on with each element of a parameter; if it `moves`, it may move what it has of that at
    last.

    Then it does more than that, unless that has been `computed` from what would be moved.
    """
    nests = _nests(func)
    assert nests is not None  # it is to be joined
    made, computes = [func.params[param]], computed or not moves
    for block in nests.blocks:
        if not is_pointwise(block):
            return False
        store, loads = block.body, [load for own in made for load in loads_of(block, own)]
        if not loads:
            continue
        made.append(store.buffer)
        same = _same(_of(store), _iteration(block)) and all(_same(_of(load), _of(store)) for load in loads)
        if not same and not (moves and is_move(block)):
            return False
        computes = computes or (same and not is_move(block))
    return computes


@lru_cache(maxsize=4096)
def _reads_rows(func: tirx.PrimFunc, param: int) -> bool:
    """Whether a function reads a parameter at its iterators alone, in their order, as a norm does."""
    nests, buffer = _nests(func), func.params[param]
    assert nests is not None  # it is to be joined
    for block in nests.blocks:
        iterators = [iv.var for iv in block.iter_vars]
        for load in loads_of(block, buffer):
            at = [next((n for n, var in enumerate(iterators) if var.same_as(index)), -1) for index in load.indices]
            known = [n for n, extent in zip(at, buffer.shape) if not _is_one(extent)]
            if -1 in known or known != sorted(set(known)):
                return False
    return True


class _Order:
    """Steps in order, with what is asked of them at every step: who makes a value, and who reads it."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: list[Step] = []
        self._numbers: dict[Step, int] = {}  # that ascend with the steps
        self._makers: dict[Spot, Step] = {}
        self._readers: dict[Spot, set[Step]] = defaultdict(set)
        # What the model calls beside kernels may store to what it takes, and some kernels do. None of them is joined.
        self._storing = [
            number for number, step in enumerate(steps) if step.over or (step.func is None and not step.kind)
        ]
        for number, step in enumerate(steps):
            self.steps.append(step)
            self._know(step, number)

    def _know(self, step: Step, number: int) -> None:
        self._numbers[step] = number
        self._makers.update(dict.fromkeys(step.outs, step))
        for spot in (*step.ins, *step.over):
            self._readers[spot].add(step)

    def _forget(self, step: Step) -> int:
        for spot in step.outs:
            if self._makers.get(spot) is step:
                del self._makers[spot]
        for spot in (*step.ins, *step.over):
            self._readers[spot].discard(step)
        return self._numbers.pop(step)

    def at(self, step: Step) -> int:
        """Where a step is."""
        return bisect_left(self.steps, self._numbers[step], key=self._numbers.__getitem__)

    def replace(self, step: Step, other: Step) -> None:
        """Have another step in the place of one."""
        self.steps[self.at(step)] = other
        self._know(other, self._forget(step))

    def remove(self, step: Step) -> None:
        """Leave a step out."""
        del self.steps[self.at(step)]
        self._forget(step)

    def maker(self, spot: Spot) -> Step | None:
        """The step that leaves a value; None of what there is from the start."""
        return self._makers.get(spot)

    def is_read_beside(self, spot: Spot, reader: Step) -> bool:
        """Whether another step than one takes a value."""
        return any(step is not reader for step in self._readers[spot])

    def may_wait(self, maker: Step, spot: Spot, reader: Step) -> bool:
        """Whether what is made may be made as late as it is read: nobody takes it before, nor changes what it is of."""
        first, last = self._numbers[maker], self._numbers[reader]
        return bisect_right(self._storing, first) == bisect_left(self._storing, last) and not any(
            self._numbers[step] < last for step in self._readers[spot]
        )


class _Fuser:
    def __init__(self, steps: Sequence[Step], results: Sequence[Spot], mover: Mover, meets: bool) -> None:
        self.results, self.mover, self.meets = set(results), mover, meets
        self.order = _Order(steps)
        self.gathers = not meets

    def run(self) -> None:
        """Join until nothing is left to join.

        What gathers blocks is no part of what reads them as long as what makes them may store them to all.
        """
        self._join_all()
        if self.meets:
            for step in [step for step in self.order.steps if _is_gather(step)]:
                self._given(step)
            self.gathers = True
            self._join_all()

    def _join_all(self) -> None:
        at = 0
        while at < len(self.order.steps):
            if self._joined_with_producer(self.order.steps[at]):
                at = 0 if at < 2 else at - 2
                continue
            at += 1

    # ---- What is joined

    def _joined_with_producer(self, reader: Step) -> bool:
        """Whether a kernel was joined with what makes one of its values."""
        if reader.func is None or (nests := _nests(reader.func)) is None or nests.product:
            return False
        for spot, view in reversed([*zip(reader.ins, reader.views)]):
            if view != SLAB or (producer := self.order.maker(spot)) is None:
                continue
            maker = self._as_kernel(producer)
            if (
                maker is not None
                and self._fits(maker, reader, nests, spot)
                and self.order.may_wait(producer, spot, reader)
            ):
                self._join(producer, maker, reader, spot)
                return True
        return False

    def _as_kernel(self, step: Step) -> Step | None:
        """A step as a kernel; a reduce-scatter as that which adds up what the device is to have."""
        if step.func is not None and (self.gathers or not _is_gather(step)):
            is_sum = step.transfer is not None and bool(step.transfer.source.partial)
            return replace(step, moves=(f"reduce-scatter of {self._name(step.ins[0])}",)) if is_sum else step
        if self.meets and step.kind == Collective.REDUCE_SCATTER.operation:
            (source,), (target,) = step.ins, step.outs
            assert step.transfer is not None  # it is a collective
            taken = self.mover.taken(source, target, step.transfer, step.transfer.axis)
            return replace(taken, moves=(f"reduce-scatter of {self._name(source)}",))
        return None

    def _fits(self, maker: Step, reader: Step, nests: _Nests, spot: Spot) -> bool:
        """Whether by the rules a reader takes in what makes one of its values."""
        assert maker.func is not None and reader.func is not None  # they are kernels
        made = _nests(maker.func)
        if made is None or len(maker.outs) != 1 or maker.over or reader.over or self._aliases(maker, reader):
            return False
        func, param = reader.func, reader.ins.index(spot)
        if reader.ins.count(spot) != 1:
            return False
        if made.product:
            last = made.blocks[-1].body
            behind = _behind_product(made)
            keeps = all(map(is_pointwise, behind)) and isinstance(last, tirx.BufferStore)
            # Where kernels don't meet, a GPU's stores a product where it is made.
            goes_on = _goes_on(func, param, self.meets, bool(behind))
            return keeps and goes_on and not self._is_read_elsewhere(spot, reader)
        if not _is_elementwise(maker.func):
            return _goes_on(func, param, False) and not self._is_read_elsewhere(spot, reader) and _is_norm(made)
        return _reads_rows(func, param) or (nests.pointwise and not self._is_read_elsewhere(spot, reader))

    def _aliases(self, maker: Step, reader: Step) -> bool:
        """Whether one kernel would see a value through two views, or write what it reads."""
        views: dict[Spot, set[str]] = {}
        for step in (maker, reader):
            for each in step.touches():
                views.setdefault(each.spot, set()).add(each.view)
        return any(len(found) > 1 for found in views.values())

    def _is_read_elsewhere(self, spot: Spot, reader: Step) -> bool:
        return spot in self.results or self.order.is_read_beside(spot, reader)

    def _join(self, producer: Step, maker: Step, reader: Step, spot: Spot) -> None:
        outs = [*(maker.outs if self._is_read_elsewhere(spot, reader) else ()), *reader.outs]
        both = self._both(maker, reader, outs, reader.name if maker.kind else None)
        self.order.remove(producer)
        self.order.replace(reader, both)

    def _both(self, first: Step, second: Step, outs: Sequence[Spot], name: str | None = None) -> Step:
        """Two kernels as one, of which some values come out."""
        assert first.func is not None and second.func is not None
        views = {each.spot: each.view for step in (first, second) for each in step.touches()}
        made = {*first.outs}
        ins = [*dict.fromkeys(spot for spot in (*first.ins, *second.ins) if spot not in made)]
        numbers: dict[Spot, int] = {}  # by their first appearance: what is joined in equal layers is joined once
        keys = [
            tuple(numbers.setdefault(spot, len(numbers)) for spot in spots)
            for spots in ((*first.ins, *first.outs), (*second.ins, *second.outs), ins, outs)
        ]
        free = *self.mover.ranks.values(), *self.mover.graph.sizes.values()
        return Step(
            name or f"{first.name}_{second.name}", tuple(ins), tuple(outs),
            tuple(views[spot] for spot in (*ins, *outs)), _joined(first.func, second.func, *keys, free),
            node=second.node or first.node, moves=(*first.moves, *second.moves),
        )  # fmt: skip

    # ---- What a kernel stores to all

    def _given(self, gather: Step) -> None:
        """Have what makes a share store it to all devices, if it may do so in the place of an all-gather."""
        (source,), (target,) = gather.ins, gather.outs
        maker = self.order.maker(source)
        if maker is None or maker.func is None or maker.over or (nests := _nests(maker.func)) is None or nests.product:
            return
        assert gather.transfer is not None  # it is a collective
        store = self.mover.given(source, target, gather.transfer)
        store = replace(store, moves=(f"all-gather of {self._name(source)}",))
        if self._aliases(maker, store):
            return  # what it stores to all along another axis is gathered along this one
        kept = [out for out in maker.outs if out != source or self._is_read_elsewhere(source, gather)]
        both = self._both(maker, store, [*kept, target], maker.name)
        self.order.remove(gather)
        self.order.replace(maker, both)

    def _name(self, spot: Spot) -> str:
        return self.mover.graph.values[spot[0]].name


def _is_gather(step: Step) -> bool:
    """Whether a step is an all-gather, by a collective or by a kernel."""
    of = step.transfer
    return of is not None and of.target == WHOLE and of.source.share is not None


def _is_norm(nests: _Nests) -> bool:
    """Whether a function reduces rows, and leaves what it makes of them."""
    return not nests.pointwise and is_pointwise(nests.blocks[-1])


@lru_cache(maxsize=4096)
def _joined(
    first: tirx.PrimFunc,
    second: tirx.PrimFunc,
    of_first: _Keys,
    of_second: _Keys,
    ins: _Keys,
    outs: _Keys,
    free: tuple[tirx.Var, ...],
) -> tirx.PrimFunc:
    return _tidied(joined([(first, of_first), (second, of_second)], ins, outs), free)


def _tidied(func: tirx.PrimFunc, free: Sequence[tirx.Var]) -> tirx.PrimFunc:
    """The function without nests that only move what it has made: that is stored or read where it is to be."""
    # A schedule takes no free variables.
    closed = tirx.PrimFunc([*func.params, *free], func.body, func.ret_type, func.attrs)
    sch = s_tir.Schedule(tvm.IRModule({"main": closed}))
    inside, analyzer = {*func.body.block.alloc_buffers}, Analyzer()
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        stmt = sch.get(block)
        if not is_move(stmt) or stmt.body.value.source not in inside:
            continue  # of what isn't made here
        elements = _points(stmt.body.value.source.shape)
        if not analyzer.can_prove_equal(elements, _points([iv.dom.extent for iv in stmt.iter_vars])):
            continue  # to several places, as to all devices
        makers = sch.get_producers(block)
        sums = any(sch.get(maker).init is not None for maker in makers)
        if not sums and any(len(sch.get_consumers(maker)) > 1 for maker in makers):
            continue  # upstream would leave other readers without what they read
        indices = stmt.body.value.indices
        if not sums and not _tvm.iter_map(indices, {iv.var: iv.dom for iv in stmt.iter_vars}):
            continue  # where a sum is divided upstream takes what is read twice to be read once
        turned = sch.compute_inline if sums else sch.reverse_compute_inline
        with contextlib.suppress(*_tvm.UPSTREAM_ERRORS):  # as of what can't be turned around
            turned(block)
    tidied = sch.mod["main"]
    return tirx.PrimFunc(tidied.params[: len(func.params)], tidied.body, tidied.ret_type, func.attrs)


def _points(extents: Sequence[tirx.Expr]) -> tirx.Expr:
    return functools.reduce(lambda a, b: a * b, extents, tirx.IntImm("int64", 1))


def _behind_product(nests: _Nests) -> list[s_tir.SBlock]:
    """The blocks behind the last product of a function."""
    last = max(at for at, block in enumerate(nests.blocks) if pattern_of(block) is Pattern.CONTRACTION)
    return [*nests.blocks[last + 1 :]]
