"""An epilogue goes before a program's store, on whatever shapes, and only where the result is stored once."""

import numpy as np
import pytest
import tvm
from interpreter import interpret
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile import reading
from tvm_axe.tile.epilogue import Epilogue, with_epilogue
from tvm_axe.tile.kernels import KERNELS, Recipe

LLVM = resolve_target("llvm", threads=1)


@T.prim_func
def program(A: T.Buffer((20, 8), "float32"), C: T.Buffer((20, 8), "float16")):
    with tile.kernel(2) as i:
        c = tile.fragment((16, 8), "float32")
        tile.copy(A[i * 16, 0], c)
        tile.copy(c, C[i * 16, 0])


@T.prim_func
def golden(A: T.Buffer((20, 8), "float32"), C: T.Buffer((20, 8), "float16"), epilogue_0: T.Buffer((4, 5), "float32")):
    with tile.kernel(2) as i:
        c = tile.fragment((16, 8), "float32")
        tile.copy(A[i * 16, 0], c)
        with tile.parallel(16, 8) as (x, y):
            if i * 16 + x < 20:
                c[x, y] = c[x, y] * epilogue_0[(i * 16 + x) // 5, (i * 16 + x) % 5]
        tile.copy(c, C[i * 16, 0])


@T.prim_func(s_tir=True)
def scaled(P: T.Buffer((4, 5, 8), "float32"), s: T.Buffer((4, 5), "float32"), out: T.Buffer((4, 5, 8), "float16")):
    for a, b, j in T.grid(4, 5, 8):
        with T.sblock("epi"):
            va, vb, vj = T.axis.remap("SSS", [a, b, j])
            out[va, vb, vj] = T.cast(P[va, vb, vj] * s[va, vb], "float16")


def epilogue_of(func, name="epi"):
    sch = s_tir.Schedule(func)
    return Epilogue.of(sch.get(sch.get_sblock(name)), func.params[0])


def test_the_rewrite():
    recipe = with_epilogue(Recipe((tile.read(program),), ("A",), ("C",)), epilogue_of(scaled))
    (made,) = recipe.programs
    assert recipe.inputs == ("A", "epilogue_0")
    bare = [func.without_attr("global_symbol") for func in (made.func, golden)]
    tvm.ir.assert_structural_equal(*bare, map_free_vars=True)


@pytest.mark.parametrize("kernel", ["matmul", "batched_matmul"])
def test_of_a_kernel_with_tails(kernel):
    batch = (3,) if kernel == "batched_matmul" else ()
    m, n, k = 21, 19, 10
    shape = (*batch, m, n)

    @T.prim_func(s_tir=True)
    def epilogue(P: T.Buffer(shape, "float32"), bias: T.Buffer((n,), "float32"), r: T.Buffer(shape, "float32"),
                 out: T.Buffer(shape, "float32")):  # fmt: skip
        for p in T.grid(*shape):
            with T.sblock("epi"):
                v = [T.axis.spatial(extent, index) for extent, index in zip(shape, p)]
                out[(*v,)] = T.max(P[(*v,)] + bias[v[-1]], T.float32(0)) * r[(*v,)]

    rng = np.random.default_rng(1)
    problem = {"m": m, "n": n, "k": k, "dtype": "float32", "transpose_b": False}
    problem |= {"batch": 3} if batch else {}
    recipe = KERNELS[kernel].recipe(LLVM, problem, block_m=16, block_n=16, block_k=8)
    (made,) = with_epilogue(recipe, epilogue_of(epilogue)).programs
    arrays = {
        "A": rng.standard_normal((*batch, m, k)),
        "B": rng.standard_normal((*batch, k, n)),
        "C": np.full(shape, np.nan),
        "epilogue_0": rng.standard_normal(n),
        "epilogue_1": rng.standard_normal(shape),
    }
    names = [param.name for param in made.params]
    got = dict(zip(names, interpret(made, *(arrays[name].astype("float32") for name in names))))["C"]
    given = {name: array.astype("float32").astype("float64") for name, array in arrays.items()}
    want = np.maximum(given["A"] @ given["B"] + given["epilogue_0"], 0) * given["epilogue_1"]
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


@T.prim_func(s_tir=True)
def shifted(P: T.Buffer((20, 8), "float32"), out: T.Buffer((20, 8), "float32")):
    for i, j in T.grid(20, 8):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = P[vi, (vj + 1) % 8]


@T.prim_func(s_tir=True)
def transposed(P: T.Buffer((8, 8), "float32"), out: T.Buffer((8, 8), "float32")):
    for i, j in T.grid(8, 8):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vj, vi] = P[vi, vj]


