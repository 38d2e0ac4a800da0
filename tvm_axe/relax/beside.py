"""Products of a device's steps beside the copies of their rows: where devices have engines that copy.

What stands around a product that devices share is a collective on each side: rows are gathered in front of it, and sums
of terms scattered behind. Either takes as long as its bytes, and nothing runs beside it. So the product's rows are cut
by whose they are, and while it has some, others are copied:

| all-gather, product | product, reduce-scatter |
|---|---|
| the own rows are sent to all, beside | the product of the others' rows |
| the product of the own rows | these are sent to whose they are, beside |
| (joined, and met) | the product of the own rows |
| the product of the others' rows | (joined, and met) the sum with what has come |

It is two kernels of `tvm_axe.tile.kernels.pairs.matmul_of_shares`, and `axe.copy` on the side stream
(`tvm_axe.collective.side`). The sum goes into what reads its elements (`tvm_axe.relax.fusing`). On a GPU a product is
as long as its waves of blocks, so two parts may take longer than the whole, which is held against what they hide.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx
from tvm.target import Target

from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.blocks import nested_blocks, statements
from tvm_axe.analysis.sizes import are_same
from tvm_axe.collective import SLAB
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Link
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.pairing import DTYPES, default_tiles
from tvm_axe.lower.taking import storing
from tvm_axe.lower.tiles import lowered_on
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.graph import Value
from tvm_axe.relax.steps import COPIES, JOIN, Mover, Spot, Step
from tvm_axe.relax.transfers import Transfer
from tvm_axe.schedule.product import Product, product_of
from tvm_axe.tile.kernels.pairs import matmul_of_shares
from tvm_axe.tile.kernels.tiling import time_of

__all__ = ["with_copies_beside"]

BEGINS = 12e-6
"""Seconds that it takes until copy engines have begun, and a device knows that all is there."""

WORTH = 3e-6
"""Seconds that two kernels in place of one, a fork and a join are worth at least."""


def with_copies_beside(
    steps: Sequence[Step], results: Sequence[Spot], mover: Mover, target: Target, link: Link
) -> list[Step]:
    """The steps, with copies beside parts of products in the place of collectives where that is faster.

    Parameters
    ----------
    steps : Sequence[Step]
        In order, none of them fused.
    results : Sequence[Spot]
        What is left.
    mover : Mover
        Of the function.
    target : Target
        Resolved.
    link : Link
        Between two of the devices.
    """
    machine = machine_of(target)
    if not isinstance(machine, Gpu) or machine.tensor_cores != "wgmma":
        return list(steps)
    return _Cutter(steps, results, mover, target, link).cut()


class _Cutter:
    def __init__(
        self, steps: Sequence[Step], results: Sequence[Spot], mover: Mover, target: Target, link: Link
    ) -> None:
        self.steps, self.results, self.mover, self.target, self.link = list(steps), set(results), mover, target, link

    def cut(self) -> list[Step]:
        for step in list(self.steps):
            if step not in self.steps or step.transfer is None:
                continue
            made = None
            if step.kind == Collective.REDUCE_SCATTER.operation:
                made = self._scattered(step)
            elif step.kind == Collective.ALL_GATHER.operation:
                made = self._gathered(step)
            if made is not None:
                product, parts = made
                at = self.steps.index(product)
                self.steps[at : at + 1] = parts
                self.steps.remove(step)
        return self.steps

    def _scattered(self, scatter: Step) -> tuple[Step, list[Step]] | None:
        """A product in front of a reduce-scatter, and what they become."""
        (source,), (target,), transfer = scatter.ins, scatter.outs, scatter.transfer
        assert transfer is not None  # it is a collective
        maker = next((step for step in self.steps if source in step.outs), None)
        readers = [step for step in self.steps if source in (*step.ins, *step.over)]
        found = None if maker is None or source in self.results or readers != [scatter] else self._product(maker)
        if found is None or transfer.source.partial != "sum" or not self._is_cut(found, transfer.target):
            return None
        if not self.gains(found, transfer):
            return None
        assert maker is not None
        devices, axis = transfer.devices, transfer.axis
        others, own = self._part(found, transfer, 1, devices - 1), self._part(found, transfer, 0, 1)
        value = self.mover.graph.values[source[0]]
        shape, local = _known(value.shape), _known(transfer.target.local(value.shape))
        arrived = self._new(value, f"{value.name}_arrived", (devices, *local)), WHOLE
        whole = self._new(value, value.name, shape), source[1]
        rows, columns = math.prod(local[:-1]), local[-1]
        name, copies = maker.name, tuple((rows, peer, peer, 0, columns) for peer in range(1, devices))
        added = _added(shape, local, value.dtype, devices, self.mover.ranks[axis])
        return maker, [
            Step(f"{name}_of_others", maker.ins, (source,), (SLAB,) * 3, others, node=maker.node),
            Step(COPIES, (source,), (arrived,), (SLAB, axis), kind=COPIES, transfer=transfer, copies=copies),
            Step(f"{name}_of_own", maker.ins, (whole,), (SLAB,) * 3, own, node=maker.node, over=(source,)),
            Step(JOIN, (), (arrived,), (axis,), kind=JOIN, transfer=transfer),
            Step(f"{name}_added", (whole, arrived), (target,), (SLAB,) * 3, added),
        ]

    def _gathered(self, gather: Step) -> tuple[Step, list[Step]] | None:
        """A product behind an all-gather, and what they become."""
        (source,), (target,), transfer = gather.ins, gather.outs, gather.transfer
        assert transfer is not None  # it is a collective
        readers = [step for step in self.steps if target in (*step.ins, *step.over)]
        reader = readers[0] if readers and target not in self.results else None
        if any(source in step.over for step in self.steps):  # it may be another one when it is sent
            return None
        found = None if reader is None or reader.ins[0] != target else self._product(reader)
        if found is None or not self._is_cut(found, transfer.source) or not self.gains(found, transfer):
            return None
        assert reader is not None
        devices, axis, (out,) = transfer.devices, transfer.axis, reader.outs
        value, result = (self.mover.graph.values[number] for number in (source[0], out[0]))
        local = _known(transfer.source.local(value.shape))
        own, others = self._part(found, transfer, 0, 1, local), self._part(found, transfer, 1, devices - 1)
        begun = self._new(result, result.name, _known(result.shape)), out[1]
        rows, columns = math.prod(local[:-1]), local[-1]
        # The own rows come last: they are for whoever reads the whole.
        copies = tuple((rows, 0, peer % devices, 0, columns) for peer in range(1, devices + 1))
        weight = reader.ins[1]
        return reader, [
            Step(COPIES, (source,), (target,), (SLAB, axis), kind=COPIES, transfer=transfer, copies=copies),
            Step(f"{reader.name}_of_own", (source, weight), (begun,), (SLAB,) * 3, own, node=reader.node),
            Step(JOIN, (source,), (target,), (SLAB, axis), kind=JOIN, transfer=transfer),  # until then it is read
            Step(
                f"{reader.name}_of_others", (target, weight), (out,), (SLAB,) * 3, others, node=reader.node,
                over=(begun,),
            ),
        ]  # fmt: skip

    def _new(self, like: Value, name: str, shape: Sequence[int]) -> int:
        """The number of a new value of the function, of that shape."""
        typical = tuple(shape)
        made = replace(
            like, name=name, shape=typical, typical=typical, whole=typical, forms=(), kind="value", param=None
        )
        self.mover.graph.values.append(made)
        return len(self.mover.graph.values) - 1

    def _product(self, step: Step) -> Product | None:
        """The product that a step is and nothing else, of 16-bit floats, all of whose extents are known."""
        func = step.func
        if func is None or step.over or len(step.ins) != 2 or len(step.outs) != 1 or set(step.views) != {SLAB}:
            return None
        if KERNEL in (func.attrs or {}) or not isinstance(func.body, tirx.Stmt) or not hasattr(func.body, "block"):
            return None
        blocks = [block for nest in statements(func.body.block.body) for block in nested_blocks(nest)]
        try:
            found = product_of(blocks[0].block) if len(blocks) == 1 else None
            known = found is not None and found.shape is not None
        except ScheduleError:
            return None
        if found is None or not known or found.batch or list(func.params) != [found.a, found.b, found.c]:
            return None
        if not are_same(found.a.shape[:-1], found.c.shape[:-1]):  # whose rows lie in order
            return None
        dtypes = {str(buffer.dtype) for buffer in func.params}
        return found if len(dtypes) == 1 and dtypes <= {*DTYPES} else None

    def _is_cut(self, product: Product, form: Form) -> bool:
        """Whether devices have equal shares of a product's rows, one behind the other."""
        if form.share is None or form.share.is_symbolic or form.dim is None:
            return False
        leading = [int(n) for n in product.c.shape][: form.dim]
        extent = int(product.c.shape[form.dim])
        whole = form.share.extent == extent and form.share == type(form.share).blocks(extent, form.share.devices)
        return (
            math.prod(leading) == 1
            and form.dim < len(product.c.shape) - 1
            and whole
            and not extent % form.share.devices
        )

    def _part(
        self, product: Product, transfer: Transfer, first: int, count: int, rows: tuple[int, ...] | None = None
    ) -> tirx.PrimFunc:
        """The product of the rows of some devices, which are those in a slab of that shape, or else lie in all of A."""
        _, m, n, k = product.shape
        devices, dtype, turned = transfer.devices, str(product.a.dtype), product.transpose_b
        shapes = [tuple(int(extent) for extent in each.shape) for each in (product.a, product.b, product.c)]
        shapes[0] = shapes[0] if rows is None else rows
        rank, is_own = self.mover.ranks[transfer.axis], rows is not None
        return _of_shares(devices, m, n, k, dtype, turned, first, count, is_own, self.target, tuple(shapes), rank)

    def gains(self, product: Product, transfer: Transfer) -> bool:
        """Whether two parts of a product, that of the own rows beside copies, are faster than it and a collective."""
        gpu, (_, m, n, k), devices = machine_of(self.target), product.shape, transfer.devices
        assert isinstance(gpu, Gpu)  # it is asked for
        asked = {"n": n, "k": k, "dtype": str(product.a.dtype), "transpose_b": product.transpose_b}
        own, others, whole = (time_of(gpu, {**asked, "m": m // devices * of}) for of in (1, devices - 1, devices))
        share = math.prod(transfer.typical) // devices * transfer.itemsize
        moving = share * (devices - 1) / self.link.bandwidth
        return self.link.latency + moving - (own + others - whole) - max(0.0, BEGINS + moving - own) >= WORTH


@functools.lru_cache(maxsize=1024)
def _of_shares(
    devices: int, m: int, n: int, k: int, dtype: str, transpose_b: bool, first: int, count: int, own: bool,
    target: Target, shapes: tuple[tuple[int, ...], ...], rank: tirx.Var,
) -> tirx.PrimFunc:  # fmt: skip
    """The function of A, B and C that `matmul_of_shares` is on a device; its coordinate is free in it."""
    problem = {"m": m // devices * count, "n": n, "k": k, "dtype": dtype, "transpose_b": transpose_b}
    tiles = default_tiles(target, problem)
    (program,) = matmul_of_shares(
        devices, m, n, k, dtype, transpose_b, first=first, count=count, own=own, **tiles
    ).programs
    buffers = {name: tirx.decl_buffer(list(shape), dtype, name) for name, shape in zip("ABC", shapes, strict=True)}
    lowered = lowered_on(program, target, buffers, {"me": tirx.Cast("int32", rank)})
    return lowered.function([*buffers.values()])


@functools.lru_cache(maxsize=1024)
def _added(shape: tuple[int, ...], local: tuple[int, ...], dtype: str, devices: int, rank: tirx.Var) -> tirx.PrimFunc:
    """The function that adds to a device's rows of what it has of a sum what its peers have sent, nearest behind first.

    It is of all that the device has, of what has arrived, in the place of each peer's number, and of the result.
    """
    whole = tirx.decl_buffer(list(shape), dtype, "whole")
    arrived = tirx.decl_buffer([devices, *local], dtype, "arrived")
    result = tirx.decl_buffer(list(local), dtype, "result")
    iterators = [tirx.Var(f"v{dim}", "int64") for dim in range(len(local))]
    cut = next(dim for dim, (n, own) in enumerate(zip(shape, local)) if n != own)
    own = [var + rank * _int(local[dim]) if dim == cut else var for dim, var in enumerate(iterators)]
    loads = [tirx.BufferLoad(whole, own)]
    loads += [tirx.BufferLoad(arrived, [(rank + _int(at)) % _int(devices), *iterators]) for at in range(1, devices)]
    terms: list[tirx.Expr] = [tirx.Cast("float32", load) for load in loads]
    store = tirx.BufferStore(result, tirx.Cast(dtype, functools.reduce(lambda a, b: a + b, terms)), iterators)
    return storing("added", store, loads, iterators, local, [whole, arrived, result])


def _known(shape: Sequence[object]) -> tuple[int, ...]:
    """A shape all of whose extents are known."""
    return tuple(int(str(extent)) for extent in shape)


def _int(number: int) -> tirx.Expr:
    return tirx.IntImm("int64", number)
