"""Workloads that the tuning tests share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.meta import resolve_target


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


@pytest.fixture(scope="session")
def target() -> Target:
    return resolve_target("llvm", threads=1)
