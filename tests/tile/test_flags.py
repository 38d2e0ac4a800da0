"""`wait`, `signal` and scalar parameters: what is read, refused and interpreted, and the uniform model's code."""

import re
import shutil
import subprocess

import numpy as np
import on_cpu
import programs_flags as programs
import pytest
import tvm
from interpreter import Fault, interpret
from tvm.script import from_source
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import cache, nvcc
from tvm_axe.tile.nodes import Signal, Wait

AMPERE, HOPPER = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_90a"))


def source(func, target=HOPPER):
    mod = tvm.IRModule({"main": tile.lower(func, target).with_attr("global_symbol", "main")})
    return str(tvm.compile(mod, target, tir_pipeline="tirx").mod.imports[0].inspect_source())


def body(func, target=HOPPER):
    text = source(func, target)
    return text[text.rindex("__global__") :]


# ---- Reading -------------------------------------------------------------------------------------------------------


def test_words_are_read_and_printed():
    program = tile.read(programs.reduce_norm(4, 8, 512))
    signal, wait = (next(n for n in program.nodes() if isinstance(n, kind)) for kind in (Signal, Wait))
    assert str(signal) == "signal flags[0:4, me, r] = 1, at once" and str(wait).endswith(">= 1, then reset")
    assert (signal.ordered, signal.add, wait.reset, wait.flags.extents) == (False, False, True, (1, 4, 1))
    assert wait.reads == wait.writes == signal.writes == (wait.flags.tile,) and signal.reads == ()
    counted = next(n for n in tile.read(programs.put_rows(4, 8, add=True)).nodes() if isinstance(n, Signal))
    assert str(counted) == "signal flags[0] += turn" and counted.reads == (counted.flags.tile,)
    text = str(program)
    assert text.startswith("kernel reduce_norm(x, residual, weight, me, flags, out) for r < 8")
    assert "scalar me: int32" in text


@pytest.mark.parametrize(
    "func", [programs.product_scatter(2, 512, 512, 256), programs.put_rows(4, 8), programs.take_rows(4, 8)]
)
def test_words_survive_printing_and_parsing(func):
    assert str(tile.read(from_source(func.script()))) == str(tile.read(func))


def test_a_whole_tensor_of_flags():
    (wait,) = (node for node in tile.read(programs.take_rows(4, 8)).nodes() if isinstance(node, Wait))
    assert wait.flags.whole


def case(word, name):
    """A kernel of two by two blocks with one `wait` or `signal`, valid or in one respect not."""
    dtype = "int64" if name == "dtype" else "int32"
    say = {"wait": tile.wait, "signal": tile.signal}[word]

    @T.prim_func
    def func(
        flags: T.Buffer((2, 2, 4), dtype),
        many: T.Buffer((2048,), "int32"),
        wide: T.int64,
        me: T.int32,
        X: T.Buffer((2, 2, 32), "float32"),
    ):
        with tile.kernel(2, 2) as (i, j):
            x = tile.fragment((1, 1, 32), "float32")
            on_chip = tile.shared((4,), "int32")
            if name in ("valid", "dtype"):
                say(flags[i, j, 0:4], me + 1)
            elif name == "beyond":
                say(flags[i, j + 1, 0])
            elif name == "end":
                say(flags[i, j, 1:5])
            elif name == "negative":
                say(flags[i - 1, j, 0])
            elif name == "scope":
                tile.fill(on_chip, 0)
                say(on_chip[0])
            elif name == "value":
                say(flags[i, j, 0], wide)
            elif name == "float":
                say(flags[i, j, 0], 1.5)
            elif name == "large":
                say(flags[i, j, 0], 1 << 31)
            elif name == "many":
                say(many)
            elif name == "tensor":
                say(me)
            elif name == "extent":
                say(many[0:me])
            elif name == "read":
                say(flags[i, j, 0])
                if flags[i, j, 1] > 0:
                    tile.fill(x, 0)
            elif name == "stored":
                with tile.parallel(4) as y:
                    flags[i, j, y] = 0
                say(flags[i, j, 0])
            elif name == "parallel":
                with tile.parallel(4) as y:
                    say(flags[i, j, y])
            tile.copy(X[i, j, 0], x)

    return func


