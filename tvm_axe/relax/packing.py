"""What packs a model's weights, one function for each packed weight, which functions that agree have in common.

Upstream's `LiftTransformParams` makes one function for each of the model's, which takes all of its weights and returns
all that it makes of them: called, it has all of them twice, and nothing that two functions pack alike is packed once.
So each of its results becomes a function of its own beside it. ``prefill`` says by an attribute what it takes in the
place of its weights: ``{"axe.packed": ["norm.weight", "up.weight_packed", ...]}``, names of weights and of functions,
whose parameters are weights by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain, count
from typing import Any

import tvm_ffi
from tvm import relax
from tvm.ir import BaseFunc, GlobalVar, IRModule, Op

__all__ = ["Packed", "attached", "packed_weights", "with_packers", "with_weights", "without_weights"]

_PACKED = "axe.packed"
_TRANSFORM = "_transform_params"

Packed = tuple[str, tuple[str, ...]]
"""A function that packs, none where the name is empty, and the names of the weights that it takes."""


def packed_weights(module: IRModule) -> dict[str, tuple[Packed, ...]]:
    """What the functions of a module that `with_packers` made take in the places of their weights, by their names."""
    found = {}
    for variable, func in module.functions_items():
        if isinstance(func, relax.Function) and func.attrs and _PACKED in func.attrs:
            names = [str(name) for name in func.attrs[_PACKED]]
            found[str(variable.name_hint)] = tuple(_packed(module, name) for name in names)
    return found


def _packed(module: IRModule, name: str) -> Packed:
    packers = {str(variable.name_hint): func for variable, func in module.functions_items()}
    if name not in packers:
        return "", (name,)
    return name, tuple(str(param.name) for param in packers[name].params)


def attached(module: IRModule) -> dict[str, Any]:
    """The weights that a model's functions have brought along, by name.

    Upstream's importers attach them as the attribute ``params``, in the order of the parameters behind the inputs.
    """
    found: dict[str, Any] = {}
    for _, func in module.functions_items():
        if _brings(func):
            values = list(func.attrs["params"])
            found.update(zip([str(param.name) for param in func.params[-len(values) :]], values))
    return found


def without_weights(module: IRModule) -> IRModule:
    """A module whose functions have brought along no weights any more; that they had some is still said."""
    return _with_attribute(module, {str(v.name_hint): [] for v, func in module.functions_items() if _brings(func)})


def with_weights(module: IRModule, model: IRModule) -> IRModule:
    """What `without_weights` made of a module, with those again that functions of these names have in a model."""
    found = {str(v.name_hint): func.attrs["params"] for v, func in model.functions_items() if _brings(func)}
    return _with_attribute(module, found)


def _brings(func: BaseFunc) -> bool:
    return isinstance(func, relax.Function) and bool(func.attrs) and "params" in func.attrs


def _with_attribute(module: IRModule, weights: Mapping[str, Any]) -> IRModule:
    """The module with other weights where functions have brought some."""
    changed = {
        variable: func.with_attr("params", weights[str(variable.name_hint)])
        for variable, func in module.functions_items()
        if _brings(func) and str(variable.name_hint) in weights
    }
    if not changed:
        return module
    return IRModule({**dict(module.functions_items()), **changed}, attrs=module.attrs, global_infos=module.global_infos)


def with_packers(module: IRModule, model: IRModule) -> IRModule:
    """The module with a function for each weight that is packed, and what takes them said.

    Parameters
    ----------
    module : IRModule
        What `relax.transform.LiftTransformParams` has made.
    model : IRModule
        What it was made of, whose parameters have the weights' names.
    """
    functions = {str(variable.name_hint): func for variable, func in module.functions_items()}
    sources = {str(variable.name_hint): func for variable, func in model.functions_items()}
    made: dict[Any, str] = {}
    added: dict[str, relax.Function] = {}
    taken: dict[str, list[str]] = {}
    for name in functions:
        if f"{name}{_TRANSFORM}" not in functions:
            continue
        lifted = _Lifted(module, functions[f"{name}{_TRANSFORM}"], sources[name])
        taken[name] = []
        for result in lifted.results:
            own = lifted.weight(result)
            if own is None:
                key = lifted.key(result)
                if key not in made:
                    packer = lifted.function(result)
                    made[key] = _fresh(f"{packer.params[0].name}_packed", {*functions, *added, *lifted.names})
                    added[made[key]] = packer.with_attr("global_symbol", made[key])
                own = made[key]
            taken[name].append(own)
    module = module.clone()
    for name, names in taken.items():
        module[name] = module[name].with_attr(_PACKED, names)
    for name, packer in added.items():
        module[name] = packer
    return module


def _fresh(name: str, taken: set[str]) -> str:
    plain = re.sub(r"\W", "_", name)
    return next(each for each in chain([plain], (f"{plain}_{n}" for n in count(1))) if each not in taken)


class _Lifted:
    """What `LiftTransformParams` has made of a function's weights: a function of a tuple, which returns one."""

    def __init__(self, module: IRModule, transform: relax.Function, source: relax.Function) -> None:
        (self._packed,) = transform.params
        self._module = module
        self._bound = {binding.var: binding.value for block in transform.body.blocks for binding in block.bindings}
        self.names = [str(param.name) for param in source.params[-len(self._packed.ty.fields) :]]
        body = self._resolved(transform.body.body)
        self.results = (
            list(body.fields)
            if isinstance(body, relax.Tuple)
            else [relax.TupleGetItem(body, n) for n in range(len(body.ty.fields))]
        )

    def _resolved(self, expr: relax.Expr) -> relax.Expr:
        """What a variable stands for."""
        while isinstance(expr, relax.Var) and expr in self._bound:
            expr = self._bound[expr]
        return expr

    def _place(self, expr: relax.Expr) -> int | None:
        """Which of the weights an expression is; None if it is none as it was given."""
        expr = self._resolved(expr)
        is_item = isinstance(expr, relax.TupleGetItem) and self._resolved(expr.tuple_value).same_as(self._packed)
        return int(expr.index) if is_item else None

    def weight(self, expr: relax.Expr) -> str | None:
        """The name of the weight that an expression is; None if it is packed."""
        place = self._place(expr)
        return None if place is None else self.names[place]

    def key(self, expr: relax.Expr) -> Any:
        """What is equal for what computes the same of weights of the same names."""
        place, expr = self._place(expr), self._resolved(expr)
        if place is not None:
            return self.names[place]
        if isinstance(expr, relax.Call):
            return (self.key(expr.op), *map(self.key, expr.args), str(expr.attrs), str(expr.ty_args))
        if isinstance(expr, relax.Tuple):
            return tuple(map(self.key, expr.fields))
        if isinstance(expr, relax.TupleGetItem):
            return self.key(expr.tuple_value), int(expr.index)
        if isinstance(expr, GlobalVar):
            return tvm_ffi.structural_hash(self._module[expr].without_attr("global_symbol"))
        return str(expr) if isinstance(expr, Op) else tvm_ffi.structural_hash(expr)

    def function(self, expr: relax.Expr) -> relax.Function:
        """What an expression computes, as a function of the weights that it needs, under their names."""
        builder = relax.BlockBuilder()
        params: dict[int, relax.Var] = {}
        self._collect(expr, params)
        with builder.function("packer", [params[n] for n in sorted(params)]):
            builder.emit_func_output(self._value(expr, params, builder, {}))
        return builder.get()["packer"]

    def _collect(self, expr: relax.Expr, params: dict[int, relax.Var]) -> None:
        place, expr = self._place(expr), self._resolved(expr)
        if place is not None:
            params.setdefault(place, relax.Var(self.names[place], self._packed.ty.fields[place]))
        elif isinstance(expr, relax.Call):
            for arg in expr.args:
                self._collect(arg, params)
        elif isinstance(expr, relax.Tuple):
            for field in expr.fields:
                self._collect(field, params)
        elif isinstance(expr, relax.TupleGetItem):
            self._collect(expr.tuple_value, params)

    def _value(
        self,
        expr: relax.Expr,
        params: dict[int, relax.Var],
        builder: relax.BlockBuilder,
        made: dict[relax.Var, relax.Expr],
    ) -> relax.Expr:
        place = self._place(expr)
        if place is not None:
            return params[place]
        if isinstance(expr, relax.Var) and expr in self._bound:
            if expr not in made:
                made[expr] = builder.emit(self._value(self._bound[expr], params, builder, made))
            return made[expr]
        if isinstance(expr, relax.Call):
            args = [self._value(arg, params, builder, made) for arg in expr.args]
            return relax.Call(expr.op, args, expr.attrs, expr.ty_args)
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._value(field, params, builder, made) for field in expr.fields])
        if isinstance(expr, relax.TupleGetItem):
            return relax.TupleGetItem(self._value(expr.tuple_value, params, builder, made), int(expr.index))
        return expr
