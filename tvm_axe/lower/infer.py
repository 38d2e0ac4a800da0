"""Infer layouts: where each buffer of a scheduled function lives on the mesh.

A parameter lies as ``axe.layouts`` says. Failing that, an intermediate lies as it is written, unless what writes it is
a copy and a computation reads more of it than its device's piece: that copy gathers, and the intermediate is
replicated. An input lies as it is read: sharded where every read stays in the device's own piece or sums over the
devices, else replicated. An output is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from tvm import DataType, tirx

from tvm_axe.analysis.patterns import is_copy
from tvm_axe.analysis.sharing import root_of
from tvm_axe.errors import LayoutError, LowerError
from tvm_axe.layout import Iter, Layout, Mesh, memory_size
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.holding import Holding
from tvm_axe.layout.symbolic import Number
from tvm_axe.lower.program import Access, ScheduledProgram


@dataclass(frozen=True)
class Sharding:
    """How one buffer lies on the mesh: `axes[dim]` is the mesh axis that shares dimension `dim` in contiguous pieces.

    A dimension in `partial` counts the devices themselves: the buffer holds one term of a sum on each, and its slab
    has no such dimension.
    """

    shape: tuple[int, ...]
    axes: Mapping[int, str]
    partial: frozenset[int]
    mesh: Mesh
    memory: Layout | None = None
    """Of the slab, where it isn't row-major."""
    root: tuple[str, int] | None = None
    """The mesh axis and the coordinate on it of the one device that holds the buffer."""
    foreign: Holding | None = None
    """Of a parameter that is declared in another way than contiguous pieces; only exchanges touch it."""

    def piece(self, dim: int) -> int:
        """The extent of `dim` on one device, padded."""
        return -(-self.shape[dim] // self.mesh.axis_size(self.axes[dim])) if dim in self.axes else self.shape[dim]

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape of one device's share."""
        return tuple(self.piece(dim) for dim in range(len(self.shape)) if dim not in self.partial)

    def nbytes(self, dtype: str) -> int:
        """Bytes of one device's share."""
        return prod(self.stored) * DataType(dtype).itemsize

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of one device's share as it is stored: one-dimensional where `memory` says where elements lie."""
        if self.foreign is not None:
            return self.foreign.slab
        return self.slab if self.memory is None else (memory_size(self.memory),)

    @property
    def layout(self) -> Layout:
        """The same as a `Layout` of the whole (padded) shape, the slab row-major."""
        if self.foreign is not None:
            return self.foreign.layout
        layout = Layout.sharded(self.shape, self.mesh, dict(self.axes))
        if self.root is None:
            return layout
        axis, coordinate = self.root
        return Layout(layout.D, [it for it in layout.R if it.axis != axis], {axis: coordinate})

    @property
    def holding(self) -> Holding:
        """What each device holds, in digits."""
        if self.foreign is not None:
            return self.foreign
        layout = self.layout
        if self.memory is not None:
            memory, seps = self.memory.group([self.piece(dim) for dim in range(len(self.shape))])
            shard: list[Iter] = []
            for dim, (start, stop) in enumerate(pairwise(seps)):
                shard += [Iter(self.mesh[self.axes[dim]], 1, self.axes[dim])] if dim in self.axes else []
                shard += memory.D[start:stop]
            layout = Layout(shard, layout.R, dict(layout.O) | dict(memory.O))
        return Holding.of(layout, self.shape, self.mesh, sums=False)

    def holds(self, access: Access, dim: int) -> bool:
        """Whether index `dim` of `access` stays on the device."""
        return dim not in self.axes or access.blocked.get(dim) == (self.axes[dim], self.piece(dim))


def infer_shardings(program: ScheduledProgram, declared: Mapping[str, Layout]) -> dict[tirx.Buffer, Sharding]:
    """The sharding of every buffer of `program`, given the layouts of some parameters by name.

    Raises
    ------
    LayoutError
        If a declared layout doesn't fit its parameter's shape or the mesh.
    LowerError
        If a parameter's declared layout doesn't name a parameter.
    """
    names = {param.name for param in program.parameters}
    for name in declared:
        if name not in names:
            raise LowerError(f"axe.layouts names {name!r}; the parameters are {', '.join(sorted(names))}")
    accesses: dict[tirx.Buffer, list[Access]] = {buffer: [] for buffer in program.buffers()}
    partial: dict[tirx.Buffer, set[int]] = {buffer: set() for buffer in program.buffers()}
    counting: dict[tirx.Buffer, list[dict[int, str]]] = {buffer: [] for buffer in program.buffers()}
    roots: dict[tirx.Buffer, tuple[str, int]] = {}
    computed: set[tirx.Buffer] = set()  # what others than copies write
    computing: dict[tirx.Buffer, list[Access]] = {buffer: [] for buffer in program.buffers()}  # reads of others
    foreign = {param: held for param in program.parameters if (held := _foreign(param, declared, program.mesh))}
    for block in program.blocks():
        if any(access.buffer in foreign for access in block.accesses):
            continue  # an exchange says nothing of how the other side is to lie
        for access in block.accesses:
            accesses[access.buffer].append(access)
            if not is_copy(block.realize.block):
                computed.update([access.buffer] if access.is_write else [])
                computing[access.buffer].extend([] if access.is_write else [access])
        root = root_of(block.realize.block)
        for access in block.accesses:
            counted = {
                dim: axis
                for axis in block.peers
                for dim in ([] if access.is_write else block.peer_dims(access, axis))
                if int(access.buffer.shape[dim]) == program.mesh.axis_size(axis)
            }
            partial[access.buffer].update(counted)
            counting[access.buffer].append(counted)
            if access.is_write and root is not None and block.peers:
                roots[access.buffer] = (next(iter(block.peers)), root)
    found = {}
    for buffer in program.buffers():
        shape = tuple(int(extent) for extent in buffer.shape)
        is_parameter = any(buffer.same_as(param) for param in program.parameters)
        writes = [access for access in accesses[buffer] if access.is_write]
        memory = None
        if buffer in foreign:
            found[buffer] = Sharding(shape, {}, frozenset(), program.mesh, foreign=foreign[buffer])
            continue
        if is_parameter and buffer.name in declared:
            axes, memory = _declared(declared[buffer.name], shape, program.mesh)
        elif is_parameter and writes:
            axes = {}
        else:
            axes = _agreed(writes or accesses[buffer], shape, program.mesh)
            if not writes and counting[buffer]:
                terms = {d: a for d, a in counting[buffer][0].items() if all(d in other for other in counting[buffer])}
                axes = {d: a for d, a in axes.items() if a not in terms.values()} | terms
            if writes and buffer not in computed:
                written = Sharding(shape, axes, frozenset(), program.mesh)
                axes = {d: a for d, a in axes.items() if all(written.holds(read, d) for read in computing[buffer])}
        counted_dims = frozenset(dim for dim in partial[buffer] if dim in axes and not (is_parameter and writes))
        found[buffer] = Sharding(shape, axes, counted_dims, program.mesh, memory, roots.get(buffer))
    return found


def _foreign(param: tirx.Buffer, declared: Mapping[str, Layout], mesh: Mesh) -> Holding | None:
    """What each device holds of a parameter that isn't declared in contiguous pieces; None of any other."""
    if param.name not in declared:
        return None
    shape = tuple(int(extent) for extent in param.shape)
    try:
        _declared(declared[param.name], shape, mesh)
    except LayoutError:
        return Holding.of(declared[param.name], shape, mesh, sums=False)
    return None


def _declared(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[dict[int, str], Layout | None]:
    """The sharding that `layout` says, and where a slab's elements lie if not row-major."""
    rows: list[Iter] = []
    size: Number = 1
    for it in reversed(layout.D):
        on_memory = it.axis == LINEAR_MEMORY
        rows.append(Iter(it.extent, size, it.axis) if on_memory else it)
        size *= it.extent if on_memory else 1
    offset = layout.O[LINEAR_MEMORY]
    others = {axis: at for axis, at in layout.O.items() if axis != LINEAR_MEMORY}
    row_major = Layout(rows[::-1], layout.R, others)
    if row_major.equivalent(layout):
        return dict(layout.sharding(shape, mesh)), None
    memory = Layout([it for it in layout.D if it.axis == LINEAR_MEMORY], (), {LINEAR_MEMORY: offset})
    return dict(row_major.sharding(shape, mesh)), memory


def _agreed(accesses: list[Access], shape: tuple[int, ...], mesh: Mesh) -> dict[int, str]:
    """The dimensions that every access takes its own piece of, each with its mesh axis."""
    axes: dict[int, str] = {}
    for dim, extent in enumerate(shape):
        pieces = {access.blocked.get(dim) for access in accesses}
        piece = pieces.pop() if len(pieces) == 1 else None
        if piece is not None and piece[1] == -(-extent // mesh.axis_size(piece[0])) and piece[0] not in axes.values():
            axes[dim] = piece[0]
    return axes
