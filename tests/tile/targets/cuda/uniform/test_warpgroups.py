"""Products by wgmma of operands that threads load: what is planned, its code, and on a GPU beside the interpreter."""

import re

import ml_dtypes  # noqa: F401  (numpy's names of small floats)
import numpy as np
import pytest
import tvm
from interpreter import interpret
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError, TileWarning
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.targets.cuda.instructions import mma
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan
from tvm_axe.tile.targets.cuda.uniform.warpgroups import Warpgroups

HOPPER, AMPERE = "cuda:sm_90a", "cuda:sm_80"

LANGUAGE = {
    "dtype": "float16", "total": "float32", "m": 128, "n": 64, "k": 64, "steps": 5, "piece": 8, "options": "",
    "stages": 3, "rows": 150, "transpose": True, "instruction": "None",
}  # fmt: skip

PROGRAM = """
@T.prim_func
def func(X: T.Buffer(({rows} + 9, {steps} * {k}), "{dtype}"), W: T.Buffer({w_shape}, "{dtype}"),
         scale: T.Buffer(({n},), "{total}"), Y: T.Buffer(({rows}, {n}), "{total}")):
    with tile.kernel(tile.cdiv({rows}, {m}){options}) as i:
        a = tile.shared(({m}, {k}), "{dtype}")
        b = tile.shared({b_shape}, "{dtype}")
        c = tile.fragment(({m}, {n}), "{total}")
        s = tile.fragment(({n},), "{total}")
{body}
        tile.copy(c, Y[i * {m}, 0])
"""

LOAD_A = """
with tile.parallel({m}, {k} // {piece}, {piece}) as (x, q, v):
    row: T.let = (i * {m} + x) // 3 * 3 + l
    a[x, q * {piece} + v] = T.if_then_else(i * {m} + x < {rows}, X[row, l * {k} + q * {piece} + v], {zero})
"""
LOAD_B = "tile.copy({w}, b)"
PRODUCT = "tile.gemm(a, b, c, transpose_b={transpose}, instruction={instruction})"
LOOP = "tile.fill(c, 0)\nfor l in tile.pipelined({steps}, stages={stages}):\n"

BODIES = {
    "alone": LOOP + "{load}\n    {product}",
    "what uses the sums in the loop": LOOP + "{load}\n    {product}\n    with tile.parallel({m}, {n}) as (x, y):\n"
    "        c[x, y] = c[x, y] + scale[y]",
    "two products": LOOP + "{load}\n    {product}\n    {product}",
    "a branch": LOOP + "{load}\n    if l % 2 == 0:\n        {product}",
    "a loop in the loop": LOOP + "{load}\n    for r in range(2):\n        {product}",
    "the operand changes": LOOP + "{load}\n    {product}\n    with tile.parallel({m}, {k}) as (x, y):\n"
    "        a[x, y] = a[x, y] + a[x, y]\n    {product}",
    "a name": LOOP + "{load}\n    even: T.let = l % 2\n    {product}\n    tile.copy(scale[0], s)\n"
    "    with tile.parallel({m}, {n}) as (x, y):\n        c[x, y] = c[x, y] + s[y] * even",
    "no loop ahead": "tile.fill(c, 0)\nfor l in range({steps}):\n{load}\n    {product}",
    "set each time": LOOP + "{load}\n    tile.gemm(a, b, c, transpose_b={transpose}, accumulate=False)",
}


def source(body="alone", **given):
    values = {**LANGUAGE, **given}
    integers = values["dtype"] == "int8"
    values |= {"zero": f"T.{values['dtype']}(0)", "total": "int32" if integers else values["total"]}
    steps, n, k = (values[name] for name in ("steps", "n", "k"))
    if values["transpose"]:
        values |= {"w_shape": (n, steps * k), "b_shape": (n, k), "w": f"W[0, l * {k}]"}
    else:
        values |= {"w_shape": (steps * k, n), "b_shape": (k, n), "w": f"W[l * {k}, 0]"}
    load = "\n".join("    " + line for line in f"{LOAD_A.strip()}\n{LOAD_B}".format(**values).splitlines())
    text = BODIES[body].format(**values, load=load, product=PRODUCT.format(**values))
    return PROGRAM.format(**values, body="\n".join("        " + line for line in text.splitlines()))


