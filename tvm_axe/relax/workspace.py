"""Memory that functions would allocate in every call becomes tensors that they are called with.

A call of upstream's virtual machine takes an instruction for each tensor that it allocates and for each that it lets
go, which of a model are twice as many as its kernels, and checks each argument by two. Shapes that are constant needn't
be allocated in a call: upstream's plan of the memory is carried out once, and tensors of the same shape at the same
place are one argument, however many layers there are.

>>> builder, kind = relax.BlockBuilder(), relax.TensorType([4], "float32")
>>> x, out = relax.Var("x", kind), relax.Var("out", kind)
>>> def twice(read, written):
...     builder.emit(relax.Call(relax.ExternFunc("twice"), [read, written], ty_args=[relax.TupleType([])]))
>>> with builder.function("main", [x, out], pure=False):
...     y = builder.emit(relax.op.builtin.alloc_tensor(relax.ShapeExpr([4]), "float32", 0))
...     twice(x, y)
...     twice(y, out)
...     _ = builder.emit_func_output(relax.Tuple([]))
>>> module, workspaces = with_workspaces(builder.finalize())
>>> print(workspaces["main"])
Workspace(nbytes=256, parts=(Part(offset=0, shape=(4,), dtype='float32'),))
>>> [param.name for param in module["main"].params]
['x', 'out', 'workspace_0']
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import tvm
from tvm import relax
from tvm.ir import IRModule

from tvm_axe.relax.bounded import without_large_bounds
from tvm_axe.relax.values import is_call, shape_of

__all__ = ["Part", "Workspace", "with_workspaces"]

_ALIGNMENT = 256  # bytes: of what kernels may take to be aligned


class Part(NamedTuple):
    """A tensor in a workspace.

    Attributes
    ----------
    offset : int
        Where it begins, in bytes.
    shape, dtype
        What it is.
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str


class Workspace(NamedTuple):
    """What a function is called with behind its other arguments.

    Attributes
    ----------
    nbytes : int
        How much memory it takes.
    parts : tuple of Part
        The arguments: tensors in that memory, some at the same place.
    """

    nbytes: int
    parts: tuple[Part, ...]


def with_workspaces(module: IRModule) -> tuple[IRModule, Mapping[str, Workspace]]:
    """The module with functions that allocate nothing of constant shape, and what they are called with instead.

    Parameters
    ----------
    module : IRModule
        What a device runs of a model: functions that return nothing. Their arguments aren't checked any more.
    """
    passes = [
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
    ]
    planned = tvm.transform.Sequential(passes)(without_large_bounds(module))
    found: dict[str, Workspace] = {}
    for variable, func in planned.functions_items():
        if isinstance(func, relax.Function):
            planned[variable], found[str(variable.name_hint)] = _lifted(func)
    return relax.transform.CanonicalizeBindings()(planned), found


def _lifted(func: relax.Function) -> tuple[relax.Function, Workspace]:
    places: dict[relax.Var, int] = {}
    params: dict[Part, relax.Var] = {}
    nbytes = 0
    bindings = [binding for block in func.body.blocks for binding in block.bindings]
    symbolic = {
        binding.value.args[0]
        for binding in bindings
        if is_call(binding.value, "relax.memory.alloc_tensor") and shape_of(binding.var) is None
    }
    blocks = []
    for block in func.body.blocks:
        kept = []
        for binding in block.bindings:
            value = binding.value
            if is_call(value, "relax.memory.alloc_storage") and binding.var not in symbolic:
                size = _size(value)
                if size is not None:
                    places[binding.var] = nbytes
                    nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT
                    continue
            if is_call(value, "relax.memory.alloc_tensor") and value.args[0] in places:
                kind = binding.var.ty
                offset = places[value.args[0]] + int(value.args[1])
                part = Part(offset, tuple(map(int, kind.shape.values)), str(kind.dtype))
                if part not in params:
                    params[part] = relax.Var(f"workspace_{len(params)}", kind)
                binding = relax.VarBinding(binding.var, params[part])
            kept.append(binding)
        blocks.append(type(block)(kept))
    body = relax.SeqExpr(blocks, func.body.body)
    lifted = relax.Function([*func.params, *params.values()], body, func.ret_ty, func.is_pure, func.attrs)
    tensors = [param for param in func.params if isinstance(param.ty, relax.TensorType)]
    if all(shape_of(param) is not None for param in tensors):
        lifted = lifted.with_attr("num_input", 0)  # nothing is to be learnt of them, and whoever calls has checked them
    return lifted, Workspace(nbytes, tuple(params))


def _size(storage: relax.Call) -> int | None:
    """The bytes of what is allocated, if they are known."""
    (extent,) = storage.args[0].values
    return int(extent) if isinstance(extent, tvm.tirx.IntImm) else None
