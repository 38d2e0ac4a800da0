"""Parameters with strides: right on every target, refused where they can't be, and checked in calls.

Data is drawn afresh, outputs are poisoned, and memory that is no element of a tensor is looked at afterwards.
"""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import numpy as np
import on_host
import pytest
import tvm
from interpreter import interpret
from judging import drawn, judge, wanted
from on_cpu import EPSILONS
from strided import Spread, like
from test_fuzz import lowered
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm, tile
from tvm_axe.errors import InputError, StreamError, TileError
from tvm_axe.machines import nvcc, resolve_target
from tvm_axe.machines.cache import Cache
from tvm_axe.stream import Accelerator, from_tile
from tvm_axe.tile.mesh import is_mesh_tensor
from tvm_axe.tile.strides import overlap, row_major, strides_of
from tvm_axe.tile.targets import llvm as cpu

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Compiled programs don't fill the user's cache."""
    return Cache(tmp_path_factory.mktemp("cache"))


def random(shape, dtype="float32"):
    """Random numbers."""
    return np.random.default_rng().standard_normal(shape).astype(dtype)


def poisoned(shape, dtype="float32"):
    """What nothing has written."""
    return np.full(shape, np.nan).astype(dtype)


def product(
    strides_a: tuple = (1536, 1), strides_b: tuple = (264, 1), strides_c: tuple = (272, 1)
) -> tirx.PrimFunc:
    """A 512 x 256 product over 512 terms, of tensors with constant strides."""

    @T.prim_func
    def product(
        A: T.Buffer((512, 512), "float16", strides=strides_a),
        B: T.Buffer((512, 256), "float16", strides=strides_b),
        C: T.Buffer((512, 256), "float16", strides=strides_c),
    ):
        with tile.kernel(4, 2) as (i, j):
            a = tile.shared((128, 64), "float16")
            b = tile.shared((64, 128), "float16")
            c = tile.fragment((128, 128), "float32")
            tile.fill(c, 0)
            for k in tile.pipelined(8):
                tile.copy(A[i * 128, k * 64], a)
                tile.copy(B[k * 64, j * 128], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[i * 128, j * 128])

    return product


def open_product(divisor: int) -> tirx.PrimFunc:
    """The same of any number of rows, of tensors whose strides are variables, multiples of a number."""

    @T.prim_func
    def product(a_: T.handle, b_: T.handle, c_: T.handle):
        m, lda, ldb, ldc = T.int32(), T.int32(), T.int32(), T.int32()
        A = T.match_buffer(a_, (m, 512), "float16", strides=(lda, 1))
        B = T.match_buffer(b_, (512, 256), "float16", strides=(ldb, 1))
        C = T.match_buffer(c_, (m, 256), "float16", strides=(ldc, 1))
        tile.assume(tirx.all(lda % divisor == 0, ldb % divisor == 0, ldc % divisor == 0))
        with tile.kernel(tile.cdiv(m, 128), 2) as (i, j):
            a = tile.shared((128, 64), "float16")
            b = tile.shared((64, 128), "float16")
            c = tile.fragment((128, 128), "float32")
            tile.fill(c, 0)
            for k in tile.pipelined(8):
                tile.copy(A[i * 128, k * 64], a)
                tile.copy(B[k * 64, j * 128], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[i * 128, j * 128])

    return product


@T.prim_func
def added(a: T.handle, B: T.Buffer((48, 64), "float32", strides=(1, 48)), c: T.handle, d: T.handle):
    """Columns of a matrix, a transposed one and a row for all, each moved in another way."""
    m, lda, ldc = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, (m, 64), "float32", strides=(lda, 1))
    C = T.match_buffer(c, (m, 64), "float32", strides=(ldc, 1))
    D = T.match_buffer(d, (m, 64), "float32", strides=(0, 1))
    with tile.kernel(tile.cdiv(m, 16)) as i:
        x = tile.fragment((16, 64), "float32")
        y = tile.shared((16, 64), "float32")
        tile.copy(A[i * 16, 0], x)
        tile.copy(B[i * 16, 0], y)
        with tile.parallel(16, 64) as (r, k):
            if i * 16 + r < m:
                x[r, k] = x[r, k] + y[r, k] + D[i * 16 + r, k]
        tile.copy(x, C[i * 16, 0])


@T.prim_func
def scattered(
    X: T.Buffer((24, 32), "float32", strides=(40, 1)),
    places: T.Buffer((24,), "int32", strides=(2,)),
    Y: T.Buffer((24, 32), "float32", strides=(1, 25)),
    total: T.Buffer((4, 32), "float32", strides=(64, 2)),
    largest: T.Buffer((4,), "int32", strides=(3,)),
    once: T.Buffer((6,), "int32", strides=(5,)),
):
    """Rows gathered from and stored to where a table says, sums and maxima of elements, and a swap."""
    with tile.kernel(3) as i:
        rows = tile.shared((8, 32), "float32")
        with tile.parallel(8, 32) as (r, k):
            rows[r, k] = X[places[i * 8 + r], k]
        with tile.parallel(8, 32, distinct=True) as (r, k):
            Y[places[i * 8 + r], k] = rows[r, k] * 2.0
        with tile.parallel(8, 32) as (r, k):
            tile.atomic_add(rows[r, k], total[places[i * 8 + r] % 4, k])
        with tile.parallel(8) as r:
            tile.atomic_max(places[i * 8 + r], largest[places[i * 8 + r] % 4])
        with tile.parallel(1) as r:
            tile.atomic_cas(0, i + 1, once[i * 2])


@T.prim_func
def signalled(
    A: T.Buffer((8, 64), "float32", strides=(80, 1)),
    B: T.Buffer((8, 64), "float32", strides=(72, 1)),
    turn: T.int32,
    ready: T.Buffer((8,), "int32", strides=(3,)),
    done: T.Buffer((8,), "int32", strides=(2,)),
):
    with tile.kernel(8) as i:
        a = tile.fragment((1, 64), "float32")
        tile.wait(ready[i], turn)
        tile.copy(A[i, 0], a)
        with tile.parallel(1, 64) as (x, y):
            a[x, y] = a[x, y] * 2.0
        tile.copy(a, B[i, 0])
        tile.signal(done[i], turn)


@T.prim_func
def turned(a: T.handle, b: T.handle):
    """A transposition that is made by strides, of extents that callers give."""
    m, n = T.int32(), T.int32()
    A = T.match_buffer(a, (m, n), "float32", strides=(1, m))
    B = T.match_buffer(b, (m, n), "float32", strides=(n * 2, 1))
    with tile.kernel(m, n) as (i, j), tile.parallel(1) as k:
        B[i, j + k] = A[i, j + k]


def on_llvm(func: tirx.PrimFunc, spreads: list[Any], check_bounds: bool = False) -> None:
    """Run on views of their memory, of which nothing else is written; numbers are passed on."""
    target = resolve_target({"kind": "llvm"}, threads=2)
    built = tvm.compile(cpu.lower(cpu.decide(tile.read(func), target), check_bounds=check_bounds), target=target)
    given = [_tvm.as_tensor(each.view) if isinstance(each, Spread) else each for each in spreads]
    built[str(func.attrs["global_symbol"])](*given)
    for each in spreads:
        if isinstance(each, Spread):
            each.check()


def beside_the_interpreter(func: tirx.PrimFunc, spreads: list[Any]) -> None:
    """Run with and without bounds checks, and compare with the interpreter, of which every bit is the same."""
    arrays = [each.view if isinstance(each, Spread) else each for each in spreads]
    expected = interpret(func, *arrays)
    for check_bounds in (False, True):
        own = [like(each.view) if isinstance(each, Spread) else each for each in spreads]
        on_llvm(func, own, check_bounds)
        for each, want in zip([each for each in own if isinstance(each, Spread)], expected, strict=True):
            np.testing.assert_array_equal(each.view, want.astype(each.view.dtype))


# ---- What strides are ------------------------------------------------------------------------------------------------


def test_strides_are_read():
    params = tile.read(added).params
    assert [str(each) for each in params] == [
        "global A: float32[m, 64] with strides (lda, 1)",
        "global B: float32[48, 64] with strides (1, 48)",
        "global C: float32[m, 64] with strides (ldc, 1)",
        "global D: float32[m, 64] with strides (0, 1)",
    ]
    assert [strides_of(each) for each in params[1:4:2]] == [(1, 48), (0, 1)]


def test_row_major_order_is_no_strides():
    @T.prim_func
    def func(A: T.Buffer((4, 8), "int32", strides=(8, 1)), B: T.Buffer((4, 8), "int32")):
        with tile.kernel(1), tile.parallel(4, 8) as (i, j):
            B[i, j] = A[i, j]

    params = tile.read(func).params
    assert [each.strides for each in params] == [None, None]
    assert {strides_of(each) for each in params} == {(8, 1)} == {row_major((4, 8))}


def test_programs_print_and_parse_back():
    for func in (added, scattered, signalled, turned, open_product(8)):
        tvm.ir.assert_structural_equal(tvm.script.from_source(func.script()), func)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_overlap_agrees_with_enumeration_where_it_says_no(rank):
    """What isn't refused has every element at a place of its own; what is in nested order isn't refused."""
    for extents in itertools.product((1, 2, 3), repeat=rank):
        for strides in itertools.product((0, 1, 2, 3, 5, 9), repeat=rank):
            places = sum(np.indices(extents)[d] * strides[d] for d in range(rank))
            if overlap(extents, strides) is None:
                assert len(np.unique(places)) == places.size
        for order in itertools.permutations(range(rank)):
            strides, step = [0] * rank, 1
            for dimension in order:
                strides[dimension], step = step, step * extents[dimension]
            assert overlap(extents, strides) is None


# ---- Right on a CPU --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 37, 48])
def test_views_on_llvm(store, rows):
    def views(numbers):
        a, b, d = (numbers(shape) for shape in ((rows, 64), (48, 64), (1, 64)))
        spreads = [
            Spread(a, (100, 1)),
            Spread(b, (1, 48)),
            Spread(poisoned((rows, 64)), (67, 1)),
            Spread(np.broadcast_to(d, (rows, 64)), (0, 1)),
        ]
        return spreads, a.astype("float64") + b[:rows] + d

    whole, _ = views(lambda shape: np.random.default_rng().integers(-99, 99, shape).astype("float32"))
    beside_the_interpreter(added, whole)
    spreads, expected = views(random)
    tile.compile(added, "llvm", store)(*(each.view for each in spreads))
    for each in spreads:
        each.check()
    np.testing.assert_allclose(spreads[2].view, expected, rtol=1e-5, atol=1e-5)


def test_gathers_scatters_atomics_on_llvm():
    places = np.random.default_rng().permutation(24).astype("int32")
    spreads = [
        Spread(np.random.default_rng().integers(-9, 9, (24, 32)).astype("float32"), (40, 1)),
        Spread(places, (2,)),
        Spread(poisoned((24, 32)), (1, 25)),
        Spread(np.ones((4, 32), "float32"), (64, 2)),
        Spread(np.full(4, -5, "int32"), (3,)),
        Spread(np.zeros(6, "int32"), (5,)),
    ]
    beside_the_interpreter(scattered, spreads)


def test_flags_on_llvm(store):
    a = random((8, 64))
    spreads = [
        Spread(a, (80, 1)),
        Spread(poisoned((8, 64)), (72, 1)),
        Spread(np.full(8, 7, "int32"), (3,)),
        Spread(np.zeros(8, "int32"), (2,)),
    ]
    tile.compile(signalled, "llvm", store)(*(each.view for each in spreads[:2]), 7, *(e.view for e in spreads[2:]))
    for each in spreads:
        each.check()
    np.testing.assert_array_equal(spreads[1].view, a * 2)
    assert (spreads[3].view == 7).all()


@pytest.mark.parametrize("m, n", [(1, 1), (5, 1), (1, 6), (7, 12)])
def test_strides_of_extents(store, m, n):
    a = random((m, n))
    spreads = [Spread(a, (1, m)), Spread(poisoned((m, n)), (2 * n, 1))]
    tile.compile(turned, "llvm", store)(*(each.view for each in spreads))
    for each in spreads:
        each.check()
    np.testing.assert_array_equal(spreads[1].view, a)


@pytest.mark.parametrize("rows, apart", [(512, (520, 1)), (130, (1536, 1))])
def test_products_on_llvm(store, rows, apart):
    a, b = random((rows, 512), "float16"), random((512, 256), "float16")
    spreads = [Spread(a, apart), Spread(b, (264, 1)), Spread(poisoned((rows, 256), "float16"), (264, 1))]
    tile.compile(open_product(8), "llvm", store)(*(each.view for each in spreads))
    for each in spreads:
        each.check()
    expected = a.astype("float64") @ b.astype("float64")
    error = np.abs(spreads[2].view - expected).max() / np.abs(expected).max()
    assert error < EPSILONS["float16"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "bfloat16", "bool", "int8"])
def test_types_of_few_bits(store, dtype):
    func = tvm.script.from_source(
        f"""@T.prim_func
