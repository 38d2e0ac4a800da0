"""Which number an iteration of a device has in the whole function, in terms of the device's coordinate.

Where a device's part of a dimension begins is a variable while a function is made, of which the bounds are known, and
becomes an expression of the coordinate in the end.

>>> from tvm import tirx
>>> numbering = Numbering(tirx.Var("rank", "int64"), 2)
>>> i = tirx.Var("i", "int64")
>>> number = numbering.number(Iterated(i, i, Share.blocks(8, 2), None, tirx.IntImm("int64", 8)))
>>> number, [str(value) for value in numbering.known().values()]
(start * T.int64(4) + i, ['rank'])
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import ir, tirx

from tvm_axe.layout.shares import Run, Share
from tvm_axe.lower.told import first_of, part_of, table

__all__ = ["Iterated", "Numbering"]


@dataclass(frozen=True)
class Iterated:
    """An iterator, or one run of it, in a nest.

    Attributes
    ----------
    old : Var
        What it was.
    var : Var
        What it is.
    share : Share
        What the device has of it.
    run : int or None
        The number of the run, where each has a nest of its own.
    whole : Expr
        How far it runs in the whole function.
    """

    old: tirx.Var
    var: tirx.Var
    share: Share
    run: int | None
    whole: tirx.Expr

    @property
    def extent(self) -> tirx.Expr:
        """How far it runs on a device."""
        if self.share.is_whole:
            return self.whole
        if self.share.is_symbolic:
            return part_of(self.whole, self.share.devices)
        return tirx.IntImm(str(self.var.ty), self.share.local if self.run is None else self.share.runs[self.run].local)

    @property
    def begin(self) -> int:
        """The first of what the device has."""
        return 0 if self.run is None else self.share.begins()[self.run][1]


class Numbering:
    """The numbers of a device's iterations.

    Attributes
    ----------
    rank : Var
        The device's coordinate.
    bounds : dict of Var to Range
        Of the coordinate, and of what stands for where a part begins.
    """

    def __init__(self, rank: tirx.Var, devices: int) -> None:
        self.rank, self.devices = rank, devices
        self.bounds: dict[tirx.Var, ir.Range] = {rank: ir.Range(0, devices)}
        self._starts: dict[tuple[tuple[int, ...], str], tirx.Var] = {}
        self._unknown: list[tuple[tirx.Expr, tirx.Var]] = []  # the same of extents that calls decide

    def start(self, run: Run, dtype: str, whole: tirx.Expr | None = None) -> tirx.Expr:
        """The first value of a run's middle digit that the device has, as a variable of which its bounds are known.

        `whole` is the extent, where calls decide it.
        """
        if run.symbolic:
            assert whole is not None
            return self._start_of_any(whole)
        if not any(run.starts):
            return tirx.IntImm(dtype, 0)
        key = (run.starts, dtype)
        if key not in self._starts:
            var = tirx.Var("start", dtype)
            self._starts[key] = var
            self.bounds[var] = ir.Range.from_min_extent(
                tirx.IntImm(dtype, min(run.starts)), tirx.IntImm(dtype, max(run.starts) - min(run.starts) + 1)
            )
        return self._starts[key]

    def _start_of_any(self, whole: tirx.Expr) -> tirx.Expr:
        for extent, var in self._unknown:
            if tvm_ffi.structural_equal(extent, whole, map_free_vars=False):
                return var
        var = tirx.Var("start", whole.ty)
        self._unknown.append((whole, var))
        most = whole - part_of(whole, self.devices) + tirx.const(1, str(whole.ty))
        self.bounds[var] = ir.Range.from_min_extent(tirx.const(0, str(whole.ty)), most)
        return var

    def known(self) -> dict[tirx.Var, tirx.Expr]:
        """What the variables of `start` are."""
        known = {var: table(self.rank, starts, dtype) for (starts, dtype), var in self._starts.items()}
        return known | {var: first_of(extent, self.rank, self.devices) for extent, var in self._unknown}

    def number(self, piece: Iterated) -> tirx.Expr:
        """The number that an iterator has in the whole function."""
        share, dtype = piece.share, str(piece.var.ty)
        if share.is_whole:
            return piece.var
        begins = share.begins()
        if share.is_symbolic:
            return self.start(share.runs[0], dtype, piece.whole) + piece.var
        if piece.run is not None:
            return self._in_run(share.runs[piece.run], begins[piece.run][0], piece.var, dtype)
        found: tirx.Expr | None = None
        for run, (begin, local) in reversed(list(zip(share.runs, begins))):
            number = self._in_run(run, begin, piece.var - tirx.const(local, dtype), dtype)
            last = piece.var < tirx.const(local + run.local, dtype)
            found = number if found is None else tirx.Select(last, number, found)
        assert found is not None  # there is a run
        return found

    def _in_run(self, run: Run, begin: int, at: tirx.Expr, dtype: str) -> tirx.Expr:
        def const(number: int) -> tirx.Expr:
            return tirx.const(number, dtype)

        if run.is_whole:
            return at + const(begin)
        first = const(begin) + self.start(run, dtype) * const(run.inner)
        if run.outer == 1:
            return first + at
        block = const(run.size * run.inner)
        return first + at // block * const(run.extent * run.inner) + at % block
