"""A function of whole tensors becomes what a device does of it: its share of the iterations, on slabs of its buffers.

What is shared are factors of the function's sharding rule (`tvm_axe.analysis.sharding_rule`), each as a `Share` says.
An iterator that has the factor runs over the device's part, buffers shrink to the device's indices, and indices count
within these. In values an iterator stays what it was, a number of the whole function, in terms of the device's
coordinate: where padding begins, the length that a mean divides by and what a mask compares with are right as they are
written. The coordinate is an argument, for functions that need it, so that one function is all devices'.

>>> from tvm.script import tirx as T
>>> from tvm_axe.analysis.sharding_rule import sharding_rule
>>> @T.prim_func(s_tir=True)
... def count(A: T.Buffer((4, 8), "int32"), B: T.Buffer((4, 8), "int32")):
...     for i, j in T.grid(4, 8):
...         with T.sblock("B"):
...             vi, vj = T.axis.remap("SS", [i, j])
...             B[vi, vj] = A[vi, vj] + vj
>>> rule = sharding_rule(count)
>>> local = shared(count, rule, {("b",): Share.blocks(8, 2)}, 2)
>>> print(str(local.body.block.body.body.body.block.body).splitlines()[-1])
B[vi, vj] = A[vi, vj] + (T.Cast("int32", rank) * 4 + vj)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.accesses import leaf_blocks
from tvm_axe.analysis.blocks import all_blocks, element, nested_blocks, statements, unused_name
from tvm_axe.analysis.expressions import is_choice, loads_in, substitute
from tvm_axe.analysis.patterns import REDUCE, SPATIAL
from tvm_axe.analysis.sharding_rule import ShardingRule
from tvm_axe.analysis.sizes import Sizes
from tvm_axe.layout.shares import Run, Share
from tvm_axe.lower.dealing import Assigned, shares_of
from tvm_axe.lower.told import RANK, first_of, part_of, table, with_coordinates

__all__ = ["is_sharable", "shared"]

_IDENTITIES = {"sum": 0, "prod": 1}
"""What a term becomes that another device counts. That a maximum is taken of one twice changes nothing."""


# ---- What a device does


def is_sharable(func: tirx.PrimFunc) -> bool:
    """Return whether a function is nests of loops, each around one block of stores: what operators are legalized to."""
    if not isinstance(func.body, s_tir.SBlockRealize):
        return False
    for nest in statements(func.body.block.body):
        blocks = nested_blocks(nest)
        if len(blocks) != 1 or len(all_blocks(blocks[0].block)) != 1:
            return False
        (nested,) = blocks
        loops = [loop.loop_var for loop in nested.loops]
        bound = list(nested.realize.iter_values)
        if nested.mask is not None or nested.block.alloc_buffers or len(bound) != len(loops):
            return False
        if not all(any(value.same_as(loop) for loop in loops) for value in bound):
            return False
        if any(not isinstance(part, tirx.BufferStore) for part in _stores(nested.block.body)):
            return False
        if nested.block.init is not None and not all(
            isinstance(part, tirx.BufferStore) for part in _stores(nested.block.init)
        ):
            return False
    return True


def _stores(body: tirx.Stmt) -> list[tirx.Stmt]:
    return [part for each in body.seq for part in _stores(each)] if isinstance(body, tirx.SeqStmt) else [body]


def shared(
    func: tirx.PrimFunc,
    rule: ShardingRule,
    assigned: Assigned,
    devices: int,
    rank: tirx.Var | None = None,
    sizes: Sizes | None = None,
) -> tirx.PrimFunc | None:
    """Return what each of some devices runs of a function.

    Parameters
    ----------
    func : PrimFunc
        A function for which `is_sharable`, its inputs first.
    rule : ShardingRule
        Its rule.
    assigned : Assigned
        How factors of the rule are shared, of one kind: spatial ones, or a reduction's with one combiner.
    devices : int
        How many devices there are.
    rank : Var, optional
        What the device's coordinate is called; it stays free then (`with_coordinates`), so that the function is one
        of buffers, and can be shared along another axis.
    sizes : Sizes, optional
        What symbolic extents were taken to be in `rule`. They stay symbolic.

    Returns
    -------
    func : PrimFunc or None
        Takes slabs of `shares_of` the parameters; if its values depend on which device it is, an int64 called `RANK`
        between the inputs and the outputs. None if a buffer's or a block's part isn't a share.
    """
    if not assigned:
        return func
    for together, share in assigned.items():
        if rule[together[0]].kind == "gather" and (len(share.runs) > 1 or share.runs[0].outer > 1):
            return None  # which device holds an index is one comparison
    localizer = _Localizer(
        func, rule, assigned, devices, tirx.Var(RANK, "int64") if rank is None else rank, sizes or {}
    )
    if not localizer.fits:
        return None
    local = localizer.function()
    return local if rank is not None else with_coordinates(local, len(rule.inputs), [localizer.rank])[0]


@dataclass(frozen=True)
class _Piece:
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
        if self.share.is_whole:
            return self.whole
        if self.share.is_symbolic:
            return part_of(self.whole, self.share.devices)
        return tirx.IntImm(str(self.var.ty), self.share.local if self.run is None else self.share.runs[self.run].local)

    @property
    def begin(self) -> int:
        """The first of what the device has."""
        return 0 if self.run is None else self.share.begins()[self.run][1]


class _Localizer:
    def __init__(
        self,
        func: tirx.PrimFunc,
        rule: ShardingRule,
        assigned: Assigned,
        devices: int,
        rank: tirx.Var,
        sizes: Sizes,
    ) -> None:
        self.func, self.rule, self.devices, self.rank, self.sizes = func, rule, devices, rank, sizes
        self.names: set[str] = set()  # of blocks: schedules find them by these
        self.starts: dict[tuple[tuple[int, ...], str], tirx.Var] = {}
        self.unknown: list[tuple[tirx.Expr, tirx.Var]] = []  # the same of extents that calls decide
        self.bounds: dict[tirx.Var, ir.Range] = {self.rank: ir.Range(0, devices)}
        find = functools.partial(shares_of, rule=rule, assigned=assigned, devices=devices)
        buffers = [find(operand) for operand in (*rule.inputs, *rule.outputs, *rule.inner)]
        blocks = [find(operand) for operand in rule.blocks]
        self.fits = all(shares is not None for shares in (*buffers, *blocks))
        if self.fits:
            own = [*func.params, *func.body.block.alloc_buffers]
            self.shares = {buffer: shares for buffer, shares in zip(own, buffers) if shares is not None}
            self.blocks = [shares for shares in blocks if shares is not None]
            self.buffers = {buffer: self._slab(buffer, shares) for buffer, shares in self.shares.items()}
            gathered = {name for together in assigned for name in together if rule[name].kind == "gather"}
            self.looked_up = {
                (param, dim)
                for param, operand in zip(func.params, rule.inputs)
                for dim, parts in enumerate(operand.dims)
                if any(gathered & set(part.factors) for part in parts)
            }

    def _slab(self, buffer: tirx.Buffer, shares: Sequence[Share]) -> tirx.Buffer:
        kind = str(buffer.shape[0].ty) if len(buffer.shape) else "int64"
        shape = [
            n if share.is_whole
            else part_of(n, share.devices) if share.is_symbolic else tirx.IntImm(kind, share.local)
            for n, share in zip(buffer.shape, shares)
        ]  # fmt: skip
        return tirx.decl_buffer(shape, buffer.dtype, buffer.name, layout=None)

    def function(self) -> tirx.PrimFunc:
        root = self.func.body.block
        leaves = leaf_blocks(self.func, self.sizes)
        nests = [nested_blocks(nest)[0].block for nest in statements(root.body)]
        body = tirx.stmt_seq(
            *(
                nest
                for block, leaf, shares in zip(nests, leaves, self.blocks)
                for nest in self._nests(block, leaf.combiner, leaf.value, shares)
            )
        )
        allocated = [self.buffers[buffer] for buffer in root.alloc_buffers]
        whole = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=allocated)
        realized = s_tir.SBlockRealize([], True, whole)
        params = [self.buffers[param] for param in self.func.params]
        return tirx.PrimFunc(params, realized, self.func.ret_type, self.func.attrs)

    def _nests(
        self, block: s_tir.SBlock, combiner: str | None, term: tirx.Expr | None, shares: Sequence[Share]
    ) -> list[tirx.Stmt]:
        """The nests of a block: one, or one for each run of an iterator that counts elsewhere than in places."""
        runs: list[Sequence[int | None]] = []
        for iv, share in zip(block.iter_vars, shares):
            apart = len(share.runs) > 1 and iv.iter_type == SPATIAL and not self._only_places(block, iv.var, share)
            runs.append(range(len(share.runs)) if apart else [None])
        return [self._nest(block, combiner, term, shares, chosen) for chosen in itertools.product(*runs)]

    def _only_places(self, block: s_tir.SBlock, var: tirx.Var, share: Share) -> bool:
        """Whether an iterator is nothing but an index of dimensions that are shared as it is."""
        places = 0

        def on_access(buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> None:
            nonlocal places
            for index, own in zip(indices, self.shares[buffer]):
                places += int(index.same_as(var) and own == share)

        for load in loads_in([block.init, block.body]):
            on_access(load.source, load.indices)
        for store in _stored([block.init, block.body]):
            on_access(store.buffer, store.indices)
        return places == _occurrences([block.init, block.body], var)

    def _nest(
        self,
        block: s_tir.SBlock,
        combiner: str | None,
        term: tirx.Expr | None,
        shares: Sequence[Share],
        runs: Sequence[int | None],
    ) -> tirx.Stmt:
        pieces = [
            _Piece(iv.var, tirx.Var(iv.var.name, iv.var.ty), share, run, iv.dom.extent)
            for iv, share, run in zip(block.iter_vars, shares, runs)
        ]
        analyzer = Analyzer()
        bounds = {
            piece.var: ir.Range.from_min_extent(tirx.IntImm(str(piece.var.ty), 0), piece.extent) for piece in pieces
        }
        numbers = {piece.old: self._number(piece) for piece in pieces}
        for var, bound in {**self.bounds, **bounds}.items():
            analyzer.bind(var, bound)
        inside = _Body(self, pieces, numbers, analyzer)
        body = self._found(block.body, combiner, term)
        if combiner in _IDENTITIES and term is not None and body.same_as(block.body):
            body = self._counted(body, term, _IDENTITIES[combiner], block, pieces)
        body, init = inside.rewritten(body), None if block.init is None else inside.rewritten(block.init)
        name = unused_name(str(block.name_hint), self.names)
        # Of a reduction, what it goes on with isn't said to be read.
        reads, writes = ([self.buffers[x.source] for x in regions] for regions in (block.reads, block.writes))
        final = s_tir.SBlock(
            [
                tirx.IterVar(bounds[piece.var], piece.var, iv.iter_type)
                for piece, iv in zip(pieces, block.iter_vars)
            ],
            _once([element(load.source, load.indices) for load in loads_in(body)], reads),
            _once([element(store.buffer, store.indices) for store in _stored([body])], writes),
            name, body, init, annotations=block.annotations,
        )  # fmt: skip
        self.names.add(name)
        loops = [tirx.Var(f"i{at}", piece.var.ty) for at, piece in enumerate(pieces)]
        nest: tirx.Stmt = s_tir.SBlockRealize(loops, True, final)
        for loop, piece in reversed(list(zip(loops, pieces))):
            nest = tirx.For(loop, tirx.IntImm(str(loop.ty), 0), piece.extent, tirx.ForKind.SERIAL, nest)
        return nest

    def _found(self, body: tirx.Stmt, combiner: str | None, term: tirx.Expr | None) -> tirx.Stmt:
        """The body of a block that counts nothing where what it looks up is another device's."""
        conditions = [
            self._holds(load.indices[dim], share)
            for load in ([] if term is None else loads_in(term))
            for dim, share in enumerate(self.shares[load.source])
            if (load.source, dim) in self.looked_up and not share.is_whole
        ]
        if not conditions or term is None:
            return body
        masked = tirx.if_then_else(conditions[0], term, tirx.const(0, str(term.ty)))
        if combiner is None:
            return tirx.BufferStore(body.buffer, masked, body.indices)
        sides = [masked if side.same_as(term) else side for side in (body.value.a, body.value.b)]
        return tirx.BufferStore(body.buffer, type(body.value)(*sides), body.indices)

    def _holds(self, index: tirx.Expr, share: Share) -> tirx.Expr:
        """Whether an index is the device's own; one out of range is the first's or the last's."""
        (run,), dtype, last = share.runs, str(index.ty), share.devices - 1
        starts = [(start + owned) * run.inner for start, owned in zip(run.starts, run.owned())]
        stops = [(start + run.size) * run.inner for start in run.starts]
        rank = self.rank if str(self.rank.ty) == dtype else tirx.Cast(dtype, self.rank)
        above = tirx.Or(rank <= tirx.const(0, dtype), index >= table(self.rank, starts, dtype))
        stop = table(self.rank, [number - stops[0] for number in stops], dtype) + tirx.const(stops[0], dtype)
        return tirx.And(above, tirx.Or(rank >= tirx.const(last, dtype), index < stop))

    def _counted(
        self, body: tirx.Stmt, term: tirx.Expr, identity: int, block: s_tir.SBlock, pieces: Sequence[_Piece]
    ) -> tirx.Stmt:
        """The body of a reduction that leaves out the terms that are another device's, though this one has them too."""
        conditions = []
        for piece, iv in zip(pieces, block.iter_vars):
            if (
                iv.iter_type == REDUCE
                and not piece.share.is_whole
                and any(any(run.owned()) for run in piece.share.runs)
            ):
                conditions.append(self._owned(piece))
        if not conditions:
            return body
        own = functools.reduce(tirx.And, conditions)
        dtype = str(term.ty)
        masked = tirx.if_then_else(own, term, tirx.const(identity, dtype))
        sides = [masked if side.same_as(term) else side for side in (body.value.a, body.value.b)]
        return tirx.BufferStore(body.buffer, type(body.value)(*sides), body.indices)

    def _owned(self, piece: _Piece) -> tirx.Expr:
        """Whether what the device does in an iteration is its own."""
        dtype = str(piece.var.ty)
        found: tirx.Expr = tirx.IntImm("bool", 1)
        for run, (_, begin) in reversed(list(zip(piece.share.runs, piece.share.begins()))):
            at = (piece.var - tirx.const(begin, dtype)) // tirx.const(run.inner, dtype) % tirx.const(run.size, dtype)
            owned = table(self.rank, run.owned(), dtype)
            inside = tirx.GE(at, owned) if any(run.owned()) else tirx.IntImm("bool", 1)
            last = tirx.LT(piece.var, tirx.const(begin + run.local, dtype))
            found = tirx.Or(tirx.And(last, inside), tirx.And(tirx.Not(last), found)) if len(piece.share.runs) > 1 else (
                inside
            )  # fmt: skip
        return found

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
        if key not in self.starts:
            var = tirx.Var("start", dtype)
            self.starts[key] = var
            self.bounds[var] = ir.Range.from_min_extent(
                tirx.IntImm(dtype, min(run.starts)), tirx.IntImm(dtype, max(run.starts) - min(run.starts) + 1)
            )
        return self.starts[key]

    def _start_of_any(self, whole: tirx.Expr) -> tirx.Expr:
        for extent, var in self.unknown:
            if tvm_ffi.structural_equal(extent, whole, map_free_vars=False):
                return var
        var = tirx.Var("start", whole.ty)
        self.unknown.append((whole, var))
        most = whole - part_of(whole, self.devices) + tirx.const(1, str(whole.ty))
        self.bounds[var] = ir.Range.from_min_extent(tirx.const(0, str(whole.ty)), most)
        return var

    def known(self) -> dict[tirx.Var, tirx.Expr]:
        """What the variables of `start` are."""
        known = {var: table(self.rank, starts, dtype) for (starts, dtype), var in self.starts.items()}
        return known | {var: first_of(extent, self.rank, self.devices) for extent, var in self.unknown}

    def _number(self, piece: _Piece) -> tirx.Expr:
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


