"""Batch norms that a model trains are written out: they take the batch's own mean and variance.

A model that was exported in training, and ``relax.op.nn.batch_norm`` by its default, norm by the statistics of the
batch and give new running ones. Upstream's `DecomposeOpsForInference`, which every model goes through, makes all of
them norms by the running statistics; so those that aren't are written out before.
"""

from __future__ import annotations

from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_axe.relax.values import is_call, rewritten

__all__ = ["with_batch_statistics"]


def with_batch_statistics(model: IRModule) -> IRModule:
    """The model without batch norms of training; it computes the same.

    Source: Ioffe and Szegedy, "Batch Normalization", Algorithm 1; the running statistics as ``topi.nn.batch_norm``
    has them.
    """
    return rewritten(model, _is_trained, _Rewriter)


def _is_trained(node: relax.Expr) -> bool:
    return is_call(node, "relax.nn.batch_norm") and bool(node.attrs.training)


@mutator
class _Rewriter(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The norm, the new running mean and the new running variance, where they are of the batch."""
        done = super().visit_call_(call)
        if not _is_trained(call):
            return done
        op, emit, attrs = relax.op, self.builder_.emit, call.attrs
        data, gamma, beta, *running = done.args
        rank = call.args[0].ty.ndim
        others = [dim for dim in range(rank) if dim != int(attrs.axis) % rank]

        def number(value: float, like: relax.Expr) -> relax.Constant:
            return relax.const(value, like.ty.dtype.dtype)

        def along(channels: relax.Expr) -> relax.Expr:
            return emit(op.expand_dims(channels, others))

        mean, variance = emit(op.mean(data, others)), emit(op.variance(data, others))
        deviation = emit(op.sqrt(emit(op.add(variance, number(float(attrs.epsilon), data)))))
        normed = emit(op.divide(emit(op.subtract(data, along(mean))), along(deviation)))
        if attrs.scale:
            normed = emit(op.multiply(normed, along(gamma)))
        if attrs.center:
            normed = emit(op.add(normed, along(beta)))
        share = float(attrs.momentum)
        kept = [
            emit(op.add(op.multiply(old, number(1 - share, old)), op.multiply(new, number(share, new))))
            for old, new in zip(running, (mean, variance), strict=True)
        ]
        return relax.Tuple([normed, *kept])
