"""Operators that upstream doesn't compute in a type of 16 bits are computed in float32, as other frameworks do::

    layer_norm(x, gamma, beta)    ->    astype(layer_norm(astype(x, "float32"), ..), "bfloat16")

Of most operators upstream's compiler widens what is computed, element by element. Of these it refuses the type, or has
no function for it; bfloat16 it sorts wrongly.
"""

from __future__ import annotations

from tvm import ir, relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

__all__ = ["widened"]

_WIDE = "float32"
_REFUSED = {
    "bfloat16": (
        "nn.layer_norm", "power", "mod", "floor_mod", "log_add_exp", "isnan", "isinf", "isfinite", "argmax", "argmin",
        "sort", "argsort", "topk",
    ),
    "float16": ("asin", "acos", "atan", "asinh", "acosh", "atan2"),
}  # fmt: skip
_OPERATORS = {dtype: frozenset(f"relax.{name}" for name in names) for dtype, names in _REFUSED.items()}


def widened(model: IRModule) -> IRModule:
    """The model without operators that upstream doesn't compute in the types that they have.

    >>> x = relax.Var("x", relax.TensorType((4,), "bfloat16"))
    >>> builder = relax.BlockBuilder()
    >>> with builder.function("main", [x]):
    ...     _ = builder.emit_func_output(builder.emit(relax.op.power(x, x)))
    >>> print(str(widened(builder.get())["main"].body.blocks[0]).count("astype"))
    3
    """
    found = False

    def visit(node: relax.Expr) -> None:
        nonlocal found
        found = found or (isinstance(node, relax.Call) and _is_refused(node))

    functions = {var: func for var, func in model.functions_items() if isinstance(func, relax.Function)}
    for func in functions.values():
        relax.analysis.post_order_visit(func, visit)
    if not found:
        return model
    rewriter = _Rewriter(model)
    for variable, func in functions.items():
        rewriter.builder_.update_func(variable, rewriter.visit_expr(func))
    return rewriter.builder_.get()


def _dtype(value: relax.Expr) -> str:
    return str(value.ty.dtype) if isinstance(value.ty, relax.TensorType) else ""


def _is_refused(call: relax.Call) -> bool:
    name = str(call.op.name) if isinstance(call.op, ir.Op) else ""
    return any(name in _OPERATORS.get(_dtype(value), ()) for value in call.args)


@mutator
class _Rewriter(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, of wide arguments where it has to be; its results have the types that they had."""
        done = super().visit_call_(call)
        if not _is_refused(call):
            return done
        emit = self.builder_.emit
        wide = [
            emit(relax.op.astype(value, _WIDE)) if _dtype(value) in _OPERATORS else value for value in done.args
        ]  # fmt: skip
        made = emit(relax.Call(done.op, wide, done.attrs))
        if isinstance(call.ty, relax.TupleType):
            fields = [emit(relax.TupleGetItem(made, at)) for at in range(len(call.ty.fields))]
            return relax.Tuple([self._as(field, ty) for field, ty in zip(fields, call.ty.fields, strict=True)])
        return self._as(made, call.ty)

    def _as(self, value: relax.Expr, ty: relax.TensorType) -> relax.Expr:
        dtype = str(ty.dtype)
        return value if _dtype(value) == dtype else self.builder_.emit(relax.op.astype(value, dtype))
