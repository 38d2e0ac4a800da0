"""Right or refused: collectives of other memory orders, reductions in fused groups, masks, roots, chunks, indices."""

from __future__ import annotations

import re

import numpy as np
import pytest
from small import numbers, product, product_and_folded, run
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import LayoutError, LowerError, ScheduleError
from tvm_axe.layout import Layout, Mesh

M, N, K = 4, 6, 8
matmul = product(M, N, K)
COLUMNS_FIRST, PADDED = "S[(4, 6) : (1, 4)]", "S[(4, 6) : (8, 1)]"


@T.prim_func(s_tir=True)
def copied(X: T.Buffer((M, N), "float32"), C: T.Buffer((M, N), "float32")):
    for i, j in T.grid(M, N):
        with T.sblock("copy"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = X[vi, vj]


# ---- Collectives of buffers with a memory order ------------------------------------------------------------------


def reduced(sch: axe.Schedule, **options) -> None:
    _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    if options:
        sch.split_collective(reduce, **options)


COLLECTIVES = {
    "all-reduce": lambda sch: reduced(sch),
    "reduce-scatter and all-gather": lambda sch: reduced(sch, dim=0),
    "of columns": lambda sch: reduced(sch, dim=1),
    "reduce and broadcast": lambda sch: reduced(sch, root=1),
    "gathered rows": lambda sch: (sch.cache_write("mm", 0, "global"), sch.shard(sch.get_loops("mm")[0], "x")),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("how", ["declared", "set_layout", "row-major"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_memory_orders(launched, name, how, devices):
    A, B = numbers((M, K)), numbers((K, N))
    ended = []
    for order in (COLUMNS_FIRST, PADDED):
        mesh = Mesh({"x": devices})
        declared = axe.with_layouts(matmul, {"C": f"{order} + R[{devices} : 1@x]"}) if how == "declared" else matmul
        sch = axe.Schedule(declared, mesh=mesh)
        try:
            COLLECTIVES[name](sch)
            if how == "set_layout":
                sch.set_layout("C", order)
            exe = axe.compile(sch, work_dir=None)
        except (LowerError, ScheduleError) as error:
            assert re.search(r"(block|stage) '", str(error)) and "'C" in str(error)
            ended.append("refused")
            continue
        found = run(launched, exe, A=A, B=B, C=np.zeros(30, "float32"))["C"]  # the gaps of padded rows are inputs
        if how == "set_layout":
            found = axe.unpack(found, Layout.parse(order), (M, N))
        np.testing.assert_array_equal(found, A @ B)
        ended.append("right")
    assert how != "row-major" or ended == ["right", "right"]


def test_what_one_device_holds_is_read_from_it(launched):
    """Of the intermediates that a check compares, the sum that device 1 alone holds."""
    sch = axe.Schedule(matmul, mesh=Mesh({"x": 2}))
    reduced(sch, root=1)
    exe = axe.compile(sch, work_dir=None)
    A, B = numbers((M, K)), numbers((K, N))
    run(launched, exe, A=A, B=B)
    np.testing.assert_array_equal(exe.held(launched(exe.mesh))["C_global"], A @ B)


def test_a_memory_order_across_dimensions_is_refused():
    """Where an element lies is asked dimension by dimension; set_layout takes any order."""
    across = axe.with_layouts(matmul, {"C": "S[(3, 8) : (1, 3)] + R[2 : 1@x]"})
    with pytest.raises(LayoutError, match=r"can not be grouped by \(4, 6\): .* falls inside 8 : 3"):
        axe.compile(axe.Schedule(across, mesh=Mesh({"x": 2})), work_dir=None)


# ---- Reductions in fused groups ----------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", ["sum", "max"])
@pytest.mark.parametrize("kinds", ["SR", "RS"])
def test_fused_reductions(launched, kinds, combine):
    """Behind a slice of rows or columns: a reader isn't moved into the loop of a sum that isn't done."""
    A, B = numbers((M, K)), numbers((K, N))
    whole, axis = A @ B, 1 if kinds == "SR" else 0
    expected = whole + getattr(np, combine)(whole, axis=axis, keepdims=True)
    ended = []
    for dim in (0, 1):
        sch = axe.Schedule(product_and_folded(combine, kinds, M, N, K), mesh=Mesh({"x": 2}))
        try:
            _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
            scatter, gather = sch.split_collective(reduce, dim=dim)
            s, y = sch.get_sblock("s"), sch.get_sblock("y")
            moved = sch.reorder_collective(gather, [s, y])
            sch.fuse_collective([scatter, s, y, *moved])
            exe = axe.compile(sch, work_dir=None)
        except (LowerError, ScheduleError) as error:
            ended.append(f"{error}")
            continue
        np.testing.assert_array_equal(run(launched, exe, A=A, B=B)["Y"], expected)
        ended.append("right")
    assert all(text == "right" or "block" in text for text in ended)


def test_readers_of_unfinished_sums():
    sch = axe.Schedule(product_and_folded("sum", "RS", M, N, K), mesh=Mesh({"x": 2}))
    _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    scatter, gather = sch.split_collective(reduce, dim=1)
    moved = sch.reorder_collective(gather, [sch.get_sblock("s"), sch.get_sblock("y")])
    before = sch.mod.script()
    with pytest.raises(
        ScheduleError, match=r"block 'y' would read 's' in the loop .* over which block 's' still reduces"
    ):
        sch.fuse_collective([scatter, sch.get_sblock("s"), sch.get_sblock("y"), *moved])
    assert sch.mod.script() == before


# ---- Masks, roots, chunks, indices -------------------------------------------------------------------------------


def split_first(sch: axe.Schedule) -> None:
    sch.split(sch.get_loops("copy")[0], [2, 3])
    sch.cache_write("copy", 0, "global")
    sch.shard(sch.get_loops("copy")[0], "x")


def shared_first(sch: axe.Schedule) -> None:
    sch.shard(sch.get_loops("copy")[0], "x")
    sch.cache_write("copy", 0, "global")


def computed_at(sch: axe.Schedule) -> None:
    cached = sch.cache_write("copy", 0, "global")
    sch.compute_at("copy", sch.split(sch.get_loops(cached)[0], [2, 3])[0])


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("how", [split_first, shared_first, computed_at])
def test_cache_write_and_splits_that_do_not_divide(launched, how, devices):
    sch = axe.Schedule(copied, mesh=Mesh({"x": devices}))
    how(sch)
    try:
        exe = axe.compile(sch, work_dir=None)
    except LowerError as error:
        assert "iterator" in str(error)
        return
    X = numbers((M, N))
    np.testing.assert_array_equal(run(launched, exe, X=X)["C"], X)


def test_iterators_beyond_their_domains():
    """What is left of a split that doesn't divide, once its mask is dropped."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def func(X: T.Buffer((4, 6), "float32"), Y: T.Buffer((4, 6), "float32")):
        for i_0, i_1, j in T.grid(2, 3, 6):
            with T.sblock("copy"):
                vi = T.axis.spatial(4, i_0 * 3 + i_1)
                vj = T.axis.spatial(6, j)
                Y[vi, vj] = X[vi, vj]

    with pytest.raises(LowerError, match=r"block 'copy': iterator 'vi' = .* is not seen to stay below its extent 4"):
        axe.compile(axe.Schedule(func, mesh=Mesh({"x": 2})), work_dir=None)


def test_vectorized_loops_around_two_blocks():
    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((4, 8), "float32"), Y: T.Buffer((4, 8), "float32")):
        C = T.sblock_alloc_buffer((4, 8))
        for i in range(4):
            for j in T.vectorized(8):
                with T.sblock("c"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = X[vi, vj]
                with T.sblock("y"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    Y[vi, vj] = C[vi, vj]

    with pytest.raises(LowerError, match=r"loop 'j' is vectorized around the blocks c, y"):
        axe.compile(axe.Schedule(func, mesh=Mesh({"x": 2})), work_dir=None)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("root", [0, 1])
def test_roots(launched, dim, devices, root):
    A, B = numbers((M, K)), numbers((K, N))
    sch = axe.Schedule(matmul, mesh=Mesh({"x": devices}))
    _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    sch.split_collective(reduce, dim=dim, root=root)
    found = run(launched, axe.compile(sch, work_dir=None), A=A, B=B)["C"]
    np.testing.assert_array_equal(found, A @ B)


@pytest.mark.parametrize("chunks", [1, 2])
def test_chunks_of_64_bytes(launched, chunks):
    """Rows of 4 x 8 floats, as whole cache lines: a slab as large as all chunks, also where there is one."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((8, 4, 8), "float32"), W: T.Buffer((8, 8), "float32"), Y: T.Buffer((8, 4, 8), "float32")):
        for i, j, n, k in T.grid(8, 4, 8, 8):
            with T.sblock("mm"):
                vi, vj, vn, vk = T.axis.remap("SSSR", [i, j, n, k])
                with T.init():
                    Y[vi, vj, vn] = T.float32(0)
                Y[vi, vj, vn] = Y[vi, vj, vn] + X[vi, vj, vk] * W[vk, vn]

    sch = axe.Schedule(func, mesh=Mesh({"x": 2}))
    partial, reduce = sch.shard(sch.get_loops("mm")[3], "x")
    sch.overlap([partial, *sch.split_collective(reduce)], "x", chunks)
    X, W = numbers((8, 4, 8)), numbers((8, 8))
    np.testing.assert_array_equal(run(launched, axe.compile(sch, work_dir=None), X=X, W=W)["Y"], X @ W)


@pytest.mark.parametrize("loop", [None, 0, 1])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("kind", ["scatter", "gather"])
def test_indices_that_are_loaded(launched, kind, devices, loop):
    @T.prim_func(s_tir=True)
    def scatter(X: T.Buffer((4, 6), "float32"), index: T.Buffer((4,), "int32"), Y: T.Buffer((8, 6), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("put"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[index[vi], vj] = X[vi, vj]

    @T.prim_func(s_tir=True)
    def gather(X: T.Buffer((8, 6), "float32"), index: T.Buffer((4,), "int32"), Y: T.Buffer((4, 6), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("put"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[index[vi], vj]

    func = scatter if kind == "scatter" else gather
    given = {param.name: numbers(tuple(map(int, param.shape))) for param in func.params}
    given["index"] = np.array([6, 1, 3, 0], "int32")
    expected = given["Y"].copy()
    if kind == "scatter":
        expected[given["index"]] = given["X"]
    else:
        expected[:] = given["X"][given["index"]]
    mesh = Mesh({"x": devices})
    laid = Layout.sharded(given["Y"].shape, mesh, {} if loop is None else {loop: "x"})
    sch = axe.Schedule(axe.with_layouts(func, {"Y": laid}), mesh=mesh)
    if loop is not None:
        sch.shard(sch.get_loops("put")[loop], "x")
    try:
        exe = axe.compile(sch, work_dir=None, redistribute="refuse")
    except LowerError as error:
        assert (kind, loop) == ("scatter", 0) and "block 'put'" in str(error) and "'Y'" in str(error)
        return
    np.testing.assert_array_equal(run(launched, exe, **given)["Y"], expected)
