"""The module that each device runs of a shared model: its functions on slabs, with what moves values between them.

A function takes tensors of the mesh, which the caller allocates: its inputs and weights in the forms that were chosen,
its results, and what its peers read or write. All else a device has for itself, under Relax's memory planning. Barriers
stand where one device touches what another has written, or still reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_axe.collective import ALL, SLAB
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.shares import shared
from tvm_axe.lower.taking import taking
from tvm_axe.lower.views import view_shape
from tvm_axe.relax.choosing import Choice, Chosen, Moved, Operators
from tvm_axe.relax.forms import EXCHANGE, SLICE, WHOLE, Form
from tvm_axe.relax.graph import Node, Value
from tvm_axe.relax.sizes import Shape, exprs

__all__ = ["Argument", "DeviceFunction", "DeviceModule", "Placed", "device_module"]

_PUSHES = {Collective.ALL_GATHER.operation, Collective.ALL_REDUCE.operation}
"""The collectives by which devices write to their peers' slabs of the target."""


@dataclass(frozen=True)
class Placed:
    """A tensor of the mesh: a value in a form, of which each device has a slab."""

    name: str
    shape: Shape
    dtype: str
    form: Form

    @property
    def slab(self) -> Shape:
        """The shape of a slab."""
        return self.form.local(self.shape)


@dataclass(frozen=True)
class Argument:
    """What a function of the model takes or has as a constant: a whole array, and the tensors that it is put into.

    What is a ``"shape"`` or a ``"number"`` instead, by its `kind`, is in no tensor.
    """

    name: str
    shape: Shape
    dtype: str
    kind: str
    tensors: tuple[Placed, ...]


@dataclass(frozen=True)
class DeviceFunction:
    """A function of the device's module.

    Attributes
    ----------
    name : str
        Its name, in the model and in the module.
    inputs : tuple[Argument, ...]
        What the model's function takes.
    results : tuple[Placed, ...]
        What it leaves, in the model's order.
    sizes : tuple[str, ...]
        The sizes that shapes are counted in: what the device's function is called with first.
    most : Mapping[str, int]
        Upper bounds of sizes, by name, of those that have one.
    arguments : tuple of (str, str)
        What it is called with then: tensors of the mesh by name, each with the view of it; its coordinates come behind
        them.
    chosen : Chosen
        How values are shared.
    checks : tuple of (Shape, Shape, str)
        Shapes that are to be others, with the variable that this is said of.
    """

    name: str
    inputs: tuple[Argument, ...]
    results: tuple[Placed, ...]
    sizes: tuple[str, ...]
    most: Mapping[str, int]
    arguments: tuple[tuple[str, str], ...]
    chosen: Chosen
    checks: tuple[tuple[Shape, Shape, str], ...] = ()


@dataclass(frozen=True)
class DeviceModule:
    """What each device runs of a model.

    Attributes
    ----------
    module : IRModule
        The functions, with the kernels that they call.
    mesh, axis
        The devices, and the axis along which they share, ``"*"`` for all of them.
    coordinates : tuple[str, ...]
        The axes of which a function takes the device's coordinates, behind its tensors.
    functions : Mapping[str, DeviceFunction]
        By name.
    tensors : Mapping[str, Placed]
        All tensors of the mesh.
    constants : tuple of (Placed, Tensor)
        Those that are filled once, with what they hold.
    """

    module: tvm.IRModule
    mesh: Mesh
    axis: str
    coordinates: tuple[str, ...]
    functions: Mapping[str, DeviceFunction]
    tensors: Mapping[str, Placed]
    constants: tuple[tuple[Placed, tvm.runtime.Tensor], ...]


def device_module(
    chosen: Sequence[Chosen], model: tvm.IRModule, operators: Operators, mesh: Mesh, axis: str, page: int
) -> DeviceModule:
    """The module of a device of a model whose functions were chosen.

    Parameters
    ----------
    chosen : Sequence[Chosen]
        Of each function.
    model : IRModule
        What they were read from.
    operators : Operators
        What they were chosen by.
    mesh, axis
        The devices, and the axis along which they share.
    page : int
        Bytes of a page of the devices' memory.
    """
    return _Module(chosen, model, operators, mesh, axis, page).made()


