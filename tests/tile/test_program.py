"""Reading: what becomes a node, names and scalars, and what is no tile program."""

import pytest
import tvm
from tvm import sym, tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Assign, Branch, Copy, Let, Loop, Parallel
from tvm_axe.tile.walking import substitute, tiles_of, walk


@T.prim_func
def lengths(A: T.handle, N: T.Buffer((4,), "int32")):
    """Symbolic shapes, scalars from tensors, a branch in a loop of dynamic extent."""
    n = T.int32()
    X = T.match_buffer(A, (4, n), "float32")
    with tile.kernel(4, tile.cdiv(n, 32)) as (b, m):
        x = tile.fragment((32,), "float32")
        y = tile.shared((1, 32), "float32")
        length = N[b]
        last: T.let = n - 1
        tile.copy(X[b, m * 32], x)
        for k in range(m, length):
            if k * 32 < last:
                with tile.parallel(32) as i:
                    twice = x[i] * T.float32(2)
                    if m * 32 + i < n:
                        X[b, m * 32 + i] = twice
            else:
                tile.copy(x, y)


def test_nodes():
    program = tile.read(lengths)
    assert str(program).splitlines()[1:] == [
        "    global X: float32[4, n]",
        "    global N: int32[4]",
        "    fragment x: float32[32]",
        "    shared y: float32[1, 32]",
        "    local length: int32[1]",
        "    length[0] = N[b]",
        "    last = n - 1",
        "    copy X[b, m * 32:m * 32 + 32] to x",
        "    for k in range(m, length):",
        "        if k * 32 < last:",
        "            parallel 32 into X",
        "        else:",
        "            copy x to y",
    ]
    assert [type(node) for node in walk(program.body)] == [Assign, Let, Copy, Loop, Branch, Parallel, Copy]
    assert program.grid[0][1] == 4 and program.options == {}


def test_reads_and_writes():
    program = tile.read(lengths)
    assign, let, load, loop = program.body
    named = {node: ([t.name for t in node.reads], [t.name for t in node.writes]) for node in program.nodes()}
    assert named[assign] == (["N"], ["length"])
    assert named[let] == ([], [])
    assert named[load] == (["X"], ["x"])
    assert named[loop] == (["x"], ["X", "y"])


def test_regions():
    _, _, load, loop = tile.read(lengths).body
    store = loop.body[0].otherwise[0]
    assert (load.src.shape, load.src.dimensions, load.src.whole) == ((32,), (1,), False)
    assert (store.dst.shape, store.dst.dimensions, store.dst.whole) == ((32,), (1,), True)
    assert load.src.overruns(tile.read(lengths).analyzer()) == (1,)
    assert load.dst.overruns(tile.read(lengths).analyzer()) == ()


def test_a_grid_over_a_wider_extent_is_inside():
    """Of an int64 extent a grid counts in int32; what is beyond its tiles' multiples isn't proved."""
    n, m = tirx.Var("n", "int64"), tirx.Var("m", "int64")
    batches, rows = tirx.Cast("int32", n), tirx.Cast("int32", m)

    @T.prim_func
    def whole(A: T.Buffer((n, m, 8), "float32"), B: T.Buffer((n, m, 8), "float32")):
        with tile.kernel(batches, tile.cdiv(rows, 4)) as (b, i):
            x = tile.shared((4, 8), "float32")
            tile.copy(A[b, i * 4 : i * 4 + 4, 0:8], x)
            tile.copy(x, B[b + 1, i * 4 : i * 4 + 4, 0:8])

    program = tile.read(whole)
    load, store = program.body
    assert load.src.overruns(program.analyzer()) == (1,)
    assert store.dst.overruns(program.analyzer()) == (0, 1)


def test_bytes():
    assert [t.bytes for t in tile.read(lengths).tiles] == [128, 128, 4]


def test_names_in_parallel_are_names_for_values():
    (parallel,) = (node for node in tile.read(lengths).nodes() if isinstance(node, Parallel))
    name, choice = parallel.body.seq
    assert isinstance(name, tirx.Bind) and str(name.var) == "twice"
    assert choice.then_case.value.same_as(name.var)
    assert [(t.name, stores) for t, _, stores in parallel.accesses] == [("x", False), ("X", True)]


def test_substitute():
    program = tile.read(lengths)
    (batch, _), (row, _) = program.grid
    body = substitute(program.body, {row: tirx.IntImm("int32", 3)})
    assert body[1] is program.body[1]
    assert int(sym.Analyzer().simplify(body[2].src.start[1])) == 96
    assert body[2].dst is program.body[2].dst and body[2].src.tile is program.params[0]
    assert str(body[3]) == "for k in range(3, length)"
    assert substitute(program.body, {}) is program.body
    assert tiles_of(program.body[0].value, {t.buffer: t for t in program.params}) == (program.params[1],)
    assert batch.name == "b"


# ---- What is no tile program -----------------------------------------------------------------------------------------


