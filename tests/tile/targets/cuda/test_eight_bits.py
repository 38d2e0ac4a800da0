"""Casts of two neighbours of eight bits at once: which are made so, and that these are the same numbers."""

import ml_dtypes  # noqa: F401, numpy knows its types by name
import numpy as np
import pytest
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.tile.targets.cuda.instructions import eight_bits

ADA = Target({"kind": "cuda", "arch": "sm_89"})
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
SOURCES = (*eight_bits._FLOATS, *eight_bits._BIASES)
WIDER = eight_bits._WIDER


def decoding(source, wider, m=64, n=8, k=64):
    """A product of weights of eight bits, which are operands in registers, in which threads have neighbours."""

    @T.prim_func
    def func(A: T.Buffer((m, k), source), B: T.Buffer((n, k), "float16"), C: T.Buffer((m, n), "float32")):
        with tile.kernel(1):
            raw = tile.shared((m, k), source)
            b = tile.shared((n, k), "float16")
            a = tile.fragment((m, k), "float16")
            c = tile.fragment((m, n), "float32")
            tile.fill(c, 0)
            tile.copy(A[0, 0], raw)
            tile.copy(B[0, 0], b)
            with tile.parallel(m, k) as (i, j):
                a[i, j] = T.cast(T.cast(raw[i, j], wider) * T.cast(0.5, wider), "float16")
            tile.gemm(a, b, c, transpose_b=True)
            tile.copy(c, C[0, 0])

    return func


@pytest.mark.parametrize("target", [ADA, HOPPER], ids=["sm_89", "sm_90a"])
@pytest.mark.parametrize("wider", WIDER)
@pytest.mark.parametrize("source", SOURCES)
def test_neighbours_are_made_at_once(source, wider, target):
    text = tile.lower(decoding(source, wider), target).script()
    assert f"axe_halves_of_{source}" in text
    assert f'T.Cast("{wider}", buffer' not in text.replace('T.Cast("float16", buffer', "")


def test_bytes_of_other_types_are_left_alone():
    assert "axe_halves_of" not in tile.lower(decoding("bool", "float16"), HOPPER).script()


@pytest.mark.parametrize("source", eight_bits._BIASES)
def test_integers_are_these_numbers(source):
    """All pairs, as the assembler has them: a byte below that of 1024, and what was added taken away."""
    signs, bias = eight_bits._BIASES[source]
    words = np.arange(1 << 16, dtype="uint32") ^ np.uint32(signs)
    bits = np.stack([words & 0xFF, words >> 8], -1) | 0x6400
    found = bits.astype("uint16").view("float16") - np.float16(bias)
    want = np.arange(1 << 16, dtype="uint16").view(source).reshape(-1, 2)
    np.testing.assert_array_equal(found.astype("int64"), want.astype("int64"))


@pytest.mark.gpu
@pytest.mark.parametrize("wider", WIDER)
@pytest.mark.parametrize("source", SOURCES)
def test_on_the_gpu(source, wider, cuda):
    """All numbers of a type, each times the rows of an identity."""
    m, k = 64, 64
    rng = np.random.default_rng(7)
    a = np.concatenate([np.arange(256), rng.integers(0, 256, m * k - 256)]).astype("uint8").view(np.dtype(source))
    a = np.where(np.isfinite(a.astype("float32")), a.astype("float32"), 0).astype(a.dtype).reshape(m, k)
    exe = tile.compile(decoding(source, wider, n=k), "cuda")
    out = np.full((m, k), np.nan, "float32")
    exe(a, np.eye(k, dtype="float16"), out)
    np.testing.assert_array_equal(out, a.astype("float32") * 0.5)
