"""A function restricted to a sample of its results, as a reference where all of them would take minutes.

The elements that are wanted are a few indices of each dimension. From the last stage to the first, each keeps the
iterations that store to what is wanted, as far as an iterator alone is an index of what it stores to, and what these
read is wanted of the stages before. What is kept so is more than is needed, never less: the function computes of the
sample what it would compute of it as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.blocks import NestedBlock, all_blocks, covers, element, nested_blocks, statements
from tvm_axe.analysis.expressions import alike, loads_in, substitute, variables_of
from tvm_axe.analysis.values import LIMIT, values
from tvm_axe.checking.products import own_products
from tvm_axe.errors import InputError

__all__ = ["Sample", "iterations", "sampled"]

_LONG = 5e9  # iterations; upstream's code does about 1e9 a second, and a check runs a reference four times a seed
_MOST = 5e8  # those that a sample may take
_COUNTS = (64, 16, 4, 2)  # indices of a dimension


@dataclass(frozen=True)
class Sample:
    """A function that computes a sample of another's results.

    Attributes
    ----------
    func : PrimFunc
        The function; behind its parameters it takes `rows`.
    rows : Mapping[str, numpy.ndarray]
        Further parameters by name: which of an iterator's values it runs through.
    chosen : Mapping[str, tuple[numpy.ndarray, ...]]
        Of each output, the indices of each dimension whose elements it computes.
    """

    func: tirx.PrimFunc
    rows: Mapping[str, np.ndarray]
    chosen: Mapping[str, tuple[np.ndarray, ...]]

    @property
    def judged(self) -> dict[str, int]:
        """How many elements of each output it computes."""
        return {name: prod(len(places) for places in dims) for name, dims in self.chosen.items()}

    def left_out(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Where the elements of a parameter are none of the sample."""
        mask = np.zeros(shape, bool)
        if name in self.chosen:
            mask[...] = True
            mask[np.ix_(*self.chosen[name])] = False
        return mask


def iterations(func: tirx.PrimFunc) -> int:
    """How many iterations of blocks a call is."""
    blocks = [block for nest in statements(func.body.block.body) for block in nested_blocks(nest)]
    return sum(prod(_extent(loop.extent) for loop in block.loops) for block in blocks)


def sampled(func: tirx.PrimFunc, outputs: Sequence[str], rng: np.random.Generator) -> Sample | None:
    """A sample of a function's outputs, where a reference of all of them would take minutes; None otherwise.

    Raises
    ------
    InputError
        If no sample takes less: each result is made of all there is.
    """
    products = own_products(func)
    rest = func if products is None else None if products.rest is None else products.rest["main"]
    long = 0 if rest is None else iterations(rest)
    if long <= _LONG:
        return None
    for count in _COUNTS:
        shapes = {str(param.name): [int(n) for n in param.shape] for param in func.params}
        chosen = {name: tuple(_drawn(extent, count, rng) for extent in shapes[name]) for name in outputs}
        sample = _restricted(func, chosen)
        if iterations(sample.func) <= _MOST:
            return sample
    raise InputError(
        f"check: a reference takes {long:.2g} iterations, which is minutes, and still {iterations(sample.func):.2g} "
        f"for {_COUNTS[-1]} indices of each dimension of {', '.join(outputs)}, made of all the rest as these are; "
        "check the schedule on smaller extents"
    )


