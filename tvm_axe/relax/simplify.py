"""Fewer reshapes between operators, so that what follows a product is computed with it.

Importers flatten the tokens of a batch in front of a product and put them back behind it::

    add(x, reshape(matmul(..), [1, n, d]))    ->    reshape(add(reshape(x, [n, d]), matmul(..)), [1, n, d])

A reshape that keeps the last dimension goes behind the pointwise operators that read it, as far as the next operator
that isn't one. Reshapes of reshapes become one, transposes of transposes too, and what changes nothing is left out.
"""

from __future__ import annotations

import math

import tvm
from tvm import ir, relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_axe.relax.values import is_call, shape_of

__all__ = ["simplified"]

_UNARY = tuple(
    f"relax.{name}"
    for name in ("nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "sigmoid", "tanh", "erf", "exp", "sqrt", "rsqrt",
                 "negative", "abs", "square", "astype")
)  # fmt: skip
_BINARY = tuple(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"))


def simplified(model: IRModule) -> IRModule:
    """The model with fewer reshapes and transposes; it computes the same."""
    rewriter = _Rewriter(model)
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(func))
    # What became another value is bound to its name still, which upstream's patterns don't see through.
    named_once = [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]
    return tvm.transform.Sequential(named_once)(rewriter.builder_.get())


@mutator
class _Rewriter(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, with what its arguments are made of taken into account."""
        done = super().visit_call_(call)
        if not isinstance(done, relax.Call) or not isinstance(done.op, ir.Op) or shape_of(call) is None:
            return done
        name = str(done.op.name)
        if name == "relax.reshape":
            return self._reshape(done.args[0], shape_of(call))
        if name == "relax.broadcast_to" and shape_of(done.args[0]) == shape_of(call):
            return done.args[0]
        if name == "relax.permute_dims":
            return self._permuted(done, len(shape_of(call) or []))
        return self._behind(done, shape_of(call)) if name in (*_UNARY, *_BINARY) else done

    def _of(self, value: relax.Expr) -> relax.Expr:
        while isinstance(value, relax.Var) and (found := self.lookup_binding(value)) is not None:
            value = found
        return value

    def _reshape(self, value: relax.Expr, shape: list[int] | None) -> relax.Expr:
        """A reshape of what is no reshape; the value itself where it has the shape."""
        while is_call(before := self._of(value), "relax.reshape"):
            value = before.args[0]
        return value if shape_of(value) == shape else relax.op.reshape(value, shape)

    def _permuted(self, call: relax.Call, rank: int) -> relax.Expr:
        """A transpose of what is no transpose; the value itself where no dimension moves."""
        axes = _axes(call, rank)
        value = call.args[0]
        while is_call(before := self._of(value), "relax.permute_dims"):
            inner = _axes(before, rank)
            axes, value = [inner[axis] for axis in axes], before.args[0]
        return value if axes == [*range(rank)] else relax.op.permute_dims(value, axes)

    def _behind(self, call: relax.Call, shape: list[int] | None) -> relax.Expr:
        """A pointwise operator before the reshape of one of its arguments, and the reshape behind it."""
        moved = next((flat for value in call.args if (flat := self._flat(value, shape)) is not None), None)
        if moved is None:
            return call
        inner = shape_of(moved)
        arguments = [self._as(value, shape, inner) for value in call.args]
        if any(value is None for value in arguments):
            return call
        emit = self.builder_.emit
        same = relax.Call(call.op, [emit(v) if isinstance(v, relax.Call) else v for v in arguments], call.attrs)
        return relax.op.reshape(emit(same), shape)

    def _flat(self, value: relax.Expr, shape: list[int] | None) -> relax.Expr | None:
        """What a value of that shape was before a reshape that keeps the last dimension and has fewer others."""
        call = self._of(value)
        if not is_call(call, "relax.reshape") or shape_of(call) != shape or not shape:
            return None
        before = shape_of(call.args[0])
        return call.args[0] if before and before[-1] == shape[-1] and len(before) < len(shape) else None

    def _as(self, value: relax.Expr, shape: list[int] | None, inner: list[int] | None) -> relax.Expr | None:
        """An argument where the others have the shape `inner` instead; None if it can't be given that."""
        own = shape_of(value)
        if own is None or not shape or not inner:
            return None
        if own == shape:
            return self._reshape(value, inner)
        if math.prod(own) == 1:
            return value if len(own) <= len(inner) else self._number(value)
        rest = own[:-1]
        if own[-1] == shape[-1] and math.prod(rest) == 1:  # the same for all rows
            return value if len(own) <= len(inner) else self._reshape(value, [own[-1]])
        return None

    def _number(self, value: relax.Expr) -> relax.Expr | None:
        constant = value if isinstance(value, GenericConst) else None
        return None if constant is None else self._reshape(value, [])


def _axes(call: relax.Call, rank: int) -> list[int]:
    axes = call.attrs.axes
    return [*reversed(range(rank))] if axes is None else [int(axis) % rank for axis in axes]