def test_kernel_refused():
    @T.prim_func
    def none(A: T.Buffer((4,), "float32")):
        A[0] = T.float32(1)

    @T.prim_func
    def two(A: T.Buffer((4,), "float32")):
        for _ in range(2):
            with tile.kernel(1):
                tile.fill(A, 0)

    @T.prim_func
    def inside(A: T.Buffer((4,), "float32")):
        with tile.kernel(1):
            for _ in range(2):
                with tile.kernel(1):
                    tile.fill(A, 0)

    @T.prim_func
    def scalar(A: T.Buffer((4,), "float32"), n: T.int8):
        with tile.kernel(1):
            tile.fill(A, 0)

    for func, message in [
        (none, "one `with tile.kernel.*found BufferStore at its top"),
        (two, "nothing beside it; found For at its top"),
        (inside, "a kernel inside a kernel"),
        (scalar, "parameter n: int8; valid scalars are int32, int64, float32, float64"),
    ]:
        with pytest.raises(TileError, match=message):
            tile.read(func)


def body(case: str) -> tirx.PrimFunc:
    @T.prim_func
    def func(A: T.Buffer((32, 32), "float32"), L: T.Buffer((1,), "int32")):
        with tile.kernel(1):
            a = tile.shared((32, 32), "float32")
            c = tile.fragment((32, 32), "float32")
            tile.fill(a, 0)
            tile.fill(c, 0)
            if case == "word":
                T.tile.sqrt(c, c)
            if case == "scaled":
                T.tile.gemm(c, a, a, c, False, False, 2.0, 1.0)
            if case == "axes":
                T.tile.sum(c[0, 0:1], a, [0, 1], False)
            if case == "scope":
                x = T.alloc_buffer((32,), "float32", scope="warp")
                tile.fill(x, 0)
            if case == "extent":
                y = T.alloc_buffer((L[0],), "float32", scope="shared")
                tile.fill(y, 0)
            if case == "statement":
                T.evaluate(T.call_extern("int32", "puts", "hello"))
            if case == "loop":
                with tile.parallel(32) as i:
                    for j in range(L[0]):
                        a[i, j] = T.float32(0)
            if case == "loops":
                with tile.parallel(32) as i:
                    for j in range(32):
                        for k in range(9):
                            a[i, j] = T.float32(k)
            if case == "nested":
                with tile.parallel(32) as i:
                    tile.fill(a, 0)
            if case == "dynamic":
                with tile.parallel(L[0]) as i:
                    a[i, 0] = T.float32(0)

    return func


@pytest.mark.parametrize(
    "case, message",
    [
        ("word", "sqrt is no word of tvm_axe.tile; elementwise computation is written in `parallel`"),
        ("scaled", r"gemm: c = 2.0 \* a @ b \+ 1.0 \* c; valid is c \(\+\)= a @ b"),
        ("axes", r"sum: along axes \[0, 1\]; a tile is reduced along one axis at a time"),
        ("scope", "tile x: scope 'warp'; valid are shared, fragment and local tiles"),
        ("extent", "tile y: extents are positive constants"),
        ("statement", "Evaluate is no part of a tile program"),
        (
            "loop",
            r"parallel: a loop of L.* iterations over j in its body, .*valid are up to 256 in all, a constant number",
        ),
        ("loops", "parallel: a loop of 9 iterations over k, and 32 of those around it, in its body, which is written"),
        ("nested", "parallel: TilePrimitiveCall in its body"),
        ("dynamic", "parallel: extents are constants"),
    ],
)
def test_statement_refused(case, message):
    with pytest.raises(TileError, match=message):
        tile.read(body(case))


def test_region_without_constant_extents():
    @T.prim_func
    def func(A: T.Buffer((32,), "float32")):
        with tile.kernel(1) as m:
            T.tile.fill(A[0 : m + 1], T.float32(0))

    with pytest.raises(TileError, match="a region of A has no constant extents"):
        tile.read(func)


def test_a_program_is_read_without_being_changed():
    before = lengths.script()
    tile.read(lengths)
    assert lengths.script() == before


def with_parameter(options: str) -> tirx.PrimFunc:
    source = f"""@T.prim_func
def func(O: T.Buffer((4, 8), "int32", {options})):
    with tile.kernel(1) as m:
        with tile.parallel(4, 8) as (i, j):
            O[i, j] = 1
"""
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


@pytest.mark.parametrize(
    "options, says",
    [
        ("elem_offset=8", "parameter O: elem_offset 8; valid is a tensor from its first element"),
        ('scope="shared"', "parameter O: scope 'shared'; valid are tensors in global memory"),
        ('scope="local"', "parameter O: scope 'local'; valid are tensors in global memory"),
    ],
)
def test_a_parameter_that_no_tensor_can_be(options, says):
    with pytest.raises(TileError, match=says):
        tile.read(with_parameter(options))


def test_a_parameter_that_says_it_is_dense():
    tile.read(with_parameter("strides=(8, 1)"))


@pytest.mark.parametrize("what", ["product", 3, None])
@pytest.mark.parametrize(
    "ask",
    [
        tile.read,
        tile.read_sequence,
        tile.compile,
        lambda it: tile.compile(it, knobs={"bm": 64}),
        lambda it: tile.plan(it, "llvm"),
        lambda it: tile.lower(it, "llvm"),
        lambda it: tile.explain(it, "llvm"),
    ],
    ids=["read", "read_sequence", "compile", "compile with knobs", "plan", "lower", "explain"],
)
def test_what_is_no_function_at_all(ask, what):
    with pytest.raises(TileError, match=f"a {type(what).__name__} is no tile program; valid is a function"):
        ask(what)
