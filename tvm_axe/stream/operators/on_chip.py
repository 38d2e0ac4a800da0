"""Bufferize and Streamify: from streams to on-chip memory and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_axe.stream.codec import EMPTY, Token
from tvm_axe.stream.engine import AHEAD, Process, Unit
from tvm_axe.stream.memory import Stored, Tenant
from tvm_axe.stream.operators.base import Operator, bandwidth, byte_counter
from tvm_axe.stream.operators.higher import inner_dims
from tvm_axe.stream.types import Buffer, Dim, StreamType, Tile, as_dims
from tvm_axe.stream.views import View

if TYPE_CHECKING:
    from tvm_axe.stream.graph import Node


class Bufferize(Operator):
    """See `Stream.bufferize`."""

    kind = "Bufferize"

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        (type,) = inputs
        if not 1 <= self.rank <= type.rank:
            raise node.fail(f"rank={self.rank} must be between 1 and the stream's rank, {type.rank}: {type}")
        if not isinstance(type.data, Tile):
            raise node.fail(f"only tiles can be buffered, not {type.data}")
        return [StreamType(type.shape[: -self.rank] or (Dim(1),), Buffer(type.data, type.shape[-self.rank :]))]

    def stored(self, inputs: list[bool]) -> bool:
        return False

    def process(self, node: Node, unit: Unit) -> Process:
        (source,), (sink,) = unit.inputs, unit.outputs
        accelerator, rank, whole = unit.engine.accelerator, self.rank, self.rank == source.rank
        size = byte_counter(source.wire.type.data)
        tokens: list[Token] = []
        tenant: Tenant | None = None
        while True:
            value, stop = yield from unit.peek(source)
            if value is not EMPTY:
                taken = size(value)
                if tenant is None:
                    tenant = unit.engine.occupy(unit, taken)
                else:
                    unit.engine.grow(unit, tenant, taken)
                if accelerator is not None:
                    unit.work(-(-taken // accelerator.on_chip_bandwidth))
            unit.free(source)
            if value is not EMPTY or stop <= rank:
                tokens.append((value, min(stop, rank)))
            if stop < rank:
                continue
            after = 1 if whole else stop - rank
            if tokens:
                if tokens[-1][1] < rank:
                    tokens.append((EMPTY, rank))
                tenant = tenant or unit.engine.occupy(unit, 0)
                unit.use(tenant)
                unit.send(sink, Stored(tokens, rank, tenant), after)
                tokens, tenant = [], None
            else:
                unit.send(sink, EMPTY, after)
            if stop == source.rank:
                return


class Streamify(Operator):
    """See `Stream.streamify`."""

    kind = "Streamify"

    def __init__(self, view: View | None) -> None:
        self.view = view

    def types(self, node: Node, inputs: list[StreamType]) -> list[StreamType]:
        (type,) = inputs
        if not isinstance(type.data, Buffer):
            raise node.fail(f"it reads buffers, and gets {type}")
        if self.view is None:
            return [StreamType(tuple(inner_dims(node, type.shape, type.data.shape)), type.data.tile)]
        held = type.data.shape
        if not all(dim.static for dim in held):
            raise node.fail(f"a view needs a buffer of static shape, not {type.data}; without a view it is read whole")
        size = StreamType(held, type.data.tile).count
        if self.view.last >= size:
            raise node.fail(f"{self.view} goes up to position {self.view.last}, and {type.data} has {size} tiles")
        return [StreamType((*type.shape, *as_dims(self.view.shape)), type.data.tile)]

    def stored(self, inputs: list[bool]) -> bool:
        return True

    def process(self, node: Node, unit: Unit) -> Process:
        (source,), (sink,) = unit.inputs, unit.outputs
        accelerator, view = unit.engine.accelerator, self.view
        tile = node.outputs[0].type.data
        size, rate = byte_counter(tile), bandwidth(unit, tile) if accelerator is not None else 1
        order = None if view is None else list(zip(view.positions(), view.stops()))
        rank = sink.rank - source.rank
        while True:
            stored, stop = yield from unit.peek(source)
            if stored is EMPTY:
                unit.send(sink, EMPTY, stop + rank)
            else:
                tiles: list[Any] = [value for value, _ in stored.tokens if value is not EMPTY]
                tokens = stored.tokens if order is None else [(tiles[at], ends) for at, ends in order]
                for value, ends in tokens:
                    if accelerator is not None and value is not EMPTY:
                        unit.work(-(-size(value) // rate))
                        unit.use(stored.tenant)
                    after = ends + stop if ends == rank and value is not EMPTY else ends
                    unit.send(sink, value, after)
                if stop and tokens[-1][0] is EMPTY:
                    unit.send(sink, EMPTY, stop + rank)
                if len(unit.script) >= AHEAD:
                    yield None
            unit.free(source)
            if stop == source.rank:
                return
