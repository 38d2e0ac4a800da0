"""Right or refused: exchanges of memory orders, reductions in fused groups, gathers of parts, splits of any factor."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from small import FOLDS, numbers, product_and_folded, run
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import AxeError, ScheduleError
from tvm_axe.layout import Mesh

NAMED = r"(block|stage|buffer|consumer|gather) '|'\w+'"


# ---- Exchanges and sends of buffers with a memory order ----------------------------------------------------------


def exchanged(_: int) -> tuple[tirx.PrimFunc, dict[str, np.ndarray], np.ndarray]:
    rows, columns = 6, 5

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((rows, columns), "float32"), Y: T.Buffer((rows, columns), "float32")):
        D = T.sblock_alloc_buffer((rows, columns))
        E = T.sblock_alloc_buffer((rows, columns))
        for i, j in T.grid(rows, columns):
            with T.sblock("d"):
                vi, vj = T.axis.remap("SS", [i, j])
                D[vi, vj] = X[vi, vj] * T.float32(2)
        for i, j in T.grid(rows, columns):
            with T.sblock("e"):
                vi, vj = T.axis.remap("SS", [i, j])
                E[vi, vj] = D[vi, vj]
        for i, j in T.grid(rows, columns):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = E[vi, vj] + T.float32(1)

    X = numbers((rows, columns))
    return func, {"X": X}, 2 * X + 1


def sent(devices: int) -> tuple[tirx.PrimFunc, dict[str, np.ndarray], np.ndarray]:
    columns = 5

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((devices, columns), "float32"), Y: T.Buffer((devices, columns), "float32")):
        D = T.sblock_alloc_buffer((devices, columns))
        E = T.sblock_alloc_buffer((devices, columns))
        for i, j in T.grid(devices, columns):
            with T.sblock("d"):
                vi, vj = T.axis.remap("SS", [i, j])
                D[vi, vj] = X[vi, vj] * T.float32(2)
        for i, j in T.grid(devices, columns):
            with T.sblock("e"):
                vi, vj = T.axis.remap("SS", [i, j])
                E[vi, vj] = D[(vi + devices - 1) % devices, vj]
        for i, j in T.grid(devices, columns):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = E[vi, vj] + T.float32(1)

    X = numbers((devices, columns))
    return func, {"X": X}, np.roll(2 * X, 1, axis=0) + 1


def share_exchange(sch: axe.Schedule) -> None:
    sch.shard(sch.get_loops("d")[0], "x")
    for name in ("e", "y"):
        sch.shard(sch.get_loops(name)[1], "x")
    sch.cache_write("y", 0, "global")


def share_send(sch: axe.Schedule) -> None:
    sch.shard(sch.get_loops("d")[0], "x")
    sch.send(sch.get_sblock("e"), "x")
    sch.shard(sch.get_loops("y")[0], "x")
    sch.cache_write("y", 0, "global")


EXCHANGES = {"all-to-all": (exchanged, share_exchange), "send": (sent, share_send)}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchanges_and_memory_orders(launched, name, devices):
    """Of parameters as declared, and of what is exchanged by set_layout: by columns, and with padded rows."""
    program, share = EXCHANGES[name]
    func, given, expected = program(devices)
    rows, columns = expected.shape
    mesh, right = Mesh({"x": devices}), {}
    for buffer in ("", "X", "D", "E", "Y"):
        for order in (f"S[({rows}, {columns}) : (1, {rows})]", f"S[({rows}, {columns}) : ({columns + 3}, 1)]"):
            parameter = buffer in ("X", "Y")
            declared = axe.with_layouts(func, {buffer: f"{order} + R[{devices} : 1@x]"}) if parameter else func
            sch = axe.Schedule(declared, mesh=mesh)
            try:
                share(sch)
                if buffer and not parameter:
                    sch.set_layout(buffer, order)
                exe = axe.compile(sch, work_dir=None)
            except AxeError as error:
                assert re.search(NAMED, str(error)), str(error)
                continue
            given["Y"] = np.zeros((rows, columns), "float32")
            np.testing.assert_array_equal(run(launched, exe, **given)["Y"], expected, err_msg=f"{buffer}: {order}")
            right.setdefault(buffer, []).append({stage.kind for stage in exe.stages})
    assert len(right[""]) == 2 and all(name in kinds for kinds in right[""])


# ---- Reductions in fused groups ----------------------------------------------------------------------------------

M, N, K = 4, 6, 5


@pytest.mark.parametrize("kinds", ["SR", "RS"])
@pytest.mark.parametrize("combine", FOLDS)
def test_reductions_in_fused_groups(launched, combine, kinds):
    """Slices of rows over 3 devices and of columns over 2, with each chain of the collective and its readers fused."""
    rng = np.random.default_rng(0)
    A, B = (rng.integers(-2, 3, shape).astype("float32") for shape in ((M, K), (K, N)))
    whole, axis = A @ B, 1 if kinds == "SR" else 0
    folded = (whole > 3).any(axis=axis) if combine == "any" else getattr(np, combine)(whole, axis=axis)
    expected = whole + np.expand_dims(folded.astype("float32"), axis)
    right = 0
    for dim, devices in ((0, 3), (1, 2)):
        for first, last in ((0, 2), (0, 4), (1, 3)):
            sch = axe.Schedule(product_and_folded(combine, kinds, M, N, K), mesh=Mesh({"x": devices}))
            _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
            scatter, gather = sch.split_collective(reduce, dim=dim)
            try:
                moved = sch.reorder_collective(gather, [sch.get_sblock("s"), sch.get_sblock("y")])
                chain = [scatter, sch.get_sblock("s"), sch.get_sblock("y"), *moved]
                sch.fuse_collective(chain[first:last])
                exe = axe.compile(sch, work_dir=None)
            except AxeError as error:
                assert re.search(NAMED, str(error)), str(error)
                continue
            np.testing.assert_array_equal(run(launched, exe, A=A, B=B)["Y"], expected, err_msg=sch.mod.script())
            right += 1
    assert right >= 2


# ---- Gathers of what is written in part --------------------------------------------------------------------------

PARTS = {
    "strided": ((8, 6), lambda i, j, index: (i * 2, j)),
    "diagonal": ((9, 6), lambda i, j, index: (i + j, j)),
    "strided columns": ((4, 12), lambda i, j, index: (i, j * 2)),
    "by index": ((8, 6), lambda i, j, index: (index[i], j)),
    "below": ((8, 6), lambda i, j, index: (i + 2, j)),
    "one plane": ((3, 4, 6), lambda i, j, index: (1, i, j)),
    "whole": ((4, 6), lambda i, j, index: (i, j)),
}


@pytest.mark.parametrize("primitive", ["split_collective", "reorder_collective"])
@pytest.mark.parametrize("name", PARTS)
def test_gathers_of_a_part(name, primitive):
    """Upstream's cache_write copies the box round what a block stores to, and with it what nobody wrote."""
    shape, store = PARTS[name]

    @T.prim_func(s_tir=True)
    def summed(
        A: T.Buffer((4, 8), "float32"),
        B: T.Buffer((8, 6), "float32"),
        index: T.Buffer((4,), "int32"),
        Y: T.Buffer(shape, "float32"),
    ):
        for i, j, k in T.grid(4, 6, 8):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    Y[store(vi, vj, index)] = T.float32(0)
                Y[store(vi, vj, index)] = Y[store(vi, vj, index)] + A[vi, vk] * B[vk, vj]

    @T.prim_func(s_tir=True)
    def copied(
        A: T.Buffer((4, 8), "float32"),
        B: T.Buffer((8, 6), "float32"),
        index: T.Buffer((4,), "int32"),
        Y: T.Buffer(shape, "float32"),
    ):
        C = T.sblock_alloc_buffer((4, 6))
        for i, j, k in T.grid(4, 6, 8):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
        for i, j in T.grid(4, 6):
            with T.sblock("put"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[store(vi, vj, index)] = C[vi, vj]

    ended = []
    for dim in range(len(shape) if primitive == "split_collective" else 2):
        sch = axe.Schedule(summed if primitive == "split_collective" else copied, mesh=Mesh({"x": 2}))
        _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
        try:
            _, gather = sch.split_collective(reduce, dim=dim)
            if primitive == "reorder_collective":
                sch.reorder_collective(gather, [sch.get_sblock("put")])
            assert axe.check(sch, seeds=1, work_dir=None).ok
            ended.append("right")
        except AxeError as error:
            assert not isinstance(error, axe.CheckError), str(error)
            assert re.search(NAMED, str(error)), str(error)
            ended.append(str(error))
    takes_more = any("stores to a part of 'Y'" in text for text in ended)
    assert takes_more == (name in ("strided", "diagonal", "strided columns", "by index"))
    assert name != "whole" or ended == ["right", "right"]


def test_a_cached_scatter_is_wrong_under_stock_tvm():
    """By an index, shared over columns: upstream's cache_write copies all rows, also those that nobody stores to."""

    @T.prim_func(s_tir=True)
    def scatter(X: T.Buffer((4, 6), "float32"), index: T.Buffer((4,), "int32"), Y: T.Buffer((8, 6), "float32")):
        for i, j in T.grid(4, 6):
            with T.sblock("put"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[index[vi], vj] = X[vi, vj]

    sch = axe.Schedule(scatter, mesh=Mesh({"x": 2}))
    sch.shard(sch.get_loops("put")[1], "x")
    sch.cache_write("put", 0, "global")
    with pytest.raises(axe.CheckError, match="already wrong under stock TVM after `cache_write"):
        axe.check(sch, seeds=1, work_dir=None)


# ---- Splits that don't divide, in front of cache_write ------------------------------------------------------------


@pytest.mark.parametrize(("devices", "shape"), [(2, (4, 6)), (3, (7, 5))])
def test_cache_write_behind_any_split(launched, devices, shape):
    """Each loop split by each factor, before or behind cache_write, and any of the loops then shared."""

    @T.prim_func(s_tir=True)
    def copied(X: T.Buffer(shape, "float32"), Y: T.Buffer(shape, "float32")):
        for i, j in T.grid(*shape):
            with T.sblock("copy"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = X[vi, vj] * T.float32(2)

    X = numbers(shape)
    for first, loop, factor, shared in product(("split", "cache_write", "shard"), range(2), (2, 3), range(3)):
        sch = axe.Schedule(copied, mesh=Mesh({"x": devices}))
        if first == "shard":
            _, own = sch.shard(sch.get_loops("copy")[shared % 2], "x")
            sch.split(own, [None, factor])
        elif first == "split":
            sch.split(sch.get_loops("copy")[loop], [None, factor])
        sch.cache_write("copy", 0, "global")
        if first == "cache_write":
            sch.split(sch.get_loops("copy")[loop], [None, factor])
        if first != "shard":
            sch.shard(sch.get_loops("copy")[shared], "x")
        exe = axe.compile(sch, work_dir=None)
        np.testing.assert_array_equal(run(launched, exe, X=X)["Y"], X * 2, err_msg=sch.mod.script())


# ---- What the fuzzer found raw errors of -------------------------------------------------------------------------


def test_one_nest_in_pieces_of_two_axes(launched):
    """An extent of 1, shared over both axes of a mesh, in a program of one stage."""

    @T.prim_func(s_tir=True)
    def least(X: T.Buffer((1, 3), "float32"), Y: T.Buffer((1,), "float32")):
        for i, j in T.grid(1, 3):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    Y[vi] = T.max_value("float32")
                Y[vi] = T.min(Y[vi], X[vi, vj])

    sch = axe.Schedule(least, mesh=Mesh({"x": 2, "y": 2}))
    sch.shard(sch.get_loops("y")[0], "x")
    sch.shard(sch.get_loops("y")[1], "y")
    try:
        exe = axe.compile(sch, work_dir=None)
    except AxeError as error:
        assert re.search(NAMED, str(error)), str(error)
        return
    np.testing.assert_array_equal(run(launched, exe, X=numbers((1, 3)))["Y"], [1])


def test_loops_over_no_number():
    """A block that upstream moved into another's masked loop: its loops run over what is left there."""

    @T.prim_func(s_tir=True)
    def flattened(X: T.Buffer((2, 4), "int32"), Y: T.Buffer((11,), "int32")):
        C = T.sblock_alloc_buffer((8,), "int32")
        for i, j in T.grid(2, 4):
            with T.sblock("c"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi * 4 + vj] = X[vi, vj]
        for i in range(8):
            with T.sblock("y"):
                vi = T.axis.spatial(8, i)
                Y[vi + 3] = C[vi]

    sch = axe.Schedule(flattened, mesh=Mesh({"x": 2, "y": 3}))
    sch.shard(sch.get_loops("c")[1], "y")
    sch.fuse_collective([sch.get_sblock("c"), sch.get_sblock("y")])
    copy = sch.cache_read("y", 0, "global")
    for loop in sch.get_loops(copy):
        with pytest.raises(ScheduleError, match=r"all_reduce: (block|loop) '\w+'"):
            sch.all_reduce(loop, "x")
