"""Which forms a CPU's function has, and the schedules of each, the most promising first.

Register tiles where the function is made of contractions (`tvm_axe.nests.registers`), planes where it is a convolution
with too few channels for these (`.planes`), rows or columns where it is made of reductions along the last axis or
another (`.rows`, `.columns`), tile kernels where one computes all of its products (`.kernels`).

What changes the shape of a trace (the register tile, packed or in place) makes a schedule each, with promising
decisions. What can be sampled (the pieces of work, the unrolling) is sampled by `sample_perfect_tile`, so that
upstream's mutators can act on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from types import MappingProxyType

import tvm
from tvm import s_tir
from tvm.target import Target

from tvm_axe.analysis.patterns import is_pointwise
from tvm_axe.machines.target import cores, vector_bits
from tvm_axe.nests.around import inline_made
from tvm_axe.nests.columns import Columns, column_schedules, find_columns
from tvm_axe.nests.contraction import Contraction, find_contractions
from tvm_axe.nests.kernels import choose
from tvm_axe.nests.planes import Plane, find_plane, plane_schedules
from tvm_axe.nests.registers import register_tile
from tvm_axe.nests.rows import Rows, find_rows, row_schedules
from tvm_axe.nests.tiles import Tile, lanes_of, tiles
from tvm_axe.schedule.offers import Offer, offers

__all__ = ["Change", "Forms", "forms_of", "possible"]

Change = partial[None]
"""Schedules ``main`` in place, by stock instructions only."""


@dataclass(frozen=True)
class Forms:
    """What a function's blocks are, as far as one form takes all of them.

    Attributes
    ----------
    target
        A resolved target, a CPU.
    blocks
        Names of the blocks directly below the root.
    contractions
        Those that register tiles compute, if the others are pointwise; else none.
    rows, plane, columns
        The function as one of rows, a convolution of images, one of columns.
    offered
        What tile kernels compute, if the others are pointwise; else nothing.
    """

    target: Target
    blocks: tuple[str, ...]
    contractions: tuple[Contraction, ...]
    rows: Rows | None
    plane: Plane | None
    columns: Columns | None
    offered: tuple[Offer, ...]

    def registers(self, vectors: Sequence[int] | None = None) -> list[Change]:
        """The register tiles; several contractions take theirs in step: all combinations would be too many.

        Parameters
        ----------
        vectors
            How many vectors the tile of each contraction is to have; any number if left out.
        """
        wanted = [None] * len(self.contractions) if vectors is None else vectors
        choices = [tiles(match, self.target, n) for match, n in zip(self.contractions, wanted)]
        if not all(choices):
            return []

        def schedule(sch: s_tir.Schedule, taken: tuple[Tile, ...]) -> None:
            done = inline_made(sch)
            for match, tile in zip(self.contractions, taken):
                done |= register_tile(sch, match, self.target, tile)
            for name in [name for name in self.blocks if name not in done]:
                vectorize(sch, name, self.target)

        return [
            partial(schedule, taken=tuple(options[n % len(options)] for options in choices))
            for n in range(max(map(len, choices), default=0))
        ]

    def kernels(self) -> list[Change]:
        """The kernels with their defaults, and with sampled parameters; several blocks take theirs in step."""
        choices = [[offer for offer in self.offered if offer.block == name] for name in self.blocks]
        choices = [options for options in choices if options]

        def schedule(sch: s_tir.Schedule, n: int, sampled: bool) -> None:
            chosen = [options[n % len(options)] for options in choices]
            for offer in chosen:
                choose(sch, offer, sampled)
            covered = {name for offer in chosen for name in (offer.block, offer.epilogue)}
            for name in [name for name in self.blocks if name not in covered]:
                vectorize(sch, name, self.target)

        steps = product(range(max(map(len, choices), default=0)), (False, True))
        return [partial(schedule, n=n, sampled=sampled) for n, sampled in steps]

    def others(self) -> list[Change]:
        """What rows, planes and columns make of the function."""
        found = row_schedules(self.rows, self.target) if self.rows else []
        found += plane_schedules(self.plane, self.target) if self.plane else []
        return found + (column_schedules(self.columns, self.target) if self.columns else [])


def forms_of(sch: s_tir.Schedule, target: Target, open: Mapping[str, frozenset[int]] = MappingProxyType({})) -> Forms:
    """The forms that a function named ``main`` has on a CPU.

    Parameters
    ----------
    sch, target
        The function, of known extents, and the CPU.
    open
        The loops of each block, by their positions, whose extents aren't known where the schedules will be applied: to
        the same function, from which this one was made (`tvm_axe.nests.ranges`).
    """
    blocks = {str(sch.get(b).name_hint): sch.get(b) for b in sch.get_child_blocks(sch.get_sblock("root"))}
    pointwise = {name for name, block in blocks.items() if is_pointwise(block)}
    found = [replace(match, open=open.get(match.block, frozenset())) for match in find_contractions(sch)]
    contractions = [match for match in found if tiles(match, target)]
    if not contractions or {*blocks} != {match.block for match in contractions} | pointwise:
        contractions = []
    # One row that would have W packed in every call: its dot products read W once, and as it lies.
    once = all(prod(match.extents[n] for n in match.rows) == 1 for match in contractions)
    packed = once and any(tiles(match, target)[0].packed for match in contractions)
    rows = _open_rows(find_rows(sch, target), open) if packed or not contractions else None
    contractions = [] if rows else contractions
    wide = any(lanes_of(match, target) * match.bits == vector_bits(target) for match in contractions)
    known = not any(open.values())
    plane = None if wide or rows or not known else find_plane(sch)
    columns = None if contractions or rows or plane or not known else find_columns(sch)
    # A dot product is a product too, of one row and column.
    offered = offers(sch, target) if rows is None and known else []
    if not offered or {*blocks} != {offer.block for offer in offered} | pointwise:
        offered = []
    return Forms(target, tuple(blocks), tuple(contractions), rows, plane, columns, tuple(offered))


def _open_rows(rows: Rows | None, open: Mapping[str, frozenset[int]]) -> Rows | None:
    """The function of rows, if no more is unknown of it than how many there are."""
    if rows is None or not any(open.values()):
        return rows
    depth = len(rows.rows)
    return replace(rows, open=True) if all(n < depth for own in open.values() for n in own) else None


def possible(base: s_tir.Schedule, changes: Sequence[Change]) -> Iterator[s_tir.Schedule]:
    """A schedule for each change, but for those that a primitive refuses: what is around a block decides on that.

    Upstream's `fuse` and `split` simplify indices, and of some that are counted in two unknown sizes they fail by a
    check of their own, an `InternalError`.
    """
    for change in changes:
        sch = base.copy()
        try:
            change(sch)
        except (s_tir.ScheduleError, tvm.error.InternalError):
            continue
        yield sch


def vectorize(sch: s_tir.Schedule, name: str, target: Target) -> None:
    """Schedule an elementwise block: vectors innermost, pieces of work in parallel outermost."""
    fused = sch.fuse(*sch.get_loops(sch.get_sblock(name)))
    pieces, vectors = sch.split(fused, [None, vector_bits(target) // 32])
    if cores(target) > 1:
        sch.parallel(sch.split(pieces, [cores(target), None])[0])
    sch.vectorize(vectors)
