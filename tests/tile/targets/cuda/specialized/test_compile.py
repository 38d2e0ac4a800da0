"""The specialized model's code: what it consists of, and that it assembles without spills where nvcc is."""

import re
import shutil
import subprocess

import programs_hopper as programs
import pytest
import tvm
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.machines import nvcc
from tvm_axe.tile.kernels import KERNELS

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})

TWICE = {"attention_backward": {"deterministic": True}, "block_sparse_attention_backward": {}}

PROGRAMS = [
    programs.matmul(4096, 4096, 4096),
    programs.matmul(1000, 1208, 520, (128, 128, 64), out="float32"),
    programs.matmul(512, 512, 512, (128, 256, 128), "float8_e4m3fn", "bfloat16"),
    programs.matmul(512, 512, 512, (192, 128, 64), "float16", transpose_a=True, transpose_b=False),
    programs.matmul(512, 512, 512, (128, 128, 128), "int8", "int32"),
    programs.matmul(1, 512, 512, (64, 8, 128)),
    programs.matmul(128, 192, 512, (64, 96, 128)),
    programs.attention(4, 32, 4096),
    programs.attention(2, 3, 768, causal=True),
    programs.attention(2, 3, 768, block=(192, 64)),
    programs.through_shared(256, 256, 256),
    programs.batched(2, 256, 64, 256),  # a loop that may have no iteration
    KERNELS["stream_k_matmul"].recipe(HOPPER, KERNELS["stream_k_matmul"].cases[1]).programs[1],
    KERNELS["gathered_matmul"].recipe(HOPPER, KERNELS["gathered_matmul"].cases[2]).programs[2],  # behind a branch
    programs.listed(0),
    programs.scaled_tiles(700, 128, 128, 5, "both"),
    *(
        program
        for name, case in (("attention_backward", 2), ("block_sparse_attention_backward", 0))
        for causal in (False, True)
        for program in KERNELS[name]
        .recipe(HOPPER, {**KERNELS[name].cases[case], **TWICE[name], "causal": causal})
        .programs
    ),
]

AT_ONCE = [
    KERNELS["attention_backward"]
    .recipe(HOPPER, {**KERNELS["attention_backward"].cases[case], "causal": causal})
    .programs[1]
    for case in (2, 7)
    for causal in (False, True)
]
"""Gradients in one pass, for which a few addresses are loaded again in each step."""


def source(func, name="main"):
    """The CUDA code of a program."""
    mod = tvm.IRModule({name: tile.lower(func, HOPPER).with_attr("global_symbol", name)})
    return str(tvm.compile(mod, HOPPER, tir_pipeline="tirx").mod.imports[0].inspect_source())


def kernel(func):
    text = source(func)
    return text[text.rindex("__global__") :]


def test_slots_that_threads_read_are_given_back_behind_a_fence():
    """What a thread reads may be on its way to it when a barrier is passed, and TMA fills slots by another proxy."""
    blocks = KERNELS["block_scaled_matmul"]
    (program,) = blocks.recipe(HOPPER, blocks.cases[0]).programs
    assert re.search(r"fence_proxy\w*async\w*\(\);\s*\w*bar_sync\w*\([^;]*\);\s*if", kernel(program))


def test_no_compiler_moves_reads_over_barriers():
    sources = map(source, PROGRAMS)
    waits = {each for text in sources for each in re.findall(r"asm volatile\((.*?)\);\n", text, re.DOTALL)}
    waits = {each for each in waits if is_wait(each)}
    assert len(waits) > 5 and all('"memory"' in each for each in waits), waits


def is_wait(assembly):
    """Whether an instruction orders accesses to memory."""
    return re.search(r'"\{?\s*(bar|barrier|mbarrier|fence|membar)\.|wait_group', assembly)


@pytest.mark.parametrize(("programs", "most"), [(PROGRAMS, 0), (AT_ONCE, 96)], ids=["most", "gradients at once"])
def test_nothing_spills_and_no_product_is_serialized(tmp_path, programs, most):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    mods = {f"program_{at}": tile.lower(func, HOPPER) for at, func in enumerate(programs)}
    mod = tvm.IRModule({name: func.with_attr("global_symbol", name) for name, func in mods.items()})
    code = tmp_path / "kernels.cu"
    code.write_text(str(tvm.compile(mod, HOPPER, tir_pipeline="tirx").mod.imports[0].inspect_source()))
    generate = "-gencode=arch=compute_90a,code=sm_90a"
    command = ["nvcc", *nvcc._FLAGS, generate, "-Xptxas", "-v", "-o", tmp_path / "kernels.cubin", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spills = [line for line in done.stderr.splitlines() if "bytes spill stores" in line]
    assert len(spills) >= len(programs)
    assert all(int(count) <= most for line in spills for count in re.findall(r"(\d+) bytes spill", line)), spills
    assert "serialized" not in done.stderr, done.stderr


def test_a_loop_is_loads_products_and_barriers():
    text = kernel(programs.matmul(4096, 4096, 4096))
    assert "__launch_bounds__(384, 1)" in text
    assert text.count("setmaxnreg_dec") == text.count("setmaxnreg_inc") == 1
    assert text.count("wgmma_bf16_ss_mma_async_sync_aligned_m64n256k16") == 4
    assert text.count("async_bulk_tensor_2d_shared__cluster_global") == 2  # A and B, a panel each
    assert text.count("async_bulk_tensor_3d_global_shared__cta") == 1  # C, all panels at once
    assert "_tensormap_1" not in text


def test_rows_that_panels_do_not_divide_are_copied_a_panel_at_a_time():
    text = kernel(programs.matmul(4096, 4104, 4096))
    assert "async_bulk_tensor_2d_global_shared__cta" in text
    assert "async_bulk_tensor_3d" not in text


def test_attention_takes_turns_and_rounds_in_pairs():
    text = kernel(programs.attention(4, 32, 4096))
    assert "bar_arrive" in text and "cast_float32x2_bfloat16x2" in text
    masked = kernel(programs.attention(4, 32, 4096, causal=True))
    loop = masked[masked.index("bar_sync") :]
    assert "1.267" not in loop  # the mask is only in the iteration that was taken out of the loop


def test_float32_is_rounded_to_tf32_on_its_way():
    func = programs.matmul(128, 128, 128, (128, 128, 32), "float32", instruction="wgmma")
    assert "m64n128k8_f32_tf32_tf32" in kernel(func)
