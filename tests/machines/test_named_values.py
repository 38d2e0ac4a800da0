"""Values with names in expressions, of which upstream's elimination of common subexpressions makes what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.machines import backend_of, resolve_target


@T.inline
def step(A, B, C, i, y):
    """What is equal in both lines is found in the second alone, and replaced in both."""
    for j in range(2):
        A[i * 2 + j] = T.Let(y * B[i % 4 * 3] + y, where={y: A[j] + T.float32(1)})
    C[i] = B[i % 4 * 3] + C[i % 4 * 3 + 1]


@T.prim_func(s_tir=True)
def on_host(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32"), C: T.Buffer((16,), "float32")) -> None:
    y = T.float32()
    for i in range(8):
        step(A, B, C, i, y)


@T.prim_func(s_tir=True)
def on_gpu(A: T.Buffer((16,), "float32"), B: T.Buffer((16,), "float32"), C: T.Buffer((16,), "float32")) -> None:
    y = T.float32()
    i = T.launch_thread("threadIdx.x", 8)
    step(A, B, C, i, y)


def module(func: tirx.PrimFunc) -> tvm.IRModule:
    return tvm.IRModule({"main": func.with_attr("global_symbol", "main")})


def test_upstream_still_refuses_them():
    with pytest.raises(tvm.error.InternalError, match="has been used before definition"):
        tvm.compile(module(on_host), "llvm")


def test_they_are_right_on_a_cpu():
    target = resolve_target("llvm")
    a, b, c = (np.random.default_rng(at).standard_normal(16).astype("float32") for at in range(3))
    given = [tvm.runtime.tensor(each) for each in (a, b, c)]
    backend_of(target).build(module(on_host), target).module["main"](*given)
    for i in range(8):
        for j in range(2):
            a[i * 2 + j] = (a[j] + 1) * b[i % 4 * 3] + (a[j] + 1)
        c[i] = b[i % 4 * 3] + c[i % 4 * 3 + 1]
    for found, want in zip(given, (a, b, c)):
        np.testing.assert_allclose(found.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "rocm:gfx942"])
def test_they_compile_for_a_gpu(target):
    backend_of(resolve_target(target)).build(module(on_gpu), resolve_target(target))
