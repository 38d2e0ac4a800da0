"""Weights that are packed once: which parameters a function lets be stored in another layout, and what packs them.

A function says by upstream's attribute which of its parameters are weights, the same in every call::

    T.func_attr({"layout_free_buffers": [1]})

A schedule may then begin with blocks that each copy all of one such parameter into another layout, annotated with
``meta_schedule.layout_rewrite_preproc``. Such a function is right as it is, and packs in every call; split in two, it
packs once. In a Relax model upstream's `SplitLayoutRewritePreproc` does that, for a function alone `split_packing`.
"""

from __future__ import annotations

from typing import NamedTuple

import tvm_ffi
from tvm import s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import uses
from tvm_axe.errors import TuneError

__all__ = ["LAYOUT_FREE", "PREPROC", "Packing", "has_packing", "layout_free", "split_packing"]

LAYOUT_FREE = "layout_free_buffers"
"""The attribute of a function; a list of positions among its parameters."""

PREPROC = "meta_schedule.layout_rewrite_preproc"
"""The annotation of a block that packs a parameter."""


class Packing(NamedTuple):
    """A function in two parts.

    Attributes
    ----------
    pack
        Takes the parameters at `places`, then as many outputs: what they are packed into. None where nothing is packed.
    main
        The function with packed parameters in the places of those, under the same name.
    places
        Positions of the packed parameters, in the order in which `pack` takes them.
    """

    pack: tirx.PrimFunc | None
    main: tirx.PrimFunc
    places: tuple[int, ...]


def layout_free(func: tirx.PrimFunc) -> tuple[int, ...]:
    """The positions of the parameters that may be stored in another layout, in order; none without the attribute.

    Raises
    ------
    TuneError
        If the attribute is no list of positions, or one of them is that of no buffer or of one that is written.
    """
    value = func.attrs.get(LAYOUT_FREE) if func.attrs else None
    if value is None:
        return ()
    name = str(func.attrs.get("global_symbol", "main"))
    if not isinstance(value, tvm_ffi.Array | list | tuple) or not all(
        isinstance(n, int | tirx.IntImm) and not isinstance(n, bool) for n in value
    ):
        raise TuneError(f"{name}: {LAYOUT_FREE} is {value}; a list of positions among the parameters is needed")
    places = sorted({int(n) for n in value})
    buffers = [n for n, param in enumerate(func.params) if isinstance(param.ty, tirx.BufferType)]
    for n in places:
        if n not in buffers:
            raise TuneError(f"{name}: {LAYOUT_FREE} has {n}, which is no buffer parameter; valid are {buffers}")
        if _writes(func, func.params[n]):
            raise TuneError(f"{name}: {LAYOUT_FREE} has {n}, but parameter {func.params[n].name!r} is written")
    return tuple(places)


def has_packing(func: tirx.PrimFunc) -> bool:
    """Whether any block of a function packs a parameter."""
    return any(map(_packs, _blocks(func.body)))


def split_packing(func: tirx.PrimFunc) -> Packing:
    """Split a scheduled function into what packs its weights and what is called with them. ::

        module, _ = apply_best(tvm.IRModule({"main": dense}), target)     # dense has layout_free_buffers
        pack, main, places = split_packing(module["main"])

    Compile both parts for the same target; ``pack`` is called once, with the weights and with empty arrays of the
    shapes that its last parameters have, and these stand for the weights in every call of ``main``. The tour
    (``docs/tours/tuning.py``) shows all of it.

    Parameters
    ----------
    func
        Any schedulable function; most have no block that packs, and are their own ``main``.

    Raises
    ------
    TuneError
        If a block that packs copies no parameter, or one that something else reads too, so that it cannot be split off.
    """
    root = func.body.block if isinstance(func.body, s_tir.SBlockRealize) else None
    if root is None or not has_packing(func):
        return Packing(None, func, ())
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    rest, places = [], []
    for nest in nests:
        blocks = _blocks(nest)
        if any(map(_packs, blocks)):
            places.append(_place(func, blocks))
        else:
            rest.append(nest)
    for n, place in enumerate(places):
        param = func.params[place]
        if place in places[:n] or any(uses(nest, param) for nest in rest):
            raise TuneError(f"parameter {param.name!r} is packed, and read by something else too")
    pack, main = _tvm.split_preproc(func)
    return Packing(_named(pack, func, "_weight_prepack"), _named(main, func, ""), tuple(places))


def _place(func: tirx.PrimFunc, blocks: list[s_tir.SBlock]) -> int:
    """The position of the parameter that a nest packs."""
    (block, *others) = blocks
    reads = {n for n, param in enumerate(func.params) for region in block.reads if region.source.same_as(param)}
    if others or len(block.reads) != 1 or len(reads) != 1 or len(block.writes) != 1:
        raise TuneError(f"block {block.name_hint!r} packs, but is no copy of one parameter in a nest of its own")
    return reads.pop()


def _named(part: tirx.PrimFunc, func: tirx.PrimFunc, suffix: str) -> tirx.PrimFunc:
    """A part under the function's name, if it has one."""
    if "global_symbol" not in (func.attrs or {}):
        return part.without_attr("global_symbol")
    return part.with_attr("global_symbol", f"{func.attrs['global_symbol']}{suffix}")


def _packs(block: s_tir.SBlock) -> bool:
    return bool(block.annotations.get(PREPROC, False))


def _blocks(part: tirx.Stmt) -> list[s_tir.SBlock]:
    """All blocks in a statement, those inside others too."""
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(part, (s_tir.SBlock, found.append))
    return found


def _writes(func: tirx.PrimFunc, param: tirx.Var) -> bool:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(func.body, (tirx.BufferStore, found.append))
    return any(store.buffer.same_as(param) for store in found)
