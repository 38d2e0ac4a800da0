"""cache_write as the package's primitives use it: of a block whose stores are all that the copy behind it takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import s_tir
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.analysis.blocks import NestedBlock
from tvm_axe.analysis.directions import reached
from tvm_axe.analysis.elements import Elements
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule import query


def cached(sch: s_tir.Schedule, block: SBlockRV, primitive: str, readers: Sequence[SBlockRV] = ()) -> SBlockRV:
    """Have `block` write a buffer of its own, and return the block that copies it to where it wrote before.

    Upstream's copy takes the smallest box that holds what the block stores to. What else is in that box (between the
    elements of a stride, or all of what a loaded index may reach) it overwrites with what nobody wrote.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    block : SBlockRV
        The block.
    primitive : str
        Who asks, for messages.
    readers : Sequence[SBlockRV]
        Those that are to read the new buffer.

    Raises
    ------
    ScheduleError
        If upstream refuses; or the copy would take elements that the block doesn't store to and that are a caller's,
        or another block's.
    """
    name, stmt = query.name_of(sch, block), sch.get(block)
    buffer, nests = stmt.body.buffer, query.tree(sch).blocks
    writers = [nest for nest in nests if any(write.source.same_as(buffer) for write in nest.block.writes)]
    before = None
    if (query.is_parameter(sch, buffer) or len(writers) > 1) and not _stores_all(stmt):
        before = _stored(writers, stmt)
        if before is None:
            raise _refused(primitive, name, str(buffer.name))
    copy = query.checked(primitive, name, lambda: sch.cache_write(block, 0, "global", list(readers)))
    if before is not None:
        behind = _stored(query.tree(sch).blocks, sch.get(copy))
        if behind is None or not _within(behind, before):
            raise _refused(primitive, name, str(buffer.name))
    return copy


def _refused(primitive: str, name: str, buffer: str) -> ScheduleError:
    return ScheduleError(
        f"{primitive}: block {name!r} stores to a part of {buffer!r}, and the copy that upstream's cache_write puts "
        "behind it would take more than that part, and overwrite it with what nobody wrote; valid is a block that "
        "stores to a contiguous piece of each dimension: have it compute a buffer of its own, and copy that"
    )


def _stores_all(block: s_tir.SBlock) -> bool:
    """Return whether the block's iterators, each running through a dimension, are its indices."""
    extents = {iv.var: int(iv.dom.extent) for iv in block.iter_vars}
    return all(extents.get(index) == int(n) for index, n in zip(block.body.indices, block.body.buffer.shape))


def _stored(nests: Sequence[NestedBlock], block: s_tir.SBlock) -> Elements | None:
    """Return what a block stores to, as far as that can be seen."""
    nest = next((nest for nest in nests if nest.block.same_as(block)), None)
    shape = [int(extent) for extent in block.body.buffer.shape]
    return None if nest is None else reached(nest, block.writes[0], shape)


def _within(inner: Elements, outer: Elements) -> bool:
    if set(inner.masks) == set(outer.masks):
        return all(bool((outer.masks[dims] | ~mask).all()) for dims, mask in inner.masks.items())
    return bool(np.all(outer.whole() | ~inner.whole()))
