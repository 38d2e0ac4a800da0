"""Which blocks are matrix products, and what parts their iterators play. ::

    C[batch.., rows.., columns..] += A[batch.., rows.., reduction..] * B[batch.., reduction.., columns..]

in any order of the operands, with any number of iterators in each part, B's last two parts in either order, and with
casts of A and B. In memory, where the dimensions of a part follow each other, that is one product of matrices a batch,
of ``prod(rows) x prod(reduction)`` by ``prod(reduction) x prod(columns)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tvm import ir, s_tir, tirx
from tvm.sym import detect_linear_equation

from tvm_axe.analysis.expressions import is_zero
from tvm_axe.analysis.patterns import REDUCE, factors_of
from tvm_axe.analysis.sizes import Extent, are_same, sides
from tvm_axe.errors import ScheduleError


@dataclass(frozen=True)
class Product:
    """A matrix product; parts are iterators of the block.

    Attributes
    ----------
    a, b, c : Buffer
        The operands, and what the block writes.
    batch, rows, columns, reduction : tuple[IterVar, ...]
        Each in the order that the buffers' dimensions have.
    transpose_b : bool
        Whether B's columns come before its reduction.
    """

    a: tirx.Buffer
    b: tirx.Buffer
    c: tirx.Buffer
    batch: tuple[tirx.IterVar, ...]
    rows: tuple[tirx.IterVar, ...]
    columns: tuple[tirx.IterVar, ...]
    reduction: tuple[tirx.IterVar, ...]
    transpose_b: bool

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batches, rows, columns and terms of a sum.

        Raises
        ------
        ScheduleError
            If one isn't known.
        """
        return self.batches, _known(self.rows), self.width, self.terms

    @property
    def batches(self) -> int:
        """How many products there are."""
        return _known(self.batch)

    @property
    def width(self) -> int:
        """How many columns there are."""
        return _known(self.columns)

    @property
    def terms(self) -> int:
        """How many terms a sum has."""
        return _known(self.reduction)

    @property
    def height(self) -> Extent:
        """How many rows there are: an expression, where that isn't known."""
        return prod(sides([it.dom.extent for it in self.rows]))

    @property
    def spatial(self) -> tuple[tirx.IterVar, ...]:
        """The iterators of C, in the order of its dimensions."""
        return (*self.batch, *self.rows, *self.columns)

    @property
    def inputs(self) -> Mapping[str, tirx.Buffer]:
        """What the kernel reads, by its names."""
        return {"A": self.a, "B": self.b}

    @property
    def tiled(self) -> dict[str, tuple[tirx.IterVar, ...]]:
        """The iterators that tiles cut, by the kernel's parameter."""
        return {"block_m": self.rows, "block_n": self.columns, "block_k": self.reduction}


def product_of(block: s_tir.SBlock, devices: Collection[tirx.Var] = ()) -> Product:
    """Return the matrix product that a block is; on one device, where `devices` are iterators over devices.

    Raises
    ------
    ScheduleError
        If the block is no matrix product; the message says what is missing.
    """
    a, b = factors(block)
    for left, right in ((a, b), (b, a)):
        found = _parts(block, left, right, devices)
        if found is not None:
            return found
    loads = f"{a.source.name}{list(a.indices)} * {b.source.name}{list(b.indices)}"
    raise ScheduleError(
        f"block {block.name_hint!r} is no product of matrices: {block.body.buffer.name}{list(block.body.indices)} += "
        f"{loads}; valid is C[batch, i, j] += A[batch, i, k] * B[batch, k, j], or with B[batch, j, k], over whole "
        "buffers"
    )


def factors(block: s_tir.SBlock) -> tuple[ir.TensorLoad, ir.TensorLoad]:
    """Return A and B of ``C[..] = C[..] + A[..] * B[..]``, where both may be cast, and C starts from zero.

    Raises
    ------
    ScheduleError
        If the block isn't of this form.
    """
    found = factors_of(block)
    if found is not None:
        return found
    raise ScheduleError(
        f"block {block.name_hint!r} is no product of matrices; valid is C[..] = C[..] + A[..] * B[..], C starting from "
        "zero"
    )


def _parts(block: s_tir.SBlock, a: ir.TensorLoad, b: ir.TensorLoad, devices: Collection[tirx.Var]) -> Product | None:
    store = block.body
    iterators = [it for it in block.iter_vars if it.var not in devices]
    left, right = (places(iterators, devices, load.source.shape, load.indices) for load in (a, b))
    written = places(iterators, devices, store.buffer.shape, store.indices)
    if left is None or right is None or written is None:
        return None
    # Lowering puts 0 where an iterator of extent 1 was, and leaves that.
    unused = {*range(len(iterators))} - {*left, *right, *written}
    if any(not are_same([iterators[n].dom.extent], [1]) or iterators[n].iter_type == REDUCE for n in unused):
        return None
    batch = [n for n in written if n in left and n in right]
    rows = [n for n in written if n in left and n not in right]
    columns = [n for n in written if n in right and n not in left]
    reduction = [n for n in left if n not in written]
    sums = [n for n, it in enumerate(iterators) if it.iter_type == REDUCE]
    if sorted(reduction) != sums or written != batch + rows + columns or left != batch + rows + reduction:
        return None
    if right not in (batch + reduction + columns, batch + columns + reduction):
        return None
    return Product(
        a.source,
        b.source,
        store.buffer,
        batch=tuple(iterators[n] for n in batch),
        rows=tuple(iterators[n] for n in rows),
        columns=tuple(iterators[n] for n in columns),
        reduction=tuple(iterators[n] for n in reduction),
        transpose_b=right != batch + reduction + columns,
    )


def places(
    iterators: Sequence[tirx.IterVar],
    devices: Collection[tirx.Var],
    shape: Sequence[tirx.Expr],
    indices: Sequence[tirx.Expr],
) -> list[int] | None:
    """Return the number of the iterator that runs over each dimension, all of it; None where one isn't.

    Left out are dimensions of extent 1 at a constant 0, and those over devices alone. Of a dimension that devices
    share, all of a device's piece counts.
    """
    found: list[int] = []
    for whole, index in zip(shape, indices):
        extent, rest = whole, index
        for device in devices:
            parts = list(detect_linear_equation(rest, [device]))
            if len(parts) == 2 and isinstance(parts[0], tirx.IntImm) and int(parts[0]) > 0:
                extent, rest = int(parts[0]), parts[1]
        if is_zero(rest) and are_same([extent], [1]):
            continue
        number = next((n for n, it in enumerate(iterators) if it.var.same_as(rest)), None)
        if number is None or number in found:
            return None
        domain = iterators[number].dom
        if not is_zero(domain.min) or not are_same([domain.extent], [extent]):
            return None
        found.append(number)
    return found


def _known(part: Sequence[tirx.IterVar]) -> int:
    extents = sides([it.dom.extent for it in part])
    unknown = [f"{it.var.name}'s {extent}" for it, extent in zip(part, extents) if not isinstance(extent, int)]
    if unknown:
        raise ScheduleError(f"a product whose {', '.join(unknown)} isn't known; valid are constants, but for its rows")
    return prod(int(extent) for extent in extents)
