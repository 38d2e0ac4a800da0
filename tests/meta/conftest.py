"""Workloads that the tuning tests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tvm import s_tir, tirx
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.meta import resolve_target
from tvm_axe.meta.database import Database, normalize


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
