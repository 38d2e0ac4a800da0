"""Attention in a model, found by what it computes, becomes one kernel that keeps no scores in memory.

    softmax(scale * Q @ K^T + mask) @ V    ->    call_tir(attention, Q, K, V)

as importers write it: the scale on either factor, on both or on the scores, leading dimensions merged or not, nothing
or a causal mask added, and what guards rows without any key (torch). `R.nn.attention` is taken as well. The kernel is
that of `tvm_axe.tile.kernels` for the target; what it doesn't compute stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines import find_backend
from tvm_axe.relax.values import Values, extents_of, is_call, shape_of
from tvm_axe.tile import lowering
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.kernel import Problem

__all__ = ["with_attention"]

_LEAST = 16  # queries: of fewer most of the kernel's tiles would be empty
_DTYPES = ("float32", "float16", "bfloat16")
_NOTHING = -1e30  # what is added to scores that aren't to count is at most this


def with_attention(model: IRModule, target: Target) -> IRModule:
    """The model with a call of a tile kernel for each attention that one computes on the target."""
    if not isinstance(find_backend(target), TileBackend):
        return model
    kernels: dict[str, tirx.PrimFunc | None] = {}
    found = {
        variable: _Finder(func, target, kernels).found
        for variable, func in model.functions_items()
        if isinstance(func, relax.Function)
    }
    if not any(found.values()):
        return model
    rewriter = _Rewriter(model, target, kernels)
    for variable, calls in found.items():
        rewriter.calls = calls
        rewriter.builder_.update_func(variable, rewriter.visit_expr(model[variable]))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


@dataclass(frozen=True)
class _Attention:
    """An attention in terms of the model's values.

    Attributes
    ----------
    q, v : Expr
        [.., queries, dim] and [.., keys, dim].
    k : Expr
        [.., dim, keys].
    scale : float
        What scores are multiplied by.
    causal : bool
        Whether a query doesn't see the keys that are later than it; the last one sees all.
    heads_inside : bool
        Whether q, k and v are [batch, tokens, heads, dim] instead, as `R.nn.attention` has them, and its result.
    """

    q: relax.Expr
    k: relax.Expr
    v: relax.Expr
    scale: float
    causal: bool
    heads_inside: bool = False

    @property
    def problem(self) -> Problem:
        """What the kernel is asked for: leading dimensions are heads."""
        if self.heads_inside:
            (batch, queries, count, dim), keys = extents_of(self.q), extents_of(self.k)[1]
            heads = batch * count
        else:
            (*lead, queries, dim), keys = extents_of(self.q), extents_of(self.k)[-1]
            heads = math.prod(lead)
        sizes = {"batch": 1, "heads": heads, "kv_heads": heads, "queries": queries, "keys": keys, "dim": dim}
        return {**sizes, "dtype": str(self.q.ty.dtype), "causal": self.causal}


def _kernel(target: Target, problem: Problem, kernels: dict[str, tirx.PrimFunc | None]) -> tirx.PrimFunc | None:
    """The kernel of a problem, lowered for the target; None if it can't compute that there."""
    name = repr(problem)
    if name not in kernels:
        try:
            (program,) = KERNELS["attention"].recipe(target, problem).programs
            kernels[name] = lowering.lower(program, target).without_attr("global_symbol")
        except TileError:
            kernels[name] = None
    return kernels[name]


