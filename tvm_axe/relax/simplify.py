"""Fewer reshapes between operators, so that what follows a product is computed with it.

Importers flatten the tokens of a batch in front of a product and put them back behind it::

    add(x, reshape(matmul(..), [1, n, d]))    ->    reshape(add(reshape(x, [n, d]), matmul(..)), [1, n, d])

A reshape that keeps the last dimension goes behind the pointwise operators that read it, as far as the next operator
that isn't one. Reshapes of reshapes become one, transposes of transposes too, and what changes nothing is left out. A
matrix that is repeated for each of a batch is read as it is, since a product repeats it by itself. Extents may be
unknown: they are the same where that is proved.
"""

from __future__ import annotations

import tvm
from tvm import ir, relax, tirx
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_axe.relax.shapes import says_shapes
from tvm_axe.relax.values import Side, alike, is_call, sides_of

__all__ = ["simplified"]

_UNARY = tuple(
    f"relax.{name}"
    for name in ("nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "sigmoid", "tanh", "erf", "exp", "sqrt", "rsqrt",
                 "negative", "abs", "square", "astype")
)  # fmt: skip
_BINARY = tuple(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum"))


def simplified(model: IRModule, known: bool = True) -> IRModule:
    """The model with fewer reshapes and transposes; it computes the same.

    Parameters
    ----------
    model : IRModule
        The model.
    known : bool
        Whether all reshapes go behind pointwise operators, or only those of rows whose number is made of what isn't
        known.
    """
    rewriter = _Rewriter(model, known)
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(func))
    # What became another value is bound to its name still, which upstream's patterns don't see through; but upstream
    # takes what is said of a tensor's shape for the tensor, and what follows loses its shape.
    named_once = [] if says_shapes(model) else [relax.transform.CanonicalizeBindings()]
    return tvm.transform.Sequential([*named_once, relax.transform.DeadCodeElimination()])(rewriter.builder_.get())


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, model: IRModule, known: bool) -> None:
        super().__init__(model)
        self.known = known

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, with what its arguments are made of taken into account."""
        done = super().visit_call_(call)
        shape = sides_of(call)
        if not isinstance(done, relax.Call) or not isinstance(done.op, ir.Op) or shape is None:
            return done
        name = str(done.op.name)
        if name == "relax.reshape":
            return self._reshape(done.args[0], shape)
        if name == "relax.broadcast_to" and _have(done.args[0], shape):
            return done.args[0]
        if name == "relax.permute_dims":
            return self._permuted(done, len(shape))
        if name == "relax.matmul":
            return self._once(done, shape)
        return self._behind(done, shape) if name in (*_UNARY, *_BINARY) else done

    def _of(self, value: relax.Expr) -> relax.Expr:
        while isinstance(value, relax.Var) and (found := self.lookup_binding(value)) is not None:
            value = found
        return value

    def _reshape(self, value: relax.Expr, shape: list[Side]) -> relax.Expr:
        """A reshape of what is no reshape; the value itself where it has the shape."""
        while is_call(before := self._of(value), "relax.reshape"):
            value = before.args[0]
        return value if _have(value, shape) else relax.op.reshape(value, shape)

    def _permuted(self, call: relax.Call, rank: int) -> relax.Expr:
        """A transpose of what is no transpose; the value itself where no dimension moves."""
        axes = _axes(call, rank)
        value = call.args[0]
        while is_call(before := self._of(value), "relax.permute_dims"):
            inner = _axes(before, rank)
            axes, value = [inner[axis] for axis in axes], before.args[0]
        return value if axes == [*range(rank)] else relax.op.permute_dims(value, axes)

    def _once(self, call: relax.Call, shape: list[Side]) -> relax.Expr:
        """A product that reads a matrix as it was before it was repeated for each of the batch that the other has."""
        data, matrix = call.args
        wide = self._of(matrix)
        if not is_call(wide, "relax.broadcast_to"):
            return call
        own, batch = sides_of(wide.args[0]), (sides_of(data) or [])[:-2]
        if own is None or len(own) != 2 or not alike(batch, shape[:-2]) or not _have(wide, [*batch, *own]):
            return call
        return relax.Call(call.op, [data, wide.args[0]], call.attrs)

    def _behind(self, call: relax.Call, shape: list[Side]) -> relax.Expr:
        """A pointwise operator before the reshape of one of its arguments, and the reshape behind it."""
        moved = next((flat for value in call.args if (flat := self._flat(value, shape)) is not None), None)
        if moved is None:
            return call
        arguments = [self._as(value, shape, sides_of(moved) or []) for value in call.args]
        if any(value is None for value in arguments):
            return call
        emit = self.builder_.emit
        same = relax.Call(call.op, [emit(v) if isinstance(v, relax.Call) else v for v in arguments], call.attrs)
        return relax.op.reshape(emit(same), shape)

    def _flat(self, value: relax.Expr, shape: list[Side]) -> relax.Expr | None:
        """What a value of that shape was before a reshape that keeps the last dimension and has fewer others."""
        call = self._of(value)
        if not is_call(call, "relax.reshape") or not _have(call, shape):
            return None
        before = sides_of(call.args[0])
        if not self.known and all(isinstance(side, int | tirx.Var) for side in before or ()):
            return None
        kept = before and shape and alike(before[-1:], shape[-1:]) and len(before) < len(shape)
        return call.args[0] if kept else None

    def _as(self, value: relax.Expr, shape: list[Side], inner: list[Side]) -> relax.Expr | None:
        """An argument where the others have the shape `inner` instead; None if it can't be given that."""
        own = sides_of(value)
        if own is None:
            return None
        if alike(own, shape):
            return self._reshape(value, inner)
        if _are_ones(own):
            return value if len(own) <= len(inner) else self._number(value)
        if alike(own[-1:], shape[-1:]) and _are_ones(own[:-1]):  # the same for all rows
            return value if len(own) <= len(inner) else self._reshape(value, own[-1:])
        return None

    def _number(self, value: relax.Expr) -> relax.Expr | None:
        constant = value if isinstance(value, GenericConst) else None
        return None if constant is None else self._reshape(value, [])


def _have(value: relax.Expr, shape: list[Side]) -> bool:
    """Whether a value is a tensor of these extents."""
    own = sides_of(value)
    return own is not None and alike(own, shape)


def _are_ones(sides: list[Side]) -> bool:
    return all(isinstance(side, int) and side == 1 for side in sides)


def _axes(call: relax.Call, rank: int) -> list[int]:
    axes = call.attrs.axes
    return [*reversed(range(rank))] if axes is None else [int(axis) % rank for axis in axes]
