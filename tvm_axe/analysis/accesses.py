"""The leaf blocks of a function: which elements they load and store, as sums of digits, and what they reduce with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.digits import Digit, Index, index_of
from tvm_axe.analysis.expressions import alike, is_value
from tvm_axe.analysis.sizes import Sizes, is_symbolic, number

__all__ = ["Access", "LeafBlock", "NotAnalysed", "leaf_blocks"]

_COMBINERS = {tirx.Add: ("sum", 0), tirx.Mul: ("prod", 1), tirx.Max: ("max", None), tirx.Min: ("min", None)}
"""By the node that combines: what it is called, and what a reduction must start with for partial results to add up.

Of a maximum any start will do: that it is taken on every device changes nothing.
"""


class NotAnalysed(Exception):
    """A function that has something else than blocks below loops; the message says what."""


@dataclass(frozen=True, eq=False)
class Access:
    """A load or store of one element: its indices as sums of digits of the block's iterators, or None.

    `shape` is the buffer's, at the sizes that were given.
    """

    buffer: tirx.Buffer
    indices: tuple[Index | None, ...]
    is_store: bool
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LeafBlock:
    """A block with no block inside.

    Attributes
    ----------
    name : str
        The block's name.
    extents, kinds : tuple[int, ...]
        The extent and the kind (`tirx.IterVar.DataPar`, ...) of each iterator.
    accesses : tuple[Access, ...]
        Everything that it loads and stores, its initialization too.
    combiner : str or None
        What it reduces with: "sum", "prod", "max" or "min"; None where it doesn't reduce, or in another way.
    value : Expr or None
        What is combined, or stored where it doesn't reduce; None where it isn't one store.
    symbolic : frozenset[int]
        The positions of the iterators whose extents are no constants.
    """

    name: str
    extents: tuple[int, ...]
    kinds: tuple[int, ...]
    accesses: tuple[Access, ...]
    combiner: str | None
    value: tirx.Expr | None
    symbolic: frozenset[int] = frozenset()

    @property
    def written(self) -> list[tirx.Buffer]:
        """The buffers that it stores into, each as often as it does."""
        return [access.buffer for access in self.accesses if access.is_store]


def leaf_blocks(func: tirx.PrimFunc, sizes: Sizes | None = None) -> list[LeafBlock]:
    """Return the blocks of a function that have none inside, in order.

    Parameters
    ----------
    func : PrimFunc
        A function.
    sizes : Sizes, optional
        What symbolic extents are taken to be. An index has an iterator of one only where it is that iterator, of a
        dimension of the same extent.

    Raises
    ------
    NotAnalysed
        If a statement other than loops stands outside of them, or one can do more than load and store elements.
    """
    return list(_leaf_blocks(func, tuple((sizes or {}).items())))


@lru_cache(maxsize=1024)  # who derives a rule, who costs its ways and who makes one of them ask in turn
def _leaf_blocks(func: tirx.PrimFunc, sizes: tuple[tuple[tirx.Var, int], ...]) -> tuple[LeafBlock, ...]:
    return tuple(_read(block, dict(sizes)) for block in _leaves(func.body))


def _leaves(stmt: tirx.Stmt) -> list[s_tir.SBlock]:
    if isinstance(stmt, tirx.SeqStmt):
        return [block for part in stmt.seq for block in _leaves(part)]
    if isinstance(stmt, tirx.For):
        return _leaves(stmt.body)
    if not isinstance(stmt, s_tir.SBlockRealize):
        raise NotAnalysed(f"{type(stmt).__name__} outside of a block")
    block, inner = stmt.block, list[s_tir.SBlockRealize]()
    if _found(ir.TensorLoad, [stmt.predicate, *stmt.iter_values]):
        raise NotAnalysed(f"block {block.name_hint!r} runs where an element says so")
    if block.match_buffers:
        raise NotAnalysed(f"block {block.name_hint!r} sees a buffer as another")
    tvm_ffi.structural_walk(block.body, (s_tir.SBlockRealize, inner.append))
    if not inner:
        return [block]
    if block.init is not None:
        raise NotAnalysed(f"block {block.name_hint!r} starts a reduction of blocks")
    return _leaves(block.body)


def _found(kind: type, parts: object) -> list:
    found: list = []
    tvm_ffi.structural_walk(parts, (kind, found.append))
    return found


def _read(block: s_tir.SBlock, sizes: Sizes) -> LeafBlock:
    iterators, extents, analyzer = dict[tirx.Var, tuple[int, int]](), list[int](), Analyzer()
    for position, iv in enumerate(block.iter_vars):
        extent = number(iv.dom.extent, sizes)
        if extent is None or not isinstance(iv.dom.min, tirx.IntImm) or int(iv.dom.min):
            raise NotAnalysed(f"block {block.name_hint!r}: iterator {iv.var.name} must run from 0 to a constant")
        extents.append(extent)
        if not is_symbolic(iv.dom.extent):
            iterators[iv.var] = (position, extent)
        analyzer.bind(iv.var, iv.dom)
    bodies = [block.body] if block.init is None else [block.init, block.body]
    _only_accesses(block, bodies)
    accesses = []
    for node in _found(tirx.BufferStore, bodies) + _found(ir.TensorLoad, bodies):
        is_store = isinstance(node, tirx.BufferStore)
        buffer = node.buffer if is_store else node.source
        shape = [number(extent, sizes) for extent in buffer.shape]
        if None in shape:
            raise NotAnalysed(f"buffer {buffer.name!r}: its shape must be constant")
        indices = tuple(
            _of_symbolic(analyzer.simplify(index), extent, block, extents)
            or index_of(analyzer.simplify(index), iterators)
            for index, extent in zip(node.indices, buffer.shape)
        )
        accesses.append(Access(buffer, indices, is_store, tuple(n for n in shape if n is not None)))
    combiner, value = _combined(block)
    kinds = tuple(int(iv.iter_type) for iv in block.iter_vars)
    symbolic = frozenset(at for at, iv in enumerate(block.iter_vars) if is_symbolic(iv.dom.extent))
    return LeafBlock(block.name_hint, tuple(extents), kinds, tuple(accesses), combiner, value, symbolic)


def _of_symbolic(index: tirx.Expr, extent: tirx.Expr, block: s_tir.SBlock, typical: Sequence[int]) -> Index | None:
    """Return the index that is an iterator of symbolic extent, of a dimension as long as that at all sizes."""
    if not isinstance(index, tirx.Var) or not is_symbolic(extent):
        return None
    for at, iv in enumerate(block.iter_vars):
        if iv.var.same_as(index) and tvm_ffi.structural_equal(iv.dom.extent, extent, map_free_vars=False):
            return Index((Digit(1, at, 1, typical[at]),), 0)
    return None


def _only_accesses(block: s_tir.SBlock, bodies: Sequence[tirx.Stmt]) -> None:
    """Refuse what may touch elements in another way than by loads and stores."""
    if not _found(tirx.BufferStore, [block.body]):
        raise NotAnalysed(f"block {block.name_hint!r} stores nothing")
    for kind in (tirx.Evaluate, tirx.DeclBuffer):
        if _found(kind, bodies):
            raise NotAnalysed(f"block {block.name_hint!r} holds {kind.__name__}")
    for call in _found(ir.Call, bodies):
        if not is_value(call):
            raise NotAnalysed(f"block {block.name_hint!r} calls {call.op}")


def _combined(block: s_tir.SBlock) -> tuple[str | None, tirx.Expr | None]:
    store, start = block.body, block.init
    if not isinstance(store, tirx.BufferStore):
        return None, None
    if not isinstance(start, tirx.BufferStore) or not isinstance(start.value, ir.Constant):
        return None, store.value
    if type(store.value) not in _COMBINERS or not _same_element(start, store.buffer, store.indices):
        return None, store.value
    name, identity = _COMBINERS[type(store.value)]
    sides = [store.value.a, store.value.b]
    for old, term in (sides, sides[::-1]):
        if isinstance(old, ir.TensorLoad) and _same_element(store, old.source, old.indices):
            reads = any(load.source.same_as(store.buffer) for load in _found(ir.TensorLoad, [term]))
            if not reads and identity in (None, float(start.value.value)):
                return name, term
    return None, store.value


def _same_element(store: tirx.BufferStore, buffer: tirx.Buffer, indices: Sequence[tirx.Expr]) -> bool:
    return store.buffer.same_as(buffer) and alike(store.indices, indices)