def func(A: T.Buffer((6, 1, 9), "{dtype}", strides=(40, 11, 2)), B: T.Buffer((6, 1, 9), "{dtype}", strides=(9, 7, 1))):
    with tile.kernel(1), tile.parallel(6, 9) as (i, j):
        B[i, 0, j] = A[i, 0, j]
""",
        extra_vars={"tile": tile, "T": T},
    )
    a = np.random.default_rng().integers(0, 2, (6, 1, 9)).astype(np.zeros(0, "uint8").dtype)
    a = a.astype(_tvm.as_array(tvm.runtime.empty((1,), dtype)).dtype)
    spreads = [Spread(a, (40, 11, 2)), Spread(np.zeros_like(a), (9, 7, 1))]
    tile.compile(func, "llvm", store)(*(each.view for each in spreads))
    for each in spreads:
        each.check()
    np.testing.assert_array_equal(spreads[1].view, a)


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_on_llvm(store, seed):
    made = drawn(seed, "strided")
    program = made.program
    judge(tile.compile(program, "llvm", store), made, wanted(made, program))


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("func", [product(), open_product(8)], ids=["constants", "variables"])
def test_tma_has_the_strides(func):
    said = tile.explain(func, "cuda:sm_90a")
    assert "products are wgmma on tiles that TMA loads" in said and "stored by TMA" in said
    assert said.count("up to 8 elements at once  (its rows begin at multiples of 16 bytes)") == 3
    assert "slow" not in said


def test_maps_of_tma(store):
    """What the driver is told of a tensor: its extents, its strides in bytes, and boxes."""
    lowered = tile.lower(product(), "cuda:sm_90a")
    maps = _maps(lowered)
    assert "512, 512, 3072, 64, 128" in maps["A"] and "256, 512, 544, 64, 64" in maps["C"]
    assert "64, 512, 4, 528, 128, 64, 64, 2" in maps["B"]  # panels of rows that are 264 apart
    maps = _maps(tile.lower(open_product(8), "cuda:sm_90a"))
    assert "512, m, lda * 2, 64, 128" in maps["A"] and "256, 512, ldb * 2, 64, 64" in maps["B"]


def _maps(func: tirx.PrimFunc) -> dict[str, str]:
    target = resolve_target("cuda:sm_90a")
    mod = tirx.transform.BindTarget(target.with_host(tvm.target.Target("llvm")))(tvm.IRModule({"product": func}))
    pipeline, _, _ = tirx.get_tir_pipeline("tirx")
    text = pipeline(mod).script()
    return dict(re.findall(r"tensormap_encode_tiled\((\w+)_tensormap, [^,]*, [^,]*, ([^=]*), descriptor_dtype", text))


@pytest.mark.parametrize("func", [product(), open_product(8)], ids=["constants", "variables"])
def test_cp_async_where_rows_are_aligned(func):
    said = tile.explain(func, "cuda:sm_80")
    assert "stages of cp.async" in said and "slow" not in said


def test_what_is_slow_is_said():
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        said = tile.explain(open_product(2), target)
        assert "stages of cp.async" in said  # of 4 bytes
        assert (
            "global A: float16[m, 512] with strides (lda, 1): slow, 2 elements at a time  (its stride along dimension 0, "
            "lda, isn't known to be a multiple of 8; tile.assume(lda % 8 == 0) gives vectors of 16 bytes, and TMA)"
        ) in said
        said = tile.explain(product(strides_a=(1, 512), strides_b=(258, 1)), target)
        assert "with strides (1, 512): slow, an element at a time  (neighbours along its last dimension are 512" in said
        assert "(258, 1): slow, 2 elements at a time  (its stride along dimension 0, 258, is no multiple of 8; rows" in said
    assert "rows of A are 2 * lda bytes apart, which isn't known to be a multiple of 16; tile.assume(lda % 8 == 0)" in (
        tile.explain(open_product(2), "cuda:sm_90a")
    )
    said = tile.explain(product(strides_a=(1, 512)), "cuda:sm_90a")
    assert "neighbours along the last dimension of A are 512 elements apart, and TMA's are 1" in said
    said = tile.explain(product(strides_a=(0, 1)), "cuda:sm_90a")
    assert "rows of A are one row (stride 0 along dimension 0), and TMA's are apart" in said
    assert "an element at a time  (neighbours along its last dimension are 48" in tile.explain(added, "llvm")


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_compiled_for_gpus(store, target):
    try:
        nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exes = tile.compile_all([added, scattered, signalled], target, store)
        exes += [tile.compile(func, target, store) for func in (product(), product((1, 512)), open_product(8), turned)]
    assert all(exe.source for exe in exes)


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90a"])
def test_random_programs_lower_or_are_refused(target):
    assert lowered(range(20), target, "strided")


def summed(strides_x: tuple, strides_y: tuple, dtype: str) -> tirx.PrimFunc:
    """Rows by copies, by computed addresses and by a gather that runs ahead, added up."""

    @T.prim_func
    def summed(
        X: T.Buffer((48, 40), dtype, strides=strides_x),
        rows: T.Buffer((48,), "int32", strides=(2,)),
        Y: T.Buffer((48, 40), dtype, strides=strides_y),
    ):
        with tile.kernel(3, 2) as (i, j):
            a = tile.shared((16, 32), dtype)
            b = tile.fragment((16, 32), dtype)
            c = tile.fragment((16, 32), dtype)
            tile.fill(c, 0)
            tile.copy(X[i * 16, j * 32], b)
            for k in tile.pipelined(3, stages=2):
                tile.copy(X[k * 16, j * 32], a)
                with tile.parallel(16, 32) as (r, s):
                    c[r, s] = c[r, s] + a[r, s] + b[r, s]
            with tile.parallel(16, 32) as (r, s):
                if j * 32 + s < 40:
                    c[r, s] = c[r, s] + X[rows[i * 16 + r], j * 32 + s]
            tile.copy(c, Y[i * 16, j * 32])

    return summed


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize(
    "strides_x, strides_y", [((44, 1), (40, 1)), ((56, 1), (41, 1)), ((1, 48), (64, 1)), ((0, 1), (1, 50)), ((90, 2), (80, 2))]
)
def test_code_for_sm_80_on_the_host(tmp_path, strides_x, strides_y, dtype, early):
    func = summed(strides_x, strides_y, dtype)
    x, rng = np.random.default_rng().integers(-9, 9, (48, 40)).astype(dtype), np.random.default_rng()
    x = np.broadcast_to(x[:1], x.shape) if strides_x[0] == 0 else x
    spreads = {
        "X": Spread(x, strides_x),
        "rows": Spread(rng.integers(0, 48, 48).astype("int32"), (2,)),
        "Y": Spread(np.full((48, 40), -77).astype(dtype), strides_y),
    }
    expected = interpret(func, *(each.view for each in spreads.values()))
    mod = tvm.IRModule({"summed": tile.lower(func, "cuda:sm_80")})
    source = tvm.compile(mod, resolve_target("cuda:sm_80"), tir_pipeline="tirx").mod.imports[0].inspect_source()
    on_host.run(str(source), 6, {name: each.view for name, each in spreads.items()}, tmp_path, early)
    for (name, each), want in zip(spreads.items(), expected, strict=True):
        each.check()
        np.testing.assert_array_equal(each.view, want.astype(dtype if name != "rows" else "int32"), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", range(0, 30, 10))
def test_random_programs_on_a_gpu(cuda, store, sizes):
    programs = lowered(range(sizes, sizes + 10), "cuda", "strided")
    executables = tile.compile_all([program for _, program, _ in programs], "cuda", store)
    for executable, (made, _, expected) in zip(executables, programs, strict=True):
        judge(executable, made, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("func", [product(), product((1, 512)), product((0, 1)), open_product(8), open_product(2)])
def test_products_on_a_gpu(cuda, store, func):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    exe, strides = tile.compile(func, "cuda", store), [each.strides for each in tile.read(func).params]
    strides = [tuple(s if isinstance(s, int) else 776 for s in each) for each in strides]
    extents = [(512, 512), (512, 256), (512, 256)]
    rooms = [torch.randn(400000, device="cuda").half() for _ in extents]
    a, b, c = (room.as_strided(shape, apart) for room, shape, apart in zip(rooms, extents, strides))
    before = rooms[2].clone()
    before.as_strided(extents[2], strides[2]).fill_(0)
    exe(a, b, c)
    expected = a.double() @ b.double()
    error = (c.double() - expected).abs().max() / expected.abs().max()
    c.fill_(0)
    assert float(error) < EPSILONS["float16"] and torch.equal(rooms[2], before)


# ---- Calls -----------------------------------------------------------------------------------------------------------


@T.prim_func
def doubled(a: T.handle, b: T.handle):
    m, n, lda = T.int32(), T.int32(), T.int32()
    A = T.match_buffer(a, (m, n), "float32", strides=(lda, 1))
    B = T.match_buffer(b, (m, n), "float32", strides=(lda, 1))
    with tile.kernel(m, n) as (i, j), tile.parallel(1) as k:
        B[i, j + k] = A[i, j + k] * 2.0


REFUSED = {
    "other strides": (
        ((5, 8), (16, 1)),
        ((5, 8), (24, 1)),
        r"doubled: B has stride 24 along dimension 0, wanted is 16, which is lda in A; got the strides \(24, 1\) for B: "
        r"float32\[m, n\] with strides \(lda, 1\)",
    ),
    "another constant": (
        ((5, 8), (16, 2)),
        ((5, 8), (16, 1)),
        r"doubled: A has stride 2 along dimension 1, wanted is 1; got the strides \(16, 2\)",
    ),
    "overlaps": (
        ((5, 8), (7, 1)),
        ((5, 8), (7, 1)),
        "doubled writes B, and its elements overlap: 7 elements apart along dimension 0, where others reach 7; valid is 8",
    ),
    "broadcast": (((5, 8), (0, 1)), ((5, 8), (0, 1)), "doubled writes B, and its elements overlap: 0 elements apart"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", ["numpy", "tvm", "torch"])
def test_calls_that_are_refused(store, case, kind):
    *sides, says = REFUSED[case]
    spreads = [Spread(np.zeros(shape, "float32"), strides) for shape, strides in sides]
    exe = tile.compile(doubled, "llvm", store)
    with pytest.raises(InputError, match=says):
        exe(*(_as(kind, each.view) for each in spreads))
    with pytest.raises(InputError, match=says):
        exe.bind(*(_as(kind, each.view) for each in spreads))


def _as(kind: str, array: np.ndarray) -> Any:
    if kind == "torch":
        return pytest.importorskip("torch", reason="PyTorch is not installed").from_numpy(array)
    return _tvm.as_tensor(array) if kind == "tvm" else array


@pytest.mark.parametrize("kind", ["numpy", "tvm", "torch"])
def test_calls_on_views(store, kind):
    exe, a = tile.compile(doubled, "llvm", store), random((5, 8))
    for bound in (False, True):
        spreads = [Spread(a, (24, 1)), Spread(poisoned((5, 8)), (24, 1))]
        given = [_as(kind, each.view) for each in spreads]
        (exe.bind(*given) if bound else lambda given=given: exe(*given))()
        for each in spreads:
            each.check()
        np.testing.assert_array_equal(spreads[1].view, a * 2)


def test_negative_strides_and_odd_bytes(store):
    exe, a = tile.compile(doubled, "llvm", store), Spread(random((5, 8)), (24, 1))
    with pytest.raises(InputError, match="doubled: A has stride -24 along dimension 0; valid are strides of 0 and more"):
        exe(a.view[::-1], a.view)
    odd = np.ndarray((5, 8), "float32", np.zeros(200, "uint8"), 0, (34, 4))
    with pytest.raises(InputError, match=r"A has strides of \(34, 4\) bytes; valid are multiples of an element's 4"):
        exe(odd, a.view)


def test_arrays_that_are_copied(store):
    """An array that begins at no multiple of 64 bytes, or is read-only, is copied with its strides and back."""
    exe, a = tile.compile(doubled, "llvm", store), random((5, 25))
    out = poisoned((5, 25))
    exe(a[:, 3:11], out[:, 7:15])
    np.testing.assert_array_equal(out[:, 7:15], a[:, 3:11] * 2)
    assert np.isnan(out[:, :7]).all() and np.isnan(out[:, 15:]).all()
    frozen = a[:, :8]
    frozen.flags.writeable = False
    exe(frozen, out[:, 7:15])
    np.testing.assert_array_equal(out[:, 7:15], a[:, :8] * 2)
    with pytest.raises(InputError, match="doubled writes B; got a read-only array"):
        exe(a[:, :8], frozen)
    with pytest.raises(InputError, match="A, B would be copied for each run; bind takes"):
        exe.bind(a[:, 3:11], out[:, 7:15])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(1, 8), (5, 1), (1, 1), (0, 8)])
def test_a_stride_along_one_element_is_any(store, kind, shape):
    exe, a = tile.compile(doubled, "llvm", store), random(shape)
    out = np.array(poisoned(shape))
    dense = np.lib.stride_tricks.as_strided
    given = [dense(Spread(each, (8, 1)).view, shape, (32 if shape[0] > 1 else 4, 4 if shape[1] > 1 else 44)) for each in (a, out)]
    exe(*(_as(kind, each) for each in given))
    np.testing.assert_array_equal(given[1], a * 2)


def test_a_tensor_whose_stride_along_one_element_cannot_be_changed(store):
    exe = tile.compile(added, "llvm", store)
    views = [Spread(np.zeros((1, 64), "float32"), (64, 1)).view for _ in range(3)]
    a, c, d = (tvm.runtime.tensor(view) for view in views)
    with pytest.raises(InputError, match=r"added: D has the strides \(64, 1\), and is taken with \(0, 1\), which along"):
        exe(a, _tvm.as_tensor(Spread(np.zeros((48, 64), "float32"), (1, 48)).view), c, d)


def test_what_is_assumed_of_strides(store):
    exe = tile.compile(open_product(8), "llvm", store)
    a, b, c = (Spread(np.zeros(shape, "float16"), (516, 1)).view for shape in ((16, 512), (512, 256), (16, 256)))
    with pytest.raises(InputError, match=r"product: lda is 516 in A; the program has tile\.assume\(lda % 8 == 0\)"):
        exe(a, b, c)


def test_tensors_that_reach_too_far(store):
    """More elements than int32 counts are refused, unless sizes are int64."""
    exe = tile.compile(doubled, "llvm", store)
    far = np.lib.stride_tricks.as_strided(Spread(np.zeros((2, 8), "float32"), (8, 1)).view, (3, 8), (2**32, 4))
    with pytest.raises(InputError, match="doubled: A reaches over 2147483656 elements, more than int32 counts; valid are"):
        exe(far, far)

    @T.prim_func
    def wide(a: T.handle, b: T.handle):
        lda = T.int64()
        A = T.match_buffer(a, (2, 16), "int8", strides=(lda, 1))
        B = T.match_buffer(b, (2, 16), "int8", strides=(32, 1))
        with tile.kernel(2) as i:
            x = tile.fragment((1, 16), "int8")
            tile.copy(A[i, 0], x)
            tile.copy(x, B[i, 0])

    assert not is_mesh_tensor(tile.read(wide).params[0].buffer)
    room = np.zeros(2**31 + 4096 + 64, "int8")  # of which few pages are touched
    room = room[-room.ctypes.data % 64 :][: 2**31 + 4096]
    a = np.lib.stride_tricks.as_strided(room, (2, 16), (2**31 + 2048, 1))
    a[...] = np.arange(32).reshape(2, 16)
    out = Spread(np.zeros((2, 16), "int8"), (32, 1))
    tile.compile(wide, "llvm", store)(a, out.view)
    out.check()
    np.testing.assert_array_equal(out.view, a)


def test_exported_libraries_refuse_what_overlaps(store, tmp_path):
    exe = tile.compile(doubled, "llvm", store)
    exe.export(tmp_path / "doubled.so")
    run = tvm.runtime.load_module(str(tmp_path / "doubled.so"))["doubled"]
    a = random((5, 8))
    spreads = [Spread(a, (24, 1)), Spread(poisoned((5, 8)), (24, 1))]
    run(*(_tvm.as_tensor(each.view) for each in spreads))
    np.testing.assert_array_equal(spreads[1].view, a * 2)
    for strides in ((7, 1), (0, 1)):
        given = [_tvm.as_tensor(Spread(np.zeros((5, 8), "float32"), strides).view) for _ in range(2)]
        with pytest.raises(ValueError, match="B is written, and its elements overlap"):
            run(*given)
    given = [_tvm.as_tensor(Spread(np.zeros((5, 8), "float32"), strides).view) for strides in ((8, 1), (9, 1))]
    with pytest.raises(ValueError, match=r"strides\[0\]"):
        run(*given)


# ---- Operators of PyTorch --------------------------------------------------------------------------------------------


@T.prim_func
def columns(x: T.handle, b: T.Buffer((16, 32), "float32", strides=(1, 16)), y: T.handle):
    n, ldx = T.int32(), T.int32()
    X = T.match_buffer(x, (n, 32), "float32", strides=(ldx, 1))
    Y = T.match_buffer(y, (n, 32), "float32", strides=(ldx, 1))
    with tile.kernel(tile.cdiv(n, 16)) as i:
        rows = tile.fragment((16, 32), "float32")
        tile.copy(X[i * 16, 0], rows)
        with tile.parallel(16, 32) as (r, k):
            rows[r, k] = rows[r, k] + b[r, k]
        tile.copy(rows, Y[i * 16, 0])


def test_operators():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    name = f"axe_tests::strided{next(_NUMBERS)}"
    op = tile.operator(name, columns)
    b = torch.randn(32, 16).T
    whole = torch.randn(40, 96)
    for x in (whole[:, 32:64], whole[:, 5:37], torch.randn(1, 32).expand(40, 32)[:0]):  # aligned, or not, or empty
        y = op(x, b)
        assert y.shape == x.shape and y.stride() == x.stride()
        torch.testing.assert_close(y, x + b.repeat(3, 1)[: len(x)])
    with pytest.raises(InputError, match="b has stride 32 along dimension 0, wanted is 1"):
        op(whole[:, :32], b.contiguous())
    torch.library.opcheck(op, (whole[:, 32:64], b), test_utils=("test_schema", "test_faketensor"))


def test_an_operator_whose_output_has_strides_that_no_input_says():
    pytest.importorskip("torch", reason="PyTorch is not installed")

    @T.prim_func
    def func(X: T.Buffer((4, 8), "float32"), Y: T.Buffer((4, 8), "float32", strides=("ldy", 1))):
        with tile.kernel(1), tile.parallel(4, 8) as (i, j):
            Y[i, j] = X[i, j]

    with pytest.raises(TileError, match="ldy of Y: .* is the size or the stride of no input"):
        tile.operator(f"axe_tests::strided{next(_NUMBERS)}", func)


# ---- What is refused when it is read ---------------------------------------------------------------------------------


def written(options: str, extents: str = "(4, 4)") -> tirx.PrimFunc:
    source = f"""@T.prim_func
