"""Attention in a model, found by what it computes, whoever wrote it.

    softmax(scale * Q @ K^T + mask) @ V,    or    R.nn.attention(Q, K, V)

The first as importers write it: the scale on either factor, on both or on the scores, leading dimensions merged or not,
nothing or a causal mask added, and what guards rows without any key (torch). What stands around is looked through:
permutations of heads and tokens, keys that are transposed, keys and values repeated for each of a group of heads.
Of unknown batches and numbers of tokens it is the second alone (`of_any_length`). What becomes of what is found:
`tvm_axe.relax.kernels` for a GPU, `tvm_axe.relax.attended` for a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from tvm import relax, tirx
from tvm.ir import IRModule, Range
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.sym import Analyzer
from tvm_ffi import structural_equal

from tvm_axe.analysis.expressions import variables_of
from tvm_axe.relax.values import Values, extents_of, is_call, shape_of

__all__ = [
    "APART", "DTYPES", "Attention", "OfAnyLength", "Source", "attentions", "laid", "of_any_length",
    "saying_what_is_left", "with_repeated_heads",
]  # fmt: skip

DTYPES = ("float32", "float16", "bfloat16")
"""What a kernel multiplies matrices of and sums in float32."""

APART = "axe_apart"
"""The attribute of a function that says which of its attentions no kernel computes, and why, a text each."""

_NOTHING = -1e30  # what is added to scores that aren't to count is at most this
_AXES = {"h": (0, 1, 2, 3), "t": (0, 2, 1, 3), "d": (0, 1, 3, 2)}
"""Which axes of a tensor are its batch, heads, tokens and dim, by how it lies."""


class Source(NamedTuple):
    """A tensor of which attention reads every head of a group alike, and how it lies.

    Attributes
    ----------
    value : Expr
        The tensor.
    order : str
        h: its heads come before its tokens, [.., heads, tokens, dim]; t: behind, [batch, tokens, heads, dim]; d: as in
        h, and its tokens come last, [.., heads, dim, tokens].
    """

    value: relax.Expr
    order: str

    @property
    def sides(self) -> tuple[int, int, int, int]:
        """Batch, heads, tokens and dim; one batch where leading dimensions are merged or more."""
        *lead, rows, columns = extents_of(self.value)
        extents = [*(lead if len(lead) == 2 else [1, math.prod(lead)]), rows, columns]
        batch, heads, tokens, dim = (extents[axis] for axis in _AXES[self.order])
        return batch, heads, tokens, dim


@dataclass(frozen=True)
class Attention:
    """An attention in terms of the model's values.

    Attributes
    ----------
    q, k, v : Source
        Its tensors. `k` and `v` have a head for each group of neighbouring ones of `q`.
    batch : int
        How many batches there are; one if the tensors don't say so alike. Then their heads are those of all batches.
    scale : float or None
        What scores are multiplied by; None of 1 / sqrt(dim).
    causal : bool
        Whether a query doesn't see the keys that are later than it; the last one sees all.
    order : str
        How its result lies, h or t.
    """

    q: Source
    k: Source
    v: Source
    batch: int
    scale: float | None
    causal: bool
    order: str

    @property
    def problem(self) -> dict[str, Any]:
        """What a kernel is asked for, but for the order of the tensors."""
        (batch, heads, queries, dim), (of_keys, kv_heads, keys, _) = self.q.sides, self.k.sides
        heads, kv_heads = batch * heads // self.batch, of_keys * kv_heads // self.batch
        sizes = {
            "batch": self.batch,
            "heads": heads,
            "kv_heads": kv_heads,
            "queries": queries,
            "keys": keys,
            "dim": dim,
        }
        own: dict[str, Any] = {**sizes, "dtype": str(self.q.value.ty.dtype), "causal": self.causal}
        return own if self.scale is None else {**own, "scale": self.scale}

    def order_of(self, source: Source) -> str:
        """How a kernel that reads either order, h or t, reads a tensor."""
        return "t" if source.order == "t" and source.sides[0] == self.batch else "h"


def laid(
    value: relax.Expr, source: Source, order: str, batch: int, emit: Callable[[relax.Expr], relax.Var]
) -> relax.Expr:
    """The value of a source as [batch, heads, tokens, dim] (h) or [batch, tokens, heads, dim] (t)."""
    own = source.order
    if own == "d":
        value, own = emit(relax.op.permute_dims(value, _turned(len(extents_of(value))))), "h"
    if own != order:
        value = emit(relax.op.permute_dims(value, [0, 2, 1, 3]))
    of, heads, tokens, dim = source.sides
    heads = of * heads // batch
    shape = [batch, heads, tokens, dim] if order == "h" else [batch, tokens, heads, dim]
    return value if extents_of(value) == shape else emit(relax.op.reshape(value, shape))


def attentions(func: relax.Function) -> dict[relax.Call, Attention]:
    """The calls of a function whose value is an attention, in order."""
    finder = _Finder(func)
    found = {call: finder.match(call) for call in finder.values.calls()}
    return {call: match for call, match in found.items() if match is not None}


def with_repeated_heads(model: IRModule) -> IRModule:
    """The model, in which no `R.nn.attention` has fewer heads of keys than of queries: they are repeated before.

    Upstream takes such calls, and what it makes of them reads keys that aren't there.
    """
    rewriter = _Repeater(model)
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function) and any(map(_times, Values(func).calls())):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(func))
    return rewriter.builder_.get()


def _times(call: relax.Call) -> int:
    """How often an attention's heads of keys are to be repeated; 0 if there are as many, and of anything else."""
    if not _is_attention(call):
        return 0
    q, k = (_sides(each)[2:3] for each in call.args[:2])
    if not all(isinstance(heads, tirx.IntImm) for heads in (*q, *k)) or not q or not k:
        return 0
    times, rest = divmod(int(q[0]), int(k[0]))
    return 0 if rest or times == 1 else times


