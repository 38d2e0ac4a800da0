"""Classes that random programs showed to be wrong, or to end in another's error: each is refused, or right."""

import numpy as np
import pytest
from small import product
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import LowerError, ScheduleError
from tvm_axe.layout import Layout, Mesh

X2 = Mesh({"x": 2})


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-9, 10, shape).astype("float32")


# ---- fuse_collective: what another iteration writes --------------------------------------------------------------


def other_row(row: str, v):
    """Which of four rows is read in iteration v."""
    return {"own": v, "rolled": (v + 3) % 4, "reversed": 3 - v, "of pairs": v // 2 * 2, "the next": T.min(v + 1, 3)}[
        row
    ]


def summed_and_read(row: str) -> tirx.PrimFunc:
    """Y = sums of X over its last dimension, of which a second block reads another row."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 6, 4), "float32"), Z: T.Buffer((4, 6), "float32")):
        Y = T.sblock_alloc_buffer((4, 6))
        for i, j, k in T.grid(4, 6, 4):
            with T.sblock("sum"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    Y[vi, vj] = T.float32(0)
                Y[vi, vj] = Y[vi, vj] + X[vi, vj, vk]
        for i, j in T.grid(4, 6):
            with T.sblock("read"):
                vi, vj = T.axis.remap("SS", [i, j])
                Z[vi, vj] = Y[other_row(row, vi), vj] * T.float32(2)

    return func


ROWS = {
    "own": np.arange(4),
    "rolled": (np.arange(4) + 3) % 4,
    "reversed": 3 - np.arange(4),
    "of pairs": np.arange(4) // 2 * 2,
    "the next": np.minimum(np.arange(4) + 1, 3),
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("row", ROWS)
def test_a_reader_of_other_rows(launched, row, dim):
    """The loop over rows is around both blocks; the rows are what the devices share, or aren't."""
    sch = axe.Schedule(summed_and_read(row), mesh=X2)
    _, reduce = sch.shard(sch.get_loops("sum")[2], "x")
    scatter, gather = sch.split_collective(reduce, dim=dim)
    read = sch.get_sblock("read")
    try:
        moved = sch.reorder_collective(gather, [read])
        before = sch.mod.script()
        sch.fuse_collective([scatter, read])
    except ScheduleError as error:
        assert row != "own" and "'read'" in str(error)
        if "another iteration" in str(error):
            assert sch.mod.script() == before
        return
    assert row in ("own", "reversed") and moved  # upstream runs through what is reversed backwards
    X = numbers(4, 6, 4)
    found = axe.compile(sch, work_dir=None).run(launched(X2), X)
    np.testing.assert_array_equal(found, 2 * X.sum(axis=2)[ROWS[row]])


