"""What `explain` of a compiled program says of the assembler's work, and the warning of a slow one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import cache, nvcc
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.target import resolve_target
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


SERIALIZED = """
extern "C" __global__ void early(float* out, unsigned long long a, unsigned long long b, int n) {
  float c[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; ++i) {
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a), "l"(b));
    asm volatile("wgmma.commit_group.sync.aligned;");
  }
  if (threadIdx.x == 7) c[0] = 2;
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  out[threadIdx.x] = c[0] + c[1] + c[2] + c[3];
}
"""
"""A product whose accumulator a thread sets while it is in flight."""


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


def test_what_the_assembler_expects_to_be_slow(store):
    """It is kept with the binary, so that it is known also where nothing is compiled."""
    if nvcc.find_compiler().path is None:
        pytest.skip("nvrtc doesn't say it")
    hopper = resolve_target("cuda:sm_90a")
    for _ in range(2):
        nvcc.cubin(SERIALIZED, hopper, store)
        ((remark,),) = nvcc.remarks(SERIALIZED, hopper, store).values()
        assert "wgmma.mma_async instructions are serialized due to" in remark and remark.endswith("(ptxas, C7515)")
    nvcc.cubin(SERIALIZED.partition("extern")[0], hopper, store)
    assert not nvcc.remarks(SERIALIZED.partition("extern")[0], hopper, store)


def test_products_behind_which_an_epilogue_follows_are_not_serialized(store, monkeypatch):
    """A tile a block, whose last slots are released between the last product and what reads it."""
    said, nvcc_ = [], nvcc._nvcc
    monkeypatch.setattr(nvcc, "_nvcc", lambda *given: said.append(nvcc_(*given)) or said[-1])
    monkeypatch.setattr(cache, "default_folder", lambda: store.folder)

    @I.ir_module
    class Layer:
        @R.function
        def main(
            x: R.Tensor((128, 1024), "bfloat16"),
            w: R.Tensor((1024, 512), "bfloat16"),
            bias: R.Tensor((512,), "bfloat16"),
        ):
            with R.dataflow():
                product = R.matmul(x, w)
                shifted = R.add(product, bias)
                out = R.nn.gelu(shifted)
                R.output(out)
            return out

    if nvcc.find_compiler().path is None:
        pytest.skip("nvrtc doesn't say it")
    axe.compile(Layer, target="cuda:sm_90a", work_dir=None, keep=False)
    assert said and not any("serialized" in text for _, text in said)
