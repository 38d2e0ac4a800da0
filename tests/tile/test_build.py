"""Compiled tile programs: what they are called with, what is compiled once, and what is said when it can't be."""

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe import _tvm, tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import nvcc
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.kernels import KERNELS

M, N, K = 70, 50, 33
SIZE = 200


@T.prim_func
def scale(A: T.Buffer((SIZE,), "float32"), B: T.Buffer((SIZE,), "float32")):
    with tile.kernel(2) as i:
        a = tile.fragment((128,), "float32")
        tile.copy(A[i * 128], a)
        with tile.parallel(128) as j:
            a[j] = a[j] * T.float32(3)
        tile.copy(a, B[i * 128])


@T.prim_func
def turn(X: T.Buffer((SIZE * 128,), "int32"), Y: T.Buffer((SIZE * 128,), "int32")):
    """Blocks of 128 in reverse order, one more in each element."""
    with tile.kernel(SIZE) as i:
        x = tile.fragment((128,), "int32")
        tile.copy(X[(SIZE - 1 - i) * 128], x)
        with tile.parallel(128) as j:
            x[j] = x[j] + 1
        tile.copy(x, Y[i * 128])


@T.prim_func
def add(a_handle: T.handle, b_handle: T.handle, c_handle: T.handle):
    n = T.int32()
    A = T.match_buffer(a_handle, (n, 16), "float32")
    B = T.match_buffer(b_handle, (n, 16), "float32")
    C = T.match_buffer(c_handle, (n, 16), "float32")
    with tile.kernel(tile.cdiv(n, 8)) as i:
        a = tile.fragment((8, 16), "float32")
        b = tile.fragment((8, 16), "float32")
        tile.copy(A[i * 8, 0], a)
        tile.copy(B[i * 8, 0], b)
        with tile.parallel(8, 16) as (x, y):
            a[x, y] = a[x, y] + b[x, y]
        tile.copy(a, C[i * 8, 0])


def matmul(target="llvm", dtype="float32", m=M, n=N, k=K, **parameters):
    problem = {"m": m, "n": n, "k": k, "dtype": dtype}
    (program,) = KERNELS["matmul"].recipe(resolve_target(target), problem, **parameters).programs
    return program


@pytest.fixture
def store(tmp_path):
    return Cache(tmp_path)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    return tile.compile(scale, store=Cache(tmp_path_factory.mktemp("kernels")))


def poisoned(shape=SIZE, dtype="float32"):
    return np.full(shape, np.nan, dtype)


def unaligned(array):
    """The same where no vector starts."""
    room = np.empty(array.size + 64, array.dtype)
    start = next(n for n in range(1, 64) if room[n:].ctypes.data % 64)
    view = room[start : start + array.size].reshape(array.shape)
    view[...] = array
    return view


def read_only(array):
    array = array.copy()
    array.flags.writeable = False
    return array


