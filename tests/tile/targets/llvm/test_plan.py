"""What a CPU refuses, and the bounds checks of tests."""

import numpy as np
import pytest
from on_cpu import normal, poison, run, target
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout import Layout
from tvm_axe.tile import read
from tvm_axe.tile.targets import llvm as cpu
from tvm_axe.tile.targets.llvm.plan import TILE_BYTES


def plan(func):
    return cpu.decide(read(func), target())


def test_tiles_beyond_the_budget_are_refused():
    rows = TILE_BYTES // 4 // 1024

    @T.prim_func
    def large(A: T.Buffer((rows, 1024), "float32")):
        with tile.kernel(1) as _:
            t = tile.shared((rows, 1024), "float32")
            r = tile.fragment((4,), "float32")
            tile.fill(r, 0)
            tile.copy(A, t)
            tile.copy(t, A)

    with pytest.raises(TileError, match=f"take {TILE_BYTES + 16} bytes .t {TILE_BYTES}, r 16.; on a CPU they may take"):
        plan(large)


def test_types_that_no_cpu_code_is_made_for_are_refused():
    @T.prim_func
    def fours(A: T.Buffer((8, 8), "float4_e2m1fn")):
        with tile.kernel(1) as _:
            t = tile.shared((8, 8), "float4_e2m1fn")
            tile.copy(A, t)

    with pytest.raises(TileError, match=r"global A: float4_e2m1fn.*CPU code is made for bool, int8"):
        plan(fours)


def test_atomic_additions_of_other_types_are_refused():
    @T.prim_func
    def bytes_(A: T.Buffer((8,), "int8"), B: T.Buffer((8,), "int8")):
        with tile.kernel(1) as _:
            t = tile.fragment((8,), "int8")
            tile.copy(A, t)
            tile.copy(t, B, atomic="add")

    with pytest.raises(TileError, match=r"atomically into .*int8.*; valid are tensors of float16, bfloat16, float32"):
        plan(bytes_)


def test_annotated_layouts_give_each_element_an_address():
    @T.prim_func
    def annotated(A: T.Buffer((8, 8), "float32")):
        with tile.kernel(1) as _:
            t = tile.shared((8, 8), "float32", layout=Layout.parse("S[(8, 8) : (4, 1)]"))
            tile.copy(A, t)
            tile.copy(t, A)

    with pytest.raises(
        TileError, match=r"shared t.*its annotated layout can't be one of memory.*puts two elements at one address"
    ):
        plan(annotated)


def test_every_decision_has_a_reason():
    @T.prim_func
    def half(A: T.Buffer((8, 8), "float16"), B: T.Buffer((2, 8, 8), "float16")):
        with tile.kernel(1, swizzle=2) as _:
            t = tile.shared((8, 8), "float16")
            for i in tile.pipelined(2):
                tile.copy(A, t)
                tile.copy(t, B[i, 0, 0])

    lines = tile.explain(half, target()).splitlines()
    assert any("t: float16[8, 8]: held as float32  (rounded to float16, and computed" in line for line in lines)
    assert any("swizzle unused" in line for line in lines)
    assert any("no stages" in line for line in lines)


# ---- Bounds checks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize("where", ["global", "shared"])
@pytest.mark.parametrize("index", [-1, 10])
def test_an_access_out_of_bounds_is_reported(stores, where, index):
    """By buffer, dimension and index, whichever block does it; and the next run is judged anew."""

    @T.prim_func
    def touches(at: T.Buffer((8,), "int32"), A: T.Buffer((4, 10), "float32"), B: T.Buffer((8,), "float32")):
        with tile.kernel(8) as b:
            t = tile.shared((4, 10), "float32")
            tile.fill(t, 1)
            with tile.parallel(1) as i:
                if where == "global" and stores:
                    A[3, at[b] + i] = T.float32(1)
                elif where == "global":
                    B[b + i] = A[3, at[b] + i]
                elif stores:
                    t[3, at[b] + i] = T.float32(1)
                else:
                    B[b + i] = t[3, at[b] + i]

    arrays = np.arange(8, dtype="int32"), np.zeros((4, 10), "float32"), poison((8,))
    run(touches, *arrays, check_bounds=True)
    arrays[0][5] = index
    name = "A" if where == "global" else "t"
    with pytest.raises(TileError, match=rf"dimension 1 of {name} takes an index from 0 to 10 - 1, got {index}"):
        run(touches, *arrays, check_bounds=True)


def test_what_a_condition_keeps_from_happening_is_not_reported():
    @T.prim_func
    def touches(A: T.Buffer((20,), "float32"), B: T.Buffer((32,), "float32")):
        with tile.kernel(1) as _, tile.parallel(32) as i:
            if i < 20:
                B[i] = A[i]
            else:
                B[i] = T.if_then_else(i < 20, A[i + 1], T.float32(0))

    a = normal(np.random.default_rng(0), (20,))
    _, found = run(touches, a, poison((32,)), check_bounds=True)
    np.testing.assert_array_equal(found, np.pad(a, (0, 12)))


def test_a_copy_that_starts_below_a_tensor_is_reported():
    @T.prim_func
    def touches(at: T.Buffer((1,), "int32"), A: T.Buffer((10, 16), "float32"), B: T.Buffer((4, 16), "float32")):
        with tile.kernel(1) as _:
            t = tile.shared((4, 16), "float32")
            tile.copy(A[at[0], 0], t)
            tile.copy(t, B)

    with pytest.raises(TileError, match="dimension 0 of A"):
        run(touches, np.array([-2], "int32"), np.zeros((10, 16), "float32"), poison((4, 16)), check_bounds=True)
