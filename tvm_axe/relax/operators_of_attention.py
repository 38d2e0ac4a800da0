"""`R.nn.attention` and `R.nn.attention_bias`: what upstream makes wrong of them, and what is left as they are."""

from __future__ import annotations

from typing import TypeGuard

from tvm import relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_axe.relax.values import Values, is_call, sides_of

__all__ = ["APART", "DTYPES", "saying_what_is_left", "with_repeated_heads"]

DTYPES = ("float32", "float16", "bfloat16")
"""What a kernel multiplies matrices of and sums in float32."""

APART = "axe_apart"
"""The attribute of a function that says which of its attentions no kernel computes, and why, a text each."""


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
    q, k = ((sides_of(each) or [])[2:3] for each in call.args[:2])
    if not q or not k or not isinstance(q[0], int) or not isinstance(k[0], int):
        return 0
    times, rest = divmod(q[0], k[0])
    return 0 if rest or times == 1 else times


def _is_attention(value: relax.Expr) -> TypeGuard[relax.Call]:
    """Whether a value is a call of one of the operators that are attention, with a bias or without."""
    return is_call(value, "relax.nn.attention") or is_call(value, "relax.nn.attention_bias")


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


def saying_what_is_left(model: IRModule) -> IRModule:
    """The model, whose functions say which operators of attention are left to be computed block by block (`APART`)."""
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function) and (found := _left(func)):
            model = model.clone()
            before = list((func.attrs or {}).get(APART) or ())
            model[str(variable.name_hint)] = func.with_attr(APART, [*before, *found])
    return model


def _left(func: relax.Function) -> list[str]:
    bindings = (binding for block in func.body.blocks for binding in block.bindings)
    calls = ((str(own.var.name), own.value) for own in bindings if isinstance(own, relax.VarBinding))
    return [f"{name}: {_why(call)}" for name, call in calls if _is_attention(call)]


def _why(call: relax.Call) -> str:
    """Why no kernel computes an attention, in words."""
    q, k = (sides_of(each) or [] for each in call.args[:2])
    dtypes = {str(each.ty.dtype) for each in call.args}
    if len(call.args) != 3:
        return "attention with a bias isn't one kernel; with one that is a causal mask, of a window or not, it is"
    if call.attrs.window_size is not None:
        return "attention with upstream's window isn't one kernel; with a mask of one as its bias it is"
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        return f"attention of {', '.join(sorted(dtypes))} isn't one kernel; of one type of {', '.join(DTYPES)} it is"
    if len(q) != 4 or not all(isinstance(extent, int) for extent in (*q[2:], *k[2:])):
        return "attention of an unknown number of heads or columns isn't one kernel"
    if call.attrs.causal_mask is not None:
        return f"causal attention of {q[1]} queries and {k[1]} keys isn't one kernel; of as many keys or more it may be"
    return "the target has no kernel for its sizes"
