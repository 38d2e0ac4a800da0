"""Functions of several kernels: right on CPUs and GPUs, one to whoever calls them, and what is refused."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import on_host
import pytest
import tvm
from interpreter import interpret
from on_cpu import poison
from programs_sequences import PROGRAMS, counted, drawn, expected, judge, quantized, running, split, sums
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import nvcc
from tvm_axe.machines.cache import Cache


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


# ---- On CPUs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_cpu(name: str, store: Cache) -> None:
    executable = tile.compile(PROGRAMS[name], "llvm", store, work_dir=None)
    for _ in range(3):
        judge(executable, name, np.random.default_rng())


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_knobs_are_shared_and_choose_kernels(pieces: int, store: Cache) -> None:
    executable = tile.compile(split, "llvm", store, knobs={"pieces": pieces})
    program = tile.read_sequence(split, {"pieces": pieces})
    assert len(program.kernels) == (1 if pieces == 1 else 2)
    assert [str(buffer) for buffer in program.scratch] == (
        [] if pieces == 1 else [f"global P: float32[{pieces}, m, n]"]
    )
    judge(executable, "split", np.random.default_rng(), {"pieces": pieces})
    assert executable.knobs == {"pieces": pieces}
    assert f"pieces = {pieces}  (set; pieces of 2, 4, 1)" in executable.explain()


def test_rows_that_are_not_there(store: Cache) -> None:
    executable = tile.compile(split, "llvm", store, work_dir=None)
    kinds = ((0, 256), "float16"), ((8, 256), "float16"), ((0, 8), "float32")
    executable(*(tvm.runtime.empty(shape, dtype) for shape, dtype in kinds), 1.0)


def test_real_numbers(store: Cache) -> None:
    rng = np.random.default_rng()
    rows = rng.standard_normal((37, 64)).astype("float32")
    weights, out = rng.integers(-128, 128, (32, 64)).astype("int8"), poison((37, 32))
    tile.compile(quantized, "llvm", store)(rows, weights, out)
    want = rows.astype("float64") @ weights.astype("float64").T
    # Each element is off by half of a step at most, of which a row's largest has 127.
    slack = np.abs(rows).max(1, keepdims=True) / 254 * np.abs(weights.astype("float64")).sum(1)
    assert (np.abs(out - want) <= slack * 1.001).all()


def test_a_row_of_random_kernels(store: Cache) -> None:
    """Kernels of which each computes a tensor of some before it, in scratch or not, in any layout of its elements."""
    for seed in range(12):
        choose = random.Random(seed).choice
        rows, columns = choose([5, 16, 33]), choose([8, 17, 64])
        source, known, shapes = [], ["X"], {"X": (rows, columns)}
        body = []
        for number in range(choose([2, 3, 4, 5])):
            name, turned = f"S{number}", choose([False, True])
            shapes[name] = (columns, rows) if turned else (rows, columns)
            source.append(f"    {name} = tile.scratch({shapes[name]}, 'int32')")
            a, b, factor = choose(known), choose(known), choose([-1, 2, 3])
            at = {each: "[j, i]" if shapes[each] != (rows, columns) else "[i, j]" for each in (a, b)}
            if rows == columns:
                at = dict.fromkeys(at, "[i, j]")
            where = "[j, i]" if turned else "[i, j]"
            body += [
                f"    with tile.kernel({rows}) as i, tile.parallel({columns}) as j:",
                f"        {name}{where} = {a}{at[a]} * {factor} + {b}{at[b]} - i",
            ]
            known.append(name)
        every = [f"{each}{'[j, i]' if shapes[each] != (rows, columns) else '[i, j]'}" for each in known]
        body += [
            f"    with tile.kernel({rows}) as i, tile.parallel({columns}) as j:",
            f"        Y[i, j] = {' + '.join(every)}",
        ]
        head = f'def func(X: T.Buffer(({rows}, {columns}), "int32"), Y: T.Buffer(({rows}, {columns}), "int32")):'
        text = "\n".join(["@T.prim_func", head, *source, *body, ""])
        func = tvm.script.from_source(text, extra_vars={"tile": tile, "T": T})
        x, y = (
            np.random.default_rng(seed).integers(-9, 9, (rows, columns)).astype("int32"),
            poison((rows, columns), "i4"),
        )
        _, want = interpret(func, x, y)
        tile.compile(func, "llvm", store)(x, y)
        np.testing.assert_array_equal(y, want, err_msg=text)


def test_a_function_is_one_to_its_callers(store: Cache) -> None:
    executable = tile.compile(sums, "llvm", store)
    x, y = drawn("sums", np.random.default_rng())
    with pytest.raises(InputError, match=r"sums takes 2 tensors \(A: float32\[64, 256\], B: float32\[64\]\); got 3"):
        executable(x, y, x)
    with pytest.raises(InputError, match=r"B has the shape \(64,\); got \(256,\)"):
        executable(x, x[0].copy())
    with pytest.raises(InputError, match=r"n is 9 in B; the program has tile.assume\(n % 8 == 0\)"):
        tile.compile(split, "llvm", store, work_dir=None)(
            np.zeros((4, 256), "float16"), np.zeros((9, 256), "float16"), poison((4, 9)), 1.0
        )
    with pytest.raises(InputError, match="no knobs can be set, q neither: it declares none"):
        tile.compile(sums, knobs={"q": 1})
    with pytest.raises(InputError, match="it was read"):
        tile.compile(tile.read_sequence(split), knobs={"pieces": 1})
    given = [tvm.runtime.tensor(x), tvm.runtime.tensor(y)]
    again = executable.bind(*given)
    again(), again()
    np.testing.assert_array_equal(given[1].numpy(), x.sum(1))
    assert len(executable.time(*given, repeat=3)) == 3
    assert "define" in executable.source
    with pytest.raises(
        TileError, match=r"profile: sums has the kernels sums_1, sums_2; valid is one, compiled by itse"
    ):
        executable.profile(x, y)


def test_compiled_beside_others(store: Cache) -> None:
    @T.prim_func
    def twice(B: T.Buffer((64,), "float32"), C: T.Buffer((64,), "float32")):
        with tile.kernel(1), tile.parallel(64) as i:
            C[i] = B[i] * 2.0

    first, second = tile.compile_all([tile.read_sequence(sums), twice], "llvm", store)
    x, y = drawn("sums", np.random.default_rng())
    z = poison(64)
    first(x, y), second(y, z)
    np.testing.assert_array_equal(z, 2 * x.sum(1))
    with pytest.raises(TileError, match="programs have names of their own, got sums, sums"):
        tile.compile_all([sums, sums], "llvm", store)


def test_a_kernel_is_a_program_of_its_own(store: Cache) -> None:
    first, second = tile.read_sequence(sums).kernels
    assert (first.name, second.name) == ("sums_1", "sums_2")
    x, y = drawn("sums", np.random.default_rng())
    parts = poison((2, 64))
    tile.compile(first, "llvm", store)(x, parts)
    np.testing.assert_array_equal(parts, x.reshape(64, 2, 128).sum(2).T)
    tile.compile(second, "llvm", store)(y, parts)
    np.testing.assert_array_equal(y, x.sum(1))


def test_printed_and_parsed(store: Cache) -> None:
    parsed = tvm.script.from_source(split.script())
    tvm.ir.assert_structural_equal(parsed, split, map_free_vars=True)
    assert str(tile.read_sequence(parsed)) == str(tile.read_sequence(split))


def test_threads_have_scratch_of_their_own(store: Cache) -> None:
    """Calls at once, of scratch too large for the stack."""
    executable = tile.compile(split, "llvm", store, work_dir=None)
    failed: list[BaseException] = []

    def call(seed: int) -> None:
        try:
            for _ in range(5):
                judge(executable, "split", np.random.default_rng(seed))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failed


# ---- What is decided -------------------------------------------------------------------------------------------------


def test_explained_under_the_names_of_kernels() -> None:
    lines = tile.explain(split, "cuda:sm_90a").splitlines()
    assert lines[:6] == [
        "knobs",
        "    pieces = 2  (the default; pieces of 2, 4, 1)",
        "assumptions",
        "    n % 8 == 0  (calls with other sizes are refused)",
        "scratch",
        "    P: float32[2, m, n]  (m * n * 8 bytes for a call, which hold anything when it begins)",
    ]
    first, second = lines.index("split_1"), lines.index("split_2")
    assert any("wgmma" in line for line in lines[first:second])
    assert not any("wgmma" in line for line in lines[second:])
    assert "    parts: float32[2, 64]  (512 bytes for a call, which hold anything when it begins)" in tile.explain(
        sums, "llvm"
    )


def test_a_kernel_has_what_it_uses() -> None:
    first, second = tile.read_sequence(split).kernels
    assert [str(param.name) for param in first.func.params] == ["A", "B", "P"]
    assert [str(param.name) for param in second.func.params] == ["C", "alpha", "P"]
    # Extents of tensors that a kernel doesn't touch, and the scalars of scratch's extents.
    zero, count, add = tile.read_sequence(counted).kernels
    assert [str(param.name) for param in zero.func.params] == ["k", "counts"]
    assert [str(param.name) for param in count.func.params] == ["X", "k", "counts"]
    assert [str(param.name) for param in add.func.params] == ["k", "Y", "counts"]


def test_a_size_of_a_tensor_that_a_kernel_does_not_touch(store: Cache) -> None:
    @T.prim_func
    def func(x: T.handle, Y: T.Buffer((4,), "int32")):
        n = T.int32()
        X = T.match_buffer(x, (n, 4), "int32")
        tile.assume(tirx.all(n % 2 == 0, n >= 2))
        total = tile.scratch((n * 2,), "int32")
        with tile.kernel(n * 2) as i, tile.parallel(1) as j:
            total[i + j] = X[i // 2, 1]
        with tile.kernel(4) as i, tile.parallel(1) as j:
            Y[i + j] = total[n + i] + n

    program = tile.read_sequence(func)
    assert [len(kernel.assumptions) for kernel in program.kernels] == [2, 2]
    x, y = np.arange(24, dtype="int32").reshape(6, 4), poison(4, "int32")
    tile.compile(func, "llvm", store)(x, y)
    np.testing.assert_array_equal(y, x[(6 + np.arange(4)) // 2, 1] + 6)


def test_sizes_that_are_known_from_each_other(store: Cache) -> None:
    """A kernel whose grid is of an extent that stands in one tensor, beside one that another tensor has."""

    @T.prim_func
    def func(z: T.handle, x: T.handle, Y: T.Buffer((4,), "int32")):
        n = T.int32()
        m = T.int32()
        Z = T.match_buffer(z, (n,), "int32")
        X = T.match_buffer(x, (m, n * 2), "int32")
        ones = tile.scratch((4,), "int32")
        with tile.kernel(1), tile.parallel(4) as i:
            ones[i] = X[0, 0] + Z[0]
        with tile.kernel(1), tile.parallel(4) as i:
            Y[i] = ones[i] + m

    second = tile.read_sequence(func).kernels[1]
    assert [str(param.name) for param in second.func.params] == ["Z", "X", "Y", "ones"]
    x, y = np.arange(18, dtype="int32").reshape(3, 6) + 5, poison(4, "int32")
    tile.compile(func, "llvm", store)(np.full(3, 2, "int32"), x, y)
    np.testing.assert_array_equal(y, 5 + 2 + 3)


# ---- On GPUs ---------------------------------------------------------------------------------------------------------


def _has_compiler() -> bool:
    try:
        return bool(nvcc.find_compiler())
    except TileError:
        return False


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="neither nvcc nor nvrtc on this machine")


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_compiled_for_a_gpu(arch: str, store: Cache) -> None:
    every = [tile.read_sequence(func) for func in PROGRAMS.values()]
    for program, executable in zip(every, tile.compile_all(every, f"cuda:{arch}", store)):
        assert f"{program.name}_kernel(" in executable.source and f"{program.name}_kernel_1(" in executable.source
        for kernel in program.kernels:
            assert f"    {kernel.name}: registers: " in executable.explain()


def test_rocm_is_lowered() -> None:
    for func in PROGRAMS.values():
        assert "alloc_buffer" in tile.lower(func, "rocm:gfx942").script()


@pytest.mark.parametrize("func, blocks", [(sums, (8, 2)), (running, (8, 1, 8))], ids=["sums", "running"])
def test_the_code_for_a_gpu_on_the_host(func: Any, blocks: tuple[int, ...], store: Cache, tmp_path: Path) -> None:
    try:
        source = tile.compile(func, "cuda:sm_80", store).source
    except TileError as error:
        pytest.skip(str(error))
    program, name = tile.read_sequence(func), str(func.attrs["global_symbol"])
    given = drawn(name, np.random.default_rng())
    arrays = {tensor.name: array for tensor, array in zip(program.params, given, strict=True)}
    arrays |= {tensor.name: poison(tensor.shape, tensor.dtype) for tensor in program.scratch}
    for number, count in enumerate(blocks):
        folder = tmp_path / str(number)
        folder.mkdir()
        on_host.run(source, count, arrays, folder, number=number)
    np.testing.assert_array_equal(given[-1], expected(name, given))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_on_a_gpu(name: str, cuda: object, store: Cache) -> None:
    executable = tile.compile(PROGRAMS[name], "cuda", store, work_dir=None)
    for _ in range(3):
        judge(executable, name, np.random.default_rng())


# ---- As operators ----------------------------------------------------------------------------------------------------

_NUMBERS = itertools.count()


def test_an_operator() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    @T.prim_func
    def gradient(dB: T.Buffer((64,), "float32"), dA: T.Buffer((64, 256), "float32")):
        twice = tile.scratch((64,), "float32")
        with tile.kernel(1), tile.parallel(64) as i:
            twice[i] = dB[i] * 1.0
        with tile.kernel(64) as i, tile.parallel(256) as j:
            dA[i, j] = twice[i]

    summed = tile.operator(f"axe_tests_sequences::op{next(_NUMBERS)}", sums, gradient=gradient)
    x = torch.randint(-9, 10, (64, 256)).float().requires_grad_()  # whose sums are exact
    summed(x).square().sum().backward()
    torch.testing.assert_close(summed(x), x.sum(1))
    torch.testing.assert_close(x.grad, (2 * x.sum(1))[:, None].expand(64, 256))
    torch.library.opcheck(summed, (x,))


def test_an_operator_whose_output_a_kernel_reads() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    @T.prim_func
    def normalized(X: T.Buffer((64, 256), "float32"), S: T.Buffer((64,), "float32"), Y: T.Buffer((64, 256), "float32")):
        with tile.kernel(64) as i:
            x = tile.fragment((1, 256), "float32")
            s = tile.fragment((1,), "float32")
            tile.copy(X[i, 0], x)
            tile.sum(x, s)
            tile.copy(s, S[i])
        with tile.kernel(64) as i, tile.parallel(256) as j:
            Y[i, j] = X[i, j] / S[i]

    made = tile.operator(f"axe_tests_sequences::op{next(_NUMBERS)}", normalized)
    x = torch.rand((64, 256)) + 1
    s, y = made(x)
    torch.testing.assert_close(s, x.sum(1))
    torch.testing.assert_close(y, x / x.sum(1, keepdim=True))


# ---- Tensors with strides -------------------------------------------------------------------------------------------


def with_strides():
    @T.prim_func
    def shares(a: T.handle, b: T.handle, w: T.handle):
        m, lda, ldb = T.int32(), T.int32(), T.int32()
        A = T.match_buffer(a, (m, 64), "float32", strides=(lda, 1))
        B = T.match_buffer(b, (m, 64), "float32", strides=(1, ldb))
        W = T.match_buffer(w, (m,), "float32", strides=(lda,))
        total = tile.scratch((m,), "float32")
        with tile.kernel(tile.cdiv(m, 8)) as i:
            x = tile.fragment((8, 64), "float32")
            s = tile.fragment((8,), "float32")
            tile.copy(A[i * 8, 0], x)
            tile.sum(x, s)
            tile.copy(s, total[i * 8])
        with tile.kernel(m) as j, tile.parallel(64) as x:
            B[j, x] = A[j, x] * total[j] + W[j]

    return shares


def strided_tensors(rng, rows=37):
    """A and W as columns of a larger tensor, and B turned; what lies around them is kept."""
    large = rng.integers(-4, 5, (rows, 80)).astype("float32")
    turned = np.full((64, rows + 3), 77, "float32")
    return large, turned, (large[:, 8:72], turned[:, :rows].T, large[:, 75])


def test_tensors_with_strides(tmp_path):
    large, turned, (a, b, w) = strided_tensors(np.random.default_rng(6))
    kept = large.copy()
    want = a.astype("float64") * a.sum(axis=1, dtype="float64")[:, None] + w[:, None]
    np.testing.assert_array_equal(interpret(with_strides(), a, b, w)[1], want)
    tile.compile(with_strides(), "llvm", Cache(tmp_path))(a, b, w)
    np.testing.assert_array_equal(b, want)
    np.testing.assert_array_equal(large, kept)
    assert (turned[:, len(a) :] == 77).all()
    with pytest.raises(InputError, match="elements overlap"):
        tile.compile(with_strides(), "llvm", Cache(tmp_path))(a, np.lib.stride_tricks.as_strided(b, b.shape, (4, 4)), w)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_kernels_share_the_function_s_tensors(target, tmp_path):
    read = tile.read_sequence(with_strides())
    assert {param for kernel in read.kernels for param in kernel.func.params if tirx.is_buffer_var(param)} == {
        param.buffer for param in (*read.params, *read.scratch)
    }
    assert "with strides (lda, 1)" in str(read)
    assert tile.compile(with_strides(), target, Cache(tmp_path)).source.count("__global__ void") >= 2


@pytest.mark.gpu
def test_tensors_with_strides_on_a_gpu(cuda, tmp_path):
    _, _, (a, b, w) = strided_tensors(np.random.default_rng(7))
    want = a.astype("float64") * a.sum(axis=1, dtype="float64")[:, None] + w[:, None]
    tile.compile(with_strides(), "cuda", Cache(tmp_path))(a, b, w)
    np.testing.assert_array_equal(b, want)
