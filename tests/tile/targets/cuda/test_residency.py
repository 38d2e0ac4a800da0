"""How many blocks a multiprocessor runs at once: what each has, what is refused, and what the assembler makes of it."""

import re
import shutil
import subprocess

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import nvcc
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.targets.cuda.residency import registers_of_all
from tvm_axe.tile.targets.cuda.specialized.plan import REGISTERS, role_registers

PROGRAM = """
@T.prim_func
def func(A: T.Buffer((512, 512), "float16"), B: T.Buffer((512, 512), "float16"), C: T.Buffer((512, 512), "float16")):
    with tile.kernel(512 // {rows}, 512 // {columns}, {options}) as (i, j):
        a = tile.shared(({rows}, 64), "float16")
        b = tile.shared((64, {columns}), "float16")
        c = tile.fragment(({rows}, {columns}), "float32")
        tile.fill(c, 0)
        for s in tile.pipelined(8):
            tile.copy(A[i * {rows}, s * 64], a)
            tile.copy(B[s * 64, j * {columns}], b)
            tile.gemm(a, b, c)
        tile.copy(c, C[i * {rows}, j * {columns}])
"""


def func(options, rows=64, columns=64):
    source = PROGRAM.format(options=options, rows=rows, columns=columns)
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def shared(decided):
    return int(re.search(r"(\d+) bytes", next(d.choice for d in decided.decisions if d.subject == "shared memory"))[1])


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_rings_are_as_deep_as_blocks_leave(blocks):
    """228 KiB of a multiprocessor, of which each block takes 1 KiB more than it uses."""
    decided = tile.plan(func(f"blocks_per_sm={blocks}"), "cuda:sm_90a")
    assert blocks * (shared(decided) + 1024) <= 228 << 10
    assert decided.residency.blocks == blocks and decided.residency.annotated
    (line,) = (line for line in decided.explain().splitlines() if line.startswith("    blocks: "))
    assert line.startswith(
        f"    blocks: {blocks} a multiprocessor  (as annotated: {(228 << 10) // blocks - 1024} bytes"
    )


def test_without_it_a_block_may_have_all():
    decided = tile.plan(func("swizzle=1"), "cuda:sm_90a")
    assert decided.residency.shared_bytes == 227 << 10
    assert not decided.residency.annotated and "    blocks:" not in decided.explain()
    assert max(decided.memory.buffers.values()) == 8
    assert max(tile.plan(func("blocks_per_sm=4"), "cuda:sm_90a").memory.buffers.values()) == 2


