"""What lowering says that each device receives is what the engines' moves and the kernels that run make it receive.

The moves of a collective are those that the engine makes; of a kernel, every load from and every store to another
device's slab is counted in the function that a device runs, at all the points of its loops.
"""

import math

import numpy as np
import pytest
from tvm import DataType, tirx
from tvm.script import from_source
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.analysis.blocks import nested_blocks
from tvm_axe.analysis.counting import count
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.analysis.values import values
from tvm_axe.collective import plan
from tvm_axe.collective.side import BESIDE
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.lower.calls import Call, Tensor
from tvm_axe.lower.inserting import redistributed
from tvm_axe.lower.lowered import Lowered
from tvm_axe.programs import PROGRAMS

ONE = [Mesh({"x": 2}), Mesh({"x": 3}), Mesh({"x": 4}), Mesh({"x": 2, "y": 2})]


def in_moves(lowered: Lowered, call: Call) -> list[int]:
    """The bytes that a collective's moves bring to each device from others."""
    name, mesh, found = call.function.removeprefix("axe.").removesuffix(BESIDE), lowered.mesh, [0] * lowered.mesh.size
    if name not in plan.VIEWS:  # it waits for one beside
        return found
    source, target, *numbers, axis = call.arguments
    (dtype, *_) = (lowered.buffers[each.buffer].dtype for each in (source, target) if each.buffer in lowered.buffers)
    itemsize = DataType(dtype).itemsize
    for device in range(mesh.size):
        group, rank = mesh.group(device, axis), mesh.coords(device)[axis]
        for move in plan.plan(name, source.slab, target.slab, numbers, mesh[axis], rank):
            for reader in move.source.slabs if source.view == axis else ():
                found[device] += (reader != rank) * math.prod(move.box) * itemsize
            for writer in move.target.slabs if target.view == axis else ():
                found[group[writer]] += (writer != rank) * math.prod(move.box) * itemsize
    return found


def in_kernel(lowered: Lowered, call: Call) -> list[int]:
    """The bytes that a kernel loads from other devices' slabs, or that others' store into a device's own."""
    mesh, found = lowered.mesh, [0] * lowered.mesh.size
    func = lowered.module[call.kernel]
    views = {p: a for p, a in zip(func.params, call.arguments) if isinstance(a, Tensor) and a.view != "slab"}
    for device in range(mesh.size):
        coords = mesh.coords(device)
        numbers = {
            param: np.asarray(coords[given] if isinstance(given, str) else given)
            for param, given in zip(func.params, call.arguments)
            if isinstance(given, str | int)
        }
        for block in nested_blocks(func.body.block.body):
            grid = np.ix_(*(np.arange(int(loop.extent)) for loop in block.loops))
            at = dict(zip((loop.loop_var for loop in block.loops), grid)) | numbers
            runs = np.broadcast_to(values(block.realize.predicate, at), tuple(int(loop.extent) for loop in block.loops))
            at |= {var: values(bound, at) for var, bound in block.bound.items()} | numbers
            store = block.block.body
            touched = [(load.source, load.indices[0], False) for load in loads_in(store.value)]
            for buffer, index, is_write in [*touched, (store.buffer, store.indices[0], True)]:
                if buffer not in views:
                    continue
                view = views[buffer].view
                group = list(range(mesh.size)) if view == "*" else mesh.group(device, view)
                slabs = np.broadcast_to(values(index, at), runs.shape)[runs.astype(bool)]
                for slab, times in zip(*np.unique(slabs, return_counts=True)):
                    if group[slab] != device:
                        found[group[slab] if is_write else device] += int(times) * DataType(buffer.dtype).itemsize
    return found


def check(lowered: Lowered) -> set[str]:
    """Compare, and return the kinds of stages that there were."""
    moved = np.zeros((len(lowered.stages), lowered.mesh.size), int)
    for call in lowered.calls:
        if call.stage is not None and lowered.stages[call.stage].axis is not None:
            moved[call.stage] += in_moves(lowered, call) if call.kernel is None else in_kernel(lowered, call)
    for stage, of_devices in zip(lowered.stages, moved.tolist(), strict=True):
        assert type(stage.bytes) is int and stage.bytes == max(stage.received) == max(of_devices), stage
        if stage.kernel is not None or len(lowered.mesh.shape) == 1:  # an engine moves others' padding, too
            assert list(stage.received) == of_devices, stage
    return {stage.kind for stage in lowered.stages}


@pytest.mark.parametrize(("devices", "size"), [(2, "test"), (3, "uneven"), (4, "test"), (4, "uneven")])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_programs(name, devices, size):
    """Shares that are equal and that aren't, over two axes with four devices."""
    axes = PROGRAMS[name].axes
    mesh = Mesh(dict.fromkeys(axes, devices) if len(axes) == 1 or devices < 4 else dict.fromkeys(axes, 2))
    program = PROGRAMS[name](mesh, size)
    for schedule in program.schedules:
        assert check(lower(program.schedule(schedule).mod["main"], mesh)) != {"local"}


