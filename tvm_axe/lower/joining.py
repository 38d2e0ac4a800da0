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

from tvm import s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import statements
from tvm_axe.lower.shares import RANK

__all__ = ["joined", "takes_rank"]


def takes_rank(func: tirx.PrimFunc) -> bool:
    """Return whether a function takes the device's number beside buffers."""
    return any(not tirx.is_buffer_var(param) for param in func.params)


def joined(
    parts: Sequence[tuple[tirx.PrimFunc, Sequence[Hashable]]], ins: Sequence[Hashable], outs: Sequence[Hashable]
) -> tirx.PrimFunc:
    """The function that runs some functions in turn.

    Parameters
    ----------
    parts : sequence of (PrimFunc, sequence)
        Functions of nests below their roots, in order, and what each of their buffers stands for; equal names are one
        buffer. Beside buffers they may take the device's number, the same for all.
    ins, outs : sequence
        What the function takes and gives; all else lives inside of it.

    Returns
    -------
    func : PrimFunc
        Of `ins`, the device's number as an int64 if a part takes it, and `outs`.
    """
    rank = tirx.Var(RANK, "int64")
    buffers: dict[Hashable, tirx.Buffer] = {}
    inside: list[tirx.Buffer] = []
    nests: list[tirx.Stmt] = []
    names: set[str] = set()
    for func, keys in parts:
        own = s_tir.renew_defs(func)
        of = iter(keys)
        given: dict[tirx.Var, tirx.Var] = {}
        for param in own.params:
            given[param] = buffers.setdefault(next(of), param) if tirx.is_buffer_var(param) else rank
        root = own.body.block
        inside += root.alloc_buffers
        nests += [_renamed(nest, given, names) for nest in statements(root.body)]
    inside += [buffer for key, buffer in buffers.items() if key not in ins and key not in outs]
    whole = s_tir.SBlock([], [], [], "root", tirx.stmt_seq(*nests), alloc_buffers=inside)
    asks = any(takes_rank(func) for func, _ in parts)
    params = [*(buffers[key] for key in ins), *([rank] if asks else []), *(buffers[key] for key in outs)]
    func = tirx.PrimFunc(params, s_tir.SBlockRealize([], True, whole))
    return func.with_attrs({"s_tir": True, "tirx.noalias": True})


def _renamed(nest: tirx.Stmt, given: dict[tirx.Var, tirx.Var], names: set[str]) -> tirx.Stmt:
    """The nest on other buffers, its blocks with names of their own."""

    def on_block(block: s_tir.SBlock) -> s_tir.SBlock:
        name, number = str(block.name_hint), 0
        while name in names:
            number += 1
            name = f"{block.name_hint}_{number}"
        names.add(name)
        return _tvm.with_name(block, name)

    return _tvm.structural_map(nest, [(s_tir.SBlock, on_block), (tirx.Var, lambda var: given.get(var, var))])
