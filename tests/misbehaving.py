"""A function to be measured, `double`, and candidates of it: what they do wrong is in their names."""

from __future__ import annotations

import tvm
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.records.database import normalize


@T.prim_func(s_tir=True)
def double(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def half_done(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(32):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def changes_its_input(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi] * T.float32(2)
            A[vi] = B[vi]


@T.prim_func(s_tir=True)
def goes_on(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(128):
        with T.sblock("B"):
            vi = T.axis.spatial(128, i)
            B[vi] = A[vi % 64] * T.float32(2)


@T.prim_func(s_tir=True)
def starts_before(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(65):
        with T.sblock("B"):
            vi = T.axis.spatial(65, i)
            B[vi - 1] = A[T.max(vi - 1, 0)] * T.float32(2)


@T.prim_func(s_tir=True)
def loops(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            while B[vi] > T.float32(-1e30):
                B[vi] = T.max(B[vi] + A[vi], T.float32(0))


@T.prim_func(s_tir=True)
def takes_all_memory(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    C = T.sblock_alloc_buffer((1 << 46,))
    for i in range(1 << 46):
        with T.sblock("C"):
            vi = T.axis.spatial(1 << 46, i)
            C[vi] = A[vi % 64]
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = C[vi + (1 << 45)] * T.float32(2)


@T.prim_func(s_tir=True)
def takes_four_gib(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    """It writes to 64 pages of them: where there is no limit, this is right and takes no memory."""
    C = T.sblock_alloc_buffer((1 << 30,))
    for i in range(64):
        with T.sblock("C"):
            vi = T.axis.spatial(64, i)
            C[vi * (1 << 24)] = A[vi]
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = C[vi * (1 << 24)] * T.float32(2)


@T.prim_func(s_tir=True)
def does_not_link(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = T.call_extern("float32", "no_such_function", A[vi])


@T.prim_func(s_tir=True)
def does_not_compile(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    for i in T.thread_binding(64, thread="threadIdx.x"):
        with T.sblock("B"):
            vi = T.axis.spatial(64, i)
            B[vi] = A[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def other_shape(A: T.Buffer((32,), "float32"), B: T.Buffer((32,), "float32")):
    for i in range(32):
        with T.sblock("B"):
            vi = T.axis.spatial(32, i)
            B[vi] = A[vi] * T.float32(2)


def raises(number: int) -> tvm.IRModule:
    """A candidate that gets a signal, as from a null pointer or from a system that is out of memory."""

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
        for i in range(64):
            with T.sblock("B"):
                vi = T.axis.spatial(64, i)
                B[vi] = A[vi]
                T.evaluate(T.call_extern("int32", "raise", number))

    return normalize(main)


def vectorized() -> tvm.IRModule:
    """A candidate that is right."""
    sch = s_tir.Schedule(normalize(s_tir.renew_defs(double)))  # a schedule may change what it shares a body with
    sch.vectorize(sch.get_loops(sch.get_sblock("B"))[0])
    return sch.mod
