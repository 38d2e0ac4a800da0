"""`tile.print`: the same lines on every target, each element once."""

import subprocess
import sys

import numpy as np
import pytest
import tvm
from interpreter import interpret
from tvm.script import tirx as T

from tvm_axe import stream, tile
from tvm_axe.errors import TileError
from tvm_axe.machines import nvcc
from tvm_axe.machines.cache import Cache


@T.prim_func
def everything(X: T.Buffer((6, 8), "float32"), starts: T.Buffer((2,), "int32"), Y: T.Buffer((6, 8), "float16")):
    with tile.kernel(2) as b:
        x = tile.fragment((4, 8), "float32")
        s = tile.shared((4, 8), "float16")
        c = tile.local((2,), "int32")
        most = tile.fragment((4,), "float32")
        start = starts[b]
        c[0] = start
        c[1] = 3
        for k in range(2):
            c[1] = c[1] + 1
            tile.print("k 50%", k + start, block=(1,))
        tile.print('"count"', c[b])
        tile.print("counts", c, block=(0,))
        tile.print("is last", b == 1)
        tile.copy(X[b * 4, 0], x)
        tile.max(x, most)
        tile.copy(x, s)
        if b == 1:
            tile.print("most", most)
            tile.print("s", s[1:3, 2])
            tile.print("X", X[b * 4 + 1 : b * 4 + 4, 0:2])  # the tensor ends within it
        tile.print("x", x[1, 3])
        tile.copy(s, Y[b * 4, 0])


