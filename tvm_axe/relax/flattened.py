"""Functions of flattened tensors, whose number of rows is one number however it is made of what isn't known.

Importers flatten the tokens of a batch in front of a product, so that its rows are ``batch * n``. A call tells upstream
such variables as numbers beside the tensors, since no shape has them alone::

    matmul(x: [batch * n, 64], w: [64, 64], batch, n, out: [batch * n, 64])
    ->    matmul(x: [rows, 64], w: [64, 64], out: [rows, 64])

What is computed asks for their product alone. With that as its variable, a function is dispatched on how many rows
there are, its weights are packed ahead as others' are, and indices have one variable less.
"""

from __future__ import annotations

import tvm_ffi
from tvm import ir, relax, tirx
from tvm.ir import IRModule

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import unused_name
from tvm_axe.analysis.expressions import variables_of
from tvm_axe.analysis.sizes import is_symbolic
from tvm_axe.nests import MADE_OF
from tvm_axe.relax.values import alike

__all__ = ["with_rows_as_one_number"]

_CALLS = ("relax.call_tir", "relax.call_tir_inplace")
_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv)


def with_rows_as_one_number(model: IRModule) -> IRModule:
    """The model, its functions with one variable for an extent that is made of several which nothing else asks for."""
    found = {
        var: made
        for var, func in model.functions_items()
        if isinstance(func, tirx.PrimFunc) and (made := _of_one_number(func)) is not None
    }
    if not found:
        return model
    builder = relax.BlockBuilder(IRModule({var: func for var, func in model.functions_items() if var not in found}))
    # A variable's type is its function's.
    variables = {var: builder.add_func(func, str(var.name_hint)) for var, func in found.items()}

    def told(call: relax.Call) -> relax.Call:
        if not (isinstance(call.op, ir.Op) and call.op.name in _CALLS and call.args[0] in found):
            return call
        callee, arguments, *_ = call.args
        given = zip(arguments.fields, model[callee].params)
        tensors = [each for each, param in given if tirx.is_buffer_var(param)]
        return relax.Call(call.op, [variables[callee], relax.Tuple(tensors)], call.attrs, call.ty_args)

    made = builder.get()
    functions = {
        var: _tvm.structural_map(func, (relax.Call, told)) if isinstance(func, relax.Function) else func
        for var, func in made.functions_items()
    }
    return IRModule(functions, attrs=model.attrs, global_infos=model.global_infos)


def _of_one_number(func: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """The function without the parameters that are numbers; None if it has none, or asks for one of them alone."""
    numbers = {param for param in func.params if not tirx.is_buffer_var(param)}
    extents: list[tirx.Expr] = []
    for buffer in filter(tirx.is_buffer_var, func.params):
        for extent in buffer.shape:
            composite = is_symbolic(extent) and not isinstance(extent, tirx.Var)
            if composite and not any(alike([extent], [other]) for other in extents):
                extents.append(extent)
    if not numbers or not extents or not all(numbers.issuperset(variables_of(extent)) for extent in extents):
        return None
    taken = {str(param.name) for param in func.params}
    rows: list[tuple[tirx.Var, tirx.Expr]] = []
    for extent in extents:
        rows.append((tirx.Var(unused_name("rows", taken), str(extent.ty)), extent))
        taken.add(str(rows[-1][0].name))

    def counted(expr: tirx.Expr) -> tirx.Expr:
        found = set(variables_of(expr))
        if numbers.isdisjoint(found):  # an extent within another one has its number already
            return next((number for number, _ in rows if found == {number} and alike([expr], [number])), expr)
        return next((number for number, extent in rows if alike([expr], [extent])), expr)

    tensors = [param for param in func.params if param not in numbers]
    made = _tvm.structural_map(
        tirx.PrimFunc(tensors, func.body, func.ret_type, func.attrs), [(kind, counted) for kind in _ARITHMETIC]
    )
    told = {extent for buffer in made.params for extent in buffer.shape if isinstance(extent, tirx.Var)}
    left: list[tirx.Var] = []
    unknown = numbers | ({number for number, _ in rows} - told)
    tvm_ffi.structural_walk(made, (tirx.Var, lambda var: left.append(var) if var in unknown else None))
    if left:
        return None
    made_of = {
        str(number.name): sorted(str(var.name) for var in variables_of(extent))
        for number, extent in rows
        if number in told
    }
    return made.with_attr(MADE_OF, made_of)