def func(body="alone", **given):
    return tvm.script.from_source(source(body, **given), extra_vars={"tile": tile, "T": T})


CASES = {
    **{body: {"body": body} for body in BODIES},
    "two warpgroups": {"m": 256, "n": 64, "rows": 300},
    "two share columns": {"m": 64, "n": 128, "options": ", threads=256"},
    "bfloat16, b along n": {"dtype": "bfloat16", "transpose": False},
    "float8": {"dtype": "float8_e4m3fn", "piece": 16, "k": 128},
    "int8": {"dtype": "int8", "piece": 16, "k": 64},
    "tf32": {"dtype": "float32", "piece": 4, "k": 32, "instruction": "'wgmma'"},
    "narrow rows": {"k": 16, "steps": 3},
    "two panels": {"k": 128, "stages": 2},
    "four stages": {"stages": 4, "steps": 4},
    "persistent": {"options": ", persistent=True", "m": 64, "rows": 900},
    "single elements, not ahead": {"piece": 1},
}


def planned(**given):
    plan = tile.plan(func(**given), HOPPER)
    assert isinstance(plan, UniformPlan)
    return plan


@pytest.mark.parametrize("name", CASES)
def test_gathered_operands_are_multiplied_by_warpgroups(name, tmp_path):
    plan = planned(**CASES[name])
    assert plan.products and all(isinstance(stand, Warpgroups) for stand in plan.products.values())
    code = tile.compile(func(**CASES[name]), HOPPER, Cache(tmp_path)).source
    assert "wgmma_mma_async" in code or "mma_async_sync" in code
    assert code.count("wgmma_fence") and "fence_proxy" in code
    for tile_, layout in plan.memory.layouts.items():
        if tile_ in plan.memory.operands:
            assert plan.memory.slot_bytes(tile_) % plan.memory.alignment(tile_) == 0, (tile_, layout)


def test_the_same_program_is_the_same_code():
    """In whatever order its tiles hash, so that what is compiled is found again."""
    assert len({tile.lower(func(), HOPPER).script() for _ in range(8)}) == 1


def test_products_go_on_while_loads_are_started(tmp_path):
    code = tile.compile(func(), HOPPER, Cache(tmp_path)).source
    loop = code[code.rindex("for (int") :]
    order = [loop.index(word) for word in ("cp_async_wait_group", "wgmma_wait_group", "cta_sync", "commit_group_sync")]
    assert order == sorted(order)
    assert loop.index("commit_group_sync") < loop.index("src_size")


@pytest.mark.parametrize("body", ["what uses the sums in the loop", "the operand changes", "a branch"])
def test_what_touches_them_waits(body, tmp_path):
    """Behind the last product of an iteration a wait stands before whatever else touches its tiles."""
    code = tile.compile(func(body), HOPPER, Cache(tmp_path)).source
    loop = code[code.rindex("for (int l" if "for (int l" in code else "cp_async_wait_group") :]
    behind = loop[loop.index("commit_group_sync") :]
    assert "wgmma_wait_group" in behind


def test_elsewhere_they_are_by_mma():
    for target in (AMPERE, "cuda:sm_89"):
        plan = tile.plan(func(), target)
        assert all(isinstance(stand, mma.Warps) for stand in plan.products.values())


def test_what_warpgroups_can_not_do_is_by_mma():
    plan = planned(m=96, n=64)
    assert all(isinstance(stand, mma.Warps) for stand in plan.products.values())
    plan = planned(options=", threads=64")
    assert all(isinstance(stand, mma.Warps) for stand in plan.products.values())


def test_copied_operands_stay_with_the_producer():
    copied = source()
    begin = copied.index("            with tile.parallel")
    end = copied.index("            tile.copy(W")
    copied = copied[:begin] + "            tile.copy(X[i * 128, l * 64], a)\n" + copied[end:]
    plan = tile.plan(tvm.script.from_source(copied, extra_vars={"tile": tile, "T": T}), HOPPER)
    assert not isinstance(plan, UniformPlan)


