"""Shapes that a model computes of other shapes become known: what is left of them are its parameters' variables.

Importers ask tensors for their shapes, make tensors of these and shapes of such tensors, and say by `match_cast` what
came out. Where that follows from the shapes of the parameters it is worked out here, so that operators that want a
shape get one, and no variable is left that stands for what is known:

===================================================== ================================================================
``s = shape_of(x)``; ``t = shape_to_tensor(s)``       ``R.shape([n, 8])``, wherever `s` is used
``u = maximum(take(t, 0) + 1, 0)``                    the number ``n + 1``, as no size is negative
``s = tensor_to_shape(t)``                            the same shape again
``s1 = match_cast(s, R.Shape([q, 8]))``               the same, and `n` for `q` from there on
``y = match_cast(x, R.Tensor((q, 8)))``               `x`, and `n` for `q` from there on
===================================================== ================================================================

Where a match_cast says something else than what follows, that is kept, to be compared when the model is called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import ir, relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.sym import Analyzer

from tvm_axe.analysis.expressions import substitute, variables_of

__all__ = ["SAID", "says_shapes", "with_known_shapes", "with_shapes_for_operators"]

_SAME = ("reshape", "squeeze", "expand_dims", "astype")
_ARITHMETIC = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "negative": operator.neg,
    "floor_divide": tirx.floordiv, "maximum": tirx.max, "minimum": tirx.min,
}  # fmt: skip
_LARGEST = 1 << 40  # no tensor has more rows

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


def with_shapes_for_operators(model: tvm.IRModule) -> tvm.IRModule:
    """Return a model without what is computed of shapes, if a tensor has no shape without that; else as it is.

    Upstream makes no function of an operator whose result's shape isn't known.
    """
    functions = [func for _, func in model.functions_items() if isinstance(func, relax.Function)]
    return with_known_shapes(model) if any(_lacks_shapes(func) for func in functions) else model


def _lacks_shapes(func: relax.Function) -> bool:
    kinds = [each.var.ty for each in _bindings(func)]
    return any(isinstance(kind, relax.TensorType) and not isinstance(kind.shape, relax.ShapeExpr) for kind in kinds)


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
        Tensors of integers that are made of sizes, of one dimension or none, each with its elements.
    said : list
        What `SAID` is to be.
    """

    def __init__(self, model: tvm.IRModule) -> None:
        super().__init__(model)
        self.defined: set[tirx.Var] = set()
        self.sizes: dict[tirx.Var, tirx.Expr] = {}
        self.tensors: list[tuple[relax.Var, Sequence[tirx.Expr]]] = []
        self.said: list[tuple[relax.ShapeExpr, relax.ShapeExpr, str]] = []

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        given = [self._shape(argument) for argument in call.args]
        call = relax.Call(call.op, given, call.attrs, [self._type(ty) for ty in call.ty_args or []])
        name = call.op.name if isinstance(call.op, ir.Op) else ""
        if name == "relax.shape_of" and len(extents := _extents(given[0])):
            return relax.ShapeExpr(extents)
        if name == "relax.tensor_to_shape":
            elements = self._elements(given[0])
            return call if elements is None else relax.ShapeExpr(elements)
        return call

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        self._know(self.visit_expr(binding.var), binding.value)

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
        self._know(made, binding.value)

    def _know(self, made: relax.Var, value: relax.Expr) -> None:
        """Note the elements of a tensor of integers, where they follow from sizes."""
        kind = made.ty
        if not isinstance(kind, relax.TensorType) or kind.ndim > 1 or str(kind.dtype) not in ("int32", "int64"):
            return
        elements = self._computed(value) if isinstance(value, relax.Call) else self._elements(self.visit_expr(value))
        if elements is not None:
            self.tensors.append((made, elements))

    def _elements(self, value: relax.Expr) -> Sequence[tirx.Expr] | None:
        """The elements of a tensor of integers that are known, as constants are."""
        if isinstance(value, ir.GenericConst) and len(value.ty.shape) <= 1 and str(value.ty.dtype).startswith("int"):
            return [tirx.IntImm("int64", int(each)) for each in np.ravel(value.value.numpy())]
        return next((elements for tensor, elements in self.tensors if tensor.same_as(value)), None)

    def _computed(self, call: relax.Call) -> Sequence[tirx.Expr] | None:
        """The elements of what an operator makes of such tensors."""
        name = str(call.op.name).removeprefix("relax.") if isinstance(call.op, ir.Op) else ""
        if name == "shape_to_tensor":
            shape = self._shape(call.args[0])
            return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None
        taken = call.args[:1] if name in _SAME else call.args
        tensors = [field for each in taken for field in (each.fields if isinstance(each, relax.Tuple) else [each])]
        given = [self._elements(self.visit_expr(tensor)) for tensor in tensors]
        known = [elements for elements in given if elements is not None]
        if len(known) != len(given):
            return None
        if name in _SAME:
            return known[0]
        if name == "concat":
            return [element for elements in known for element in elements]
        if name == "take":
            at = [int(each) if isinstance(each, tirx.IntImm) else -1 for each in known[1]]
            return [known[0][each] for each in at] if all(0 <= each < len(known[0]) for each in at) else None
        return self._by_elements(_ARITHMETIC[name], known) if name in _ARITHMETIC else None

    def _by_elements(
        self, function: Callable[..., tirx.Expr], given: Sequence[Sequence[tirx.Expr]]
    ) -> Sequence[tirx.Expr] | None:
        count = max(map(len, given))
        if any(len(elements) not in (1, count) for elements in given):
            return None
        rows = [[elements[at % len(elements)] for elements in given] for at in range(count)]
        if function is tirx.floordiv and any(not isinstance(two, tirx.IntImm) or int(two) == 0 for _, two in rows):
            return None
        analyzer = Analyzer()
        for var in self.defined:
            analyzer.bind(var, ir.Range.from_min_extent(0, _LARGEST))
        return [analyzer.simplify(function(*row)) for row in rows]

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
