"""What ``main`` of a lowered function calls, in order, and whose elements each call touches on which device.

`tvm_axe.lower.emit` decides the calls and prints them as ``main``; who wants to know what runs reads them here. A
collective touches what the engine plans for it, a kernel what its blocks say, with the device's coordinates and the
chunk's numbers put in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.expressions import substitute
from tvm_axe.collective import ALL
from tvm_axe.collective.plan import plan
from tvm_axe.collective.side import BESIDE, rectangle
from tvm_axe.layout import Mesh
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.lower.localize import OWN
from tvm_axe.lower.window import Window


@dataclass(frozen=True)
class Box:
    """Elements of a dense tensor of `shape`: those from `start` to before `stop` in each dimension."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def meets(self, other: Box) -> bool:
        """Whether the two have elements in common; if they see the memory as two shapes, whether their ranges do."""
        if self.shape == other.shape:
            pairs = zip(self.start, self.stop, other.start, other.stop)
            return all(max(start, begin) < min(stop, end) for start, stop, begin, end in pairs)
        (start, stop), (begin, end) = self._range(), other._range()
        return max(start, begin) < min(stop, end)

    def _range(self) -> tuple[int, int]:
        steps = dense_strides(self.shape)
        last = sum((at - 1) * step for at, step in zip(self.stop, steps))
        return sum(at * step for at, step in zip(self.start, steps)), last + 1


@dataclass(frozen=True)
class Touch:
    """A box of the slab of mesh buffer `buffer` on `device` that a call, on that device or a peer, reads or writes."""

    buffer: str
    device: int
    box: Box
    is_write: bool


@dataclass(frozen=True)
class Tensor:
    """An argument that is a tensor: the device's own slab of a buffer, or a view of the slabs of several devices.

    Attributes
    ----------
    buffer : str
        A mesh buffer, which the caller of ``main`` allocates; or one that each device has for itself.
    view : str
        ``"slab"``, the mesh axis, or ``"*"`` for all devices.
    shape : tuple[int, ...]
        Of the argument: that of the slab as it is stored, behind the size of the axis where it is a view.
    """

    buffer: str
    view: str
    shape: tuple[int, ...]

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape of one device's slab."""
        return self.shape if self.view == OWN else self.shape[1:]


Argument = Tensor | str | int
"""A tensor; a mesh axis, for a kernel the device's coordinate on it; a number."""


@dataclass(frozen=True)
class Call:
    """One call of a function of the module, or of one that workers have, such as ``axe.barrier``.

    Attributes
    ----------
    function : str
        Its name.
    stage : int or None
        The stage that the call does, or does a chunk of; None if it waits or says that others needn't.
    arguments : tuple of Argument
        In order.
    step, chunk : int or None
        Which chunk, where the kernel is told: the step around the ring, the number in the slice.
    kernel : str or None
        The function of the module whose blocks run; None of what workers have. It is another one than `function` if
        that calls it on windows of the tensors.
    windows : tuple of (Window or None)
        Of each argument of such a kernel, the rows that it sees; None for all.
    ring : str or None
        The mesh axis around which its slices go.
    touched : tuple of (int, bool)
        Of a kernel that isn't of blocks, the numbers of the tensors that it touches, and whether it writes them.
    """

    function: str
    stage: int | None
    arguments: tuple[Argument, ...]
    step: int | None = None
    chunk: int | None = None
    kernel: str | None = None
    windows: tuple[Window | None, ...] = ()
    ring: str | None = None
    touched: tuple[tuple[int, bool], ...] = ()