@pytest.mark.parametrize("given, why", [
    ({"m": 96}, "instruction='wgmma', but m x n x k = 96 x 64 x 64; m is a multiple of 64"),
    ({"options": ", threads=64"}, "fall into no equal shares for the warpgroups"),
    ({"m": 64, "n": 24, "options": ", threads=256"}, "fall into no equal shares"),
])  # fmt: skip
def test_what_is_asked_for_and_can_not_be_is_refused(given, why):
    with pytest.raises(TileError, match=why):
        planned(instruction="'wgmma'", **given)


@pytest.mark.parametrize("columns", [192, 200, 208])
def test_what_is_planned_can_be_assembled(columns, tmp_path):
    """Two blocks a multiprocessor have 128 registers a thread: an accumulator of 96 has room beside all else."""
    given = {"m": 128, "n": columns, "stages": 2, "options": ", threads=256, blocks_per_sm=2"}
    if columns > 192:
        with pytest.raises(TileError, match=f"take {columns // 2} registers .* and there are 96 for them"):
            planned(**given)
        return
    planned(**given)
    text = tile.compile(func(**given), HOPPER, Cache(tmp_path)).explain()
    assert "slow" not in text


def test_explain_says_why():
    text = tile.explain(func(), HOPPER)
    assert "wgmma  (it multiplies while threads gather operands on)" in text
    assert "is gathered, which a producer warp only does where it is a box" in text
    assert "1 x 1 warpgroups" in tile.explain(func(m=64), HOPPER)


def drawn(program, seed):
    """Small whole numbers, whose sums are exact in each type, and an output that is poisoned."""
    rng = np.random.default_rng(seed)
    made = []
    for param in program.params:
        shape = tuple(map(int, param.shape))
        if param.name == "Y":
            made.append(np.full(shape, 77 if param.dtype == "int32" else np.nan).astype(param.dtype))
        else:
            made.append(rng.integers(-3, 4, shape).astype(param.dtype))
    return made


@pytest.mark.parametrize("name", CASES)
def test_values_on_a_cpu(name, tmp_path):
    program = func(**CASES[name])
    arrays = drawn(tile.read(program), 3)
    want = interpret(program, *[array.copy() for array in arrays])[3]
    tile.compile(program, "llvm", Cache(tmp_path))(*arrays)
    np.testing.assert_array_equal(arrays[3], want)
    assert np.abs(want).max() > 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_values_on_a_gpu(name, cuda, tmp_path):
    program = func(**CASES[name])
    executable = tile.compile(program, "cuda", Cache(tmp_path))
    for seed in range(3):
        arrays = drawn(tile.read(program), seed)
        want = interpret(program, *[array.copy() for array in arrays])[3]
        executable(*arrays)
        np.testing.assert_array_equal(arrays[3], want)


# ---- Parts of tiles --------------------------------------------------------------------------------------------------


def parts(a=(0, 0), b=(0, 0), shapes=((80, 128), (80, 128)), transposes=(False, True), dtype="bfloat16", both=False):
    """A product of 64 x 64 x 64 of the parts of two tiles that begin there; `both` times, the first of whole atoms."""
    (a_rows, a_columns), (b_rows, b_columns) = a, b

    @T.prim_func
    def func(A: T.Buffer(shapes[0], dtype), B: T.Buffer(shapes[1], dtype), C: T.Buffer((64, 64), "float32")):
        with tile.kernel(1):
            left = tile.shared(shapes[0], dtype)
            right = tile.shared(shapes[1], dtype)
            c = tile.fragment((64, 64), "float32")
            tile.copy(A, left)
            tile.copy(B, right)
            tile.fill(c, 0)
            if both:
                tile.gemm(left[0:64, 0:64], right[0:64, 0:64], c, transpose_a=transposes[0], transpose_b=transposes[1])
            tile.gemm(
                left[a_rows : a_rows + 64, a_columns : a_columns + 64],
                right[b_rows : b_rows + 64, b_columns : b_columns + 64],
                c,
                transpose_a=transposes[0],
                transpose_b=transposes[1],
            )
            tile.copy(c, C)

    return func


