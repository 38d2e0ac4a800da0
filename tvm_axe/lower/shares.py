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
from collections.abc import Sequence

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.accesses import leaf_blocks
from tvm_axe.analysis.blocks import all_blocks, element, nested_blocks, statements, unused_name
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.analysis.patterns import SPATIAL
from tvm_axe.analysis.sharding_rule import ShardingRule
from tvm_axe.analysis.sizes import Sizes
from tvm_axe.layout.shares import Share
from tvm_axe.lower.dealing import Assigned, shares_of
from tvm_axe.lower.numbering import Iterated, Numbering
from tvm_axe.lower.owning import counted, holds, masked
from tvm_axe.lower.placing import Placing
from tvm_axe.lower.told import RANK, part_of, with_coordinates

__all__ = ["is_sharable", "shared"]


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
        self.func, self.rank, self.sizes = func, rank, sizes
        self.names: set[str] = set()  # of blocks: schedules find them by these
        self.numbering = Numbering(rank, devices)
        find = functools.partial(shares_of, rule=rule, assigned=assigned, devices=devices)
        stored = len(rule.inputs) + len(rule.outputs) - len(func.params)  # what is read and stored to is in both
        buffers = [find(operand) for operand in (*rule.inputs, *rule.outputs[stored:], *rule.inner)]
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
            Iterated(iv.var, tirx.Var(iv.var.name, iv.var.ty), share, run, iv.dom.extent)
            for iv, share, run in zip(block.iter_vars, shares, runs)
        ]
        analyzer = Analyzer()
        bounds = {
            piece.var: ir.Range.from_min_extent(tirx.IntImm(str(piece.var.ty), 0), piece.extent) for piece in pieces
        }
        numbers = {piece.old: self.numbering.number(piece) for piece in pieces}
        for var, bound in {**self.numbering.bounds, **bounds}.items():
            analyzer.bind(var, bound)
        inside = Placing(self.buffers, self.shares, self.numbering, pieces, numbers, analyzer)
        body = self._found(block.body, combiner, term)
        if combiner is not None and term is not None and body.same_as(block.body):
            body = counted(self.rank, body, combiner, term, block, pieces)
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
            holds(self.rank, load.indices[dim], share)
            for load in ([] if term is None else loads_in(term))
            for dim, share in enumerate(self.shares[load.source])
            if (load.source, dim) in self.looked_up and not share.is_whole
        ]
        return body if not conditions or term is None else masked(body, combiner, term, conditions[0])


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
