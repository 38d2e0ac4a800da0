"""Loads of the uniform model that run ahead: from where data and names of an iteration say, and by parts of a tile."""

import numpy as np
import pytest
import tvm
from interpreter import interpret
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.nodes import Copy
from tvm_axe.tile.walking import leaves

PAGES, PAGE, COUNT = 24, 16, 20

PROGRAM = """
@T.prim_func
def func(K: T.Buffer(({pages}, {page}, 64), "float16"), table: T.Buffer((3, {count}), "int32"),
         Y: T.Buffer((3, {page}, 64), "float32")):
    with tile.kernel(3) as b:
        k = tile.shared(({page}, 64), "float16")
        y = tile.fragment(({page}, 64), "float32")
        at = tile.local((1,), "int32")
        tile.fill(y, 0)
        at[0] = 0
        for j in tile.pipelined({count}):
{load}
            with tile.parallel({page}, 64) as (r, c):
                y[r, c] = y[r, c] + T.cast(k[r, c], "float32")
{behind}
        tile.copy(y, Y[b, 0, 0])
"""

AHEAD = {
    "an element": ["tile.copy(K[table[b, j], 0, 0], k)"],
    "a name": ["page = table[b, j]", "tile.copy(K[page, 0, 0], k)"],
    "names of names": ["entry = {count} - 1 - j", "page = table[b, entry]", "tile.copy(K[page, 0, 0], k)"],
    "a local": ["at[0] = table[b, j]", "tile.copy(K[at[0], 0, 0], k)"],
    "parts": [
        "page = table[b, j]",
        "tile.copy(K[page, 0, 0], k[0:8, 0:64])",
        "tile.copy(K[page, 8, 0], k[8:16, 0:64])",
    ],
}
"""What fills the tile, where loads run ahead."""

NOT_AHEAD = {
    "what the loop counts": (["tile.copy(K[at[0], 0, 0], k)"], "at[0] = at[0] + 1"),
    "a name of what the loop counts": (["page = table[b, at[0]]", "tile.copy(K[page, 0, 0], k)"], "at[0] = at[0] + 1"),
    "a local of two values": (
        ["at[0] = table[b, j]", "if j > 3:", "    at[0] = 5", "tile.copy(K[at[0], 0, 0], k)"],
        "",
    ),
    "a tile that is also filled otherwise": (
        ["tile.copy(K[table[b, j], 0, 0], k[0:8, 0:64])", "if b > 0:",
         "    tile.copy(K[table[b, j], 8, 0], k[8:16, 0:64])", "else:",
         "    tile.copy(K[table[b, j], 0, 0], k[8:16, 0:64])"],
        "",
    ),
}  # fmt: skip


def func(load, behind="", page=PAGE):
    indented = "\n".join("            " + line for line in load).format(count=COUNT)
    source = PROGRAM.format(pages=PAGES, page=page, count=COUNT, load=indented, behind="            " + behind)
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def drawn():
    rng = np.random.default_rng(0)
    k = rng.integers(-4, 5, (PAGES, PAGE, 64)).astype("float16")
    return k, rng.integers(0, PAGES, (3, COUNT)).astype("int32"), np.full((3, PAGE, 64), np.nan, "float32")


def pipelines(program, target="cuda:sm_80"):
    return list(tile.plan(program, target).memory.pipelines.values())


@pytest.mark.parametrize("name", AHEAD)
def test_runs_ahead(name):
    program = func(AHEAD[name])
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        (pipeline,) = pipelines(program, target)
        copies = [node for node in leaves(tile.read(program).body) if isinstance(node, Copy)]
        assert len(pipeline.copies) == len(copies) - 1
        assert set(pipeline.copies.values()) == {16}
        for made in pipeline.ahead.values():  # no name of the iteration is left
            assert str(made.src).startswith("K[table[b, ")


@pytest.mark.parametrize("name", NOT_AHEAD)
def test_does_not_run_ahead(name):
    program = func(*NOT_AHEAD[name])
    assert pipelines(program) == []
    assert "loop j: loads don't run ahead" in tile.explain(program, "cuda:sm_80")


def test_where_a_load_begins_is_loaded_once(tmp_path):
    """Not for each of a thread's pieces."""
    source = tile.compile(func(AHEAD["a name"], page=64), "cuda:sm_80", Cache(tmp_path)).source
    loop = source[source.rindex("__global__") :].partition("for (int")[2]
    assert loop.count("cp_async_cg_src_size") >= 2
    assert loop.count("table_ptr[") == 2  # ahead, and for the name itself


def test_a_branch_around_the_loop_is_no_obstacle():
    source = PROGRAM.format(
        pages=PAGES, page=PAGE, count=COUNT, load="            tile.copy(K[table[b, j], 0, 0], k)", behind=""
    )
    lines = source.splitlines()
    first = next(i for i, line in enumerate(lines) if "for j" in line)
    last = next(i for i, line in enumerate(lines) if "tile.copy(y" in line)
    lines = [
        *lines[:first],
        "        if table[b, 0] >= 0:",
        *("    " + line for line in lines[first:last]),
        *lines[last:],
    ]
    program = tvm.script.from_source("\n".join(lines), extra_vars={"tile": tile, "T": T})
    assert len(pipelines(program)) == 1


@pytest.mark.parametrize("name", [*AHEAD, *(name for name in NOT_AHEAD)])
def test_values_on_a_cpu(name, tmp_path):
    """The programs mean what they are taken for."""
    program = func(AHEAD[name]) if name in AHEAD else func(*NOT_AHEAD[name])
    arrays = drawn()
    want = interpret(program, *arrays)[2]
    tile.compile(program, "llvm", Cache(tmp_path))(*arrays)
    np.testing.assert_array_equal(arrays[2], want)
    if name == "a name":
        np.testing.assert_array_equal(want, arrays[0][arrays[1]].astype("float64").sum(axis=1))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*AHEAD, *NOT_AHEAD])