def func(O: T.Buffer({extents}, "int32", {options})):
    with tile.kernel(1), tile.parallel(4, 4) as (i, j):
        O[i, j] = 1
"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


@pytest.mark.parametrize(
    "options, says",
    [
        ("strides=(2, 1)", r"global O: int32\[4, 4\] with strides \(2, 1\): it is written, and its elements overlap: 2 ele"),
        ("strides=(0, 1)", "its elements overlap: 0 elements apart along dimension 0, where others reach 0; valid is 1"),
        ("strides=(1, 1)", "its elements overlap: 1 elements apart along dimension 1, where others reach 3; valid is 4"),
        ("strides=(-4, 1)", "parameter O: stride -4 along dimension 0; valid are strides of 0 and more: take the tensor"),
        ("strides=(4,)", "parameter O: 1 strides of 2 dimensions; valid is one each"),
    ],
)
def test_strides_that_are_refused(options, says):
    with pytest.raises(TileError, match=says):
        tile.read(written(options))


def test_rows_that_overlap_whatever_their_number():
    @T.prim_func
    def func(o: T.handle):
        m = T.int32()
        O = T.match_buffer(o, (m, 8), "int32", strides=(4, 1))
        with tile.kernel(m) as i, tile.parallel(8) as j:
            O[i, j] = 1

    with pytest.raises(TileError, match="its elements overlap: 4 elements apart along dimension 0, where others reach 7"):
        tile.read(func)


