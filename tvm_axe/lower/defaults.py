"""Which tile kernels compute a function that nobody scheduled, where the target wants that."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.blocks import covers, nested_blocks, statements
from tvm_axe.analysis.patterns import is_pointwise, stays_small
from tvm_axe.analysis.tree import has_threads, why_unschedulable, with_functions
from tvm_axe.machines import backend_of
from tvm_axe.schedule import tile_kernel
from tvm_axe.schedule.offers import Offer, is_worth, offers, preferred
from tvm_axe.schedule.tiles import has_choice
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels import compiles

__all__ = ["takes_kernels", "with_default_kernels", "with_kernels"]


def takes_kernels(target: Target) -> bool:
    """Whether products that nobody scheduled are computed by tile kernels there."""
    backend = backend_of(target)
    return isinstance(backend, TileBackend) and backend.by_default


def with_default_kernels(mod: tvm.IRModule, target: Target, tuned: Collection[str] = ()) -> tvm.IRModule:
    """The module whose products choose tile kernels with their defaults, where the target wants that.

    It does of functions that nobody scheduled, if their blocks are products that a kernel computes and these products'
    epilogues; others stay as they are.

    Parameters
    ----------
    mod : IRModule
        Functions.
    target : Target
        Resolved.
    tuned : collection of str
        The names of functions that are as a record has them.
    """
    if not takes_kernels(target):
        return mod
    found = {
        variable: s_tir.renew_defs(chosen)
        for variable, func in mod.functions_items()
        if isinstance(func, tirx.PrimFunc) and str(variable.name_hint) not in tuned
        for chosen in [with_kernels(func, target)]
        if chosen is not None
    }
    return with_functions(mod, found)


def with_kernels(func: tirx.PrimFunc, target: Target, rows: int | None = None) -> tirx.PrimFunc | None:
    """The function with a kernel for each of its products; None if that isn't all it does, or somebody scheduled it.

    Parameters
    ----------
    rows : int, optional
        How many rows the kernels' parameters are for, of products that have an unknown number of them. Without, there
        are no kernels for these.
    """
    if why_unschedulable(func) is not None or has_threads(func) or has_choice(func) or KERNEL in (func.attrs or {}):
        return None
    buffers = [*(param for param in func.params if tirx.is_buffer_var(param)), *func.body.block.alloc_buffers]
    if any(len(buffer.strides) for buffer in buffers):
        return None
    nested = [block for nest in statements(func.body.block.body) for block in nested_blocks(nest)]
    if not all(covers(block.realize, block.loops) for block in nested):
        return None
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))  # with the same variables
    _join_pointwise(sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    names = {str(sch.get(block).name_hint) for block in blocks}
    chosen: dict[str, Offer] = {}
    for offer in preferred(offers(sch, target, rows), target):
        if (
            offer.block not in chosen
            and is_worth(offer)
            and compiles(offer.kernel, target, offer.problem, offer.parameters)
        ):
            chosen[offer.block] = offer
    if not chosen or names != {name for offer in chosen.values() for name in (offer.block, offer.epilogue) if name}:
        return None
    for offer in chosen.values():
        epilogue = None if offer.epilogue is None else sch.get_sblock(offer.epilogue)
        tile_kernel(sch, sch.get_sblock(offer.block), offer.kernel, epilogue, **offer.parameters)
    return sch.mod["main"]


def _join_pointwise(sch: s_tir.Schedule) -> None:
    """Inline pointwise blocks into those that read them, if all are pointwise: one epilogue is left of several."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        stmt, readers = sch.get(block), sch.get_consumers(block)
        if not readers or not is_pointwise(stmt):
            continue
        if all(is_pointwise(sch.get(reader)) and stays_small(stmt, sch.get(reader)) for reader in readers):
            # A parameter that is read again stays, and so does what is written elsewhere than it is read.
            with contextlib.suppress(*_tvm.UPSTREAM_ERRORS):
                sch.compute_inline(block)