TURNED = {"shapes": ((80, 128), (80, 192)), "transposes": (True, False)}
PARTS = [
    ({}, "wgmma"),
    ({"a": (8, 0), "b": (16, 0)}, "wgmma"),
    ({"a": (16, 16), "b": (8, 16)}, "wgmma"),
    ({"a": (4, 0)}, "mma"),
    ({"b": (1, 0)}, "mma"),
    ({"a": (8, 8), "b": (0, 8)}, "mma"),
    ({"a": (0, 4), "b": (0, 4)}, "multiply-adds"),
    ({"a": (0, 1), "b": (0, 1), "shapes": ((80, 65), (80, 72))}, "multiply-adds"),
    ({"a": (3, 0), "both": True}, "mma"),
    ({"a": (0, 2), "both": True}, "multiply-adds"),
    ({"a": (8, 64), "b": (8, 128), **TURNED}, "wgmma"),
    ({"a": (8, 16), "b": (8, 0), **TURNED}, "mma"),
    ({"a": (4, 64), "b": (4, 0), **TURNED}, "mma"),
    ({"a": (1, 64), "b": (1, 72), **TURNED}, "mma"),
    ({"a": (0, 3), **TURNED}, "multiply-adds"),
]
"""Where parts begin, and what multiplies them: a descriptor knows whole atoms, ldmatrix rows of 16 aligned bytes."""


@pytest.mark.parametrize("given, by", PARTS)
@pytest.mark.filterwarnings("ignore:.*tens of times slower")
def test_what_multiplies_parts_of_tiles(given, by):
    text = tile.explain(parts(**given), HOPPER)
    assert ("products are wgmma" in text) == (by == "wgmma")
    assert ("mma.sync" in text) == (by == "mma")
    assert ("multiply-adds" in text) == (by == "multiply-adds")


@pytest.mark.parametrize(
    "given, message",
    [
        ({"a": (4, 0)}, r"left\[4:68, 0:64\] begins at no row that 8 divides and column that 16 divides"),
        ({"a": (0, 8), "b": (0, 8)}, "begins at no row that 8 divides and column that 16 divides"),
        ({"a": (0, 16), **TURNED}, r"left\[0:64, 16:80\] begins at no row that 8 divides and column that 64 divides"),
    ],
)
def test_roles_of_other_parts_are_refused(given, message):
    assert re.search(message, tile.explain(parts(**given), HOPPER))


def test_a_part_that_is_loaded_slowly_is_warned_of():
    with pytest.warns(TileWarning, match=r"rows of left\[0:64, 4:68\] begin at no multiples of 16 bytes"):
        tile.plan(parts(a=(0, 4), b=(0, 4)), AMPERE)


@pytest.mark.gpu
@pytest.mark.parametrize("given, by", PARTS)
@pytest.mark.filterwarnings("ignore:.*tens of times slower")
def test_parts_of_tiles_on_a_gpu(cuda, given, by, tmp_path):
    func = parts(**given)
    a_shape, b_shape = given.get("shapes", ((80, 128), (80, 128)))
    rng = np.random.default_rng(3)
    a, b = (rng.integers(-4, 5, shape).astype("bfloat16") for shape in (a_shape, b_shape))
    c = np.full((64, 64), np.nan, "float32")
    tile.compile(func, "cuda", Cache(tmp_path / "kept"))(a, b, c)
    expected = np.zeros((64, 64))
    begins = [(given.get("a", (0, 0)), given.get("b", (0, 0)))]
    for rows, columns in [((0, 0), (0, 0))] * given.get("both", False) + begins:
        left = a[rows[0] : rows[0] + 64, rows[1] : rows[1] + 64].astype("float64")
        right = b[columns[0] : columns[0] + 64, columns[1] : columns[1] + 64].astype("float64")
        ta, tb = given.get("transposes", (False, True))
        expected += (left.T if ta else left) @ (right.T if tb else right)
    np.testing.assert_array_equal(c, expected)
