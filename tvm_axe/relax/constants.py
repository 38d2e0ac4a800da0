"""Constant weights that are packed while a model is compiled: each function that packs is built once.

Upstream's `FoldConstant` compiles a function anew for every call that it evaluates, which takes longer than to pack.

Where packed weights will lie is allocated first, which takes no memory until it is written to. Then the modules on the
way let go of the weights as they were, and each is packed and forgotten before the next one: if the caller has let go
of the model, too, there is one weight twice, instead of all.
"""

from __future__ import annotations

import ctypes
import gc
import math
from collections.abc import Iterable
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import GenericConst, GlobalVar, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import builder

__all__ = ["with_constants_packed"]

_MUCH = 1 << 24  # bytes of weights that may be there twice


def with_constants_packed(model: IRModule, target: Target, before: Iterable[IRModule] = ()) -> IRModule:
    """The model with packed constants in the place of what packs constants.

    Parameters
    ----------
    model : IRModule
        What upstream's `SplitLayoutRewritePreproc` leaves; if constants are packed, its Relax functions are gone.
    target : Target
        Resolved, this machine's CPU.
    before : iterable of IRModule
        Others that have the same constants, and that nobody needs any more: their Relax functions are gone, too.
    """
    functions = {v: func for v, func in model.functions_items() if str(v.name_hint).endswith(_tvm.PREPACK)}
    if not functions:
        return model
    named = {str(v.name_hint): func.with_attr("global_symbol", str(v.name_hint)) for v, func in functions.items()}
    built = builder.build_kernels(IRModule(named), target)
    packed, packings = _allocated(model)
    if packings:
        for module in (model, *before):
            _without_functions(module)
        gc.collect()  # upstream's mutators, which have seen the constants, refer to themselves
    size = 0
    while packings:
        size += _pack(packings.pop(), built)
        if size >= _MUCH or not packings:
            size = 0
            _give_back()
    return packed


class _Packing(NamedTuple):
    """A function that packs, by name, what it is given, and where what it makes will lie."""

    function: str
    given: tuple[tvm.runtime.Tensor, ...]
    out: tvm.runtime.Tensor


def _pack(packing: _Packing, built: tvm.runtime.Module) -> int:
    """Pack, and return how many bytes that made."""
    built[packing.function](*packing.given, packing.out)
    return math.prod(packing.out.shape) * tvm_ffi.dtype(packing.out.dtype).bits // 8


def _give_back() -> None:
    """Give free memory back to the system, which glibc keeps between what is still there."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _without_functions(model: IRModule) -> None:
    nothing = tirx.PrimFunc([], tirx.Evaluate(0))
    for variable in [v for v, func in model.functions_items() if isinstance(func, relax.Function)]:
        model[variable] = nothing


def _allocated(model: IRModule) -> tuple[IRModule, list[_Packing]]:
    """The model with empty constants in the place of what packs constants, and what is to fill them."""
    packer = _Packer(model)
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            packer.builder_.update_func(variable, packer.visit_expr(func))
    return relax.transform.DeadCodeElimination()(packer.builder_.get()), packer.packings


@mutator
class _Packer(PyExprMutator):
    """Takes note of what packs constants."""

    def __init__(self, model: IRModule) -> None:
        super().__init__(model)
        self.packings: list[_Packing] = []

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, or the constant that it will make."""
        call = self.visit_expr_post_order(call)
        made = call.args[0] if len(call.args) else None
        if not isinstance(made, GlobalVar) or not str(made.name_hint).endswith(_tvm.PREPACK):
            return call
        given = [self.lookup_binding(each) if isinstance(each, relax.Var) else each for each in call.args[1].fields]
        (kind,) = call.ty_args
        if not isinstance(kind, relax.TensorType) or not all(isinstance(each, GenericConst) for each in given):
            return call
        out = tvm.runtime.empty([int(extent) for extent in kind.shape.values], str(kind.dtype))
        self.packings.append(_Packing(str(made.name_hint), tuple(each.value for each in given), out))
        return GenericConst(out, kind)
