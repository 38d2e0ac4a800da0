"""What `explain` of a compiled program says of the assembler's work, and the warning of a slow one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import nvcc
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.kernels import KERNELS


@pytest.fixture
def store(tmp_path: Path) -> Cache:
    try:
        nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))
    return Cache(tmp_path)


def pair_of_products(columns: int):
    """Two accumulators of 128 rows, of 128 threads."""

    @T.prim_func
    def pair(
        A: T.Buffer((512, 128), "float16"),
        B: T.Buffer((128, 1024), "float16"),
        C: T.Buffer((512, 1024), "float32"),
        D: T.Buffer((512, 1024), "float32"),
    ):
        with tile.kernel(4, 4, threads=128) as (i, j):
            a = tile.shared((128, 32), "float16")
            b = tile.shared((32, columns), "float16")
            c = tile.fragment((128, columns), "float32")
            d = tile.fragment((128, columns), "float32")
            tile.fill(c, 0)
            tile.fill(d, 0)
            for s in tile.pipelined(4):
                tile.copy(A[i * 128, s * 32], a)
                tile.copy(B[s * 32, j * columns], b)
                tile.gemm(a, b, c)
                tile.gemm(a, b, d)
            tile.copy(c, C[i * 128, j * columns])
            tile.copy(d, D[i * 128, j * columns])

    return pair


def compiled(program) -> list[str]:
    _, _, text = program.explain().partition("\ncompiled\n")
    return [line.strip() for line in text.splitlines()]


def test_registers_and_how_many_blocks_a_multiprocessor_runs(store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exe = tile.compile(pair_of_products(64), "cuda:sm_80", store)
    registers, occupancy = compiled(exe)
    count = int(registers.split()[1])
    assert 128 < count <= 255
    blocks = (64 << 10) // (128 * -(-count // 8) * 8)
    assert occupancy.startswith(
        f"occupancy: {blocks} blocks of 128 threads a multiprocessor, {100 * blocks // 16}% of "
    )
    assert "(as many as registers" in occupancy


def test_roles_share_what_there_is(store):
    problem = {"m": 2048, "n": 4096, "k": 512, "dtype": "bfloat16"}
    (program,) = (
        KERNELS["matmul"].recipe(tile.compile(pair_of_products(32), "cuda:sm_90a", store).target, problem).programs
    )
    registers, occupancy = compiled(tile.compile(program, "cuda:sm_90a", store))
    assert registers.startswith("registers: 168 of a thread as it begins")
    assert occupancy.startswith("occupancy: 1 block of 384 threads a multiprocessor")
    assert "registers and shared memory" in occupancy


def test_registers_that_are_spilled_are_warned_of(store):
    with pytest.warns(
        UserWarning, match=r"pair: slower than it need be: \d+ bytes of local memory a thread: .* avoid it"
    ):
        exe = tile.compile(pair_of_products(112), "cuda:sm_80", store)
    assert compiled(exe)[-1].startswith("slow: ")


def test_a_cpu_says_nothing_of_it(store):
    assert "compiled" not in tile.compile(pair_of_products(32), "llvm", store).explain().split()
