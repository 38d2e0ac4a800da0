"""Extents of a model that are made of sizes, each written with as few operations as it needs.

Of windows of a padded picture importers leave rows of ``x // (x // 4)``, where `x` is made of quotients, too. Upstream
doesn't prove that two of such extents are equal, so that operators have no shape, and its lowering of quotients within
quotients takes the longer the more there are, many times for each. What is made of what was reduced is inferred anew::

    x: [n + (-n) % 4, 8];  reshape(x, [x // 4, x // (x // 4), 8])
    ->    x: [(n + 3) // 4 * 4, 8];  reshape(x, [(n + 3) // 4, 4, 8])
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import variables_of
from tvm_axe.analysis.sizes import size_variables

__all__ = ["with_reduced_extents"]

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)


def with_reduced_extents(model: IRModule) -> IRModule:
    """The model, its extents and those of its functions with as few operations as `tvm_axe._tvm.reduced` finds."""
    if not _is_reducible(model):
        return model
    rewriter = _Reducing(model)
    for variable, func in model.functions_items():
        if isinstance(func, tirx.PrimFunc):
            rewriter.builder_.update_func(variable, _function(func))
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(func))
    return rewriter.builder_.get()


def _is_reducible(model: IRModule) -> bool:
    """Whether some quotient or remainder in an extent of the model's values has fewer operations."""
    found: list[bool] = []

    def visit(extent: tirx.Expr) -> None:
        found.append(not _tvm.reduced(extent).same_as(extent))

    for _, func in model.functions_items():
        if isinstance(func, relax.Function):
            tvm_ffi.structural_walk(func, [(kind, visit) for kind in _ARITHMETIC])
    return any(found)


def _function(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of TensorIR whose expressions of sizes alone are reduced."""
    sizes = set(size_variables(func))

    def of_sizes(expr: tirx.Expr) -> tirx.Expr:
        return _tvm.reduced(expr) if sizes.issuperset(variables_of(expr)) else expr

    return _tvm.structural_map(func, [(kind, of_sizes) for kind in _ARITHMETIC]) if sizes else func


@mutator
class _Reducing(PyExprMutator):
    """A model as it is written anew."""

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, of a type that is inferred of its arguments as they are now."""
        types = [_type(each) for each in call.ty_args or []]
        return relax.Call(call.op, [self._argument(each) for each in call.args], call.attrs, types)

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """What is said of a value's shape, as it is written now."""
        self.set_var_remap(binding.var, self.builder_.match_cast(self._argument(binding.value), _type(binding.ty)))

    def visit_shape_expr_(self, shape: relax.ShapeExpr) -> relax.Expr:
        return relax.ShapeExpr([_tvm.reduced(extent) for extent in shape.values])

    def _argument(self, argument: relax.Expr) -> relax.Expr:
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([self._argument(each) for each in argument.fields])
        if isinstance(argument.ty, ir.PrimType):
            return _tvm.reduced(argument)
        return self.visit_expr(argument)


def _type(kind: ir.Type) -> ir.Type:
    if isinstance(kind, relax.TupleType):
        return relax.TupleType([_type(field) for field in kind.fields])
    if isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr):
        return relax.TensorType([_tvm.reduced(extent) for extent in kind.shape.values], kind.dtype, kind.vdevice)
    if isinstance(kind, relax.ShapeType) and kind.values is not None:
        return relax.ShapeType([_tvm.reduced(extent) for extent in kind.values])
    return kind
