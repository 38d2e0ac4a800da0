"""What a user pins of a model becomes one thing: parameters that say so, and calls of `PINNED` behind variables.

A value is pinned by its name, parameters and the variables of the code alike; by upstream's `R.DTensor` types; and by
`R.dist.annotate_sharding` and `R.dist.redistribute` in the module. Passes keep a call of `PINNED`, operators aren't
fused across it, and once forms are chosen it is nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

import tvm
from tvm import ir, relax, tirx
from tvm.relax.distributed import DTensorType, Placement

from tvm_axe.errors import InputError
from tvm_axe.relax.placements import UNKNOWN, Dims, Over, Pin

__all__ = ["PINNED", "dims_of", "pinned"]

PINNED = "axe.pinned"
"""What is called of a value that is pinned, with the dimensions by axes as JSON."""
_ANNOTATE, _REDISTRIBUTE = "relax.dist.annotate_sharding", "relax.dist.redistribute"
_DISTRIBUTED = "relax.dist."


def dims_of(value: relax.Expr) -> Dims | None:
    """What a call of `PINNED` pins; None of any other."""
    is_one = isinstance(value, relax.Call) and len(value.args) == 3 and isinstance(value.args[0], relax.ExternFunc)
    if not is_one or str(value.args[0].global_symbol) != PINNED:
        return None
    return dict(json.loads(str(value.args[2].value)))


def pinned(model: tvm.IRModule, pins: Mapping[str, Pin], over: Over) -> tuple[tvm.IRModule, dict[str, dict[int, Dims]]]:
    """Return the model with what is pinned as calls of `PINNED`, and the pins of parameters, by function and number.

    Parameters
    ----------
    model : IRModule
        The model, distributed tensors and annotations of upstream among its values or not.
    pins : mapping
        By patterns of names: of parameters, or if they match none of the variables of the code.
    over : Over
        The axes along which it is shared.

    Raises
    ------
    InputError
        If a pattern is of no value, two pins differ about one, or one asks for what can't be; names the pins, the
        value, and what is valid.
    """
    functions = {
        str(variable.name_hint): func
        for variable, func in model.functions_items()
        if isinstance(func, relax.Function) and "Primitive" not in (func.attrs or {})
    }
    found = {name: _Pins(name, over) for name in functions}
    for name, func in functions.items():
        for var in [*func.params, *_variables(func)]:
            found[name].typed(var)
    for pattern, pin in pins.items():
        _spread(pattern, pin, functions, found)
    module, parameters = model.clone(), {}
    for name, func in functions.items():
        if found[name].matter_to(func):
            module[model.get_global_var(name)] = _Plain(func, found[name]).function
        parameters[name] = {at: dims for at, param in enumerate(func.params) if (dims := found[name].of(param))}
    return module, parameters


def _spread(pattern: str, pin: Pin, functions: Mapping[str, relax.Function], found: Mapping[str, _Pins]) -> None:
    """Pin the parameters that a pattern names, or if it names none the variables."""
    kinds: list[Callable[[relax.Function], Sequence[relax.Var]]] = [lambda func: func.params, _variables]
    for of in kinds:
        hits = [(name, var) for name, func in functions.items() for var in of(func) if fnmatchcase(var.name, pattern)]
        for name, var in hits:
            found[name].ask(var, pin, f"pin {pattern!r}")
        if hits:
            return
    names = ", ".join(dict.fromkeys(param.name for func in functions.values() for param in func.params))
    raise InputError(f"pin {pattern!r} is of no parameter and no variable; there are {names}, and what the code binds")


def _variables(func: relax.Function) -> list[relax.Var]:
    blocks = func.body.blocks if isinstance(func.body, relax.SeqExpr) else []
    return [binding.var for block in blocks for binding in block.bindings]


class _Pins:
    """What the values of a function are pinned to, and by what."""

    def __init__(self, function: str, over: Over) -> None:
        self.function, self.over = function, over
        self._found: dict[relax.Var, dict[str, tuple[int | None, str]]] = {}

    def ask(self, var: relax.Var, pin: Pin, by: str) -> None:
        """Pin a value to what a user says of it."""
        self.add(var, self.over.read(var.name, pin, self.shape(var, by), by), by)

    def placed(self, var: relax.Var, of: DTensorType | ir.Attrs, by: str) -> Dims:
        """What upstream says of a value: in a type, or in a call's attributes."""
        return self.over.placed(var.name, of.device_mesh, of.placement, self.shape(var, by), by)

    def typed(self, var: relax.Var) -> None:
        """Pin a value of which the type says how it is distributed."""
        if isinstance(var.ty, DTensorType):
            by = f"R.DTensor(..., {_shown(var.ty.placement)!r}) of {var.name!r}"
            self.add(var, self.placed(var, var.ty, by), by)

    def add(self, var: relax.Var, dims: Dims, by: str) -> None:
        """Pin a value; an InputError that names both pins if another one differs."""
        known = self._found.setdefault(var, {})
        for axis, dim in dims.items():
            there, other = known.setdefault(axis, (dim, by))
            if there != dim:
                raise InputError(
                    f"{self.function}: {other} and {by} differ about {var.name}: along {axis} one shares "
                    f"{_said(there)}, the other {_said(dim)}; leave one out"
                )

    def of(self, var: relax.Var) -> Dims:
        """What a value is pinned to."""
        return {axis: dim for axis, (dim, _) in self._found.get(var, {}).items()}

    def shape(self, var: relax.Var, by: str) -> list[int]:
        """The shape of a value that is to be pinned."""
        ty = var.ty.tensor_ty if isinstance(var.ty, DTensorType) else var.ty
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            raise InputError(
                f"{self.function}: {by}: {var.name} is a {type(ty).__name__}, and tensors of known shapes are pinned; "
                "pin what is taken from it, or made of it"
            )
        return [int(extent) if isinstance(extent, tirx.IntImm) else UNKNOWN for extent in ty.shape]

    def matter_to(self, func: relax.Function) -> bool:
        """Whether a function has variables that are pinned, or anything of upstream's distributed tensors."""
        values = [b.value for block in func.body.blocks for b in block.bindings if isinstance(b, relax.VarBinding)]
        calls = [value for value in values if isinstance(value, relax.Call) and isinstance(value.op, ir.Op)]
        variables = [*func.params, *_variables(func)]
        return (
            any(self._found.get(var) for var in _variables(func))
            or any(call.op.name.startswith(_DISTRIBUTED) for call in calls)
            or any(isinstance(var.ty, DTensorType) for var in variables)
        )


