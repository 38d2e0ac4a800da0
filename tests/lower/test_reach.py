"""What an author's schedules ask of other devices: each is compiled, with copies where it needs them, and right."""

import numpy as np
import pytest
from tvm.script import from_source
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import ScheduleError
from tvm_axe.layout import Layout, Mesh


def source(text: str):
    """A function that `T.prim_func` takes from its text."""
    return from_source(f"@T.prim_func(s_tir=True)\ndef func({text}", extra_vars={"T": T})


def numbers(*shape: int, dtype: str = "float32", least: int = -3) -> np.ndarray:
    """Small integers, so that sums and products are exact in any order."""
    return np.random.default_rng(sum(shape)).integers(least, 4, shape).astype(dtype)


def check(launched, sch, expected, *inputs):
    """Compile with copies, run twice, compare; returns the executable."""
    exe = axe.compile(sch, work_dir=None, redistribute="insert")
    workers = launched(exe.mesh)
    exe.run(workers, *(np.zeros_like(array) for array in inputs))
    np.testing.assert_array_equal(exe.run(workers, *inputs), expected)
    return exe


# ---- Reductions ------------------------------------------------------------------------------------------------------

FOLDS = {
    "sum": ("T.float32(0)", "C[vi, vj] + A[vi, vj, vk]", np.add),
    "product": ("T.float32(1)", "C[vi, vj] * A[vi, vj, vk]", np.multiply),
    "max": ("T.min_value('float32')", "T.max(C[vi, vj], A[vi, vj, vk])", np.maximum),
    "min": ("T.max_value('float32')", "T.min(C[vi, vj], A[vi, vj, vk])", np.minimum),
}


def folded(name: str, rows: int):
    """C = A folded over its last dimension, D = 2 C."""
    init, value, _ = FOLDS[name]
    return source(f"""A: T.Buffer(({rows}, 4, 8), "float32"), D: T.Buffer(({rows}, 4), "float32")):
    C = T.sblock_alloc_buffer(({rows}, 4))
    for i, j, k in T.grid({rows}, 4, 8):
        with T.sblock("fold"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = {init}
            C[vi, vj] = {value}
    for i, j in T.grid({rows}, 4):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = C[vi, vj] * T.float32(2)
""")


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("rows", [6, 5])
@pytest.mark.parametrize("name", FOLDS)
def test_reductions_are_split(launched, name, rows, devices):
    """Into a scatter along either dimension and a gather, which follows its reader; or into one to a device."""
    data = numbers(rows, 4, 8, least=1)
    expected = 2 * FOLDS[name][2].reduce(data, axis=2)
    for dim, root in ((0, None), (1, None), (0, 1)):
        for reordered in (False, True) if root is None else (False,):
            sch = axe.Schedule(folded(name, rows), mesh=Mesh({"x": devices}))
            _, reduce = sch.shard(sch.get_loops(sch.get_sblock("fold"))[2], "x")
            _, gather = sch.split_collective(reduce, dim, root)
            if reordered:
                sch.reorder_collective(gather, [sch.get_sblock("double")])
            check(launched, sch, expected, data)


def any_of(rows: int):
    return source(f"""A: T.Buffer(({rows}, 8), "bool"), C: T.Buffer(({rows},), "bool")):
    for i, k in T.grid({rows}, 8):
        with T.sblock("any"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                C[vi] = T.bool(False)
            C[vi] = T.Or(C[vi], A[vi, vk])
""")