def summed(rows: int, combine: str, first: str = "T.float32(0)"):
    """C = the sum, or another reduction, of A over its last dimension."""
    text = f"""
@T.prim_func(s_tir=True)
def func(A: T.Buffer(({rows}, 5, 12), "float32"), C: T.Buffer(({rows}, 5), "float32")):
    for i, j, k in T.grid({rows}, 5, 12):
        with T.sblock("sum"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = {first}
            C[vi, vj] = {combine}
"""
    return from_source(text, extra_vars={"T": T})


@pytest.mark.parametrize("rows", [24, 19, 7, 2])
@pytest.mark.parametrize("mesh", ONE, ids=str)
def test_reductions(mesh, rows):
    """To all devices, to one and from it, scattered and gathered, in one kernel or in two; and a maximum."""
    kinds = set()
    for how in ({}, {"root": 1}, {"dim": 0}, {"dim": 1}, {"dim": 0, "fuse": True}, {"dim": 1, "fuse": True}):
        sch = axe.Schedule(summed(rows, "C[vi, vj] + A[vi, vj, vk]"), mesh=mesh)
        _, reduce = sch.shard(sch.get_loops("sum")[2], "x")
        if how:
            blocks = sch.split_collective(reduce, **{key: at for key, at in how.items() if key != "fuse"})
        if "fuse" in how:
            sch.fuse_collective(blocks)
        kinds |= check(lower(sch.mod["main"], mesh))
    assert kinds == {
        "local", "all-reduce", "reduce", "broadcast", "reduce-scatter", "all-gather", "mesh kernel",
    }  # fmt: skip
    sch = axe.Schedule(summed(rows, "T.max(C[vi, vj], A[vi, vj, vk])", "T.min_value('float32')"), mesh=mesh)
    sch.shard(sch.get_loops("sum")[2], "x")
    assert check(lower(sch.mod["main"], mesh)) == {"local", "mesh kernel"}


def chained(rows: int, read: str):
    """C = 2 A, then D = C + 1 of C as it is read."""
    text = f"""
@T.prim_func(s_tir=True)
def func(A: T.Buffer(({rows}, 6), "float32"), D: T.Buffer(({rows}, 6), "float32")):
    C = T.sblock_alloc_buffer(({rows}, 6), "float32")
    for i, j in T.grid({rows}, 6):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] * T.float32(2)
    for i, j in T.grid({rows}, 6):
        with T.sblock("add"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = {read} + T.float32(1)
"""
    return from_source(text, extra_vars={"T": T})


NEIGHBOURS = "T.if_then_else(vi > 0, C[vi - 1, vj], T.float32(0)) + C[vi, vj]"


@pytest.mark.parametrize("rows", [24, 19, 7])
@pytest.mark.parametrize("mesh", ONE, ids=str)
@pytest.mark.parametrize("read", [NEIGHBOURS, "C[{rows} - 1 - vi, vj]", "C[vi, vj] * C[(vi + 3) % {rows}, vj]"])
def test_what_is_inserted(mesh, rows, read):
    """Halos, gathers and all-to-alls, over one axis and over two of a dimension."""
    for axes in [("x",), tuple(mesh.names)]:
        sch = axe.Schedule(chained(rows, read.format(rows=rows)), mesh=mesh)
        for block in ("double", "add"):
            loop = sch.get_loops(block)[0]
            for axis in axes:
                _, loop = sch.shard(loop, axis, block=sch.get_sblock(block))
        assert len(check(lower(redistributed(sch.mod["main"], mesh), mesh))) > 1


@pytest.mark.parametrize("mesh", ONE, ids=str)
def test_exchanges(mesh):
    rows, size = 24, mesh["x"]
    cyclic = Layout.parse(f"S[({rows // size}, {size}, 6) : (6, 1@x, 1)]" + (" + R[2 : 1@y]" if "y" in mesh else ""))
    func = axe.with_layouts(chained(rows, "C[vi, vj]"), {"A": cyclic})
    sch = axe.Schedule(func, mesh=mesh)
    sch.shard(sch.get_loops("double")[0], "x")
    assert check(lower(redistributed(sch.mod["main"], mesh), mesh)) >= {"exchange"}


def test_a_count_is_that_of_the_points():
    i, j, k = (tirx.Var(name, "int32") for name in "ijk")
    extents = {i: 5, j: 7, k: 3}
    at = dict(zip(extents, np.ix_(*map(np.arange, extents.values()))))
    for conditions in [
        [i * 3 + j < 8, k >= 1],
        [tirx.all(i < 4, j - 2 >= 0), i * -2 + 5 > 0],
        [(i + k) % 2 < 1, j * 2 <= 7],
        [3 - j * 3 >= 0, tirx.EQ(k, 2)],
        [i * 2 > 100],
        [7 - j > j * 2],
        [tirx.IntImm("bool", 0)],
        [],
    ]:
        holds = np.ones((5, 7, 3), bool)
        for condition in conditions:
            holds &= values(condition, at).astype(bool)
        assert count(conditions, extents) == int(holds.sum()), conditions
    assert count([i < 2], {i: 2**40, j: 2**40}) == 2**41
    assert count([i * j < 2], {i: 2**20, j: 2**20}) is None
