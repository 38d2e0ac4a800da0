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
from programs_strides import added, open_product, poisoned, product, random, scattered, signalled, summed, turned
from strided import Spread, like
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm, tile
from tvm_axe.errors import StreamError, TileError
from tvm_axe.machines import nvcc, resolve_target
from tvm_axe.machines.cache import Cache
from tvm_axe.stream import Accelerator, from_tile
from tvm_axe.tile.strides import overlap, row_major, strides_of
from tvm_axe.tile.targets import llvm as cpu


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Compiled programs don't fill the user's cache."""
    return Cache(tmp_path_factory.mktemp("cache"))


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


def test_variables_in_annotations():
    m, lda = tirx.Var("m", "int32"), tirx.Var("lda", "int32")

    @T.prim_func
    def func(A: T.Buffer((m, 8), "int32", strides=(lda, 1)), B: T.Buffer((4, 8), "int32", strides=("ldb", 1))):
        tile.assume(tirx.all(lda % 4 == 0, B.strides[0] % 2 == 0))
        with tile.kernel(1), tile.parallel(4, 8) as (i, j):
            B[i, j] = 1

    program = tile.read(func)
    assert list(map(str, program.assumptions)) == ["lda % 4 == 0", "ldb % 2 == 0"]
    assert [str(each.strides) for each in program.params] == ["(lda, 1)", "(ldb, 1)"]


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


def to_scatter() -> dict[str, Spread]:
    """What `scattered` is run on, by name: whole numbers."""
    rng = np.random.default_rng()
    return {
        "X": Spread(rng.integers(-9, 9, (24, 32)).astype("float32"), (40, 1)),
        "places": Spread(rng.permutation(24).astype("int32"), (2,)),
        "Y": Spread(poisoned((24, 32)), (1, 25)),
        "total": Spread(np.ones((4, 32), "float32"), (64, 2)),
        "largest": Spread(np.full(4, -5, "int32"), (3,)),
        "once": Spread(np.zeros(6, "int32"), (5,)),
    }


def test_gathers_scatters_atomics_on_llvm():
    beside_the_interpreter(scattered, list(to_scatter().values()))


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
    made = drawn(seed, ("small", "tiled", "wide")[seed % 3], strided=True)
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


def test_maps_of_tma_of_other_orders():
    """Heads that lie within rows: (batch, head, row, column) of a tensor of (batch, row, head, column)."""
    heads = 4

    @T.prim_func
    def product(
        A: T.Buffer((2, heads, 256, 64), "float16", strides=(256 * heads * 64, 64, heads * 64, 1)),
        B: T.Buffer((2, heads, 64, 128), "float16", strides=(64 * heads * 128, 128, heads * 128, 1)),
        C: T.Buffer((2, heads, 256, 128), "float16", strides=(256 * heads * 128, 128, heads * 128, 1)),
    ):
        with tile.kernel(2, heads, 2) as (n, h, i):
            a = tile.shared((128, 64), "float16")
            b = tile.shared((64, 128), "float16")
            c = tile.fragment((128, 128), "float32")
            tile.fill(c, 0)
            for _ in tile.pipelined(1):
                tile.copy(A[n, h, i * 128 : i * 128 + 128, 0:64], a)
                tile.copy(B[n, h, 0:64, 0:128], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[n, h, i * 128 : i * 128 + 128, 0:128])

    maps = _maps(tile.lower(product, "cuda:sm_90a"))
    assert maps["A"].startswith("64, 256, 4, 2, 512, 128, 131072, 64, 128, 1, 1")  # extents, bytes apart, a box
    assert maps["C"].startswith("128, 256, 4, 2, 1024, 256, 262144, 64, 64, 1, 1")
    assert maps["B"].startswith("64, 64, 2, 2, 4, 1024, 128, 65536, 256, 64, 64, 2, 1, 1")


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
            "global A: float16[m, 512] with strides (lda, 1): slow, 2 elements at a time  (its stride along dimension "
            "0, lda, isn't known to be a multiple of 8; tile.assume(lda % 8 == 0) gives vectors of 16 bytes, and TMA)"
        ) in said
        said = tile.explain(product(strides_a=(1, 512), strides_b=(258, 1)), target)
        assert "with strides (1, 512): slow, an element at a time  (neighbours along its last dimension are 512" in said
        assert "(258, 1): slow, 2 elements at a time  (its stride along dimension 0, 258, is no multiple of 8" in said
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


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize(
    "strides_x, strides_y",
    [((44, 1), (40, 1)), ((56, 1), (41, 1)), ((1, 48), (64, 1)), ((0, 1), (1, 50)), ((90, 2), (80, 2))],
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
    on_the_host(func, 6, spreads, tmp_path, early)


def on_the_host(func, blocks, spreads, folder, early=False):
    """Run the code for sm_80 on the host beside the interpreter, of which every bit is the same."""
    expected = interpret(func, *(each.view for each in spreads.values()))
    name = str(func.attrs["global_symbol"])
    mod = tvm.IRModule({name: tile.lower(func, "cuda:sm_80")})
    source = tvm.compile(mod, resolve_target("cuda:sm_80"), tir_pipeline="tirx").mod.imports[0].inspect_source()
    on_host.run(str(source), blocks, {name: each.view for name, each in spreads.items()}, folder, early)
    for (name, each), want in zip(spreads.items(), expected, strict=True):
        each.check()
        np.testing.assert_array_equal(each.view, want.astype(each.view.dtype), err_msg=name)


def test_gathers_scatters_atomics_on_the_host(tmp_path):
    on_the_host(scattered, 3, to_scatter(), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("func", [product(), product((1, 512)), product((0, 1)), open_product(8), open_product(2)])
def test_products_on_a_gpu(cuda, store, func):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    exe, strides = tile.compile(func, "cuda", store), [each.strides for each in tile.read(func).params]
    strides = [tuple(s if isinstance(s, int) else 776 for s in each) for each in strides]
    extents = [(512, 512), (512, 256), (512, 256)]
    rooms = [torch.randn(1 << 20, device="cuda").half() for _ in extents]
    a, b, c = (room.as_strided(shape, apart) for room, shape, apart in zip(rooms, extents, strides))
    before = rooms[2].clone()
    before.as_strided(extents[2], strides[2]).fill_(0)
    exe(a, b, c)
    expected = a.double() @ b.double()
    error = (c.double() - expected).abs().max() / expected.abs().max()
    c.fill_(0)
    assert float(error) < EPSILONS["float16"] and torch.equal(rooms[2], before)


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
        (
            "strides=(2, 1)",
            r"O: int32\[4, 4\] with strides \(2, 1\): it is written, and its elements overlap: 2 ",
        ),
        (
            "strides=(0, 1)",
            "its elements overlap: those along dimension 0 are one, of stride 0; valid is another",
        ),
        ("strides=(1, 1)", "its elements overlap: 1 elements apart along dimension 1, where others reach 3; valid"),
        ("strides=(-4, 1)", "parameter O: stride -4 along dimension 0; valid are strides of 0 and more: take the"),
        ("strides=(8, 1), elem_offset=8", "parameter O: elem_offset 8; valid is a tensor from its first element"),
        ("strides=(4,)", "parameter O: 1 strides of 2 dimensions; valid is one for each"),
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

    with pytest.raises(TileError, match="overlap: 4 elements apart along dimension 0, where others reach 7; valid"):
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

    with pytest.raises(TileError, match="parameter O: m of int32, lda of int64; valid are extents and strides of one"):
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
    with pytest.raises(StreamError, match=r"program 'added': global A: .* with strides \(lda, 1\), and streams load"):
        from_tile(added, Accelerator(), {"m": 16})
