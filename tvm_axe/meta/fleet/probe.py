"""What every machine of a fleet times, so that times of several can be put on one scale."""

from __future__ import annotations

from tvm.ir import IRModule
from tvm.script import tirx as T

__all__ = ["probe_function"]

N = 192


@T.prim_func(s_tir=True)
def main(A: T.Buffer((N, N), "float32"), B: T.Buffer((N, N), "float32"), C: T.Buffer((N, N), "float32")) -> None:
    for i in T.parallel(N):
        for k, j in T.grid(N, N):
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


def probe_function() -> IRModule:
    """A product of matrices that lie in a machine's caches, on all the target's cores."""
    return IRModule({"main": main})
