"""Functions that ask of their tensors' leading extents for nothing but how many rows these make: equal ones once.

A model's functions call the same products with other shapes: a prompt's tokens are ``[1, tokens, d]``, a token of each
sequence is ``[batch, 1, d]``. Their kernels read rows, so that one function of ``[a, b, d]`` with ``a * b`` rows is
both, and is compiled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir import IRModule

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import substitute, variables_of
from tvm_axe.analysis.sizes import Extent, are_same, is_symbolic, sides
from tvm_axe.machines.builder import called_by
from tvm_axe.nests.default import RANGES

__all__ = ["for_any_rows", "with_equal_ones_once"]


def with_equal_ones_once(mod: IRModule) -> IRModule:
    """The model in which functions that are one for any leading extents are one; itself where there are none.

    Functions that others call by name stay, and so do all where no Relax function calls them.
    """
    models = {var: func for var, func in mod.functions_items() if isinstance(func, relax.Function)}
    kernels = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    called = {name for func in kernels.values() for name in called_by(func)}
    groups: dict[int, list[tuple[ir.GlobalVar, tirx.PrimFunc]]] = {}
    first: dict[ir.GlobalVar, ir.GlobalVar] = {}
    made: dict[ir.GlobalVar, tirx.PrimFunc] = {}
    for var, func in kernels.items() if models else ():
        general = None if str(var.name_hint) in called else for_any_rows(func)
        if general is None:
            continue
        bare = general.without_attr("global_symbol").without_attr(RANGES)
        group = groups.setdefault(tvm_ffi.structural_hash(bare), [])
        same = next((other for other, theirs in group if tvm_ffi.structural_equal(theirs, bare)), None)
        if same is None:
            group.append((var, bare))
            made[var] = general
        else:
            first[var] = same
    if not first:
        return mod
    kept = {var: func for var, func in kernels.items() if var not in first}
    kept |= {var: made[var] for var in first.values()}

    def calls(func: relax.Function) -> relax.Function:
        return _tvm.structural_map(func, (ir.GlobalVar, lambda var: first.get(var, var)))

    others = {var: func for var, func in mod.functions_items() if var not in kernels and var not in models}
    changed = {var: calls(func) for var, func in models.items()}
    return IRModule({**others, **kept, **changed}, attrs=mod.attrs, global_infos=mod.global_infos)


def for_any_rows(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function of tensors of any leading extents, as many as it has; None where it asks for more than their rows.

    Its tensors of unknown extents have all the same in front, and are seen by it as matrices of so many rows.
    """
    unknown = [param for param in func.params if tirx.is_buffer_var(param) and any(map(is_symbolic, param.shape))]
    leads = [_lead(param.shape) for param in unknown]
    if not leads or len(leads[0]) == 1 or not all(are_same(leads[0], lead) for lead in leads):
        return None
    dtype = str(next(extent for extent in leads[0] if not isinstance(extent, int)).ty)
    fresh = [tirx.Var(f"rows_{number}", dtype) for number in range(len(leads[0]))]
    height, rows = prod(sides(leads[0])), prod(fresh)
    seen = {
        param: tirx.decl_buffer(
            [*fresh, *param.shape[len(fresh) :]],
            param.dtype,
            param.name,
            layout=None if param.layout is None else "default",
        )
        for param in unknown
    }
    body = substitute(func.body, seen)
    if isinstance(height, tirx.Var):
        body = substitute(body, {height: rows})
    else:
        body = _tvm.structural_map(body, (tirx.Mul, lambda each: rows if are_same([each], [height]) else each))
    asked = {var for extent in leads[0] if is_symbolic(extent) for var in variables_of(extent)}
    accessed: list[object] = []
    tvm_ffi.structural_walk(body, (tirx.Var, lambda var: accessed.append(var) if var in asked else None))
    tvm_ffi.structural_walk(body, (ir.TensorLoad, lambda load: accessed.append(load.source)))
    tvm_ffi.structural_walk(body, (tirx.BufferStore, lambda store: accessed.append(store.buffer)))
    tvm_ffi.structural_walk(body, (ir.TensorRegion, lambda region: accessed.append(region.source)))
    if not asked.union(seen.values()).isdisjoint(accessed):
        return None
    params = [seen.get(param, param) for param in func.params]
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs)


def _lead(shape: Sequence[tirx.Expr]) -> list[Extent]:
    """The extents up to the last unknown one, and those of 1 behind it."""
    extents = sides(shape)
    last = max(number for number, extent in enumerate(extents) if not isinstance(extent, int))
    while last + 1 < len(extents) and extents[last + 1] == 1:
        last += 1
    return extents[: last + 1]
