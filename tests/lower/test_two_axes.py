"""Several mesh axes that share one dimension: where its pieces lie, who does what, and that it is right."""

import numpy as np
import pytest
from tvm.script import from_source
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.lower.parsing import parse_program
from tvm_axe.lower.pieces import pieces_of, renumbered

MESHES = [Mesh({"x": 2, "y": 2}), Mesh({"x": 2, "y": 3}), Mesh({"x": 2, "y": 2, "z": 2})]


def program(rows: int, write: str = "vi, vj"):
    """C[write] = 2 A[vi, vj], then D = C + 1, stages that `T.prim_func` takes from their text."""
    text = f"""
@T.prim_func(s_tir=True)
def func(A: T.Buffer(({rows}, 3), "float32"), D: T.Buffer(({rows}, 3), "float32")):
    C = T.sblock_alloc_buffer(({rows}, 3), "float32")
    for i, j in T.grid({rows}, 3):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[{write}] = A[vi, vj] * T.float32(2)
    for i, j in T.grid({rows}, 3):
        with T.sblock("add"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = C[vi, vj] + T.float32(1)
"""
    return from_source(text, extra_vars={"T": T})


def shared(sch, block, axes, at=0):
    """Share a loop of a block over axes, the first one outermost."""
    loop = sch.get_loops(sch.get_sblock(block))[at]
    for axis in axes:
        _, loop = sch.shard(loop, axis, block=sch.get_sblock(block))
    return sch


def numbers(rows):
    return np.random.default_rng(rows).integers(-8, 8, (rows, 3)).astype("float32")


