"""What the values of a Relax function are made of: asked by passes that look for a pattern of operators."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
from tvm import ir, relax, tirx
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.sizes import sides

__all__ = [
    "Side",
    "Values",
    "alike",
    "elements_of",
    "extents_of",
    "is_call",
    "product",
    "rewritten",
    "shape_of",
    "sides_of",
]

Side = Any
"""An extent of a tensor: a number where it is known, an expression elsewhere."""

_SMALL = 1 << 22  # elements that a constant may have to be looked at


def is_call(value: relax.Expr, operator: str) -> TypeGuard[relax.Call]:
    """Whether a value is a call of an operator."""
    return isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and str(value.op.name) == operator


def rewritten(
    model: IRModule, changes: Callable[[relax.Call], bool], rewriter: Callable[[IRModule], PyExprMutator]
) -> IRModule:
    """The model with its functions as a rewriter makes them; itself where none has a call that this changes."""
    found: list[bool] = []

    def visit(node: relax.Expr) -> None:
        found.append(isinstance(node, relax.Call) and changes(node))

    functions = {var: func for var, func in model.functions_items() if isinstance(func, relax.Function)}
    for func in functions.values():
        relax.analysis.post_order_visit(func, visit)
    if not any(found):
        return model
    made = rewriter(model)
    for variable, func in functions.items():
        made.builder_.update_func(variable, made.visit_expr(func))
    return made.builder_.get()


def sides_of(value: relax.Expr) -> list[Side] | None:
    """The extents of a tensor; None of one that has no shape, and of anything else."""
    kind = value.ty
    if not isinstance(kind, relax.TensorType) or not isinstance(kind.shape, relax.ShapeExpr):
        return None
    return sides(kind.shape.values)


def alike(some: Sequence[Side], others: Sequence[Side]) -> bool:
    """Whether there are as many extents, and each is proved to be the other."""
    return len(some) == len(others) and all(
        one == other if isinstance(one, int) and isinstance(other, int) else Analyzer().can_prove_equal(one, other)
        for one, other in zip(some, others)
    )


def product(extents: Iterable[Side]) -> Side:
    """The number of elements of a tensor of these extents."""
    return functools.reduce(operator.mul, extents, 1)


def shape_of(value: relax.Expr) -> list[int] | None:
    """The extents of a tensor; None of one with symbolic extents, and of anything else."""
    sides = sides_of(value)
    known = None if sides is None else [extent for extent in sides if isinstance(extent, int)]
    return known if sides is not None and known is not None and len(known) == len(sides) else None


def extents_of(value: relax.Expr) -> list[int]:
    """The extents of a tensor that has no symbolic ones."""
    shape = shape_of(value)
    assert shape is not None, value
    return shape


class Values:
    """The values of a function's variables."""

    def __init__(self, func: relax.Function) -> None:
        self._bound: dict[relax.Var, relax.Expr] = {}
        self._names: dict[relax.Expr, relax.Var] = {}
        self._folded: dict[str, np.ndarray | None] = {}
        relax.analysis.post_order_visit(func, self._enter)
        self._result = func.body.body

    def _enter(self, node: relax.Expr) -> None:
        if isinstance(node, relax.SeqExpr):
            for block in node.blocks:
                bindings = [own for own in block.bindings if isinstance(own, relax.VarBinding)]
                self._bound |= {own.var: own.value for own in bindings}
                self._names |= {own.value: own.var for own in bindings if isinstance(own.value, relax.Call)}

    @functools.cached_property
    def _readers(self) -> dict[relax.Var, list[relax.Expr]]:
        found: dict[relax.Var, list[relax.Expr]] = {}
        for value in (*self._bound.values(), self._result):
            for variable in relax.analysis.free_vars(value):
                found.setdefault(variable, []).append(value)
        return found

    def readers(self, value: relax.Expr) -> list[relax.Expr]:
        """What variables are bound to that is made of a value, once each, and the function's result if that is."""
        return self._readers.get(self.named(value), [])

    def calls(self) -> list[relax.Call]:
        """All calls that variables are bound to, in order."""
        return [value for value in self._bound.values() if isinstance(value, relax.Call)]

    def of(self, value: relax.Expr) -> relax.Expr:
        """What a variable stands for; anything else, and a parameter, stands for itself."""
        while isinstance(value, relax.Var) and value in self._bound:
            value = self._bound[value]
        return value

    def named(self, value: relax.Expr) -> relax.Expr:
        """The variable that a call is bound to, so that it isn't computed twice; anything else as it is."""
        return self._names.get(value, value) if isinstance(value, relax.Call) else value

    def stages(self, value: relax.Expr) -> Iterator[relax.Expr]:
        """A value, and what it was before each of the reshapes that keep the matrices of its last two dimensions."""
        yield value
        found = self.of(value)
        while is_call(found, "relax.reshape") or is_call(found, "relax.broadcast_to"):
            inner = found.args[0]
            before, after = sides_of(inner) or [], sides_of(found) or []
            if len(before) < 2 or not alike(before[-2:], after[-2:]) or not alike([product(before)], [product(after)]):
                return
            yield inner
            found = self.of(inner)

    def matrix(self, value: relax.Expr) -> relax.Expr:
        """What a value is before it is reshaped in ways that keep the matrices of its last two dimensions."""
        *_, last = self.stages(value)
        return self.of(last)

    def constant(self, value: relax.Expr) -> np.ndarray | None:
        """The elements of a value that is made of constants alone, if there are few; else None."""
        found = self.of(value)
        shape = shape_of(found)
        if shape is None or math.prod(shape) > _SMALL:
            return None
        if isinstance(found, GenericConst):
            return elements_of(found)
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
            self._folded[name] = elements_of(last) if isinstance(last, GenericConst) else None
        return self._folded[name]

    def scalar(self, value: relax.Expr) -> float | None:
        """The number that all elements of a value are, if it is made of constants alone; else None."""
        found = self.of(value)
        if is_call(found, "relax.full_like") or is_call(found, "relax.full"):
            return self.scalar(found.args[1])
        array = self.constant(found)
        return float(array.flat[0]) if array is not None and array.size == 1 else None

    def _filled(self, value: relax.Expr) -> relax.Expr:
        """The constant that `R.full` makes, which upstream doesn't fold; anything else as it is."""
        number = self.of(value.args[1]) if is_call(value, "relax.full") else None
        if not isinstance(number, GenericConst):
            return value
        return relax.const(np.full(extents_of(value), elements_of(number), str(value.ty.dtype)))

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


def elements_of(constant: GenericConst) -> np.ndarray:
    """The elements of a constant."""
    value = constant.value
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)