def _is_attention(value: relax.Expr) -> TypeGuard[relax.Call]:
    """Whether a value is a call of one of the operators that are attention, with a bias or without."""
    return is_call(value, "relax.nn.attention") or is_call(value, "relax.nn.attention_bias")


def _sides(value: relax.Expr) -> list[tirx.Expr]:
    """The extents of a tensor; none if it has no shape."""
    shape = getattr(value.ty, "shape", None)
    return [*shape.values] if isinstance(shape, relax.ShapeExpr) else []


@mutator
class _Repeater(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, with keys and values that have as many heads as queries."""
        times, call = _times(call), self.visit_expr_post_order(call)
        if not times:
            return call
        q, *given = call.args
        k, v = (self.builder_.emit(relax.op.repeat(each, times, 2), "repeated") for each in given[:2])
        return relax.Call(call.op, [q, k, v, *given[2:]], call.attrs)


class OfAnyLength(NamedTuple):
    """An attention with tokens before heads, of an unknown batch, or number of queries or keys.

    Attributes
    ----------
    problem : dict
        What a kernel is asked for; what isn't known is a variable, of the name of what it is, and one where keys are as
        many as queries.
    tensors : tuple of Expr
        Its queries, keys and values; these have a head for each group of neighbouring ones of queries.
    """

    problem: dict[str, Any]
    tensors: tuple[relax.Expr, relax.Expr, relax.Expr]


def saying_what_is_left(model: IRModule) -> IRModule:
    """The model, whose functions say which operators of attention are left to be computed block by block (`APART`)."""
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function) and (found := _left(func)):
            model = model.clone()
            model[str(variable.name_hint)] = func.with_attr(APART, found)
    return model


def _left(func: relax.Function) -> list[str]:
    bindings = (binding for block in func.body.blocks for binding in block.bindings)
    calls = ((str(own.var.name), own.value) for own in bindings if isinstance(own, relax.VarBinding))
    return [f"{name}: {_why(call)}" for name, call in calls if _is_attention(call)]


def _why(call: relax.Call) -> str:
    """Why no kernel computes an attention, in words."""
    q, k = (_sides(each) for each in call.args[:2])
    dtypes = {str(each.ty.dtype) for each in call.args}
    if len(call.args) != 3 or call.attrs.window_size is not None:
        return "attention with a bias or a window isn't one kernel"
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        return f"attention of {', '.join(sorted(dtypes))} isn't one kernel; of one type of {', '.join(DTYPES)} it is"
    if len(q) != 4 or not all(isinstance(extent, tirx.IntImm) for extent in (*q[2:], *k[2:])):
        return "attention of an unknown number of heads or columns isn't one kernel"
    if call.attrs.causal_mask is not None:
        return f"causal attention of {q[1]} queries and {k[1]} keys isn't one kernel; of as many keys or more it may be"
    return "the target has no kernel for its sizes"


def of_any_length(func: relax.Function) -> dict[relax.Call, OfAnyLength]:
    """The calls of `R.nn.attention` without a bias and a window whose extents aren't all known."""
    values = Values(func)
    found = {call: _of_any_length(call, values) for call in values.calls() if is_call(call, "relax.nn.attention")}
    return {call: match for call, match in found.items() if match is not None}


def _of_any_length(call: relax.Call, values: Values) -> OfAnyLength | None:
    if len(call.args) != 3 or call.attrs.window_size is not None or None not in map(shape_of, call.args):
        return None
    single = [_unrepeated(values.of(each)) for each in call.args[1:]]
    tensors = (call.args[0], *(single if None not in single else call.args[1:]))
    q, k, v = map(_sides, tensors)
    dtypes = {str(each.ty.dtype) for each in tensors}
    if not len(q) == len(k) == len(v) == 4 or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        return None
    if not all(isinstance(extent, tirx.IntImm) for extent in (*q[2:], *k[2:])):
        return None
    (heads, dim), (kv_heads, of_dim) = (tuple(map(int, sides[2:])) for sides in (q, k))
    fits = dim == of_dim and heads % kv_heads == 0 and structural_equal(k, v) and structural_equal(q[0], k[0])
    alike, mask = structural_equal(q[1], k[1]), call.attrs.causal_mask
    if not fits or not (mask is None or alike or (str(mask) == "BottomRight" and _is_later(k[1], q[1]))):
        return None
    own: dict[str, Any] = {
        name: int(extent) if isinstance(extent, tirx.IntImm) else tirx.Var(name, "int64")
        for name, extent in (("batch", q[0]), ("queries", q[1]), ("keys", k[1]))
    }
    own |= {"keys": own["queries"]} if alike else {}
    own |= {"heads": heads, "kv_heads": kv_heads, "dim": dim, "dtype": dtypes.pop(), "causal": mask is not None}
    own |= {} if call.attrs.scale is None else {"scale": float(call.attrs.scale)}
    return OfAnyLength(own, tensors)


def _unrepeated(value: relax.Expr) -> relax.Expr | None:
    """What a tensor repeats for each of a group of heads; None if it is anything else."""
    heads = is_call(value, "relax.repeat") and value.attrs.axis is not None and int(value.attrs.axis) % 4 == 2
    return value.args[0] if heads else None


def _is_later(keys: tirx.Expr, queries: tirx.Expr) -> bool:
    """Whether there are as many keys as queries at least, whatever the sizes are that they are counted in."""
    analyzer = Analyzer()
    for size in variables_of(keys - queries):
        analyzer.bind(size, Range.from_min_extent(tirx.const(0, str(size.ty)), tirx.const(1 << 31, str(size.ty))))
    return bool(analyzer.can_prove(keys >= queries))


class _Finder:
    """Finds attentions in a function."""

    def __init__(self, func: relax.Function) -> None:
        self.values = Values(func)

    def match(self, call: relax.Call) -> Attention | None:
        """The attention that a call computes; None if it computes anything else."""
        if is_call(call, "relax.nn.attention"):
            return self._operator(call)
        return self._product(call) if is_call(call, "relax.matmul") else None

    def _operator(self, call: relax.Call) -> Attention | None:
        """The attention that `R.nn.attention` is, without a bias and a window."""
        mask, scale = call.attrs.causal_mask, call.attrs.scale
        if len(call.args) != 3 or call.attrs.window_size is not None:
            return None
        return self._of(call, [(each, "t") for each in call.args], None if scale is None else float(scale), mask, "t")

    def _product(self, call: relax.Call) -> Attention | None:
        """The attention whose weights and values a matmul multiplies."""
        weights = self._guarded(self.values.matrix(call.args[0]))
        if not is_call(weights, "relax.nn.softmax") or not _is_last(int(weights.attrs.axis), weights):
            return None
        scores, causal = self._unmasked(self.values.matrix(weights.args[0]))
        scores, scale = self._unscaled(scores)
        if causal is None or not is_call(scores, "relax.matmul"):
            return None
        (q, of_q), (k, of_k) = (self._unscaled(each) for each in scores.args)
        tensors = [(q, "h"), (k, "d"), (call.args[1], "h")]
        return self._of(call, tensors, scale * of_q * of_k, "BottomRight" if causal else None, "h")

    def _of(
        self,
        call: relax.Call,
        tensors: list[tuple[relax.Expr, str]],
        scale: float | None,
        mask: str | None,
        order: str,
    ) -> Attention | None:
        """The attention of tensors, if they fit each other; `mask` is one of upstream's names, or None."""
        given = [Source(*tensor) for tensor in tensors]
        shapes = [shape_of(each) for each in (call, *(source.value for source in given))]
        if any(shape is None or len(shape) < 3 for shape in shapes):
            return None
        heads_of = [math.prod(source.sides[:2]) for source in (Source(call, order), *given)]
        if len(set(heads_of)) > 1:  # a product that broadcasts
            return None
        q, k, v = (self._source(source) for source in given)
        if k.sides != v.sides:
            k, v = given[1:]
        (batch, heads, queries, dim), (of_keys, kv_heads, keys, _) = q.sides, k.sides
        late = mask is not None and (keys < queries or (mask == "TopLeft" and keys != queries))
        dtypes = {str(each.ty.dtype) for each in (call, q.value, k.value, v.value)}
        fits = math.prod(k.sides[:2]) == math.prod(v.sides[:2]) and k.sides[2:] == v.sides[2:] == (keys, dim)
        if not fits or late or batch * heads % (of_keys * kv_heads) or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            return None
        if len({batch, of_keys, v.sides[0], Source(call, order).sides[0]}) > 1:
            if order == "t":
                return None
            batch = 1
        if scale is not None and math.isclose(scale, dim**-0.5, rel_tol=1e-6):
            scale = None
        return Attention(q, k, v, batch, scale, mask is not None, order)

    # ---- What stands around -----------------------------------------------------------------------------------------

    def _source(self, given: Source) -> Source:
        """What a tensor of attention is made of by moving its dimensions and repeating its heads."""
        value, order = given
        rank, found, grouped = len(extents_of(value)), given, False
        if rank != 4:
            inner = self.values.of(value)
            turned = order == "d" and is_call(inner, "relax.permute_dims") and _axes(inner) == _turned(rank)
            return Source(inner.args[0], "h") if turned else given
        axes: tuple[int, ...] = _AXES[order]
        while True:
            inner = self.values.of(value)
            if is_call(inner, "relax.permute_dims"):
                moved = _axes(inner)
                value, axes = inner.args[0], tuple(moved[axis] for axis in axes)
            elif not grouped and (single := self._ungrouped(inner, axes[1])) is not None:
                value, grouped = single, True
            else:
                return found
            found = next((Source(value, letter) for letter, own in _AXES.items() if own == axes), found)

    def _ungrouped(self, value: relax.Expr, heads: int) -> relax.Expr | None:
        """What was repeated along an axis, each of its elements as often as any other, one after the other."""
        if is_call(value, "relax.repeat"):
            axis = value.attrs.axis
            return value.args[0] if axis is not None and int(axis) % 4 == heads else None
        wide = self.values.of(value.args[0]) if is_call(value, "relax.reshape") else None
        if wide is None or not is_call(wide, "relax.broadcast_to"):
            return None
        one = self.values.of(wide.args[0])
        if not is_call(one, "relax.expand_dims") and not is_call(one, "relax.reshape"):
            return None
        before, between, spread, after = (shape_of(each) for each in (one.args[0], one, wide, value))
        if before is None or between is None or spread is None or after is None or len(before) != 4:
            return None
        times = after[heads] // before[heads]
        fits = (
            between == [*before[: heads + 1], 1, *before[heads + 1 :]]
            and spread == [*before[: heads + 1], times, *before[heads + 1 :]]
            and after == [*before[:heads], before[heads] * times, *before[heads + 1 :]]
        )
        return one.args[0] if fits else None

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


def _axes(call: relax.Call) -> list[int]:
    """Which dimensions `permute_dims` takes."""
    rank = len(extents_of(call))
    axes = call.attrs.axes
    return [*range(rank)][::-1] if axes is None else [int(axis) % rank for axis in axes]


def _turned(rank: int) -> list[int]:
    """The axes that transpose matrices."""
    return [*range(rank - 2), rank - 1, rank - 2]