@pytest.mark.parametrize("word", ["wait", "signal"])
def test_flags_refused(word):
    tile.read(case(word, "valid"))
    for name, message in [
        ("beyond", r"its flags end at 3 in dimension 1 of .* when i=0, j=1; valid is up to 2"),
        ("end", "its flags end at 5 in dimension 2 of .*; valid is up to 4"),
        ("negative", "starts at -1 in dimension 0"),
        ("scope", "flags are shared on_chip: int32.*; valid is an int32 tensor in global memory"),
        ("dtype", "flags are global flags: int64.*; valid is an int32 tensor in global memory"),
        ("value", f"{word}: value is an int32, got .*int64"),
        ("float", f"{word}: value is an int32, got .*float"),
        ("large", f"{word}: value is an int32, got 2147483648"),
        ("many", f"{word}: 2048 flags; valid are 1 to 1024"),
        ("tensor", f"{word}: flags are an element or a slice of a tensor, got Var"),
        ("extent", f"{word}: flags have constant extents"),
        ("read", "touches global flags.*, which is ordered by nothing; valid is a tensor of flags that"),
        ("stored", "`parallel 4 into flags` touches global flags"),
        ("parallel", f"parallel: {word} in its body; valid is a {word} before or behind it, by the whole block"),
    ]:
        with pytest.raises((TileError, tvm.error.DiagnosticError)) as caught:
            tile.read(case(word, name))
        seen = f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"
        assert re.search(message, seen), (name, seen)


def test_a_wait_for_nothing_is_refused():
    with pytest.raises(TileError, match="wait: for a value of 0, which flags have from the start; valid is 1 or more"):
        tile.wait(None, 0)


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "set",
            "all 4 blocks along j set the same flags of .*valid are flags, or an `if`, that depend on j, or add=",
        ),
        ("reset", "all 4 blocks along j wait for and reset the same flags of .*or reset=False"),
        *((name, None) for name in ("set by one", "added", "at once", "reset by one", "seen by all", "never")),
    ],
)
def test_blocks_that_share_a_flag(name, message):
    @T.prim_func
    def func(flags: T.Buffer((4,), "int32"), X: T.Buffer((4, 4, 8), "float32")):
        with tile.kernel(4, 4) as (i, j):
            x = tile.fragment((1, 1, 8), "float32")
            if name == "reset":
                tile.wait(flags[i], reset=True)
            if name == "reset by one":  # noqa: SIM102
                if j == 0:  # of the program, not of Python
                    tile.wait(flags[i], reset=True)
            if name == "never":  # noqa: SIM102
                if j > 3:
                    tile.wait(flags[i], reset=True)
            if name == "seen by all":
                tile.wait(flags[i])
            tile.fill(x, 0)
            tile.copy(x, X[i, j, 0])
            if name == "set":
                tile.signal(flags[i])
            if name == "set by one":  # noqa: SIM102
                if j == 3:  # of the program, not of Python
                    tile.signal(flags[i])
            if name == "added":
                tile.signal(flags[i], add=True)
            if name == "at once":
                tile.signal(flags[i], ordered=False)

    if message is None:
        tile.read(func)
    else:
        with pytest.raises(TileError, match=message):
            tile.read(func)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"order": "reversed"}, "kernel: order is 'given' or left out, got 'reversed'"),
        (
            {"epilogue_tile": (32,)},
            r"kernel: epilogue_tile has two positive extents, rows and columns of a piece, got \(32,\)",
        ),
        ({"epilogue_tile": (0, 64)}, "kernel: epilogue_tile has two positive extents"),
    ],
)
def test_options_refused(options, message):
    with pytest.raises(TileError, match=message), tile.kernel(4, **options):
        pass


# ---- Meaning -------------------------------------------------------------------------------------------------------


def test_the_interpreter_waits_and_signals():
    a = np.arange(32, dtype="float32").reshape(4, 8)
    flags = np.zeros(4, "int32")
    _, b, told = interpret(programs.put_rows(4, 8), a, 3, np.zeros_like(a), flags)
    assert (b == 2 * a).all() and (told == 3).all()
    assert interpret(programs.put_rows(4, 8, add=True), a, 3, np.zeros_like(a), flags)[2].tolist() == [12, 0, 0, 0]
    _, seen, c = interpret(programs.take_rows(4, 8, reset=True), b, 3, told, np.zeros_like(a))
    assert (c == 2 * a + 1).all() and (seen == 0).all()
    with pytest.raises(Fault, match="nobody has signalled"):
        interpret(programs.take_rows(4, 8), b, 4, told, np.zeros_like(a))


def arguments(rng=None):
    a = (rng or np.random.default_rng(0)).standard_normal((10, 33)).astype("float32")
    return [a, 7, 1.5, np.full_like(a, np.nan), 2, 0.25]


