"""What a function computes, by other means than the candidates that are checked against it.

On a CPU that is the function as it stands. Where that would take minutes, numpy computes the products of matrices in
float64, and the function as it stands the rest. A GPU can't run a function as it stands; there each element of a
result has a thread to itself, which does what the function says in its order (upstream's default schedule).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import covers
from tvm_axe.errors import ScheduleError
from tvm_axe.machines import backend_of
from tvm_axe.meta.measure.builder import Build
from tvm_axe.meta.measure.devices import Device
from tvm_axe.schedule.product import Product, product_of

__all__ = ["Reference", "reference_for"]

_MANY = 1e10  # operations; untuned code does 0.5e9 to 4e9 a second, so these take 3 s to 20 s


class Reference(Protocol):
    """Computes what a function should; `Compiled` and `Products` are its kinds."""

    def compute(self, device: Device, number: int) -> list[np.ndarray]:
        """The arguments after a call on an input set, which the device was just filled with."""

    def seconds(self, device: Device) -> tuple[float | None, float]:
        """Median of a call of the function as it stands, None if it wasn't run; and what a call here took."""


def reference_for(mod: IRModule, target: Target, build: Build) -> Reference:
    """The way to compute ``main`` on a target in seconds, if there is one."""
    if not backend_of(target).on_host:
        return Compiled(build(_a_thread_an_element(mod, target), target), as_it_stands=False)
    if _tvm.flops(mod) > _MANY:
        products = _split(mod["main"])
        if products is not None:
            return Products(*products, target, build)
    return Compiled(build(mod, target), as_it_stands=True)


class Compiled:
    """The function itself, or a schedule of it that needs no judge."""

    def __init__(self, module: Module, as_it_stands: bool) -> None:
        self.module, self.as_it_stands = module, as_it_stands
        self._calls: list[float] = []

    def compute(self, device: Device, number: int) -> list[np.ndarray]:
        self._calls.append(device.call(self.module, number))
        return device.results(number)

    def seconds(self, device: Device) -> tuple[float | None, float]:
        once = statistics.median(self._calls)
        return device.median(self.module, once) if self.as_it_stands else None, once


class Products:
    """Products by numpy, in float64, and the rest of the function compiled with them as further arguments."""

    def __init__(
        self, products: Mapping[int, tuple[int, int, Product]], rest: IRModule | None, target: Target, build: Build
    ) -> None:
        self.products = products
        self.rest = None if rest is None else build(rest, target)
        self._calls: list[float] = []

    def compute(self, device: Device, number: int) -> list[np.ndarray]:
        start = time.perf_counter()
        arguments = {n: array.copy() for n, array in enumerate(device.inputs[number])}
        count = len(arguments)
        for place, (a, b, product) in self.products.items():
            batch, m, n, k = product.shape
            left = arguments[a].reshape(batch, m, k).astype("float64")
            right = arguments[b].astype("float64")
            right = right.reshape(batch, n, k).swapaxes(1, 2) if product.transpose_b else right.reshape(batch, k, n)
            c = product.c
            arguments[place] = (left @ right).astype(str(c.dtype)).reshape([int(extent) for extent in c.shape])
        if self.rest is not None:
            tensors = [tvm.runtime.tensor(arguments[n]) for n in sorted(arguments)]
            self.rest["main"](*tensors)
            arguments = {n: tensor.numpy() for n, tensor in enumerate(tensors)}
        self._calls.append(time.perf_counter() - start)
        return [arguments[n] for n in range(count)]

    def seconds(self, device: Device) -> tuple[float | None, float]:
        return None, statistics.median(self._calls)


def _a_thread_an_element(mod: IRModule, target: Target) -> IRModule:
    from tvm.s_tir import dlight  # it loads the schedules of every GPU there is

    with target:
        return dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(mod)


def _split(func: tirx.PrimFunc) -> tuple[dict[int, tuple[int, int, Product]], IRModule | None] | None:
    """A function's products of its own arguments, and what is left without them; None if there are no such products.

    A product is given as the places of its operands among the arguments, by the place of its result: among them too,
    or behind them, where the rest takes those that the function allocates.
    """
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
        return products, None
    body = left[0] if len(left) == 1 else tirx.SeqStmt(left)
    buffers = [buffer for buffer in root.alloc_buffers if _place(held, buffer) is None]
    block = s_tir.SBlock([], [], [], "root", body, alloc_buffers=buffers)
    rest = tirx.PrimFunc([*params, *held], s_tir.SBlockRealize([], True, block), func.ret_type)
    return products, IRModule({"main": s_tir.renew_defs(rest.with_attrs(dict(func.attrs.items())))})


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
