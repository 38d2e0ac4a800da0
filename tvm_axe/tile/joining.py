"""What stands beside atomics: other reads and stores of what values are joined with, and other kinds of joins.

Joins of one kind need no order. All else does: in a tile in shared memory that of two `parallel`, as the block waits
between them; in a tensor, which blocks and devices share, that of flags. So between a join and what else touches the
tensor there is an ordered signal, and a wait behind it. A counter that is read once all have added to it:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def ranked(x: T.Buffer((64,), "int32"), me: T.int32, held: tile.mesh_tensor((2, 8), "int32"),
...            told: tile.mesh_tensor((2, 1), "int32"), share: T.Buffer((8,), "float32")):
...     with tile.kernel(1, device=me) as b:
...         with tile.parallel(64) as i:
...             tile.atomic_add(1, held[x[i] % 2, x[i] // 2 % 8])
...         tile.signal(told[0:2, 0], add=True)
...         tile.wait(told[me, 0], 2, reset=True)
...         with tile.parallel(8) as i:
...             share[i] = T.cast(held[me, i], "float32") / 128.0
>>> tile.read(ranked).devices
2

Which flag says which, `tvm_axe.tile.clocks` finds where it is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx

from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Branch, Copy, Loop, Node, Parallel, Signal, Wait
from tvm_axe.tile.points import accesses
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import tiles_of

_TOUCH = "touch"
"""The kind of what is no join."""


@dataclass(frozen=True)
class _Earlier:
    """A node that has touched a tensor, and what has come behind it: 0 for nothing, 1 for a signal, 2 for a wait too.

    `turn` tells apart when it did.
    """

    node: Node
    tile: Tile
    kind: str
    turn: int
    told: int = 0


_State = dict[tuple[Node, Tile, str], _Earlier]
"""What has touched tensors that values are joined with."""


def check_joins(program: TileProgram) -> None:
    """Refuse joins in registers, and what touches a joined tile or tensor otherwise, in no order with them.

    Raises
    ------
    TileError
        There is one of these.
    """
    tiles = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
    for node in program.nodes():
        _alone(node, tiles)
    joined = frozenset(tile for node in program.nodes() for tile, _ in node.joins if tile.scope == "global")
    if joined:
        _Flagged(joined, tiles).body(program.body, {})


def _alone(node: Node, tiles: dict[tirx.Buffer, Tile]) -> None:
    """Refuse what one node does by itself: joins where none can be, and with what it touches otherwise."""
    for tile, how in node.joins:
        if tile.scope not in ("global", "shared"):
            raise TileError(f"{node}: atomically into {tile}; valid are a tensor in global memory and a tile.shared")
        if isinstance(node, Copy) and (node.src.tile.scope, tile.scope) == ("global", "shared"):
            raise TileError(f"{node}: atomically into {tile}, from a tensor; valid is a tile.fragment between them")
        for kind in _kinds(node, tiles).get(tile, ()):
            if kind != how:
                raise _unordered(node, tile, how, node, kind)


def _kinds(node: Node, tiles: dict[tirx.Buffer, Tile]) -> dict[Tile, list[str]]:
    """How a node itself touches tiles: by joins of a kind, or otherwise."""
    found: dict[Tile, list[str]] = {}
    for tile, how in node.joins:
        found.setdefault(tile, []).append(how)
    plain = [
        tile for expression in node.scalars if not isinstance(expression, int) for tile in tiles_of(expression, tiles)
    ]
    if isinstance(node, Parallel):
        plain += [tiles[access.buffer] for access in accesses(node) if not access.atomic]
    elif not node.bodies and not isinstance(node, Wait | Signal):
        plain += [*node.reads, *(tile for tile in node.writes if tile not in found)]
    for tile in dict.fromkeys(plain):
        found.setdefault(tile, []).append(_TOUCH)
    return found


def _unordered(node: Node, tile: Tile, how: str, other: Node, kind: str) -> TileError:
    """What is wrong between a join and what else touches its tile."""
    if kind != _TOUCH:
        return TileError(
            f"{node}: joins values with {tile} by {how}, and `{other}` by another; they have no order, so "
            "valid is one of add, max, min and cas"
        )
    valid = "a `parallel` of its own before or behind this one"
    if tile.scope == "global":
        valid = (
            "another tensor, a program of its own before or behind this one, or an ordered signal and a wait for it "
        )
        valid += "between the two"
    return TileError(
        f"{node}: joins values with {tile} atomically, and `{other}` reads or stores it, in no order with that; valid "
        f"is {valid}"
    )


class _Flagged:
    """Walks a program in order; loops twice, as what an iteration does comes before all of the next, too."""

    def __init__(self, joined: frozenset[Tile], tiles: dict[tirx.Buffer, Tile]) -> None:
        self.joined, self.tiles, self.turn = joined, tiles, 0

    def body(self, nodes: tuple[Node, ...], state: _State) -> _State:
        for node in nodes:
            state = self.statement(node, self.touch(node, state))
        return state

    def statement(self, node: Node, state: _State) -> _State:
        if isinstance(node, Branch):
            return _either(self.body(node.then, state), self.body(node.otherwise, state))
        if isinstance(node, Loop):
            return self.body(node.body, self.touch(node, self.body(node.body, state)))
        step = 0 if isinstance(node, Signal) and node.ordered else 1 if isinstance(node, Wait) else None
        return {key: replace(each, told=each.told + (each.told == step)) for key, each in state.items()}

    def touch(self, node: Node, state: _State) -> _State:
        """Refuse a node that touches what another has in a different way, with no flags between; note that it does."""
        for tile, kinds in _kinds(node, self.tiles).items():
            for kind in kinds if tile in self.joined else ():
                for each in state.values():
                    if each.tile is tile and each.kind != kind and each.told < 2:
                        pair = (each.node, each.kind), (node, kind)
                        (join, how), (other, as_what) = reversed(pair) if each.kind == _TOUCH else pair
                        raise _unordered(join, tile, how, other, as_what)
                self.turn += 1
                state = {**state, (node, tile, kind): _Earlier(node, tile, kind, self.turn)}
        return state


def _either(one: _State, other: _State) -> _State:
    """What may have been behind two ways; flags that one of them passes count, as conditions on both may agree."""
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        pair = sorted((one[key], other[key]), key=lambda each: (each.turn, each.told))
        merged[key] = pair[-1]
    return merged