class _Body:
    """The statements of a block, in terms of what a device has."""

    def __init__(
        self,
        localizer: _Localizer,
        pieces: Sequence[_Piece],
        numbers: Mapping[tirx.Var, tirx.Expr],
        analyzer: Analyzer,
    ) -> None:
        self.localizer, self.pieces, self.numbers, self.analyzer = localizer, pieces, numbers, analyzer
        for var, bound in localizer.bounds.items():
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
        chosen = _tvm.structural_map(numbered, [(ir.Call, self._choice), (tirx.Select, self._select)])
        return substitute(chosen, self.localizer.known())

    def _store(self, store: tirx.BufferStore) -> tirx.BufferStore:
        buffer, indices = self._place(store.buffer, store.indices)
        return tirx.BufferStore(buffer, store.value, indices)

    def _choice(self, call: ir.Call) -> tirx.Expr:
        if not is_choice(call):
            return call
        return self._decided(call, *call.args)

    def _select(self, select: tirx.Select) -> tirx.Expr:
        return self._decided(select, select.condition, select.true_value, select.false_value)

    def _decided(self, choice: tirx.Expr, condition: tirx.Expr, yes: tirx.Expr, no: tirx.Expr) -> tirx.Expr:
        known = self.analyzer.simplify(condition)
        return choice if not isinstance(known, tirx.IntImm) else yes if int(known) else no

    def _place(self, buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> tuple[tirx.Buffer, list[tirx.Expr]]:
        if buffer not in self.localizer.buffers:
            return buffer, list(indices)  # it has been placed already
        shares = self.localizer.shares[buffer]
        return self.localizer.buffers[buffer], list(map(self._index, indices, shares, buffer.shape))

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
            return self.analyzer.simplify(whole - self.localizer.start(share.runs[0], str(whole.ty), extent))
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

        start = self.localizer.start(run, dtype)
        if isinstance(start, tirx.Var):  # it may be new
            self.analyzer.bind(start, self.localizer.bounds[start], True)
        at = whole - const(begin)
        if run.is_whole:
            return at + const(local)
        if run.outer == 1:
            return at - start * const(run.inner) + const(local)
        block = const(run.extent * run.inner)
        outer, rest = at // block, at % block - start * const(run.inner)
        return outer * const(run.size * run.inner) + rest + const(local)


def _stored(parts: Sequence[object]) -> list[tirx.BufferStore]:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk([part for part in parts if part is not None], (tirx.BufferStore, found.append))
    return found


def _occurrences(parts: Sequence[object], var: tirx.Var) -> int:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk([part for part in parts if part is not None], (tirx.Var, found.append))
    return sum(each.same_as(var) for each in found)


def _once(regions: Sequence[ir.TensorRegion], of: Sequence[tirx.Buffer]) -> list[ir.TensorRegion]:
    """The regions of some buffers, each once; two buffers of one type are equal to upstream's comparison."""
    found: list[ir.TensorRegion] = []
    for region in regions:
        known = any(region.source.same_as(buffer) for buffer in of)
        # Two buffers of one shape are structurally equal.
        seen = [other.region for other in found if other.source.same_as(region.source)]
        if known and not any(tvm_ffi.structural_equal(region.region, other) for other in seen):
            found.append(region)
    return found
