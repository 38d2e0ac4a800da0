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

from tvm_axe.collective import SLAB
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.lower.shares import with_coordinates
from tvm_axe.lower.taking import taking
from tvm_axe.lower.views import view_shape
from tvm_axe.relax.chosen import Choice, Chosen, Moved
from tvm_axe.relax.forms import EXCHANGE, SLICE, WHOLE, Form, Forms
from tvm_axe.relax.graph import Node, Value
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.transfers import Transfer

__all__ = ["Argument", "DeviceFunction", "DeviceModule", "Placed", "device_module"]

_PUSHES = {Collective.ALL_GATHER.operation, Collective.ALL_REDUCE.operation}
"""The collectives by which devices write to their peers' slabs of the target."""


@dataclass(frozen=True)
class Placed:
    """A tensor of the mesh: a value in a form along each axis, of which each device has a slab."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    forms: Forms

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape of a slab."""
        shape = self.shape
        for _, form in self.forms:
            shape = form.local(shape)
        return shape

    @property
    def shown(self) -> str:
        """Its forms as text: of several axes each with its name, those along which all is held left out."""
        if len(self.forms) == 1:
            return str(self.forms[0][1])
        return " ".join(f"{axis}:{form}" for axis, form in self.forms if form != WHOLE) or str(WHOLE)


@dataclass(frozen=True)
class Argument:
    """What a function of the model takes or has as a constant: a whole array, and the tensors that it is put into."""

    name: str
    shape: tuple[int, ...]
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
    arguments : tuple of (str, str)
        What the device's function is called with: tensors of the mesh by name, each with the view of it; its
        coordinates come behind them.
    levels : tuple[Chosen, ...]
        How values are shared along each axis, of what the outer ones leave.
    """

    name: str
    inputs: tuple[Argument, ...]
    results: tuple[Placed, ...]
    arguments: tuple[tuple[str, str], ...]
    levels: tuple[Chosen, ...]

    @property
    def chosen(self) -> Chosen:
        """What a device does at last: how what the outer axes leave is shared along the innermost one."""
        return self.levels[-1]


@dataclass(frozen=True)
class DeviceModule:
    """What each device runs of a model.

    Attributes
    ----------
    module : IRModule
        The functions, with the kernels that they call.
    mesh : Mesh
        The devices.
    coordinates : tuple[str, ...]
        The axes along which they share, of which a function takes the device's coordinates behind its tensors.
    functions : Mapping[str, DeviceFunction]
        By name.
    tensors : Mapping[str, Placed]
        All tensors of the mesh.
    constants : tuple of (Placed, Tensor)
        Those that are filled once, with what they hold.
    """

    module: tvm.IRModule
    mesh: Mesh
    coordinates: tuple[str, ...]
    functions: Mapping[str, DeviceFunction]
    tensors: Mapping[str, Placed]
    constants: tuple[tuple[Placed, tvm.runtime.Tensor], ...]


def device_module(
    chosen: Sequence[Sequence[Chosen]], operators: Sequence[Operators], mesh: Mesh, page: int
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
    """
    return _Module(chosen, operators, mesh, page).made()


class _Module:
    def __init__(
        self, chosen: Sequence[Sequence[Chosen]], operators: Sequence[Operators], mesh: Mesh, page: int
    ) -> None:
        self.chosen, self.operators, self.axis = chosen, operators[-1], operators[-1].axis
        self.mesh, self.page = mesh, page
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
        return DeviceModule(module, self.mesh, tuple(self.ranks), functions, self.tensors, constants)

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

    value: int
    form: Form
    shape: tuple[int, ...]
    dtype: str
    placed: Placed | None = None
    var: relax.Var | None = None
    marks: set[str] = field(default_factory=set)
    """What has been done to it since the last barrier: "read" or "written", by the device or by its "peers"."""


