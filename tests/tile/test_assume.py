"""`tile.assume`: what it is read as, what targets make of it, and which calls are refused."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from interpreter import Fault, interpret
from tvm.error import DiagnosticError
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import InputError, ScheduleError, TileError
from tvm_axe.lower.tiles import lowered_on
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.nodes import Copy


@T.prim_func
def matmul(a_: T.handle, b_: T.handle, c_: T.handle):
    m, n, k = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a_, (m, k), "float16")
    B = T.match_buffer(b_, (k, n), "float16")
    C = T.match_buffer(c_, (m, n), "float16")
    bk = tile.knob("bk", (64, 32))
    tile.assume(k % bk == 0)
    tile.assume(n % 8 == 0)
    with tile.kernel(tile.cdiv(m, 128), tile.cdiv(n, 128)) as (i, j):
        a = tile.shared((128, bk), "float16")
        b = tile.shared((bk, 128), "float16")
        c = tile.fragment((128, 128), "float32")
        tile.fill(c, 0)
        for s in tile.pipelined(k // bk):
            tile.copy(A[i * 128, s * bk], a)
            tile.copy(B[s * bk, j * 128], b)
            tile.gemm(a, b, c)
        tile.copy(c, C[i * 128, j * 128])


@T.prim_func
def unsure(a_: T.handle, b_: T.handle, c_: T.handle):
    """The same without assumptions."""
    m, n, k = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a_, (m, k), "float16")
    B = T.match_buffer(b_, (k, n), "float16")
    C = T.match_buffer(c_, (m, n), "float16")
    with tile.kernel(tile.cdiv(m, 128), tile.cdiv(n, 128)) as (i, j):
        a = tile.shared((128, 64), "float16")
        b = tile.shared((64, 128), "float16")
        c = tile.fragment((128, 128), "float32")
        tile.fill(c, 0)
        for s in tile.pipelined(tile.cdiv(k, 64)):
            tile.copy(A[i * 128, s * 64], a)
            tile.copy(B[s * 64, j * 128], b)
            tile.gemm(a, b, c)
        tile.copy(c, C[i * 128, j * 128])


@T.prim_func
def scaled(a_: T.handle, b_: T.handle, first: T.int32):
    """Rows from `first` on, doubled."""
    n = T.int32()
    A = T.match_buffer(a_, (16, n), "float32")
    B = T.match_buffer(b_, (8, n), "float32")
    tile.assume(n % 4 == 0)
    tile.assume(n % 6 == 0)
    tile.assume(n >= 12)
    tile.assume(first <= 8)
    tile.assume(0 <= first)  # noqa: SIM300
    with tile.kernel(8, tile.cdiv(n, 48)) as (i, j):
        x = tile.fragment((48,), "float32")
        tile.copy(A[first + i, j * 48], x)
        with tile.parallel(48) as t:
            x[t] = x[t] * 2.0
        tile.copy(x, B[i, j * 48])


@T.prim_func
def doubled(a_: T.handle, b_: T.handle):
    n = T.int32()
    A = T.match_buffer(a_, (32, n), "float32")
    B = T.match_buffer(b_, (32, n), "float32")
    tile.assume(n % 4 == 0)
    with tile.kernel(tile.cdiv(n, 128)) as j:
        x = tile.fragment((32, 128), "float32")
        tile.copy(A[0, j * 128], x)
        with tile.parallel(32, 128) as (s, t):
            x[s, t] = x[s, t] * 2.0
        tile.copy(x, B[0, j * 128])


doubled_unsure = tvm.script.from_source(
    "\n".join(line for line in doubled.script().splitlines() if "axe.assume" not in line)
)


def drawn(m, n, k):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-3, 4, shape).astype("float16") for shape in ((m, k), (k, n)))
    return a, b, np.full((m, n), np.nan, "float16")


def test_it_prints_and_parses_back():
    assert tvm_ffi.structural_equal(tvm.script.from_source(scaled.script()), scaled)


def test_what_is_read():
    program = tile.read(matmul, {"bk": 32})
    assert [str(each) for each in program.assumptions] == ["k % 32 == 0", "n % 8 == 0"]
    assert "    assume n % 8 == 0" in str(program).splitlines()
    lines = tile.explain(matmul, "llvm").splitlines()
    at = lines.index("assumptions")
    assert lines[at + 1 : at + 3] == [
        "    k % 64 == 0  (calls with other sizes are refused)",
        "    n % 8 == 0  (calls with other sizes are refused)",
    ]


def test_what_is_proved():
    program = tile.read(scaled)
    analyzer = program.analyzer()
    n, first = (each.var for each in (program.assumptions[0], program.assumptions[3]))
    assert analyzer.can_prove(n % 12 == 0) and not analyzer.can_prove(n % 24 == 0)
    assert analyzer.can_prove(n >= 12) and not analyzer.can_prove(n >= 13)
    assert analyzer.can_prove(first <= 8) and not analyzer.can_prove(first <= 7)
    assert analyzer.can_prove(first >= 0) and not analyzer.can_prove(first >= 1)


def test_a_region_ends_inside_where_its_extent_divides():
    loads = [node for node in tile.read(matmul).nodes() if isinstance(node, Copy)]
    program = tile.read(matmul)
    assert [load.src.overruns(program.analyzer()) for load in loads[:2]] == [(0,), (1,)]
    again = tile.read(unsure)
    loads = [node for node in again.nodes() if isinstance(node, Copy)]
    assert [load.src.overruns(again.analyzer()) for load in loads[:2]] == [(0, 1), (0, 1)]


@pytest.mark.parametrize("sizes", [(1, 8, 64), (100, 136, 192), (129, 8, 128)])
@pytest.mark.parametrize("bk", [64, 32])
def test_values(tmp_path, sizes, bk):
    a, b, c = drawn(*sizes)
    tile.compile(matmul, "llvm", Cache(tmp_path), knobs={"bk": bk})(a, b, c)
    np.testing.assert_array_equal(c.astype("float64"), a.astype("float64") @ b.astype("float64"))
    np.testing.assert_array_equal(interpret(tile.read(matmul, {"bk": bk}), a, b, np.full_like(c, np.nan))[2], c)


def test_scalars(tmp_path):
    exe = tile.compile(scaled, "llvm", Cache(tmp_path))
    a = np.arange(16 * 60, dtype="float32").reshape(16, 60)
    b = np.full((8, 60), np.nan, "float32")
    exe(a, b, 8)
    np.testing.assert_array_equal(b, 2 * a[8:])
    with pytest.raises(InputError, match=r"scaled: first is 9; the program has tile\.assume\(first <= 8\)"):
        exe(a, b, 9)
    with pytest.raises(InputError, match=r"scaled: first is -1; the program has tile\.assume\(first >= 0\)"):
        exe(a, b, -1)
    with pytest.raises(InputError, match=r"n is 62 in A; the program has tile\.assume\(n % 4 == 0\)"):
        exe(np.zeros((16, 62), "float32"), np.zeros((8, 62), "float32"), 0)
    with pytest.raises(InputError, match=r"n is 0 in A; the program has tile\.assume\(n >= 12\)"):
        exe.bind(np.zeros((16, 0), "float32"), np.zeros((8, 0), "float32"), 0)


def test_a_call_of_another_size_is_refused(tmp_path):
    exe = tile.compile(matmul, "llvm", Cache(tmp_path))
    with pytest.raises(InputError, match=r"matmul: k is 100 in A; the program has tile\.assume\(k % 64 == 0\)"):
        exe(*drawn(8, 8, 100))
    with pytest.raises(InputError, match=r"matmul: n is 9 in B; the program has tile\.assume\(n % 8 == 0\)"):
        exe(*drawn(8, 9, 64))
    with pytest.raises(Fault, match="assumes k % 64 == 0"):
        interpret(tile.read(matmul), *drawn(8, 8, 100))


def test_tma_stays():
    assert "a producer warp and 2 warpgroups" in tile.explain(matmul, "cuda:sm_90a")
    why = tile.explain(unsure, "cuda:sm_90a")
    assert "uniform: every warp loads and computes" in why
    assert "which isn't known to be a multiple of 16; tile.assume(k % 8 == 0) says so" in why


def test_loads_run_ahead_by_16_bytes():
    assert "2 stages of cp.async" in tile.explain(matmul, "cuda:sm_80")
    assert "loop s: loads don't run ahead  (none can)" in tile.explain(unsure, "cuda:sm_80")


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_elements_are_vectors(target, tmp_path):
    """Where rows begin at multiples of 16 bytes, a thread loads as many at once."""
    sources = [tile.compile(func, target, Cache(tmp_path)).source for func in (doubled, doubled_unsure)]
    assert ["float4" in source for source in sources] == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("roles", ["", "uniform"])
def test_on_a_gpu(cuda, tmp_path, roles):
    func = (
        matmul
        if not roles
        else tvm.script.from_source(matmul.script().replace('"axe.grid": 0', f'"axe.grid": 0, "axe.roles": "{roles}"'))
    )
    exe = tile.compile(func, "cuda", Cache(tmp_path))
    for sizes in ((1, 8, 64), (100, 136, 192), (300, 520, 640)):
        a, b, c = drawn(*sizes)
        exe(a, b, c)
        np.testing.assert_array_equal(c.astype("float64"), a.astype("float64") @ b.astype("float64"))


CONDITIONS = {
    "n % 4 == 1": "valid are x % number == 0",
    "n % 1 == 1": "which no number is",
    "n * 2 <= 8": "valid are x % number == 0",
    "n == 64": "valid are x % number == 0",
    "n < 4, n % 4 == 0, n > 0": r"no number n is as n <= 3 and n % 4 == 0 and n >= 1",
    "3": "assume: takes a condition, such as k % 64 == 0; got 3",
}


@pytest.mark.parametrize("conditions", CONDITIONS)
def test_what_is_no_assumption(conditions):
    lines = "\n".join(f"    tile.assume({condition})" for condition in conditions.split(", "))
    source = (
        "@T.prim_func\ndef func(a_: T.handle):\n    n = T.int32()\n"
        f'    A = T.match_buffer(a_, (4, n), "float32")\n{lines}\n'
        '    with tile.kernel(4) as i:\n        x = tile.fragment((8,), "float32")\n        tile.fill(x, 0)\n'
        "        tile.copy(x, A[i, 0])\n"
    )
    with pytest.raises((TileError, DiagnosticError)) as refused:
        tile.read(tvm.script.from_source(source, extra_vars={"tile": tile, "T": T}))
    assert CONDITIONS[conditions] in str(refused.value)


def test_what_always_holds_is_no_assumption():
    """As ``k % bk == 0`` where the knob is 1; found by random programs."""
    source = doubled.script().replace("n % 4 == 0", "n % 1 == 0")
    assert source != doubled.script()
    assert tile.read(tvm.script.from_source(source)).assumptions == ()


def test_assumptions_are_of_what_callers_give():
    source = matmul.script().replace('"axe.assume", n % 8 == 0', '"axe.assume", A[0, 0] > T.float16(0)')
    with pytest.raises(TileError, match=r"assume: .*; valid are x % number == 0 and comparisons of x with a number"):
        tile.read(tvm.script.from_source(source))
    lines = [line for line in matmul.script().splitlines() if "axe.assume" not in line]
    at = next(i for i, line in enumerate(lines) if "for s in" in line) + 1
    lines.insert(at, lines[at].partition("T.")[0] + 'T.call_extern("int32", "axe.assume", s % 4 == 0)')
    with pytest.raises(TileError, match="s % 4 == 0: s is no extent, stride or scalar parameter; there are: k, m"):
        tile.read(tvm.script.from_source("\n".join(lines)))


def test_a_kernel_of_another_function_has_no_assumptions():
    with pytest.raises(ScheduleError, match="it assumes n % 4 == 0, n % 6 == 0, n >= 12, first <= 8, first >= 0"):
        lowered_on(tile.read(scaled), resolve_target("llvm"), {}, {})