@pytest.mark.parametrize("warpgroups", REGISTERS)
@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_roles_share_no_more_registers_than_there_are(warpgroups, blocks):
    threads = (warpgroups + 1) * 128
    if blocks * threads > 2048:
        pytest.skip("more threads than a multiprocessor has")
    found = role_registers(warpgroups, blocks)
    if found is None:
        assert (warpgroups, blocks) == (1, 1)
        return
    producer, consumer = found
    assert producer % 8 == consumer % 8 == 0 and 24 <= producer <= consumer <= 232
    assert blocks * 128 * (producer + warpgroups * consumer) <= 65536
    # The pool that setmaxnreg takes from is what the block was launched with.
    assert producer + warpgroups * consumer <= (warpgroups + 1) * (registers_of_all(threads, blocks) // 8 * 8)


def test_a_grid_of_few_blocks_has_each_alone_on_a_multiprocessor(tmp_path):
    """The assembler is told so: else it spares registers for a second block, and loads wait for each other."""
    sources = {
        rows: tile.compile(elements(rows), "cuda:sm_90a", Cache(tmp_path)).source
        for rows in (132, 133)  # as many blocks, on 132 multiprocessors
    }
    assert "__launch_bounds__(128, 1)" in sources[132] and "__launch_bounds__(128)" in sources[133]


def test_persistent_blocks_fill_the_gpu():
    grid = tile.plan(func("blocks_per_sm=2, persistent=True", 32, 16), "cuda:sm_80").grid
    assert grid.blocks == 2 * 108
    assert tile.plan(func("blocks_per_sm=2"), "cuda:sm_90a").grid.persistent is False


def test_stages_of_the_uniform_model():
    """A share is used whole: without a number, stages leave room for two blocks."""
    lines = {
        blocks: next(
            line
            for line in tile.explain(func(f"blocks_per_sm={blocks}", 128, 128), "cuda:sm_80").splitlines()
            if "stages of cp.async" in line
        )
        for blocks in (1, 2)
    }
    assert "4 stages" in lines[1] and "2 stages" in lines[2]


REFUSED = {
    ("sm_90a", "blocks_per_sm=9", 64, 64): r"blocks_per_sm=9 of 256 threads each; .* so valid is up to 8",
    ("sm_90a", "blocks_per_sm=2", 128, 256): r"which have 72 for it; .*, or fewer blocks_per_sm",
    ("sm_90a", "blocks_per_sm=8", 64, 128): r"which have 8 for it; .*, or fewer blocks_per_sm",
    ("sm_80", "blocks_per_sm=17", 64, 64): r"blocks_per_sm=17 of 128 threads each; .* so valid is up to 16",
    ("sm_80", "blocks_per_sm=8", 128, 64): r"fewer blocks_per_sm",
    ("sm_80", "blocks_per_sm=0", 64, 64): r"blocks_per_sm must be positive, got 0",
}


@pytest.mark.parametrize(("arch", "options", "rows", "columns"), REFUSED)
def test_what_does_not_fit(arch, options, rows, columns):
    with pytest.raises((TileError, tvm.error.DiagnosticError), match=REFUSED[arch, options, rows, columns]):
        tile.plan(func(options, rows, columns), f"cuda:{arch}")


def elements(rows):
    @T.prim_func
    def elements(A: T.Buffer((rows, 128), "float32"), B: T.Buffer((rows, 128), "float32")):
        with tile.kernel(rows, threads=128) as i:
            a = tile.fragment((1, 128), "float32")
            tile.copy(A[i, 0], a)
            tile.copy(a, B[i, 0])

    return elements


@T.prim_func
def staged(A: T.Buffer((256, 128), "float16"), B: T.Buffer((256, 128), "float16")):
    with tile.kernel(1, blocks_per_sm=4) as i:
        a = tile.shared((256, 128), "float16")
        tile.copy(A[i * 256, 0], a)
        tile.copy(a, B[i * 256, 0])


def test_shared_memory_that_does_not_fit_names_the_option():
    with pytest.raises(TileError, match=r"shared memory: 65536 bytes .*; a block has 40960 bytes, as blocks_per_sm=4"):
        tile.plan(staged, "cuda:sm_80")


def test_a_cpu_has_no_use_for_it():
    assert "blocks_per_sm unused" in tile.explain(func("blocks_per_sm=2"), "llvm")


def test_a_knob_may_say_it():
    program = tile.read(func('blocks_per_sm=tile.knob("blocks", (1, 2, 3))'), {"blocks": 3})
    assert program.options == {"blocks_per_sm": 3}


@pytest.mark.parametrize(
    ("arch", "rows", "columns", "blocks"),
    [
        ("sm_90a", 64, 64, 2),
        ("sm_90a", 64, 64, 3),
        ("sm_90a", 128, 64, 2),
        ("sm_80", 64, 64, 4),
        ("sm_80", 128, 128, 2),
    ],
)
def test_the_assembler_makes_so_many_fit(tmp_path, arch, rows, columns, blocks):
    """Registers at launch leave room for the blocks, and nothing spills."""
    exe = tile.compile(func(f"blocks_per_sm={blocks}", rows, columns), f"cuda:{arch}", Cache(tmp_path))
    threads, least = map(int, re.search(r"__launch_bounds__\((\d+), (\d+)\)", exe.source).groups())
    assert least == blocks
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc, whose assembler says how many registers a kernel takes")
    code = tmp_path / "kernel.cu"
    code.write_text(exe.source)
    generate = f"-gencode=arch=compute_{arch.removeprefix('sm_')},code={arch}"
    command = ["nvcc", *nvcc._FLAGS, generate, "-Xptxas", "-v", "-o", tmp_path / "kernel.cubin", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert " 0 bytes spill stores, 0 bytes spill loads" in done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr)[1])
    assert -(-registers // 8) * 8 * threads * blocks <= 65536


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns", "blocks"), [(64, 64, 2), (64, 64, 3), (128, 64, 2)])
def test_on_a_gpu(cuda, tmp_path, rows, columns, blocks):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, (512, 512)).astype("float16") for _ in range(2))
    c = np.full((512, 512), np.nan, "float16")
    tile.compile(func(f"blocks_per_sm={blocks}", rows, columns), "cuda", Cache(tmp_path))(a, b, c)
    np.testing.assert_array_equal(c.astype("float64"), (a.astype("float64") @ b.astype("float64")).astype("float16"))
