"""What a function computes, by other means than the candidates that are checked against it.

On a CPU that is the function as it stands. Where that would take minutes, numpy computes the products of matrices in
float64, and the function as it stands the rest. A GPU can't run a function as it stands; there each element of a
result has a thread to itself, which does what the function says in its order (upstream's default schedule). A tile
program is compared with itself, its knobs at their defaults.
"""

from __future__ import annotations

import statistics
import time
from typing import Protocol

import numpy as np
import tvm
from tvm.ir import IRModule
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe.analysis.annotations import PROGRAM
from tvm_axe.checking.products import OwnProducts, own_products
from tvm_axe.machines import backend_of
from tvm_axe.meta.measure.builder import Build
from tvm_axe.meta.measure.devices import Device

__all__ = ["Reference", "reference_for"]


class Reference(Protocol):
    """Computes what a function should; `Compiled` and `Products` are its kinds."""

    def compute(self, device: Device, number: int) -> list[np.ndarray]:
        """The arguments after a call on an input set, which the device was just filled with."""

    def seconds(self, device: Device) -> tuple[float | None, float]:
        """Median of a call of the function as it stands, None if it wasn't run; and what a call here took."""


def reference_for(mod: IRModule, target: Target, build: Build, as_written: bool = False) -> Reference:
    """The way to compute ``main`` on a target in seconds, if there is one; on a CPU as it stands, if it must be."""
    if PROGRAM in (mod["main"].attrs or {}):  # which is compiled for every target, as its author's defaults have it
        return Compiled(build(mod, target), as_it_stands=True)
    if not backend_of(target).on_host:
        return Compiled(build(_a_thread_an_element(mod, target), target), as_it_stands=False)
    products = None if as_written else own_products(mod["main"])
    if products is not None:
        return Products(products, target, build)
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

    def __init__(self, products: OwnProducts, target: Target, build: Build) -> None:
        self.products = products
        self.rest = None if products.rest is None else build(products.rest, target)
        self._calls: list[float] = []

    def compute(self, device: Device, number: int) -> list[np.ndarray]:
        start = time.perf_counter()
        arguments = {n: array.copy() for n, array in enumerate(device.inputs[number])}
        count = len(arguments)
        self.products.multiply(arguments)
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
