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
    """How stages index a buffer that lies on the mesh as `holding` says.

    Their indices stay on a device where they stay in its piece of each dimension, which is contiguous. A holding in
    other pieces (`in_pieces` is False) can't be indexed so: only exchanges touch it.

    A dimension in `partial` counts the devices themselves: the buffer holds one term of a sum on each, and its slab
    has no such dimension.
    """

    holding: Holding
    cuts: Cuts
    """Of each dimension the mesh axes that share it, the major one first (`tvm_axe.layout.Placement.cuts`)."""
    partial: frozenset[int] = frozenset()
    root: tuple[str, int] | None = None
    """The mesh axis and the coordinate on it of the one device that holds the buffer."""
    in_pieces: bool = True

    @staticmethod
    def blocks(
        shape: tuple[int, ...],
        mesh: Mesh,
        cuts: Cuts,
        partial: frozenset[int] = frozenset(),
        memory: Layout | None = None,
        root: tuple[str, int] | None = None,
    ) -> Sharding:
        """That of pieces that are shared over `cuts`; see `Holding.in_blocks` for `memory` and `root`."""
        return Sharding(Holding.in_blocks(shape, mesh, cuts, memory, root=root), cuts, partial, root)

    @staticmethod
    def other(holding: Holding) -> Sharding:
        """That of a holding that isn't in contiguous pieces."""
        return Sharding(holding, ((),) * len(holding.shape), in_pieces=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole buffer."""
        return self.holding.shape

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.holding.mesh

    @property
    def memory(self) -> Layout | None:
        """Where the elements of a slab lie, where that isn't row-major."""
        return None if self.holding.is_row_major else self.holding.memory

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
    said = {
        param: _declared(declared[param.name], _shape(param), program.mesh)
        for param in program.parameters
        if param.name in declared
    }
    for block in program.blocks():
        touched = {access.buffer for access in block.accesses}
        inserted = INSERTED in block.realize.block.annotations
        parameters = [said[buffer] for buffer in touched if buffer in said]
        if any(not own.in_pieces or (inserted and own.memory is not None) for own in parameters):
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
        own = said.get(buffer)
        if own is not None and not own.in_pieces:
            found[buffer] = own
            continue
        if own is not None:
            cuts = own.cuts
        elif is_parameter and writes:
            cuts = ((),) * len(shape)
        else:
            cuts = agreed(writes or accesses[buffer], shape, program.mesh)
            if not writes and counting[buffer]:
                terms = {d: a for d, a in counting[buffer][0].items() if all(d in other for other in counting[buffer])}
                free = [() if set(cut) & set(terms.values()) else cut for cut in cuts]
                cuts = tuple((terms[dim],) if dim in terms else cut for dim, cut in enumerate(free))
            if writes and buffer not in computed:
                written = Sharding.blocks(shape, program.mesh, cuts)
                cuts = tuple(
                    cut if all(written.holds(read, dim) for read in computing[buffer]) else ()
                    for dim, cut in enumerate(cuts)
                )
        counted_dims = frozenset(dim for dim in partial[buffer] if cuts[dim] and not (is_parameter and writes))
        memory = None if own is None else own.memory
        found[buffer] = Sharding.blocks(shape, program.mesh, cuts, counted_dims, memory, roots.get(buffer))
    return found


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)


def _declared(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> Sharding:
    """The sharding that `layout` says."""
    rows: list[Iter] = []
    size: Number = 1
    for it in reversed(layout.D):
        on_memory = it.axis == LINEAR_MEMORY
        rows.append(Iter(it.extent, size, it.axis) if on_memory else it)
        size *= it.extent if on_memory else 1
    others = {axis: at for axis, at in layout.O.items() if axis != LINEAR_MEMORY}
    row_major = Layout(rows[::-1], layout.R, others)
    try:
        cuts = row_major.cuts(shape, mesh)
    except LayoutError:
        return Sharding.other(Holding.of(layout, shape, mesh, sums=False))
    memory = Layout([it for it in layout.D if it.axis == LINEAR_MEMORY], (), {LINEAR_MEMORY: layout.O[LINEAR_MEMORY]})
    return Sharding.blocks(shape, mesh, cuts, memory=None if row_major.equivalent(layout) else memory)


def agreed(accesses: list[Access], shape: tuple[int, ...], mesh: Mesh) -> Cuts:
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
