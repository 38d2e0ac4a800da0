"""Small programs that several of these tests schedule, and how they are run."""

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe

FOLDS = {
    "sum": (lambda a, b: a + b, "float32", 0.0),
    "prod": (lambda a, b: a * b, "float32", 1.0),
    "max": (T.max, "float32", -1e30),
    "min": (T.min, "float32", 1e30),
    "any": (T.Or, "bool", False),
}


def numbers(shape: tuple[int, ...], start: float = 1, dtype: str = "float32") -> np.ndarray:
    """Numbers that are all different, whose products are exact."""
    return np.arange(start, start + np.prod(shape, dtype=int), dtype=dtype).reshape(shape)


def run(launched, exe: axe.Executable, **given: np.ndarray) -> dict[str, np.ndarray]:
    """The outputs after a run of other data, which is what a slab that nobody stores to would have."""
    workers = launched(exe.mesh)
    exe.run(workers, *(np.full_like(given[name], 0 if given[name].dtype.kind == "i" else -7) for name in exe.inputs))
    found = exe.run(workers, *(given[name] for name in exe.inputs))
    return dict(zip(exe.outputs, found if isinstance(found, tuple) else (found,)))


def product(m: int, n: int, k: int) -> tirx.PrimFunc:
    """C = A B."""

    @T.prim_func(s_tir=True)
    def matmul(A: T.Buffer((m, k), "float32"), B: T.Buffer((k, n), "float32"), C: T.Buffer((m, n), "float32")):
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]

    return matmul


def product_and_folded(combine: str, kinds: str, m: int, n: int, k: int) -> tirx.PrimFunc:
    """A product with what each of its rows (SR) or columns (RS) is reduced to added."""
    fold, dtype, start = FOLDS[combine]
    count, initial = (m if kinds == "SR" else n), tirx.const(start, dtype)

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((m, k), "float32"), B: T.Buffer((k, n), "float32"), Y: T.Buffer((m, n), "float32")):
        C = T.sblock_alloc_buffer((m, n))
        s = T.sblock_alloc_buffer((count,), dtype)
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
        for i, j in T.grid(m, n):
            with T.sblock("s"):
                vi, vj = T.axis.remap(kinds, [i, j])
                with T.init():
                    s[vi if kinds == "SR" else vj] = initial
                s[vi if kinds == "SR" else vj] = fold(
                    s[vi if kinds == "SR" else vj], C[vi, vj] > T.float32(3) if combine == "any" else C[vi, vj]
                )
        for i, j in T.grid(m, n):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = C[vi, vj] + T.Cast("float32", s[vi if kinds == "SR" else vj])

    return func