class _Module:
    def __init__(
        self, chosen: Sequence[Chosen], model: tvm.IRModule, operators: Operators, mesh: Mesh, axis: str, page: int
    ) -> None:
        self.chosen, self.model, self.operators = chosen, model, operators
        self.mesh, self.axis, self.page = mesh, axis, page
        self.coordinates = mesh.names if axis == ALL else (axis,)
        self.builder = relax.BlockBuilder()
        self.tensors: dict[str, Placed] = {}
        self.constants: list[tuple[Placed, tvm.runtime.Tensor]] = []
        self.kernels: dict[int, list[tuple[tirx.PrimFunc, tvm.ir.GlobalVar]]] = {}

    def made(self) -> DeviceModule:
        functions = {}
        for each in self.chosen:
            function = _Function(self, each)
            functions[each.graph.name] = function.emitted()
        module, constants = self.builder.finalize(), tuple(self.constants)
        return DeviceModule(module, self.mesh, self.axis, self.coordinates, functions, self.tensors, constants)

    def tensor(self, name: str, value: Value, form: Form, reuse: bool = False) -> Placed:
        """A new tensor of the mesh; the one that is there of the same name and kind, if it may be."""
        base, count = name, 0
        while name in self.tensors:
            there = self.tensors[name]
            if reuse and (there.shape, there.dtype, there.form) == (value.shape, value.dtype, form):
                return there
            count += 1
            name = f"{base}_{count}"
        placed = Placed(name, value.shape, value.dtype, form)
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

    value: int
    form: Form
    shape: Shape
    dtype: str
    placed: Placed | None = None
    var: relax.Var | None = None
    marks: set[str] = field(default_factory=set)
    """What has been done to it since the last barrier: "read" or "written", by the device or by its "peers"."""


