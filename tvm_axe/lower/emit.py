"""Emit a Relax module: ``main`` runs one device's kernels and collectives in order, with barriers where they depend.

What ``main`` calls is data, `tvm_axe.lower.calls.Call`; each is printed as it is decided.

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
from tvm.target import Target

from tvm_axe.collective import ALL
from tvm_axe.collective.side import BESIDE
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.beside import joins_of
from tvm_axe.lower.calls import Argument, Call, Tensor
from tvm_axe.lower.derive import EXCHANGE, LOCAL, MESH_KERNEL, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.localize import CHUNK, OWN, STEP, Kernel, localize
from tvm_axe.lower.order import barriers_before, pipeline, regions
from tvm_axe.lower.pairing import Launch
from tvm_axe.lower.pairs import Pair, Sequential, makes_pairs, pair_of
from tvm_axe.lower.program import ScheduledProgram
from tvm_axe.lower.rows import Meeting, meeting_of
from tvm_axe.lower.views import view_shape


@dataclass(frozen=True)
class Emitted:
    """The module, and its ``main``: the calls that it makes, and what it is called with itself.

    That is (buffer name, view) pairs, then the coordinates on these axes.
    """

    module: tvm.IRModule
    steps: tuple[Step, ...]  # as they communicate
    calls: tuple[Call, ...]
    arguments: tuple[tuple[str, str], ...]
    coordinates: tuple[str, ...]
    mesh_buffers: tuple[tirx.Buffer, ...]
    kernels: tuple[str | None, ...]  # of each step, its kernel's name in the module
    memory: tuple[int, ...]  # of each step, the bytes of the device's own slabs that it touches
    names: Mapping[tirx.Buffer, str]  # of the mesh buffers
    shardings: Mapping[tirx.Buffer, Sharding]  # likewise
    forms: tuple[str, ...]  # how stages overlap, and which kernels meet
    flags: frozenset[tirx.Buffer]  # of kernels that meet


def _collective_views(step: Step) -> tuple[str, tuple[tirx.Buffer, str], tuple[tirx.Buffer, str]]:
    """The mesh axis of a plain collective, and its source and target with the view that the engine takes of each."""
    assert step.source is not None and step.target is not None and step.axis is not None
    source = OWN if step.kind == Collective.ALL_GATHER else step.axis
    target = step.axis if step.kind in (Collective.ALL_REDUCE, Collective.ALL_GATHER) else OWN
    return step.axis, (step.source, source), (step.target, target)


class Emitter:
    """Makes the module that each device of `program` runs; with the pairs that `target` makes, if one is given.

    Attributes
    ----------
    sequential : dict of str to str
        The regions of stages that overlap and had better not, each with a line that says so.
    """

    def __init__(
        self,
        program: ScheduledProgram,
        steps: Sequence[Step],
        shardings: Mapping[tirx.Buffer, Sharding],
        target: Target | None,
    ) -> None:
        self.program, self.steps = program, steps
        crossing = {buffer for step in steps for buffer in step.pulled | step.pushed}
        # What a collective moves beside others has memory of its own: a plan of temporaries goes by the calls' order.
        crossing |= {b for step in steps if step.stage.beside for b in (step.source, step.target) if b is not None}
        users = {
            buffer: [
                i
                for i, step in enumerate(steps)
                if any(a.buffer.same_as(buffer) for b in step.stage.blocks for a in b.accesses)
            ]
            for buffer in program.intermediates
        }
        inside = [b for b in program.intermediates if b not in crossing and len(users[b]) == 1]
        self.private = {b: users[b][0] for b in inside if steps[users[b][0]].kind in (LOCAL, MESH_KERNEL)}
        self.groups = regions(steps)
        self.pairs: dict[Step, Pair] = {}  # by the first step of their regions
        self.meetings: dict[Step, Meeting] = {}
        self.forms: list[str] = []
        self.sequential: dict[str, str] = {}
        if target is not None and makes_pairs(target):
            self._find_pairs(shardings, {b: [steps[i] for i in own] for b, own in users.items()}, target)
        if target is not None:
            self._find_meetings(shardings, target)
        filling = [at for at, group in enumerate(self.groups) if group[0] in self.pairs]
        self.joins = joins_of(self.groups, shardings, filling)
        self.forms += self.joins.forms
        crossing |= {buffer for pair in self.pairs.values() for buffer in pair.exchanged}
        crossing -= {buffer for pair in self.pairs.values() for buffer in pair.inside}
        kernels: list[Pair | Meeting] = [*self.pairs.values(), *self.meetings.values()]
        made = {buffer: sharding for each in kernels for buffer, sharding in each.shardings.items()}
        self.mesh_buffers = (*program.parameters, *(b for b in program.intermediates if b in crossing), *made)
        self.shardings: Mapping[tirx.Buffer, Sharding] = {**shardings, **made}
        self.names = {**program.names, **{buffer: str(buffer.name) for buffer in made}}
        self.builder = relax.BlockBuilder()
        self.arguments: dict[tuple[str, str], relax.Var] = {}  # by the buffer's name and the view
        self.coordinates: dict[str, relax.Var] = {}
        self.temporaries: dict[str, relax.Expr] = {}
        self.dtypes = {name: str(buffer.dtype) for buffer, name in self.names.items()}
        self.functions: dict[str, tvm.ir.GlobalVar] = {}
        self.kernels: list[str | None] = []
        self.calls: list[Call] = []

    def _find_pairs(
        self, shardings: Mapping[tirx.Buffer, Sharding], users: Mapping[tirx.Buffer, Sequence[Step]], target: Target
    ) -> None:
        for group in self.groups:
            if group[0].stage.overlap is None:
                continue
            found = pair_of(self.program, group, shardings, frozenset(self.private), users, target)
            chunks = group[0].stage.overlap.chunks
            about = f"in {chunks} chunks: {found}" if isinstance(found, str) else found.about
            line = f"{', '.join(step.name for step in group)}: {about}"
            if isinstance(found, Sequential):
                self.sequential[group[0].stage.overlap.region] = line
                continue
            if isinstance(found, Pair):
                self.pairs[group[0]] = found
            self.forms.append(line)

    def _find_meetings(self, shardings: Mapping[tirx.Buffer, Sharding], target: Target) -> None:
        """Find the stages that are kernels in which devices meet, and say which and why others aren't."""
        for step in self.steps:
            found = meeting_of(self.program, step, shardings, frozenset(self.private), target)
            if isinstance(found, Meeting):
                self.meetings[step] = found
            if found is not None:
                about = f"the fused kernel of its blocks: {found}" if isinstance(found, str) else found.about
                self.forms.append(f"{step.name}: {about}")

    def module(self) -> Emitted:
        """The module, and what is known of it."""
        paired = {step for group in self.groups if group[0] in self.pairs for step in group}
        localized = {
            index: self.meetings[step].kernel
            if step in self.meetings
            else localize(self.program, step, self.shardings, tuple(b for b, at in self.private.items() if at == index))
            for index, step in enumerate(self.steps)
            if step.kind in (LOCAL, MESH_KERNEL, EXCHANGE) and step not in paired
        }
        self._declare(localized)
        params = [*self.arguments.values(), *self.coordinates.values()]
        with self.builder.function("main", params, pure=False):
            done = [self._as_done(group) for group in self.groups]
            barriers = barriers_before(done, self.shardings, self.joins.ended)
            for number, (steps, barrier) in enumerate(zip(self.groups, barriers)):
                self._join(number)
                pair = self.pairs.get(steps[0])
                if barrier and pair is None and steps[0] not in self.meetings:  # these have one of their own
                    self._call(Call("axe.barrier", None, ()))
                indices = [self.steps.index(step) for step in steps]
                if pair is not None:
                    self._pair(pair, indices)
                elif steps[0].stage.overlap is not None:
                    self._region(indices, [localized[index] for index in indices])
                elif indices[0] in localized:
                    kernel = localized[indices[0]]
                    self._call_kernel(indices[0], self._add_kernel(steps[0], kernel), kernel)
                else:
                    self._collective(indices[0], number in self.joins.beside)
            self._join(len(self.groups))
            self.builder.emit_func_output(relax.Tuple([]))
        return Emitted(
            self.builder.finalize(),
            tuple(step for steps in done for step in steps),
            tuple(self.calls),
            tuple(self.arguments),
            tuple(self.coordinates),
            self.mesh_buffers,
            tuple(self.kernels),
            tuple(self._memory(index) for index in range(len(self.steps))),
            self.names,
            self.shardings,
            tuple(self.forms),
            frozenset(buffer for meeting in self.meetings.values() for buffer in meeting.shardings),
        )

    def _as_done(self, group: Sequence[Step]) -> Sequence[Step]:
        """The steps of a group with what they move as they are done."""
        if group[0] in self.pairs:
            return self.pairs[group[0]].steps
        return [self.meetings[step].step if step in self.meetings else step for step in group]

    def _memory(self, index: int) -> int:
        """Bytes of the slabs that a step touches, less what only lives inside its kernel."""
        step = self.steps[index]
        if step.source is not None and step.target is not None:  # what its blocks leave to each other is nowhere
            touched = {step.source, step.target}
        else:
            touched = {access.buffer for block in step.stage.blocks for access in block.accesses}
        inside = self.private.keys() | {buffer for pair in self.pairs.values() for buffer in pair.inside}
        return sum(self.shardings[buffer].nbytes(buffer.dtype) for buffer in touched - inside)

    def _region(self, indices: Sequence[int], kernels: Sequence[Kernel]) -> None:
        """The chunks of overlapping stages, in the order of `pipeline`, with the waits between them."""
        steps = [self.steps[index] for index in indices]
        functions = [self._add_kernel(step, kernel) for step, kernel in zip(steps, kernels)]
        for work in pipeline(steps, self.shardings):
            if work.behind is not None:
                self._call(Call("axe.wait", None, (work.behind,)))
            chunk = {STEP: work.step, CHUNK: work.chunk}
            self._call_kernel(indices[work.stage], functions[work.stage], kernels[work.stage], chunk)
            if work.arrives:
                self._call(Call("axe.arrive", None, ()))

    def _pair(self, pair: Pair, indices: Sequence[int]) -> None:
        """The calls of a pair: what it prepares, and the product between the steps of the side stream."""
        stage = self.steps.index(pair.product)
        name = self.builder.get_unique_name(pair.product.name)
        self.kernels += [name if index == stage else None for index in indices]
        self._launch(pair.prepare, pair, self.builder.get_unique_name(f"{name}_prepare"), stage)
        self._call(Call("axe.barrier", None, ()))
        assert pair.kernel.resident is not None  # it is persistent
        self._call(Call("axe.fork", None, (pair.kernel.resident,)))
        for steps in (pair.before, pair.after):
            if steps is pair.after:
                self._launch(pair.kernel, pair, name, stage)
            for step in steps:
                tensors = [self._tensor(buffer, view) for buffer, view in step.tensors]
                of = None if step.of is None else self.steps.index(step.of)
                self._call(Call(step.name, of, (*tensors, *step.numbers, pair.axis)))
        self._call(Call("axe.join", stage, (0,)))  # behind which the product is done too

    def _launch(self, launch: Launch, pair: Pair, name: str, stage: int) -> None:
        """Add a function of a pair to the module and call it."""
        self.functions[name] = self.builder.add_func(launch.func.with_attr("global_symbol", name), name)
        tensors = [self._tensor(buffer, OWN) for buffer in launch.buffers]
        arguments: tuple[Argument, ...] = (*tensors, *([pair.axis] if launch.asks else []))
        touched = tuple(
            (number, is_write)
            for is_write, buffers in ((False, launch.reads), (True, launch.writes))
            for number, buffer in enumerate(launch.buffers)
            if buffer in buffers
        )
        self._call(Call(name, stage, arguments, kernel=name, touched=touched))

    def _declare(self, localized: Mapping[int, Kernel]) -> None:
        """Find out what ``main`` takes: parameters first, in their order, then other views, then coordinates."""
        wanted = [(buffer, OWN) for buffer in self.program.parameters]
        coordinates: set[str] = set()
        for index, step in enumerate(self.steps):
            if index in localized:
                wanted += localized[index].arguments
                coordinates.update(localized[index].coordinates)
            elif step in self.pairs:
                pair = self.pairs[step]
                wanted += [(buffer, OWN) for launch in (pair.prepare, pair.kernel) for buffer in launch.buffers]
                wanted += [view for each in (*pair.before, *pair.after) for view in each.tensors]
                coordinates.add(pair.axis)
            elif not any(step in group and group[0] in self.pairs for group in self.groups):
                _, source, target = _collective_views(step)
                wanted += [source, target]
        on_mesh = set(self.mesh_buffers)
        for buffer, view in wanted:
            tensor = self._tensor(buffer, view)
            if buffer in on_mesh and (tensor.buffer, view) not in self.arguments:
                name = tensor.buffer if view == OWN else f"{tensor.buffer}_{'devices' if view == ALL else view}"
                declared = relax.Var(name, relax.TensorType(list(tensor.shape), buffer.dtype))
                self.arguments[tensor.buffer, view] = declared
        for axis in self.program.mesh.names:
            if axis in coordinates:
                self.coordinates[axis] = relax.Var(axis, tvm.ir.PrimType("int32"))

    def _add_kernel(self, step: Step, kernel: Kernel) -> tuple[str, str]:
        """Add a step's kernel to the module; returns what is called, which may be a function that calls it, and it."""
        name = self.builder.get_unique_name(step.name)
        self.kernels.append(name)
        self.functions[name] = self.builder.add_func(kernel.func.with_attr("global_symbol", name), name)
        if kernel.caller is None:
            return name, name
        caller = self.builder.get_unique_name(f"{name}_chunk")
        self.functions[caller] = self.builder.add_func(kernel.caller(name).with_attr("global_symbol", caller), caller)
        return caller, name

    def _call_kernel(
        self,
        stage: int,
        functions: tuple[str, str],
        kernel: Kernel,
        chunk: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        tensors = [self._tensor(buffer, view) for buffer, view in kernel.arguments]
        told = {name: chunk[name] for name in kernel.chunk}
        arguments: tuple[Argument, ...] = (*tensors, *kernel.coordinates, *told.values())
        overlap, (function, called) = self.steps[stage].stage.overlap, functions
        self._call(
            Call(
                function,
                stage,
                arguments,
                told.get(STEP),
                told.get(CHUNK),
                called,
                kernel.windows,
                None if overlap is None else overlap.axis,
                kernel.touched,
            )
        )

    def _join(self, number: int) -> None:
        """The join of what runs beside others until the group of that number; the latest of them may stay there."""
        ended = self.joins.ended.get(number, ())
        if ended:
            left = sum(at < number < end for end, groups in self.joins.ended.items() for at in groups)
            self._call(Call("axe.join", self.steps.index(self.groups[ended[-1]][0]), (left,)))

    def _collective(self, stage: int, beside: bool) -> None:
        step = self.steps[stage]
        self.kernels.append(None)
        axis, source, target = _collective_views(step)
        tensors = (self._tensor(*source), self._tensor(*target))
        if beside:
            self._call(Call("axe.fork", None, (0,)))
        name = f"axe.{Collective(step.kind).operation}{BESIDE if beside else ''}"
        self._call(Call(name, stage, (*tensors, *step.arguments, axis)))

    def _tensor(self, buffer: tirx.Buffer, view: str) -> Tensor:
        shape = view_shape(self.program.mesh, view, self.shardings[buffer].stored)
        return Tensor(self.names[buffer], view, shape)

    def _call(self, call: Call) -> None:
        """Have ``main`` make a call."""
        self.calls.append(call)
        of_kernel = call.kernel is not None
        arguments = [self._printed(argument, of_kernel) for argument in call.arguments]
        if of_kernel:
            self.builder.emit(relax.Call(self.functions[call.function], arguments))
        else:
            self.builder.emit(relax.Call(relax.ExternFunc(call.function), arguments, ty_args=[relax.TupleType([])]))

    def _printed(self, argument: Argument, of_kernel: bool) -> relax.Expr:
        """An argument in ``main``: kernels take coordinates and int32, what workers have takes axes and int64."""
        if isinstance(argument, int):
            return tirx.IntImm("int32", argument) if of_kernel else relax.prim_value(argument)
        if isinstance(argument, str):
            return self.coordinates[argument] if of_kernel else tvm.ir.StringImm(argument)
        key = (argument.buffer, argument.view)
        if key in self.arguments:
            return self.arguments[key]
        if argument.buffer not in self.temporaries:
            allocated = relax.op.builtin.alloc_tensor(
                relax.ShapeExpr(list(argument.shape)), self.dtypes[argument.buffer], 0
            )
            self.temporaries[argument.buffer] = self.builder.emit(allocated, argument.buffer)
        return self.temporaries[argument.buffer]
