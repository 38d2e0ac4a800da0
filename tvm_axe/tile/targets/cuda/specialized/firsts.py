"""Which product is the first to touch an accumulator, so that it sets it and nobody has to clear it."""

from __future__ import annotations

from tvm import sym, tirx

from tvm_axe.tile.nodes import Gemm, Loop, Node
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import walk


def first_product(tile: Tile, nodes: tuple[Node, ...], analyzer: sym.Analyzer) -> tuple[Gemm, tirx.Expr | bool] | None:
    """The product that is the first to touch a tile, and under which condition it isn't the first time.

    None if something else may be the first, or a loop around it may have no iteration.
    """
    node = next((node for node in nodes if tile in node.reads + node.writes), None)
    if isinstance(node, Gemm) and tile not in (node.a.tile, node.b.tile):
        return node, False
    if not isinstance(node, Loop) or not analyzer.can_prove(node.extent >= 1):
        return None
    users = [child for child in walk(node.body) if tile in child.reads + child.writes]
    (user, *others) = users
    if others or not isinstance(user, Gemm) or user not in node.body or tile in (user.a.tile, user.b.tile):
        return None
    return user, after_first(node.var, node.start)


def after_first(var: tirx.Var, start: int | tirx.Expr) -> tirx.Expr:
    """Whether an iteration isn't the first of its loop."""
    return tirx.NE(var, tirx.const(start, "int32") if isinstance(start, int) else start)
