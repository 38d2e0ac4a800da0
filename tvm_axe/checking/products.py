"""Products of matrices in a function that numpy computes faster than the function as it stands, and in float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import IRModule

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import covers
from tvm_axe.checking.comparing import is_float
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule.product import Product, product_of

__all__ = ["OwnProducts", "own_products"]

_MANY = 1e10  # operations; untuned code does 0.5e9 to 4e9 a second, so these take 3 s to 20 s


class OwnProducts(NamedTuple):
    """A function's products of its own arguments, and what is left of it without them.

    A product is given as the places of its operands among the arguments, by the place of its result: among them too, or
    behind them, where the rest takes those that the function allocates.
    """

    products: Mapping[int, tuple[int, int, Product]]
    rest: IRModule | None

    def multiply(self, arguments: dict[int, np.ndarray], wide: bool = False) -> None:
        """Put the products of the arguments in their places, in their own types, or, `wide`, floats as float64."""
        for place, (a, b, product) in self.products.items():
            batch, m, n, k = product.shape
            left = arguments[a].reshape(batch, m, k).astype("float64")
            right = arguments[b].astype("float64")
            right = right.reshape(batch, n, k).swapaxes(1, 2) if product.transpose_b else right.reshape(batch, k, n)
            c, computed = product.c, left @ right
            dtype = "float64" if wide and is_float(np.dtype(str(c.dtype))) else str(c.dtype)
            arguments[place] = computed.astype(dtype, copy=False).reshape([int(extent) for extent in c.shape])


def own_products(func: tirx.PrimFunc) -> OwnProducts | None:
    """A function's products, where it does so many operations that it would take long as it stands; None otherwise."""
    return _split(func) if _tvm.flops(IRModule({"main": func})) > _MANY else None


def _split(func: tirx.PrimFunc) -> OwnProducts | None:
    """A function's products of its own arguments; None if there are no such products."""
    root, params = func.body.block, list(func.params)
    nests = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    held: list[tirx.Buffer] = []
    products: dict[int, tuple[int, int, Product]] = {}
    left: list[tirx.Stmt] = []
    for nest in nests:
        product = _product(nest)
        others = [other for other in nests if other is not nest]
        if product is None or any(_writes(other, b) for other in others for b in (product.a, product.b, product.c)):
            left.append(nest)
            continue
        a, b = _place(params, product.a), _place(params, product.b)
        if a is None or b is None:
            left.append(nest)
            continue
        place = _place(params, product.c)
        if place is None:
            held.append(product.c)
            place = len(params) + len(held) - 1
        products[place] = (a, b, product)
    if not products:
        return None
    if not left:
        return OwnProducts(products, None)
    body = left[0] if len(left) == 1 else tirx.SeqStmt(left)
    buffers = [buffer for buffer in root.alloc_buffers if _place(held, buffer) is None]
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
    rest = tirx.PrimFunc([*params, *held], s_tir.SBlockRealize([], True, block), func.ret_type)
    return OwnProducts(products, IRModule({"main": s_tir.renew_defs(rest.with_attrs(dict(func.attrs.items())))}))


def _product(nest: tirx.Stmt) -> Product | None:
    """The product that a nest of loops is, where it is one over whole buffers."""
    loops = []
    while isinstance(nest, tirx.For):
        loops.append(nest)
        nest = nest.body
    if not isinstance(nest, s_tir.SBlockRealize) or not covers(nest, tuple(loops)):
        return None
    try:
        return product_of(nest.block)
    except ScheduleError:
        return None


def _place(buffers: Sequence[tirx.Buffer], buffer: tirx.Buffer) -> int | None:
    return next((n for n, other in enumerate(buffers) if other.same_as(buffer)), None)


def _writes(nest: tirx.Stmt, buffer: tirx.Buffer) -> bool:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(nest, (tirx.BufferStore, found.append))
    return any(store.buffer.same_as(buffer) for store in found)
