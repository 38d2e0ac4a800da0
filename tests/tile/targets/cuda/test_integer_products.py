"""Products of int8: every width that the instructions allow, and what is said where none does the work."""

import shutil
import warnings

import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileWarning
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.targets.cuda.instructions.wgmma import OPERANDS, columns_at_once


def product(columns: int, through: bool = False, instruction: str | None = None) -> tirx.PrimFunc:
    """C = A B^T; with `through`, A goes through a fragment."""
    source = f"""@T.prim_func
def product_{columns}(
    A: T.Buffer((128, 64), "int8"), B: T.Buffer(({columns}, 64), "int8"), C: T.Buffer((128, {columns}), "int32")
):
    with tile.kernel(1):
        a = tile.shared((128, 64), "int8")
        b = tile.shared(({columns}, 64), "int8")
        held = tile.fragment((128, 64), "int8")
        c = tile.fragment((128, {columns}), "int32")
        tile.fill(c, 0)
        for k in tile.pipelined(1):
            tile.copy(A[0, k * 64], a)
            tile.copy(B[0, k * 64], b)
            {"tile.copy(a, held)" if through else ""}
            tile.gemm({"held" if through else "a"}, b, c, transpose_b=True, instruction={instruction!r})
        tile.copy(c, C[0, 0])
"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def test_shares_of_columns():
    takes = OPERANDS["int8"]
    for columns in range(16, 513, 16):
        share = columns_at_once(columns, takes, along_k=True)
        assert columns % share == 0 and share <= takes.columns and share % (16 if share > 32 else 8) == 0


def test_more_columns_than_one_instruction_has(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    executables = tile.compile_all([product(columns) for columns in (240, 256)], "cuda:sm_90a", Cache(tmp_path))
    sources = [executable.source for executable in executables]
    assert all(f"m64n{share}k32_s32_s8_s8" in source for share, source in zip((80, 128), sources))


@pytest.mark.parametrize("target, by", [("cuda:sm_80", "mma.sync m16n8k32"), ("cuda:sm_90a", "wgmma")])
def test_tensor_cores_take_a_left_operand_in_registers(target, by):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert by in tile.explain(product(64, through=True), target)
        tile.plan(product(64, through=True, instruction="fma"), target)  # it is asked for


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_a_left_operand_in_registers_is_warned_of(target):
    """One that is transposed: of 16 bits, since no instruction takes others so."""

    @T.prim_func
    def turned(A: T.Buffer((64, 128), "float16"), B: T.Buffer((64, 64), "float16"), C: T.Buffer((128, 64), "float32")):
        with tile.kernel(1):
            held, b = tile.fragment((64, 128), "float16"), tile.shared((64, 64), "float16")
            c = tile.fragment((128, 64), "float32")
            tile.copy(A[0, 0], held)
            tile.copy(B[0, 0], b)
            tile.gemm(held, b, c, transpose_a=True, transpose_b=True, accumulate=False)
            tile.copy(c, C[0, 0])

    with pytest.warns(TileWarning, match=r"turned: c = held.T @ b.T is done by multiply-adds.*held a tile.shared"):
        tile.plan(turned, target)
