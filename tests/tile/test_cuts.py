"""What functions of several kernels are refused for, and what stands where in one that isn't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_cpu import poison
from programs_sequences import sums
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import StreamError, TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.stream import Accelerator, from_tile


def _refused(func: Any, match: str) -> None:
    with pytest.raises(TileError, match=match):
        tile.read_sequence(func)
    with pytest.raises(TileError, match=match):
        tile.compile(func, "llvm")


def test_scratch_that_nothing_wrote() -> None:
    @T.prim_func
    def never(A: T.Buffer((8,), "float32")):
        s = tile.scratch((8,), "float32")
        with tile.kernel(1), tile.parallel(8) as i:
            A[i] = s[i]

    @T.prim_func
    def later(A: T.Buffer((8,), "float32")):
        s = tile.scratch((8,), "float32")
        with tile.kernel(1):
            x = tile.fragment((8,), "float32")
            tile.copy(s, x)
            tile.copy(x, A)
        with tile.kernel(1), tile.parallel(8) as i:
            s[i] = A[i]

    @T.prim_func
    def joined(A: T.Buffer((8,), "int32")):
        s = tile.scratch((8,), "int32")
        with tile.kernel(1), tile.parallel(8) as i:
            tile.atomic_add(A[i], s[i])
        with tile.kernel(1), tile.parallel(8) as i:
            A[i] = s[i]

    @T.prim_func
    def flags(A: T.Buffer((8,), "int32")):
        s = tile.scratch((8,), "int32")
        with tile.kernel(8) as i:
            tile.signal(s[i], 1)
        with tile.kernel(8) as i:
            tile.wait(s[i], 1)
            with tile.parallel(1) as j:
                A[i + j] = 1

    _refused(never, r"reads global s: float32\[8\], which nothing has written before; valid is to fill it first")
    _refused(later, "`copy s to x` reads global s")
    _refused(joined, r"joined_1: .* is a join \(add\) with global s.*; valid is a kernel before this one that fills it")
    _refused(flags, "flags that nothing has set to 0 before")


def test_scratch_that_a_block_writes_first(tmp_path: Path) -> None:
    @T.prim_func
    def func(A: T.Buffer((8, 16), "float32"), B: T.Buffer((8, 16), "float32")):
        s = tile.scratch((8, 16), "float32")
        with tile.kernel(8) as i:
            x = tile.fragment((1, 16), "float32")
            y = tile.fragment((1, 16), "float32")
            tile.copy(A[i, 0], x)
            tile.copy(x, s[i, 0])
            tile.copy(s[i, 0], y)
            tile.copy(y, B[i, 0])

    a, b = np.random.default_rng().standard_normal((8, 16)).astype("float32"), poison((8, 16))
    tile.compile(func, "llvm", Cache(tmp_path))(a, b)
    np.testing.assert_array_equal(a, b)


def test_where_scratch_and_kernels_stand() -> None:
    @T.prim_func
    def unused(A: T.Buffer((8,), "float32")):
        s = tile.scratch((8,), "float32")  # noqa: F841
        with tile.kernel(1):
            tile.fill(A, 0)

    @T.prim_func
    def within(A: T.Buffer((8,), "float32")):
        with tile.kernel(1):
            s = tile.scratch((8,), "float32")
            tile.copy(A, s)
        with tile.kernel(1):
            tile.fill(A, 0)

    @T.prim_func
    def nested(A: T.Buffer((8,), "float32")):
        with tile.kernel(2), tile.kernel(1):
            tile.fill(A, 0)
        with tile.kernel(1):
            tile.fill(A, 0)

    @T.prim_func
    def looped(A: T.Buffer((8,), "float32")):
        with tile.kernel(1):
            tile.fill(A, 0)
        for _ in range(3):
            with tile.kernel(1):
                tile.fill(A, 0)

    @T.prim_func
    def conditional(A: T.Buffer((8,), "float32"), n: T.int32):
        with tile.kernel(1):
            tile.fill(A, 0)
        if n == 3:
            with tile.kernel(1):
                tile.fill(A, 1)

    @T.prim_func
    def between(A: T.Buffer((8,), "float32")):
        with tile.kernel(1):
            tile.fill(A, 0)
        tile.fill(A, 1)
        with tile.kernel(1):
            tile.fill(A, 0)

    @T.prim_func
    def named(A: T.Buffer((8,), "float32"), n: T.int32):
        half = n // 2
        with tile.kernel(1):
            tile.fill(A, 0)
        with tile.kernel(half):
            tile.fill(A, 0)

    @T.prim_func
    def empty(A: T.Buffer((8,), "float32")):
        s = tile.scratch((0,), "float32")
        with tile.kernel(1):
            tile.copy(A[0:1], s[0:1])

    @T.prim_func
    def twice(A: T.Buffer((8,), "float32")):
        way = tile.knob("way", (1, 2))
        if way == 1:
            s = tile.scratch((8,), "float32")
            with tile.kernel(1), tile.parallel(8) as i:
                s[i] = A[i]
        s = tile.scratch((8,), "float32")
        with tile.kernel(1), tile.parallel(8) as i:
            s[i] = A[i]

    _refused(unused, "unused: no kernel uses the scratch s; valid is a function without it")
    _refused(within, "tile s: scratch of a kernel; valid is tile.scratch before the first kernel of the function")
    _refused(nested, "a kernel inside a kernel; valid are kernels one after the other")
    _refused(looped, "looped: a kernel in a loop beside its kernels; valid are kernels one after the other, and before")
    _refused(conditional, "conditional: a kernel under a condition beside its kernels")
    _refused(between, "between: TilePrimitiveCall beside its kernels")
    _refused(named, r"named: .*beside its kernels; .* a name for a value is T.meta_var\(value\)")
    _refused(empty, "scratch s: its extent 0 isn't positive")
    _refused(twice, "scratch s: another tensor has this name; valid is one of its own")


def test_tensors_of_a_mesh() -> None:
    @T.prim_func
    def func(A: tile.mesh_tensor((2, 8), "float32"), me: T.int32):
        with tile.kernel(1, device=me):
            tile.fill(A[me, 0:8], 0)
        with tile.kernel(1, device=me):
            tile.fill(A[me, 0:8], 1)

    _refused(func, "func: A of a mesh in a function of several kernels or with tile.scratch; valid is one kernel a")


def test_where_one_kernel_is_wanted() -> None:
    with pytest.raises(TileError, match=r"sums: several kernels, or scratch; .*: tile.read_sequence"):
        tile.read(sums)
    for program in (sums, tile.read_sequence(sums)):
        with pytest.raises(StreamError, match="tile program 'sums': several kernels, or scratch; valid is one kernel"):
            from_tile(program, Accelerator())