def _shown(placement: Placement) -> str:
    return str(placement).strip('"')


def _said(dim: int | None) -> str:
    return "nothing" if dim is None else f"dimension {dim}"


class _Plain:
    """A function as one of whole tensors, with calls of `PINNED`."""

    def __init__(self, func: relax.Function, pins: _Pins) -> None:
        self.pins, self.builder = pins, relax.BlockBuilder()
        self.new: dict[relax.Var, relax.Expr] = {}
        params = []
        for var in func.params:
            self.new[var] = relax.Var(var.name, _plain(var.ty))
            params.append(self.new[var])
        name = pins.function
        with self.builder.function(name, params, attrs=dict(func.attrs.items()) if func.attrs else {}):
            for block in func.body.blocks:
                if isinstance(block, relax.DataflowBlock):
                    with self.builder.dataflow():
                        self.block(block)
                else:
                    self.block(block)
            self.builder.emit_func_output(self.expr(func.body.body))
        self.function = self.builder.get()[name]

    def block(self, block: relax.BindingBlock) -> None:
        for binding in block.bindings:
            var = binding.var
            if not isinstance(binding, relax.VarBinding) or isinstance(binding.value, relax.If):
                raise InputError(
                    f"{self.pins.function}: {var.name} is bound by a {type(binding).__name__}; values are pinned in "
                    "straight-line code: pin parameters alone, or lift what branches out of the function"
                )
            value = self.bound(binding)
            is_output = isinstance(block, relax.DataflowBlock) and not isinstance(var, relax.DataflowVar)
            emit = self.builder.emit_output if is_output else self.builder.emit
            self.new[var] = emit(value, name_hint=var.name)

    def bound(self, binding: relax.VarBinding) -> relax.Expr:
        """The value of a variable, pinned if the variable is."""
        var, value = binding.var, binding.value
        name = value.op.name if isinstance(value, relax.Call) and isinstance(value.op, ir.Op) else ""
        if name in (_ANNOTATE, _REDISTRIBUTE):
            by = f"R.{name.removeprefix('relax.')}({_shown(value.attrs.placement)!r}) in {var.name!r}"
            self.pins.add(var, self.pins.placed(var, value.attrs, by), by)
            source = value.args[0]
            if name == _ANNOTATE and isinstance(source, relax.Var):
                self.pins.add(source, self.pins.of(var), by)  # it is the same value
            made = self.expr(source)
        elif name.startswith(_DISTRIBUTED) and name != f"{_DISTRIBUTED}call_tir":
            raise InputError(
                f"{self.pins.function}: {var.name} is bound by R.{name.removeprefix('relax.')}, which is of what a "
                "device does; give the model before it is lowered, with its annotations"
            )
        else:
            made = self.expr(value)
        dims = self.pins.of(var)
        if not dims:
            return made
        made = self.builder.normalize(made)
        made = made if isinstance(made, relax.Var) else self.builder.emit(made)
        return relax.op.call_pure_packed(PINNED, made, ir.StringImm(json.dumps(dims)), ty_args=[made.ty])

    def expr(self, value: relax.Expr) -> relax.Expr:
        """An expression of the new variables, of plain tensors."""
        if isinstance(value, relax.Var):
            return self.new.get(value, value)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self.expr(each) for each in value.fields])
        if isinstance(value, relax.TupleGetItem):
            return relax.TupleGetItem(self.expr(value.tuple_value), value.index)
        if isinstance(value, relax.Call):
            op = ir.Op.get("relax.call_tir") if _is_distributed_tir(value) else value.op
            return relax.Call(op, list(map(self.expr, value.args)), value.attrs, list(map(_plain, value.ty_args)))
        if isinstance(value, ir.GenericConst) and isinstance(value.ty, DTensorType):
            return relax.const(value.value)
        return value


def _is_distributed_tir(value: relax.Call) -> bool:
    return isinstance(value.op, ir.Op) and value.op.name == f"{_DISTRIBUTED}call_tir"


def _plain(ty: ir.Type) -> ir.Type:
    """A type of plain tensors."""
    if isinstance(ty, DTensorType):
        return ty.tensor_ty
    return relax.TupleType(list(map(_plain, ty.fields))) if isinstance(ty, relax.TupleType) else ty
