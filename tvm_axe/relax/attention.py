"""Attention in a model, found by what it computes, whoever wrote it.

    softmax(scale * Q @ K^T + mask) @ V,    or    R.nn.attention(Q, K, V)    or    R.nn.attention_bias(Q, K, V, mask)

The first as importers write it: the scale on either factor, on both or on the scores, leading dimensions merged or not,
nothing or a causal mask added, of all keys or a window of them, a sink, which is one score more for each head that has
no value (gpt-oss), and what guards rows without any key (torch). What stands around is looked through: permutations of
heads and tokens, keys that are transposed, keys and values repeated for each of a group of heads. Batches, queries and
keys may be as many as a call brings. What becomes of what is found: `tvm_axe.relax.kernels` for a GPU,
`tvm_axe.relax.attended` for a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tvm import relax, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from tvm_axe.analysis.expressions import variables_of
from tvm_axe.relax.masks import Mask, mask_added
from tvm_axe.relax.operators_of_attention import DTYPES
from tvm_axe.relax.scores import Scores, is_last
from tvm_axe.relax.values import Side, Values, alike, extents_of, is_call, product, sides_of

__all__ = ["Attention", "Source", "attentions"]

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
    def sides(self) -> tuple[Side, Side, Side, Side]:
        """Batch, heads, tokens and dim; one batch where leading dimensions are merged or more."""
        *lead, rows, columns = sides_of(self.value) or []
        extents = [*(lead if len(lead) == 2 else [1, product(lead)]), rows, columns]
        batch, heads, tokens, dim = (extents[axis] for axis in _AXES[self.order])
        return batch, heads, tokens, dim

    def heads(self, batch: Side) -> Side:
        """Its heads where it is seen as of so many batches: as many as there are, or as there are of all heads."""
        of, heads = self.sides[:2]
        if alike([of], [batch]):
            return heads
        total = product([of, heads])
        return total // batch if isinstance(total, int) and isinstance(batch, int) else 1


@dataclass(frozen=True)
class Attention:
    """An attention in terms of the model's values.

    Attributes
    ----------
    q, k, v : Source
        Its tensors. `k` and `v` have a head for each group of neighbouring ones of `q`.
    batch : int or Expr
        How many batches there are. If the tensors don't say so alike it is one, and their heads are those of all
        batches; or, if these aren't known, each head is a batch.
    scale : float or None
        What scores are multiplied by; None of 1 / sqrt(dim).
    mask : Mask
        Which keys a query sees.
    order : str
        How its result lies, h or t.
    sinks : Expr or None
        A score more for each head, of a key whose value is zero; scores are scaled before.
    """

    q: Source
    k: Source
    v: Source
    batch: Side
    scale: float | None
    mask: Mask
    order: str
    sinks: relax.Expr | None = None

    @property
    def is_known(self) -> bool:
        """Whether all extents are numbers."""
        return all(isinstance(extent, int) for extent in (self.batch, self.q.sides[2], self.k.sides[2]))

    @property
    def problem(self) -> dict[str, Any]:
        """What a kernel is asked for, but for the order of the tensors.

        What isn't known is a variable of its name, a new one in each call; keys are the one of queries if as many.
        """
        queries, keys, dim = (*self.q.sides[2:3], *self.k.sides[2:])
        sizes: dict[str, Any] = {
            "batch": _variable(self.batch, "batch"),
            "heads": self.q.heads(self.batch),
            "kv_heads": self.k.heads(self.batch),
            "queries": _variable(queries, "queries"),
        }
        sizes["keys"] = sizes["queries"] if alike([queries], [keys]) else _variable(keys, "keys")
        own = {**sizes, "dim": dim, "dtype": str(self.q.value.ty.dtype), "causal": self.mask.causal}
        asked = {"scale": self.scale, "window": self.mask.window, "sinks": self.sinks is not None or None}
        return own | {name: value for name, value in asked.items() if value is not None}

    @property
    def letters(self) -> str:
        """How a kernel that reads either order, h or t, reads the tensors, and how the result lies, a letter each."""
        return "".join((*map(self.order_of, (self.q, self.k, self.v)), self.order))

    @property
    def result(self) -> list[Side]:
        """The extents of what such a kernel leaves."""
        heads, (*_, queries, dim) = self.q.heads(self.batch), self.q.sides
        return [self.batch, *((heads, queries) if self.order == "h" else (queries, heads)), dim]

    def order_of(self, source: Source) -> str:
        """How a kernel that reads either order, h or t, reads a tensor."""
        return "t" if source.order == "t" and alike(source.sides[:1], [self.batch]) else "h"

    def operands(
        self,
        letters: str,
        batch: Side,
        visited: Callable[[relax.Expr], relax.Expr],
        emit: Callable[[relax.Expr], relax.Var],
    ) -> list[relax.Expr]:
        """Its tensors as a kernel of so many batches reads them, a letter each; what they are made of is `visited`."""
        sources = zip((self.q, self.k, self.v), letters)
        tensors = [_laid(visited(source.value), source, letter, batch, emit) for source, letter in sources]
        if self.sinks is None:
            return tensors
        scores, heads = visited(self.sinks), product(extents_of(self.sinks))
        if len(extents_of(self.sinks)) != 1:
            scores = emit(relax.op.reshape(scores, (heads,)))
        if str(scores.ty.dtype) != "float32":
            scores = emit(relax.op.astype(scores, "float32"))
        times = self.q.heads(batch) // heads
        return [*tensors, scores if times == 1 else emit(relax.op.tile(scores, [times]))]


def _variable(extent: Side, name: str) -> int | tirx.Var:
    return extent if isinstance(extent, int) else tirx.Var(name, "int64")


def _laid(
    value: relax.Expr, source: Source, order: str, batch: Side, emit: Callable[[relax.Expr], relax.Var]
) -> relax.Expr:
    """The value of a source as [batch, heads, tokens, dim] (h) or [batch, tokens, heads, dim] (t)."""
    own = source.order
    if own == "d":
        value, own = emit(relax.op.permute_dims(value, _turned(len(sides_of(value) or [])))), "h"
    if own != order:
        value = emit(relax.op.permute_dims(value, [0, 2, 1, 3]))
    heads, (*_, tokens, dim) = source.heads(batch), source.sides
    shape = [batch, heads, tokens, dim] if order == "h" else [batch, tokens, heads, dim]
    return value if alike(sides_of(value) or [], shape) else emit(relax.op.reshape(value, shape))


def attentions(func: relax.Function) -> dict[relax.Call, Attention]:
    """The calls of a function whose value is an attention, in order."""
    finder = _Finder(func)
    found = {call: finder.match(call) for call in finder.values.calls()}
    return {call: match for call, match in found.items() if match is not None}


class _Finder:
    """Finds attentions in a function."""

    def __init__(self, func: relax.Function) -> None:
        self.values = Values(func)
        self._scores = Scores(self.values)

    def match(self, call: relax.Call) -> Attention | None:
        """The attention that a call computes; None if it computes anything else."""
        if is_call(call, "relax.nn.attention") or is_call(call, "relax.nn.attention_bias"):
            return self._operator(call)
        return self._product(call) if is_call(call, "relax.matmul") else None

    def _operator(self, call: relax.Call) -> Attention | None:
        """The attention that `R.nn.attention` is, without upstream's window; with a bias that is a mask."""
        causal, scale = call.attrs.causal_mask, call.attrs.scale
        if call.attrs.window_size is not None or (len(call.args) > 3 and causal is not None):
            return None
        order, mask = causal, Mask(causal is not None)
        if len(call.args) > 3:
            q, k = (sides_of(each) for each in call.args[:2])
            if q is None or k is None or len(q) != 4 or len(k) != 4:
                return None
            found = mask_added(self.values, call.args[3], [q[0], q[2], q[1], k[1]])
            if found is None:
                return None
            order, mask = "BottomRight" if found.causal else None, found
        tensors = [(each, "t") for each in call.args[:3]]
        return self._of(call, tensors, None if scale is None else float(scale), order, mask, "t")

    def _product(self, call: relax.Call) -> Attention | None:
        """The attention whose weights and values a matmul multiplies."""
        weights = self._scores.guarded(self._scores.uncast(self.values.matrix(call.args[0])))
        kept = self._scores.kept(weights)
        softmax = self._scores.uncast(weights if kept is None else kept)
        if not is_call(softmax, "relax.nn.softmax") or not is_last(int(softmax.attrs.axis), softmax):
            return None
        scores, sinks = self._scores.uncast(self.values.matrix(softmax.args[0])), None
        if kept is not None:
            scores, sinks = self._scores.without_sinks(scores)
            if sinks is None or not alike(sides_of(scores) or [], sides_of(weights) or []):
                return None
            scores = self._scores.uncast(self.values.matrix(scores))
        scores, mask = self._scores.unmasked(scores)
        scores, scale = self._scores.unscaled(scores)
        scores = self.values.matrix(scores)
        if mask is None or not is_call(scores, "relax.matmul"):
            return None
        (q, of_q), (k, of_k) = (self._scores.unscaled(each) for each in scores.args)
        tensors = [(q, "h"), (k, "d"), (call.args[1], "h")]
        order = "BottomRight" if mask.causal else None
        found = self._of(call, tensors, scale * of_q * of_k, order, mask, "h")
        if found is None or sinks is None:
            return found
        heads, all_heads = product(extents_of(sinks)), found.q.heads(found.batch)
        return replace(found, sinks=sinks) if all_heads % heads == 0 else None

    def _of(
        self,
        call: relax.Call,
        tensors: list[tuple[relax.Expr, str]],
        scale: float | None,
        causal: str | None,
        mask: Mask,
        order: str,
    ) -> Attention | None:
        """The attention of tensors, if they fit each other; `causal` is one of upstream's names, or None."""
        given = [Source(*tensor) for tensor in tensors]
        shapes = [sides_of(each) for each in (call, *(source.value for source in given))]
        if any(shape is None or len(shape) < 3 for shape in shapes):
            return None
        out = Source(call, order)
        if not all(alike([product(out.sides[:2])], [product(source.sides[:2])]) for source in given):
            return None  # a product that broadcasts
        q, k, v = (self._source(source) for source in given)
        if not alike(k.sides, v.sides):
            k, v = (self._with_heads(source) for source in given[1:])
        (_, _, queries, dim), keys = q.sides, k.sides[2]
        dtypes = {str(each.ty.dtype) for each in (call, q.value, k.value, v.value)}
        fits = alike([product(k.sides[:2])], [product(v.sides[:2])]) and alike(k.sides[2:], v.sides[2:])
        if not fits or not alike(k.sides[3:], [dim]) or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            return None
        if (
            causal is not None
            and not alike([queries], [keys])
            and (causal == "TopLeft" or not _is_later(keys, queries))
        ):
            return None
        batch = _batch_of(q, k, v, out)
        heads, kv_heads = (source.heads(1 if batch is None else batch) for source in (q, k))
        if batch is None or not all(isinstance(each, int) for each in (heads, kv_heads, dim)) or heads % kv_heads:
            return None
        if scale is not None and math.isclose(scale, dim**-0.5, rel_tol=1e-6):
            scale = None
        return Attention(q, k, v, batch, scale, mask, order)

    # ---- What stands around -----------------------------------------------------------------------------------------

    def _source(self, given: Source) -> Source:
        """What a tensor of attention is made of by moving its dimensions and repeating its heads."""
        given = self._with_heads(given)
        value, order = given
        rank, found, grouped = len(sides_of(value) or []), given, False
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
            elif is_call(inner, "relax.broadcast_to") and self._scores.is_as_large(inner.args[0], inner):
                value = inner.args[0]
            elif not grouped and (single := self._ungrouped(inner, axes[1])) is not None:
                value, grouped = single, True
            else:
                return found
            found = next((Source(value, letter) for letter, own in _AXES.items() if own == axes), found)

    def _with_heads(self, given: Source) -> Source:
        """A tensor before its batches and heads became one dimension, of which nobody knows how many it has."""
        value, order = given
        if all(isinstance(side, int) for side in sides_of(value) or []):
            return given
        stages = (stage for stage in self.values.stages(value) if len(sides_of(stage) or []) == 4)
        return Source(next(stages, value), order)

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
        before, between, spread, after = (sides_of(each) or [] for each in (one.args[0], one, wide, value))
        if len(before) != 4 or len(after) != 4:
            return None
        single, all_heads = before[heads], after[heads]
        if not isinstance(single, int) or not isinstance(all_heads, int):
            return None
        times = all_heads // single
        fits = (
            alike(between, [*before[: heads + 1], 1, *before[heads + 1 :]])
            and alike(spread, [*before[: heads + 1], times, *before[heads + 1 :]])
            and alike(after, [*before[:heads], single * times, *before[heads + 1 :]])
        )
        return one.args[0] if fits else None


