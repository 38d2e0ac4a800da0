"""Functions with blocks and threads, taken apart, and run thread by thread on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from tvm_axe import _tvm
from tvm_axe.executable.tensors import fetched, put
from tvm_axe.machines import backend_of, resolve_target
from tvm_axe.machines.threads import with_threads
from tvm_axe.machines.vector_math import PIPELINE

GPU = resolve_target("cuda:sm_90a")


def bound(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return with_threads(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}))["main"]


def loops_of(part: object, kind: tirx.ForKind) -> list[tirx.For]:
    found: list[tirx.For] = []
    tvm_ffi.structural_walk(part, (tirx.For, lambda loop: found.append(loop) if loop.kind == kind else None))
    return found


def launches(func: tirx.PrimFunc) -> list[tuple[int, ...]]:
    """Of each kernel, the extents of its blocks and threads."""
    found = [int(loop.extent) for loop in loops_of(func.body, tirx.ForKind.THREAD_BINDING)]
    return list(zip(found[1::2], found[::2]))  # the walk comes to the innermost first


def one_by_one(mod: tvm.IRModule) -> tvm.IRModule:
    """The module with its threads one after the other, for a CPU; what is between kernels' threads doesn't show."""

    def on_loop(loop: tirx.For) -> tirx.Stmt:
        if loop.kind != tirx.ForKind.THREAD_BINDING:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    functions = {
        var: func.with_body(_tvm.structural_map(func.body, (tirx.For, on_loop)))
        if isinstance(func, tirx.PrimFunc)
        else func
        for var, func in mod.functions_items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def computed(func: tirx.PrimFunc, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the arrays are when the threads of a bound function have run on copies of them."""
    built = tvm.compile(one_by_one(tvm.IRModule({"main": func})), target="llvm", tir_pipeline=PIPELINE)
    tensors = [put(array, tvm.cpu()) for array in arrays]
    built["main"](*tensors)
    return [fetched(tensor) for tensor in tensors]


def source(func: tirx.PrimFunc) -> str:
    """The CUDA source of a function's kernels, without what upstream writes before all of them."""
    built = backend_of(GPU).build(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), GPU)
    return "\n".join(part for part in built.source.split('extern "C"')[1:] if "{" in part)
