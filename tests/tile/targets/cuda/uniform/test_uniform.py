"""The uniform model: what it decides, refuses and emits; compiled for both architectures where nvcc is."""

import shutil

import programs_uniform as programs
import pytest
import tvm
import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.machines import cache
from tvm_axe.tile.targets.cuda.instructions import mma
from tvm_axe.tile.targets.cuda.uniform.plan import decide

AMPERE, ADA, HOPPER, BLACKWELL = (
    Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_89", "sm_90a", "sm_100a")
)

PROGRAMS = [
    programs.matmul(256, 256, 256, (128, 128, 32), "bfloat16", "bfloat16", transpose_b=True),
    programs.matmul(99, 77, 61, stages=2, persistent=True, swizzle=2),
    programs.matmul(64, 64, 64, transpose_a=True),
    programs.matmul(64, 64, 64, dtype="float32"),
    programs.matmul(64, 64, 64, dtype="float32", transpose_b=True, instruction="mma"),
    programs.matmul(64, 64, 128, dtype="int8", out="int32", total="int32", transpose_b=True),
    programs.attention(128, 64),
    programs.rows(5, 8192, 1, "float32", "sum"),
    programs.rows(64, 96, 16, "bfloat16", "max"),
    programs.columns(64, 24),
    programs.transposed(100, 70, "bfloat16"),
    programs.segments(5, 200),
    programs.gathered(16, 40),
    programs.split(64, 64, 512, 4),
    programs.chain(51, 50),
    programs.unlike(64, 64),
    programs.reused(512),
    programs.fused(64, 256),
    programs.reduced_memory(10, 37),
    *(programs.converted(*types) for types in (("float32", "bfloat16"), ("int8", "float16"), ("int64", "float64"))),
]


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
def test_every_program_becomes_a_cubin(target, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    named = [func.with_attr("global_symbol", f"program_{at}") for at, func in enumerate(PROGRAMS)]
    compiled = tile.compile_all(named, target, cache.Cache(tmp_path))
    assert [exe.name for exe in compiled] == [f"program_{at}" for at in range(len(PROGRAMS))]


def source(func, target=AMPERE):
    """The CUDA code of a program's kernel."""
    mod = tvm.IRModule({"main": tile.lower(func, target).with_attr("global_symbol", "main")})
    text = str(tvm.compile(mod, target, tir_pipeline="tirx").mod.imports[0].inspect_source())
    return text[text.rindex("__global__") :]


def plan(func, target=AMPERE):
    return decide(tile.read(func), target, "test")


def said(func, target=AMPERE):
    return "\n".join(map(str, plan(func, target).decisions))


@pytest.mark.parametrize("target", [ADA, HOPPER, BLACKWELL], ids=["sm_89", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype, name", [("float8_e4m3fn", "e4m3"), ("float8_e5m2", "e5m2")])
def test_tensor_cores_multiply_8_bit_floats(target, dtype, name):
    func = programs.matmul(64, 64, 64, dtype=dtype, transpose_b=True)
    instruction = f"m16n8k32.row.col.f32.{name}.{name}.f32"
    assert f"mma.sync {instruction}" in said(func, target)
    assert instruction.replace(".", "_") in source(func, target)
    assert "multiply-adds  (float8" in said(programs.matmul(64, 64, 64, dtype=dtype), target)  # b doesn't lie along k


@pytest.mark.parametrize("target, untried", [(AMPERE, False), (ADA, True), (HOPPER, False), (BLACKWELL, True)])
def test_where_nobody_has_run_it_is_said(target, untried):
    why = tile.explain(programs.columns(64, 24), target)
    assert (f"target: {target.attrs['arch']}  (what is compiled for it was never run" in why) == untried


def test_decisions_are_said():
    text = said(programs.matmul(256, 256, 256, (128, 128, 32), "bfloat16", transpose_b=True))
    for part in (
        "256 threads  (products of up to 16384 elements",
        "mma.sync m16n8k16.row.col.f32.bf16.bf16.f32",
        "2 x 4 warps",
        "no bank conflicts in 2 kinds of access",
        "4 stages of cp.async",
    ):
        assert part in text
    assert "multiply-adds  (" in said(programs.matmul(64, 64, 64, dtype="float32"))


@pytest.mark.parametrize("m, n, threads", [(128, 128, 256), (64, 24, 128), (16, 64, 256), (32, 8, 128), (96, 96, 96)])
@pytest.mark.parametrize("rows_only", [False, True])
def test_warps_share_an_accumulator(m, n, threads, rows_only):
    warps = mma.arrange(m, n, threads, rows_only)
    assert warps.rows * warps.columns * warps.copies == threads // 32
    assert m % (16 * warps.rows) == 0 and n % (8 * warps.columns) == 0
    assert not rows_only or warps.columns == 1


def test_loads_run_ahead_only_where_they_can():
    text = source(programs.matmul(256, 256, 256, stages=3))
    assert "cp_async_wait_group_async_wait_group_1" in text
    assert text.count("cta_sync()") == 1  # one barrier an iteration, and none elsewhere
    # Rows of 77 and 61 two-byte elements are no multiples of 4 bytes: these loads go through registers.
    assert "wait_group" not in source(programs.matmul(64, 77, 61))
    assert "don't run ahead" in said(programs.matmul(256, 256, 256, stages=1))


def test_barriers_stand_where_data_flows():
    text = source(programs.reused(512))
    # In an iteration: after the write of the copy before, after the reads, and after the write.
    assert text.count("cta_sync()") == 3
    assert "cta_sync" not in source(programs.rows(64, 64, 8, "float32", "sum"))  # rows lie within warps
    assert source(programs.rows(5, 8192, 1, "float32", "sum")).count("cta_sync()") == 2


def test_memory_is_accessed_by_sixteen_bytes():
    text = source(programs.rows(4, 8192, 1, "bfloat16", "max"))
    assert text.count("= *(uint4*)(X_ptr") == 4 and text.count("*(uint4*)(Y_ptr") == 4


def test_neighbouring_points_access_memory_at_once():
    text = source(programs.fused(64, 256))
    assert (
        text.count("*(nv_bfloat164*)(X_ptr")
        and text.count("*(float4*)(residual_ptr")
        and text.count("*(float4*)(Y_ptr")
    )
    assert "*(float4*)(Y_ptr" not in source(programs.fused(64, 37))


def test_a_load_under_a_condition_is_made_under_it():
    """Not with its neighbours' ahead of the condition, which alone keeps it inside of its tensor."""

    @T.prim_func
    def padded(A: T.Buffer((1, 64), "float16"), row: T.Buffer((64,), "int32"), B: T.Buffer((64, 128), "float16")):
        with tile.kernel(1), tile.parallel(64, 128) as (i, j):
            B[i, j] = T.if_then_else(j < 64, A[row[i], j], T.float16(7))

    text = source(padded)
    assert "*(uint4*)(A_ptr" not in text and "*(float4*)(A_ptr" not in text
    choices = [line for line in tile.lower(padded, AMPERE).script().splitlines() if "A[row[" in line]
    assert choices and all(line.index("if_then_else") < line.index("A[row[") for line in choices)


def test_annotated_layouts_are_kept():
    swizzled = ComposeLayout(3, 3, 3, Layout.parse("S[(64, 64) : (64, 1)]"))

    @T.prim_func
    def func(X: T.Buffer((64, 64), "float16"), Y: T.Buffer((64, 64), "float16")):
        with tile.kernel(1, threads=64):
            s = tile.shared((64, 64), "float16", layout=swizzled)
            f = tile.fragment((64, 64), "float16", layout=Layout.parse("S[(64, 64) : (1@tx, 1)]"))
            tile.copy(X, s)
            tile.copy(s, f)
            tile.copy(f, Y)

    decided = plan(func)
    assert [*decided.memory.layouts.values()] == [swizzled]
    assert [str(held.layout) for held in decided.fragments.values()] == ["S[(64, 64) : (1@tx, 1)]"]
    assert "its annotation" in said(func)


@pytest.mark.parametrize("columns, threads", [(64, 128), (192, 256)])
def test_sums_that_registers_do_not_hold_are_shared_by_more_threads(columns, threads):
    @T.prim_func
    def func(
        A: T.Buffer((64, 256), "float16"),
        B: T.Buffer((columns, 256), "float16"),
        C: T.Buffer((3, 64, columns), "float32"),
    ):
        with tile.kernel(1):
            a = tile.shared((64, 64), "float16")
            b = tile.shared((columns, 64), "float16")
            c = tile.fragment((64, columns), "float32")
            d = tile.fragment((64, columns), "float32")
            e = tile.fragment((64, columns), "float32")
            tile.fill(c, 0)
            tile.fill(d, 1)
            tile.fill(e, 2)
            for l in tile.pipelined(4):
                tile.copy(A[0, l * 64], a)
                tile.copy(B[0, l * 64], b)
                tile.gemm(a, b, c, transpose_b=True)
                tile.gemm(a, b, d, transpose_b=True)
                tile.gemm(a, b, e, transpose_b=True)
            tile.copy(c, C[0, 0, 0])
            tile.copy(d, C[1, 0, 0])
            tile.copy(e, C[2, 0, 0])

    assert plan(func).threads == threads
    assert ("the registers of 128 don't hold the fragments" in said(func)) == (threads == 256)


def wrong_layout():
    @T.prim_func
    def func(X: T.Buffer((64, 64), "float16"), Y: T.Buffer((64, 64), "float16")):
        with tile.kernel(1, threads=128):
            f = tile.fragment((64, 64), "float16", layout=Layout.parse("S[(64, 64) : (1@tx, 1)]"))
            tile.copy(X, f)
            tile.copy(f, Y)

    return func


def annotated_accumulator():
    @T.prim_func
    def func(A: T.Buffer((64, 64), "float16"), C: T.Buffer((64, 64), "float32")):
        with tile.kernel(1, threads=128):
            a = tile.shared((64, 64), "float16")
            c = tile.fragment((64, 64), "float32", layout=programs.coalesced((64, 64), 4, 128))
            tile.copy(A, a)
            tile.gemm(a, a, c, accumulate=False)
            tile.copy(c, C)

    return func


def huge(columns, dtype="float32"):
    @T.prim_func
    def func(X: T.Buffer((1, columns), dtype), Y: T.Buffer((1, columns), dtype)):
        with tile.kernel(1):
            s = tile.shared((1, columns), dtype)
            tile.copy(X, s)
            tile.copy(s, Y)

    return func


@pytest.mark.parametrize("func, target, why", [
    (programs.matmul(64, 64, 64, threads=100), AMPERE, "threads=100; valid are multiples of 32"),
    (programs.matmul(64, 64, 64, dtype="float8_e4m3fn", transpose_b=True), AMPERE, "sm_80 computes with"),
    (programs.matmul(64, 64, 64, instruction="wgmma"), AMPERE, "sm_80 has no asynchronous products"),
    (programs.matmul(64, 64, 64, instruction="wgmma"), BLACKWELL, "sm_100a has no .*; without it the fastest is"),
    (programs.matmul(256, 256, 256, (128, 128, 64), stages=4), ADA, "131072 bytes .* a block has 101376"),
    (programs.matmul(64, 64, 64, dtype="float32", instruction="mma"), AMPERE, "k as their last dimension"),
    (programs.matmul(64, 64, 64, total="float16"), AMPERE, "the accumulator is float16; valid is float32"),
    (programs.matmul(1024, 1024, 1024, (256, 128, 128), stages=3), AMPERE, r"294912 bytes \(a 3 x 65536, b 3 x 32768"),
    (programs.matmul(4096, 4096, 64, (512, 256, 16), stages=2), AMPERE, "takes 512 registers of each of 256 threads"),
    (wrong_layout(), AMPERE, r"float16\[64, 64\]: .*leaves 4096 of the 8192 registers.*its annotation"),
    (annotated_accumulator(), AMPERE, "from its annotation, and .*by mma; they must be one"),
    (huge(65536), AMPERE, "262144 bytes .* a block has 166912"),
])  # fmt: skip
def test_what_the_target_can_not_do_is_refused(func, target, why):
    with pytest.raises(TileError, match=why):
        tile.lower(func, target)


@pytest.mark.parametrize("narrow, other", [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_halves_are_cast_by_way_of_float32(narrow, other):
    @T.prim_func
    def func(X: T.Buffer((64, 64), narrow), Y: T.Buffer((64, 64), "int32")):
        with tile.kernel(1):
            x = tile.fragment((64, 64), other)
            tile.copy(X, x)
            with tile.parallel(64, 64) as (i, j):
                Y[i, j] = T.cast(x[i, j], "int32") + T.cast(T.cast(X[i, j], other), "int32")

    casts = []
    lowered = tile.lower(func, AMPERE)
    tvm_ffi.structural_walk(lowered.body, (tirx.Cast, lambda c: casts.append((str(c.value.ty), str(c.ty)))))
    pairs = {tuple(name.partition("x")[0] for name in pair) for pair in casts}
    assert (narrow, other) not in pairs and {(narrow, "float32"), ("float32", other)} <= pairs