def check_scaled(target):
    given = arguments()
    tile.compile(programs.scaled_rows(10, 33), target)(*given)
    on_cpu.close(given[3], interpret(programs.scaled_rows(10, 33), *arguments())[1])


def test_scalars_on_a_cpu():
    check_scaled("llvm")


@pytest.mark.gpu
def test_scalars_on_a_gpu(cuda):
    check_scaled("cuda")


def test_scalars_are_checked():
    exe = tile.compile(programs.scaled_rows(10, 33), "llvm")
    for at, value, message in [
        (1, 7.0, "scaled_rows: count is an integer, int32; got float"),
        (1, True, "scaled_rows: count is an integer, int32; got bool"),
        (1, 1 << 31, "scaled_rows: count is int32, -2147483648 to 2147483647; got 2147483648"),
        (2, "1", "scaled_rows: factor is a number, float32; got str"),
        (0, 7, "A must be a numpy array or a tensor"),
    ]:
        given = arguments()
        given[at] = value
        with pytest.raises(InputError, match=message):
            exe(*given)
    with pytest.raises(InputError, match=r"takes 6 arguments \(A: float32\[10, 33\], count: int32, .*\); got 1"):
        exe(*arguments()[:1])
    given = arguments()
    exe(*[np.int64(value) if isinstance(value, int) else value for value in given])
    assert np.isfinite(given[3][2:7]).all()


# ---- The uniform model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
def test_a_thread_a_flag_and_a_barrier(target):
    norm = body(programs.reduce_norm(4, 8, 512), target)
    assert re.search(r"threadIdx.x\) < 4\) \{\s*axe_signal_at_once\(", norm)
    assert re.search(r"threadIdx.x\) < 4\) \{\s*axe_wait\([^;]*, 1, 1\);\s*\}\s*tvm_builtin_cuda_cta_sync", norm)
    assert norm.index("axe_signal_at_once") < norm.index("axe_wait") < norm.index("x_ptr +")
    put = body(programs.put_rows(4, 8), target)
    assert re.search(r"tvm_builtin_cuda_cta_sync\(\);\s*if \(\(\(int\)threadIdx.x\) < 1\) \{\s*axe_signal\(", put)
    assert "axe_signal_add(" in body(programs.put_rows(4, 8, add=True), target)
    ordered = source(programs.reduce_norm(4, 8, 512, ordered=True), target)
    assert "st.release.sys.global.s32" in ordered and "red." not in ordered


def test_more_flags_than_threads():
    text = body(programs.take_rows(512, 8))
    assert "__launch_bounds__(128)" in text and text.count("axe_wait(") == 4


def test_decisions_are_said():
    text = tile.explain(programs.reduce_norm(4, 8, 512), HOPPER)
    assert "wait for flags[me, 0:4, r] >= 1, then reset: a thread a flag  (the block meets behind a wait" in text


def waits_in_a_loop(waits):
    @T.prim_func
    def func(
        A: T.Buffer((128, 256), "float16"),
        B: T.Buffer((256, 64), "float16"),
        flags: T.Buffer((8,), "int32"),
        C: T.Buffer((128, 64), "float32"),
    ):
        with tile.kernel(1, 1):
            a = tile.shared((128, 32), "float16")
            b = tile.shared((32, 64), "float16")
            c = tile.fragment((128, 64), "float32")
            tile.fill(c, 0)
            for k in tile.pipelined(8):
                if waits:
                    tile.wait(flags[k])
                tile.copy(A[0, k * 32], a)
                tile.copy(B[k * 32, 0], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[0, 0])

    return func


def test_loads_do_not_run_ahead_of_a_wait():
    assert "4 stages of cp.async" in tile.explain(waits_in_a_loop(False), AMPERE)
    assert "loads don't run ahead  (they may depend on a wait in it)" in tile.explain(waits_in_a_loop(True), AMPERE)
    assert "cp_async" not in body(waits_in_a_loop(True), AMPERE)


def test_a_signal_is_behind_what_its_block_has_read():
    @T.prim_func
    def func(A: T.Buffer((8, 64), "float32"), flags: T.Buffer((8,), "int32"), B: T.Buffer((8, 64), "float32")):
        with tile.kernel(8) as r:
            part = tile.fragment((1, 64), "float32")
            tile.copy(A[r, 0], part)
            tile.signal(flags[r])
            tile.copy(part, B[r, 0])

    text = body(func)
    text = text[text.index("{") :]
    assert text.index("A_ptr") < text.index("cta_sync") < text.index("axe_signal(") < text.index("B_ptr")


