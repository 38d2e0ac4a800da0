"""The products of warpgroups as the uniform model's code is written: what they read, and which are under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.tile.nodes import Gemm, Let, Node
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory, Registers
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan
from tvm_axe.tile.targets.cuda.uniform.warpgroups import Warpgroups


class Products:
    """The products of a block's warpgroups, of a plan that may have none.

    Parameters
    ----------
    plan : UniformPlan
        The plan.
    storages : mapping from Tile
        The memory of shared tiles.

    Attributes
    ----------
    under_way : frozenset of Tile
        What products read and write that nobody has waited for.
    """

    def __init__(self, plan: UniformPlan, storages: Mapping[Tile, Registers | Memory]) -> None:
        self._memory = plan.memory
        self._stands = {gemm: stand for gemm, stand in plan.products.items() if isinstance(stand, Warpgroups)}
        self._group = T.warpgroup_id([plan.threads // wgmma.WARPGROUP]) if self._stands else 0
        self._tiles = {tile: self._matrices(tile, storages[tile]) for tile in plan.memory.operands}
        self._accumulators: dict[Tile, Any] = {}
        for gemm, stand in self._stands.items():
            if gemm.c.tile not in self._accumulators:
                self._accumulators[gemm.c.tile] = stand.registers(gemm)
        self.under_way: frozenset[Tile] = frozenset()

    def _matrices(self, tile: Tile, stored: Registers | Memory) -> Any:
        """A tile's memory by (slot, row, column), as upstream's primitive takes it."""
        slots, memory = self._memory.slots(tile), stored.buffer
        layout, shape = tma.shared_layout(tile, slots), (slots, *tma.matrix(tile))
        first, scope = memory.elem_offset, memory.scope()
        return T.decl_buffer(shape, tile.dtype, data=memory.data, elem_offset=first, scope=scope, layout=layout)

    def registers(self, tile: Tile, count: int) -> tirx.Buffer | None:
        """The registers of an accumulator, so many; None of another fragment."""
        return self._accumulators[tile].local(count) if tile in self._accumulators else None

    def has(self, node: Node) -> bool:
        """Whether a node is a product of warpgroups."""
        return node in self._stands

    def leading(self, body: Sequence[Node]) -> int:
        """How many nodes of a body are products of warpgroups, and names, with which it begins; the last a product."""
        count = 0
        for number, node in enumerate(body, 1):
            if self.has(node):
                count = number
            elif not isinstance(node, Let):
                break
        return count

    def start(self, gemm: Gemm, changed: Gemm, emitter: Emitter) -> None:
        """Start a product; `changed` is the same with the variables' values where code is written."""
        stand = self._stands[gemm]

        def operand(region: Region, dimension: int, at: Any, extent: int) -> Any:
            starts = [emitter.expression(start) for start in region.start]
            slot = emitter.memory(region.tile).offset // self._memory.slot_elements(region.tile)
            return wgmma.part_of(self._tiles[region.tile], slot, starts, region.extents, dimension, at, extent)

        accumulator, shares = self._accumulators[gemm.c.tile], (stand.down, stand.across)
        wgmma.issue(changed, accumulator, self._group, shares, operand, changed.accumulate)
        self.under_way |= {*gemm.reads, *gemm.writes}

    def publish(self) -> None:
        """Let warpgroups read what this thread has written, behind the barrier that is next."""
        if self._stands:
            T.evaluate(T.ptx.fence.proxy.async_.shared__cta())
