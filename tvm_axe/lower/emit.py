"""Emit a Relax module: ``main`` runs one device's kernels and collectives in order, with barriers where they depend.

Every tensor that another device reads or writes, and every parameter, is a mesh tensor that the caller allocates and
passes in, as the device's own slab or as the view along a mesh axis; ``main`` allocates the rest, under Relax's memory
planning. What devices are to each other comes in as their coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from .derive import ALL_GATHER, ALL_REDUCE, LOCAL, MESH_KERNEL, REDUCE_SCATTER, Step, push_axis, remote_axis
from .infer import Sharding
from .localize import OWN, Kernel, localize
from .program import Program

# The engine's operations: see tvm_axe.collective.worker.
_OPERATIONS = {ALL_REDUCE: "axe.all_reduce", REDUCE_SCATTER: "axe.reduce_scatter", ALL_GATHER: "axe.all_gather"}


@dataclass(frozen=True)
class Emitted:
    """The module, and what ``main`` is called with: (buffer name, view) pairs, then the coordinates on these axes."""

    module: tvm.IRModule
    arguments: tuple[tuple[str, str], ...]
    coordinates: tuple[str, ...]
    mesh_buffers: tuple[tirx.Buffer, ...]
    kernels: tuple[str | None, ...]  # of each step, its kernel's name in the module


def emit_module(program: Program, steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> Emitted:
    """The module that each device of `program` runs."""
    emitter = _Emitter(program, steps, shardings)
    return emitter.module()


def barriers_before(steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> list[bool]:
    """Whether a barrier stands before each step: something in it conflicts with what a peer may still be doing.

    The run itself starts and ends with all devices waiting for the controller, so nothing before it counts.
    """
    since: dict[str, set[tirx.Buffer]] = {"read": set(), "write": set(), "pull": set(), "push": set()}
    found = []
    for step in steps:
        now = _touched(step, shardings)
        local, remote = since["read"] | since["write"], since["pull"] | since["push"]
        conflict = (
            now["pull"] & (since["write"] | since["push"])
            or now["push"] & (local | remote)
            or now["read"] & since["push"]
            or now["write"] & remote
        )
        if conflict:
            since = {key: set() for key in since}
        for key, buffers in now.items():
            since[key] |= buffers
        found.append(bool(conflict))
    return found


def _touched(step: Step, shardings: Mapping[tirx.Buffer, Sharding]) -> dict[str, set[tirx.Buffer]]:
    """What a step reads and writes of its own slabs, pulls from its peers' and pushes to them."""
    touched: dict[str, set[tirx.Buffer]] = {
        "read": set(),
        "write": set(),
        "pull": set(step.pulled),
        "push": set(step.pushed),
    }
    for block in step.stage.blocks:
        for access in block.accesses:
            sharding = shardings[access.buffer]
            crosses = access.buffer in step.pulled | step.pushed
            if not crosses and remote_axis(access, sharding) is None and push_axis(access, sharding) is None:
                touched["write" if access.is_write else "read"].add(access.buffer)
    if step.kind == ALL_GATHER and step.source is not None:
        touched["read"].add(step.source)
    return touched


def _collective_views(step: Step) -> tuple[str, tuple[tirx.Buffer, str], tuple[tirx.Buffer, str]]:
    """The mesh axis of a plain collective, and its source and target with the view that the engine takes of each."""
    assert step.source is not None and step.target is not None and step.axis is not None
    source = OWN if step.kind == ALL_GATHER else step.axis
    target = OWN if step.kind == REDUCE_SCATTER else step.axis
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
        with self.builder.function("main", params, pure=False):
            for index, barrier in enumerate(barriers_before(self.steps, self.shardings)):
                if barrier:
                    self._call_packed("axe.barrier")
                step = self.steps[index]
                if index in localized:
                    self._kernel(step, localized[index])
                else:
                    self._collective(step)
            self.builder.emit_func_output(relax.Tuple([]))
        arguments = tuple((self.program.names[buffer], view) for buffer, view in self.arguments)
        return Emitted(
            self.builder.finalize(), arguments, tuple(self.coordinates), self.mesh_buffers, tuple(self.kernels)
        )

    def _declare(self, localized: Mapping[int, Kernel]) -> None:
        """Find out what ``main`` takes: parameters first, in their order, then other views, then coordinates."""
        wanted = [(buffer, OWN) for buffer in self.program.parameters]
        coordinates: set[str] = set()
        for index, step in enumerate(self.steps):
            if index in localized:
                wanted += localized[index].arguments
                coordinates.update(localized[index].coordinates)
            else:
                axis, source, target = _collective_views(step)
                wanted += [source, target]
                coordinates.add(axis)
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

    def _kernel(self, step: Step, kernel: Kernel) -> None:
        name = self.builder.get_unique_name(step.name)
        function = self.builder.add_func(kernel.func.with_attr("global_symbol", name), name)
        self.kernels.append(name)
        tensors = [self._tensor(buffer, view) for buffer, view in kernel.arguments]
        self.builder.emit(relax.Call(function, [*tensors, *(self.coordinates[axis] for axis in kernel.coordinates)]))

    def _collective(self, step: Step) -> None:
        self.kernels.append(None)
        axis, source, target = _collective_views(step)
        dim = [] if step.dim is None else [relax.prim_value(step.dim)]
        tensors = [self._tensor(*source), self._tensor(*target)]
        self._call_packed(_OPERATIONS[step.kind], *tensors, *dim, self.coordinates[axis])

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
