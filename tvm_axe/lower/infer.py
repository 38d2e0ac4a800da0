"""Infer layouts: where each buffer of a scheduled function lives on the mesh.

A parameter lies as ``axe.layouts`` says. Failing that, an intermediate lies as it is written, unless what writes it is
a copy and a computation reads more of it than its device's piece: that copy gathers, and the intermediate is
replicated. An input lies as it is read: sharded where every read stays in the device's own piece or sums over the
devices, else replicated. An output is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tvm import DataType, tirx

from tvm_axe.analysis.annotations import INSERTED
from tvm_axe.analysis.patterns import is_copy
from tvm_axe.analysis.sharing import root_of
from tvm_axe.errors import LayoutError, LowerError
from tvm_axe.layout import Iter, Layout, Mesh
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.holding import Holding
from tvm_axe.layout.sharding import Cuts
from tvm_axe.layout.symbolic import Number
from tvm_axe.lower.pieces import Pieces, pieces_of, shared_pieces
from tvm_axe.lower.program import Access, ScheduledProgram


@dataclass(frozen=True)
class Sharding:
    """How one buffer lies on the mesh: a placement of its shape, in blocks of `piece` elements a dimension.

    A dimension in `partial` counts the devices themselves: the buffer holds one term of a sum on each, and its slab
    has no such dimension.
    """

    shape: tuple[int, ...]
    cuts: Cuts
    """Of each dimension the mesh axes that share it, the major one first (`tvm_axe.layout.Placement.cuts`)."""
    partial: frozenset[int]
    mesh: Mesh
    memory: Layout | None = None
    """Of the slab, where it isn't row-major."""
    root: tuple[str, int] | None = None
    """The mesh axis and the coordinate on it of the one device that holds the buffer."""
    foreign: Holding | None = None
    """Of a parameter that is declared in another way than contiguous pieces; only exchanges touch it."""

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that share a dimension, in the order of the dimensions."""
        return tuple(axis for cut in self.cuts for axis in cut)

    def piece(self, dim: int) -> int:
        """The extent of `dim` on one device, padded."""
        return self.holding.local[dim]

    def pieces(self, dim: int) -> Pieces:
        """The axes that share `dim`, each with the elements from one of its devices' to the next one's."""
        return pieces_of(self.shape[dim], self.cuts[dim], self.mesh)

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape of one device's share."""
        return tuple(extent for dim, extent in enumerate(self.holding.local) if dim not in self.partial)

    def nbytes(self, dtype: str) -> int:
        """Bytes of one device's share."""
        return prod(self.stored) * DataType(dtype).itemsize

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape of one device's share as it is stored: one-dimensional where that isn't row-major."""
        return self.slab if self.holding.is_row_major else self.holding.slab

    @property
    def layout(self) -> Layout:
        """The same as a `Layout` of the whole (padded) shape."""
        return self.holding.layout

    @cached_property
    def holding(self) -> Holding:
        """What each device holds, in digits."""
        if self.foreign is not None:
            return self.foreign
        return Holding.in_blocks(self.shape, self.mesh, self.cuts, self.memory, root=self.root)

    def held(self, access: Access, dim: int) -> int:
        """How many of the axes that share `dim`, from the major one on, index `dim` of `access` stays in its part of.

        Where that is all of them, the index stays on the device.
        """
        return shared_pieces(access.pieces.get(dim, ()), self.pieces(dim))

    def holds(self, access: Access, dim: int) -> bool:
        """Whether index `dim` of `access` stays on the device."""
        return self.held(access, dim) == len(self.cuts[dim])


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
    laid_out = {
        param
        for param in program.parameters
        if param.name in declared
        and param not in foreign
        and _declared(declared[param.name], _shape(param), program.mesh)[1]
    }
    for block in program.blocks():
        touched = {access.buffer for access in block.accesses}
        inserted = INSERTED in block.realize.block.annotations
        if any(buffer in foreign or (inserted and buffer in laid_out) for buffer in touched):
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
        shape = _shape(buffer)
        is_parameter = any(buffer.same_as(param) for param in program.parameters)
        writes = [access for access in accesses[buffer] if access.is_write]
        memory = None
        if buffer in foreign:
            found[buffer] = Sharding(shape, ((),) * len(shape), frozenset(), program.mesh, foreign=foreign[buffer])
            continue
        if is_parameter and buffer.name in declared:
            cuts, memory = _declared(declared[buffer.name], shape, program.mesh)
        elif is_parameter and writes:
            cuts = ((),) * len(shape)
        else:
            cuts = _agreed(writes or accesses[buffer], shape, program.mesh)
            if not writes and counting[buffer]:
                terms = {d: a for d, a in counting[buffer][0].items() if all(d in other for other in counting[buffer])}
                free = [() if set(cut) & set(terms.values()) else cut for cut in cuts]
                cuts = tuple((terms[dim],) if dim in terms else cut for dim, cut in enumerate(free))
            if writes and buffer not in computed:
                written = Sharding(shape, cuts, frozenset(), program.mesh)
                cuts = tuple(
                    cut if all(written.holds(read, dim) for read in computing[buffer]) else ()
                    for dim, cut in enumerate(cuts)
                )
        counted_dims = frozenset(dim for dim in partial[buffer] if cuts[dim] and not (is_parameter and writes))
        found[buffer] = Sharding(shape, cuts, counted_dims, program.mesh, memory, roots.get(buffer))
    return found


def _foreign(param: tirx.Buffer, declared: Mapping[str, Layout], mesh: Mesh) -> Holding | None:
    """What each device holds of a parameter that isn't declared in contiguous pieces; None of any other."""
    if param.name not in declared:
        return None
    try:
        _declared(declared[param.name], _shape(param), mesh)
    except LayoutError:
        return Holding.of(declared[param.name], _shape(param), mesh, sums=False)
    return None


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)


def _declared(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Cuts, Layout | None]:
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
        return layout.cuts(shape, mesh), None
    memory = Layout([it for it in layout.D if it.axis == LINEAR_MEMORY], (), {LINEAR_MEMORY: offset})
    return row_major.cuts(shape, mesh), memory


def _agreed(accesses: list[Access], shape: tuple[int, ...], mesh: Mesh) -> Cuts:
    """The axes over which every access takes its own piece of each dimension."""
    cuts: list[tuple[str, ...]] = []
    for dim, extent in enumerate(shape):
        pieces = {access.pieces.get(dim, ()) for access in accesses}
        cut = _cut(pieces.pop(), extent, mesh) if len(pieces) == 1 else ()
        used = {axis for other in cuts for axis in other}
        cuts.append(cut if used.isdisjoint(cut) else ())
    return tuple(cuts)


def _cut(pieces: Pieces, extent: int, mesh: Mesh) -> tuple[str, ...]:
    """The axes, from the major one on, whose devices' `pieces` are their blocks of a dimension."""
    for count in range(len(pieces), 0, -1):
        cut = tuple(axis for axis, _ in pieces[:count])
        if pieces_of(extent, cut, mesh) == pieces[:count]:
            return cut
    return ()
