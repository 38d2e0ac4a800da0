"""Functions one behind the other as one, so that what only passes between them stays inside of it.

>>> from tvm.script import tirx as T
>>> @T.prim_func(s_tir=True)
... def twice(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
...     for i in T.serial(4):
...         with T.sblock("B"):
...             vi = T.axis.spatial(4, i)
...             B[vi] = A[vi] * T.float32(2)
>>> func = joined([(twice, ("x", "y")), (twice, ("y", "z"))], ["x"], ["z"])
>>> [str(param.name) for param in func.params], len(func.body.block.alloc_buffers)
(['A', 'B'], 1)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import statements, unused_name
from tvm_axe.analysis.expressions import substitute, variables_of

__all__ = ["joined"]

_INDEX = "int64"
"""The type of a model's iterators."""


def joined(
    parts: Sequence[tuple[tirx.PrimFunc, Sequence[Hashable]]], ins: Sequence[Hashable], outs: Sequence[Hashable]
) -> tirx.PrimFunc:
    """The function that runs some functions in turn.

    Parameters
    ----------
    parts : sequence of (PrimFunc, sequence)
        Functions of buffers, of nests below their roots, in order, and what each of their buffers stands for; equal
        names are one buffer. Variables may be free in them, the same in all: the device's coordinates, and what the
        shapes of buffers are counted in.
    ins, outs : sequence
        What the function takes and gives; all else lives inside of it.

    Returns
    -------
    func : PrimFunc
        Of `ins` and `outs`.
    """
    buffers: dict[Hashable, tirx.Buffer] = {}
    inside: list[tirx.Buffer] = []
    nests: list[tirx.Stmt] = []
    names: set[str] = set()
    for func, keys in parts:
        own = _renewed(func)
        given = {param: buffers.setdefault(key, param) for param, key in zip(own.params, keys, strict=True)}
        root = own.body.block
        inside += root.alloc_buffers
        nests += [_renamed(nest, given, names) for nest in statements(root.body)]
    inside += [buffer for key, buffer in buffers.items() if key not in ins and key not in outs]
    whole = s_tir.SBlock([], [], [], "root", tirx.stmt_seq(*nests), alloc_buffers=inside)
    func = tirx.PrimFunc([buffers[key] for key in (*ins, *outs)], s_tir.SBlockRealize([], True, whole))
    return func.with_attrs({"s_tir": True, "tirx.noalias": True})


def _renewed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with definitions of its own, counted in the same variables."""
    shapes = [list(buffer.shape) for buffer in (*func.params, *func.body.block.alloc_buffers)]
    sizes = sorted(variables_of(shapes), key=lambda var: str(var.name))
    if not sizes:
        return s_tir.renew_defs(func)
    # Upstream takes what shapes are counted in to be defined there, too.
    own = s_tir.renew_defs(tirx.PrimFunc([*func.params, *sizes], func.body, func.ret_type, func.attrs))
    params, found = own.params[: -len(sizes)], own.params[-len(sizes) :]
    return substitute(tirx.PrimFunc(params, own.body, own.ret_type, own.attrs), dict(zip(found, sizes)))


def _renamed(nest: tirx.Stmt, given: dict[tirx.Var, tirx.Var], names: set[str]) -> tirx.Stmt:
    """The nest on other buffers, its blocks with names of their own."""

    def on_block(block: s_tir.SBlock) -> s_tir.SBlock:
        name = unused_name(str(block.name_hint), names)
        names.add(name)
        return _tvm.with_name(block, name)

    def on_load(load: ir.TensorLoad) -> ir.TensorLoad:
        # Where a block goes into its reader, upstream puts the reader's indices for iterators, of whatever type.
        if all(str(index.ty) == _INDEX for index in load.indices):
            return load
        return tirx.BufferLoad(load.source, [i if str(i.ty) == _INDEX else tirx.Cast(_INDEX, i) for i in load.indices])

    callbacks = [(s_tir.SBlock, on_block), (ir.TensorLoad, on_load), (tirx.Var, lambda var: given.get(var, var))]
    return _tvm.structural_map(nest, callbacks)