@pytest.mark.parametrize("rows", [6, 5])
def test_any(launched, rows):
    """Its rows are shared; over what it reduces, upstream can't take a bool apart."""
    data = np.random.default_rng(0).random((rows, 8)) < 0.15
    sch = axe.Schedule(any_of(rows), mesh=Mesh({"x": 3}))
    with pytest.raises(ScheduleError, match=r"'any' reduces to bool.*the maximum of an int8 buffer"):
        sch.shard(sch.get_loops(sch.get_sblock("any"))[1], "x")
    sch.shard(sch.get_loops(sch.get_sblock("any"))[0], "x")
    check(launched, sch, data.any(axis=1), data)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_product_of_halves_into_floats(launched, devices):
    func = source("""A: T.Buffer((6, 7), "float16"), B: T.Buffer((7, 4), "float16"), C: T.Buffer((6, 4), "float32")):
    for i, j, k in T.grid(6, 4, 7):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.Cast("float32", A[vi, vk]) * T.Cast("float32", B[vk, vj])
""")
    A, B = numbers(6, 7, dtype="float16"), numbers(7, 4, dtype="float16")
    sch = axe.Schedule(func, mesh=Mesh({"x": devices}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "x")
    sch.split_collective(reduce, 0)
    exe = check(launched, sch, A.astype("float32") @ B.astype("float32"), A, B)
    assert [stage.kind for stage in exe.stages] == ["local", "reduce-scatter", "all-gather"]


# ---- Reads of what others own ----------------------------------------------------------------------------------------


def reading(value: str, rows: int, read: int):
    """B = A + 1 on `read` rows, then C = `value` of B on `rows` of them."""
    return source(f"""A: T.Buffer(({read}, 3), "float32"), C: T.Buffer(({rows}, 3), "float32")):
    B = T.sblock_alloc_buffer(({read}, 3))
    for i, j in T.grid({read}, 3):
        with T.sblock("add"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj] + T.float32(1)
    for i, j in T.grid({rows}, 3):
        with T.sblock("read"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = {value}
""")


@pytest.mark.parametrize("mesh", [Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 8}), Mesh({"x": 2, "y": 3})], ids=str)
@pytest.mark.parametrize(
    ("value", "rows", "read", "of"),
    [
        ("B[vi + 2, vj]", 17, 19, lambda B: B[2:]),
        ("B[vi, vj] + B[vi + 1, vj] + B[vi + 2, vj]", 17, 19, lambda B: B[:-2] + B[1:-1] + B[2:]),
        ("B[T.max(vi - 1, 0), vj] + B[vi, vj] + B[T.min(vi + 1, 18), vj]", 19, 19,
         lambda B: B[[0, *range(18)]] + B + B[[*range(1, 19), 18]]),
        ("B[18 - vi, vj]", 19, 19, lambda B: B[::-1]),
    ],
    ids=["offset", "halo", "halo with borders", "reversed"],
)  # fmt: skip
def test_rows_of_other_devices(launched, value, rows, read, of, mesh):
    """Every stage shared over all axes, 19 rows over 8 devices too, parameters declared so or not."""
    data = numbers(read, 3)
    layouts = {"A": Layout.sharded((read, 3), mesh, {0: mesh.names}), "C": Layout.sharded((rows, 3), mesh, {0: "x"})}
    for declared in ({}, layouts):
        sch = axe.Schedule(axe.with_layouts(reading(value, rows, read), declared), mesh=mesh)
        for name in ("add", "read"):
            loop = sch.get_loops(sch.get_sblock(name))[0]
            for axis in mesh.names:
                _, loop = sch.shard(loop, axis, block=sch.get_sblock(name))
        check(launched, sch, of(data + 1), data)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_buffer_is_redistributed_for_each_of_its_readers(launched, devices):
    """Two stages read all of what is shared: each has a copy of its own, sharded otherwise for one of them."""
    func = source("""A: T.Buffer((6, 4), "float32"), C: T.Buffer((6, 4), "float32"), D: T.Buffer((6, 4), "float32")):
    B = T.sblock_alloc_buffer((6, 4))
    for i, j in T.grid(6, 4):
        with T.sblock("add"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj] + T.float32(1)
    for i, j in T.grid(6, 4):
        with T.sblock("roll"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = B[(vi + 1) % 6, vj]
    for i, j in T.grid(6, 4):
        with T.sblock("flip"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = B[5 - vi, vj]
""")
    data = numbers(6, 4)
    for second in (None, 1):
        sch = axe.Schedule(func, mesh=Mesh({"x": devices}))
        sch.shard(sch.get_loops(sch.get_sblock("add"))[0], "x")
        sch.redistribute(sch.get_sblock("roll"), "B", "x")
        sch.redistribute(sch.get_sblock("flip"), "B", "x", second)
        if second is not None:
            sch.cache_write(sch.get_sblock("flip"), 0, "global")
            sch.shard(sch.get_loops(sch.get_sblock("flip"))[1], "x")
        exe = axe.compile(sch, work_dir=None)
        assert not exe.lowered.inserted
        C, D = exe.run(launched(exe.mesh), data)
        np.testing.assert_array_equal(C, np.roll(data + 1, -1, axis=0))
        np.testing.assert_array_equal(D, (data + 1)[::-1])


@pytest.mark.parametrize("mesh", [Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3})], ids=str)
def test_two_dimensions_are_gathered_at_once(launched, mesh):
    """A transpose of what is cut both ways, and of which both ways are shared."""
    func = source("""A: T.Buffer((7, 5), "float32"), C: T.Buffer((5, 7), "float32")):
    for i, j in T.grid(5, 7):
        with T.sblock("transpose"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vj, vi] * T.float32(2)
""")
    layouts = {"A": Layout.sharded((7, 5), mesh, {0: "x", 1: "y"}), "C": Layout.sharded((5, 7), mesh, {0: "x", 1: "y"})}
    sch = axe.Schedule(axe.with_layouts(func, layouts), mesh=mesh)
    sch.shard(sch.get_loops(sch.get_sblock("transpose"))[0], "y")
    check(launched, sch, 2 * numbers(7, 5).T, numbers(7, 5))
