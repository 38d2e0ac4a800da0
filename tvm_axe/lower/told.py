"""What a device's function is told beside its tensors: which device it is, and sizes that calls decide.

Both are free variables of functions while these are made, dealt out and joined, and parameters of a kernel in the end.
Of a dimension of any extent n, each device has the ceil(n / devices) indices that `tvm_axe.layout.shares.Share.of_any`
says, here in terms of n:

>>> n, rank = tirx.Var("n", "int32"), tirx.Var("rank", "int32")
>>> print(part_of(n, 2), "from", first_of(n, rank, 2))
(n + 1) // 2 from T.min(rank * ((n + 1) // 2), n - (n + 1) // 2)
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import uses

__all__ = ["COORDINATES", "RANK", "first_of", "part_of", "table", "with_coordinates", "with_own_sizes"]

RANK = "rank"
"""What the parameter is called that says which device it is."""
COORDINATES = "axe.coordinates"
"""The attribute of a function that names those of its parameters that say which device it is."""


def table(rank: tirx.Expr, numbers: Sequence[int], dtype: str) -> tirx.Expr:
    """Return the number of device `rank` as an expression: arithmetic where the numbers are such, else choices."""
    rank = rank if str(rank.ty) == dtype else tirx.Cast(dtype, rank)
    count, step = len(numbers), next((n for n in numbers if n), 0)
    group = next((at for at, n in enumerate(numbers) if n), 1)
    stretched = [at // group * step for at in range(count)]
    whole = rank if group == 1 else rank // tirx.const(group, dtype)
    if list(numbers) == stretched:
        return whole * tirx.const(step, dtype)
    if list(numbers) == [min(n, numbers[-1]) for n in stretched]:
        return tirx.min(whole * tirx.const(step, dtype), tirx.const(numbers[-1], dtype))
    found: tirx.Expr = tirx.const(numbers[-1], dtype)
    for at in range(count - 2, -1, -1):
        found = tirx.Select(rank <= tirx.const(at, dtype), tirx.const(numbers[at], dtype), found)
    return found


def part_of(extent: tirx.Expr, devices: int) -> tirx.Expr:
    """Return how many indices each of some devices has of a dimension of any extent (`Share.of_any`)."""
    return (extent + tirx.const(devices - 1, str(extent.ty))) // tirx.const(devices, str(extent.ty))


def first_of(extent: tirx.Expr, rank: tirx.Expr, devices: int) -> tirx.Expr:
    """Return the first of these that device `rank` has."""
    size, dtype = part_of(extent, devices), str(extent.ty)
    return tirx.min((rank if str(rank.ty) == dtype else tirx.Cast(dtype, rank)) * size, extent - size)


def with_coordinates(
    func: tirx.PrimFunc, inputs: int, coordinates: Sequence[tirx.Var]
) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
    """Return a function with those coordinates that it uses as parameters behind its `inputs`, and which they are."""
    used = [var for var in coordinates if uses(func.body, var)]
    params = [*func.params[:inputs], *used, *func.params[inputs:]]
    if not used:
        return func, used
    taking = tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)
    return taking.with_attr(COORDINATES, [str(var.name) for var in used]), used


def with_own_sizes(func: tirx.PrimFunc, sizes: Sequence[tirx.Var]) -> tuple[tirx.PrimFunc, list[tirx.Var]]:
    """Return a function that says what its shapes are counted in, and which of `sizes` it must be told beside.

    A size that is the extent of a parameter is known by it. What is made of others becomes a variable of the function's
    own, so that its loops are as long as a variable says, if that is all that they are needed for; else they are
    parameters behind the others.

    Parameters
    ----------
    func : PrimFunc
        Of buffers whose shapes are counted in `sizes`, which are free in it.
    sizes : sequence of Var
        The variables.
    """
    shapes = [extent for param in func.params if tirx.is_buffer_var(param) for extent in param.shape]
    known = {extent for extent in shapes if isinstance(extent, tirx.Var)}
    asked = [size for size in sizes if size not in known and uses(func, size)]
    if not asked:
        return func, asked
    own = _counted(func, [extent for extent in shapes if any(uses(extent, size) for size in asked)])
    if not any(uses(own, size) for size in asked):
        return own, []
    return tirx.PrimFunc([*func.params, *asked], func.body, func.ret_type, func.attrs), asked


def _counted(func: tirx.PrimFunc, extents: Sequence[tirx.Expr]) -> tirx.PrimFunc:
    """The function with a variable for each of some extents, wherever it is."""
    # What another is part of goes first.
    for at, extent in enumerate(sorted(extents, key=lambda extent: -len(str(extent)))):
        own = tirx.Var(f"n{at}", extent.ty)

        def on_expr(expr: tirx.Expr, extent: tirx.Expr = extent, own: tirx.Var = own) -> tirx.Expr:
            return own if tvm_ffi.structural_equal(expr, extent, map_free_vars=False) else expr

        func = _tvm.structural_map(func, (type(extent), on_expr))
    return func