def test_signals_in_loops_get_their_barriers():
    @T.prim_func
    def func(A: T.Buffer((8, 64), "float32"), flags: T.Buffer((8, 4), "int32"), B: T.Buffer((8, 4, 64), "float32")):
        with tile.kernel(8) as r:
            x = tile.shared((64,), "float32")
            part = tile.fragment((64,), "float32")
            for i in range(4):
                tile.copy(A[r, 0], x)
                tile.signal(flags[r, i], ordered=False)
                tile.copy(x, part)
                tile.copy(part, B[r, i, 0])

    loop = body(func)
    loop = loop[loop.index("for (int") :]
    assert loop.count("cta_sync") == 2  # x is written, then read; and read, then written by the next iteration


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
def test_uniform_programs_become_cubins(target, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    made = [
        programs.reduce_norm(4, 8, 512),
        programs.put_rows(4, 8),
        programs.put_rows(4, 8, add=True),
        programs.take_rows(512, 8),
        programs.scaled_rows(10, 33),
        programs.gather_product(2, 256, 512, 128, roles="uniform"),
        waits_in_a_loop(True),
    ]
    named = [func.with_attr("global_symbol", f"program_{at}") for at, func in enumerate(made)]
    compiled = tile.compile_all(named, target, cache.Cache(tmp_path))
    assert [exe.name for exe in compiled] == [f"program_{at}" for at in range(len(made))]


def test_no_load_moves_over_a_wait(tmp_path):
    """Loads through the texture path (ld.global.nc) may be of what was there before the kernel."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")

    def ptx(func):
        (tmp_path / "kernel.cu").write_text(source(func))
        flags = [flag for flag in nvcc._FLAGS if flag != "-cubin"]
        command = ["nvcc", *flags, "-arch=sm_90a", "-ptx", "-o", tmp_path / "kernel.ptx", tmp_path / "kernel.cu"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        text = (tmp_path / "kernel.ptx").read_text()
        return text[text.index(".entry") :]

    waiting = ptx(programs.take_rows(8, 64))
    assert "ld.global.nc" not in waiting
    assert waiting.index("ld.acquire.sys") < waiting.index("bar.sync") < waiting.index("ld.global")
    assert "ld.global.nc" in ptx(programs.scaled_rows(8, 64))  # elsewhere pointers keep their __restrict__


def test_other_kernels_have_none_of_it():
    text = source(programs.scaled_rows(10, 33))
    assert "axe_" not in text and "#define __restrict__" not in text


# ---- On a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("add", [False, True])
def test_a_kernel_takes_what_another_put(cuda, add):
    """Both on one stream: the flags are there when the second kernel begins, whose turn is the last of the first's."""
    rows, n = 300, 256
    put = tile.compile(programs.put_rows(rows, n, add), "cuda")
    take = tile.compile(programs.take_rows(rows, n, reset=True), "cuda")
    rng = np.random.default_rng(0)
    flags = tvm.runtime.tensor(np.zeros(rows, "int32"), cuda)
    for turn in (1, 2, 3):
        a = tvm.runtime.tensor(rng.standard_normal((rows, n)).astype("float32"), cuda)
        b, c = (tvm.runtime.tensor(np.full((rows, n), np.nan, "float32"), cuda) for _ in range(2))
        put(a, turn, b, flags)
        if add:
            assert flags.numpy().tolist() == [rows * turn] + [0] * (rows - 1)
            flags.copyfrom(np.full(rows, turn, "int32"))
        assert (flags.numpy() == turn).all()
        take(b, turn, flags, c)
        np.testing.assert_array_equal(c.numpy(), 2 * a.numpy() + 1)
        assert (flags.numpy() == 0).all()


@pytest.mark.gpu
def test_a_norm_of_one_device(cuda):
    """All slabs are on one device, which tells itself."""
    rows, n = 8, 1024
    func = programs.reduce_norm(1, rows, n, ordered=True)
    rng = np.random.default_rng(1)
    shapes = [(1, rows, n), (rows, n), (n,)]
    given = [rng.standard_normal(shape).astype("bfloat16") for shape in shapes]
    flags, out = np.zeros((1, 1, rows), "int32"), np.full((rows, n), np.nan).astype("bfloat16")
    tile.compile(func, "cuda")(*given, 0, flags, out)
    on_cpu.close(out, interpret(func, *given, 0, np.zeros_like(flags), np.zeros_like(out))[-1])
    assert (flags == 0).all()
