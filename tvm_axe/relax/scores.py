"""What stands around the scores of an attention that is written out: casts, scales, masks, sinks, guards of rows."""

from __future__ import annotations

import math

from tvm import relax, tirx

from tvm_axe.relax.masks import NOTHING, Mask, chosen_by, mask_added
from tvm_axe.relax.values import Values, alike, is_call, product, sides_of

__all__ = ["Scores", "is_last"]


class Scores:
    """What values of a function are before what stands around them.

    Parameters
    ----------
    values : Values
        Of the function.
    """

    def __init__(self, values: Values) -> None:
        self._values = values

    def guarded(self, weights: relax.Expr) -> relax.Expr:
        """The softmax in what replaces its rows by zeros where no score counts, as torch and its ONNX write it."""
        if not is_call(weights, "relax.where"):
            return weights
        condition, zero, softmax = (self._values.matrix(each) for each in weights.args)
        if is_call(condition, "relax.isnan") and self._values.matrix(condition.args[0]).same_as(softmax):
            return softmax if self._values.scalar(zero) == 0 else weights
        for name in ("relax.logical_not", "relax.astype", "relax.max", "relax.astype", "relax.logical_not"):
            if not is_call(condition, name):
                return weights
            condition = self._values.of(condition.args[0])
        same = is_call(condition, "relax.equal") and is_call(softmax, "relax.nn.softmax")
        if not same or not condition.args[0].same_as(softmax.args[0]):
            return weights
        infinite, filled = self._values.scalar(condition.args[1]), self._values.scalar(zero)
        return softmax if infinite == -math.inf and filled == 0 else weights

    def uncast(self, value: relax.Expr) -> relax.Expr:
        """A value before it is cast to float32, in which kernels sum anyway, or from that."""
        call = self._values.of(value)
        while is_call(call, "relax.astype") and "float32" in (str(call.ty.dtype), str(call.args[0].ty.dtype)):
            call = self._values.matrix(call.args[0])
        return call

    def kept(self, weights: relax.Expr) -> relax.Expr | None:
        """What weights were before the last of each row was left out; None if nothing was."""
        if not is_call(weights, "relax.strided_slice"):
            return None
        inner = weights.args[0]
        before, after = (sides_of(each) or [] for each in (inner, weights))
        given = [[int(at) if isinstance(at, tirx.IntImm) else None for at in own] for own in weights.args[1:]]
        axes, begin, *steps = (given[0], given[1], *given[3:])
        fits = axes in ([-1], [len(before) - 1]) and begin == [0] and steps in ([], [[1]])
        return self._values.matrix(inner) if fits and alike([after[-1] + 1], before[-1:]) else None

    def without_sinks(self, scores: relax.Expr) -> tuple[relax.Expr, relax.Expr | None]:
        """Scores before one of each head was put behind them, and these (heads).

        What is subtracted from all of a row, as its largest is, makes no difference to a softmax.
        """
        if is_call(scores, "relax.subtract") and (sides_of(scores.args[1]) or [0])[-1] == 1:
            scores = self._values.of(scores.args[0])
        if not is_call(scores, "relax.concat") or not isinstance(scores.args[0], relax.Tuple):
            return scores, None
        if not is_last(int(scores.attrs.axis), scores) or len(scores.args[0].fields) != 2:
            return scores, None
        inner, sink = scores.args[0].fields
        return inner, self._of_heads(sink)

    def _of_heads(self, sink: relax.Expr) -> relax.Expr | None:
        """What has one element for each head, which is repeated for batches and queries; None of anything else."""
        sides = sides_of(sink) or []
        if len(sides) != 4 or not isinstance(sides[1], int) or sides[3] != 1:
            return None
        heads, at = sides[1], 1
        while len(own := sides_of(sink) or []) != 1:
            call = self._values.of(sink)
            if is_call(call, "relax.broadcast_to"):
                before = sides_of(call.args[0]) or []
                if len(before) != len(own) or before[at] != heads:
                    return None
            elif is_call(call, "relax.reshape") or is_call(call, "relax.expand_dims"):
                before = sides_of(call.args[0]) or []
                if product(own) != heads or product(before) != heads or heads not in before:
                    return None  # more than ones around it
                at = before.index(heads)
            elif not isinstance(call, relax.Call):
                break
            elif not is_call(call, "relax.astype"):
                return None
            sink = call.args[0]
        own = sides_of(sink) or []
        return sink if product(own) == heads and heads in own else None

    def unmasked(self, scores: relax.Expr) -> tuple[relax.Expr, Mask | None]:
        """Scores before a mask, and which that is; None of what is added or chosen otherwise."""
        sides = sides_of(scores) or []
        if is_call(scores, "relax.where"):
            condition, then, otherwise = scores.args
            found = chosen_by(self._values, condition, sides)
            inner, filled = (then, otherwise) if found is not None and not found[0] else (otherwise, then)
            number = None if found is None else self._values.scalar(filled)
            hides = number is not None and number <= NOTHING and self.is_as_large(inner, scores)
            return (self._values.matrix(inner), found[1]) if found is not None and hides else (scores, None)
        if not is_call(scores, "relax.add"):
            return scores, Mask()
        for inner, added in (scores.args, scores.args[::-1]):
            mask = mask_added(self._values, added, sides) if self.is_as_large(inner, scores) else None
            if mask is not None:
                return self._values.matrix(inner), mask
        return scores, None

    def is_as_large(self, value: relax.Expr, scores: relax.Expr) -> bool:
        """Whether a value has the extents of others."""
        return alike(sides_of(value) or [], sides_of(scores) or [])

    def unscaled(self, value: relax.Expr) -> tuple[relax.Expr, float]:
        """A value before it is multiplied by numbers, and their product; reshapes that keep its matrices are none."""
        scale = 1.0
        while True:
            call = self._values.matrix(value)
            if is_call(call, "relax.multiply"):
                factors = [(a, self._values.scalar(b)) for a, b in (call.args, call.args[::-1])]
            elif is_call(call, "relax.divide"):
                divisor = self._values.scalar(call.args[1])
                factors = [(call.args[0], 1 / divisor if divisor else None)]
            else:
                return self._values.named(call) if self.is_as_large(call, value) else value, scale
            inner = next(((a, factor) for a, factor in factors if factor is not None), None)
            if inner is None or not self.is_as_large(inner[0], call):
                return value, scale
            value, scale = inner[0], scale * inner[1]


def is_last(axis: int, value: relax.Expr) -> bool:
    """Whether an axis is a value's last."""
    return axis in (-1, len(sides_of(value) or []) - 1)
