"""Loads and stores of single elements that TMA can do: those whose addresses are a box of the tensor.

A parallel that fills a shared tile takes an address and a condition at each point, and so does one that stores what a
fragment holds. Where the addresses are a box's, in order, and the conditions say that elements are in the tensor and
nothing else, one instruction does the same: it takes the box's corner, in front of the tensor too, makes zeros of what
lies outside and doesn't write there. So the pixels under a window of an image are loaded by a producer warp, as tiles
are.

Source: PTX ISA, "Tensors" (bounding boxes, out-of-bound accesses).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from tvm import ir, sym, tirx

from tvm_axe.analysis.counting import conjuncts, margin
from tvm_axe.analysis.expressions import terms
from tvm_axe.tile.nodes import Branch, Copy, Loop, Node, Parallel, Signal
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.layout import evaluate
from tvm_axe.tile.targets.cuda.uniform.gathers import gather_of, places_in
from tvm_axe.tile.walking import variables_in


def with_boxes(program: TileProgram, stores: bool = True) -> TileProgram:
    """The program with copies in the place of parallels that move boxes; itself where none does.

    Without `stores` of those that load. Where flags say when others may read, what is stored stays as it is.
    """
    analyzer = program.analyzer()
    stores = stores and not any(isinstance(node, Signal) for node in program.nodes())

    def of(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        made = tuple(one(node) for node in nodes)
        return nodes if all(new is old for new, old in zip(made, nodes)) else made

    def one(node: Node) -> Node:
        if isinstance(node, Parallel):
            return _copy_of(node, analyzer, stores) or node
        if isinstance(node, Loop):
            body = of(node.body)
            return node if body is node.body else replace(node, body=body)
        if isinstance(node, Branch):
            then, otherwise = of(node.then), of(node.otherwise)
            same = then is node.then and otherwise is node.otherwise
            return node if same else replace(node, then=then, otherwise=otherwise)
        return node

    body = of(program.body)
    return program if body is program.body else replace(program, body=body)


class _Moved(NamedTuple):
    """What a parallel moves: at each point an element of a tile from or to one of a tensor, under a condition.

    `to` are the indices into the tile, `at` those into the tensor.
    """

    node: Parallel
    tile: Tile
    tensor: Tile
    to: tuple[Any, ...]
    at: tuple[Any, ...]
    condition: Any


def _copy_of(node: Parallel, analyzer: sym.Analyzer, stores: bool) -> Copy | None:
    """The copy that a parallel is, if it loads a box, or stores one."""
    moved = _loaded(node) or (_stored(node) if stores else None)
    box = None if moved is None or moved.tensor.is_mesh else _box_of(moved, analyzer)
    if moved is None or box is None:
        return None
    zero = tirx.const(0, "int32")
    own = Region(moved.tile, (zero,) * len(moved.tile.shape), moved.tile.shape)
    return Copy(own, box, None) if moved.tile.scope == "shared" else Copy(box, own, None)


def _loaded(node: Parallel) -> _Moved | None:
    """What a parallel moves that fills a shared tile; None of any other."""
    gather = gather_of(node)
    if gather is None:
        return None
    return _Moved(node, gather.dst, gather.src, gather.to, gather.at, gather.condition)


def _stored(node: Parallel) -> _Moved | None:
    """What a parallel moves that stores a fragment's elements in 16 bits, cast or as they are; None of any other.

    Others don't leave through shared memory, and threads store them as they lie.
    """
    stmt, condition = node.body, None
    if isinstance(stmt, tirx.IfThenElse) and stmt.else_case is None:
        stmt, condition = stmt.then_case, stmt.condition
    if not isinstance(stmt, tirx.BufferStore) or len(node.accesses) != 2 or node.joins:
        return None
    value = stmt.value.value if isinstance(stmt.value, tirx.Cast) else stmt.value
    (held, *_), (tensor, *_) = sorted(node.accesses, key=lambda access: access[2])
    if not isinstance(value, ir.TensorLoad) or (held.scope, tensor.scope) != ("fragment", "global"):
        return None
    if tensor.dtype not in ("float16", "bfloat16"):
        return None
    return _Moved(node, held, tensor, tuple(value.indices), tuple(stmt.indices), condition)


def _box_of(moved: _Moved, analyzer: sym.Analyzer) -> Region | None:
    """The box that elements of a tile are, in its order; None if they are anything else."""
    own = places_in(moved.node, moved.to, moved.tile)
    if own is None:
        return None
    order = np.argsort(own)
    if not np.array_equal(own[order], np.arange(own.size)):
        return None
    points = dict(zip(moved.node.vars, np.indices(moved.node.extents)))
    start, steps = [], []
    for index in moved.at:
        parted = _parted(index, moved.node.vars)
        found = None if parted is None else evaluate(parted[1], dict(points))
        if parted is None or found is None:
            return None
        start.append(parted[0])
        steps.append(np.broadcast_to(found, moved.node.extents).reshape(-1)[order])
    extents = tuple(int(step.max()) + 1 for step in steps)
    if math.prod(extents) != own.size:
        return None
    if not all(np.array_equal(step, at) for step, at in zip(steps, np.unravel_index(np.arange(own.size), extents))):
        return None
    return Region(moved.tensor, tuple(start), extents, in_front=True) if _is_inside(moved, analyzer) else None


def _parted(index: Any, points: Sequence[tirx.Var]) -> tuple[Any, Any] | None:
    """An index as a sum of what all points have and of what each has; None if a term has both."""
    fixed, moving = 0, 0
    for sign, term in terms(index):
        used = variables_in(term)
        if not used & {*points}:
            fixed = fixed + sign * term
        elif used <= {*points}:
            moving = moving + sign * term
        else:
            return None
    return fixed, moving


def _is_inside(moved: _Moved, analyzer: sym.Analyzer) -> bool:
    """Whether the condition holds where all indices are in the tensor, and nowhere else.

    Each of its parts is one bound, or holds always; and each bound is one of its parts, or holds always.
    """
    for var, extent in zip(moved.node.vars, moved.node.extents):
        analyzer.bind(var, ir.Range.from_min_extent(0, extent))
    known = [each for index, size in zip(moved.at, moved.tensor.shape) for each in (index, size - 1 - index)]
    parts = () if moved.condition is None else conjuncts(moved.condition)
    asked = [each for each in map(margin, parts) if each is not None]
    if len(asked) < len(parts):
        return False
    said = [any(analyzer.can_prove_equal(own, each) for each in asked) for own in known]
    needed = [each for each in asked if not any(analyzer.can_prove_equal(own, each) for own in known)]
    return all(holds or analyzer.can_prove(own >= 0) for holds, own in zip(said, known)) and all(
        analyzer.can_prove(each >= 0) for each in needed
    )
