"""Traffic of a stage: the bytes that each device receives of the others.

What counts is what `tvm_axe.layout.traffic` says, and who counts is asked there: a collective's is that of the engine's
own moves (`tvm_axe.collective.plan.received`), an exchange's that of its layouts (`tvm_axe.layout.holding.received`).
A kernel that indexes its peers' slabs is counted here, iteration by iteration: a device receives what its blocks read
in the others' slabs, as often as they read it, and what the others store into its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from tvm import tirx

from tvm_axe.analysis.blocks import covers
from tvm_axe.analysis.counting import count
from tvm_axe.analysis.expressions import substitute
from tvm_axe.collective import plan
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.sharding import block_region
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.program import Access, Block, ScheduledProgram

__all__ = ["received_in_collective", "received_in_kernel"]


def received_in_collective(
    kind: Collective, source: Sharding, target: Sharding, arguments: Sequence[int], axis: str, dtype: str
) -> tuple[int, ...]:
    """Return the bytes that each device receives in a collective over `axis`, given what the engine is told beside."""
    mesh = source.mesh
    found = [0] * mesh.size
    for device in range(mesh.size):
        group = mesh.group(device, axis)
        if group[0] == device:
            slabs = _unpadded(source, group), _unpadded(target, group)
            elements = plan.received(kind.operation, *slabs, arguments, len(group))
            for member, each in zip(group, elements, strict=True):
                found[member] = dtype_bytes(dtype, each)
    return tuple(found)


def _unpadded(sharding: Sharding, group: Iterable[int]) -> tuple[int, ...]:
    """The shape of a slab of a group of devices, less what is padding on all of them."""
    regions = [_region(sharding, device) for device in group]
    dims = [dim for dim in range(len(sharding.shape)) if dim not in sharding.partial]
    return tuple(max(region[dim].stop - region[dim].start for region in regions) for dim in dims)


def _region(sharding: Sharding, device: int) -> tuple[slice, ...]:
    """What a device holds of each dimension, padding left out."""
    return block_region(sharding.shape, sharding.mesh, sharding.cuts, device)


def received_in_kernel(
    program: ScheduledProgram,
    crossings: Iterable[tuple[Block, Access, str]],
    shardings: Mapping[tirx.Buffer, Sharding],
) -> tuple[int, ...]:
    """Return the bytes that each device receives in a kernel, given its accesses that reach peers and over what axis.

    Where there are too many index values to look at all, or they are loaded, those of a buffer that is shared over n
    devices are taken to be with each of them alike.
    """
    found = [0] * program.mesh.size
    of_block: dict[Block, list[_Run]] = {}
    for block, access, axis in crossings:
        if block not in of_block:
            of_block[block] = [_Run(program, block, device) for device in range(program.mesh.size)]
        runs = of_block[block]
        if access.is_write:
            done = [run.count() for run in runs]
            elements = [sum(done[peer] for peer in program.mesh.group(at, axis)) - done[at] for at in range(len(done))]
        else:
            elements = [run.pulled(access, shardings[access.buffer]) for run in runs]
        found = [so_far + dtype_bytes(str(access.buffer.dtype), more) for so_far, more in zip(found, elements)]
    return tuple(found)


class _Run:
    """The iterations of a block that one device runs.

    Where the loops run through all that the block's iterators have on the device, they are points of these; else of the
    loops, as those of a block under a mask.
    """

    def __init__(self, program: ScheduledProgram, block: Block, device: int) -> None:
        self.device, coords = device, program.mesh.coords(device)
        self.coordinates = {var: tirx.IntImm("int32", coords[axis]) for axis, var in program.coordinates.items()}
        self.extents: dict[tirx.Var, int] = {}
        self.conditions: list[tirx.Expr] = []
        self.in_loops: dict[tirx.Var, tirx.Expr] = {}  # of the block's iterators, where the points are of the loops
        if covers(block.realize, block.loops):
            for iterator in block.iterators:
                if iterator.local is not None:
                    self.extents[iterator.local.var] = int(iterator.local.dom.extent)
                if iterator.local is None or not iterator.replacement.same_as(iterator.local.var):
                    self.conditions.append(self._here(iterator.replacement < iterator.whole.dom.extent))
            return
        at: dict[tirx.Var, tirx.Expr] = {}
        for axis, loop in block.device.items():
            at[loop.loop_var] = tirx.IntImm("int32", coords[axis])
        for loop in block.loops:
            if loop.loop_var not in at:
                self.extents[loop.loop_var] = int(loop.extent)
                at[loop.loop_var] = loop.loop_var + loop.min
        self.conditions.append(substitute(block.realize.predicate, at))
        for iterator in block.iterators:
            if iterator.local is not None:
                self.in_loops[iterator.local.var] = substitute(iterator.value, at)

    def _here(self, expr: tirx.Expr) -> tirx.Expr:
        """An expression in the coordinates and the block's iterators, on the device."""
        return substitute(substitute(expr, self.coordinates), self.in_loops)

    def count(self) -> int:
        """How many there are; where that can't be seen, how many there are without a mask."""
        found = count(self.conditions, self.extents)
        return prod(self.extents.values()) if found is None else found

    def pulled(self, access: Access, sharding: Sharding) -> int:
        """How many read, by `access`, an element that another device has."""
        dims = [dim for dim in range(len(sharding.cuts)) if not sharding.holds(access, dim)]
        region, inside, there = _region(sharding, self.device), list[tirx.Expr](), list[tirx.Expr]()
        for dim in dims:
            index = self._here(access.indices[dim])
            inside += [index >= region[dim].start, index < region[dim].stop]
            there += [index >= 0, index < sharding.shape[dim]]  # what is beyond is read on a condition that never holds
        own, whole = (count([*self.conditions, *which], self.extents) for which in (inside, there))
        if own is not None and whole is not None:
            return whole - own
        size = prod(sharding.mesh.axis_size(axis) for dim in dims for axis in sharding.cuts[dim])
        return -(-self.count() * (size - 1) // size)