def test_values_on_a_gpu(name, cuda, tmp_path):
    program = func(AHEAD[name]) if name in AHEAD else func(*NOT_AHEAD[name])
    arrays = drawn()
    tile.compile(program, "cuda", Cache(tmp_path))(*arrays)
    np.testing.assert_array_equal(arrays[2], interpret(program, *drawn())[2])


# ---- Tiles that are gathered --------------------------------------------------------------------------------------

GATHERING = """
@T.prim_func
def func(X: T.Buffer((12, 12, {channels}), "{dtype}"), first: T.Buffer((9,), "int32"), Y: T.Buffer((80, {channels}), "float32")):
    with tile.kernel(5) as b:
        a = tile.shared((16, {channels}), "{dtype}")
        y = tile.fragment((16, {channels}), "float32")
        tile.fill(y, 0)
        for j in tile.pipelined(9):
{load}
            with tile.parallel(16, {channels}) as (r, c):
                y[r, c] = y[r, c] + T.cast(a[r, c], "float32")
        tile.copy(y, Y[b * 16, 0])
"""  # noqa: E501

WINDOW = [
    "with tile.parallel(16, {channels} // {piece}, {piece}) as (r, q, v):",
    "    h: T.let = (b * 16 + r) // 8 + j // 3 - 1",
    "    w: T.let = (b * 16 + r) % 8 + j % 3 - 1",
    "    a[r, q * {piece} + v] = T.if_then_else(h >= 0 and w >= 0, X[h, w, q * {piece} + v], T.{dtype}(0))",
]
PLAIN = [
    "with tile.parallel(16, {channels}) as (r, c):",
    "    a[r, c] = X[(b * 16 + r) // 8 + j // 3, (b * 16 + r) % 8 + j % 3, c]",
]

GATHERED = {
    "pieces of a window": (WINDOW, {"piece": 8, "channels": 64}, 16),
    "short pieces": (WINDOW, {"piece": 4, "channels": 12}, 8),
    "shorter pieces": (WINDOW, {"piece": 2, "channels": 6}, 4),
    "single elements of 4 bytes": (WINDOW, {"piece": 1, "channels": 3, "dtype": "float32"}, 4),
    "no condition": (PLAIN, {"channels": 64}, 16),
    "by a name of the iteration": (
        ["row: T.let = j // 3", *(line.replace("j // 3", "row") for line in PLAIN)], {}, 16,
    ),
    "the other way round": ([line.replace("a[r,", "a[15 - r,") for line in PLAIN], {}, 16),
}  # fmt: skip
"""What fills the tile, and the bytes that a thread takes at once."""

NOT_GATHERED = {
    "elements of 2 bytes": (WINDOW, {"piece": 1, "channels": 3}),
    "another value than zero": ([line.replace("(0)", "(1)") for line in WINDOW], {}),
    "a negative zero": ([line.replace("(0)", "(-0.0)") for line in WINDOW], {}),
    "data say from where": ([line.replace("j // 3", "first[j]") for line in PLAIN], {}),
    "a name of data": (["row: T.let = first[j]", *(line.replace("j // 3", "row") for line in PLAIN)], {}),
    "data say whether": ([line.replace("h >= 0", "first[j] > 0") for line in WINDOW], {}),
    "a sum": ([*PLAIN[:1], PLAIN[1].replace("= X", "= T.float16(1) + X")], {}),
    "half of it": ([line.replace("(16,", "(8,") for line in PLAIN], {}),
}


def gathering(load, options):
    options = {"piece": 8, "channels": 64, "dtype": "float16", **options}
    indented = "\n".join("            " + line for line in load).format(**options)
    return tvm.script.from_source(GATHERING.format(load=indented, **options), extra_vars={"tile": tile, "T": T})


def images(options):
    rng, channels = np.random.default_rng(1), options.get("channels", 64)
    x = rng.integers(-4, 5, (12, 12, channels)).astype(options.get("dtype", "float16"))
    return x, np.arange(9, dtype="int32") // 3, np.full((80, channels), np.nan, "float32")


@pytest.mark.parametrize("name", GATHERED)
def test_gathers_run_ahead(name):
    load, options, size = GATHERED[name]
    for target in ("cuda:sm_80", "cuda:sm_90a"):
        (pipeline,) = pipelines(gathering(load, options), target)
        assert list(pipeline.copies.values()) == [size]


@pytest.mark.parametrize("name", [*NOT_GATHERED])
def test_what_is_no_gather_does_not_run_ahead(name):
    assert pipelines(gathering(*NOT_GATHERED[name])) == []


@pytest.mark.parametrize("name", GATHERED)
def test_gathers_on_a_cpu(name, tmp_path):
    load, options, _ = GATHERED[name]
    program, arrays = gathering(load, options), images(options)
    want = interpret(program, *arrays)[2]
    tile.compile(program, "llvm", Cache(tmp_path))(*arrays)
    np.testing.assert_array_equal(arrays[2], want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GATHERED)
def test_gathers_on_a_gpu(name, cuda, tmp_path):
    load, options, _ = GATHERED[name]
    program, arrays = gathering(load, options), images(options)
    tile.compile(program, "cuda", Cache(tmp_path))(*arrays)
    np.testing.assert_array_equal(arrays[2], interpret(program, *images(options))[2])
