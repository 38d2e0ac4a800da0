"""Shared tiles that needn't exist: copies of a tensor's region that matrix products read where it is.

A GPU must bring a tile of `a` into shared memory before it multiplies. A CPU reads each of its elements once for a
whole register tile and finds it in cache, so the copy would only add work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tvm_axe.tile.nodes import Branch, Copy, Gemm, Loop, Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import tiles_of, walk


def read_in_place(program: TileProgram) -> dict[Tile, Copy]:
    """The copies that can be left out, by the tile that they would make.

    It is written by nothing else and all of it; its source is a tensor that the kernel doesn't write, of the same type,
    at a place that depends on no tile; and all that reads it are later products in the same block of statements, as `a`
    with its rows along the sum.
    """
    leaves = [node for node in program.nodes() if not isinstance(node, Loop | Branch)]
    analyzer, found = program.analyzer(), {}
    known: Mapping = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
    written = {tile for node in leaves for tile in node.writes}
    for copy in leaves:
        if not isinstance(copy, Copy) or copy.atomic:
            continue
        tile, source = copy.dst.tile, copy.src
        writers = [node for node in leaves if tile in node.writes]
        readers = [node for node in leaves if tile in node.reads]
        if (
            tile.scope == "shared"
            and tile.layout is None
            and len(tile.shape) == 2
            and writers == [copy]
            and copy.dst.whole
            and source.tile.scope == "global"
            and source.tile not in written
            and source.tile.dtype == tile.dtype
            and tile.dtype in ("float32", "float64", "int32")
            and source.dimensions[-1] == len(source.tile.shape) - 1
            and copy.dst.dimensions == (0, 1)
            and not any(t.scope != "global" or t in written for start in source.start for t in tiles_of(start, known))
            and set(source.overruns(analyzer)) <= set(source.dimensions)
            and readers
            and all(_as_rows(node, tile) for node in readers)
            and set(readers) <= set(_after(program.body, copy))
        ):
            found[tile] = copy
    return found


def _as_rows(node: Node, tile: Tile) -> bool:
    return isinstance(node, Gemm) and node.a.tile is tile and node.b.tile is not tile and not node.transpose_a


def _after(body: tuple[Node, ...], copy: Copy) -> Iterable[Node]:
    """What runs after the copy in the statements that it is one of."""
    if copy in body:
        return walk(body[body.index(copy) + 1 :])
    for node in body:
        for inner in (node.body,) if isinstance(node, Loop) else _branches(node):
            if copy in walk(inner):
                return _after(inner, copy)
    return ()


def _branches(node: Node) -> tuple[tuple[Node, ...], ...]:
    return (node.then, node.otherwise) if isinstance(node, Branch) else ()
