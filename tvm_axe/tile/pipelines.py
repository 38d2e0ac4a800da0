"""What pipelined loops must keep, so that loads may run ahead: an iteration reads what itself has loaded."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import sym

from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Branch, Copy, Loop, Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.walking import leaves, walk


def check_pipelines(program: TileProgram) -> None:
    """Refuse pipelined loops with more stages than iterations, and those whose iterations race on a shared tile."""
    analyzer = program.analyzer()
    for node in program.nodes():
        if isinstance(node, Loop) and node.stages is not None:
            _stages(node)
            for tile in _loaded(node.body):
                _only_loads(node, tile)
                _Coverage(node, tile, analyzer).statements(node.body, [])
    _after(program.body, {})


def is_load(node: Node) -> bool:
    """Whether a node fills a shared tile from global memory, which can be done ahead of time."""
    return isinstance(node, Copy) and node.src.tile.scope == "global" and node.dst.tile.scope == "shared"


def _loaded(body: tuple[Node, ...]) -> tuple[Tile, ...]:
    return tuple(dict.fromkeys(node.writes[0] for node in walk(body) if is_load(node)))


def _stages(loop: Loop) -> None:
    if isinstance(loop.extent, int) and loop.stages is not None and loop.stages > max(loop.extent, 1):
        raise TileError(
            f"{loop}: a pipeline of {loop.stages} stages has {loop.extent} iterations; valid are 1 to "
            f"{max(loop.extent, 1)} stages"
        )


def _only_loads(loop: Loop, tile: Tile) -> None:
    for node in leaves(loop.body):
        if tile in node.writes and not is_load(node):
            raise TileError(
                f"{loop}: {tile} is loaded, and `{node}` writes it too: the load of a later iteration, which runs "
                "ahead, races with that; valid is a tile of its own for one of them, or an ordinary loop"
            )


@dataclass
class _Coverage:
    """Refuses reads of what the same iteration hasn't loaded before: its slot holds what another iteration left."""

    loop: Loop
    tile: Tile
    analyzer: sym.Analyzer

    def statements(self, body: tuple[Node, ...], loaded: list[Region]) -> list[Region]:
        """Walk in order; takes and returns the regions that are loaded for certain."""
        for node in body:
            if isinstance(node, Branch):
                then = self.statements(node.then, list(loaded))
                otherwise = self.statements(node.otherwise, list(loaded))
                loaded = [region for region in then if self.covered(region, otherwise)]
            elif isinstance(node, Loop):
                runs = isinstance(node.extent, int) and node.extent > 0
                inner = self.statements(node.body, list(loaded))
                loaded = inner if runs else loaded
            elif self.tile in node.reads:
                for region in _read(node, self.tile):
                    if not self.covered(region, loaded):
                        self.refuse(node, region)
            elif self.tile in node.writes and isinstance(node, Copy):
                loaded = self.joined(loaded, node.dst)
        return loaded

    def joined(self, loaded: list[Region], new: Region) -> list[Region]:
        """The regions with one more, made one with those that it continues along a dimension."""
        for region in loaded:
            for first, second in ((region, new), (new, region)):
                apart = [d for d in range(len(new.start)) if not self.aligned(first, second, d)]
                if len(apart) == 1 and self.follows(first, second, apart[0]):
                    extents = list(first.extents)
                    extents[apart[0]] += second.extents[apart[0]]
                    rest = [other for other in loaded if other is not region]
                    return self.joined(rest, Region(self.tile, first.start, tuple(extents)))
        return [*loaded, new]

    def aligned(self, a: Region, b: Region, d: int) -> bool:
        return a.extents[d] == b.extents[d] and self.analyzer.can_prove_equal(a.start[d], b.start[d])

    def follows(self, first: Region, second: Region, d: int) -> bool:
        return self.analyzer.can_prove_equal(first.start[d] + first.extents[d], second.start[d])

    def covered(self, region: Region, loaded: list[Region]) -> bool:
        return any(self.contains(outer, region) for outer in loaded)

    def contains(self, outer: Region, inner: Region) -> bool:
        return all(
            self.analyzer.can_prove(o <= i) and self.analyzer.can_prove(i + n <= o + m)
            for o, m, i, n in zip(outer.start, outer.extents, inner.start, inner.extents)
        )

    def refuse(self, node: Node, region: Region) -> None:
        raise TileError(
            f"{self.loop}: `{node}` reads {region}, which the same iteration has not loaded before; a slot holds what "
            f"an iteration {self.loop.stages or 'some'} stages before left there, so the stages race; valid is to load "
            "all that is read first, or an ordinary loop"
        )


def _read(node: Node, tile: Tile) -> list[Region]:
    """The regions of a tile that a node reads; all of it where elements are read."""
    found = [region for region in node.regions if region.tile is tile]
    return found or [Region(tile, (0,) * len(tile.shape), tile.shape)]


def _after(body: tuple[Node, ...], spent: dict[Tile, Loop]) -> dict[Tile, Loop]:
    """Refuse reads of what a pipelined loop loaded, behind the loop: its slots were given back."""
    for node in body:
        if isinstance(node, Branch):
            spent = {**_after(node.then, dict(spent)), **_after(node.otherwise, dict(spent))}
            continue
        if isinstance(node, Loop):
            for _ in range(2):  # an iteration reads what the one before may have left
                spent = _after(node.body, dict(spent))
            if node.stages is not None:
                spent |= dict.fromkeys(_loaded(node.body), node)
            continue
        for tile in node.reads:
            if tile in spent:
                raise TileError(
                    f"`{node}` reads {tile} behind {spent[tile]}, which loads it ahead and gives its slots back; "
                    "valid is to load it again, or to read it within the loop"
                )
        spent = {tile: loop for tile, loop in spent.items() if tile not in node.writes}
    return spent