class _Finder:
    """Finds the calls of a function whose value is an attention."""

    def __init__(self, func: relax.Function, target: Target, kernels: dict[str, tirx.PrimFunc | None]) -> None:
        self.values = Values(func)
        self.found: dict[relax.Call, _Attention] = {}
        for call in self.values.calls():
            match = self._match(call)
            if match is not None and _kernel(target, match.problem, kernels) is not None:
                self.found[call] = match

    def _match(self, call: relax.Call) -> _Attention | None:
        if is_call(call, "relax.nn.attention"):
            return self._operator(call)
        if not is_call(call, "relax.matmul"):
            return None
        found = self._product(call)
        if found is None or any(len(shape_of(each) or []) < 3 for each in (found.q, found.k, found.v)):
            return None
        shapes = [extents_of(each) for each in (found.q, found.k, found.v)]
        (*lead, queries, dim), (*others, _, keys), values = shapes
        heads = {math.prod(each) for each in (lead, others, values[:-2])}
        fits = queries >= _LEAST and len(heads) == 1 and values[-2:] == [keys, dim] and shape_of(call) is not None
        dtypes = {str(each.ty.dtype) for each in (found.q, found.k, found.v, call)}
        if not fits or len(dtypes) > 1 or not dtypes <= {*_DTYPES} or (found.causal and keys < queries):
            return None
        return found

    def _operator(self, call: relax.Call) -> _Attention | None:
        """The attention that `R.nn.attention` is, without a bias and a window."""
        if len(call.args) != 3 or call.attrs.window_size is not None or None in map(shape_of, call.args):
            return None
        shapes = [extents_of(each) for each in call.args]
        (batch, queries, heads, dim), keys, values = shapes
        fits = queries >= _LEAST and keys == values == [batch, keys[1], heads, dim]
        mask = call.attrs.causal_mask
        if not fits or str(call.ty.dtype) not in _DTYPES or (mask == "TopLeft" and queries != keys[1]):
            return None
        scale = dim**-0.5 if call.attrs.scale is None else float(call.attrs.scale)
        causal = mask is not None and keys[1] >= queries
        q, k, v = call.args
        return _Attention(q, k, v, scale, causal, True) if causal == (mask is not None) else None

    def _product(self, call: relax.Call) -> _Attention | None:
        """The attention whose weights and values a matmul multiplies."""
        weights = self._guarded(self.values.matrix(call.args[0]))
        if not is_call(weights, "relax.nn.softmax") or not _is_last(int(weights.attrs.axis), weights):
            return None
        scores, causal = self._unmasked(self.values.matrix(weights.args[0]))
        scores, scale = self._unscaled(scores)
        if causal is None or not is_call(scores, "relax.matmul"):
            return None
        (q, of_q), (k, of_k) = (self._unscaled(each) for each in scores.args)
        return _Attention(q, k, call.args[1], scale * of_q * of_k, causal)

    def _guarded(self, weights: relax.Expr) -> relax.Expr:
        """The softmax in what replaces its rows by zeros where no score counts, as torch writes it."""
        if not is_call(weights, "relax.where"):
            return weights
        condition, zero, softmax = (self.values.matrix(each) for each in weights.args)
        for name in ("relax.logical_not", "relax.astype", "relax.max", "relax.astype", "relax.logical_not"):
            if not is_call(condition, name):
                return weights
            condition = self.values.of(condition.args[0])
        same = is_call(condition, "relax.equal") and is_call(softmax, "relax.nn.softmax")
        if not same or not condition.args[0].same_as(softmax.args[0]):
            return weights
        infinite, filled = self.values.scalar(condition.args[1]), self.values.scalar(zero)
        return softmax if infinite == -math.inf and filled == 0 else weights

    def _unmasked(self, scores: relax.Expr) -> tuple[relax.Expr, bool | None]:
        """Scores before a mask is added, and whether that is causal; None of a mask that is anything else."""
        if not is_call(scores, "relax.add"):
            return scores, False
        for inner, mask in (scores.args, scores.args[::-1]):
            array = self.values.constant(mask)
            if array is not None and shape_of(inner) == shape_of(scores):
                queries, keys = extents_of(scores)[-2:]
                return self.values.matrix(inner), _is_causal(array, queries, keys)
        return scores, None

    def _unscaled(self, value: relax.Expr) -> tuple[relax.Expr, float]:
        """A value before it is multiplied by numbers, and their product; reshapes that keep its matrices are none."""
        scale = 1.0
        while True:
            call = self.values.matrix(value)
            if is_call(call, "relax.multiply"):
                factors = [(a, self.values.scalar(b)) for a, b in (call.args, call.args[::-1])]
            elif is_call(call, "relax.divide"):
                divisor = self.values.scalar(call.args[1])
                factors = [(call.args[0], 1 / divisor if divisor else None)]
            else:
                return value if shape_of(call) != shape_of(value) else call, scale
            inner = next(((a, factor) for a, factor in factors if factor is not None), None)
            if inner is None or shape_of(inner[0]) != shape_of(call):
                return value, scale
            value, scale = inner[0], scale * inner[1]


def _is_last(axis: int, value: relax.Expr) -> bool:
    return axis in (-1, len(shape_of(value) or []) - 1)


def _is_causal(mask: np.ndarray, queries: int, keys: int) -> bool | None:
    """Whether a mask hides the keys after each query, or nothing; None of any other."""
    if math.prod(mask.shape[:-2]) != 1:
        return None
    mask = np.broadcast_to(mask.reshape(mask.shape[-2:] if mask.ndim > 1 else mask.shape), (queries, keys))
    if not mask.any():
        return False
    rows, columns = np.indices(mask.shape)
    later = columns > rows + keys - queries
    return True if bool((mask[later] <= _NOTHING).all()) and not mask[~later].any() else None


@mutator
class _Rewriter(PyExprMutator):
    """Puts calls of kernels in the places of attentions."""

    def __init__(self, model: IRModule, target: Target, kernels: dict[str, tirx.PrimFunc | None]) -> None:
        super().__init__(model)
        self.target, self.kernels = target, kernels
        self.calls: dict[relax.Call, _Attention] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, or that of a kernel in its place."""
        match = self.calls.get(call)
        if match is None:
            return super().visit_call_(call)
        emit, problem = self.builder_.emit, match.problem
        heads, queries, keys, dim = (problem[name] for name in ("heads", "queries", "keys", "dim"))
        q, k, v = (self.visit_expr(each) for each in (match.q, match.k, match.v))
        own = 1 / math.sqrt(dim)  # the kernel's scale
        if not math.isclose(match.scale, own, rel_tol=1e-6):
            q = emit(relax.op.multiply(q, relax.const(match.scale / own, problem["dtype"])))
        if match.heads_inside:
            q, k, v = (emit(relax.op.permute_dims(each, [0, 2, 1, 3])) for each in (q, k, v))
        else:
            rank = len(extents_of(match.k))
            k = emit(relax.op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2]))
        operands = [
            emit(relax.op.reshape(each, (1, heads, rows, dim))) for each, rows in ((q, queries), (k, keys), (v, keys))
        ]
        kernel = _kernel(self.target, problem, self.kernels)
        variable = self.builder_.add_func(kernel, "attention")
        kind = relax.TensorType((1, heads, queries, dim), problem["dtype"])
        out = emit(relax.call_tir(variable, operands, out_ty=kind))
        if not match.heads_inside:
            return relax.op.reshape(out, extents_of(call))
        batch = extents_of(call)[0]
        return relax.op.permute_dims(emit(relax.op.reshape(out, (batch, heads // batch, queries, dim))), [0, 2, 1, 3])
