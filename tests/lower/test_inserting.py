"""Inserted redistributions: what they leave is right, and what they can't do is refused."""

import re

import numpy as np
import pytest
from tvm import tirx
from tvm.script import from_source
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.lower.inserting import redistributed

TP2, TP3 = Mesh({"tp": 2}), Mesh({"tp": 3})


@pytest.fixture
def right(launched):
    """Compile with copies, check two runs against numpy, poison before each; returns the executable."""

    def check(program, mesh, reference, **inputs):
        exe = axe.compile(program, mesh, work_dir=None, redistribute="insert")
        with pytest.raises(LowerError):
            axe.compile(program, mesh, work_dir=None, redistribute="refuse")
        workers = launched(exe.mesh)
        exe.run(workers, **{name: np.full_like(array, np.nan) for name, array in inputs.items()})
        found = exe.run(workers, **inputs)
        expected = reference(**{name: array.copy() for name, array in inputs.items()})
        np.testing.assert_array_equal(found, expected)
        return exe

    return check


def whole(*shape: int) -> np.ndarray:
    """Small integers, so that sums are exact in any order."""
    return np.random.default_rng(sum(shape)).integers(-8, 8, shape).astype("float32")


def source(text: str) -> tirx.PrimFunc:
    """A function that `T.prim_func` takes from its text."""
    return from_source(f"@T.prim_func(s_tir=True)\ndef func({text}", extra_vars={"T": T})


def chain(write: str, shape: tuple[int, ...], rows: int = 8) -> tirx.PrimFunc:
    """Y[write] = 2 X[vi, vj]."""
    return source(f"""X: T.Buffer(({rows}, 4), "float32"), Y: T.Buffer({shape}, "float32")):
    for i, j in T.grid({rows}, 4):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[{write}] = X[vi, vj] * T.float32(2)
""")


@pytest.mark.parametrize("loop", [0, 1])
@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize(
    ("write", "shape", "place"),
    [
        ("7 - vi, vj", (8, 4), lambda i, j: (7 - i, j)),
        ("(vi + 3) % 8, vj", (8, 4), lambda i, j: ((i + 3) % 8, j)),
        ("vi ^ 5, vj", (8, 4), lambda i, j: (i ^ 5, j)),
        ("vi * 4 + vj", (32,), lambda i, j: (i * 4 + j,)),
        ("vj, vi", (4, 8), lambda i, j: (j, i)),
        ("vi, vj", (8, 4), lambda i, j: (i, j)),
    ],
)
def test_a_store_anywhere_is_gathered(right, write, shape, place, devices, loop):
    func = chain(write, shape)
    sch = axe.Schedule(func, mesh=Mesh({"tp": devices}))
    sch.shard(sch.get_loops(sch.get_sblock("double"))[loop], "tp")

    def reference(X):
        out = np.empty(shape, "float32")
        for i, j in np.ndindex(8, 4):
            out[place(i, j)] = 2 * X[i, j]
        return out

    exe = right(sch, None, reference, X=whole(8, 4))
    assert any(stage.kind == "all-gather" for stage in exe.stages)
    said = exe.show()
    assert re.search(r"\n  compute apart Y for double: [0-9,.]+ bytes\n", said)
    assert re.search(r": [1-9][0-9,.]* bytes\n", said[said.index("redistributed\n") :])


def test_what_is_left_of_a_parameter_stays(right):
    """An append to a cache, its rows shared."""

    @T.prim_func(s_tir=True)
    def append(new: T.Buffer((4, 2), "float32"), cache: T.Buffer((9, 2), "float32")):
        for i, j in T.grid(4, 2):
            with T.sblock("append"):
                vi, vj = T.axis.remap("SS", [i, j])
                cache[vi + 3, vj] = new[vi, vj]

    sch = axe.Schedule(append, mesh=Mesh({"tp": 2}))
    sch.shard(sch.get_loops(sch.get_sblock("append"))[0], "tp")

    def reference(new, cache):
        cache[3:7] = new
        return cache

    right(sch, None, reference, new=whole(4, 2), cache=whole(9, 2))


