"""Which kernel computes a device's share of what one computes whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import tirx
from tvm_ffi import structural_equal

from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.expressions import uses

__all__ = ["for_share"]

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
    attrs = dict(whole.attrs.items()) if whole.attrs else {}
    if KERNEL not in attrs:
        return local
    asked = {str(key): value for key, value in attrs.items() if str(key).startswith(KERNEL)}
    for key in asked:
        local = local.without_attr(key)
    if uses(local.body, rank):
        return local
    shapes, before = (
        [[int(n) if isinstance(n, tirx.IntImm) else n for n in param.shape] for param in func.params]
        for func in (local, whole)
    )
    own = {key.removeprefix(f"{KERNEL}."): value for key, value in asked.items() if key != KERNEL}
    sinks = shapes[3] if own.get("sinks", False) else None
    if sinks is not None:
        shapes, before = ([*each[:3], each[4]] for each in (shapes, before))
    share = _SHARES[str(attrs[KERNEL])](own, shapes, before)
    if share is None or (sinks is not None and sinks != [share["heads"]]):
        return local
    # Of what isn't known it is said already which extent it is.
    found = {f"{KERNEL}.{key}": n for key, n in share.items() if isinstance(n, int)}
    return local.with_attrs({**asked, **found})


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
    return None if found is None else {**found, "queries": q[2]}


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


def _share_of_norm(own: Mapping[str, Any], shapes: _Shapes, _whole: _Shapes) -> dict[str, int] | None:
    """Which rows a norm's tensor has, if each is whole."""
    *rows, columns = shapes[0]
    return {"rows": math.prod(rows)} if columns == int(own["columns"]) else None


_SHARES = {
    "attention": _share_of_attention,
    "decode_attention": _share_of_decoding,
    "rms_norm": _share_of_norm,
    "layer_norm": _share_of_norm,
}
"""Of what a device computes by a kernel, if its tensors have such shapes: in which numbers its problem is another."""
