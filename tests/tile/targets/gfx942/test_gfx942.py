"""The back end gfx942: what upstream's LLVM makes of tile programs, and what is refused. No GPU is there to run it."""

import re

import numpy as np
import programs_uniform as programs
import pytest
from tvm import sym, tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines.registry import made_for
from tvm_axe.machines.target import as_given, resolve_target
from tvm_axe.tile.backend import tile_targets
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.targets.gfx942 import words

TARGET = "rocm:gfx942"
MOVES = ("ds_", "global_", "flat_", "buffer_", "scratch_")

PROGRAMS = {
    "product": (programs.matmul(99, 77, 61), ("ds_write", "ds_read", "s_barrier", "_fma")),
    "persistent": (programs.matmul(256, 256, 64, persistent=True, stages=2), ("s_barrier",)),
    "int8": (programs.matmul(64, 64, 128, dtype="int8", out="int32", total="int32", transpose_b=True), ("v_mad_i32",)),
    "attention": (programs.attention(128, 64), ("ds_bpermute_b32", "v_exp_f32", "s_barrier")),
    "rows": (programs.rows(5, 8192, 1, "float32", "sum"), ("ds_bpermute_b32", "s_barrier")),
    "halves": (programs.rows(64, 96, 16, "bfloat16", "max"), ("ds_bpermute_b32",)),
    "doubles": (programs.rows(64, 96, 16, "float64", "min"), ("ds_bpermute_b32", "f64")),
    "columns": (programs.columns(64, 24), ("ds_bpermute_b32",)),
    "transposed": (programs.transposed(100, 70, "bfloat16"), ("ds_write", "ds_read")),
    "added": (programs.split(64, 64, 512, 4), ("global_atomic",)),
    "segments": (programs.segments(5, 200), ("s_cbranch",)),
    "gathered": (programs.gathered(16, 40), ("ds_write",)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_becomes_code_of_the_gpu(name):
    func, instructions = PROGRAMS[name]
    code = tile.compile(func, TARGET).source
    assert "gfx942" in code.splitlines()[0]
    for instruction in instructions:
        assert instruction in code
    assert "__ocml" not in code
    lines = [line.strip() for line in code.splitlines()]
    assert not any(line.startswith("flat_") for line in lines)  # all pointers say of which memory they are
    settled = False  # whether nothing was loaded or stored since all that was has arrived
    for line in lines:
        assert line != "s_barrier" or settled
        settled = line == "s_waitcnt vmcnt(0) expcnt(0) lgkmcnt(0)" or (settled and not line.startswith(MOVES))
    shared = int(re.search(r"amdhsa_group_segment_fixed_size (\d+)", code)[1])
    assert 0 <= tile.plan(func, TARGET).memory.bytes - shared < 128  # exchanges are of whole lines
    assert (shared > 0) == ("ds_write" in code) == ("ds_read" in code)


@pytest.mark.parametrize("name, index", [("matmul", 5), ("attention", 2), ("rms_norm", 1), ("softmax", 4)])
def test_a_kernel_becomes_code_of_the_gpu(name, index):
    kernel = KERNELS[name]
    for program in kernel.recipe(resolve_target(TARGET), kernel.cases[index]).programs:
        assert ".amdhsa_kernel" in tile.compile(program, TARGET).source


def test_what_is_decided_is_said():
    why = tile.explain(programs.matmul(64, 64, 64, stages=2), TARGET)
    assert "target: gfx942  (what is compiled for it was never run" in why
    assert "multiply-adds  (no tensor cores" in why
    assert "loop t: loads don't run ahead  (there are no copies that run ahead)" in why


def test_the_target_has_a_name():
    assert as_given(TARGET) == {"kind": "rocm", "mcpu": "gfx942"}
    assert made_for(resolve_target(TARGET)) == "gfx942"
    assert "rocm" not in {target.kind.name for target in tile_targets()}  # on which nobody has run any


@pytest.mark.parametrize("name, moved", [
    ("tirx.tvm_warp_shuffle", lambda lane, to: to), ("tirx.tvm_warp_shuffle_xor", lambda lane, by: lane ^ by),
    ("tirx.tvm_warp_shuffle_up", lambda lane, by: lane - by if lane >= by else lane),
])  # fmt: skip
def test_lanes_that_shuffles_take_from(name, moved):
    analyzer = sym.Analyzer()
    for lane in range(32):
        for by in (1, 2, 4, 8, 16):
            found = words._SHUFFLES[name](tirx.const(lane, "int32"), tirx.const(by, "int32"))
            assert int(analyzer.simplify(found)) == moved(lane, by)


@T.prim_func
def doubles(X: T.Buffer((64, 16), "float64"), Y: T.Buffer((64, 16), "float64")):
    with tile.kernel(1):
        x = tile.fragment((64, 16), "float64")
        tile.copy(X, x)
        with tile.parallel(64, 16) as (i, j):
            x[i, j] = T.exp(x[i, j])
        tile.copy(x, Y)


@T.prim_func
def tangents(X: T.Buffer((64, 16), "float32"), Y: T.Buffer((64, 16), "float32")):
    with tile.kernel(1):
        x = tile.fragment((64, 16), "float32")
        tile.copy(X, x)
        with tile.parallel(64, 16) as (i, j):
            x[i, j] = T.tan(x[i, j])
        tile.copy(x, Y)


@T.prim_func
def named(X: T.Buffer((64, 16), "bfloat16"), Y: T.Buffer((64, 16), "bfloat16")):
    with tile.kernel(1):
        x = tile.fragment((64, 16), "bfloat16")
        tile.copy(X, x)
        with tile.parallel(64, 16) as (i, j):
            value = T.max(x[i, j], T.cast(0, "bfloat16"))
            x[i, j] = value * value
        tile.copy(x, Y)


@T.prim_func
def ordered(X: T.Buffer((8, 64), "bfloat16"), Y: T.Buffer((8, 4), "int32")):
    with tile.kernel(1):
        x = tile.shared((8, 64), "bfloat16")
        y = tile.fragment((8, 4), "int32")
        tile.copy(X, x)
        tile.top_k(x, indices=y)
        tile.copy(y, Y)


@T.prim_func
def drawn(Y: T.Buffer((64, 16), "float32")):
    with tile.kernel(1):
        y = tile.fragment((64, 16), "float32")
        with tile.parallel(64, 16) as (i, j):
            y[i, j] = tile.random(1, i * 16 + j)
        tile.copy(y, Y)


@T.prim_func
def largest(X: T.Buffer((64, 16), "float32"), Y: T.Buffer((64, 16), "float32")):
    with tile.kernel(1):
        x = tile.fragment((64, 16), "float32")
        tile.copy(X, x)
        tile.copy(x, Y, atomic="max")


@pytest.mark.parametrize("func, why", [
    (programs.matmul(64, 64, 64, instruction="mma"), "'mma', but products of gfx942 are multiply-adds; leave it out"),
    (programs.matmul(64, 64, 64, dtype="float8_e4m3fn", transpose_b=True), "gfx942 computes with .* float64$"),
    (programs.matmul(64, 64, 64, threads=512), "threads=512; valid are multiples of 32 up to 256"),
    (programs.matmul(512, 512, 512, (128, 128, 256)), "a block has 65536 bytes"),
    (named, "is a name of a bfloat16 value, which upstream has no code for on AMD's GPUs; cast it to float32"),
    (ordered, "order of bfloat16 in shared memory on gfx942; copy x to a fragment"),
    (drawn, "random: gfx942 has no random numbers; pass them in a tensor"),
    (largest, "gfx942 has no atomic max of float32; valid is add of int32 and float32"),
    (doubles, r"llvm.exp of float64: on AMD's GPUs it is a function of their device library.* of float32$"),
    (tangents, r"tanf of float32: on AMD's GPUs it is a function of their device library.* of float32$"),
])  # fmt: skip
def test_what_the_target_can_not_do_is_refused(func, why):
    with pytest.raises(TileError, match=why):
        tile.compile(func, TARGET)


def test_calls_without_a_gpu_are_refused():
    exe = tile.compile(programs.columns(64, 24), TARGET)
    with pytest.raises(InputError, match="compiled for gfx942; this machine has no GPU"):
        exe(*(np.zeros(shape, "float32") for shape in ((64, 24), (24,), (1,))))
