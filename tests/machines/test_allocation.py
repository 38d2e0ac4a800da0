"""Memory inside of functions of symbolic extents: no quotient is in what is allocated, and dimensions may be empty."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import ir, tirx
from tvm.ir.instrument import pass_instrument
from tvm.script import tirx as T

from tvm_axe.machines.allocation import allocated_as_declared
from tvm_axe.machines.vector_math import PIPELINE


def fused():
    """Two nests, each of a loop over all dimensions but the last, and what is between them."""
    h, w = tirx.Var("h", "int64"), tirx.Var("w", "int64")

    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((4, h, w), "float32"), y: T.Buffer((4, h - 2, w), "float32")):
        inner = T.sblock_alloc_buffer((4, h - 2, w))
        for i in T.serial(4 * (h - 2)):
            for j in T.serial(w):
                with T.sblock("inner"):
                    a = T.axis.spatial(4, i // (h - 2))
                    b = T.axis.spatial(h - 2, i % (h - 2))
                    c = T.axis.spatial(w, j)
                    inner[a, b, c] = x[a, b + 2, c] * T.float32(2)
        for i in T.serial(4 * (h - 2)):
            for j in T.serial(w):
                with T.sblock("outer"):
                    a = T.axis.spatial(4, i // (h - 2))
                    b = T.axis.spatial(h - 2, i % (h - 2))
                    c = T.axis.spatial(w, j)
                    y[a, b, c] = inner[a, b, c] + x[a, b, c]

    return func


def reshaped():
    """Quotients of quotients of what a device's part begins with: upstream takes these for one index."""
    m = tirx.Var("m", "int64")

    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((m, m, m), "float32"), r: T.int64, y: T.Buffer(((m * m + 1) // 2, m), "float32")):
        inner = T.sblock_alloc_buffer((m, m, m))
        for i, j, k in T.grid(m, m, m):
            with T.sblock("inner"):
                a, b, c = T.axis.remap("SSS", [i, j, k])
                inner[a, b, c] = x[a, b, c] * T.float32(2)
        for i, j in T.grid((m * m + 1) // 2, m):
            with T.sblock("outer"):
                a, b = T.axis.remap("SS", [i, j])
                first = T.meta_var(T.min(r * ((m * m + 1) // 2), m * m - (m * m + 1) // 2))
                y[a, b] = inner[
                    ((first + a) * m + b) // m // m % m, ((first + a) * m + b) // m % m, ((first + a) * m + b) % m
                ]

    return func


def allocated(func):
    """The shapes that upstream allocates of what is inside of a function."""
    found = []

    @pass_instrument
    class AfterCompaction:
        def run_after_pass(self, mod, info):
            if info.name == "s_tir.CompactBufferAllocation":
                found.extend(mod["main"].body.block.alloc_buffers)

    with ir.transform.PassContext(instruments=[AfterCompaction()]):
        tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), "llvm", tir_pipeline=PIPELINE)
    return [buffer.shape for buffer in found]


@pytest.mark.parametrize("make", [fused, reshaped])
def test_what_is_allocated_is_what_is_declared(make):
    func = make()
    (declared,) = func.body.block.alloc_buffers
    assert tvm_ffi.structural_equal(allocated(func), [declared.shape], map_free_vars=True)


def test_results(tmp_path):
    """Also of no elements, in a process of its own, as what divides by 0 would end this one."""
    code = """
        import sys
        sys.path.append(sys.argv[1])
        import numpy as np, tvm
        from test_allocation import PIPELINE, fused
        func = tvm.compile(fused().with_attr("global_symbol", "main"), "llvm", tir_pipeline=PIPELINE)
        for h, w in ((5, 3), (2, 4), (3, 0), (2, 0), (9, 9)):
            x = np.random.default_rng(h).standard_normal((4, h, w)).astype("float32")
            y = tvm.runtime.tensor(np.full((4, h - 2, w), np.nan, "float32"))
            func(tvm.runtime.tensor(x), y)
            assert np.abs(y.numpy() - (2 * x[:, 2:] + x[:, :-2])).max(initial=0) < 1e-6
    """
    home = __file__.rsplit("/", 1)[0]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), home], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quotients_of_quotients():
    func = tvm.compile(reshaped().with_attr("global_symbol", "main"), "llvm", tir_pipeline=PIPELINE)
    for m in (1, 2, 3, 5):
        x = np.random.default_rng(m).standard_normal((m, m, m)).astype("float32")
        part, want = (m * m + 1) // 2, 2 * x.reshape(m * m, m)
        for rank in range(2):
            y = tvm.runtime.tensor(np.full((part, m), np.nan, "float32"))
            func(tvm.runtime.tensor(x), rank, y)
            first = min(rank * part, m * m - part)
            assert np.array_equal(y.numpy(), want[first : first + part])


def test_known_divisors_are_left_alone():
    @T.prim_func(s_tir=True)
    def func(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        inner = T.sblock_alloc_buffer((2, 4))
        for i in T.serial(8):
            with T.sblock("inner"):
                a = T.axis.spatial(8, i)
                inner[a // 4, a % 4] = x[a] * T.float32(2)
        for i in T.serial(8):
            with T.sblock("outer"):
                a = T.axis.spatial(8, i)
                y[a] = inner[a // 4, a % 4]

    module = tvm.IRModule({"main": func})
    assert tvm_ffi.structural_equal(allocated_as_declared(module)["main"], module["main"])
