"""Shapes that a model computes of other shapes become known: what is left of them are its parameters' variables.

Importers ask tensors for their shapes, make tensors of these and shapes of such tensors, and say by `match_cast` what
came out. Where that follows from the shapes of the parameters it is worked out here, so that operators that want a
shape get one, and no variable is left that stands for what is known:

===================================================== ================================================================
``s = shape_of(x)``; ``t = shape_to_tensor(s)``       ``R.shape([n, 8])``, wherever `s` is used
``s = tensor_to_shape(t)``                            the same shape again
``s1 = match_cast(s, R.Shape([q, 8]))``               the same, and `n` for `q` from there on
``y = match_cast(x, R.Tensor((q, 8)))``               `x`, and `n` for `q` from there on
===================================================== ================================================================

Where a match_cast says something else than what follows, that is kept, to be compared when the model is called.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.sym import Analyzer

from tvm_axe.analysis.expressions import substitute, variables_of

__all__ = ["SAID", "says_shapes", "with_known_shapes"]

SAID = "axe_said"
"""The attribute of a function that has, for each match_cast that doesn't follow, the shape, the one said, and whose.

Upstream's passes lose the casts themselves.
"""


def with_known_shapes(model: tvm.IRModule) -> tvm.IRModule:
    """Return a model without what is computed of the shapes of its parameters."""
    found = [(v, f) for v, f in model.functions_items() if isinstance(f, relax.Function) and _computes_shapes(f)]
    if not found:
        return model
    known = _Known(model)
    for variable, func in found:
        known.sizes, known.tensors, known.said = {}, [], []
        known.defined = {each for param in func.params for each in variables_of(_extents(param))}
        made = known.visit_expr(func)
        known.builder_.update_func(variable, made.with_attr(SAID, known.said) if known.said else made)
    return known.builder_.get()


def says_shapes(model: tvm.IRModule) -> bool:
    """Return whether a function says by a match_cast what shape something has."""
    functions = [func for _, func in model.functions_items() if isinstance(func, relax.Function)]
    return any(isinstance(each, relax.MatchCast) for func in functions for each in _bindings(func))


def _computes_shapes(func: relax.Function) -> bool:
    return any(
        isinstance(each, relax.MatchCast) or isinstance(each.var.ty, relax.ShapeType) for each in _bindings(func)
    )


def _bindings(func: relax.Function) -> list[relax.Binding]:
    return [binding for block in func.body.blocks for binding in block.bindings]


def _extents(value: relax.Expr) -> list[tirx.Expr]:
    """The extents of a tensor or a shape, or the number that it is."""
    if isinstance(value, relax.ShapeExpr):
        return list(value.values)
    ty = value.ty
    if isinstance(ty, ir.PrimType):
        return [value]
    values = getattr(ty, "shape", None) if isinstance(ty, relax.TensorType) else getattr(ty, "values", None)
    return [] if values is None else list(values)


@mutator
class _Known(PyExprMutator):
    """A model as it is written anew.

    Attributes
    ----------
    defined : set of Var
        The variables of the parameters' shapes.
    sizes : dict
        What stands for another variable.
    tensors : list
        Tensors of numbers, each with the shape that it was made of.
    said : list
        What `SAID` is to be.
    """

    def __init__(self, model: tvm.IRModule) -> None:
        super().__init__(model)
        self.defined: set[tirx.Var] = set()
        self.sizes: dict[tirx.Var, tirx.Expr] = {}
        self.tensors: list[tuple[relax.Var, relax.ShapeExpr]] = []
        self.said: list[tuple[relax.ShapeExpr, relax.ShapeExpr, str]] = []

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        given = [self._shape(argument) for argument in call.args]
        call = relax.Call(call.op, given, call.attrs, [self._type(ty) for ty in call.ty_args or []])
        name = call.op.name if isinstance(call.op, ir.Op) else ""
        if name == "relax.shape_of" and len(extents := _extents(given[0])):
            return relax.ShapeExpr(extents)
        if name == "relax.tensor_to_shape":
            made = [shape for tensor, shape in self.tensors if tensor.same_as(given[0])]
            return made[0] if made else call
        return call

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        made, value = self.visit_expr(binding.var), binding.value
        if isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and value.op.name == "relax.shape_to_tensor":
            shape = self._shape(value.args[0])
            if isinstance(shape, relax.ShapeExpr):
                self.tensors.append((made, shape))

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        value = self._shape(binding.value)
        said, known = self._claimed(binding.ty), _extents(value)
        if said is None or len(said) != len(known):
            super().visit_match_cast_(binding)  # of a tensor whose shape isn't known
            return
        for extent, true in zip(said, known):
            if isinstance(extent, tirx.Var) and extent not in self.defined and extent not in self.sizes:
                self.sizes[extent] = true
        analyzer = Analyzer()
        said = [substitute(extent, self.sizes) for extent in said]
        if not all(analyzer.can_prove_equal(extent, true) for extent, true in zip(said, known)):
            shape = relax.ShapeExpr(said)
            is_tensor = isinstance(binding.ty, relax.TensorType)
            claimed = relax.TensorType(shape, binding.ty.dtype) if is_tensor else relax.ShapeType(said)
            made = self.builder_.match_cast(value, claimed)
            self.said.append((relax.ShapeExpr(known), shape, str(binding.var.name)))
        else:
            made = self.builder_.emit(value)
        self.set_var_remap(binding.var, made)

    def _claimed(self, ty: ir.Type) -> Sequence[tirx.Expr] | None:
        if isinstance(ty, relax.TensorType):
            return list(ty.shape.values) if isinstance(ty.shape, relax.ShapeExpr) else None
        return list(ty.values) if isinstance(ty, relax.ShapeType) and ty.values is not None else None

    def _shape(self, argument: relax.Expr) -> relax.Expr:
        """An argument as it is now: of a shape that is known, its extents."""
        if isinstance(argument, relax.Tuple):
            return relax.Tuple([self._shape(each) for each in argument.fields])
        if isinstance(argument, relax.ShapeExpr):
            return relax.ShapeExpr([substitute(extent, self.sizes) for extent in argument.values])
        if isinstance(argument.ty, ir.PrimType):
            return substitute(argument, self.sizes)
        value = self.visit_expr(argument)
        bound = self.lookup_binding(value) if isinstance(value, relax.Var) else None
        if isinstance(bound, relax.ShapeExpr):
            return bound
        extents = _extents(value) if isinstance(value.ty, relax.ShapeType) else []
        return relax.ShapeExpr(extents) if extents else value

    def _type(self, ty: ir.Type) -> ir.Type:
        if isinstance(ty, relax.TupleType):
            return relax.TupleType([self._type(field) for field in ty.fields])
        if isinstance(ty, relax.TensorType) and isinstance(ty.shape, relax.ShapeExpr):
            return relax.TensorType(
                [substitute(extent, self.sizes) for extent in ty.shape.values], ty.dtype, ty.vdevice
            )
        return ty