class _Function:
    def __init__(self, module: _Module, chosen: Chosen) -> None:
        self.module, self.chosen, self.graph = module, chosen, chosen.graph
        self.builder = module.builder
        self.buffers: dict[tuple[int, Form], _Buffer] = {}
        self.views: dict[tuple[str, str], relax.Var] = {}
        self.slots: dict[tuple[Shape, str], list[Placed]] = {}
        self.marks: dict[str, set[str]] = {}
        self.coordinates = {name: relax.Var(name, tvm.ir.PrimType("int64")) for name in module.coordinates}
        self.rank: tirx.Expr = tirx.IntImm("int64", 0)
        for name, var in self.coordinates.items():
            self.rank = var if len(self.coordinates) == 1 else self.rank * module.mesh[name] + var
        self.prefix = "" if len(module.chosen) == 1 else f"{chosen.graph.name}."
        self.last = self._last_uses()
        self.crossing = self._crossing()

    # ---- What is needed

    def _crossing(self) -> set[tuple[int, Form]]:
        """What peers read or write."""
        found = set()
        for choice in self.chosen.choices:
            for each in choice.moves:
                if each.how.kind != SLICE:
                    found.add((each.value, each.source))
                    if each.how.kind in _PUSHES:
                        found.add((each.value, each.target))
        return found

    def _last_uses(self) -> dict[tuple[int, Form], int]:
        found: dict[tuple[int, Form], int] = {}
        for at, choice in enumerate(self.chosen.choices):
            for each in choice.moves:
                found[each.value, each.source] = found[each.value, each.target] = at
            for value, form in zip(choice.node.ins, choice.strategy.ins):
                found[value, form] = at
        return found

    # ---- The function

    def emitted(self) -> DeviceFunction:
        graph = self.graph
        inputs, results = self._declared(), []
        attrs = {"tir_var_upper_bound": graph.most} if graph.most else None
        with self.builder.function(graph.name, attrs=attrs, pure=False):
            for at, choice in enumerate(self.chosen.choices):
                for each in choice.moves:
                    self._move(each)
                self._call(choice)
                self._released(at)
            for number, form in zip(graph.results, self.chosen.results):
                results.append(self._result(number, form))
            params = [*graph.sizes.values(), *self.views.values(), *self.coordinates.values()]
            self.builder.emit_func_output(relax.Tuple([]), params)
        return DeviceFunction(
            graph.name, tuple(inputs), tuple(results), tuple(graph.sizes), graph.most, tuple(self.views), self.chosen,
            tuple(graph.checks),
        )  # fmt: skip

    def _declared(self) -> list[Argument]:
        """Place what the function takes, and its constants."""
        inputs = {}
        taken = set(self.graph.params)
        for number, forms in self.chosen.held.items():
            value = self.graph.values[number]
            name = value.name if value.kind == "weight" and value.constant is None else f"{self.prefix}{value.name}"
            tensors = []
            for form in forms:
                placed = self.module.tensor(name, value, form, reuse=value.kind == "weight" and value.constant is None)
                self.buffers[number, form] = _Buffer(number, form, placed.slab, value.dtype, placed)
                tensors.append(placed)
                if value.constant is not None:
                    self.module.constants.append((placed, value.constant))
            if number in taken:
                inputs[number] = Argument(value.name, value.shape, value.dtype, value.kind, tuple(tensors))
        found = [inputs[number] for number in self.graph.params]
        for count in self.graph.counts:
            found.insert(count.position, Argument(count.name, count.extents, "int64", count.kind, ()))
        return found

    def _result(self, number: int, form: Form) -> Placed:
        """The tensor in which a result is left."""
        buffer = self.buffers[number, form]
        if buffer.placed is None:
            target = self._own_tensor(number, form)
            self._copied(buffer, target)
            self.buffers[number, form] = target
            buffer = target
        assert buffer.placed is not None
        self._view(buffer.placed, SLAB)
        return buffer.placed

    def _own_tensor(self, number: int, form: Form) -> _Buffer:
        value = self.graph.values[number]
        placed = self.module.tensor(f"{self.prefix}{value.name}", value, form)
        return _Buffer(number, form, placed.slab, value.dtype, placed)

    def _new(self, number: int, form: Form) -> _Buffer:
        """Memory for a value in a form: a tensor of the mesh if peers touch it or it is a result, else the device's."""
        value, key = self.graph.values[number], (number, form)
        shape = form.local(value.shape)
        if any(key == each for each in zip(self.graph.results, self.chosen.results)):
            found = self._own_tensor(number, form)
        elif key in self.crossing:
            free = self.slots.setdefault((shape, value.dtype), [])
            placed = free.pop() if free else self.module.tensor(f"{self.prefix}{value.name}", value, form)
            found = _Buffer(number, form, shape, value.dtype, placed)
        else:
            allocated = relax.op.builtin.alloc_tensor(relax.ShapeExpr(exprs(shape)), value.dtype, 0)
            found = _Buffer(number, form, shape, value.dtype, var=self.builder.emit(allocated))
        self.buffers[key] = found
        return found

    def _released(self, at: int) -> None:
        """Give back the tensors of the mesh of which this was the last use."""
        kept = {*zip(self.graph.results, self.chosen.results)}
        for key, last in self.last.items():
            buffer = self.buffers.get(key)
            if last != at or buffer is None or buffer.placed is None or key in kept or key not in self.crossing:
                continue
            if self.graph.values[key[0]].kind == "value":
                self.slots[buffer.shape, buffer.dtype].append(buffer.placed)
                del self.buffers[key]

    # ---- Calls

    def _call(self, choice: Choice) -> None:
        node, strategy = choice.node, choice.strategy
        ins = [self.buffers[value, form] for value, form in zip(node.ins, strategy.ins)]
        if node.func is None:
            self._other(node, ins)
            return
        operator = self.module.operators.of(node.func, len(node.ins), node.sizes)
        func = operator.func if not strategy.assigned else shared(
            operator.func, operator.rule, dict(strategy.assigned), self.module.operators.devices, operator.sizes
        )  # fmt: skip
        assert func is not None  # the strategy was made of shares
        outs = [self._new(value, form) for value, form in zip(node.outs, strategy.outs)]
        self._kernel(func, _name_of(node), ins, outs, numbers=dict(zip(operator.numbers, node.numbers)))

    def _kernel(
        self,
        func: tirx.PrimFunc,
        name: str,
        ins: Sequence[_Buffer],
        outs: Sequence[_Buffer],
        view: str = SLAB,
        numbers: Mapping[tirx.Var, tirx.Expr] | None = None,
    ) -> None:
        """Call a function of tensors, of the device's number if it takes that, and of `numbers` that it uses."""
        for buffer in ins:
            self._touched(buffer, "read", view != SLAB)
        for buffer in outs:
            self._touched(buffer, "written", False)
        asks = any(not tirx.is_buffer_var(param) for param in func.params)
        if numbers:
            func = tirx.PrimFunc([*func.params, *numbers], func.body, func.ret_type, func.attrs)
        arguments = [self._expr(buffer, view) for buffer in ins]
        arguments += [self.rank] if asks else []
        arguments += [self._expr(buffer, SLAB) for buffer in outs]
        self.builder.emit(relax.Call(self.module.kernel(func, name), [*arguments, *(numbers or {}).values()]))

    def _other(self, node: Node, ins: Sequence[_Buffer]) -> None:
        """A call of something else than TensorIR, on whole values."""
        for buffer in ins:
            self._touched(buffer, "read", False)
        given = iter([self._expr(buffer, SLAB) for buffer in ins])

        def replaced(value: relax.Expr) -> relax.Expr:
            if isinstance(value, relax.Tuple):
                return relax.Tuple([replaced(each) for each in value.fields])
            if isinstance(value, tvm.ir.GenericConst) or (isinstance(value, relax.Var) and not _is_scalar(value)):
                return next(given)
            return value

        value = node.value
        call = relax.Call(value.op, [replaced(each) for each in value.args], value.attrs, value.ty_args)
        made = self.builder.emit(call)
        for at, number in enumerate(node.outs):
            of = self.graph.values[number]
            var = self.builder.emit(relax.TupleGetItem(made, at)) if node.fields else made
            self.buffers[number, WHOLE] = _Buffer(number, WHOLE, of.shape, of.dtype, var=var)

    # ---- Moves

    def _move(self, each: Moved) -> None:
        source = self.buffers[each.value, each.source]
        target = self._new(each.value, each.target)
        kind = each.how.kind
        if kind in (SLICE, EXCHANGE):
            view = SLAB if kind == SLICE else self.module.axis
            self._taken(source, target, view)
            return
        source_view = SLAB if kind == Collective.ALL_GATHER.operation else self.module.axis
        target_view = self.module.axis if kind in _PUSHES else SLAB
        self._touched(source, "read", source_view != SLAB)
        self._touched(target, "written", target_view != SLAB)
        numbers: list[int] = []
        if kind in (Collective.ALL_GATHER.operation, Collective.ALL_TO_ALL.operation):
            numbers.append(_dim(each.source))
        if kind in (Collective.REDUCE_SCATTER.operation, Collective.ALL_TO_ALL.operation):
            numbers.append(_dim(each.target))
        arguments = [self._expr(source, source_view), self._expr(target, target_view)]
        arguments += [relax.prim_value(number) for number in numbers]
        arguments.append(tvm.ir.StringImm(self.module.axis))
        self.builder.emit(relax.Call(relax.ExternFunc(f"axe.{kind}"), arguments, ty_args=[relax.TupleType([])]))

    def _taken(self, source: _Buffer, target: _Buffer, view: str) -> None:
        value = self.graph.values[source.value]
        cuts = [None if f.share is None or f.dim is None else (f.dim, f.share) for f in (source.form, target.form)]
        func = taking(
            _extents(value.shape), value.dtype, cuts[0], cuts[1], source.form.partial, self.module.mesh,
            self.module.axis, view, self.module.page,
        )  # fmt: skip
        self._kernel(func, f"{value.name}_taken", [source], [target], view)

    def _copied(self, source: _Buffer, target: _Buffer) -> None:
        func = taking(
            _extents(source.shape), source.dtype, None, None, "", self.module.mesh, self.module.axis, SLAB,
            self.module.page,
        )  # fmt: skip
        self._kernel(func, "copied", [source], [target])

    # ---- Memory

    def _touched(self, buffer: _Buffer, what: str, peers: bool) -> None:
        """Have a barrier first if what was done since the last one must be done before this, by other devices."""
        if buffer.placed is None:
            return
        marks = self.marks.setdefault(buffer.placed.name, set())
        if peers and what == "read":
            waits = {"written", "peers written"}
        elif peers:
            waits = {"read", "written", "peers read", "peers written"}
        elif what == "read":
            waits = {"peers written"}
        else:
            waits = {"peers read", "peers written"}
        if marks & waits:
            barrier = relax.Call(relax.ExternFunc("axe.barrier"), [], ty_args=[relax.TupleType([])])
            self.builder.emit(barrier)
            for each in self.marks.values():
                each.clear()
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


def _name_of(node: Node) -> str:
    return str(node.value.args[0].name_hint)


def _dim(form: Form) -> int:
    assert form.dim is not None  # collectives deal out what is shared
    return form.dim


def _is_scalar(value: relax.Var) -> bool:
    return not isinstance(value.ty, relax.TensorType | relax.TupleType)


def _extents(shape: Shape) -> list[int | tirx.Expr]:
    return [extent if isinstance(extent, int) else extent.expr for extent in shape]