class Touches:
    """What calls touch of mesh buffers.

    Parameters
    ----------
    mesh : Mesh
        The devices.
    module : IRModule
        The functions that the calls are of.
    buffers : collection of str
        The names of the mesh buffers.
    """

    def __init__(self, mesh: Mesh, module: tvm.IRModule, buffers: Collection[str]) -> None:
        self._mesh, self._module, self._buffers = mesh, module, frozenset(buffers)
        self._kernels: dict[str, _Kernel] = {}

    def of(self, call: Call, device: int) -> frozenset[Touch]:
        """What a call on `device` reads and writes of the slabs of mesh buffers, its own and its peers'."""
        if call.kernel is not None:
            return frozenset(self._whole(call, device) if call.touched else self._kernel_touches(call, device))
        if call.function == "axe.copy":
            return frozenset(self._copied(call, device))
        if call.stage is None or call.function == "axe.join":
            return frozenset()
        return frozenset(self._collective_touches(call, device))

    def _whole(self, call: Call, device: int) -> list[Touch]:
        """The whole slabs that a kernel touches of which only that is known."""
        found = []
        for number, is_write in call.touched:
            tensor = call.arguments[number]
            assert isinstance(tensor, Tensor)  # as emitted
            if tensor.buffer in self._buffers:
                for peer in self._devices(tensor, device):
                    found.append(Touch(tensor.buffer, peer, _all(tensor.slab), is_write))
        return found

    def _copied(self, call: Call, device: int) -> list[Touch]:
        """The rectangle that a copy of the side stream moves (`tvm_axe.collective.side`)."""
        source, target, *numbers, axis = call.arguments
        assert isinstance(source, Tensor) and isinstance(target, Tensor) and isinstance(axis, str)  # as emitted
        rank, devices = self._mesh.coords(device)[axis], self._mesh[axis]
        moved = rectangle(source.slab, target.slab, devices, rank, *(n for n in numbers if isinstance(n, int)))
        peer = self._mesh.group(device, axis)[moved.peer]
        found = []
        for tensor, at, row, is_write in ((source, device, moved.source, False), (target, peer, moved.target, True)):
            *lines, columns = tensor.slab
            start, stop = (row, moved.first), (row + moved.rows, moved.stop)
            if tensor.buffer in self._buffers:
                found.append(Touch(tensor.buffer, at, Box((math.prod(lines), columns), start, stop), is_write))
        return found

    def _devices(self, tensor: Tensor, device: int) -> Sequence[int]:
        """The devices whose slabs `tensor` has, by its dimension 0 if it is a view."""
        if tensor.view == ALL:
            return range(self._mesh.size)
        return [device] if tensor.view == OWN else self._mesh.group(device, tensor.view)

    def _collective_touches(self, call: Call, device: int) -> list[Touch]:
        source, target, *others, axis = call.arguments
        assert isinstance(source, Tensor) and isinstance(target, Tensor) and isinstance(axis, str)  # as emitted
        name = call.function.removeprefix("axe.").removesuffix(BESIDE)
        numbers = [number for number in others if isinstance(number, int)]
        found = []
        for move in plan(name, source.slab, target.slab, numbers, self._mesh[axis], self._mesh.coords(device)[axis]):
            for tensor, corner, is_write in ((source, move.source, False), (target, move.target, True)):
                if tensor.buffer not in self._buffers:
                    continue
                stop = tuple(at + extent for at, extent in zip(corner.at, move.box))
                box = Box(corner.shape, corner.at, stop)
                devices = self._devices(tensor, device)
                found += [Touch(tensor.buffer, devices[slab], box, is_write) for slab in corner.slabs]
        return found

    def _kernel_touches(self, call: Call, device: int) -> list[Touch]:
        assert call.kernel is not None
        if call.kernel not in self._kernels:
            self._kernels[call.kernel] = _Kernel(self._module[call.kernel])
        kernel, coords = self._kernels[call.kernel], self._mesh.coords(device)
        numbers = {
            param: tirx.IntImm("int32", coords[value] if isinstance(value, str) else value)
            for param, value in zip(kernel.params, call.arguments)
            if isinstance(value, str | int)
        }
        found = []
        for access in kernel.accesses:
            tensor = call.arguments[access.argument]
            if not isinstance(tensor, Tensor) or tensor.buffer not in self._buffers:
                continue
            box = self._window(call, access.argument, coords) if call.windows else access.box(tensor.shape, numbers)
            if tensor.view == OWN:
                found.append(Touch(tensor.buffer, device, box, access.is_write))
                continue
            inner = Box(box.shape[1:], box.start[1:], box.stop[1:])
            devices = self._devices(tensor, device)[box.start[0] : box.stop[0]]
            found += [Touch(tensor.buffer, peer, inner, access.is_write) for peer in devices]
        return found

    def _window(self, call: Call, argument: int, coords: Mapping[str, int]) -> Box:
        """What a kernel on windows sees of an argument on the device at these coordinates."""
        tensor, window = call.arguments[argument], call.windows[argument]
        assert isinstance(tensor, Tensor)
        if window is None:
            return Box(tensor.shape, (0,) * len(tensor.shape), tensor.shape)
        turn = 0 if call.ring is None else (coords[call.ring] + (call.step or 0)) % self._mesh[call.ring]
        first = turn * window.slice_rows + (call.chunk or 0) * window.chunk_rows
        start = (first, *(0 for _ in tensor.shape[1:]))
        return Box(tensor.shape, start, (min(tensor.shape[0], first + window.rows), *tensor.shape[1:]))


def _all(shape: tuple[int, ...]) -> Box:
    """All elements of a tensor."""
    return Box(shape, (0,) * len(shape), shape)


@dataclass(frozen=True)
class _Access:
    """Ranges of an argument's indices, in the function's scalars and in iterators with their domains."""

    argument: int
    is_write: bool
    ranges: tuple[ir.Range, ...]
    iterators: tuple[tirx.IterVar, ...] = ()

    def box(self, shape: tuple[int, ...], numbers: Mapping[tirx.Var, tirx.Expr]) -> Box:
        """The least box that holds them; what isn't known of an index, such as a loaded one, may be anything."""
        analyzer = Analyzer()
        for iterator in self.iterators:
            analyzer.bind(iterator.var, iterator.dom)
        start, stop = [], []
        for extent, span in zip(shape, self.ranges):
            bound = analyzer.const_int_bound(analyzer.simplify(substitute(span.min, numbers)))
            start.append(max(0, int(bound.min_value)))
            stop.append(min(extent, int(bound.max_value) + int(span.extent)))
        return Box(shape, tuple(start), tuple(stop))


@dataclass(frozen=True)
class _Kernel:
    """A function of blocks: what it does with its arguments."""

    func: tirx.PrimFunc

    @property
    def params(self) -> tuple[tirx.Var, ...]:
        return tuple(self.func.params)

    @cached_property
    def accesses(self) -> tuple[_Access, ...]:
        """What its blocks say they read and write of its arguments."""
        found: list[_Access] = []

        def on_block(block: s_tir.SBlock) -> None:
            for regions, is_write in ((block.reads, False), (block.writes, True)):
                for region in regions:
                    for number, param in enumerate(self.func.params):
                        if region.source.same_as(param):
                            found.append(_Access(number, is_write, tuple(region.region), tuple(block.iter_vars)))

        tvm_ffi.structural_walk(self.func.body, (s_tir.SBlock, on_block))
        return tuple(found)
