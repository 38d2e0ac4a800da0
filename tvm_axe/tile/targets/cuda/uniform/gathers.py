"""Parallels that fill a shared tile from addresses that they compute, with zeros where a condition doesn't hold.

Such a one is a load as a copy is: ``cp.async`` takes an address of each thread, and makes zeros of what it doesn't
read. So the pixels under a window of an image run ahead as boxes do.

Source: PTX ISA, "Data Movement and Conversion Instructions: Non-bulk copy", for ``src-size``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe.analysis.expressions import is_choice
from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile.nodes import Parallel
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter
from tvm_axe.tile.targets.cuda.fragments.layout import evaluate, linear
from tvm_axe.tile.targets.cuda.fragments.points import is_shared, is_vector
from tvm_axe.tile.targets.cuda.fragments.walk import StridedWalk
from tvm_axe.tile.targets.cuda.instructions import cp_async
from tvm_axe.tile.walking import substitute_in, variables_in


@dataclass(frozen=True)
class Gather:
    """What a parallel does that is a load: at each point ``dst[to] = src[at] if condition else 0``.

    Invariant: the points are as many as the tile's elements, and each of these is stored once.

    Attributes
    ----------
    node : Parallel
        The parallel.
    dst, src : Tile
        A shared tile, and a tensor in global memory of its type.
    to, at : tuple of Expr
        The indices, of the point's coordinates; those into the tile of nothing else, and none of data.
    condition : Expr or None
        Where it doesn't hold, the element is zero, and `at` may be anything.
    """

    node: Parallel
    dst: Tile
    src: Tile
    to: tuple[Any, ...]
    at: tuple[Any, ...]
    condition: Any

    @property
    def used(self) -> frozenset[tirx.Var]:
        """The variables that say from where, the points' own among them."""
        return variables_in(*self.at, *(() if self.condition is None else (self.condition,)))

    def piece_bytes(self, analyzer: sym.Analyzer, layout: Layout | ComposeLayout) -> int | None:
        """How many bytes a thread takes at once; None if ``cp.async`` doesn't take so few."""
        item, var = int(tvm_ffi.dtype(self.src.dtype).bits) // 8, self.node.vars[-1]
        sides: tuple[Any, ...] = (((self.src, self.at), None), ((self.dst, self.to), layout))
        for size in cp_async.SIZES:
            length = size // item
            if not length or self.node.extents[-1] % length or not is_shared(analyzer, self.condition, var, length):
                continue
            if length == 1 or all(is_vector(analyzer, access, held, var, length) for access, held in sides):
                return size
        return None

    def start(self, emitter: Emitter, size: int) -> None:
        """Start the load, to be committed to a group; `size` is `piece_bytes`."""
        vector = size // (int(tvm_ffi.dtype(self.src.dtype).bits) // 8)
        walk = StridedWalk(self.node.extents, emitter.threads.count, vector)
        thread = emitter.threads.index
        with walk.steps() as steps, emitter.guarded(walk.conditions(thread, steps)):
            values = dict(zip(self.node.vars, walk.index(thread, steps)))
            to, at = (
                [emitter.expression(substitute_in(each, values)) for each in indices] for indices in (self.to, self.at)
            )
            stored = emitter.memory(self.dst)
            pointer = stored.buffer.ptr_to(stored.address(to, self.dst.shape, vector))
            condition = [] if self.condition is None else [substitute_in(self.condition, values)]
            cp_async.piece(pointer, emitter.memory(self.src).buffer.ptr_to(at), size, condition)


def gather_of(node: Parallel) -> Gather | None:
    """The load that a parallel is, if it is one."""
    stores = [access for access in node.accesses if access[2]]
    loads = [access for access in node.accesses if not access[2]]
    if len(stores) != 1 or len(loads) != 1 or node.joins:
        return None
    (dst, *_), (src, *_) = stores[0], loads[0]
    store = _store(node.body)
    if store is None or (dst.scope, src.scope) != ("shared", "global") or dst.dtype != src.dtype:
        return None
    value, condition = store.value, None
    if is_choice(value):
        condition, value, otherwise = value.args
        if not _is_zero(otherwise):
            return None
    if not isinstance(value, ir.TensorLoad) or value.source != src.buffer:
        return None
    found = Gather(node, dst, src, tuple(store.indices), tuple(value.indices), condition)
    return found if not _loads(*found.at, condition) and _fills(found) else None


def _store(body: tirx.Stmt) -> tirx.BufferStore | None:
    """The one store of a body, with what its names stand for in their place; None if it has another statement."""
    names: dict[tirx.Var, Any] = {}
    for stmt in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        if isinstance(stmt, tirx.Bind):
            names[stmt.var] = substitute_in(stmt.value, names)
        elif isinstance(stmt, tirx.BufferStore):
            indices = [substitute_in(index, names) for index in stmt.indices]
            return tirx.BufferStore(stmt.buffer, substitute_in(stmt.value, names), indices)
        else:
            return None
    return None


def _is_zero(value: Any) -> bool:
    """Whether all bits are zero: of a float, whether it isn't negative."""
    if isinstance(value, tirx.IntImm):
        return int(value) == 0
    return isinstance(value, tirx.FloatImm) and math.copysign(1.0, float(value)) > 0 and float(value) == 0


def _loads(*values: Any) -> bool:
    """Whether expressions load anything: by a name of the iteration, too, that stands for what is loaded."""
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk([value for value in values if value is not None], (ir.TensorLoad, found.append))
    return bool(found)


def _fills(gather: Gather) -> bool:
    """Whether the points store each of the tile's elements once."""
    places = places_in(gather.node, gather.to, gather.dst)
    return places is not None and len(np.unique(places)) == places.size


def places_in(node: Parallel, indices: Sequence[Any], tile: Tile) -> np.ndarray | None:
    """Of each point of a parallel, in order, the place in a tile at which it is, if as many as the tile has are known.

    Places count elements, the last dimension's one behind the other.
    """
    points: Mapping[Any, np.ndarray] = dict(zip(node.vars, np.indices(node.extents)))
    parts = [evaluate(index, dict(points)) for index in indices]
    if any(part is None for part in parts) or math.prod(node.extents) != math.prod(tile.shape):
        return None
    return np.broadcast_to(linear(parts, tile.shape), node.extents).reshape(-1)
