"""Which blocks are sums of products of two tensors, whatever the order of their dimensions, and of parts of tensors. ::

    C[.., i.., j.., ..] += A[start + i, .., k.., ..] * B[.., k.., start + j, ..]

What is a product of matrices in memory is a `tvm_axe.schedule.product.Product`, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tvm import s_tir, tirx
from tvm.sym import detect_linear_equation

from tvm_axe.analysis.expressions import alike, variables_of
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule.product import factors
from tvm_axe.tile.kernels.einsum import Dim, Operands


@dataclass(frozen=True)
class Einsum:
    """A sum of products.

    Attributes
    ----------
    a, b, c : Buffer
        The operands, and what the block writes.
    operands : Operands
        What runs over their dimensions. Dimensions that always follow each other are one.
    iterators : Mapping[str, tuple[IterVar, ...]]
        The block's iterators behind each index.
    scalars : Mapping[str, Expr]
        Where parts of tensors start, by the names that the dimensions have for it.
    """

    a: tirx.Buffer
    b: tirx.Buffer
    c: tirx.Buffer
    operands: Operands
    iterators: Mapping[str, tuple[tirx.IterVar, ...]]
    scalars: Mapping[str, tirx.Expr]

    @property
    def spatial(self) -> tuple[tirx.IterVar, ...]:
        """The iterators of C, in the order of its dimensions."""
        return tuple(it for dim in self.operands.c for it in self.iterators.get(dim.index, ()))

    @property
    def inputs(self) -> Mapping[str, tirx.Buffer]:
        """What the kernel reads, by its names."""
        return {"A": self.a, "B": self.b}

    @property
    def tiled(self) -> dict[str, tuple[tirx.IterVar, ...]]:
        """The iterators that tiles cut, by the kernel's parameter."""
        cut = {"block_m": self.operands.row, "block_n": self.operands.column, "block_k": self.operands.term}
        return {name: self.iterators[index] for name, index in cut.items()}

    @property
    def batch(self) -> tuple[tirx.IterVar, ...]:
        """The iterators that are blocks of their own."""
        return tuple(it for index in self.operands.blocks for it in self.iterators[index])


def einsum_of(block: s_tir.SBlock, devices: Collection[tirx.Var] = ()) -> Einsum:
    """Return the sum of products that a block is; on one device, where `devices` are iterators over devices.

    Raises
    ------
    ScheduleError
        If the block is none; the message says what is missing.
    """
    a, b = factors(block)
    iterators = {it.var: it for it in block.iter_vars if it.var not in devices}
    starts: list[tirx.Expr] = []
    sides = [(load.source, load.indices) for load in (a, b)] + [(block.body.buffer, block.body.indices)]
    dims = [_dims(block, buffer, indices, iterators, starts) for buffer, indices in sides]
    used = [{dim.index for dim in one if dim.index} for one in dims]
    names = {_name(number): it for number, it in enumerate(iterators.values())}
    summed = {name for name, it in names.items() if it.iter_type == tirx.IterVar.CommReduce}
    if used[0] | used[1] != {*names} or used[2] != {*names} - summed or not summed <= used[0] & used[1]:
        raise ScheduleError(
            f"block {block.name_hint!r} is no sum of products of two tensors; valid is one whose sums run over both, "
            "and whose other loops run over the result"
        )
    behind = {name: (it,) for name, it in names.items()}
    merged = _merged(dims, behind)
    operands = Operands.of(*merged)
    if operands is None:
        raise ScheduleError(f"block {block.name_hint!r} has no rows, no columns or no sum, which a product has")
    scalars = {_scalar(number): start for number, start in enumerate(starts)}
    return Einsum(a.source, b.source, block.body.buffer, operands, behind, scalars)


def _name(number: int) -> str:
    return f"i{number}"


def _scalar(number: int) -> str:
    return f"o{number}"


def _dims(
    block: s_tir.SBlock,
    buffer: tirx.Buffer,
    indices: Sequence[tirx.Expr],
    iterators: Mapping[tirx.Var, tirx.IterVar],
    starts: list[tirx.Expr],
) -> list[Dim]:
    """Return what runs over each dimension of an operand; where parts start goes to `starts` if it is no number."""
    found: list[Dim] = []
    for size, index in zip(buffer.shape, indices):
        running = [var for var in iterators if var in variables_of(index)]
        start = index
        if running:
            parts = list(detect_linear_equation(index, running[:1]))
            whole = len(running) == 1 and len(parts) == 2 and isinstance(parts[0], tirx.IntImm) and int(parts[0]) == 1
            domain = iterators[running[0]].dom
            constants = isinstance(domain.extent, tirx.IntImm) and int(domain.min) == 0
            if not (whole and constants) or not isinstance(size, tirx.IntImm):
                raise ScheduleError(
                    f"block {block.name_hint!r}: {buffer.name}{list(indices)} isn't indexed by one loop and where that "
                    f"starts; {index} is none such"
                )
            start = parts[1]
        if not isinstance(size, tirx.IntImm):
            raise ScheduleError(f"block {block.name_hint!r}: {buffer.name} has the extent {size}; valid are constants")
        first: int | str
        if isinstance(start, tirx.IntImm):
            first = int(start)
        else:
            known = [number for number, one in enumerate(starts) if alike([one], [start])]
            if not known:
                starts.append(start)
            first = _scalar(known[0] if known else len(starts) - 1)
        name = _name([*iterators].index(running[0])) if running else ""
        extent = int(iterators[running[0]].dom.extent) if running else 1
        if name and any(dim.index == name for dim in found):
            raise ScheduleError(f"block {block.name_hint!r}: {buffer.name}{list(indices)} has a loop twice")
        found.append(Dim(name, extent, int(size), first))
    return found


def _merged(
    operands: Sequence[list[Dim]], behind: dict[str, tuple[tirx.IterVar, ...]]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], tuple[Dim, ...]]:
    """Return the operands with what always follows each other as one dimension."""
    sides = [list(dims) for dims in operands]
    pair = _following(sides)
    while pair is not None:
        first, second = pair
        for number, dims in enumerate(sides):
            at = next((n for n, dim in enumerate(dims) if dim.index == first), None)
            if at is not None:
                left, right = dims[at : at + 2]
                start = int(left.start) * right.size
                one = replace(left, extent=left.extent * right.extent, size=left.size * right.size, start=start)
                sides[number] = [*dims[:at], one, *dims[at + 2 :]]
        behind[first] += behind.pop(second)
        pair = _following(sides)
    a, b, c = (tuple(dims) for dims in sides)
    return a, b, c


def _following(sides: Sequence[Sequence[Dim]]) -> tuple[str, str] | None:
    """Return two indices of which the second follows the first in every operand that has one of them."""
    pairs = {(x.index, y.index) for dims in sides for x, y in pairwise(dims) if x.index and y.index}
    for first, second in sorted(pairs):
        fits = [
            any(
                x.index == first and y.index == second and y.whole and isinstance(x.start, int)
                for x, y in pairwise(dims)
            )
            for dims in sides
            if any(dim.index in (first, second) for dim in dims)
        ]
        if all(fits):
            return first, second
    return None
