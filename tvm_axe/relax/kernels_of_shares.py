"""Which kernel computes a device's share of what one computes whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import ir, te, tirx
from tvm.ir import IRModule
from tvm.sym import Analyzer
from tvm.target import Target
from tvm_ffi import structural_equal

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.blocks import nested_blocks, statements
from tvm_axe.analysis.expressions import substitute, uses
from tvm_axe.relax.in_blocks import decoding_product_in_blocks
from tvm_axe.tile.kernels import compiles
from tvm_axe.tile.kernels.dequantized import DECODING

__all__ = ["blocks_of_product", "cuts_groups", "for_share", "is_decoding", "said_of_share", "with_kernels_there"]

_AXES = {"h": (0, 1, 2, 3), "t": (0, 2, 1, 3)}
"""Which axes of a tensor are its batch, heads, tokens and dim, by its letter."""


def for_share(local: tirx.PrimFunc, whole: tirx.PrimFunc, rank: tirx.Var) -> tirx.PrimFunc:
    """What a device does of a function that a kernel computes: by a kernel too, if it is one of fewer heads or rows.

    Anything else says nothing of kernels any more: its blocks are right.

    Parameters
    ----------
    local, whole : PrimFunc
        Of slabs, and what it is a part of.
    rank : Var
        The device's coordinate, if it makes a difference.
    """
    if KERNEL not in (whole.attrs or {}):
        return local
    for key in _said(whole):
        local = local.without_attr(key)
    said = None if uses(local.body, rank) else said_of_share(local, whole)
    return local if said is None else local.with_attrs(said)


def said_of_share(local: tirx.PrimFunc, whole: tirx.PrimFunc) -> dict[str, Any] | None:
    """What says which kernel computes a device's share of a function, as attributes; None if none does.

    Parameters
    ----------
    local, whole : PrimFunc
        Of slabs, and what it is a part of, which a kernel computes.
    """
    asked = _said(whole)
    shapes, before = (
        [[int(n) if isinstance(n, tirx.IntImm) else n for n in param.shape] for param in func.params]
        for func in (local, whole)
    )
    own = {key.removeprefix(f"{KERNEL}."): value for key, value in asked.items() if key != KERNEL}
    sinks = shapes[3] if own.get("sinks", False) else None
    if sinks is not None:
        shapes, before = ([*each[:3], each[4]] for each in (shapes, before))
    share = _SHARES[str(asked[KERNEL])](own, shapes, before)
    if share is None or (sinks is not None and sinks != [share["heads"]]):
        return None
    if is_decoding(whole) and not _decodes_so(local, blocks_of_product(local, {**own, **share})):
        return None
    # Of what isn't known it is said already which extent it is, unless it is another.
    return {**asked, **{f"{KERNEL}.{key}": n for key, n in share.items() if isinstance(n, int | list)}}


def is_decoding(func: tirx.PrimFunc) -> bool:
    """Whether a kernel computes a function that is a product with a weight of few bits."""
    return str((func.attrs or {}).get(KERNEL)) in DECODING.values()


def cuts_groups(func: tirx.PrimFunc, local: Callable[[int], Sequence[Any]]) -> bool:
    """Whether a device with such a share of a product has a part of its first group of codes, and of its last.

    No kernel computes such a share. Of groups that are cut alike each device has as many, of fewer terms.

    Parameters
    ----------
    func : PrimFunc
        Any function; of what isn't a product with a weight of few bits nothing is cut.
    local : Callable
        The shape that a device has of the parameter at a place.
    """
    if not is_decoding(func):
        return False
    terms, groups = int(local(0)[-1]), int(local(2)[0])
    return groups != int(func.params[2].shape[0]) and terms != groups * int(func.attrs[f"{KERNEL}.group"])


def blocks_of_product(local: tirx.PrimFunc, problem: Mapping[str, Any]) -> tirx.PrimFunc:
    """The product with a weight of few bits that a kernel computes of tensors like a function's, in blocks.

    Parameters
    ----------
    local : PrimFunc
        Of the tensors.
    problem : mapping
        What the kernel is asked for; of rows that aren't known anything.
    """
    (rows, _), *given, _ = [[*param.shape] for param in local.params]
    tensors = [(shape, str(param.dtype)) for shape, param in zip(given, local.params[1:])]
    known = {key: _tvm.plain(value) for key, value in problem.items()}
    func = te.create_prim_func(
        decoding_product_in_blocks({**known, "m": rows}, tensors), str(local.params[1].shape[0].ty)
    )
    return func.without_attr("global_symbol")


def _decodes_so(local: tirx.PrimFunc, blocks: tirx.PrimFunc) -> bool:
    """Whether a share of a product finds the code, scale and zero of each term where the kernel does.

    A device may have a part of its first group and of its last.
    """
    return bool(structural_equal(_decoding(local), _decoding(blocks)))


_ROW, _COLUMN = (tirx.Var(name, "int64") for name in ("row", "column"))
_LOADED: dict[tuple[int, str], tirx.Var] = {}


def _decoding(func: tirx.PrimFunc) -> list[Any]:
    """What a product's first block decodes: how far it runs, of which tensors and where, and what it makes of that."""
    block, analyzer = nested_blocks(statements(func.body.block.body)[0])[0].block, Analyzer()
    extents = [int(iv.dom.extent) for iv in block.iter_vars]
    known: dict[tirx.Var, tirx.Expr] = {}
    for iv, seen, extent in zip(block.iter_vars, (_ROW, _COLUMN), extents):
        analyzer.bind(seen, ir.Range(0, extent), True)
        known[iv.var] = seen if str(iv.var.ty) == "int64" else tirx.Cast(str(iv.var.ty), seen)
    loads: list[Any] = []

    def loaded(load: ir.TensorLoad) -> tirx.Expr:
        at = next(n for n, param in enumerate(func.params) if param.same_as(load.source))
        indices = [analyzer.simplify(substitute(tirx.Cast("int64", index), known)) for index in load.indices]
        loads.append([at, *indices])
        return _LOADED.setdefault((len(loads), str(load.ty.dtype)), tirx.Var(f"load{len(loads)}", load.ty))

    value = _tvm.structural_map(block.body.value, (ir.TensorLoad, loaded))
    return [extents, loads, analyzer.simplify(substitute(value, known))]