@pytest.mark.parametrize("rows", [24, 19, 10, 5, 1])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pieces_are_those_of_a_placement(mesh, rows):
    """Each device does ceil(rows / devices) rows, also where each axis by itself would round up."""
    sch = shared(axe.Schedule(program(rows), mesh=mesh), "double", mesh.names)
    block = parse_program(sch.mod["main"], mesh).blocks()[0]
    expected = pieces_of(rows, mesh.names, mesh)
    assert expected[-1][1] == -(-rows // mesh.size)
    assert block.writes[0].pieces == {0: expected}


@pytest.mark.parametrize(("rows", "order"), [(24, 1), (19, 1), (10, 1), (5, 1), (19, -1), (5, -1)])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_values(launched, mesh, rows, order):
    """Both stages shared, the first one, and with the layouts declared so; by axes in either order."""
    axes = mesh.names[::order]
    layout = Layout.sharded((rows, 3), mesh, {0: axes})
    for stages in (("double",), ("add",), ("double", "add")):
        for declared in ({}, {"A": layout}, {"A": layout, "D": layout}):
            sch = axe.Schedule(axe.with_layouts(program(rows), declared), mesh=mesh)
            for stage in stages:
                shared(sch, stage, axes)
            exe = axe.compile(sch, work_dir=None, redistribute="insert")
            assert all(exe.layouts[name] == layout for name in declared)
            found = exe.run(launched(mesh), numbers(rows))
            np.testing.assert_array_equal(found, numbers(rows) * 2 + 1)


def test_what_is_shared_alike_needs_nothing():
    """Both stages do their own rows, unevenly: no device asks another."""
    mesh = Mesh({"x": 2, "y": 3})
    layout = Layout.sharded((10, 3), mesh, {0: ("y", "x")})
    sch = axe.Schedule(axe.with_layouts(program(10), {"A": layout, "D": layout}), mesh=mesh)
    for stage in ("double", "add"):
        shared(sch, stage, ("y", "x"))
    lowered = lower(sch.mod["main"], mesh)
    assert [stage.kind for stage in lowered.stages] == ["local", "local"]
    assert lowered.layouts["C"] == layout and lowered.buffers["A"].sharding.slab == (2, 3)


@pytest.mark.parametrize("rows", [12, 10])
def test_one_axis_is_gathered_after_the_other(rows):
    """The minor axis first; where the pieces don't nest, in copies that are padded to whole pieces."""
    mesh = Mesh({"x": 2, "y": 2})
    func = axe.with_layouts(program(rows), {"A": Layout.sharded((rows, 3), mesh, {0: ("x", "y")})})
    exe = axe.compile(func, mesh, work_dir=None, redistribute="insert")
    gathers = [(stage.kind, stage.axis) for stage in exe.stages if stage.axis is not None]
    assert gathers == [("all-gather", "y"), ("all-gather", "x")]


@pytest.mark.parametrize("rows", [24, 19])
def test_a_store_elsewhere(launched, rows):
    """Rows backwards: what a device computes lies on others."""
    mesh = Mesh({"x": 2, "y": 3})
    sch = shared(axe.Schedule(program(rows, f"{rows - 1} - vi, vj"), mesh=mesh), "double", ("x", "y"))
    found = axe.compile(sch, work_dir=None, redistribute="insert").run(launched(mesh), numbers(rows))
    np.testing.assert_array_equal(found, numbers(rows)[::-1] * 2 + 1)


@pytest.mark.parametrize("rows", [12, 11, 2])
@pytest.mark.parametrize("split", [[None, 2], [None, 3], [2, None]])
def test_cyclic_shares_are_made_contiguous(launched, rows, split):
    """An inner loop that is shared: refused by who schedules every byte, else other devices do its iterations."""
    mesh = Mesh({"x": 3})
    sch = axe.Schedule(program(rows), mesh=mesh)
    _, inner = sch.split(sch.get_loops(sch.get_sblock("double"))[0], split)
    sch.shard(inner, "x", block=sch.get_sblock("double"))
    with pytest.raises(LowerError):
        axe.compile(sch, work_dir=None, redistribute="refuse")
    exe = axe.compile(sch, work_dir=None, redistribute="insert")
    assert exe.layouts["C"] == Layout.replicated((rows, 3), mesh) or exe.layouts["C"].cuts((rows, 3), mesh)[0] == ("x",)
    np.testing.assert_array_equal(exe.run(launched(mesh), numbers(rows)), numbers(rows) * 2 + 1)


def test_renumbering_leaves_alone_what_it_does_not_see_through():
    """Both iterators of one loop; and a store that two iterations share."""

    @T.prim_func(s_tir=True)
    def diagonal(A: T.Buffer((5, 5), "float32"), B: T.Buffer((5, 5), "float32")):
        for i in T.serial(2, annotations={"axe.bind": "x"}):
            for j in T.serial(2, annotations={"axe.bind": "y"}):
                for k in range(2):
                    with T.sblock("copy"):
                        vi = T.axis.spatial(5, i * 3 + j * 2 + k)
                        vj = T.axis.spatial(5, i * 3 + j * 2 + k)
                        T.where(j * 2 + k < 3 and i * 3 + j * 2 + k < 5)
                        B[vi, vj] = A[vi, vj]

    mesh = Mesh({"x": 2, "y": 2})
    nest = diagonal.body.block.body
    assert renumbered(nest, mesh, cyclic=True).same_as(nest)
    halves = shared(axe.Schedule(program(10, "vi // 2, vj"), mesh=mesh), "double", ("x", "y"))
    nest = halves.mod["main"].body.block.body[0]
    assert renumbered(nest, mesh, cyclic=True).same_as(nest)


def test_a_cyclic_share_of_the_only_nest(launched):
    """Fewer elements than devices and iterations."""

    @T.prim_func(s_tir=True)
    def twos(Y: T.Buffer((1, 1), "int32")):
        for i in range(1):
            with T.sblock("two"):
                vi = T.axis.spatial(1, i)
                Y[vi // 1, vi % 1] = T.int32(2)

    mesh = Mesh({"x": 2})
    sch = axe.Schedule(twos, mesh=mesh)
    outer, _ = sch.split(sch.get_loops(sch.get_sblock("two"))[0], [None, 2])
    sch.shard(outer, "x", block=sch.get_sblock("two"))
    assert axe.compile(sch, work_dir=None, redistribute="insert").run(launched(mesh)) == 2
