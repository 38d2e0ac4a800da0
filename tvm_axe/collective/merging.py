"""Make a barrier and the collective right behind it, or right before it, one step of a program.

A device that meets its peers by itself does both in one kernel. The module calls as many functions as before, in the
same order, so that whoever records the calls finds each where it was:

    axe.barrier()                                        axe.merged()
    axe.all_reduce(source, target, axis)      ->         axe.all_reduce:between(source, target, axis)
    axe.barrier()                                        axe.merged()

A barrier between two collectives is held by the later one.

The one behind a collective is held *loosely* if nothing touches what is another device's before all have met again, as
where devices only go on with what they have of a sum. A device may then go on before its peers have theirs. The one
before it is held *quietly* if nothing has since all last met: then it orders nothing that isn't ordered already. Both
are leave that a device may take which touches nothing of its peers for a collective but what is for that alone
(`tvm_axe.collective.cuda.exchange`); another holds them as any barrier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tvm import relax, tirx
from tvm.ir import IRModule, PrimType
from tvm.relax.analysis import free_vars

from tvm_axe.collective.plan import VIEWS
from tvm_axe.layout.collectives import Collective

__all__ = ["HELD", "MERGED", "held", "merged"]

MERGED = "merged"
"""What a barrier becomes: it does nothing."""


class Held(NamedTuple):
    """The barriers that are a collective's own.

    Attributes
    ----------
    behind, before : bool
        Whether it holds the barrier that it is behind, and the one that it is before.
    loosely, quietly : bool
        Whether a device may leave out the one that it is before, and the one that it is behind.
    """

    behind: bool = False
    before: bool = False
    loosely: bool = False
    quietly: bool = False


HELD: dict[str, Held] = {
    "": Held(),
    ":behind": Held(behind=True),
    ":before": Held(before=True),
    ":between": Held(behind=True, before=True),
    ":loosely-before": Held(before=True, loosely=True),
    ":loosely-between": Held(behind=True, before=True, loosely=True),
    ":quietly-behind": Held(behind=True, quietly=True),
    ":quietly-between": Held(behind=True, before=True, quietly=True),
    ":quietly-loosely-between": Held(behind=True, before=True, loosely=True, quietly=True),
}
"""What the name of a collective ends with, and which barriers it holds then."""

_BARRIER = "axe.barrier"
_EXCHANGED = tuple(
    f"axe.{each.operation}"
    for each in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)
)
"""What may be an exchange."""


def held(name: str, holds: Held) -> str:
    """Return the name of a collective with the barriers that are its own."""
    return name + next(suffix for suffix, each in HELD.items() if each == holds)


def merged(mod: IRModule, devices: int | None = None) -> IRModule:
    """Return the module with the barriers of its Relax functions merged into the collectives beside them.

    Parameters
    ----------
    mod : IRModule
        The program.
    devices : int, optional
        How many there are, if a tensor that isn't of as many slabs is no view of all devices': then barriers may be
        held loosely.
    """
    functions = {
        var: _of_function(function, devices) if isinstance(function, relax.Function) else function
        for var, function in mod.functions_items()
    }
    return IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def _of_function(function: relax.Function, devices: int | None) -> relax.Function:
    if not isinstance(function.body, relax.SeqExpr):
        return function
    if len(function.body.blocks) > 1:
        devices = None  # what is behind a block isn't looked for
    blocks = [
        type(block)(_of_bindings(block.bindings, devices)) if isinstance(block, relax.BindingBlock) else block
        for block in function.body.blocks
    ]
    body = relax.SeqExpr(blocks, function.body.body)
    return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)


def _of_bindings(bindings: Sequence[relax.Binding], devices: int | None) -> list[relax.Binding]:
    called = [_called(binding) for binding in bindings]
    collectives = [name is not None and name.removeprefix("axe.") in VIEWS for name in called]
    renamed, holds = dict[int, str](), dict[int, Held]()
    for at, is_collective in enumerate(collectives):
        if not is_collective:
            continue
        behind = at > 0 and called[at - 1] == _BARRIER
        before = called[at + 1 : at + 2] == [_BARRIER] and not any(collectives[at + 2 : at + 3])
        if not (behind or before):
            continue
        holds[at] = Held(behind, before)
        if devices is not None and called[at] in _EXCHANGED:
            loosely = before and not _is_touched(bindings, at, devices)
            quietly = behind and _have_met(bindings[: at - 1], renamed, holds, devices)
            holds[at] = Held(behind, before, loosely, quietly)
        renamed |= {at - 1: f"axe.{MERGED}"} if behind else {}
        renamed |= {at + 1: f"axe.{MERGED}"} if before else {}
        renamed[at] = held(str(called[at]), holds[at])
    return [_renamed(binding, renamed[at]) if at in renamed else binding for at, binding in enumerate(bindings)]


def _is_touched(bindings: Sequence[relax.Binding], at: int, devices: int) -> bool:
    """Whether what runs behind a call and its barrier, and then anew, may touch what peers have before all meet."""
    for binding in (*bindings[at + 2 :], *bindings[:at]):
        if _called(binding) == _BARRIER:
            return False
        if _touches(binding, devices):
            return True
    return True


def _have_met(
    bindings: Sequence[relax.Binding], renamed: Mapping[int, str], holds: Mapping[int, Held], devices: int
) -> bool:
    """Whether all have met, and nothing since then may have touched what peers have, where these calls end.

    What a collective that holds a barrier loosely has left out, it has in front of it, unless it is behind that one
    quietly; or it has left out nothing.
    """
    for at in reversed(range(len(bindings))):
        if at in holds:
            behind, before, loosely, quietly = holds[at]
            if (before and not loosely) or (loosely and behind and not quietly):
                return True
            if not (loosely and quietly):
                return False
        elif at not in renamed:
            if _called(bindings[at]) == _BARRIER:
                return True
            if _touches(bindings[at], devices):
                return False
    return False


def _touches(binding: relax.Binding, devices: int) -> bool:
    """Whether a binding may touch what another device has."""
    name = _called(binding)
    if name is not None and name.startswith("axe.") and name not in ("axe.arrive", "axe.wait"):
        return True
    used = free_vars(binding.value) if isinstance(binding, relax.VarBinding) else None
    return used is None or any(_may_be_view(var, devices) for var in used)


def _may_be_view(var: relax.Var, devices: int) -> bool:
    """Whether a value may be the slabs of all devices: a tensor of as many parts, or what isn't known to be none."""
    kind = var.ty
    if isinstance(kind, PrimType | relax.ShapeType):
        return False
    if not (isinstance(kind, relax.TensorType) and isinstance(kind.shape, relax.ShapeExpr)):
        return True
    first = kind.shape.values[:1]
    return len(first) > 0 and (not isinstance(first[0], tirx.IntImm) or int(first[0]) == devices)


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
