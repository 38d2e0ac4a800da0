"""The builder: compiles a candidate, and apart from it what packs its weights.

A process is told what compiles by name, and imports nothing else of it:

>>> from tvm_axe.machines.builder import builder_named
>>> from tvm_axe.pipeline import build
>>> builder_named(BUILDER) is build
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from tvm import tirx
from tvm.ir import IRModule
from tvm.runtime import Module
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.meta.measure.exchange import Params
from tvm_axe.records.packing import split_packing

__all__ = ["BUILDER", "Build", "Built", "build_candidate", "params_of"]

Build: TypeAlias = Callable[[IRModule, Target], Module]
"""A builder: gives something whose ``main`` can be called, for which nothing is left to compile."""

BUILDER = "tvm_axe.pipeline:build"
"""The name of what compiles kernels for every target."""


class Built(NamedTuple):
    """A candidate that was built.

    Attributes
    ----------
    module
        What is called and timed.
    pack
        What packs its weights; None where it has none that are packed ahead.
    places
        Which arguments these are.
    params
        Shape and type of each, packed.
    """

    module: Module
    pack: Module | None
    places: tuple[int, ...]
    params: Params


def build_candidate(mod: IRModule, target: Target, build: Build) -> Built:
    """Compile a candidate by `build`, and apart from it what packs its weights."""
    parts = split_packing(mod["main"])
    if parts.pack is None:
        return Built(build(mod, target), None, (), ())
    params, pack = params_of(parts.main), parts.pack.with_attr("global_symbol", "main")
    module = build(IRModule({"main": parts.main}), target)
    return Built(
        module, build(IRModule({"main": pack}), target), parts.places, [params[place] for place in parts.places]
    )


def params_of(func: tirx.PrimFunc) -> Params:
    """Shape and type of each parameter of a function."""
    infos = ms.arg_info.ArgInfo.from_prim_func(func)
    return [(tuple(map(int, info.shape)), np.dtype(str(info.dtype))) for info in infos]
