"""Atomic additions: the same types on every target, refused with one message elsewhere."""

import shutil

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.checks import ATOMIC

TARGETS = ("llvm", "cuda:sm_80", "cuda:sm_90a")


def adding(dtype: str) -> tirx.PrimFunc:
    """Each of three blocks adds A to C."""
    source = f"""@T.prim_func
def adding_{dtype}(A: T.Buffer((16, 64), "{dtype}"), C: T.Buffer((16, 64), "{dtype}")):
    with tile.kernel(3) as m:
        a = tile.fragment((16, 64), "{dtype}")
        tile.copy(A[0, 0], a)
        tile.copy(a, C[0, 0], atomic="add")
"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def sums(dtype: str, target: str, store: Cache) -> None:
    a, c = (np.random.default_rng(seed).integers(0, 20, (16, 64)).astype(dtype) for seed in range(2))
    expected = (c.astype("int64") + 3 * a.astype("int64")).astype(dtype)
    tile.compile(adding(dtype), target, store)(a, c)
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("dtype", ATOMIC)
def test_on_a_cpu(tmp_path, dtype):
    sums(dtype, "llvm", Cache(tmp_path))


@pytest.mark.parametrize("target", TARGETS[1:])
def test_on_cuda_all_of_them_compile(tmp_path, target):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    assert len(tile.compile_all([adding(dtype) for dtype in ATOMIC], target, Cache(tmp_path))) == len(ATOMIC)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ATOMIC)
def test_on_a_gpu(cuda, tmp_path, dtype):
    sums(dtype, "cuda", Cache(tmp_path))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn"])
def test_other_types_are_refused_alike(target, dtype):
    with pytest.raises(TileError, match=f"into global C: {dtype}.*; valid are tensors of float16, .* uint32"):
        tile.lower(adding(dtype), target)
