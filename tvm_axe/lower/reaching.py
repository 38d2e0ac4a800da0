"""Which accesses of a block reach other devices, over which mesh axis; those that may not are refused with a remedy.

An access *leaves* its device's piece of a sharded buffer, where it reads or writes what a peer owns; or its store is to
be *repeated*, where devices each write a slice of what all of them hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvm import tirx

from tvm_axe.analysis.annotations import INSERTED
from tvm_axe.analysis.expressions import uses
from tvm_axe.analysis.patterns import is_copy
from tvm_axe.errors import LowerError
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.program import Access, Block

GATHER, HOLD, APART, RELAY, WIDEN = "gather", "hold", "compute apart", "relay", "widen"


class Unowned(LowerError):
    """A block that touches, outside a collective, what its device doesn't own.

    Attributes
    ----------
    block : SBlock
        The block, as it stands in the function.
    buffer : Buffer
        What it touches.
    access : Access
        How it touches that.
    remedy : str
        What would have it touch its own: to gather the buffer first; to hold a copy of it; or to compute apart, into a
        buffer that its iterators index; to relay a parameter that isn't in contiguous pieces, by a copy that is; to
        widen terms to the type of their sum, ahead of it (`tvm_axe.lower.inserting`).
    """

    def __init__(self, message: str, block: Block, access: Access, remedy: str) -> None:
        super().__init__(message)
        self.block, self.buffer, self.access, self.remedy = block.realize.block, access.buffer, access, remedy


class Entangled(LowerError):
    """Blocks of one nest that can't be one kernel.

    Attributes
    ----------
    block : SBlock
        One of them, as it stands in the function.
    """

    def __init__(self, message: str, block: Block) -> None:
        super().__init__(message)
        self.block = block.realize.block


def remote_axes(access: Access, sharding: Sharding) -> list[str]:
    """The mesh axes over which `access` leaves its device's own piece of a sharded dimension."""
    axes = [axis for dim, cut in enumerate(sharding.cuts) for axis in cut[sharding.held(access, dim) :]]
    return axes + ([sharding.root[0]] if sharding.root is not None and not access.is_write else [])


def remote_axis(access: Access, sharding: Sharding) -> str | None:
    """The one of `remote_axes`, or None: `derive_steps` refuses an access with several."""
    return next(iter(remote_axes(access, sharding)), None)


def push_axes(access: Access, sharding: Sharding) -> list[str]:
    """The mesh axes over whose devices a store must be repeated: each stores a slice of what all of them hold."""
    return sorted(access.shared.difference(sharding.axes)) if access.is_write else []


def push_axis(access: Access, sharding: Sharding) -> str | None:
    """The one of `push_axes`, or None: `derive_steps` refuses an access with several."""
    return next(iter(push_axes(access, sharding)), None)


def crossings(block: Block, shardings: Mapping[tirx.Buffer, Sharding]) -> Iterator[tuple[Access, str]]:
    """The accesses of `block` that reach other devices, with the mesh axis; an error where none is allowed."""
    statement = block.realize.block
    for access in block.accesses:
        sharding = shardings[access.buffer]
        left, repeated = remote_axes(access, sharding), push_axes(access, sharding)
        if len(left) > 1:
            raise Unowned(
                f"block {block.name!r}: an access to {access.buffer.name!r} leaves its device's piece of {len(left)} "
                f"dimensions ({', '.join(left)}); gather one dimension at a time",
                block,
                access,
                HOLD if access.is_write else GATHER,
            )
        if len(repeated) > 1:
            raise Unowned(
                f"block {block.name!r}: a store to {access.buffer.name!r} is of its device's piece of {len(repeated)} "
                f"dimensions ({', '.join(repeated)}) of what all devices hold; declare it shared (axe.with_layouts), "
                "or compute into a buffer of its own and copy that, one dimension at a time",
                block,
                access,
                APART,
            )
        remote, push = remote_axis(access, sharding), push_axis(access, sharding)
        if remote is None and push is None:
            continue
        if sharding.memory is not None:
            raise Unowned(
                f"block {block.name!r} exchanges {access.buffer.name!r} with other devices, and axe.layouts says where "
                f"its elements lie in memory ({sharding.memory}); exchange row-major slabs, and lay out a copy",
                block,
                access,
                RELAY,
            )
        if access.is_write and remote is not None:
            raise Unowned(
                f"block {block.name!r} writes more of {access.buffer.name!r} than its device holds "
                f"({sharding.layout}); shard its loops over {remote!r} too, or declare the buffer replicated",
                block,
                access,
                HOLD,
            )
        if push is not None and push not in (axis for pieces in access.pieces.values() for axis, _ in pieces):
            raise Unowned(
                f"block {block.name!r} is shared over {push!r}, and where it stores into {access.buffer.name!r} "
                f"({', '.join(map(str, statement.body.indices))}) is not seen to be a contiguous piece of a dimension "
                "for each device, which every device holds whole; shard another loop, or compute into a buffer that is "
                "indexed by the block's iterators and copy that (sch.reindex)",
                block,
                access,
                APART,
            )
        if push is not None and not is_copy(statement):
            raise Unowned(
                f"block {block.name!r} computes a slice over {push!r} of {access.buffer.name!r}, which every device "
                "holds whole; put a gather behind it (sch.cache_write, as reorder_collective does) or declare it so",
                block,
                access,
                APART,
            )
        reads_peers = sharding.root is None and (
            bool(block.peer_dims(access, remote or "")) or _peer_index(block, access, sharding) is not None
        )
        halo = INSERTED in statement.annotations and remote in access.shared
        if remote is not None and not (is_copy(statement) or reads_peers or halo):
            raise Unowned(
                f"block {block.name!r} reads {access.buffer.name!r} across {remote!r}, where each device owns a share "
                f"({sharding.layout}), outside a collective; gather it first, or shard the block's loops alike",
                block,
                access,
                GATHER,
            )
        axis = remote or push
        assert axis is not None
        yield access, axis


def _peer_index(block: Block, access: Access, sharding: Sharding) -> tirx.Expr | None:
    """The coordinate of the one peer that `access` reads, in terms of the device's own; None if there are several."""
    for dim, cut in enumerate(sharding.cuts):
        if len(cut) == 1 and not sharding.holds(access, dim) and sharding.piece(dim) == 1:
            index = access.indices[dim]
            local = [iterator.local.var for iterator in block.iterators if iterator.local is not None]
            if not any(uses(index, var) for var in local):
                return index
    return None