def test_an_output_that_is_sharded_is_held_and_taken_over(right):
    """19 rows over 8 devices, the last ones without any; the block isn't sharded at all."""
    func = chain("18 - vi, vj", (19, 4), rows=19)
    mesh = Mesh({"tp": 8})
    func = axe.with_layouts(func, {"Y": Layout.sharded((19, 4), mesh, {0: "tp"})})
    exe = right(func, mesh, lambda X: 2 * X[::-1], X=whole(19, 4))
    assert exe.inputs == ("X",) and exe.lowered.inserted == ("hold Y for double: 0 bytes",)
    assert not exe.layouts["Y"].R


def test_reads_of_the_neighbours_rows(right):
    """A halo: the devices' borders are read by others."""

    @T.prim_func(s_tir=True)
    def blur(X: T.Buffer((10,), "float32"), Y: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("blur"):
                vi = T.axis.spatial(8, i)
                Y[vi] = X[vi] + X[vi + 1] + X[vi + 2]

    mesh = Mesh({"tp": 4})
    func = axe.with_layouts(blur, {"X": Layout.sharded((10,), mesh, {0: "tp"})})
    sch = axe.Schedule(func, mesh=mesh)
    sch.cache_write(sch.get_sblock("blur"), 0, "global")
    sch.shard(sch.get_loops(sch.get_sblock("blur"))[0], "tp")
    right(sch, None, lambda X: X[:-2] + X[1:-1] + X[2:], X=whole(10))


@pytest.mark.parametrize("mesh", [TP2, TP3, Mesh({"tp": 4}), Mesh({"tp": 8})], ids=str)
@pytest.mark.parametrize(
    ("value", "rows", "of", "width"),
    [
        ("X[vi] + X[vi + 1] + X[vi + 2]", 17, lambda X: X[:-2] + X[1:-1] + X[2:], 3),
        ("X[T.max(vi - 1, 0)] + X[T.min(vi + 1, 18)]", 19, lambda X: X[[0, *range(18)]] + X[[*range(1, 19), 18]], 3),
        ("X[vi] + T.if_then_else(vi < 17, X[vi + 2], T.float32(0))", 19,
         lambda X: X + np.concatenate([X[2:], [0, 0]]), 3),
        ("X[vi * 2] + X[vi * 2 + 2]", 9, lambda X: X[:-2:2] + X[2::2], 3),
    ],
    ids=["valid", "clamped", "on a condition", "strided"],
)  # fmt: skip
def test_a_halo_moves_borders_only(right, mesh, value, rows, of, width):
    func = source(f"""X: T.Buffer((19,), "float32"), Y: T.Buffer(({rows},), "float32")):
    for i in range({rows}):
        with T.sblock("read"):
            vi = T.axis.spatial({rows}, i)
            Y[vi] = {value}
""")
    layouts = {"X": Layout.sharded((19,), mesh, {0: "tp"}), "Y": Layout.sharded((rows,), mesh, {0: "tp"})}
    sch = axe.Schedule(axe.with_layouts(func, layouts), mesh=mesh)
    sch.shard(sch.get_loops(sch.get_sblock("read"))[0], "tp")
    exe = right(sch, None, of, X=whole(19))
    assert [stage.kind for stage in exe.stages] == ["mesh kernel", "local"] and "halo X for read" in exe.show()
    (slab,) = [func for name, func in exe.lowered.module.functions_items() if name.name_hint == "X_halo"]
    piece = -(-rows // mesh["tp"])
    stride = 2 if rows == 9 else 1
    assert [int(extent) for extent in slab.params[1].shape] == [1, stride * (piece - 1) + width]


def test_a_halo_over_two_axes(right):
    """The corners come with the second."""
    mesh = Mesh({"x": 2, "y": 3})

    @T.prim_func(s_tir=True)
    def blur(X: T.Buffer((10, 11), "float32"), Y: T.Buffer((8, 9), "float32")):
        for i, j in T.grid(8, 9):
            with T.sblock("blur"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] + X[vi + 2, vj + 2] * T.float32(2)

    layouts = {name: Layout.sharded(shape, mesh, {0: "x", 1: "y"}) for name, shape in (("X", (10, 11)), ("Y", (8, 9)))}
    sch = axe.Schedule(axe.with_layouts(blur, layouts), mesh=mesh)
    i, j = sch.get_loops(sch.get_sblock("blur"))
    sch.shard(i, "x")
    sch.shard(j, "y")
    exe = right(sch, None, lambda X: X[:-2, :-2] + 2 * X[2:, 2:], X=whole(10, 11))
    assert [(stage.kind, stage.axis) for stage in exe.stages][:2] == [("mesh kernel", "x"), ("mesh kernel", "y")]


def test_a_halo_over_two_axes_up_to_the_borders(right):
    """What the first copy has of no row, as there is none, the second takes along and nobody reads."""
    mesh = Mesh({"x": 2, "y": 2})

    @T.prim_func(s_tir=True)
    def corners(X: T.Buffer((6, 7), "float32"), Y: T.Buffer((6, 7), "float32")):
        for i, j in T.grid(6, 7):
            with T.sblock("corners"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] + T.if_then_else(
                    T.And(T.And(vi > 0, vj > 0), T.And(vi < 5, vj < 6)), X[vi - 1, vj + 1] - X[vi + 1, vj - 1], 0.0
                )

    layouts = dict.fromkeys("XY", Layout.sharded((6, 7), mesh, {0: "x", 1: "y"}))
    sch = axe.Schedule(axe.with_layouts(corners, layouts), mesh=mesh)
    sch.shard("corners", "i", "x")
    sch.shard("corners", "j", "y")

    def of(X):
        found = X.copy()
        found[1:-1, 1:-1] += X[:-2, 2:] - X[2:, :-2]
        return found

    exe = right(sch, None, of, X=whole(6, 7))
    assert [stage.kind for stage in exe.stages] == ["mesh kernel", "mesh kernel", "local"]


@pytest.mark.parametrize("mesh", [TP2, TP3, Mesh({"dp": 2, "tp": 3})], ids=str)
def test_another_dimension_is_cut(right, mesh):
    """Sums over rows, which are shared: each device takes all rows of its columns."""

    @T.prim_func(s_tir=True)
    def sums(X: T.Buffer((7, 8), "float32"), Y: T.Buffer((8,), "float32")):
        for j, i in T.grid(8, 7):
            with T.sblock("sum"):
                vj, vi = T.axis.remap("SR", [j, i])
                with T.init():
                    Y[vj] = T.float32(0)
                Y[vj] = Y[vj] + X[vi, vj]

    layouts = {"X": Layout.sharded((7, 8), mesh, {0: "tp"}), "Y": Layout.sharded((8,), mesh, {0: "tp"})}
    sch = axe.Schedule(axe.with_layouts(sums, layouts), mesh=mesh)
    sch.shard(sch.get_loops(sch.get_sblock("sum"))[0], "tp")
    exe = right(sch, None, lambda X: X.sum(axis=0), X=whole(7, 8))
    assert [(stage.kind, stage.axis) for stage in exe.stages] == [("all-to-all", "tp"), ("local", None)]
    assert "recut X for sum" in exe.show()


@pytest.mark.parametrize(
    ("value", "shared"), [("X[(vi + 1) % 8]", True), ("X[7 - vi]", True), ("X[vi] + X[T.min(vi + 1, 7)]", False)]
)
def test_what_is_no_halo_is_gathered(right, value, shared):
    """Rolled and reversed reads go all over the buffer; and a block that isn't shared reads all of it."""
    func = source(f"""X: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("read"):
            vi = T.axis.spatial(8, i)
            Y[vi] = {value}
""")
    layouts = {"X": Layout.sharded((8,), TP2, {0: "tp"})}
    sch = axe.Schedule(axe.with_layouts(func, layouts), mesh=TP2)
    if shared:
        sch.shard(sch.get_loops(sch.get_sblock("read"))[0], "tp")
    X = whole(8)
    of = {"X[(vi + 1) % 8]": np.roll(X, -1), "X[7 - vi]": X[::-1]}.get(value, X + X[[*range(1, 8), 7]])
    exe = right(sch, None, lambda X: of, X=X)
    assert any(line.startswith("gather X for read") for line in exe.lowered.inserted)


def test_two_gathered_dimensions(right):
    """Both dimensions of what a product reads are shared: a gather follows the other."""
    mesh = Mesh({"dp": 2, "tp": 3})

    @T.prim_func(s_tir=True)
    def product(A: T.Buffer((6, 5), "float32"), B: T.Buffer((5, 4), "float32"), C: T.Buffer((6, 4), "float32")):
        for i, j, k in T.grid(6, 4, 5):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]

    layouts = {
        "A": Layout.sharded((6, 5), mesh, {0: "dp", 1: "tp"}),
        "B": Layout.sharded((5, 4), mesh, {0: "tp", 1: "dp"}),
        "C": Layout.sharded((6, 4), mesh, {1: "dp"}),
    }
    sch = axe.Schedule(axe.with_layouts(product, layouts), mesh=mesh)
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[0], "tp")
    exe = right(sch, None, lambda A, B: A @ B, A=whole(6, 5), B=whole(5, 4))
    assert sum(stage.kind == "all-gather" for stage in exe.stages) >= 4


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("rows", [6, 5])
def test_what_lies_in_pieces_on_one_device_of_another_axis(right, root, rows):
    """It goes to the others of that axis in its pieces, before these are gathered."""
    mesh = Mesh({"dp": 2, "tp": 2})

    @T.prim_func(s_tir=True)
    def total(A: T.Buffer((2, rows, 4), "float32"), out: T.Buffer((rows, 4), "float32")):
        s = T.sblock_alloc_buffer((rows, 4), "float32")
        for i, j, k in T.grid(rows, 4, 2):
            with T.sblock("sum"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    s[vi, vj] = T.float32(0)
                s[vi, vj] = s[vi, vj] + A[vk, vi, vj]
        for i, j in T.grid(rows, 4):
            with T.sblock("flip"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = s[rows - 1 - vi, vj]

    sch = axe.Schedule(axe.with_layouts(total, {"A": Layout.sharded((2, rows, 4), mesh, {0: "dp"})}), mesh=mesh)
    block = sch.get_sblock("sum")
    sch.all_reduce(sch.get_loops(block)[2], "dp")
    sch.split_collective(block, root=root)
    block = sch.get_sblock("sum")
    sch.shard(sch.get_loops(block)[0], "tp")
    exe = right(sch, None, lambda A: A.sum(0)[::-1], A=whole(2, rows, 4))
    assert [stage.kind for stage in exe.stages if stage.inserted] == ["broadcast", "all-gather"]


def test_a_saved_executable_says_it_too(launched, tmp_path):
    sch = axe.Schedule(chain("7 - vi, vj", (8, 4)), mesh=TP3)
    sch.shard(sch.get_loops(sch.get_sblock("double"))[0], "tp")
    exe = axe.compile(sch, work_dir=None, redistribute="insert")
    exe.save(tmp_path / "exe")
    loaded = axe.Executable.load(tmp_path / "exe")
    assert loaded.lowered.inserted == exe.lowered.inserted != ()
    np.testing.assert_array_equal(loaded.run(launched(TP3), whole(8, 4)), 2 * whole(8, 4)[::-1])


def test_what_is_lowered_already_is_refused_with_its_copies(caplog):
    """And said by nobody a second time: who lowered it has them."""
    sch = axe.Schedule(chain("7 - vi, vj", (8, 4)), mesh=TP3)
    sch.shard(sch.get_loops(sch.get_sblock("double"))[0], "tp")
    lowered = axe.compile(sch, work_dir=None).lowered
    assert [record.getMessage() for record in caplog.records] == [f"func: redistributed, {'; '.join(lowered.inserted)}"]
    assert axe.compile(lowered, work_dir=None).lowered is lowered
    assert len(caplog.records) == 1
    with pytest.raises(
        LowerError, match=r"copies were inserted into func, .*Y for double: 0 bytes; compile it without"
    ):
        axe.compile(lowered, work_dir=None, redistribute="refuse")
    plain = lower(axe.Schedule(chain("vi, vj", (8, 4)), mesh=TP3).mod["main"], TP3)
    assert axe.compile(plain, work_dir=None, redistribute="refuse").lowered is plain


def test_what_needs_nothing_is_as_it_was():
    sch = axe.Schedule(chain("vi, vj", (8, 4)), mesh=TP3)
    func = sch.mod["main"]
    assert redistributed(func, TP3).same_as(func)


def test_what_has_an_order_is_refused():
    """Two rows are stored into one: which is left depends on who comes last."""
    sch = axe.Schedule(chain("vi // 2, vj", (4, 4)), mesh=TP3)
    sch.shard(sch.get_loops(sch.get_sblock("double"))[0], "tp")
    with pytest.raises(LowerError, match=r"'double'.*'Y'.*two iterations may store into one element"):
        axe.compile(sch, work_dir=None, redistribute="insert")


def test_arguments_are_checked():
    func = chain("vi, vj", (8, 4))
    with pytest.raises(LowerError, match="redistribute is 'yes'; valid are"):
        axe.compile(func, TP3, work_dir=None, redistribute="yes")
