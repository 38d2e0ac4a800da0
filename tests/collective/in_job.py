"""What only the engine `mpi` has to show; run on rank 0 of a job by test_mpi.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.s_tir.schedule import SBlockRV
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective import Coord, WorkerError, Workers, launch, ops
from tvm_axe.collective.across import crowded_axes
from tvm_axe.collective.plan import VIEWS
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower import lower

ROWS, COLUMNS = 7, 5


def cases(n: int) -> Iterator[tuple[str, tuple[int, ...], tuple[int, int], tuple[int, int]]]:
    """Each collective: what else it takes, and the shapes of its slabs; extents that n doesn't divide."""
    whole, rows, columns = (ROWS, COLUMNS), -(-ROWS // n), -(-COLUMNS // n)
    yield "all_reduce", (), whole, whole
    yield "reduce_scatter", (1,), whole, (ROWS, columns)
    yield "all_gather", (0,), (rows, COLUMNS), whole
    yield "all_to_all", (0, 1), (rows, COLUMNS), (ROWS, columns)
    yield "send", (1,), whole, whole
    yield "send", (-2,), whole, whole
    yield "reduce", (n - 1,), whole, whole
    yield "broadcast", (n - 1,), whole, whole


def program(axis: str, n: int, dtype: str) -> tvm.IRModule:
    """A function that does each collective, on a source and a target of its own, between barriers."""
    builder = relax.BlockBuilder()
    tensors: list[relax.Var] = []
    for name, _, *shapes in cases(n):
        for shape, is_view in zip(shapes, VIEWS[name]):
            kind = relax.TensorType((n, *shape) if is_view else shape, dtype)
            tensors.append(relax.Var(f"t{len(tensors)}", kind))

    def packed(function: str, *arguments: relax.Expr) -> None:
        builder.emit(relax.Call(relax.ExternFunc(function), list(arguments), ty_args=[relax.TupleType([])]))

    with builder.function("main", tensors, pure=False):
        packed("axe.arrive")
        packed("axe.wait", relax.prim_value(0))
        for (name, numbers, *_), source, target in zip(cases(n), tensors[::2], tensors[1::2]):
            packed(f"axe.{name}", source, target, *map(relax.prim_value, numbers), tvm.ir.StringImm(axis))
        packed("axe.barrier")
        builder.emit_func_output(relax.Tuple([]))
    return builder.finalize()


def adds_by_hosts(workers: Workers, axis: str) -> bool:
    """Whether sums along an axis are those of hosts, added, instead of the devices' in their order."""
    hosts = workers._session._job.hosts
    return axis in crowded_axes(workers.mesh, hosts) or (workers.engine == "apart" and workers.is_apart(axis))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_with_each_collective_does_what_ops_does(workers: Workers, dtype: str) -> None:
    """Bit for bit, whichever way the slabs go, and nothing else is written."""
    mesh, rng = workers.mesh, np.random.default_rng(0)
    for axis in mesh.names:
        n = mesh[axis]
        pairs, expected, views = [], [], []
        for name, numbers, *shapes in cases(n):
            pulls, pushes = VIEWS[name]
            pair = [workers.mesh_tensor(shape, dtype) for shape in shapes]
            sources, targets = (
                rng.standard_normal((mesh.size, *shape)).astype(tensor.slab(0).dtype)
                for shape, tensor in zip(shapes, pair)
            )
            for device in range(mesh.size):
                pair[0].slab(device)[...], pair[1].slab(device)[...] = sources[device], targets[device]
            for device in range(mesh.size):
                group = list(mesh.group(device, axis))
                out = targets[group] if pushes else targets[device]
                ops.collective(
                    name, sources[group] if pulls else sources[device], out, *numbers, rank=group.index(device)
                )
                targets[group if pushes else device] = out
            pairs.append((name, pair[1]))
            expected.append(targets)
            views += [(tensor, axis if is_view else "slab") for tensor, is_view in zip(pair, VIEWS[name])]
        workers.call(workers.load(program(axis, n, dtype), "llvm"), views)
        for (name, target), targets in zip(pairs, expected):
            for device in range(mesh.size):
                if adds_by_hosts(workers, axis):
                    found, wanted = (array.astype("float64") for array in (target.slab(device), targets[device]))
                    tolerance = 1e-5 if dtype == "float32" else 3e-2
                    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance, err_msg=name)
                else:
                    np.testing.assert_array_equal(target.slab(device), targets[device], err_msg=name)


