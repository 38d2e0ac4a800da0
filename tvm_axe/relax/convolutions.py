"""Convolutions of images as a CPU computes them best: norms in their weights, and channels last.

A batch norm behind a convolution scales and shifts each channel, which weights that are constants can do as well::

    batch_norm(conv2d(x, w), gamma, beta, mean, variance)    ->    conv2d(x, w * s) + (beta - mean * s)
                                                                   with s = gamma / sqrt(variance + epsilon)

Of images [N, H, W, C] a register tile stores whole vectors, and what it reads for one pixel lies together: so a model's
convolutions take them, with what is between; upstream's `ConvertLayout` moves the dimensions. Convolutions that have
each channel for itself take vectors along the rows of images instead (`tvm_axe.nests.planes`), and a model with such,
or with a single convolution, stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_axe import _tvm
from tvm_axe.relax.values import Values, is_call, shape_of

__all__ = ["with_convolutions"]

_CONV, _TRANSPOSED, _NORM = "relax.nn.conv2d", "relax.nn.conv2d_transpose", "relax.nn.batch_norm"


def with_convolutions(model: IRModule) -> IRModule:
    """The model with its convolutions as they are computed best; it computes the same."""
    found = [_convolutions(func) for _, func in model.functions_items() if isinstance(func, relax.Function)]
    if not any(found):
        return model
    rewriter = _Norms(model)
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            rewriter.uses = _uses(func)
            rewriter.builder_.update_func(variable, rewriter.visit_expr(func))
    folded = relax.transform.DeadCodeElimination()(rewriter.builder_.get())
    if max(map(len, found)) < 2 or not all(_is_dense(call) for calls in found for call in calls):
        return folded
    counted = relax.transform.Normalize()(_Counted.from_the_front(folded))
    # Upstream has no function for a transposed convolution with channels last, and its pass would make one.
    moved = relax.transform.ConvertLayout({_CONV: ["NHWC", "OHWI"], _TRANSPOSED: ["NCHW", "IOHW"]})(counted)
    return relax.transform.Normalize()(moved)


def _convolutions(func: relax.Function) -> list[relax.Call]:
    return [call for call in Values(func).calls() if is_call(call, _CONV)]


def _is_dense(call: relax.Call) -> bool:
    """Whether a convolution's outputs are made of several channels each, all extents being constant."""
    weights = shape_of(call.args[1])
    if weights is None or shape_of(call.args[0]) is None or shape_of(call) is None:
        return False
    return str(call.attrs.data_layout) == "NCHW" and weights[str(call.attrs.kernel_layout).index("I")] > 1


def _uses(func: relax.Function) -> Counter[relax.Var]:
    """How often each variable is read by what is bound to others, or returned."""
    found: Counter[relax.Var] = Counter()

    def visit(node: relax.Expr) -> None:
        if isinstance(node, relax.SeqExpr):
            found.update([node.body] if isinstance(node.body, relax.Var) else [])
        for part in (*getattr(node, "args", ()), *getattr(node, "fields", ())):
            found.update([part] if isinstance(part, relax.Var) else [])

    relax.analysis.post_order_visit(func, visit)
    return found


@mutator
class _Counted(PyExprMutator):
    """Counts dimensions from the front where upstream's `ConvertLayout` takes those from the back for others."""

    @classmethod
    def from_the_front(cls, model: IRModule) -> IRModule:
        """The model with no dimension of such an operator counted from the back."""
        counted = cls(model)
        for variable, func in model.functions_items():
            if isinstance(func, relax.Function):
                counted.builder_.update_func(variable, counted.visit_expr(func))
        return counted.builder_.get()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, its dimensions counted from the front."""
        done = super().visit_call_(call)
        if is_call(done, "relax.permute_dims") and done.attrs.axes is not None:
            return relax.op.permute_dims(done.args[0], _from_the_front(done.attrs.axes, done.args[0]))
        if is_call(done, "relax.squeeze") and done.attrs.axis is not None:
            return relax.op.squeeze(done.args[0], _from_the_front(done.attrs.axis, done.args[0]))
        if is_call(done, "relax.stack") and isinstance(call.args[0], relax.Tuple):  # it takes it for a concatenation
            (axis,) = _from_the_front([done.attrs.axis or 0], call)
            parts = [self.builder_.emit(relax.op.expand_dims(part, axis)) for part in done.args[0].fields]
            return relax.op.concat(parts, axis)
        return done


def _from_the_front(axes: Sequence[int], of: relax.Expr) -> list[int]:
    return [int(axis) % of.ty.ndim if of.ty.ndim > 0 else int(axis) for axis in axes]


@mutator
class _Norms(PyExprMutator):
    """Folds norms into the convolutions that nothing else reads."""

    uses: Counter[relax.Var]

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        """The norm's result, as the convolution with other weights and a bias."""
        done = super().visit_tuple_getitem_(item)
        norm = self._of(item.tuple_value)
        if item.index != 0 or not is_call(norm, _NORM):
            return done
        data, *given = norm.args
        conv = self._of(data)
        arrays = [self._constant(value) for value in given]
        if not is_call(conv, _CONV) or self.uses[data] != 1 or any(array is None for array in arrays):
            return done
        weights, layout = self._constant(conv.args[1]), str(conv.attrs.out_layout or conv.attrs.data_layout)
        axis = int(norm.attrs.axis)
        if weights is None or axis != layout.find("C") or str(norm.ty.fields[0].dtype) != str(weights.dtype):
            return done
        gamma, beta, mean, variance = (np.asarray(array, "float64") for array in arrays)
        scale = (gamma if norm.attrs.scale else 1.0) / np.sqrt(variance + float(norm.attrs.epsilon))
        shift = (beta if norm.attrs.center else 0.0) - mean * scale
        by_output = [1] * weights.ndim
        by_output[str(conv.attrs.kernel_layout).index("O")] = -1
        by_channel = [1] * len(layout)
        by_channel[axis] = -1
        kind = weights.dtype
        scaled = relax.const((weights * scale.reshape(by_output)).astype(kind))
        product = self.builder_.emit(relax.Call(conv.op, [self.visit_expr(conv.args[0]), scaled], conv.attrs))
        return relax.op.add(product, relax.const(shift.reshape(by_channel).astype(kind)))

    def _of(self, value: relax.Expr) -> relax.Expr:
        while isinstance(value, relax.Var) and (found := self.lookup_binding(value)) is not None:
            value = found
        return value

    def _constant(self, value: relax.Expr) -> np.ndarray | None:
        found = self._of(value)
        return _tvm.as_array(found.value) if isinstance(found, GenericConst) else None
