"""Padding by sizes that aren't known, as of a picture to a multiple of windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import te, tirx

from tvm_axe._tvm.torch_sizes import arguments_of, shape_said, size_said
from tvm_axe.errors import InputError

__all__ = ["padded"]


def padded(otherwise: Callable[[Any, Any], Any], node: Any, importer: Any) -> Any:
    """A tensor with a number in front of it and behind it, as often as sizes say; where one is negative, a part of it.

    Upstream's operator takes numbers alone; padding by these is made by `otherwise`.

    Raises
    ------
    InputError
        A size isn't made of inputs'.
    """
    given = arguments_of(node)
    if all(type(each) is int for each in given["pad"]):
        return otherwise(node, importer)
    value = importer.env[given["self"]]
    shape, amounts = shape_said(node, importer), [size_said(each, node.graph, importer) for each in given["pad"]]
    if any(each is None for each in (*shape, *amounts)):
        raise InputError(
            f"{node.name}: padding by {_unknown(given['pad'])} isn't imported, as it isn't made of inputs' extents; "
            "pad by a known number, or export the model with extents that are known"
        )
    before = [0] * len(shape)
    for at, amount in enumerate(amounts[::2]):  # the last dimension is the first
        before[-1 - at] = amount
    dtype = str(value.ty.dtype)
    filling = tirx.const(bool(given["value"] or 0) if dtype == "bool" else given["value"] or 0, dtype)

    def inside(source: te.Tensor) -> te.Tensor:
        def element(*at: Any) -> Any:
            places = [index - first for index, first in zip(at, before)]
            within = [
                each
                for index, place, extent, first in zip(at, places, source.shape, before)
                if index is not place
                for each in (place >= 0, place < extent)
            ]
            return tirx.if_then_else(tirx.all(*within), source(*places), filling)

        return te.compute(shape, element, name="padded")

    return importer.block_builder.emit_te(inside, value, primfunc_name_hint="padded")


def _unknown(pad: Sequence[Any]) -> str:
    return ", ".join(str(each.meta["val"]) for each in pad if hasattr(each, "meta"))
