"""Tiles that needn't exist: what matrix products read and write where it is.

A GPU must bring a tile of `a` into shared memory before it multiplies. A CPU reads each of its elements once for a
whole register tile and finds it in cache, so the copy would only add work. Sums that are all there when a register tile
is done go to the tensor from there: otherwise each is set to zero, added to, and copied, through the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tvm_axe.analysis.expressions import is_zero
from tvm_axe.tile.nodes import Copy, Fill, Gemm, Let, Loop, Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile, constant
from tvm_axe.tile.strides import has_rows
from tvm_axe.tile.walking import leaves, tiles_of, walk

_WHOLE = ("float32", "float64", "int32")
"""Types that a tensor has as they are computed with."""


def read_in_place(program: TileProgram) -> dict[Tile, Copy]:
    """The copies that can be left out, by the tile that they would make.

    It is written by nothing else and all of it; its source is a tensor that the kernel doesn't write, of the same type,
    at a place that depends on no tile; and all that reads it are later products in the same block of statements, as `a`
    with its rows along the sum.
    """
    nodes = [*leaves(program.body)]
    analyzer, found = program.analyzer(), {}
    known: Mapping = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
    written = {tile for node in nodes for tile in node.writes}
    for copy in nodes:
        if not isinstance(copy, Copy) or copy.atomic:
            continue
        tile, source = copy.dst.tile, copy.src
        writers = [node for node in nodes if tile in node.writes]
        readers = [node for node in nodes if tile in node.reads]
        if (
            tile.scope == "shared"
            and tile.layout is None
            and len(tile.shape) == 2
            and writers == [copy]
            and copy.dst.whole
            and source.tile.scope == "global"
            and source.tile not in written
            and source.tile.dtype == tile.dtype
            and tile.dtype in _WHOLE
            and source.dimensions[-1] == len(source.tile.shape) - 1
            and has_rows(source.tile)
            and copy.dst.dimensions == (0, 1)
            and not any(t.scope != "global" or t in written for start in source.start for t in tiles_of(start, known))
            and set(source.overruns(analyzer)) <= set(source.dimensions)
            and readers
            and all(_as_rows(node, tile) for node in readers)
            and set(readers) <= set(_after(program.body, copy))
        ):
            found[tile] = copy
    return found


def stored_at_once(program: TileProgram) -> dict[Gemm, tuple[Copy, Fill | None]]:
    """The copies of sums to a tensor that the product does, with what sets the sums to zero before.

    One product makes all of the tile in a single step, as all terms are in one tile of `a`; nothing else touches the
    tile; and the tensor, of the same type, is touched by no other node, at a place that depends on no tile.
    """
    nodes, analyzer = [*leaves(program.body)], program.analyzer()
    known: Mapping = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
    found = {}
    for copy in nodes:
        if not isinstance(copy, Copy) or copy.atomic:
            continue
        sums, target = copy.src.tile, copy.dst
        touching = [node for node in nodes if sums in (*node.reads, *node.writes)]
        products = [node for node in touching if isinstance(node, Gemm)]
        fills = [node for node in touching if isinstance(node, Fill)]
        if (
            sums.scope == "fragment"
            and sums.layout is None
            and sums.dtype in _WHOLE
            and len(sums.shape) == 2
            and copy.src.whole
            and copy.src.dimensions == (0, 1)
            and target.tile.scope == "global"
            and target.tile.dtype == sums.dtype
            and target.dimensions[-1] == len(target.tile.shape) - 1
            and has_rows(target.tile)
            and not any(tiles_of(start, known) for start in target.start)
            and set(target.overruns(analyzer)) <= set(target.dimensions)
            and all(target.tile not in (*node.reads, *node.writes) for node in nodes if node is not copy)
            and len(products) == 1
            and len(fills) <= 1
            and len(touching) == 2 + len(fills)
            and _in_one_step(program.body, products[0], copy, fills)
        ):
            found[products[0]] = copy, fills[0] if fills else None
    return found


def _in_one_step(body: tuple[Node, ...], product: Gemm, copy: Copy, fills: list[Fill]) -> bool:
    """Whether a product's sums begin at zero and are copied behind it, each as often as it runs."""
    beside = _statements(body, copy)
    steps = [node for node in beside if node is product or (_runs_once(node) and product in node.bodies[0])]
    order = [*fills, *steps, copy]
    if not steps or not product.c.whole or bool(fills) is not product.accumulate or not set(order) <= set(beside):
        return False
    places = [beside.index(node) for node in order]
    named = any(isinstance(node, Let) for node in beside[places[-2] : places[-1]])  # the place may depend on it
    return places == sorted(places) and not named and all(fill.dst.whole and is_zero(fill.value) for fill in fills)


def _runs_once(node: Node) -> bool:
    return isinstance(node, Loop) and node.until is None and constant(node.extent) == 1


def _statements(body: tuple[Node, ...], node: Node) -> tuple[Node, ...]:
    """The statements that a node is one of."""
    inner = (part for each in body for part in each.bodies if node in walk(part))
    return body if node in body else _statements(next(inner), node)


def _as_rows(node: Node, tile: Tile) -> bool:
    return isinstance(node, Gemm) and node.a.tile is tile and node.b.tile is not tile and not node.transpose_a


def _after(body: tuple[Node, ...], copy: Copy) -> Iterable[Node]:
    """What runs after the copy in the statements that it is one of."""
    beside = _statements(body, copy)
    return walk(beside[beside.index(copy) + 1 :])
