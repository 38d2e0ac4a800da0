"""Operators that aren't computed well in a type of 16 bits are computed in float32, as other frameworks do::

    layer_norm(x, gamma, beta)    ->    astype(layer_norm(astype(x, "float32"), ..), "bfloat16")

Of most operators upstream's compiler widens what is computed, element by element. Of some it refuses the type, or has
no function for it; bfloat16 it sorts wrongly. And it adds sums up in the type that they are of, whose errors grow with
their length until what is added is lost: 256 is the largest number to which bfloat16 adds one. Products and
convolutions read what they read, and give their sums in float32.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import ir, relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_axe import _tvm
from tvm_axe.relax.values import rewritten

__all__ = ["widened", "with_wide_attention"]

_WIDE = "float32"
_REFUSED = {
    "bfloat16": (
        "nn.layer_norm", "power", "mod", "floor_mod", "isnan", "isinf", "isfinite", "argmax", "argmin",
        "sort", "argsort", "topk", "median",
    ),
    "float16": ("asin", "acos", "atan", "asinh", "acosh", "atan2", "nn.softplus"),
}  # fmt: skip
"""What upstream has no function for, or computes wrongly; of float16 exponentials that are more than it holds."""
_SUMS = (
    "sum", "mean", "variance", "std", "prod", "cumsum", "cumprod", "einsum", "collapse_sum_like", "collapse_sum_to",
    "nn.softmax", "nn.log_softmax", "nn.group_norm", "nn.instance_norm", "nn.nll_loss", "nn.cross_entropy_with_logits",
    "image.grid_sample",  # which upstream gives in float32, whatever type it says
    *(f"nn.{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)),
)  # fmt: skip
_SCATTERED = ("scatter_elements", "scatter_nd")  # sums, unless they store
_CONVOLUTIONS = tuple(f"nn.conv{n}d{kind}" for n in (1, 2, 3) for kind in ("", "_transpose"))
_ATTENTION = ("nn.attention", "nn.attention_bias")
_OPERATORS = {dtype: frozenset((*names, *_SUMS)) for dtype, names in _REFUSED.items()}


def widened(model: IRModule, matmuls: bool) -> IRModule:
    """The model without operators that aren't computed well in the types that they have.

    >>> x = relax.Var("x", relax.TensorType((4,), "bfloat16"))
    >>> builder = relax.BlockBuilder()
    >>> with builder.function("main", [x]):
    ...     _ = builder.emit_func_output(builder.emit(relax.op.power(x, x)))
    >>> print(str(widened(builder.get(), matmuls=True)["main"].body.blocks[0]).count("astype"))
    3

    Parameters
    ----------
    model : IRModule
        The model.
    matmuls : bool
        Whether products of matrices are among them: not on GPUs, whose kernels sum them in float32 by themselves.
    """
    products = {f"relax.{name}" for name in ("matmul", *_CONVOLUTIONS)[0 if matmuls else 1 :]}

    def found(call: relax.Call, name: str) -> bool:
        return (name in products and call.attrs.out_dtype != _WIDE) or _is_narrow(call, name)

    return _rewritten(model, found)


def with_wide_attention(model: IRModule) -> IRModule:
    """The model, with attention that is an operator still computed in float32: no kernel has its sizes.

    Upstream computes the softmax of it in the type of its operands.
    """
    return _rewritten(model, lambda call, name: name.removeprefix("relax.") in _ATTENTION)


def _rewritten(model: IRModule, narrow: Callable[[relax.Call, str], bool]) -> IRModule:
    """The model with calls of 16 bits computed in float32 of which that holds, by their operator's name."""

    def is_narrow(call: relax.Call) -> bool:
        name = str(call.op.name) if isinstance(call.op, ir.Op) else ""
        return any(_dtype(value) in _OPERATORS for value in _tensors(call)) and narrow(call, name)

    return rewritten(model, is_narrow, lambda whole: _Rewriter(whole, is_narrow))


def _dtype(value: relax.Expr) -> str:
    return str(value.ty.dtype) if isinstance(value.ty, relax.TensorType) else ""


def _tensors(call: relax.Call) -> list[relax.Expr]:
    """What a call takes, those of its tuples among it."""
    return [each for value in call.args for each in (value.fields if isinstance(value, relax.Tuple) else [value])]


def _is_narrow(call: relax.Call, name: str) -> bool:
    short = name.removeprefix("relax.")
    if short in _SCATTERED:
        return str(call.attrs.reduction) != "update"
    return any(short in _OPERATORS.get(_dtype(value), ()) for value in _tensors(call))


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, model: IRModule, is_narrow: Callable[[relax.Call], bool]) -> None:
        super().__init__(model)
        self._is_narrow = is_narrow

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, of wide arguments where it has to be; its results have the types that they had."""
        done = super().visit_call_(call)
        if not self._is_narrow(call):
            return done
        emit = self.builder_.emit
        if "out_dtype" in dir(call.attrs):
            return self._as(emit(_tvm.with_attributes(done, out_dtype=_WIDE)), call.ty)
        made = emit(relax.Call(done.op, [self._wide(value) for value in done.args], done.attrs))
        if isinstance(call.ty, relax.TupleType):
            fields = [emit(relax.TupleGetItem(made, at)) for at in range(len(call.ty.fields))]
            return relax.Tuple([self._as(field, ty) for field, ty in zip(fields, call.ty.fields, strict=True)])
        return self._as(made, call.ty)

    def _wide(self, value: relax.Expr) -> relax.Expr:
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._wide(field) for field in value.fields])
        return self.builder_.emit(relax.op.astype(value, _WIDE)) if _dtype(value) in _OPERATORS else value

    def _as(self, value: relax.Expr, ty: relax.TensorType) -> relax.Expr:
        dtype = str(ty.dtype)
        return value if _dtype(value) == dtype else self.builder_.emit(relax.op.astype(value, dtype))
