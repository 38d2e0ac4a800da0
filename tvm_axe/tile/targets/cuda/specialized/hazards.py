"""Where consumers of the specialized model need a barrier or a fence: what they have touched in memory since the last.

Products are asynchronous, and `specialized.schedule` waits for them. Threads are not in step with each other either,
nor with TMA, and there are three ways in which they meet:

- A statement touches a tile that another thread has written since the last barrier, or writes one that another has
  read: a barrier comes before it.
- It writes a tile that TMA sends, or stores to a place again (`specialized.overwriting`): the barrier between both
  drains, or settles.
- A slot is given back to TMA, which writes by another proxy, while what threads have read of it is on its way to them:
  a fence comes before that, unless a barrier has served as one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from tvm_axe.tile.nodes import Copy, Gemm, Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.specialized.buffers import CircularBuffer
from tvm_axe.tile.targets.cuda.specialized.overwriting import overwritten
from tvm_axe.tile.targets.cuda.specialized.steps import Do, Fence, Send, Step, Sync, walk
from tvm_axe.tile.walking import leaves


@dataclass(frozen=True)
class Touched:
    """What consumers may have touched, on any way that leads to a place.

    Attributes
    ----------
    tiles : frozenset of (Tile, bool)
        The tiles that they share and have touched since the last barrier, each with whether that was to write it.
    slots : frozenset of CircularBuffer
        The circular buffers whose slots threads have read since the last fence.
    """

    tiles: frozenset[tuple[Tile, bool]] = frozenset()
    slots: frozenset[CircularBuffer] = frozenset()

    def also(self, other: Touched) -> Touched:
        """What either of two ways has touched."""
        return Touched(self.tiles | other.tiles, self.slots | other.slots)


class Hazards:
    """The barriers and fences that statements need, each put behind the steps that come before its statement.

    Invariants, behind every statement:

    - No tile of `touched` is touched by another thread in a way that needs an order.
    - Between a `Send` and what next writes its tile is a `Sync` that drains, and between two of the `stores` to a
      tensor in which a place may be stored to again one that settles. So neither counts as touching for that.

    Parameters
    ----------
    program : TileProgram
        The program.
    own : collection of Node
        Its statements that consumers do.
    buffers : collection of CircularBuffer
        The circular buffers.
    sent : collection of Copy
        The copies of the consumers' shared tiles to global memory that TMA does.
    given : collection of Copy
        The copies that the storing warp stores, by itself in order.
    """

    def __init__(
        self,
        program: TileProgram,
        own: Collection[Node],
        buffers: Collection[CircularBuffer],
        sent: Collection[Copy],
        given: Collection[Copy],
    ) -> None:
        self.buffers, self.sent, self.touched = buffers, sent, Touched()
        buffered = {tile for buffer in buffers for tile in buffer.tiles}
        written = {tile for node in own for tile in node.writes}
        read = {tile for node in own for tile in node.reads}
        self.common = {tile for tile in written & read if tile.scope in ("shared", "global")} - buffered
        others = {*given, *(node for node in own if isinstance(node, Copy) and node.atomic)}
        self.stores = {tile: {node for node in own if tile in node.writes} - others for tile in overwritten(program)}

    def meets(self, *nodes: Node) -> bool:
        """Whether statements touch what consumers share."""
        return any(not self.common.isdisjoint((*node.reads, *node.writes)) for node in nodes)

    def before(self, node: Node, steps: list[Step]) -> None:
        """The barriers that a statement needs."""
        self._order(node, steps)
        self._synchronize(node, steps)

    def barrier(self, steps: list[Step], drains: bool = False, settles: bool = False) -> None:
        """A barrier, behind which nothing is touched that was before."""
        proxy = any(tile.scope == "shared" and written for tile, written in self.touched.tiles)
        steps.append(Sync(proxy, drains, settles))
        self.touched = Touched(slots=frozenset() if proxy or settles else self.touched.slots)

    def read(self, *nodes: Node) -> None:
        """Threads read what statements do, or those in them do that are no products."""
        read = {tile for leaf in leaves(nodes) if not isinstance(leaf, Gemm) for tile in leaf.reads}
        slots = {buffer for buffer in self.buffers if read.intersection(buffer.tiles)}
        self.touched = self.touched.also(Touched(slots=frozenset(slots)))

    def fence(self, buffer: CircularBuffer, steps: list[Step]) -> None:
        """The fence that giving back a slot needs, if threads may have read any of its buffer since the last."""
        if buffer in self.touched.slots:
            steps.append(Fence())
            self.touched = replace(self.touched, slots=frozenset())

    def _synchronize(self, node: Node, steps: list[Step]) -> None:
        """A barrier where a statement touches what another thread may have touched since the last."""
        reads, writes = self.common & set(node.reads), self.common & set(node.writes)
        clash = {(tile, True) for tile in reads | writes} | {(tile, False) for tile in writes}
        if clash & self.touched.tiles:
            self.barrier(steps)
        by_threads = set() if node in self.sent else reads
        tiles = {(tile, False) for tile in by_threads} | {(tile, True) for tile in writes}
        self.touched = self.touched.also(Touched(frozenset(tiles)))

    def _order(self, node: Node, steps: list[Step]) -> None:
        """Where a statement overwrites what TMA may still read, or what was stored, a barrier before waits for that."""
        sent: set[Node] = {copy for copy in self.sent if copy.src.tile in node.writes}
        stored = {other for stores in self.stores.values() if node in stores for other in stores}
        if sent:
            self._order_behind(sent, steps, drains=True)
        if stored:
            self._order_behind(stored, steps, settles=True)

    def _order_behind(self, nodes: set[Node], steps: list[Step], drains: bool = False, settles: bool = False) -> None:
        """Have the last barrier do more, if it stands behind all that came of some statements, or another one."""
        for at in range(len(steps) - 1, -1, -1):
            step = steps[at]
            if isinstance(step, Sync):
                steps[at] = Sync(step.proxy, step.drains or drains, step.settles or settles)
                return
            if any(isinstance(inner, Do | Send) and inner.node in nodes for inner in walk((step,))):
                break
        self.barrier(steps, drains, settles)
