"""What ``main`` of an emitted module calls, in order, and whose elements each call touches on which device.

Read off the module, as that is what runs: a collective touches what the engine plans for it, a kernel what its blocks
say, with the device's coordinates and the chunk's numbers put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import tvm
import tvm_ffi
from tvm import ir, relax, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.collective.plan import VIEWS, plan
from tvm_axe.lower.localize import CHUNK, OWN, STEP
from tvm_axe.lower.lowered import Lowered
from tvm_axe.schedule.query import substitute


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
        steps = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
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
    """An argument that is a tensor: of a mesh buffer the own slab or the view along a mesh axis, or the device's alone.

    The latter has no buffer.
    """

    buffer: str | None
    view: str
    shape: tuple[int, ...]

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape of one device's slab."""
        return self.shape if self.view == OWN else self.shape[1:]


Argument = Tensor | str | int  # a tensor; a mesh axis, or the device's coordinate on it; a number


@dataclass(frozen=True)
class Call:
    """One call of a function of the module, or of one that workers have: ``axe.barrier``.

    Attributes
    ----------
    function : str
        Its name.
    stage : int or None
        The stage that the call does, or does a chunk of; None if it waits or says that others needn't.
    step, chunk : int or None
        Which chunk: the step around the ring, the number in the slice.
    """

    function: str
    stage: int | None
    arguments: tuple[Argument, ...]
    step: int | None = None
    chunk: int | None = None


class Calls:
    """The calls of a lowered function's ``main``, but for allocations.

    Attributes
    ----------
    calls : tuple of Call
        In order, the same on each device.
    """

    def __init__(self, lowered: Lowered) -> None:
        self._mesh = lowered.mesh
        self._kernels = {
            str(var.name_hint): _Kernel.of(lowered.module, func)
            for var, func in lowered.module.functions_items()
            if isinstance(func, tirx.PrimFunc)
        }
        main = lowered.module["main"]
        known = dict(zip(main.params, [*lowered.arguments, *lowered.coordinates]))
        stages = {stage.kernel: index for index, stage in enumerate(lowered.stages) if stage.kernel is not None}
        collectives = iter([index for index, stage in enumerate(lowered.stages) if stage.kernel is None])
        found = []
        for binding in (binding for block in main.body.blocks for binding in block.bindings):
            call = binding.value
            if not isinstance(call.op, ir.GlobalVar | relax.ExternFunc):
                continue
            arguments = tuple(_argument(argument, known) for argument in call.args)
            if isinstance(call.op, ir.GlobalVar):
                name = str(call.op.name_hint)
                kernel = self._kernels[name]
                numbers = {str(param.name): value for param, value in zip(kernel.params, arguments)}
                stage = stages[kernel.callee or name]
                step, chunk = (
                    number if isinstance(number, int) else None for number in map(numbers.get, (STEP, CHUNK))
                )
                found.append(Call(name, stage, arguments, step, chunk))
            else:
                name = str(call.op.global_symbol)
                is_collective = name.removeprefix("axe.") in VIEWS
                found.append(Call(name, next(collectives) if is_collective else None, arguments))
        self.calls = tuple(found)

    def touches(self, call: Call, device: int) -> frozenset[Touch]:
        """What a call on `device` reads and writes of the slabs of mesh buffers, its own and its peers'."""
        if call.function in self._kernels:
            return frozenset(self._kernel_touches(self._kernels[call.function], call.arguments, device))
        if call.stage is None:
            return frozenset()
        return frozenset(self._collective_touches(call, device))

    def _devices(self, tensor: Tensor, device: int) -> Sequence[int]:
        """The devices whose slabs `tensor` has, by its dimension 0 if it is a view."""
        return [device] if tensor.view == OWN else self._mesh.group(device, tensor.view)

    def _collective_touches(self, call: Call, device: int) -> list[Touch]:
        source, target, *others, axis = call.arguments
        assert isinstance(source, Tensor) and isinstance(target, Tensor) and isinstance(axis, str)  # as emitted
        name = call.function.removeprefix("axe.")
        numbers = [number for number in others if isinstance(number, int)]
        found = []
        for move in plan(name, source.slab, target.slab, numbers, self._mesh[axis], self._mesh.coords(device)[axis]):
            for tensor, corner, is_write in ((source, move.source, False), (target, move.target, True)):
                if tensor.buffer is None:
                    continue
                stop = tuple(at + extent for at, extent in zip(corner.at, move.box))
                box = Box(corner.shape, corner.at, stop)
                devices = self._devices(tensor, device)
                found += [Touch(tensor.buffer, devices[slab], box, is_write) for slab in corner.slabs]
        return found

    def _kernel_touches(self, kernel: _Kernel, arguments: Sequence[Argument], device: int) -> list[Touch]:
        coords = self._mesh.coords(device)
        numbers = {
            param: tirx.IntImm("int32", coords[value] if isinstance(value, str) else value)
            for param, value in zip(kernel.params, arguments)
            if isinstance(value, str | int)
        }
        found = []
        for access in kernel.accesses:
            tensor = arguments[access.argument]
            if not isinstance(tensor, Tensor) or tensor.buffer is None:
                continue
            box = access.box(tensor.shape, numbers)
            if tensor.view == OWN:
                found.append(Touch(tensor.buffer, device, box, access.is_write))
                continue
            inner = Box(box.shape[1:], box.start[1:], box.stop[1:])
            devices = self._devices(tensor, device)[box.start[0] : box.stop[0]]
            found += [Touch(tensor.buffer, peer, inner, access.is_write) for peer in devices]
        return found


def _argument(argument: relax.Expr, known: Mapping[relax.Var, tuple[str, str] | str]) -> Argument:
    """What an argument in ``main`` is, where `known` says what the parameters are: (buffer, view), or a mesh axis."""
    if isinstance(argument, tirx.IntImm):
        return int(argument)
    if isinstance(argument, ir.StringImm):
        return str(argument.value)
    what = known.get(argument, (None, OWN))
    if isinstance(what, str):
        return what
    buffer, view = what
    return Tensor(buffer, view, tuple(int(extent) for extent in argument.ty.shape.values))


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
    """A function of the module: what it does with its arguments, and for one on windows, the function that it calls."""

    params: tuple[tirx.Var, ...]
    accesses: tuple[_Access, ...]
    callee: str | None

    @classmethod
    def of(cls, module: tvm.IRModule, func: tirx.PrimFunc) -> _Kernel:
        if isinstance(func.body, s_tir.SBlockRealize):
            return cls(tuple(func.params), tuple(_accesses(func)), None)
        callee, windows = _tvm.packed_call(func.body)
        accesses = []
        for access in cls.of(module, module[callee]).accesses:
            start, shape = windows[access.argument]
            first = ir.Range.from_min_extent(tirx.IntImm("int32", 0) if start is None else start, shape[0])
            others = [ir.Range(0, extent) for extent in shape[1:]]
            accesses.append(_Access(access.argument, access.is_write, (first, *others)))
        return cls(tuple(func.params), tuple(accesses), callee)


def _accesses(func: tirx.PrimFunc) -> list[_Access]:
    """What the blocks of a kernel say they read and write of its arguments."""
    found: list[_Access] = []

    def on_block(block: s_tir.SBlock) -> None:
        for regions, is_write in ((block.reads, False), (block.writes, True)):
            for region in regions:
                for number, param in enumerate(func.params):
                    if region.source.same_as(param):
                        found.append(_Access(number, is_write, tuple(region.region), tuple(block.iter_vars)))

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, on_block))
    return found
