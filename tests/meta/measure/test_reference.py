"""What candidates are compared with: the function as it stands, or numpy's products and the rest of it."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import tirx as T

from tvm_axe.checking import products
from tvm_axe.checking.comparing import random_array
from tvm_axe.meta.measure.devices import OnCpu
from tvm_axe.meta.measure.reference import Compiled, Products, reference_for
from tvm_axe.pipeline import build
from tvm_axe.records.database import normalize


@T.prim_func(s_tir=True)
def layer(
    A: T.Buffer((3, 20, 30), "float16"),
    W: T.Buffer((3, 40, 30), "float16"),
    bias: T.Buffer((40,), "float32"),
    out: T.Buffer((3, 20, 40), "float32"),
):
    C = T.sblock_alloc_buffer((3, 20, 40), "float32")
    for n, i, j, k in T.grid(3, 20, 40, 30):
        with T.sblock("mm"):
            vn, vi, vj, vk = T.axis.remap("SSSR", [n, i, j, k])
            with T.init():
                C[vn, vi, vj] = T.float32(0)
            C[vn, vi, vj] = C[vn, vi, vj] + T.Cast("float32", A[vn, vi, vk]) * T.Cast("float32", W[vn, vj, vk])
    for n, i, j in T.grid(3, 20, 40):
        with T.sblock("epi"):
            vn, vi, vj = T.axis.remap("SSS", [n, i, j])
            out[vn, vi, vj] = T.max(C[vn, vi, vj] + bias[vj], T.float32(0))


@T.prim_func(s_tir=True)
def chain(
    A: T.Buffer((8, 8), "float32"),
    B: T.Buffer((8, 8), "float32"),
    C: T.Buffer((8, 8), "float32"),
    D: T.Buffer((8, 8), "float32"),
):
    """D = (A B) B: only the first product is one of the function's own arguments."""
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j, k in T.grid(8, 8, 8):
        with T.sblock("D"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                D[vi, vj] = T.float32(0)
            D[vi, vj] = D[vi, vj] + C[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def no_product(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8,), "float32")):
    for i, k in T.grid(8, 8):
        with T.sblock("B"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                B[vi] = T.float32(0)
            B[vi] = B[vi] + A[vi, vk]


def _layer(A, W, bias):
    return (np.maximum(np.einsum("nik,njk->nij", A, W) + bias, 0),)


def _chain(A, B):
    return A @ B, A @ B @ B


def _device(mod) -> OnCpu:
    rng = np.random.default_rng(5)
    params = mod["main"].params
    sets = [[random_array(rng, tuple(map(int, p.shape)), np.dtype(str(p.dtype))) for p in params] for _ in range(2)]
    device = OnCpu(sets)
    device.fill()
    return device


@pytest.mark.parametrize("func, expected", [(layer, _layer), (chain, _chain)])
@pytest.mark.parametrize("many", [0.0, 1e10])
def test_both_ways_compute_what_numpy_does(func, expected, many, target, monkeypatch):
    monkeypatch.setattr(products, "_MANY", many)
    mod = normalize(func)
    found = reference_for(mod, target, build)
    assert isinstance(found, Compiled if many else Products)
    device = _device(mod)
    for number in range(2):
        got = found.compute(device, number)
        outputs = expected(
            *(array.astype("float64") for array in device.inputs[number][: expected.__code__.co_argcount])
        )
        for have, want in zip(got[-len(outputs) :], outputs):
            assert np.abs(have - want).max() < 1e-5 * np.abs(want).max()
        for have, given in zip(got[: -len(outputs)], device.inputs[number]):
            assert np.array_equal(have, given)
    median, once = found.seconds(device)
    assert (median is None) == (many == 0)
    assert once > 0


def test_a_function_without_products_is_taken_as_it_stands(target, monkeypatch):
    monkeypatch.setattr(products, "_MANY", 0.0)
    assert isinstance(reference_for(normalize(no_product), target, build), Compiled)


def test_a_product_alone_leaves_nothing_to_compile(matmul, target, monkeypatch):
    monkeypatch.setattr(products, "_MANY", 0.0)
    mod = normalize(matmul(61, 53, 67))
    found = reference_for(mod, target, lambda *_: pytest.fail("something was compiled"))
    device = _device(mod)
    a, w, c = found.compute(device, 1)
    assert np.abs(c - a.astype("float64") @ w).max() < 1e-6 * np.abs(c).max()
