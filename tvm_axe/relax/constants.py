"""Constant weights that are packed while a model is compiled: each function that packs is built once.

Upstream's `FoldConstant` compiles a function anew for every call that it evaluates, which takes longer than to pack.
"""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import GenericConst, GlobalVar, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import builder

__all__ = ["with_constants_packed"]


def with_constants_packed(model: IRModule, target: Target) -> IRModule:
    """The model with packed constants in the place of what packs constants.

    Parameters
    ----------
    model : IRModule
        What upstream's `SplitLayoutRewritePreproc` leaves.
    target : Target
        Resolved, this machine's CPU.
    """
    functions = {v: func for v, func in model.functions_items() if str(v.name_hint).endswith(_tvm.PREPACK)}
    if not functions:
        return model
    named = {str(v.name_hint): func.with_attr("global_symbol", str(v.name_hint)) for v, func in functions.items()}
    packer = _Packer(model, builder.build_kernels(IRModule(named), target))
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            packer.builder_.update_func(variable, packer.visit_expr(func))
    return relax.transform.DeadCodeElimination()(packer.builder_.get())


@mutator
class _Packer(PyExprMutator):
    """Packs constants where that is called."""

    def __init__(self, model: IRModule, built: tvm.runtime.Module) -> None:
        super().__init__(model)
        self._built = built

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, or the constant that it makes."""
        call = self.visit_expr_post_order(call)
        made = call.args[0] if len(call.args) else None
        if not isinstance(made, GlobalVar) or not str(made.name_hint).endswith(_tvm.PREPACK):
            return call
        given = [self.lookup_binding(each) if isinstance(each, relax.Var) else each for each in call.args[1].fields]
        (kind,) = call.ty_args
        if not isinstance(kind, relax.TensorType) or not all(isinstance(each, GenericConst) for each in given):
            return call
        out = tvm.runtime.empty([int(extent) for extent in kind.shape.values], str(kind.dtype))
        self._built[str(made.name_hint)](*(each.value for each in given), out)
        return GenericConst(out, kind)
