"""Workloads that the tests of tuning and of its records share, as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import resolve_target
from tvm_axe.records import split_packing
from tvm_axe.records.database import Database, normalize
from tvm_axe.records.packing import LAYOUT_FREE


def _matmul(m: int, n: int, k: int, dtype: str = "float32") -> tirx.PrimFunc:
    zero = tirx.const(0.0, dtype)

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((m, k), dtype), W: T.Buffer((k, n), dtype), C: T.Buffer((m, n), dtype)):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm_rf"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = zero
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]

    return main


@pytest.fixture(scope="session")
def matmul() -> Callable[..., tirx.PrimFunc]:
    """Make ``C[m, n] = A[m, k] @ W[k, n]`` as lowering leaves it on a device: its block is called ``mm_rf``."""
    return _matmul


def _target() -> Target:
    return resolve_target("llvm", threads=1)


@pytest.fixture(scope="session")
def target() -> Target:
    return _target()


def _commit(folder: Path, func: tirx.PrimFunc, target: Target, seconds: Sequence[float]) -> None:
    """Records with these times: the first of the function as it is, the others of its first loop in parallel."""
    database = Database(folder)
    workload = database.commit_workload(normalize(func))
    for n, s in enumerate(seconds):
        sch = s_tir.Schedule(workload.mod)
        if n > 0:
            sch.parallel(sch.get_loops(sch.get_sblock("mm_rf"))[0])
        infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
        database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [s], target, infos))


@pytest.fixture(scope="session")
def commit() -> Callable[..., None]:
    """Write records of a matmul into a folder: `_commit`."""
    return _commit


# ---- Weights that are packed once ------------------------------------------------------------------------------------


def _dense(m: int, n: int, k: int, transposed: bool = True, free: bool = True) -> tirx.PrimFunc:
    """A product and a bias; W is [n, k] as a linear layer has it, or [k, n]."""
    shape = (n, k) if transposed else (k, n)
    attrs = {LAYOUT_FREE: [1]} if free else {}

    @T.prim_func(s_tir=True)
    def main(
        A: T.Buffer((m, k), "float32"),
        W: T.Buffer(shape, "float32"),
        bias: T.Buffer((n,), "float32"),
        out: T.Buffer((m, n), "float32"),
    ):
        T.func_attr(attrs)
        C = T.sblock_alloc_buffer((m, n), "float32")
        for i, j, l in T.grid(m, n, k):
            with T.sblock("product"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.float32(0)
                if transposed:
                    C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vj, vk]
                else:
                    C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for i, j in T.grid(m, n):
            with T.sblock("bias"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = C[vi, vj] + bias[vj]

    return main


@pytest.fixture(scope="session")
def dense() -> Callable[..., tirx.PrimFunc]:
    """Make ``out[m, n] = A[m, k] @ W + bias``, where W may be stored in another layout: `_dense`."""
    return _dense


def _arrays(func: tirx.PrimFunc) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal([int(n) for n in param.ty.shape], "float32") for param in func.params]


def _compiled(func: tirx.PrimFunc, target: tvm.target.Target) -> Callable[..., None]:
    mod = IRModule({"main": func.with_attr("global_symbol", "main")})
    return tvm.compile(with_tile_kernels(mod, target), target=target)["main"]


def _nan(param: tirx.Var) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.full([int(n) for n in param.ty.shape], np.nan, str(param.ty.dtype)))


def _run_packed(func: tirx.PrimFunc, target: tvm.target.Target, arrays: list[np.ndarray]) -> np.ndarray:
    """The function's last argument after a call of its parts; what they are to write is poisoned."""
    pack, main, places = split_packing(func)
    tensors = [*map(tvm.runtime.tensor, arrays[:-1]), _nan(func.params[-1])]
    if pack is not None:
        packed = [_nan(main.params[place]) for place in places]
        _compiled(pack, target)(*(tensors[place] for place in places), *packed)
        for place, tensor in zip(places, packed):
            tensors[place] = tensor
    _compiled(main, target)(*tensors)
    return tensors[-1].numpy()


@pytest.fixture(scope="session")
def packed_error() -> Callable[..., float]:
    """How far a function is off, its packing done apart or in the call: ``packed_error(func, target, want, split)``.

    `want` computes in float64 what the last argument is to be from the others; the error is relative to the largest.
    """

    def error(func: tirx.PrimFunc, target: Target, want: Callable[..., np.ndarray], split: bool = True) -> float:
        arrays = _arrays(func)
        if split:
            got = _run_packed(func, target, arrays)
        else:
            tensors = [*map(tvm.runtime.tensor, arrays[:-1]), _nan(func.params[-1])]
            _compiled(func, target)(*tensors)
            got = tensors[-1].numpy()
        right = want(*(array.astype("float64") for array in arrays[:-1]))
        return float(np.abs(got - right).max() / np.abs(right).max())

    return error