def test_an_array_over_a_slab_stays_up_to_date(workers: Workers) -> None:
    mesh = workers.mesh
    axis, last = mesh.names[0], mesh.size - 1
    others = [device for device in mesh.group(last, axis) if device != last]
    x = workers.mesh_tensor((3,), "float32")
    view = x.slab(last)[1:]
    for device in range(mesh.size):
        x.slab(device)[:] = device + 1
    workers.all_reduce(x, x, axis)
    total = sum(device + 1 for device in mesh.group(last, axis))
    assert view.tolist() == [total] * 2
    view[:] = 10  # over what the device has
    workers.all_reduce(x, x, axis)
    assert view.tolist() == [10 + total * len(others)] * 2
    assert x.slab(others[0] if others else last).tolist() == [total * (len(others) + 1), *view]


def test_an_array_is_not_sent_back_over_what_a_device_wrote(workers: Workers) -> None:
    """The copy that was sent once is not sent again by the next command."""
    mesh = workers.mesh
    axis = mesh.names[-1]
    x, y = workers.mesh_tensor((4,), "float32"), workers.mesh_tensor((4,), "float32")
    for device in range(mesh.size):
        x.slab(device)[:] = device + 1
    workers.all_reduce(x, y, axis)
    workers.all_reduce(y, x, axis)
    workers.all_reduce(x, y, axis)
    for device in range(mesh.size):
        group = mesh.group(device, axis)
        assert (y.slab(device) == sum(peer + 1 for peer in group) * len(group) ** 2).all()


@I.ir_module
class Scale:
    @T.prim_func(s_tir=True)
    def kernel(table: T.Buffer((4,), "float32"), out: T.Buffer((4,), "float32"), rank: T.int64):
        for i in range(4):
            with T.sblock("scale"):
                vi = T.axis.spatial(4, i)
                out[vi] = table[vi] * T.Cast("float32", rank)

    @R.function(pure=False)
    def main(table: R.Tensor((4,), "float32"), out: R.Tensor((4,), "float32"), rank: R.Prim("int64")):
        R.func_attr({"relax.force_pure": False})
        cls = Scale
        _: R.Tuple() = cls.kernel(table, out, rank)
        return R.tuple()


def test_shared_data_reaches_every_machine(workers: Workers) -> None:
    mesh = workers.mesh
    table, out = workers.mesh_tensor((4,), "float32", shared=True), workers.mesh_tensor((4,), "float32")
    program = workers.load(Scale, "llvm")
    for factor in (1, 10):
        table.slab(mesh.size - 1)[:] = factor * np.arange(4)
        workers.call(program, [(table, "slab"), (out, "slab"), Coord(mesh.names[-1])])
        for device in range(mesh.size):
            rank = mesh.coords(device)[mesh.names[-1]]
            np.testing.assert_array_equal(out.slab(device), factor * np.arange(4) * rank)


@T.prim_func(s_tir=True)
def product(A: T.Buffer((12, 24), "float32"), B: T.Buffer((24, 9), "float32"), out: T.Buffer((12, 9), "float32")):
    C = T.sblock_alloc_buffer((12, 9), "float32")
    for i, j, k in T.grid(12, 9, 24):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
    for i, j in T.grid(12, 9):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0))


def on_slices(sch: axe.Schedule) -> list[SBlockRV]:
    """A reduce-scatter, the epilogue on slices and an all-gather, over the first axis; returns these blocks."""
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    _, reduce = sch.shard(sch.get_loops(mm)[2], sch.mesh.names[0])
    scatter, gather = sch.split_collective(reduce)
    (gather,) = sch.reorder_collective(gather, [epi])
    return [scatter, epi, gather]


