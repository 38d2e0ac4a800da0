"""The module that each device runs of a shared model: its functions on slabs, with what moves values between them.

A function takes tensors of the mesh, which the caller allocates: its inputs and weights in the forms that were chosen,
its results, and what its peers read or write. All else a device has for itself, under Relax's memory planning. Barriers
stand where one device touches what another has written, or still reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.target import Target

from tvm_axe.collective import SLAB
from tvm_axe.layout import Mesh
from tvm_axe.lower.taking import taking
from tvm_axe.lower.told import with_coordinates, with_own_sizes
from tvm_axe.lower.views import view_shape
from tvm_axe.relax.beside import with_copies_beside
from tvm_axe.relax.chosen import Chosen
from tvm_axe.relax.device import Argument, DeviceFunction, DeviceModule, Placed
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.fusing import fused
from tvm_axe.relax.graph import Node, Value
from tvm_axe.relax.objects import Cache, attends
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.sizes import Shape, exprs
from tvm_axe.relax.steps import COPIES, JOIN, Mover, Spot, Step, numbers_of, steps_of

__all__ = ["device_module"]


def device_module(
    chosen: Sequence[Sequence[Chosen]],
    operators: Sequence[Operators],
    mesh: Mesh,
    page: int,
    meets: bool = True,
    gpu: Target | None = None,
) -> DeviceModule:
    """The module of a device of a model whose functions were chosen.

    Parameters
    ----------
    chosen : Sequence[Sequence[Chosen]]
        Of each function along each axis, of what the outer ones leave of it (`tvm_axe.relax.meshes`).
    operators : Sequence[Operators]
        What they were chosen by, along each axis, outer ones first.
    mesh : Mesh
        The devices.
    page : int
        Bytes of a page of the devices' memory.
    meets : bool
        Whether kernels may do what collectives would, by indexing the slabs of peers (`tvm_axe.relax.fusing`).
    gpu : Target, optional
        What the devices are, if they are GPUs: products run beside copies there (`tvm_axe.relax.beside`).
    """
    return _Module(chosen, operators, mesh, page, meets, gpu).made()


class _Module:
    def __init__(
        self,
        chosen: Sequence[Sequence[Chosen]],
        operators: Sequence[Operators],
        mesh: Mesh,
        page: int,
        meets: bool,
        gpu: Target | None,
    ) -> None:
        self.gpu = gpu
        self.chosen, self.operators, self.axis = chosen, operators[-1], operators[-1].axis
        self.mesh, self.page, self.meets = mesh, page, meets
        self.ranks = {each.axis: each.rank for each in operators}
        self.builder = relax.BlockBuilder()
        self.tensors: dict[str, Placed] = {}
        self.constants: list[tuple[Placed, tvm.runtime.Tensor]] = []
        self.kernels: dict[int, list[tuple[tirx.PrimFunc, tvm.ir.GlobalVar]]] = {}

    def made(self) -> DeviceModule:
        functions = {}
        for each in self.chosen:
            function = _Function(self, each)
            functions[each[-1].graph.name] = function.emitted()
        module, constants = self.builder.finalize(), tuple(self.constants)
        return DeviceModule(module, self.mesh, tuple(self.ranks), functions, self.tensors, constants, self.meets)

    def tensor(self, name: str, value: Value, form: Form, reuse: bool = False) -> Placed:
        """A new tensor of the mesh; the one that is there of the same name and kind, if it may be."""
        base, count, forms = name, 0, (*value.forms, (self.axis, form))
        while name in self.tensors:
            there = self.tensors[name]
            if reuse and (there.shape, there.dtype, there.forms) == (value.whole, value.dtype, forms):
                return there
            count += 1
            name = f"{base}_{count}"
        placed = Placed(name, value.whole, value.dtype, forms)
        self.tensors[name] = placed
        return placed

    def kernel(self, func: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """A function of the module; equal ones are one."""
        key = tvm_ffi.structural_hash(func)
        for other, found in self.kernels.get(key, ()):
            if tvm_ffi.structural_equal(other, func):
                return found
        name = self.builder.get_unique_name(re.sub(r"\W", "_", name))
        variable = self.builder.add_func(func.with_attr("global_symbol", name), name)
        self.kernels.setdefault(key, []).append((func, variable))
        return variable


@dataclass
class _Buffer:
    """Where a value is in one form: a tensor of the mesh, a device's own, or a Relax variable."""

    shape: Shape
    dtype: str
    placed: Placed | None = None
    var: relax.Var | None = None