@T.prim_func
def product(A: T.Buffer((256, 256), "float16"), B: T.Buffer((256, 128), "float16"), C: T.Buffer((256, 128), "float16")):
    with tile.kernel(2, 1) as (m, n):
        a = tile.shared((128, 64), "float16")
        b = tile.shared((64, 128), "float16")
        c = tile.fragment((128, 128), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(4, stages=2):
            tile.copy(A[m * 128, k * 64], a)
            tile.copy(B[k * 64, n * 128], b)
            tile.gemm(a, b, c)
            tile.print("k", k)
            tile.print("a", a[5, 7], block=(1, 0))
        tile.print("sums", c[2:5, 8:11], block=(1, 0))
        tile.copy(c, C[m * 128, n * 128])


def _has_compiler():
    try:
        return bool(nvcc.find_compiler())
    except TileError:
        return False


def arrays_of(func):
    rng = np.random.default_rng(0)
    arrays = [np.zeros([int(e) for e in p.shape], str(p.dtype)) for p in func.params]
    for array in arrays[:-1]:
        array[...] = rng.integers(-3, 4, array.shape) if array.dtype.kind == "f" else np.arange(len(array))
    return arrays


def expected(func, capfd):
    capfd.readouterr()
    interpret(func, *arrays_of(func))
    return sorted(capfd.readouterr().out.splitlines())


def test_interpreter(capfd):
    lines = expected(everything, capfd)
    assert {"k 50% = 2 in block (1)", "counts[1] = 5 in block (0)", "is last = 1 in block (1)"} <= {*lines}
    assert len(lines) == 2 + 2 + 2 + 2 + 4 + 2 + 2 + 2  # of X one row is there


@pytest.mark.parametrize("func", [everything, product])
def test_llvm(func, capfd):
    """Of each block in the order of its statements and elements; blocks run beside each other."""
    wanted = expected(func, capfd)
    compiled = tile.compile(func, "llvm")
    capfd.readouterr()
    compiled(*arrays_of(func))
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == wanted
    ours = [line for line in lines if (line.startswith("k") and line.endswith("(1)")) or line.endswith("(1, 0)")]
    assert [line for line in ours if line.startswith("k")] == sorted(line for line in ours if line.startswith("k"))


def test_lines_stand_among_those_of_python(tmp_path):
    """Where the standard output is a file, which C writes a block at a time."""
    (tmp_path / "said.py").write_text(
        "import numpy as np\nfrom tvm.script import tirx as T\nfrom tvm_axe import tile\n"
        "@T.prim_func\ndef one(X: T.Buffer((1,), 'int64')):\n    with tile.kernel(1) as b:\n"
        "        tile.print('x', X[0])\n        tile.print('b', b)\n"
        "run = tile.compile(one)\nprint('before', flush=True)\nrun(np.array([-(2**40)]))\nprint('behind')\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "said.py"], capture_output=True, text=True, check=True)
    said = f"before\nx[0] = {-(2**40)} in block (0)\nb = 0 in block (0)\nbehind\n"
    assert done.stdout == said


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float8_e4m3fn", "int8", "uint8", "uint32", "uint64", "bool"])
def test_every_type(dtype, capfd):
    func = typed(dtype)
    array = np.arange(2).astype(dtype)
    tile.compile(func, "llvm")(tvm.runtime.tensor(array) if dtype == "float8_e4m3fn" else array)
    assert capfd.readouterr().out == "x[0] = 0 in block (0)\nx[1] = 1 in block (0)\n"
    if dtype != "float8_e4m3fn":
        tile.lower(func, "cuda:sm_80")
    tile.lower(func, "cuda:sm_90a")


def typed(dtype):
    @T.prim_func
    def func(X: T.Buffer((2,), dtype)):
        with tile.kernel(1) as _b:
            tile.print("x", X)

    return func


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_cuda_compiles(target, tmp_path):
    """An element's owner prints it, and of a product the first consumer prints numbers."""
    if not _has_compiler():
        pytest.skip("neither nvcc nor nvrtc on this machine")
    for func in (everything, product):
        compiled = tile.compile(func, target, Cache(tmp_path))
        assert "printf(" in compiled.source
        roles = "a producer warp" if (func, target) == (product, "cuda:sm_90a") else "uniform"
        assert roles in compiled.explain()
        assert "slow:" not in compiled.explain()  # of its memory the arguments of printf are a part


@pytest.mark.gpu
@pytest.mark.parametrize("func", [everything, product])
def test_cuda(cuda, func, capfd):
    wanted = expected(func, capfd)
    compiled = tile.compile(func, "cuda")
    capfd.readouterr()
    compiled(*arrays_of(func))
    tvm.runtime.device("cuda").sync()
    assert sorted(capfd.readouterr().out.splitlines()) == wanted


def test_it_parses_back():
    assert tile.read(tvm.script.from_source(everything.script())).__str__() == str(tile.read(everything))


def test_what_is_refused():
    with pytest.raises(TileError, match="the label is a text of printable ASCII, got 'é'"):
        tile.print("é", 3)
    with pytest.raises(TileError, match="takes a tile, a slice of one, an element or a number, got list"):
        tile.print("x", [])

    @T.prim_func
    def block(X: T.Buffer((2,), "int32")):
        with tile.kernel(1, 2) as (_b, _c):
            tile.print("x", X, block=(0,))

    with pytest.raises(TileError, match="print of 'x': block has 1 coordinates, the grid 2"):
        tile.read(block)

    @T.prim_func
    def inside(X: T.Buffer((2,), "int32")):
        with tile.kernel(1) as _b, tile.parallel(2) as i:
            tile.print("x", X[i])

    with pytest.raises(TileError, match="print in its body; valid is a print before or behind it"):
        tile.read(inside)

    @T.prim_func
    def unwritten(X: T.Buffer((2,), "int32")):
        with tile.kernel(1) as _b:
            x = tile.fragment((2,), "int32")
            tile.print("x", x)
            tile.copy(X, x)

    with pytest.raises(TileError, match="print x as 'x'"):
        tile.read(unwritten)

    @T.prim_func
    def spread(X: T.Buffer((2,), "int32")):
        with tile.kernel(1) as _b:
            x = tile.fragment((2,), "int32")
            tile.copy(X, x)
            tile.print("x", x[0] + 1)

    with pytest.raises(TileError, match="a scalar is read from fragment x"):
        tile.read(spread)
    with pytest.raises(TileError, match="gfx942 prints nothing; copy it to a tensor"):
        tile.lower(everything, "rocm:gfx942")
    with pytest.raises(Exception, match="streams print nothing"):
        stream.from_tile(product, stream.Accelerator())