@T.prim_func(s_tir=True)
def summed(P: T.Buffer((20, 8), "float32"), out: T.Buffer((20,), "float32")):
    for i, j in T.grid(20, 8):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                out[vi] = T.float32(0)
            out[vi] = out[vi] + P[vi, vj]


@pytest.mark.parametrize("func", [shifted, transposed, summed])
def test_blocks_that_are_no_epilogue(func):
    with pytest.raises(TileError, match="block 'epi' is no epilogue: valid is"):
        epilogue_of(func)


@T.prim_func(s_tir=True)
def relu(P: T.Buffer((24, 40), "float32"), out: T.Buffer((24, 40), "float32")):
    for i, j in T.grid(24, 40):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(P[vi, vj], T.float32(0))


@pytest.mark.parametrize("kernel", ["split_k_matmul", "stream_k_matmul"])
def test_of_several_programs(kernel):
    """In the last one, which alone writes the result."""
    m, n, k = 24, 40, 100
    hopper = resolve_target({"kind": "cuda", "arch": "sm_90a"})
    recipe = KERNELS[kernel].recipe(hopper, {"m": m, "n": n, "k": k, "dtype": "float32"})
    assert len(recipe.programs) > 1
    rng = np.random.default_rng(2)
    arrays = {name: np.full(shape, np.nan, "float32") for name, (shape, _) in recipe.tensors.items()}
    arrays |= {"A": rng.standard_normal((m, k), "float32"), "B": rng.standard_normal((n, k), "float32")}
    made = with_epilogue(recipe, epilogue_of(relu))
    for func, names in zip(made.programs, made.arguments):
        arrays |= dict(zip(names, interpret(func, *(arrays[name] for name in names))))
    np.testing.assert_allclose(arrays["C"], np.maximum(arrays["A"] @ arrays["B"].T, 0), rtol=1e-5, atol=1e-5)


def test_of_a_kernel_that_stores_whole_tiles_otherwise_than_others():
    """Where rows choose their matrix, tiles end where the choice does: some are whole, and some reach over."""
    rows, n, k, groups = 200, 24, 16, 3

    @T.prim_func(s_tir=True)
    def epilogue(
        P: T.Buffer((200, 24), "float32"), bias: T.Buffer((24,), "float32"), out: T.Buffer((200, 24), "float32")
    ):
        for i, j in T.grid(200, 24):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.max(P[vi, vj] + bias[vj], T.float32(0))

    problem = {"rows": rows, "n": n, "k": k, "groups": groups, "dtype": "float32"}
    recipe = with_epilogue(KERNELS["gathered_matmul"].recipe(LLVM, problem, block_m=16), epilogue_of(epilogue))
    rng = np.random.default_rng(4)
    arrays = {name: np.full(shape, -7, dtype) for name, (shape, dtype) in recipe.tensors.items()}
    arrays |= {"X": rng.standard_normal((rows, k), "float32"), "W": rng.standard_normal((groups, n, k), "float32")}
    arrays |= {"labels": np.sort(rng.integers(0, groups, rows)).astype("int32"), "Y": np.full((rows, n), np.nan)}
    arrays["epilogue_0"] = rng.standard_normal(n, "float32")
    for func, names in zip(recipe.programs, recipe.arguments):
        arrays |= dict(zip(names, interpret(func, *(arrays[name] for name in names))))
    product = np.einsum("rk,rnk->rn", arrays["X"], arrays["W"][arrays["labels"]])
    np.testing.assert_allclose(arrays["Y"], np.maximum(product + arrays["epilogue_0"], 0), rtol=1e-5, atol=1e-5)


@T.prim_func
def added(A: T.Buffer((20, 8), "float32"), C: T.Buffer((20, 8), "float32")):
    with tile.kernel(2) as i:
        c = tile.fragment((16, 8), "float32")
        tile.copy(A[i * 16, 0], c)
        tile.copy(c, C[i * 16, 0], atomic="add")


