"""Emit a Relax module: ``main`` runs one device's kernels and collectives in order, with barriers where they depend.

Every tensor that another device reads or writes, and every parameter, is a mesh tensor that the caller allocates and
passes in, as the device's own slab or as the view along a mesh axis; ``main`` allocates the rest, under Relax's memory
planning. What devices are to each other comes in as their coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import tvm
from tvm import relax, tirx

from tvm_axe.lower.derive import ALL_GATHER, ALL_REDUCE, LOCAL, MESH_KERNEL, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.localize import CHUNK, OWN, STEP, Kernel, localize
from tvm_axe.lower.order import barriers_before, pipeline, regions
from tvm_axe.lower.program import Program


@dataclass(frozen=True)
class Emitted:
    """The module, and what ``main`` is called with: (buffer name, view) pairs, then the coordinates on these axes."""

    module: tvm.IRModule
    arguments: tuple[tuple[str, str], ...]
    coordinates: tuple[str, ...]
    mesh_buffers: tuple[tirx.Buffer, ...]
    kernels: tuple[str | None, ...]  # of each step, its kernel's name in the module
    memory: tuple[int, ...]  # of each step, the bytes of the device's own slabs that it touches


def emit_module(program: Program, steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> Emitted:
    """The module that each device of `program` runs."""
    emitter = _Emitter(program, steps, shardings)
    return emitter.module()


def _collective_views(step: Step) -> tuple[str, tuple[tirx.Buffer, str], tuple[tirx.Buffer, str]]:
    """The mesh axis of a plain collective, and its source and target with the view that the engine takes of each."""
    assert step.source is not None and step.target is not None and step.axis is not None
    source = OWN if step.kind == ALL_GATHER else step.axis
    target = step.axis if step.kind in (ALL_REDUCE, ALL_GATHER) else OWN
    return step.axis, (step.source, source), (step.target, target)


class _Emitter:
    def __init__(self, program: Program, steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> None:
        self.program, self.steps, self.shardings = program, steps, shardings
        crossing = {buffer for step in steps for buffer in step.pulled | step.pushed}
        users = {
            buffer: [
                i
                for i, step in enumerate(steps)
                if any(a.buffer.same_as(buffer) for b in step.stage.blocks for a in b.accesses)
            ]
            for buffer in program.intermediates
        }
        self.mesh_buffers = (*program.parameters, *(b for b in program.intermediates if b in crossing))
        inside = [b for b in program.intermediates if b not in crossing and len(users[b]) == 1]
        self.private = {b: users[b][0] for b in inside if steps[users[b][0]].kind in (LOCAL, MESH_KERNEL)}
        self.builder = relax.BlockBuilder()
        self.arguments: dict[tuple[tirx.Buffer, str], relax.Var] = {}
        self.coordinates: dict[str, relax.Var] = {}
        self.temporaries: dict[tirx.Buffer, relax.Expr] = {}
        self.kernels: list[str | None] = []

    def module(self) -> Emitted:
        localized = {
            index: localize(
                self.program, step, self.shardings, tuple(b for b, at in self.private.items() if at == index)
            )
            for index, step in enumerate(self.steps)
            if step.kind in (LOCAL, MESH_KERNEL)
        }
        self._declare(localized)
        params = [*self.arguments.values(), *self.coordinates.values()]
        groups = regions(self.steps)
        with self.builder.function("main", params, pure=False):
            for steps, barrier in zip(groups, barriers_before(groups, self.shardings)):
                if barrier:
                    self._call_packed("axe.barrier")
                kernels = [localized.get(self.steps.index(step)) for step in steps]
                if steps[0].stage.overlap is not None:
                    self._region(steps, [kernel for kernel in kernels if kernel is not None])
                elif kernels[0] is not None:
                    self._call_kernel(self._add_kernel(steps[0], kernels[0]), kernels[0])
                else:
                    self._collective(steps[0])
            self.builder.emit_func_output(relax.Tuple([]))
        return Emitted(
            self.builder.finalize(),
            tuple((self.program.names[buffer], view) for buffer, view in self.arguments),
            tuple(self.coordinates),
            self.mesh_buffers,
            tuple(self.kernels),
            tuple(self._memory(index) for index in range(len(self.steps))),
        )

    def _memory(self, index: int) -> int:
        """Bytes of the slabs that a step touches, less what only lives inside its kernel."""
        touched = {access.buffer for block in self.steps[index].stage.blocks for access in block.accesses}
        return sum(self.shardings[buffer].nbytes(buffer.dtype) for buffer in touched if buffer not in self.private)

    def _region(self, steps: Sequence[Step], kernels: Sequence[Kernel]) -> None:
        """The chunks of overlapping stages, in the order of `pipeline`, with the waits between them."""
        functions = [self._add_kernel(step, kernel) for step, kernel in zip(steps, kernels)]
        for work in pipeline(steps, self.shardings):
            if work.behind is not None:
                self._call_packed("axe.wait", relax.prim_value(work.behind))
            self._call_kernel(functions[work.stage], kernels[work.stage], {STEP: work.step, CHUNK: work.chunk})
            if work.arrives:
                self._call_packed("axe.arrive")

    def _declare(self, localized: Mapping[int, Kernel]) -> None:
        """Find out what ``main`` takes: parameters first, in their order, then other views, then coordinates."""
        wanted = [(buffer, OWN) for buffer in self.program.parameters]
        coordinates: set[str] = set()
        for index, step in enumerate(self.steps):
            if index in localized:
                wanted += localized[index].arguments
                coordinates.update(localized[index].coordinates)
            else:
                _, source, target = _collective_views(step)
                wanted += [source, target]
        on_mesh = set(self.mesh_buffers)
        for buffer, view in wanted:
            if buffer in on_mesh and (buffer, view) not in self.arguments:
                shape, name = list(self.shardings[buffer].stored), self.program.names[buffer]
                if view != OWN:
                    shape, name = [self.program.mesh.axis_size(view), *shape], f"{name}_{view}"
                self.arguments[buffer, view] = relax.Var(name, relax.TensorType(shape, buffer.dtype))
        for axis in self.program.mesh.names:
            if axis in coordinates:
                self.coordinates[axis] = relax.Var(axis, tvm.ir.PrimType("int32"))

    def _add_kernel(self, step: Step, kernel: Kernel) -> tvm.ir.GlobalVar:
        """Add a step's kernel to the module; returns what is called, which may be a function that calls it."""
        name = self.builder.get_unique_name(step.name)
        self.kernels.append(name)
        function = self.builder.add_func(kernel.func.with_attr("global_symbol", name), name)
        if kernel.caller is None:
            return function
        caller = self.builder.get_unique_name(f"{name}_chunk")
        return self.builder.add_func(kernel.caller(name).with_attr("global_symbol", caller), caller)

    def _call_kernel(
        self, function: tvm.ir.GlobalVar, kernel: Kernel, chunk: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        tensors = [self._tensor(buffer, view) for buffer, view in kernel.arguments]
        coordinates = [self.coordinates[axis] for axis in kernel.coordinates]
        numbers = [tirx.IntImm("int32", chunk[name]) for name in kernel.chunk]
        self.builder.emit(relax.Call(function, [*tensors, *coordinates, *numbers]))

    def _collective(self, step: Step) -> None:
        self.kernels.append(None)
        axis, source, target = _collective_views(step)
        numbers = [relax.prim_value(number) for number in step.arguments]
        tensors = [self._tensor(*source), self._tensor(*target)]
        self._call_packed(f"axe.{step.kind.replace('-', '_')}", *tensors, *numbers, tvm.ir.StringImm(axis))

    def _tensor(self, buffer: tirx.Buffer, view: str) -> relax.Expr:
        if (buffer, view) in self.arguments:
            return self.arguments[buffer, view]
        if buffer not in self.temporaries:
            shape = relax.ShapeExpr(list(self.shardings[buffer].stored))
            allocated = relax.op.builtin.alloc_tensor(shape, buffer.dtype, 0)
            self.temporaries[buffer] = self.builder.emit(allocated, self.program.names[buffer])
        return self.temporaries[buffer]

    def _call_packed(self, name: str, *arguments: relax.Expr) -> None:
        self.builder.emit(relax.Call(relax.ExternFunc(name), list(arguments), ty_args=[relax.TupleType([])]))