class Producer:
    """What another package's tensor looks like."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def aligned(array):
    return _tvm.as_array(tvm.runtime.tensor(array))


def test_numpy_arrays(scaled):
    given = np.random.default_rng(0).standard_normal(SIZE, dtype="float32")
    for a in (given, unaligned(given), read_only(given), np.repeat(given, 2)[::2], given[::-1].copy()[::-1]):
        for out in (aligned(poisoned()), unaligned(poisoned()), poisoned(2 * SIZE)[::2]):
            scaled(a, out)
            np.testing.assert_array_equal(out, given * np.float32(3))


def test_tensors_of_others(scaled):
    given = np.random.default_rng(1).standard_normal(SIZE, dtype="float32")
    out = tvm.runtime.tensor(poisoned())
    scaled(tvm.runtime.tensor(given), out)
    np.testing.assert_array_equal(out.numpy(), given * np.float32(3))
    result = aligned(poisoned())
    scaled(Producer(aligned(given)), Producer(result))
    np.testing.assert_array_equal(result, given * np.float32(3))


def test_arguments_bound_once(scaled):
    """A run sees what the tensors hold then; what would be copied for it is refused by name."""
    rng = np.random.default_rng(6)
    given, out = aligned(rng.standard_normal(SIZE, dtype="float32")), aligned(poisoned())
    run = scaled.bind(given, Producer(out))
    for _ in range(2):
        run()
        np.testing.assert_array_equal(out, given * np.float32(3))
        given[:], out[:] = rng.standard_normal(SIZE, dtype="float32"), np.nan
    with pytest.raises(InputError, match="scale: A, B would be copied for each run; bind takes tensors of cpu"):
        scaled.bind(unaligned(given), unaligned(out))
    with pytest.raises(InputError, match="scale takes 2 tensors"):
        scaled.bind(given)


def test_small_floats(store):
    exe = tile.compile(matmul(dtype="bfloat16"), store=store)
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(shape).astype("bfloat16") for shape in ((M, K), (N, K)))
    out = poisoned((M, N), "bfloat16")
    exe(a, b, out)
    want = a.astype("float64") @ b.astype("float64").T
    assert np.linalg.norm(out.astype("float64") - want) < 1e-2 * np.linalg.norm(want)


def test_extents_that_the_first_tensor_decides(store):
    exe = tile.compile(add, store=store)
    for n in (1, 8, 21):
        a, b = np.random.default_rng(n).standard_normal((2, n, 16), dtype="float32")
        out = poisoned((n, 16))
        exe(a, b, out)
        np.testing.assert_array_equal(out, a + b)
    with pytest.raises(InputError, match=r"n is 22 in \w+ and 21 in \w+; got the shape \(22, 16\)"):
        exe(a, b, poisoned((22, 16)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((poisoned(),), r"scale takes 2 tensors \(A: float32\[200\], B: float32\[200\]\); got 1"),
        ((poisoned(), poisoned(3)), r"B has the shape \(200,\); got \(3,\)"),
        ((poisoned((10, 20)), poisoned()), r"A has the shape \(200,\); got \(10, 20\)"),
        ((poisoned(dtype="float64"), poisoned()), "A is float32; got float64"),
        ((poisoned(), read_only(poisoned())), "writes B; got a read-only array"),
        (([1.0] * 200, poisoned()), "A must be a numpy array or a tensor with __dlpack__; got list"),
        ((poisoned(), Producer(unaligned(poisoned()))), "B must start at a multiple of 64 bytes"),
        ((poisoned(), Producer(poisoned(2 * SIZE)[::2])), "B must be dense"),
        ((poisoned(), Producer(read_only(poisoned()))), "B cannot be taken over from Producer"),
    ],
)
def test_arguments_that_do_not_fit(scaled, arguments, message):
    with pytest.raises(InputError, match=message):
        scaled(*arguments)


def of_torch(shape=(SIZE,), dtype="float32", begin=0, device="cpu"):
    """A tensor of PyTorch that begins so many elements behind a multiple of 64 bytes."""
    torch = pytest.importorskip("torch")
    many = torch.full((int(np.prod(shape)) + 64,), 7, dtype=getattr(torch, dtype), device=device)
    first = (-many.data_ptr() % 64) // many.element_size() + begin
    return many[first : first + int(np.prod(shape))].reshape(shape)


def test_tensors_of_pytorch_are_checked_by_the_compiled_function(scaled, monkeypatch):
    a, b = of_torch(), of_torch()
    monkeypatch.setattr(scaled._binder, "bind", lambda given: pytest.fail("was checked twice"))
    scaled(a, b)
    assert (b == 21).all()


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({}, None, "scale takes 2 tensors"),
        ({}, {"shape": (3,)}, r"B has the shape \(200,\); got \(3,\)"),
        ({"shape": (10, 20)}, {}, r"A has the shape \(200,\); got \(10, 20\)"),
        ({"dtype": "float64"}, {}, "A is float32; got float64"),
        ({"dtype": "int32"}, {}, "A is float32; got int32"),
        ({}, {"begin": 1}, "B must start at a multiple of 64 bytes"),
        ({"device": "meta"}, {}, "A cannot be taken over from Tensor"),
    ],
)
def test_tensors_of_pytorch_that_do_not_fit(scaled, first, second, message):
    with pytest.raises(InputError, match=message):
        scaled(*(of_torch(**each) for each in (first, second) if each is not None))


def test_tensors_of_pytorch_that_are_not_dense_or_not_of_one_size(scaled, store):
    with pytest.raises(InputError, match="B must be dense"):
        scaled(of_torch(), of_torch((2 * SIZE,))[::2])
    exe = tile.compile(add, store=store)
    exe(of_torch((5, 16)), of_torch((5, 16)), of_torch((5, 16)))
    with pytest.raises(InputError, match=r"n is 6 in \w+ and 5 in \w+"):
        exe(of_torch((5, 16)), of_torch((5, 16)), of_torch((6, 16)))


def test_numbers_beside_tensors_of_pytorch(store):
    @T.prim_func
    def more(X: T.Buffer((SIZE,), "int32"), by: T.int32, Y: T.Buffer((SIZE,), "int32")):
        with tile.kernel(1):
            x = tile.fragment((SIZE,), "int32")
            tile.copy(X, x)
            with tile.parallel(SIZE) as i:
                x[i] = x[i] + by
            tile.copy(x, Y)

    exe = tile.compile(more, store=store)
    x, y = of_torch(dtype="int32"), of_torch(dtype="int32")
    exe(x, 4, y)
    assert (y == 11).all()
    for number, message in ((1 << 40, "by is int32"), (1.5, "by is an integer"), (True, "by is an integer")):
        with pytest.raises(InputError, match=message):
            exe(x, number, y)


def test_what_it_says_of_itself(scaled):
    assert (scaled.name, str(scaled.target.kind.name)) == ("scale", "llvm")
    assert "define" in scaled.source
    assert scaled.explain() == tile.explain(scale, "llvm")
    seconds = scaled.time(poisoned(), poisoned(), repeat=7)
    assert len(seconds) == 7 and min(seconds) > 0


def test_one_compilation_on_a_cpu(store, monkeypatch):
    compiled = []
    own = tvm.compile

    def counting(*arguments, **options):
        compiled.append(arguments)
        return own(*arguments, **options)

    monkeypatch.setattr(tvm, "compile", counting)
    a, b = np.random.default_rng(3).standard_normal((2, 64, 64), dtype="float32")
    for _ in range(3):
        out = poisoned((64, 64))
        tile.compile(matmul(m=64, n=64, k=64), store=store)(a, b, out)
        np.testing.assert_allclose(out, a @ b.T, rtol=1e-4, atol=1e-4)
    assert len(compiled) == 1
    tile.compile(matmul(m=64, n=64, k=64), {"kind": "llvm", "mcpu": "x86-64-v3"}, store=store)
    assert len(compiled) == 2
    ((path, *_), *_) = store.entries()
    path.write_bytes(path.read_bytes()[:-10])
    tile.compile(matmul(m=64, n=64, k=64), store=store)(a, b, out)
    assert len(compiled) == 3


def test_several_at_once(store):
    first, second = tile.compile_all([scale, matmul()], store=store)
    assert (first.name, second.name) == ("scale", "matmul")
    assert len(store.entries()) == 1
    out = poisoned()
    first(np.ones(SIZE, "float32"), out)
    assert (out == 3).all()
    with pytest.raises(TileError, match="names of their own, got scale, scale"):
        tile.compile_all([scale, scale], store=store)


# ---- CUDA ----------------------------------------------------------------------------------------------------------


def _has_compiler():
    try:
        return bool(nvcc.find_compiler())
    except TileError:
        return False


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="neither nvcc nor nvrtc on this machine")


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_a_cubin_without_a_gpu_and_only_once(store, monkeypatch, arch):
    target = {"kind": "cuda", "arch": arch}
    program = matmul(target, "bfloat16", 256, 256, 128)
    first = tile.compile(program, target, store)
    assert "__global__" in first.source
    ((path, *_),) = store.entries()
    assert path.read_bytes()[32:36] == b"\x7fELF"

    def refuse(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvcc, "_nvcc", refuse)
    monkeypatch.setattr(_tvm, "nvrtc_cubin", refuse)
    assert tile.compile(program, target, store).source == first.source


@pytest.mark.parametrize("func", [scale, matmul("cuda:sm_90a", "bfloat16", 256, 256, 128)], ids=["uniform", "roles"])
def test_hopper_waits_for_the_kernel_before_first(func):
    body = tile.lower(func, "cuda:sm_90a").script().partition("device_entry")[2]
    before, after = body.split('griddepcontrol("wait"')
    touched = ("A[", "B[", "C[", "cp.async", "cp_async")
    assert not any(name in before for name in touched) and any(name in after for name in touched)
    assert "griddepcontrol" not in tile.lower(func, "cuda:sm_80").script()


def test_no_gpu_to_run_on(store, monkeypatch):
    if tvm.cuda().exist:
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(nvcc, "cubin", lambda source, target, store: b"")
    exe = tile.compile(scale, "cuda", store)
    with pytest.raises(InputError, match="compiled for sm_90a; this machine has no GPU"):
        exe(poisoned(), poisoned())


def test_no_compiler_for_cuda(store, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    monkeypatch.setattr(_tvm, "nvrtc_version", lambda: None)
    nvcc.find_compiler.cache_clear()
    try:
        with pytest.raises(TileError, match=r"nvcc or nvrtc, and this machine has neither.*install the CUDA toolkit"):
            tile.compile(scale, "cuda", store)
    finally:
        nvcc.find_compiler.cache_clear()


def test_nvrtc_without_headers(store, monkeypatch):
    def headless(source, arch):
        raise RuntimeError("Cannot find CUDA headers in /usr.")

    monkeypatch.setattr(nvcc, "find_compiler", lambda: nvcc.Compiler(None, "13.0"))
    monkeypatch.setattr(_tvm, "nvrtc_cubin", headless)
    with pytest.raises(TileError, match=r"Cannot find CUDA headers in /usr\.; set CUDA_PATH"):
        tile.compile(scale, "cuda", store)


@needs_compiler
def test_source_that_the_compiler_refuses(store):
    target = resolve_target({"kind": "cuda", "arch": "sm_90a"})
    with pytest.raises(RuntimeError, match="error"):
        nvcc.cubin("__global__ void f() { undeclared; }", target, store)
    assert store.entries() == []


@pytest.mark.gpu
def test_on_a_gpu(cuda, store):
    exe = tile.compile(scale, "cuda", store)
    given = np.random.default_rng(5).standard_normal(SIZE, dtype="float32")
    out = poisoned()
    exe(given, out)
    np.testing.assert_array_equal(out, given * np.float32(3))
    there = tvm.runtime.tensor(poisoned(), cuda)
    exe(tvm.runtime.tensor(given, cuda), there)
    np.testing.assert_array_equal(there.numpy(), given * np.float32(3))
    assert min(exe.time(tvm.runtime.tensor(given, cuda), there)) > 0
    again = tvm.runtime.tensor(poisoned(), cuda)
    exe.bind(tvm.runtime.tensor(given, cuda), again)()
    np.testing.assert_array_equal(again.numpy(), there.numpy())
    with pytest.raises(InputError, match="B would be copied for each run; bind takes tensors of cuda"):
        exe.bind(tvm.runtime.tensor(given, cuda), out)
    with pytest.raises(InputError, match="scale runs on cuda; A is on cpu"):
        exe(tvm.runtime.tensor(given), there)


@pytest.mark.gpu
def test_kernels_in_a_row_wait_for_each_other(cuda, store):
    exe = tile.compile(turn, "cuda", store)
    given = np.arange(SIZE * 128, dtype="int32")
    a, b = tvm.runtime.tensor(given, cuda), tvm.runtime.tensor(np.zeros_like(given), cuda)
    for _ in range(200):
        exe(a, b)
        exe(b, a)
    np.testing.assert_array_equal(a.numpy(), given + 400)


@pytest.mark.gpu
def test_a_tensor_of_pytorch_stays_on_its_stream(cuda, store):
    torch = pytest.importorskip("torch")
    exe = tile.compile(scale, "cuda", store)
    given, out = torch.ones(SIZE, device="cuda"), torch.full((SIZE,), float("nan"), device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        given.mul_(2)
        exe(given, out)
        result = out + 1
    stream.synchronize()
    assert (result == 7).all()


def test_tensors_without_a_row(tmp_path):
    @T.prim_func
    def func(a: T.handle, b: T.handle):
        m = T.int32()
        A = T.match_buffer(a, (m, 16), "float32")
        B = T.match_buffer(b, (m, 16), "float32")
        with tile.kernel(tile.cdiv(m, 8)) as i:
            x = tile.shared((8, 16), "float32")
            tile.copy(A[i * 8, 0], x)
            tile.copy(x, B[i * 8, 0])

    executable = tile.compile(func, "llvm", Cache(tmp_path))
    for _ in range(20):  # of which some lie where they would be taken in place
        executable(np.zeros((0, 16), "float32"), np.zeros((0, 16), "float32"))
