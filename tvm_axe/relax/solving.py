"""Sizes that inputs are multiples of: a call says them, though none is the extent of an input.

``torch.export`` names dimensions that a model halves and doubles ``2 * n``, and suggests such dimensions itself:
pictures of a U-Net, sound that an encoder takes in strides. What calls a function knows the input's extent alone. So
that gets a variable of its own, `n` is what follows from it, and that the extent is `2 * n` again is compared when the
function is called:

========================================== =====================================================
``def main(x: R.Tensor((2 * n, 8)))``      ``def main(x: R.Tensor((n_2, 8)))``
..                                         ``x = R.match_cast(x, R.Tensor((2 * (n_2 // 2), 8)))``
========================================== =====================================================
"""

from __future__ import annotations

from tvm import relax, tirx
from tvm.ir import IRModule

from tvm_axe.analysis.expressions import variables_of
from tvm_axe.relax.shapes import with_known_shapes
from tvm_axe.relax.sizes import Extent, defines

__all__ = ["with_solved_sizes"]

_BOUNDS = ("tir_var_lower_bound", "tir_var_upper_bound")
"""Attributes of a function that have numbers by the names of sizes."""


def with_solved_sizes(model: IRModule) -> IRModule:
    """Return a model whose functions that are called from outside know each size that an input's extent says."""
    solved = {}
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function) and "global_symbol" in (func.attrs or {}):
            made = _solved(func)
            if made is not None:
                solved[variable] = made
    if not solved:
        return model
    model = model.clone()
    for variable, func in solved.items():
        model.update_func(variable, func)
    return with_known_shapes(model)


def _solved(func: relax.Function) -> relax.Function | None:
    known = {each for param in func.params for each in defines(param)}
    values: dict[tirx.Var, tirx.Expr] = {}
    bounds = {name: dict(func.attrs[name]) for name in _BOUNDS if name in func.attrs}
    given: dict[Extent, tirx.Var] = {}
    extents = [extent for param in func.params for extent in _extents(param)]
    names = {str(variable.name) for extent in extents for variable in variables_of(extent)}

    def new(name: str, extent: tirx.Expr) -> tirx.Var:
        while name in names:
            name += "_"
        names.add(name)
        return tirx.Var(name, extent.ty)

    for extent in extents:
        unknown = [variable for variable in variables_of(extent) if variable not in known]
        if len(unknown) != 1 or unknown[0] in values:
            continue
        line = Extent.of(extent).line
        if line is not None:
            factor, offset = line
            size = given[Extent.of(extent)] = new(f"{unknown[0].name}_{factor}", extent)
            values[unknown[0]] = tirx.floordiv(size - offset, tirx.const(factor, extent.ty))
            for bound in bounds.values():
                if unknown[0].name in bound:
                    bound[size.name] = int(bound.pop(unknown[0].name)) * factor + offset
    if not values:
        return None
    # Others that are counted in these sizes are compared, too, and have no variable that isn't an extent.
    for extent in extents:
        if values.keys() & set(variables_of(extent)) and Extent.of(extent) not in given:
            given[Extent.of(extent)] = new("size", extent)
    params, claims = [], [_named(variable, value) for variable, value in values.items()]
    for param in func.params:
        own = [given.get(Extent.of(extent), extent) for extent in _extents(param)]
        if all(a is b for a, b in zip(own, _extents(param))):
            params.append(param)
            continue
        params.append(relax.Var(param.name, relax.TensorType(own, param.ty.dtype, param.ty.vdevice)))
        claims.append(relax.MatchCast(param, params[-1], param.ty))
    body = relax.SeqExpr([relax.BindingBlock(claims), *func.body.blocks], func.body.body)
    return relax.Function(params, body, func.ret_ty, func.is_pure, func.attrs).with_attrs(bounds)


def _named(variable: tirx.Var, value: tirx.Expr) -> relax.MatchCast:
    """The binding by which a size is known behind it."""
    kind = relax.ShapeType([variable])
    return relax.MatchCast(relax.Var(f"{variable.name}_", kind), relax.ShapeExpr([value]), kind)


def _extents(param: relax.Var) -> list[tirx.Expr]:
    shape = param.ty.shape if isinstance(param.ty, relax.TensorType) else None
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else []
