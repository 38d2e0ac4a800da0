"""What the values of a Relax function are made of: asked by passes that look for a pattern of operators."""

from __future__ import annotations

import math
from typing import TypeGuard

import numpy as np
from tvm import ir, relax, tirx
from tvm.ir import GenericConst, IRModule

from tvm_axe import _tvm

__all__ = ["Values", "extents_of", "is_call", "shape_of"]

_SMALL = 1 << 22  # elements that a constant may have to be looked at


def is_call(value: relax.Expr, operator: str) -> TypeGuard[relax.Call]:
    """Whether a value is a call of an operator."""
    return isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and str(value.op.name) == operator


def shape_of(value: relax.Expr) -> list[int] | None:
    """The extents of a tensor; None of one with symbolic extents, and of anything else."""
    kind = value.ty
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    extents = list(kind.shape.values)
    return [int(extent) for extent in extents] if all(isinstance(n, tirx.IntImm) for n in extents) else None


def extents_of(value: relax.Expr) -> list[int]:
    """The extents of a tensor that has no symbolic ones."""
    shape = shape_of(value)
    assert shape is not None, value
    return shape


class Values:
    """The values of a function's variables."""

    def __init__(self, func: relax.Function) -> None:
        self._bound: dict[relax.Var, relax.Expr] = {}
        self._folded: dict[str, np.ndarray | None] = {}
        relax.analysis.post_order_visit(func, self._enter)

    def _enter(self, node: relax.Expr) -> None:
        if isinstance(node, relax.SeqExpr):
            for block in node.blocks:
                self._bound |= {own.var: own.value for own in block.bindings if isinstance(own, relax.VarBinding)}

    def calls(self) -> list[relax.Call]:
        """All calls that variables are bound to, in order."""
        return [value for value in self._bound.values() if isinstance(value, relax.Call)]

    def of(self, value: relax.Expr) -> relax.Expr:
        """What a variable stands for; anything else, and a parameter, stands for itself."""
        while isinstance(value, relax.Var) and value in self._bound:
            value = self._bound[value]
        return value

    def matrix(self, value: relax.Expr) -> relax.Expr:
        """What a value is before it is reshaped in ways that keep the matrices of its last two dimensions."""
        found = self.of(value)
        while is_call(found, "relax.reshape") or is_call(found, "relax.broadcast_to"):
            before, after = shape_of(found.args[0]), shape_of(found)
            kept = before and after and before[-2:] == after[-2:] and math.prod(before) == math.prod(after)
            if not kept or len(before or []) < 2:
                break
            found = self.of(found.args[0])
        return found

    def constant(self, value: relax.Expr) -> np.ndarray | None:
        """The elements of a value that is made of constants alone, if there are few; else None."""
        found = self.of(value)
        shape = shape_of(found)
        if shape is None or math.prod(shape) > _SMALL:
            return None
        if isinstance(found, GenericConst):
            return _elements(found)
        needed: dict[relax.Var, relax.Expr] = {}
        if not isinstance(found, relax.Call) or not self._is_made_of_constants(found, needed):
            return None
        out = relax.Var("out", found.ty)
        bindings = [relax.VarBinding(var, self._filled(own)) for var, own in needed.items()]
        bindings.append(relax.VarBinding(out, found))
        body = relax.SeqExpr([relax.DataflowBlock(bindings)], out)
        module = IRModule({"main": relax.Function([], body, found.ty).with_attr("global_symbol", "main")})
        name = _tvm.workload_hash(module)  # layers have the same masks, and each is compiled to be folded
        if name not in self._folded:
            folded = relax.transform.FoldConstant()(relax.transform.LegalizeOps()(module))["main"]
            last = Values(folded).of(folded.body.body)
            self._folded[name] = _elements(last) if isinstance(last, GenericConst) else None
        return self._folded[name]

    def scalar(self, value: relax.Expr) -> float | None:
        """The number that all elements of a value are, if it is made of constants alone; else None."""
        found = self.of(value)
        if is_call(found, "relax.full_like"):
            return self.scalar(found.args[1])
        array = self.constant(found)
        return float(array.flat[0]) if array is not None and array.size == 1 else None

    def _filled(self, value: relax.Expr) -> relax.Expr:
        """The constant that `R.full` makes, which upstream doesn't fold; anything else as it is."""
        number = self.of(value.args[1]) if is_call(value, "relax.full") else None
        if not isinstance(number, GenericConst):
            return value
        return relax.const(np.full(extents_of(value), _elements(number), str(value.ty.dtype)))

    def _is_made_of_constants(self, call: relax.Call, needed: dict[relax.Var, relax.Expr]) -> bool:
        """Whether a call's value is made of constants alone; the variables on its way are `needed`, in order."""
        if not isinstance(call.op, ir.Op):
            return False
        for argument in call.args:
            if not isinstance(argument, relax.Var) or argument in needed:
                if not isinstance(argument, relax.Var | GenericConst | relax.ShapeExpr | tirx.Expr):
                    return False
                continue
            own = self._bound.get(argument)
            small = own is not None and math.prod(shape_of(own) or [_SMALL + 1]) <= _SMALL
            if isinstance(own, relax.Call) and small:
                if not self._is_made_of_constants(own, needed):
                    return False
            elif not isinstance(own, GenericConst):
                return False
            needed[argument] = own
        return True


def _elements(constant: GenericConst) -> np.ndarray:
    value = constant.value
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)