class _Function:
    def __init__(self, module: _Module, levels: Sequence[Chosen]) -> None:
        chosen = levels[-1]
        self.module, self.levels, self.chosen, self.graph = module, tuple(levels), chosen, chosen.graph
        self.builder = module.builder
        self.buffers: dict[Spot, _Buffer] = {}
        self.views: dict[tuple[str, str], relax.Var] = {}
        self.slots: dict[tuple[Shape, str], list[Placed]] = {}
        self.marks: dict[str, set[str]] = {}
        # By functions and how many of their parameters are taken: what is called, and what they take beside tensors.
        self.started: dict[tuple[tirx.PrimFunc, int], tuple[tvm.ir.GlobalVar, list[relax.Var], list[tirx.Var]]] = {}
        self.coordinates = {name: relax.Var(name, tvm.ir.PrimType("int64")) for name in module.ranks}
        touched = [name for node in self.graph.nodes for name in (*node.takes, node.makes) if name]
        self.places = {name: relax.Var(f"{name}_at", tvm.ir.PrimType("int64")) for name in touched}
        self.objects: dict[str, relax.Var] = {}
        self.prefix = "" if len(module.chosen) == 1 else f"{self.graph.name}."
        mover = Mover(chosen.graph, module.mesh, module.page, module.ranks)
        self.results = [*zip(chosen.graph.results, chosen.results)]
        self.overwritten: dict[str, None] = {}
        steps = steps_of(chosen, module.operators, mover)
        if module.gpu is not None:
            steps = with_copies_beside(steps, self.results, mover, module.gpu, chosen.link)
        self.steps = fused(steps, self.results, mover, module.meets)
        touches = [(step, each) for step in self.steps for each in step.touches()]
        self.crossing = {each.spot for step, each in touches if step.kind or each.view != SLAB}
        last = {each.spot: at for at, step in enumerate(self.steps) for each in step.touches()}
        self.roots: dict[Spot, Spot] = {}  # in whose place another is left
        for step in self.steps:
            for old, new in zip(step.over, step.outs):
                self.roots[new] = self.roots.get(old, old)
                last.pop(old, None)  # the place is free behind the last use of what is left there last
        self.last: dict[int, list[Spot]] = {}  # of which values a step is the last use
        for spot, at in last.items():
            self.last.setdefault(at, []).append(spot)
        seen = {root for new, root in self.roots.items() if self.crossing & {new, root}}
        self.crossing |= seen.union(new for new, root in self.roots.items() if root in seen)

    # ---- The function

    def emitted(self) -> DeviceFunction:
        graph = self.graph
        inputs = self._declared()
        attrs = {"tir_var_upper_bound": graph.most} if graph.most else None
        with self.builder.function(graph.name, attrs=attrs, pure=False):
            for at, step in enumerate(self.steps):
                self._done(step)
                self._released(at)
            results = [self._result(spot) for spot in self.results]
            params = [*graph.sizes.values(), *self.places.values(), *self.views.values(), *self.coordinates.values()]
            self.builder.emit_func_output(relax.Tuple([]), params)
        return DeviceFunction(
            graph.name, tuple(inputs), tuple(results), tuple(graph.sizes), graph.most, tuple(self.views), self.levels,
            tuple(graph.checks), tuple(self.steps), tuple(self.overwritten), tuple(self.places),
            tuple(graph.left),
        )  # fmt: skip

    def _declared(self) -> list[Argument]:
        """Place what the function takes, and its constants."""
        inputs: dict[int, Argument] = {}
        for number, forms in self.chosen.held.items():
            value = self.graph.values[number]
            name = value.name if value.kind == "weight" and value.constant is None else f"{self.prefix}{value.name}"
            tensors = []
            for form in forms:
                placed = self.module.tensor(name, value, form, reuse=value.kind == "weight" and value.constant is None)
                self.buffers[number, form] = _Buffer(placed.slab, value.dtype, placed)
                tensors.append(placed)
                if value.constant is not None:
                    self.module.constants.append((placed, value.constant))
            if value.param is not None:
                before = inputs[value.param].tensors if value.param in inputs else ()
                inputs[value.param] = Argument(value.name, value.whole, value.dtype, value.kind, (*before, *tensors))
        for count in self.graph.counts:
            inputs[count.position] = Argument(count.name, count.extents, "int64", count.kind, ())
        return [inputs[param] for param in sorted(inputs)]

    def _result(self, spot: Spot) -> Placed:
        """The tensor in which a result is left."""
        buffer = self.buffers[spot]
        if buffer.placed is None:
            target = self._own_tensor(spot)
            func = taking(
                exprs(buffer.shape), buffer.dtype, None, None, "", self.module.mesh, self.module.axis, SLAB,
                self.module.page, self.module.ranks[self.module.axis],
            )  # fmt: skip
            self._touched([(target, SLAB, True)])
            self._start(func, "copied", [self._expr(buffer, SLAB)], [self._expr(target, SLAB)])
            self.buffers[spot] = buffer = target
        assert buffer.placed is not None
        self._view(buffer.placed, SLAB)
        return buffer.placed

    def _own_tensor(self, spot: Spot) -> _Buffer:
        value = self.graph.values[spot[0]]
        placed = self.module.tensor(f"{self.prefix}{value.name}", value, spot[1])
        return _Buffer(placed.slab, value.dtype, placed)

    def _new(self, spot: Spot) -> _Buffer:
        """Memory for a value in a form: a tensor of the mesh if peers touch it or it is a result, else the device's."""
        value, form = self.graph.values[spot[0]], spot[1]
        shape = form.local(value.shape)
        if spot in self.results:
            found = self._own_tensor(spot)
        elif spot in self.crossing:
            free = self.slots.setdefault((shape, value.dtype), [])
            placed = free.pop() if free else self.module.tensor(f"{self.prefix}{value.name}", value, form)
            found = _Buffer(shape, value.dtype, placed)
        else:
            allocated = relax.op.builtin.alloc_tensor(relax.ShapeExpr(exprs(shape)), value.dtype, 0)
            found = _Buffer(shape, value.dtype, var=self.builder.emit(allocated))
        self.buffers[spot] = found
        return found

    def _released(self, at: int) -> None:
        """Give back the tensors of the mesh of which this was the last use."""
        for spot in self.last.get(at, ()):
            buffer = self.buffers.get(spot)
            if buffer is None or buffer.placed is None or spot in self.results:
                continue
            root = self.roots.get(spot, spot)
            # In the place of a result or of what the caller brings nothing else may be left.
            if spot in self.crossing and root not in self.results and self.graph.values[root[0]].kind == "value":
                self.slots[buffer.shape, buffer.dtype].append(buffer.placed)
                del self.buffers[spot]

    # ---- Steps

    def _done(self, step: Step) -> None:
        if step.func is None and not step.kind:
            assert step.node is not None  # it is the model's
            if attends(step.node.value):
                self._attended(step, step.node)
            elif step.node.cache is not None:
                self._cached(step.node.cache, step.node.makes, [self.buffers[spot] for spot in step.ins])
            else:
                self._other(step.node, [self.buffers[spot] for spot in step.ins])
            return
        if step.kind == JOIN:
            self._joined([self.buffers[spot] for spot in step.outs])
            return
        for spot in step.outs[len(step.over) :]:
            self._new(spot)
        for old, new in zip(step.over, step.outs):
            self.buffers[new] = buffer = self.buffers[old]
            if buffer.placed is not None:
                self.overwritten[buffer.placed.name] = None
        touches = [(self.buffers[each.spot], each.view, each.writes) for each in step.touches()]
        self._touched(touches)
        given = [self._expr(buffer, view) for buffer, view, _ in touches]
        if step.func is not None:
            self._start(step.func, step.name, given[: len(step.ins)], given[len(step.ins) :])
            return
        assert step.transfer is not None  # it is a collective
        if step.kind == COPIES:
            self._sent(step, given, touches)
            return
        arguments = [*given, *(relax.prim_value(number) for number in numbers_of(step))]
        arguments.append(tvm.ir.StringImm(step.transfer.axis))
        self.builder.emit(relax.Call(relax.ExternFunc(f"axe.{step.kind}"), arguments, ty_args=[relax.TupleType([])]))

    def _sent(self, step: Step, given: Sequence[relax.Expr], touches: Sequence[tuple[_Buffer, str, bool]]) -> None:
        """Tell the side stream the copies of a step, of which nothing is known to be there until they are joined."""
        assert step.transfer is not None  # it is of a collective
        axis, result = tvm.ir.StringImm(step.transfer.axis), relax.TupleType([])
        self._packed("axe.fork", [relax.prim_value(0)], result)
        for numbers in step.copies:
            self._packed("axe.copy", [*given, *map(relax.prim_value, numbers), axis], result)
        for buffer, _, writes in touches:
            if writes and buffer.placed is not None:
                self.marks[buffer.placed.name].discard("peers written")

    def _joined(self, buffers: Sequence[_Buffer]) -> None:
        """What follows comes behind the copies: what peers have sent is there behind the next barrier."""
        self._packed("axe.join", [relax.prim_value(0)], relax.TupleType([]))
        for buffer in buffers:
            assert buffer.placed is not None  # peers write it
            self.marks.setdefault(buffer.placed.name, set()).add("peers written")

    def _start(self, func: tirx.PrimFunc, name: str, ins: Sequence[relax.Expr], outs: Sequence[relax.Expr]) -> None:
        """Call a function of tensors, of the device's coordinates that it uses, and of sizes that it must be told."""
        if (func, len(ins)) not in self.started:
            ranks = self.module.ranks
            whole, sizes = with_own_sizes(func, list(self.graph.sizes.values()))
            whole, asked = with_coordinates(whole, len(ins), list(ranks.values()))
            own = [var for axis, var in self.coordinates.items() if any(ranks[axis].same_as(it) for it in asked)]
            self.started[func, len(ins)] = self.module.kernel(whole, name), own, sizes
        kernel, own, sizes = self.started[func, len(ins)]
        self.builder.emit(relax.Call(kernel, [*ins, *own, *outs, *sizes]))

    def _other(self, node: Node, ins: Sequence[_Buffer]) -> None:
        """A call of something else than TensorIR, on whole values."""
        self._touched([(buffer, SLAB, False) for buffer in ins])
        replaced = self._replacing(node, ins)
        value = node.value
        assert isinstance(value, relax.Call)  # it is a call of the model
        call = relax.Call(value.op, [replaced(each) for each in value.args], value.attrs, value.ty_args)
        made = self.builder.emit(call)
        for at, number in enumerate(node.outs):
            of = self.graph.values[number]
            var = self.builder.emit(relax.TupleGetItem(made, at)) if node.fields else made
            self.buffers[number, WHOLE] = _Buffer(of.shape, of.dtype, var=var)

    def _replacing(self, node: Node, ins: Sequence[_Buffer]) -> Callable[[relax.Expr], relax.Expr]:
        """What makes of a call's arguments, in order, those on the device."""
        given = iter([self._expr(buffer, SLAB) for buffer in ins])
        objects = iter([self._object(name) for name in node.takes])

        def replaced(value: relax.Expr) -> relax.Expr:
            if isinstance(value, relax.Tuple):
                return relax.Tuple([replaced(each) for each in value.fields])
            if isinstance(value, relax.Var) and isinstance(value.ty, relax.AnyType):
                return next(objects)
            if isinstance(value, tvm.ir.GenericConst) or (isinstance(value, relax.Var) and not _is_scalar(value)):
                return next(given)
            return value

        return replaced

    # ---- Objects

    def _object(self, name: str) -> relax.Var:
        """The device's own of an object: what this function has made, or the worker has kept."""
        if name not in self.objects:
            self.objects[name] = self._packed("axe.kept", [self.places[name]], relax.AnyType())
        return self.objects[name]

    def _attended(self, step: Step, node: Node) -> None:
        """Attention over a cache, of the device's heads, to where these are to be."""
        assert isinstance(node.value, relax.Call)  # it is attention
        for spot in step.outs:
            self._new(spot)
        ins, outs = ([self.buffers[spot] for spot in spots] for spots in (step.ins, step.outs))
        self._touched([*((buffer, SLAB, False) for buffer in ins), *((buffer, SLAB, True) for buffer in outs)])
        name, given = node.value.args
        replaced = self._replacing(node, ins)
        arguments = [*map(replaced, given.fields), *(self._expr(buffer, SLAB) for buffer in outs)]
        self._packed(str(name.global_symbol), arguments, relax.TupleType([]))

    def _cached(self, cache: Cache, name: str, ins: Sequence[_Buffer]) -> None:
        """Make the device's cache, and keep it."""
        self._touched([(buffer, SLAB, False) for buffer in ins])
        (empty,) = [self._expr(buffer, SLAB) for buffer in ins]
        axes = [self.module.mesh[axis] for axis in self.module.ranks]
        self.objects[name] = self.builder.emit(cache.of_device(axes, self.module.kernel, empty))
        self._packed("axe.keep", [self.places[name], self.objects[name]], relax.TupleType([]))

    def _packed(self, name: str, arguments: Sequence[relax.Expr], result: tvm.ir.Type) -> relax.Var:
        return self.builder.emit(relax.Call(relax.ExternFunc(name), arguments, ty_args=[result]))

    # ---- Memory

    def _touched(self, touches: Sequence[tuple[_Buffer, str, bool]]) -> None:
        """Have a barrier first if what was done since the last one must be done before this, by other devices.

        What a call does itself is done behind the barrier that it needs, whichever of its tensors it needs it for.
        """
        done = [
            (self.marks.setdefault(buffer.placed.name, set()), "written" if writes else "read", view != SLAB)
            for buffer, view, writes in touches
            if buffer.placed is not None
        ]
        if any(marks & _waits(what, peers) for marks, what, peers in done):
            self.builder.emit(relax.Call(relax.ExternFunc("axe.barrier"), [], ty_args=[relax.TupleType([])]))
            for each in self.marks.values():
                each.clear()
        for marks, what, peers in done:
            marks.add(f"peers {what}" if peers else what)

    def _expr(self, buffer: _Buffer, view: str) -> relax.Expr:
        if buffer.placed is None:
            assert buffer.var is not None
            return buffer.var
        return self._view(buffer.placed, view)

    def _view(self, placed: Placed, view: str) -> relax.Var:
        key = placed.name, view
        if key not in self.views:
            name = re.sub(r"\W", "_", placed.name if view == SLAB else f"{placed.name}_{view}")
            shape = view_shape(self.module.mesh, view, exprs(placed.slab))
            self.views[key] = relax.Var(name, relax.TensorType(list(shape), placed.dtype))
        return self.views[key]


def _waits(what: str, peers: bool) -> set[str]:
    """What must have been done on all devices before one reads or writes its own slab, or its peers'."""
    if peers:
        return {"written", "peers written"} if what == "read" else {"read", "written", "peers read", "peers written"}
    return {"peers written"} if what == "read" else {"peers read", "peers written"}


def _is_scalar(value: relax.Var) -> bool:
    return not isinstance(value.ty, relax.TensorType | relax.TupleType)
