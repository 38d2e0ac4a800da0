"""Make a barrier and the collective right behind it, or right before it, one step of a program.

A device that meets its peers by itself does both in one kernel. The module calls as many functions as before, in the
same order, so that whoever records the calls finds each where it was:

    axe.barrier()                                        axe.merged()
    axe.all_reduce(source, target, axis)      ->         axe.all_reduce:between(source, target, axis)
    axe.barrier()                                        axe.merged()

A barrier between two collectives is held by the later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.ir import IRModule

from tvm_axe.collective.plan import VIEWS

__all__ = ["HELD", "MERGED", "held", "merged"]

MERGED = "merged"
"""What a barrier becomes: it does nothing."""

HELD: dict[str, tuple[bool, bool]] = {
    "": (False, False),
    ":behind": (True, False),
    ":before": (False, True),
    ":between": (True, True),
}
"""What the name of a collective ends with: whether it is behind a barrier, and before one, that are its own."""

_BARRIER = "axe.barrier"


def held(name: str, behind: bool, before: bool) -> str:
    """Return the name of a collective with the barriers that are its own."""
    return name + next(suffix for suffix, holds in HELD.items() if holds == (behind, before))


def merged(mod: IRModule) -> IRModule:
    """Return the module with the barriers of its Relax functions merged into the collectives beside them."""
    functions = {
        var: _of_function(function) if isinstance(function, relax.Function) else function
        for var, function in mod.functions_items()
    }
    return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _of_function(function: relax.Function) -> relax.Function:
    if not isinstance(function.body, relax.SeqExpr):
        return function
    blocks = [
        type(block)(_of_bindings(block.bindings)) if isinstance(block, relax.BindingBlock) else block
        for block in function.body.blocks
    ]
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _of_bindings(bindings: Sequence[relax.Binding]) -> list[relax.Binding]:
    called = [_called(binding) for binding in bindings]
    collectives = [name is not None and name.removeprefix("axe.") in VIEWS for name in called]
    renamed = dict[int, str]()
    for at, is_collective in enumerate(collectives):
        if not is_collective:
            continue
        behind = at > 0 and called[at - 1] == _BARRIER
        before = called[at + 1 : at + 2] == [_BARRIER] and not any(collectives[at + 2 : at + 3])
        renamed |= {at - 1: f"axe.{MERGED}"} if behind else {}
        renamed |= {at + 1: f"axe.{MERGED}"} if before else {}
        if behind or before:
            renamed[at] = held(str(called[at]), behind, before)
    return [_renamed(binding, renamed[at]) if at in renamed else binding for at, binding in enumerate(bindings)]


def _called(binding: relax.Binding) -> str | None:
    """The function outside the module that a binding calls."""
    value = binding.value if isinstance(binding, relax.VarBinding) else None
    if isinstance(value, relax.Call) and isinstance(value.op, relax.ExternFunc):
        return str(value.op.global_symbol)
    return None


def _renamed(binding: relax.Binding, name: str) -> relax.Binding:
    call = binding.value
    renamed = relax.Call(relax.ExternFunc(name), call.args, call.attrs, call.ty_args, call.span)
    return relax.VarBinding(binding.var, renamed)
