"""A scheduled function as the lowering sees it: stages, their blocks, and what each block touches on which device.

A *stage* is one nest below the function's root block. In it, a loop bound to a mesh axis (``axe.bind``) is either a
*device* loop, which drives data-parallel iterators and of which each device runs its own iteration, or a *peer* loop,
which drives a reduction and which each device runs whole, reading the peers.

On its device a data-parallel iterator ``v = coord * piece + local`` has only ``local`` left to run over; several axes
may share it, ``v = (coord_a * size_b + coord_b) * piece + local``. Every access is written in those terms here, once;
inference, derivation and localization all read the result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tvm import s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.annotations import BESIDE, INSERTED
from tvm_axe.analysis.blocks import unused_name
from tvm_axe.analysis.expressions import uses
from tvm_axe.analysis.patterns import is_product
from tvm_axe.collective.arena import PAGE
from tvm_axe.layout import Mesh
from tvm_axe.lower.pieces import Pieces


@dataclass(frozen=True, eq=False)
class Access:
    """One load or store of a block.

    `indices` are in terms of the device's coordinates and the block's local iterators. `pieces[dim]` has the mesh axes
    of which index `dim` stays in the device's own piece, if any. `shared` are the mesh axes whose devices share the
    block's iterations: of a store, each does a part of it, whether an index says so or not.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    pieces: Mapping[int, Pieces]
    shared: frozenset[str]
    is_write: bool


@dataclass(frozen=True, eq=False)
class LocalIterator:
    """What is left on a device of one block iterator: ``whole = coordinate * piece + local``."""

    whole: tirx.IterVar
    local: tirx.IterVar | None  # None where the device's coordinate alone is the iterator
    value: tirx.Expr  # what `local` is bound to, in loop variables
    replacement: tirx.Expr  # of `whole`, in the coordinates and `local`


@dataclass(frozen=True, eq=False)
class Block:
    """A block with its loops, and its accesses as its device sees them."""

    realize: s_tir.SBlockRealize
    loops: tuple[tirx.For, ...]
    device: Mapping[str, tirx.For]
    peers: Mapping[str, tirx.For]
    iterators: tuple[LocalIterator, ...]
    accesses: tuple[Access, ...]
    analyzer: Analyzer = field(repr=False)

    def operations(self, mesh: Mesh) -> tuple[float, float]:
        """Multiplications and additions, if it is a matmul: of a device on average, and of all once."""
        if not is_product(self.realize.block):
            return 0.0, 0.0
        whole = 2.0 * math.prod(int(iv.dom.extent) for iv in self.realize.block.iter_vars)
        return whole / math.prod(map(mesh.axis_size, self.device)), whole

    @property
    def name(self) -> str:
        return str(self.realize.block.name_hint)

    @property
    def reads(self) -> list[Access]:
        return [access for access in self.accesses if not access.is_write]

    @property
    def writes(self) -> list[Access]:
        return [access for access in self.accesses if access.is_write]

    def peer_dims(self, access: Access, axis: str) -> list[int]:
        """The dimensions that `access` indexes by a reduction iterator over the devices of `axis`."""
        loop = self.peers.get(axis)
        if loop is None:
            return []
        peers = [it.local.var for it in self.iterators if it.local is not None and uses(it.value, loop.loop_var)]
        return [dim for dim, index in enumerate(access.indices) if any(index.same_as(var) for var in peers)]


@dataclass(frozen=True)
class Overlap:
    """How a stage is cut into chunks: the region it is in, its loop over the chunks, and the one in ring order."""

    region: str
    chunk: tirx.For
    ring: tirx.For | None
    axis: str | None  # of the ring

    @property
    def chunks(self) -> int:
        return int(self.chunk.extent)


@dataclass(frozen=True, eq=False)
class ScheduledStage:
    """One nest: what a device does between two others.

    What overlapped and is `sequential` now may be a collective of the engine's even where its blocks were fused.
    """

    nest: tirx.Stmt
    blocks: tuple[Block, ...]
    overlap: Overlap | None
    sequential: bool = False

    @property
    def name(self) -> str:
        return "_".join(dict.fromkeys(block.name for block in self.blocks))

    def in_sequence(self, regions: Collection[str]) -> ScheduledStage:
        """The same, if it is in one of these regions without the stages that it overlaps."""
        overlaps = self.overlap is not None and self.overlap.region in regions
        return replace(self, overlap=None, sequential=True) if overlaps else self

    @property
    def beside(self) -> bool:
        """Whether it is to run beside what doesn't depend on it."""
        return any(BESIDE in block.realize.block.annotations for block in self.blocks)

    @property
    def inserted(self) -> str | None:
        """What the stage was inserted for."""
        found = [block.realize.block.annotations.get(INSERTED) for block in self.blocks]
        return str(found[0]) if found and found[0] is not None else None


@dataclass(frozen=True, eq=False)
class ScheduledProgram:
    """A scheduled function, taken apart."""

    name: str
    mesh: Mesh
    parameters: tuple[tirx.Buffer, ...]
    intermediates: tuple[tirx.Buffer, ...]
    stages: tuple[ScheduledStage, ...]
    coordinates: Mapping[str, tirx.Var]  # mesh axis -> the device's coordinate on it
    page: int = PAGE  # bytes; slabs lie whole pages apart

    def buffers(self) -> tuple[tirx.Buffer, ...]:
        return (*self.parameters, *self.intermediates)

    @cached_property
    def names(self) -> Mapping[tirx.Buffer, str]:
        """An identifier of its own for each buffer: rfactor calls its buffers ``C.rf``, and names may be shared."""
        names: dict[tirx.Buffer, str] = {}
        for buffer in self.buffers():
            names[buffer] = unused_name(str(buffer.name).replace(".", "_"), names.values())
        return names

    def blocks(self) -> list[Block]:
        return [block for stage in self.stages for block in stage.blocks]

    def in_sequence(self, regions: Collection[str]) -> ScheduledProgram:
        """The same, with the stages of these regions one behind the other instead of overlapping."""
        return replace(self, stages=tuple(stage.in_sequence(regions) for stage in self.stages))