@pytest.mark.parametrize("fused", [False, True])
def test_whole_arrays(workers: Workers, fused: bool) -> None:
    """A compiled program on whole arrays; one whose kernels index their peers' slabs runs unfused across machines."""
    mesh = workers.mesh
    axis = mesh.names[0]
    sch = axe.Schedule(product, mesh=mesh)
    collectives = on_slices(sch)
    if fused:
        sch.fuse_collective(collectives)
    exe = axe.compile(sch, target="llvm")
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((12, 24), dtype="float32"), rng.standard_normal((24, 9), dtype="float32")
    for _ in range(2):
        result = exe.run(workers, a, b)
        np.testing.assert_allclose(result, np.maximum(a.astype("float64") @ b, 0), rtol=1e-5, atol=1e-5)
    assert len(exe.time(workers, a, b, repeat=3)) == 3
    assert {event.worker for event in exe.trace(workers, a, b).events} == set(range(mesh.size))
    unfused = f"where devices along {axis} don't see each other's memory, it runs as\nschedule MM-RS-C-AG on mesh"
    assert (unfused in exe.show()) == (fused and workers.is_apart(axis))


def test_a_lowered_program_that_needs_to_be_unfused_is_refused(workers: Workers) -> None:
    mesh = workers.mesh
    axis = mesh.names[0]
    if not workers.is_apart(axis):
        return  # it runs
    sch = axe.Schedule(product, mesh=mesh)
    sch.fuse_collective(on_slices(sch))
    exe = axe.compile(lower(sch.mod["main"], mesh), target="llvm")
    with pytest.raises(
        LowerError, match=rf"product: stage '\w+' is a kernel that indexes .* over {axis}, .*compile its"
    ):
        exe.run(workers, np.zeros((12, 24), "float32"), np.zeros((24, 9), "float32"))


def test_one_launch_at_a_time(workers: Workers) -> None:
    with pytest.raises(WorkerError, match="serve one launch at a time; close the other one first"):
        launch(Mesh({"tp": workers.mesh.size}), engine="mpi")
    x = workers.mesh_tensor((2,), "float32")
    workers.all_reduce(x, x, workers.mesh.names[0])


def failing(axis: str, n: int, size: int) -> tvm.IRModule:
    """A program in which the worker at coordinate 1 fails while the others wait for it, in a collective or after."""

    @I.ir_module
    class Failing:
        @T.prim_func(s_tir=True)
        def check(a: T.Buffer((size,), "float32"), rank: T.int64):
            assert rank != 1, "this is the one"
            for i in range(size):
                with T.sblock("add"):
                    vi = T.axis.spatial(size, i)
                    a[vi] = a[vi] + T.float32(1)

        @R.function(pure=False)
        def main(
            a: R.Tensor((size,), "float32"),
            a_all: R.Tensor((n, size), "float32"),
            b: R.Tensor((size,), "float32"),
            rank: R.Prim("int64"),
        ):
            R.func_attr({"relax.force_pure": False})
            cls = Failing
            _: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            _1: R.Tuple() = cls.check(a, rank)
            _2: R.Tuple() = R.call_packed("axe.broadcast", a_all, b, 1, R.str(axis), sinfo_args=(R.Tuple(),))
            _3: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            return R.tuple()

    return Failing


@pytest.mark.parametrize("size", [8, 1_000_000])
def test_a_failed_command_leaves_nothing_behind(workers: Workers, size: int) -> None:
    """Messages of a collective that was called off, of any size, are not taken for those of the next."""
    mesh = workers.mesh
    axis, n = mesh.names[0], mesh.shape[0]
    x, y = workers.mesh_tensor((size,), "float32"), workers.mesh_tensor((size,), "float32")
    program = workers.load(failing(axis, n, size), "llvm")
    for _ in range(2 if n > 1 else 0):
        with pytest.raises(WorkerError, match=rf"^worker \d+ \([^)]*\b{axis}=1[;,](?s:.*)this is the one"):
            workers.call(program, [(x, "slab"), (x, axis), (y, "slab"), Coord(axis)])
    for device in range(mesh.size):
        x.slab(device)[:] = device + 1
    for _ in range(3):
        workers.all_reduce(x, y, axis)
    for device in range(mesh.size):
        assert (y.slab(device) == sum(peer + 1 for peer in mesh.group(device, axis))).all()
