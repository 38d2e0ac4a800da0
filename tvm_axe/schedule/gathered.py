"""Which blocks are products whose matrix each row chooses. ::

    C[rows.., columns..] += A[rows.., reduction..] * B[labels[rows..], reduction.., columns..]

or the same where a label is one: ``if_then_else(labels[rows..] >= 0, A[..] * B[max(labels[rows..], 0), ..], 0)``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from tvm import ir, s_tir, tirx

from tvm_axe.analysis.expressions import alike, is_choice, is_zero
from tvm_axe.analysis.patterns import REDUCE, added, loads_multiplied
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule.product import places

__all__ = ["Gathered", "gathered_of"]


@dataclass(frozen=True)
class Gathered:
    """A product whose matrix each row chooses; parts are iterators of the block.

    Attributes
    ----------
    a, b, c, labels : Buffer
        The operands, what the block writes, and which of B's matrices a row takes; none where that is negative.
    rows, columns, reduction : tuple[IterVar, ...]
        Each in the order that the buffers' dimensions have.
    groups : int
        How many matrices there are.
    transpose_b : bool
        Whether B's columns come before its reduction.
    """

    a: tirx.Buffer
    b: tirx.Buffer
    c: tirx.Buffer
    labels: tirx.Buffer
    rows: tuple[tirx.IterVar, ...]
    columns: tuple[tirx.IterVar, ...]
    reduction: tuple[tirx.IterVar, ...]
    groups: int
    transpose_b: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and terms of a sum."""
        m, n, k = (prod(int(it.dom.extent) for it in part) for part in (self.rows, self.columns, self.reduction))
        return m, n, k

    @property
    def batch(self) -> tuple[tirx.IterVar, ...]:
        """No iterators: matrices are chosen, row by row."""
        return ()

    @property
    def spatial(self) -> tuple[tirx.IterVar, ...]:
        """The iterators of C, in the order of its dimensions."""
        return (*self.rows, *self.columns)

    @property
    def tiled(self) -> dict[str, tuple[tirx.IterVar, ...]]:
        """The iterators that tiles cut, by the kernel's parameter."""
        return {"block_m": self.rows, "block_n": self.columns, "block_k": self.reduction}

    @property
    def inputs(self) -> Mapping[str, tirx.Buffer]:
        """What the kernel reads, by its names."""
        return {"X": self.a, "W": self.b, "labels": self.labels}


def gathered_of(block: s_tir.SBlock, devices: Collection[tirx.Var] = ()) -> Gathered:
    """Return the product that a block is; on one device, where `devices` are iterators over devices.

    Raises
    ------
    ScheduleError
        If the block is none.
    """
    term = added(block)
    chosen = None
    if term is not None and is_choice(term):
        condition, term, other = term.args
        chosen = _not_negative(condition) if is_zero(other) else None
        term = term if chosen is not None else None
    factors = None if term is None else loads_multiplied(term, block.body.buffer)
    for a, b in () if factors is None else (factors, factors[::-1]):
        found = _parts(block, a, b, chosen, devices)
        if found is not None:
            return found
    raise ScheduleError(
        f"block {block.name_hint!r} is no product whose matrix each row chooses; valid is C[i, j] = "
        "C[i, j] + A[i, k] * B[labels[i], k, j], or with B[.., j, k], C starting from zero, also where labels[i] is at "
        "least 0 only"
    )


def _parts(
    block: s_tir.SBlock, a: ir.TensorLoad, b: ir.TensorLoad, chosen: tirx.Expr | None, devices: Collection[tirx.Var]
) -> Gathered | None:
    iterators = [it for it in block.iter_vars if it.var not in devices]
    store = block.body
    labelled = [n for n, index in enumerate(b.indices) if _label_of(index, chosen) is not None]
    if len(labelled) != 1:
        return None
    (at,) = labelled
    label = _label_of(b.indices[at], chosen)
    assert label is not None  # it is one
    others = [n for n in range(len(b.indices)) if n != at]
    before = places(iterators, devices, b.source.shape[:at], b.indices[:at])
    written = places(iterators, devices, store.buffer.shape, store.indices)
    left = places(iterators, devices, a.source.shape, a.indices)
    right = places(iterators, devices, [b.source.shape[n] for n in others], [b.indices[n] for n in others])
    rows = places(iterators, devices, label.source.shape, label.indices)
    if before != [] or written is None or left is None or right is None or rows is None:
        return None
    sums = [n for n, it in enumerate(iterators) if it.iter_type == REDUCE]
    columns, reduction = [n for n in written if n not in rows], [n for n in left if n not in rows]
    fits = written == rows + columns and left == rows + reduction and sorted(reduction) == sums
    unused = {*range(len(iterators))} - {*left, *right, *written}
    if any(int(iterators[n].dom.extent) != 1 for n in unused):
        return None
    if not fits or right not in (reduction + columns, columns + reduction) or not (rows and columns and reduction):
        return None
    return Gathered(
        a.source,
        b.source,
        store.buffer,
        label.source,
        rows=tuple(iterators[n] for n in rows),
        columns=tuple(iterators[n] for n in columns),
        reduction=tuple(iterators[n] for n in reduction),
        groups=int(b.source.shape[at]),
        transpose_b=right != reduction + columns,
    )


def _label_of(index: tirx.Expr, chosen: tirx.Expr | None) -> ir.TensorLoad | None:
    """Return the load that an index is, which may be cast, or, where that isn't negative, its maximum with 0."""
    index = _uncast(index)
    if isinstance(index, tirx.Max) and chosen is not None:
        parts = [part for part in (index.a, index.b) if not is_zero(part)]
        index = _uncast(parts[0]) if len(parts) == 1 else index
    if not isinstance(index, ir.TensorLoad) or str(index.source.dtype) != "int32":
        return None
    return index if chosen is None or alike([index], [_uncast(chosen)]) else None


def _uncast(value: tirx.Expr) -> tirx.Expr:
    return value.value if isinstance(value, tirx.Cast) and str(value.ty.dtype) == "int64" else value


def _not_negative(condition: tirx.Expr) -> tirx.Expr | None:
    """Return what a condition says to be at least 0."""
    if isinstance(condition, tirx.GE) and is_zero(condition.b):
        return condition.a
    return condition.b if isinstance(condition, tirx.LE) and is_zero(condition.a) else None