def _drawn(extent: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Indices of a dimension: the first, the last, and one of each of as many pieces as there are to be."""
    if extent <= count:
        return np.arange(extent)
    bounds = np.linspace(0, extent, count - 1).astype(int)
    within = [rng.integers(low, max(high, low + 1)) for low, high in pairwise(bounds)]
    return np.unique([0, *within, extent - 1])


_Wanted = dict[tirx.Buffer, list[np.ndarray]]


def _restricted(func: tirx.PrimFunc, chosen: Mapping[str, tuple[np.ndarray, ...]]) -> Sample:
    root = func.body.block
    wanted: _Wanted = {}
    for param in func.params:
        if param.name in chosen:
            _want(wanted, param, chosen[param.name])
    rows: dict[tirx.Buffer, np.ndarray] = {}
    kept: list[tirx.Stmt] = []
    for nest in reversed(statements(root.body)):
        block = _plain(nest)
        if block is None:
            for part in all_blocks(nest):
                for region in part.reads:
                    _want(wanted, region.source, [np.arange(_extent(n)) for n in region.source.shape])
            kept.append(nest)
        elif block.block.body.buffer in wanted:
            kept.append(_restrict(nest, block, wanted, rows))
    body = tirx.SeqStmt(kept[::-1]) if len(kept) > 1 else kept[0]
    within = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=list(root.alloc_buffers))
    parameters = [*func.params, *rows]
    found = tirx.PrimFunc(parameters, s_tir.SBlockRealize([], True, within), func.ret_type)
    named = {str(buffer.name): array for buffer, array in rows.items()}
    return Sample(s_tir.renew_defs(found.with_attrs(dict(func.attrs.items()))), named, chosen)


def _plain(nest: tirx.Stmt) -> NestedBlock | None:
    """The one block of a nest, if its iterations may be done by themselves: none goes on from another's element."""
    blocks = nested_blocks(nest)
    if len(blocks) != 1 or len(all_blocks(nest)) != 1 or not covers(blocks[0].realize, blocks[0].loops):
        return None
    block = blocks[0].block
    kinds = (tirx.IterVar.DataPar, tirx.IterVar.CommReduce)
    if not isinstance(block.body, tirx.BufferStore) or not isinstance(block.init, tirx.BufferStore | None):
        return None
    own = [load for load in loads_in(block.body) if load.source.same_as(block.body.buffer)]
    in_place = all(alike(load.indices, block.body.indices) for load in own)
    return blocks[0] if in_place and all(iv.iter_type in kinds for iv in block.iter_vars) else None


def _restrict(nest: tirx.Stmt, nested: NestedBlock, wanted: _Wanted, rows: dict[tirx.Buffer, np.ndarray]) -> tirx.Stmt:
    """A nest less the iterations whose results nobody wants; what it reads is wanted then."""
    block, store = nested.block, nested.block.body
    taken = {iv.var: np.arange(_extent(iv.dom.extent)) for iv in block.iter_vars}
    spatial = {iv.var for iv in block.iter_vars if iv.iter_type == tirx.IterVar.DataPar}
    for index, places in zip(store.indices, wanted[store.buffer]):
        if index in spatial:
            taken[index] = np.intersect1d(taken[index], places)
    for load in loads_in(store):
        if not load.source.same_as(store.buffer):
            extents = [_extent(n) for n in load.source.shape]
            _want(wanted, load.source, [_places(i, n, taken) for i, n in zip(load.indices, extents)])
    if all(len(taken[iv.var]) == _extent(iv.dom.extent) for iv in block.iter_vars):
        return nest
    return _rebuilt(block, taken, rows)


def _rebuilt(
    block: s_tir.SBlock, taken: Mapping[tirx.Var, np.ndarray], rows: dict[tirx.Buffer, np.ndarray]
) -> tirx.Stmt:
    """A nest of a block whose iterators run through the values `taken`."""
    iterators, loops, replaced = list[tirx.IterVar](), list[tuple[tirx.Var, int]](), dict[tirx.Var, tirx.Expr]()
    for iv in block.iter_vars:
        count, var = len(taken[iv.var]), tirx.Var(str(iv.var.name), "int32")
        loops.append((tirx.Var(f"{iv.var.name}_at", "int32"), count))
        iterators.append(tirx.IterVar(ir.Range(0, count), var, iv.iter_type))
        replaced[iv.var] = var
        if count < _extent(iv.dom.extent):
            places = tirx.decl_buffer([count], "int32", f"rows_{len(rows)}", layout=None)
            rows[places] = taken[iv.var].astype("int32")
            replaced[iv.var] = tirx.BufferLoad(places, [var])
    body, init = _stored(block.body, replaced), None if block.init is None else _stored(block.init, replaced)
    reads = [element(load.source, load.indices) for load in loads_in(body)]
    if init is not None:  # a reduction's own running value is no read
        reads = [region for region in reads if not region.source.same_as(body.buffer)]
    changed = s_tir.SBlock(iterators, reads, [element(body.buffer, body.indices)], block.name_hint, body, init)
    stmt: tirx.Stmt = s_tir.SBlockRealize([var for var, _ in loops], tirx.IntImm("bool", 1), changed)
    for var, count in reversed(loops):
        stmt = tirx.For(var, 0, count, tirx.ForKind.SERIAL, stmt)
    return stmt


def _stored(store: tirx.BufferStore, replaced: Mapping[tirx.Var, tirx.Expr]) -> tirx.BufferStore:
    indices = [substitute(index, replaced) for index in store.indices]
    return tirx.BufferStore(store.buffer, substitute(store.value, replaced), indices)


def _places(index: tirx.Expr, extent: int, taken: Mapping[tirx.Var, np.ndarray]) -> np.ndarray:
    """What an index is in the iterations that are kept; all where that isn't known."""
    used = [var for var in taken if var in variables_of(index)]
    if prod(len(taken[var]) for var in used) > LIMIT:
        return np.arange(extent)
    found = values(index, dict(zip(used, np.ix_(*(taken[var] for var in used)))))
    # What lies beyond is read on a condition that doesn't hold there.
    return np.arange(extent) if found is None else np.unique(np.clip(found, 0, extent - 1))


def _want(wanted: _Wanted, buffer: tirx.Buffer, places: Sequence[np.ndarray]) -> None:
    """Want the elements at these places of each dimension, and what was wanted before."""
    before = wanted.get(buffer)
    wanted[buffer] = list(places) if before is None else [np.union1d(a, b) for a, b in zip(before, places)]


def _extent(extent: tirx.Expr) -> int:
    return int(extent) if isinstance(extent, tirx.IntImm) else 1
