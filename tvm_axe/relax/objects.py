"""Values of a model that are no tensors: upstream's paged cache of keys and values, of which each device has its own.

A device's cache is made by the same call of the constructor, with the device's share of the heads of queries and of
those of keys and values, and calls functions that upstream's generators make for as many. Attention over it takes
packed queries, keys and values by heads, three runs of which a device has its part of each, and gives the heads of its
queries. So there is one way to share it, and all functions of a model agree.

>>> from tvm_axe.relax.forms import WHOLE
>>> (way,) = Attending("attend", 8, 4, 2).strategies(frozenset())
>>> print(*way.ins, "->", *way.outs)
S1[4@0 4@1 | 2(2@0 2@1)] -> S1[4@0 4@1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import ir, relax, tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import LowerError
from tvm_axe.layout.shares import Share
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.ways import Strategy

__all__ = ["TAKERS", "Attending", "Cache", "attends", "cache_of", "called"]

TAKERS = (_tvm.PAGED_ATTENDS, _tvm.PAGED_POSITIONS)
"""The runtime's functions of a cache that a model may call on a mesh; the first is shared by heads."""


def called(value: relax.Call) -> str:
    """What a call calls, by name."""
    first = value.args[0] if len(value.args) else None
    op = first if isinstance(first, ir.GlobalVar | relax.ExternFunc) else value.op
    return str(getattr(op, "name_hint", None) or getattr(op, "global_symbol", None) or getattr(op, "name", op))


def attends(value: relax.Expr | None) -> bool:
    """Whether a value is attention over a paged cache."""
    return isinstance(value, relax.Call) and called(value) == _tvm.PAGED_ATTENDS


class Attending:
    """The way to attend over a paged cache; an operator as `tvm_axe.relax.strategies` has them.

    Parameters
    ----------
    name : str
        The function that does, for errors.
    heads, groups : int
        The heads of queries, and of keys and values.
    devices : int
        How many the axis has.

    Raises
    ------
    LowerError
        If the heads can't be shared by so many devices.
    """

    operations: tuple[int, ...] = (0,)

    def __init__(self, name: str, heads: int, groups: int, devices: int) -> None:
        queries, keys = shares(name, heads, groups, devices)
        packed = Share.joined([queries, keys, keys])
        self._way = Strategy((_form(packed),), (_form(queries),))

    def strategies(self, seeds: frozenset[tuple[int, Form]]) -> list[Strategy]:
        """The way, whatever neighbours give or want."""
        return [self._way]


def _form(share: Share) -> Form:
    return WHOLE if share.is_whole else Form(1, share)


def shares(name: str, heads: int, groups: int, devices: int) -> tuple[Share, Share]:
    """How heads of queries, and of keys and values, are shared: in blocks, the latter by several devices if fewer.

    Raises
    ------
    LowerError
        If they can't be, so that each device's queries find their keys there; names the function and the heads.
    """
    if heads % devices or (groups % devices and devices % groups):
        raise LowerError(
            f"{name}: a paged cache of {heads} heads of queries and {groups} of keys and values can't be shared by "
            f"{devices} devices: they must divide the heads of queries, and divide those of keys and values or be a "
            "multiple of them; take as many, share the model over another axis (axis=), or compile for one device"
        )
    return Share.blocks(heads, devices), Share.blocks(groups, devices)


@dataclass(frozen=True, eq=False)
class Cache:
    """A paged cache that a model makes.

    Attributes
    ----------
    call : Call
        By which it does.
    said : PagedCache
        What that says of it.
    told : dict
        What the generators of its functions were told beside.
    gpu : Target or None
        The GPU whose functions it calls; None of a CPU.
    name : str
        The function and the variable, for errors.
    """

    call: relax.Call
    said: _tvm.PagedCache
    told: dict[str, Any]
    gpu: Target | None
    name: str

    def of_device(
        self, axes: Sequence[int], add: Callable[[tirx.PrimFunc, str], ir.GlobalVar], empty: relax.Expr
    ) -> relax.Call:
        """The call by which a device makes its own.

        Parameters
        ----------
        axes : sequence of int
            How many devices there are along each axis by which the heads are shared.
        add : Callable
            What makes a function one of the device's module.
        empty : Expr
            The value that says where the cache is to be.
        """
        heads, groups = self.said.heads, self.said.groups
        for devices in axes:
            heads, groups = (share.local for share in shares(self.name, heads, groups, devices))
        functions = self.said.generated(heads, groups, self.gpu, **self.told)
        named = [add(func, str(own.name_hint)) for func, own in zip(functions, self.said.functions, strict=True)]
        return _tvm.paged_call(self.call, heads, groups, named, empty)


def cache_of(call: relax.Call, model: tvm.IRModule, gpu: Target | None, name: str) -> Cache:
    """The cache that a call of the constructor makes.

    Parameters
    ----------
    call : Call
        Of a function of the model.
    model : IRModule
        The model.
    gpu : Target or None
        What the devices are, if they are GPUs.
    name : str
        The function and the variable, for errors.

    Raises
    ------
    LowerError
        If its functions aren't those that upstream's frontend makes for such devices, so that nobody knows what they
        are for fewer heads; names them.
    """
    said = _tvm.paged_cache(call)
    if said is None or not all(variable in model.functions for variable in said.functions):
        raise LowerError(
            f"{name} is a paged cache whose call isn't as upstream's TIRPagedKVCache makes it; on a mesh a device's "
            "cache is made by the same call for fewer heads: make it by TIRPagedKVCache, or compile for one device"
        )
    heads, groups, rotates = said.heads, said.groups, said.rotates
    own = model[rotates]
    likely = said.told(own) if isinstance(own, tirx.PrimFunc) else ()
    told = next((each for each in likely if _alike(own, said.rotating(heads, groups, **each))), None)
    made = [] if told is None else said.generated(heads, groups, gpu, **told)
    others = [str(own.name_hint) for own, func in zip(said.functions, made) if not _alike(model[own], func)]
    if told is None or others:
        raise LowerError(
            f"{name} is a paged cache whose functions ({', '.join(others or [str(rotates.name_hint)])}) aren't those "
            f"that upstream makes for a {'CPU' if gpu is None else 'GPU'} of {heads} heads of queries and "
            f"{groups} of keys and values; on a mesh they are made anew for a device's heads: make the cache for the "
            "target that the model is compiled for, with rope_scaling left out or as gptj, llama3 or llama4 "
            "(low_freq_factor 1) have it, or compile for one device"
        )
    return Cache(call, said, told, gpu, name)


def _alike(func: ir.BaseFunc, other: tirx.PrimFunc) -> bool:
    """Whether two functions are the same but for their names and what is said of them."""
    if not isinstance(func, tirx.PrimFunc):
        return False
    plain = [tirx.PrimFunc(each.params, each.body, each.ret_type) for each in (func, other)]
    return bool(tvm_ffi.structural_equal(*plain, map_free_vars=True))