@pytest.mark.parametrize("column", ROWS)
def test_a_sum_over_other_columns(launched, column):
    """A sum takes its initial value where its iterator is 0: backwards, that is behind all of its terms."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 4, 4), "float32"), Z: T.Buffer((4,), "float32")):
        Y = T.sblock_alloc_buffer((4, 4))
        for i, j, k in T.grid(4, 4, 4):
            with T.sblock("sum"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    Y[vi, vj] = T.float32(0)
                Y[vi, vj] = Y[vi, vj] + X[vi, vj, vk]
        for i, j in T.grid(4, 4):
            with T.sblock("row"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    Z[vi] = T.float32(0)
                Z[vi] = Z[vi] + Y[vi, other_row(column, vj)]

    sch = axe.Schedule(axe.with_layouts(func, {"Z": "S[(2, 2) : (1@x, 1)]"}), mesh=X2)
    total, row = sch.get_sblock("sum"), sch.get_sblock("row")
    for block in (total, row):
        sch.shard(sch.get_loops(block)[0], "x")
    try:
        sch.fuse_collective([total, row])
    except ScheduleError as error:
        assert column != "own" and "'row'" in str(error)
        assert column != "reversed" or "reduce backwards" in str(error)
    X = numbers(4, 4, 4)
    found = axe.compile(sch, work_dir=None).run(launched(X2), X)
    np.testing.assert_array_equal(found, X.sum(axis=2)[:, ROWS[column]].sum(axis=1))


def test_a_loop_of_one_iteration_that_is_shared(launched):
    """Two devices go through one iteration: a reader that sums must not see it twice."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((6, 6), "float32"), Z: T.Buffer((6,), "float32")):
        Y = T.sblock_alloc_buffer((36,))
        for i, j in T.grid(6, 6):
            with T.sblock("flat"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi * 6 + vj] = X[vi, vj]
        for i, j in T.grid(6, 36):
            with T.sblock("sum"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    Z[vi] = T.float32(0)
                Z[vi] = Z[vi] + Y[vj]

    sch = axe.Schedule(func, mesh=X2)
    flat = sch.get_sblock("flat")
    sch.split(sch.get_loops(flat)[1], [None, 1])
    sch.shard(sch.get_loops(flat)[2], "x")
    with pytest.raises(ScheduleError, match=r"'flat' is masked .* beyond its iterators' domains"):
        sch.fuse_collective([flat, sch.get_sblock("sum")])
    X = numbers(6, 6)
    found = axe.compile(sch, work_dir=None).run(launched(X2), X)
    np.testing.assert_array_equal(found, np.full(6, X.sum(), "float32"))


# ---- Overlap -----------------------------------------------------------------------------------------------------


def overlapped() -> axe.Schedule:
    sch = axe.Schedule(product(8, 6, 4), mesh=X2)
    partial, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    scatter, _ = sch.split_collective(reduce)
    sch.overlap([partial, scatter], "x", chunks=2)
    return sch


def test_the_ring_within_the_chunks_is_refused(launched):
    sch = overlapped()
    A, B = numbers(8, 4), numbers(4, 6)
    np.testing.assert_array_equal(axe.compile(sch, work_dir=None).run(launched(X2), A, B), A @ B)
    loops = {"axe.ring" in sch.get(loop).annotations: loop for loop in sch.get_loops("mm_rf")[:3]}
    chunk = next(loop for loop in sch.get_loops("mm_rf") if "axe.overlap" in sch.get(loop).annotations)
    sch.reorder(chunk, loops[True])
    with pytest.raises(LowerError, match="is around the ring, and within the loop over the chunks"):
        axe.compile(sch, work_dir=None)


def test_a_reduction_over_the_chunks_is_refused():
    """Each chunk would start the sum anew."""

    @T.prim_func(s_tir=True)
    def total(X: T.Buffer((9, 3), "float32"), Z: T.Buffer((), "float32")):
        Y = T.sblock_alloc_buffer((9,))
        for i, j in T.grid(9, 3):
            with T.sblock("rows"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    Y[vi] = T.float32(0)
                Y[vi] = Y[vi] + X[vi, vj]
        for i in range(9):
            with T.sblock("all"):
                vi = T.axis.reduce(9, i)
                with T.init():
                    Z[()] = T.float32(0)
                Z[()] = Z[()] + Y[vi]

    sch = axe.Schedule(total, mesh=Mesh({"x": 3}))
    partial, reduce = sch.shard(sch.get_loops("rows")[1], "x")
    scatter, gather = sch.split_collective(reduce)
    sch.reorder_collective(gather, [sch.get_sblock("all")])
    sch.overlap([partial, scatter], "x", chunks=3)
    sch.fuse_collective([scatter, sch.get_sblock("all_rf")])
    with pytest.raises(LowerError, match="block 'all_rf' reduces over the chunks"):
        axe.compile(sch, work_dir=None)


@pytest.mark.parametrize("split", [False, True], ids=["all-reduce", "scatter and gather"])
@pytest.mark.parametrize("columns", [5, 6, 7, 8])
def test_a_sum_into_a_part_of_what_a_parameter_has(launched, columns, split):
    """The terms have as many columns as the parameter; the engine's sums are of whole slabs."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((3, 4), "int32"), W: T.Buffer((5, 4), "int32"), Y: T.Buffer((3, columns), "int32")):
        for i, j, k in T.grid(3, 5, 4):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    Y[vi, vj] = 0
                Y[vi, vj] = Y[vi, vj] + X[vi, vk] * W[vj, vk]

    sch = axe.Schedule(func, mesh=X2)
    _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    if split:
        sch.split_collective(reduce, dim=1)
    X, W, Y = (numbers(*shape).astype("int32") for shape in ((3, 4), (5, 4), (3, columns)))
    exe = axe.compile(sch, work_dir=None)
    found = exe.run(launched(X2), *({"X": X, "W": W, "Y": Y}[name] for name in exe.inputs))
    np.testing.assert_array_equal(found[:, :5], X @ W.T)
    if columns > 5:
        np.testing.assert_array_equal(found[:, 5:], Y[:, 5:])


def test_a_single_chunk_of_which_devices_have_parts(launched):
    """The chunk is all of a device's slice, and those of another axis share it."""
    mesh = Mesh({"x": 2, "y": 2})
    sch = axe.Schedule(product(8, 6, 4), mesh=mesh)
    partial, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    scatter, _ = sch.split_collective(reduce)
    sch.overlap([partial, scatter], "x", chunks=1)
    inner = next(loop for loop in sch.get_loops(scatter) if int(sch.get(loop).extent) == 4)
    sch.shard(inner, "y")
    A, B = numbers(8, 4), numbers(4, 6)
    np.testing.assert_array_equal(axe.compile(sch, work_dir=None).run(launched(mesh), A, B), A @ B)


def test_a_chunk_of_a_flattened_buffer_is_shorter_than_its_extent_says(launched):
    """Of 3 columns the second device's chunk has one; only the iterators' whole domains say that a row ends there."""
    sch = axe.Schedule(product(2, 3, 2), mesh=X2)
    partial, total = sch.shard(sch.get_loops("mm")[2], "x")
    scatter, _ = sch.split_collective(total, dim=1)
    sch.overlap([partial, scatter], "x", chunks=1)
    sch.cache_write(partial, 0, "global")
    sch.set_layout("C.rf_global", "S[(2, 2, 3) : (6, 3, 1)]")
    A, B = numbers(2, 2), numbers(2, 3)
    np.testing.assert_array_equal(axe.compile(sch, work_dir=None).run(launched(X2), A, B), A @ B)


def test_terms_that_are_scattered_over_one_axis_and_summed_over_another(launched):
    """What a sum over x leaves counts the devices of y, so that its slabs lack that dimension."""
    mesh = Mesh({"x": 2, "y": 2})
    sch = axe.Schedule(product(12, 8, 24), mesh=mesh)
    partial, _ = sch.shard(sch.get_loops("mm")[2], "y")
    _, reduce = sch.shard(sch.get_loops(partial)[-1], "x", block=partial)
    _, gather = sch.split_collective(reduce, dim=1)
    sch.reorder_collective(gather, [sch.get_sblock("mm")])
    exe = axe.compile(sch, work_dir=None)
    A, B = numbers(12, 24), numbers(24, 8)
    np.testing.assert_array_equal(exe.run(launched(mesh), A, B), A @ B)


# ---- What upstream leaves to be read -----------------------------------------------------------------------------


def test_an_update_in_place_that_is_cached():
    @T.prim_func(s_tir=True)
    def update(W: T.Buffer((4, 6), "float32"), X: T.Buffer((4, 6), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("update"):
                vi, vj = T.axis.remap("SS", [i, j])
                W[vi, vj] = T.max(W[vi, vj], X[vi, vj])

    sch = axe.Schedule(update, mesh=X2)
    sch.cache_write(sch.get_sblock("update"), 0, "global")
    with pytest.raises(LowerError, match="block 'update' reads 'W_global', which nothing has written by then"):
        axe.compile(sch, work_dir=None)


def test_one_of_two_readers_that_is_inlined():
    @T.prim_func(s_tir=True)
    def two(X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32"), Z: T.Buffer((4,), "float32")):
        A, B = T.sblock_alloc_buffer((4,)), T.sblock_alloc_buffer((4,))
        for i in range(4):
            with T.sblock("a"):
                v = T.axis.spatial(4, i)
                A[v] = X[v] + T.float32(1)
        for i in range(4):
            with T.sblock("b"):
                v = T.axis.spatial(4, i)
                B[v] = A[v] * T.float32(2)
        for i in range(4):
            with T.sblock("y"):
                v = T.axis.spatial(4, i)
                Y[v] = A[v]
        for i in range(4):
            with T.sblock("z"):
                v = T.axis.spatial(4, i)
                Z[v] = B[v]

    sch = axe.Schedule(two, mesh=X2)
    try:
        sch.reverse_compute_inline(sch.get_sblock("b"))
    except Exception as error:
        assert "ScheduleError" in type(error).__name__  # upstream refuses it here
        return
    with pytest.raises(LowerError, match="block 'y' reads 'A', which nobody allocates"):
        axe.compile(sch, work_dir=None)


def test_a_reduction_under_a_mask_that_is_factored():
    """Of 3 terms the second device has one, and rfactor makes room for two that nobody fills."""

    @T.prim_func(s_tir=True)
    def total(X: T.Buffer((3,), "float32"), Y: T.Buffer((1,), "float32")):
        for i in range(3):
            with T.sblock("total"):
                v = T.axis.reduce(3, i)
                with T.init():
                    Y[0] = T.float32(0)
                Y[0] = Y[0] + X[v]

    sch = axe.Schedule(total, mesh=X2)
    partial, _ = sch.shard(sch.get_loops("total")[0], "x")
    sch.rfactor(sch.get_loops(partial)[1], 0)
    with pytest.raises(LowerError, match=r"block 'total_rf' reads Y\.rf\.rf\[1, 1, 0\], which nothing has written"):
        axe.compile(sch, work_dir=None)


# ---- What an iteration leaves to the next ----------------------------------------------------------------------------


def rolled_copy() -> axe.Schedule:
    """A copy at rows that are rolled: of 4 iterations the last two write no row, and read one again."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((2, 8), "float32"), Y: T.Buffer((2, 8), "float32")):
        for i, j in T.grid(2, 8):
            with T.sblock("roll"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[(vi + 1) % 2, vj] = X[vi, vj]

    return axe.Schedule(func, mesh=X2)


def test_an_intermediate_lives_in_an_iteration():
    sch = rolled_copy()
    roll = sch.get_sblock("roll")
    _, inner = sch.split(sch.get_loops(roll)[0], [None, 4])
    sch.reverse_compute_at(sch.cache_write(roll, 0, "global"), inner)
    with pytest.raises(LowerError, match=r"reads Y_global\[1, 0\], which nothing has written in that iteration of"):
        axe.compile(sch, work_dir=None)


def test_a_whole_iteration_is_written(launched):
    sch = rolled_copy()
    roll = sch.get_sblock("roll")
    inner = sch.get_loops(roll)[0]
    sch.reverse_compute_at(sch.cache_write(roll, 0, "global"), inner)
    X = numbers(2, 8)
    np.testing.assert_array_equal(axe.compile(sch, work_dir=None).run(launched(X2), X), X[::-1])


# ---- A halo in a nest of several blocks ----------------------------------------------------------------------------


def test_a_halo_beside_a_block_that_does_not_read_it(launched):
    """The last block of the nest ends a sum over devices; it has no piece of its own in which a place could be."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((3,), "float32"), Y: T.Buffer((5,), "float32"), Z: T.Buffer((), "bool")):
        for i, j in T.grid(5, 3):
            with T.sblock("sum"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    Y[vi] = T.float32(0)
                Y[vi] = Y[vi] + X[vj] * T.Cast("float32", vi)
        for i in range(5):
            with T.sblock("any"):
                v = T.axis.reduce(5, i)
                with T.init():
                    Z[()] = T.bool(False)
                Z[()] = T.Or(Z[()], Y[v] > T.float32(0))

    sch = axe.Schedule(func, mesh=Mesh({"x": 3}))
    _, total = sch.shard(sch.get_loops("sum")[1], "x")
    total, gather = sch.split_collective(total, dim=0)
    sch.fuse_collective([total, gather])
    sch.fuse_collective([gather, sch.get_sblock("any")])
    sch.set_layout("Y.rf", "S[(3, 5) : (5, 1)]")
    X = numbers(3)
    np.testing.assert_allclose(axe.compile(sch, work_dir=None).run(launched(sch.mesh), X)[0], X.sum() * np.arange(5))


# ---- Which dimension an axis cuts --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (1, 1), (2, 1, 1)])
def test_axes_that_share_dimensions_of_one_element(launched, shape):
    """The layout alone leaves open which dimension an axis cuts; what is put into slabs is what kernels look for."""
    mesh = Mesh({"x": 2, "y": 2})
    names = ", ".join(f"v{dim}" for dim in range(len(shape)))

    from tvm.script import from_source

    func = from_source(
        f"""
@T.prim_func(s_tir=True)
def func(X: T.Buffer({shape}, "float32"), Y: T.Buffer({shape}, "float32")):
    for {names.replace("v", "i")} in T.grid{shape}:
        with T.sblock("y"):
            {names} = T.axis.remap("{"S" * len(shape)}", [{names.replace("v", "i")}])
            Y[{names}] = X[{names}] + T.float32(1)
""",
        extra_vars={"T": T},
    )
    X = numbers(*shape)
    for first in range(len(shape)):
        sch = axe.Schedule(func, mesh=mesh)
        _, own = sch.shard(sch.get_loops("y")[first], "y")
        sch.shard(own, "x")
        np.testing.assert_array_equal(axe.compile(sch, work_dir=None).run(launched(mesh), X), X + 1)


def test_a_plan_over_dimensions_of_one_element(launched):
    """Steps between say which dimension they cut, where their layouts don't."""
    mesh = Mesh({"x": 2, "y": 2})
    cut = Layout.parse("S[(2, 2, 1, 4) : (1@x, 1@y, 4, 1)]")
    X = numbers(2, 4)
    for text in ("S[(2, 4) : (4, 1)] + R[(2, 2) : (1@x, 1@y)]", "S[(2, 2, 2) : (2, 1@x, 1)] + R[2 : 1@y]"):
        tensor = launched(mesh).mesh_tensor((2, 4), "float32", layout=cut)
        tensor.scatter(X)
        np.testing.assert_array_equal(axe.redistribute(tensor, Layout.parse(text)).gather(), X)