class _Function:
    def __init__(self, module: _Module, levels: Sequence[Chosen]) -> None:
        self.module, self.levels, self.chosen, self.graph = module, tuple(levels), levels[-1], levels[-1].graph
        self.builder = module.builder
        self.buffers: dict[tuple[int, Form], _Buffer] = {}
        self.views: dict[tuple[str, str], relax.Var] = {}
        self.slots: dict[tuple[tuple[int, ...], str], list[Placed]] = {}
        self.marks: dict[str, set[str]] = {}
        self.coordinates = {name: relax.Var(name, tvm.ir.PrimType("int64")) for name in module.ranks}
        self.prefix = "" if len(module.chosen) == 1 else f"{self.graph.name}."
        self.last = self._last_uses()
        self.crossing = self._crossing()

    # ---- What is needed

    def _crossing(self) -> set[tuple[int, Form]]:
        """What peers read or write."""
        found = set()
        for choice in self.chosen.choices:
            moves = [((each.value, each.source), (each.value, each.target), each.how.kind) for each in choice.moves]
            node, strategy = choice.node, choice.strategy
            if choice.transfer is not None:
                kind = choice.transfer.how(self.chosen.link).kind
                moves.append(((node.ins[0], strategy.ins[0]), (node.outs[0], strategy.outs[0]), kind))
            for source, target, kind in moves:
                if kind != SLICE:
                    found.add(source)
                    if kind in _PUSHES:
                        found.add(target)
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
        with self.builder.function(graph.name, pure=False):
            for at, choice in enumerate(self.chosen.choices):
                for each in choice.moves:
                    self._move(each)
                self._call(choice)
                self._released(at)
            for number, form in zip(graph.results, self.chosen.results):
                results.append(self._result(number, form))
            params = [*self.views.values(), *self.coordinates.values()]
            self.builder.emit_func_output(relax.Tuple([]), params)
        return DeviceFunction(graph.name, tuple(inputs), tuple(results), tuple(self.views), self.levels)

    def _declared(self) -> list[Argument]:
        """Place what the function takes, and its constants."""
        inputs: dict[int, Argument] = {}
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
            if value.param is not None:
                before = inputs[value.param].tensors if value.param in inputs else ()
                inputs[value.param] = Argument(value.name, value.whole, value.dtype, value.kind, (*before, *tensors))
        return [inputs[param] for param in sorted(inputs)]

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
            allocated = relax.op.builtin.alloc_tensor(relax.ShapeExpr(list(shape)), value.dtype, 0)
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
        if node.pins is not None:
            return  # what pins a value has moved it
        if choice.transfer is None and node.func is None:
            self._other(node, ins)
            return
        outs = [self._new(value, form) for value, form in zip(node.outs, strategy.outs)]
        if choice.transfer is not None:
            self._transferred(choice.transfer, ins[0], outs[0])
        else:
            self._kernel(self.module.operators.local(node, strategy), _name_of(node), ins, outs)

    def _kernel(
        self, func: tirx.PrimFunc, name: str, ins: Sequence[_Buffer], outs: Sequence[_Buffer], view: str = SLAB
    ) -> None:
        for buffer in ins:
            self._touched(buffer, "read", view != SLAB)
        for buffer in outs:
            self._touched(buffer, "written", False)
        ranks = self.module.ranks
        func, asked = with_coordinates(func, len(ins), list(ranks.values()))
        kernel = self.module.kernel(func, name)
        arguments = [self._expr(buffer, view) for buffer in ins]
        arguments += [var for axis, var in self.coordinates.items() if any(ranks[axis].same_as(it) for it in asked)]
        self.builder.emit(relax.Call(kernel, [*arguments, *(self._expr(buffer, SLAB) for buffer in outs)]))

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
        assert isinstance(value, relax.Call)  # it is a call of the model
        call = relax.Call(value.op, [replaced(each) for each in value.args], value.attrs, value.ty_args)
        made = self.builder.emit(call)
        for at, number in enumerate(node.outs):
            of = self.graph.values[number]
            var = self.builder.emit(relax.TupleGetItem(made, at)) if node.fields else made
            self.buffers[number, WHOLE] = _Buffer(number, WHOLE, of.shape, of.dtype, var=var)

    # ---- Moves

    def _move(self, each: Moved) -> None:
        value, operators = self.graph.values[each.value], self.module.operators
        itemsize = max(1, dtype_bytes(value.dtype, 1))
        transfer = Transfer(self.module.axis, each.source, each.target, value.shape, itemsize, operators.devices)
        self._transferred(transfer, self.buffers[each.value, each.source], self._new(each.value, each.target))

    def _transferred(self, transfer: Transfer, source: _Buffer, target: _Buffer) -> None:
        """Move a value along an axis."""
        kind, axis = transfer.how(self.chosen.link).kind, transfer.axis
        if kind in (SLICE, EXCHANGE):
            self._taken(transfer, source, target, SLAB if kind == SLICE else axis)
            return
        source_view = SLAB if kind == Collective.ALL_GATHER.operation else axis
        target_view = axis if kind in _PUSHES else SLAB
        self._touched(source, "read", source_view != SLAB)
        self._touched(target, "written", target_view != SLAB)
        numbers: list[int] = []
        if kind in (Collective.ALL_GATHER.operation, Collective.ALL_TO_ALL.operation):
            numbers.append(_dim(transfer.source))
        if kind in (Collective.REDUCE_SCATTER.operation, Collective.ALL_TO_ALL.operation):
            numbers.append(_dim(transfer.target))
        arguments = [self._expr(source, source_view), self._expr(target, target_view)]
        arguments += [relax.prim_value(number) for number in numbers]
        arguments.append(tvm.ir.StringImm(axis))
        self.builder.emit(relax.Call(relax.ExternFunc(f"axe.{kind}"), arguments, ty_args=[relax.TupleType([])]))

    def _taken(self, transfer: Transfer, source: _Buffer, target: _Buffer, view: str) -> None:
        forms = transfer.source, transfer.target
        cuts = [None if form.share is None or form.dim is None else (form.dim, form.share) for form in forms]
        func = taking(
            transfer.shape, source.dtype, cuts[0], cuts[1], transfer.source.partial, self.module.mesh, transfer.axis,
            view, self.module.page, self.module.ranks[transfer.axis],
        )  # fmt: skip
        self._kernel(func, f"{self.graph.values[source.value].name}_taken", [source], [target], view)

    def _copied(self, source: _Buffer, target: _Buffer) -> None:
        func = taking(
            source.shape,
            source.dtype,
            None,
            None,
            "",
            self.module.mesh,
            self.module.axis,
            SLAB,
            self.module.page,
        )
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
            shape = view_shape(self.module.mesh, view, placed.slab)
            self.views[key] = relax.Var(name, relax.TensorType(list(shape), placed.dtype))
        return self.views[key]


def _name_of(node: Node) -> str:
    assert isinstance(node.value, relax.Call)  # a transfer has a kernel of another name
    return str(node.value.args[0].name_hint)


def _dim(form: Form) -> int:
    assert form.dim is not None  # collectives deal out what is shared
    return form.dim


def _is_scalar(value: relax.Var) -> bool:
    return not isinstance(value.ty, relax.TensorType | relax.TupleType)
