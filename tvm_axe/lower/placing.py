"""Where a device finds what a block of a function touches, in the slabs of the function's buffers.

An index is first one of the whole function, by the numbers of the iterators; what the device has of the dimension says
where that lies in the slab. It is told apart by what the index was written as, so indices are replaced before numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import ir, tirx
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import is_choice, substitute, uses
from tvm_axe.layout.shares import Run, Share
from tvm_axe.lower.numbering import Iterated, Numbering

__all__ = ["Placing"]


class Placing:
    """The statements of a block, in terms of what a device has."""

    def __init__(
        self,
        slabs: Mapping[tirx.Buffer, tirx.Buffer],
        shares: Mapping[tirx.Buffer, Sequence[Share]],
        numbering: Numbering,
        pieces: Sequence[Iterated],
        numbers: Mapping[tirx.Var, tirx.Expr],
        analyzer: Analyzer,
    ) -> None:
        self.buffers, self.shares, self.numbering = slabs, shares, numbering
        self.pieces, self.numbers, self.analyzer = pieces, numbers, analyzer
        for var, bound in numbering.bounds.items():
            analyzer.bind(var, bound, True)

    def rewritten(self, body: tirx.Stmt) -> tirx.Stmt:
        """The statement: first its places, of which the indices are told apart by what they were, then its numbers."""
        placed = _tvm.structural_map(
            body,
            [
                (ir.TensorLoad, lambda load: tirx.BufferLoad(*self._place(load.source, load.indices))),
                (tirx.BufferStore, self._store),
            ],
        )
        numbered = substitute(placed, self.numbers)
        decided = [(ir.Call, self._choice), (tirx.Select, self._select), (tirx.FloorMod, self._remainder)]
        chosen = _tvm.structural_map(numbered, decided)
        return substitute(chosen, self.numbering.known())

    def _store(self, store: tirx.BufferStore) -> tirx.BufferStore:
        buffer, indices = self._place(store.buffer, store.indices)
        return tirx.BufferStore(buffer, store.value, indices)

    def _choice(self, call: ir.Call) -> tirx.Expr:
        if not is_choice(call):
            return call
        return self._decided(call, *call.args)

    def _select(self, select: tirx.Select) -> tirx.Expr:
        return self._decided(select, select.condition, select.true_value, select.false_value)

    def _remainder(self, remainder: tirx.FloorMod) -> tirx.Expr:
        """A remainder without where the device's part begins, if that is a multiple: which of a word's codes it is."""
        found = self.analyzer.simplify(remainder)
        return remainder if any(uses(found, start) for start in self.numbering.bounds) else found

    def _decided(self, choice: tirx.Expr, condition: tirx.Expr, yes: tirx.Expr, no: tirx.Expr) -> tirx.Expr:
        known = self.analyzer.simplify(condition)
        return choice if not isinstance(known, tirx.IntImm) else yes if int(known) else no

    def _place(self, buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> tuple[tirx.Buffer, list[tirx.Expr]]:
        if buffer not in self.buffers:
            return buffer, list(indices)  # it has been placed already
        shares = self.shares[buffer]
        return self.buffers[buffer], list(map(self._index, indices, shares, buffer.shape))

    def _index(self, index: tirx.Expr, share: Share, extent: tirx.Expr) -> tirx.Expr:
        """An index of a dimension as one of what the device has of it."""
        for piece in self.pieces:
            if index.same_as(piece.old) and piece.share == share:
                # An iterator of one value stays what it is: schedules look for it in what is written.
                begin = tirx.const(piece.begin, str(piece.var.ty))
                return self.analyzer.simplify(piece.var + begin) if piece.begin else piece.var
        number = substitute(index, self.numbers)
        if isinstance(number, tirx.Var) and share.is_whole:
            return number
        whole = self.analyzer.simplify(number)
        if share.is_symbolic:
            return self.analyzer.simplify(whole - self.numbering.start(share.runs[0], str(whole.ty), extent))
        return whole if share.is_whole else self.analyzer.simplify(self._local(whole, share))

    def _local(self, whole: tirx.Expr, share: Share) -> tirx.Expr:
        dtype, begins = str(whole.ty), share.begins()
        for run, (begin, local) in zip(share.runs, begins):
            above = self.analyzer.can_prove(whole >= tirx.const(begin, dtype))
            if above and self.analyzer.can_prove(whole < tirx.const(begin + run.length, dtype)):
                return self._in_run(whole, run, begin, local)
        found: tirx.Expr | None = None
        for run, (begin, local) in reversed(list(zip(share.runs, begins))):
            at = self._in_run(whole, run, begin, local)
            last = whole < tirx.const(begin + run.length, dtype)
            found = at if found is None else tirx.Select(last, at, found)
        assert found is not None  # there is a run
        return found

    def _in_run(self, whole: tirx.Expr, run: Run, begin: int, local: int) -> tirx.Expr:
        dtype = str(whole.ty)

        def const(number: int) -> tirx.Expr:
            return tirx.const(number, dtype)

        start = self.numbering.start(run, dtype)
        if isinstance(start, tirx.Var):  # it may be new
            self.analyzer.bind(start, self.numbering.bounds[start], True)
        at = whole - const(begin)
        if run.is_whole:
            return at + const(local)
        if run.outer == 1:
            return at - start * const(run.inner) + const(local)
        block = const(run.extent * run.inner)
        outer, rest = at // block, at % block - start * const(run.inner)
        return outer * const(run.size * run.inner) + rest + const(local)