def test_strides_that_nobody_knows():
    @T.prim_func(check_well_formed=False)
    def func(o: T.handle):
        lda = T.int32()
        O = T.match_buffer(o, (4, 8), "int32", strides=(lda + 8, 1))
        with tile.kernel(4) as i, tile.parallel(8) as j:
            O[i, j] = 1

    with pytest.raises(TileError, match=r"parameter O: a stride is lda \+ 8, and no tensor says what lda is; valid is"):
        tile.read(func)


def test_sizes_of_two_types():
    @T.prim_func
    def func(o: T.handle):
        m, lda = T.int32(), T.int64()
        O = T.match_buffer(o, (m, 8), "int32", strides=(lda, 1))
        with tile.kernel(m) as i, tile.parallel(8) as j:
            O[i, j] = 1

    with pytest.raises(TileError, match="parameter O: m of int32, lda of int64; valid are extents and strides of one type"):
        tile.read(func)


def test_tensors_with_strides_in_a_program_of_a_mesh():
    @T.prim_func
    def func(
        me: T.int32, x: T.Buffer((8, 64), "float32", strides=(72, 1)), slabs: tile.mesh_tensor((2, 8, 64), "float32")
    ):
        with tile.kernel(8, device=me) as i:
            part = tile.fragment((1, 64), "float32")
            tile.copy(x[i, 0], part)
            tile.copy(part, slabs[me, i, 0])

    with pytest.raises(TileError, match=r"\(72, 1\): a tensor with strides in a program of a mesh, whose workers hold"):
        tile.read(func)


def test_streams_have_no_strides():
    with pytest.raises(StreamError, match=r"tile program 'added': global A: .* with strides \(lda, 1\), and streams load"):
        from_tile(added, Accelerator(), {"m": 16})