def _is_later(keys: Side, queries: Side) -> bool:
    """Whether there are as many keys as queries at least, whatever the sizes are that they are counted in."""
    difference = keys - queries
    if isinstance(difference, int):
        return difference >= 0
    analyzer = Analyzer()
    for size in variables_of(difference):
        analyzer.bind(size, Range.from_min_extent(tirx.const(0, str(size.ty)), tirx.const(1 << 31, str(size.ty))))
    return bool(analyzer.can_prove(difference >= 0))


def _batch_of(q: Source, k: Source, v: Source, out: Source) -> Side | None:
    """How many batches an attention has; None where heads lie behind tokens, and it isn't said alike."""
    batches = [source.sides[0] for source in (q, k, v)]
    known = all(isinstance(side, int) for source in (q, k) for side in source.sides)
    alone = all(alike([batch], batches[:1]) for batch in batches)
    if alone and (alike(out.sides[:1], batches[:1]) or (not known and out.order == "h")):
        return batches[0]
    if out.order == "t":
        return None
    return 1 if known else product(q.sides[:2])


def _axes(call: relax.Call) -> list[int]:
    """Which dimensions `permute_dims` takes."""
    rank = len(sides_of(call) or [])
    axes = call.attrs.axes
    return [*range(rank)][::-1] if axes is None else [int(axis) % rank for axis in axes]


def _turned(rank: int) -> list[int]:
    """The axes that transpose matrices."""
    return [*range(rank - 2), rank - 1, rank - 2]