def with_kernels_there(module: IRModule, target: Target) -> IRModule:
    """The module, whose functions say nothing of kernels that a target hasn't for what they are shares of.

    Parameters
    ----------
    module : IRModule
        What each device runs.
    target : Target
        Resolved.
    """
    module = module.clone()
    for variable, func in module.functions_items():
        if not isinstance(func, tirx.PrimFunc) or KERNEL not in (func.attrs or {}):
            continue
        said = {key.removeprefix(f"{KERNEL}."): _tvm.plain(value) for key, value in _said(func).items()}
        name = str(said.pop(KERNEL))
        problem = {key: tirx.Var(key, "int64") if isinstance(n, list) else n for key, n in said.items()}
        if not compiles(name, target, problem):
            for key in _said(func):
                func = func.without_attr(key)
            module[variable] = func
    return module


def _said(func: tirx.PrimFunc) -> dict[str, Any]:
    """The attributes of a function that say which kernel computes it."""
    return {str(key): value for key, value in dict(func.attrs.items()).items() if str(key).startswith(KERNEL)}


_Shapes = Sequence[Sequence[Any]]
"""Of a function's tensors; an extent that isn't known is an expression."""


def _share_of_attention(own: Mapping[str, Any], shapes: _Shapes, whole: _Shapes) -> dict[str, Any] | None:
    """Which batches and heads tensors have, and queries without a mask, if each has all of its keys and dim."""
    order = str(own.get("order", "hhhh"))
    q, k, v, out = ([shape[n] for n in _AXES[letter]] for shape, letter in zip(shapes, order))
    all_q, all_k = ([shape[n] for n in _AXES[letter]] for shape, letter in zip(whole[:2], order))
    rows = 3 if not own["causal"] else 2
    same = _alike(q, out) and _alike(k, v) and _alike(q[rows:], all_q[rows:]) and _alike(k[2:], all_k[2:])
    found = _heads(own, q[0], q[1], k[1]) if same and _alike(k[:1], q[:1]) else None
    if found is None:
        return None
    # Of an unknown length that queries and keys have it is said which extent of the queries it is.
    is_apart = not isinstance(k[2], int) and not _alike(q[2:3], k[2:3])
    return {**found, "queries": q[2], **({"keys": [1, _AXES[order[1]][2]]} if is_apart else {})}


def _alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(structural_equal(one, other) for one, other in zip(some, others, strict=True))


def _share_of_decoding(own: Mapping[str, Any], shapes: _Shapes, _whole: _Shapes) -> dict[str, int] | None:
    """The same for one query, whose heads come before it or behind."""
    q, k, v, out = shapes
    heads, keys, dim = q[1] * q[2], int(own["capacity"]), int(own["dim"])
    same = out[1] * out[2] == heads and out[0] == q[0] and q[3] == out[3] == dim and k == v and k[2:] == [keys, dim]
    return _heads(own, q[0], heads, k[1]) if same and k[0] == q[0] else None


def _heads(own: Mapping[str, Any], batch: Any, heads: int, kv_heads: int) -> dict[str, Any] | None:
    alike = kv_heads * int(own["heads"]) == heads * int(own["kv_heads"]) or int(own["kv_heads"]) == 1
    return {"batch": batch, "heads": heads, "kv_heads": kv_heads} if alike else None


def _share_of_decoding_product(own: Mapping[str, Any], shapes: _Shapes, whole: _Shapes) -> dict[str, Any] | None:
    """Which rows, columns and terms a product with weights of few bits has, if its groups lie one behind the other.

    Of groups that are cut each device has as many, of fewer terms.
    """
    (m, k), (n, bytes_of_row), *of_groups, (rows, columns) = shapes
    lanes = whole[0][1] // whole[1][1]
    groups = of_groups[0][0]
    same = bytes_of_row * lanes == k and columns == n and all(each == [groups, n] for each in of_groups)
    return {"m": m, "n": n, "k": k, "group": k // groups} if same and _alike([m], [rows]) and k % groups == 0 else None


def _share_of_rows(own: Mapping[str, Any], shapes: _Shapes, _whole: _Shapes) -> dict[str, int] | None:
    """Which rows a tensor has, if each is whole."""
    *rows, columns = shapes[0]
    return {"rows": math.prod(rows)} if columns == int(own["columns"]) else None


_SHARES = {
    "attention": _share_of_attention,
    "decode_attention": _share_of_decoding,
    **dict.fromkeys(DECODING.values(), _share_of_decoding_product),
    "rms_norm": _share_of_rows,
    "layer_norm": _share_of_rows,
    "softmax": _share_of_rows,
}
"""Of what a device computes by a kernel, if its tensors have such shapes: in which numbers its problem is another."""