@T.prim_func
def stored_twice(A: T.Buffer((20, 8), "float32"), C: T.Buffer((20, 8), "float32")):
    with tile.kernel(1) as _:
        c = tile.fragment((16, 8), "float32")
        tile.copy(A[0, 0], c)
        tile.copy(c, C[0, 0])
        tile.copy(A[16, 0], c)
        tile.copy(c, C[16, 0])


@T.prim_func
def stored_in_a_loop(A: T.Buffer((20, 8), "float32"), C: T.Buffer((20, 8), "float32")):
    """Which is written out, so that the statement isn't the program's."""
    with tile.kernel(1) as _:
        c = tile.fragment((20, 8), "float32")
        tile.copy(A, c)
        with tile.parallel(20, 8) as (x, y):
            for step in range(1):
                C[x, y + step] = c[x, y]


@pytest.mark.parametrize("func", [added, stored_twice, stored_in_a_loop])
def test_programs_that_take_none(func):
    with pytest.raises(TileError, match="takes no epilogue: its result isn't stored once, from a fragment"):
        with_epilogue(Recipe((tile.read(func),), ("A",), ("C",)), epilogue_of(relu))


@T.prim_func
def transposed(A: T.Buffer((40, 24), "float32"), C: T.Buffer((24, 40), "float16")):
    """Stores by a `parallel`, with a mask, the other way round than it lies in the fragment."""
    with tile.kernel(3) as j:
        c = tile.fragment((16, 24), "float32")
        tile.copy(A[j * 16, 0], c)
        with tile.parallel(16, 24) as (y, x):
            if j * 16 + y < 40:
                C[x, j * 16 + y] = T.cast(c[y, x], "float16")


def test_of_a_program_that_stores_elements():
    """The epilogue comes before the rounding, not behind it."""

    @T.prim_func(s_tir=True)
    def epilogue(
        P: T.Buffer((24, 40), "float32"), bias: T.Buffer((40,), "float32"), out: T.Buffer((24, 40), "float16")
    ):
        for i, j in T.grid(24, 40):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.cast((P[vi, vj] + bias[vj]) * T.float32(4096), "float16")

    recipe = with_epilogue(Recipe((tile.read(transposed),), ("A",), ("C",)), epilogue_of(epilogue))
    assert recipe.inputs == ("A", "epilogue_0")
    rng = np.random.default_rng(2)
    a, bias = rng.standard_normal((40, 24), "float32") * 1e-3, -rng.standard_normal(40, "float32") * 1e-3
    out = np.full((24, 40), np.nan, "float16")
    (made,) = recipe.programs
    tile.compile(made, LLVM)(a, out, bias)
    np.testing.assert_allclose(out, (a.T.astype("float64") + bias) * 4096, rtol=2**-10)


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_80", "cuda:sm_90a"])
def test_a_program_is_read_once(target, monkeypatch, tmp_path):
    """By the kernel that makes it; one with an epilogue put in is another program."""
    checked, own = [], reading.check
    monkeypatch.setattr(reading, "check", lambda program: (checked.append(program), own(program)))
    problem = {"m": 24, "n": 40, "k": 64, "dtype": "float32"}
    recipe = KERNELS["split_k_matmul"].recipe(resolve_target(target), problem, splits=2)
    assert len(recipe.programs) == len(checked) == 2
    for program in recipe.programs:
        assert tile.plan(program, target).program is program
        tile.explain(program, target)
        tile.lower(program, target)
    tile.compile_all(recipe.programs, "llvm", Cache(tmp_path))
    assert len(checked) == 2
    tile.lower(with_epilogue(recipe, epilogue_of(relu)).programs[-1], target)
    assert len(checked) == 3


def test_one_that_only_rounds_is_left_to_the_copy():
    @T.prim_func(s_tir=True)
    def rounds(P: T.Buffer((20, 8), "float32"), out: T.Buffer((20, 8), "float16")):
        for i, j in T.grid(20, 8):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.cast(P[vi, vj], "float16")

    (made,) = with_epilogue(Recipe((tile.read(program),), ("A",), ("C",)), epilogue_of(rounds)).programs
    assert made.func.same_as(program)
