"""Workers as a user meets them, with each engine; see conftest.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_axe.collective import Coord, Inside, WorkerError, Workers, launch, slab_stride
from tvm_axe.collective.repeating import repeats
from tvm_axe.collective.session import CORES
from tvm_axe.errors import AxeError, InputError, LayoutError
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target


def groups(mesh: Mesh) -> Iterator[tuple[str, tuple[int, ...]]]:
    for axis in mesh.names:
        for group in {mesh.group(device, axis) for device in range(mesh.size)}:
            yield axis, group


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bfloat16"])
@pytest.mark.parametrize(("shape", "dim"), [((7, 5), 0), ((8, 6), 1), ((3,), 0), ((2, 300, 130), 1)])
def test_collectives(workers: Workers, shape: tuple[int, ...], dim: int, dtype: str) -> None:
    """Against numpy in float64; whole numbers, whose sums every type holds exactly."""
    rng = np.random.default_rng(0)
    mesh = workers.mesh
    for axis in mesh.names:
        rows = -(-shape[dim] // mesh[axis])
        source, reduced, gathered = (workers.mesh_tensor(shape, dtype) for _ in range(3))
        blocks = workers.mesh_tensor((*shape[:dim], rows, *shape[dim + 1 :]), dtype)
        for device in range(mesh.size):
            source.slab(device)[...] = rng.integers(-9, 9, shape)
            for poisoned in (reduced, gathered, blocks):
                poisoned.slab(device)[...] = 99
        workers.all_reduce(source, reduced, axis)
        workers.reduce_scatter(source, blocks, axis, dim)
        workers.all_gather(blocks, gathered, axis, dim)
        for group_axis, group in groups(mesh):
            if group_axis == axis:
                total = sum(source.slab(device).astype("float64") for device in group)
                joined = np.concatenate([blocks.slab(device) for device in group], dim).astype("float64")
                inside, past = np.split(joined, [shape[dim]], dim)
                np.testing.assert_array_equal(inside, total)
                assert (past == 99).all()
                for device in group:
                    np.testing.assert_array_equal(reduced.slab(device).astype("float64"), total)
                    np.testing.assert_array_equal(gathered.slab(device).astype("float64"), total)
                for at, device in enumerate(group):
                    own = (slice(None),) * dim + (slice(at * rows, (at + 1) * rows),)
                    kept = gathered.slab(device)[own].copy()
                    gathered.slab(device)[...] = 99
                    gathered.slab(device)[own] = kept
        workers.all_gather(gathered, gathered, axis, dim)
        for device in range(mesh.size):
            np.testing.assert_array_equal(gathered.slab(device), reduced.slab(device))
        workers.all_reduce(source, source, axis)
        for device in range(mesh.size):
            np.testing.assert_array_equal(source.slab(device), reduced.slab(device))
        for tensor in (source, reduced, gathered, blocks):
            workers.free(tensor)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_more_collectives(workers: Workers, dtype: str) -> None:
    """Of slabs that all differ; extents that the mesh doesn't divide."""
    rng, mesh, (rows, columns) = np.random.default_rng(0), workers.mesh, (7, 5)
    for axis in mesh.names:
        n = mesh[axis]
        by_rows, by_columns = (-(-rows // n), columns), (rows, -(-columns // n))
        source, sent, reduced, spread = (workers.mesh_tensor((rows, columns), dtype) for _ in range(4))
        pieces, turned = workers.mesh_tensor(by_rows, dtype), workers.mesh_tensor(by_columns, dtype)
        for device in range(mesh.size):
            source.slab(device)[...] = rng.integers(-9, 9, (rows, columns))
            pieces.slab(device)[...] = rng.integers(-9, 9, by_rows)
            for poisoned in (sent, reduced, spread, turned):
                poisoned.slab(device)[...] = np.nan
        workers.send(source, sent, axis, 1)
        workers.reduce(source, reduced, axis, n - 1)
        workers.broadcast(source, spread, axis, n - 1)
        workers.all_to_all(pieces, turned, axis, 0, 1)
        for group_axis, group in groups(mesh):
            if group_axis != axis:
                continue
            whole = np.concatenate([pieces.slab(device) for device in group])[:rows]
            joined = np.concatenate([turned.slab(device) for device in group], axis=1)
            np.testing.assert_array_equal(joined[:, :columns], whole)
            assert np.isnan(joined[:, columns:]).all()
            for at, device in enumerate(group):
                np.testing.assert_array_equal(sent.slab(device), source.slab(group[at - 1]))
                np.testing.assert_array_equal(spread.slab(device), source.slab(group[-1]))
                assert device == group[-1] or np.isnan(reduced.slab(device)).all()
            total = sum(source.slab(device).astype("float64") for device in group)
            np.testing.assert_array_equal(reduced.slab(group[-1]).astype("float64"), total)
        for tensor in (source, sent, reduced, spread, pieces, turned):
            workers.free(tensor)


def ring(axis: str, n: int, rows: int, columns: int, stride: int) -> tvm.IRModule:
    """A program that reads its neighbour's slab, and does each collective between barriers."""
    part = -(-rows // n)

    @I.ir_module
    class Ring:
        @T.prim_func(s_tir=True)
        def shift(a: T.handle, b: T.Buffer((rows, columns), "float32"), rank: T.int64):
            A = T.match_buffer(a, (n, rows, columns), "float32", strides=[stride, columns, 1])
            for i, j in T.grid(rows, columns):
                with T.sblock("shift"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    b[vi, vj] = A[(rank + 1) % n, vi, vj] + T.float32(1)

        @R.function(pure=False)
        def main(
            a: R.Tensor((n, rows, columns), "float32"),
            b: R.Tensor((rows, columns), "float32"),
            b_all: R.Tensor((n, rows, columns), "float32"),
            total: R.Tensor((n, rows, columns), "float32"),
            block: R.Tensor((part, columns), "float32"),
            gathered: R.Tensor((n, rows, columns), "float32"),
            rank: R.Prim("int64"),
        ):
            R.func_attr({"relax.force_pure": False})
            cls = Ring
            _: R.Tuple() = cls.shift(a, b, rank)
            _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            _2: R.Tuple() = R.call_packed("axe.all_reduce", b_all, total, R.str(axis), sinfo_args=(R.Tuple(),))
            _3: R.Tuple() = R.call_packed("axe.reduce_scatter", b_all, block, 0, R.str(axis), sinfo_args=(R.Tuple(),))
            _4: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            _5: R.Tuple() = R.call_packed("axe.all_gather", block, gathered, 0, R.str(axis), sinfo_args=(R.Tuple(),))
            _6: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            return R.tuple()

    return Ring


def test_a_program_on_views_and_its_collectives(workers: Workers) -> None:
    mesh, rows, columns = workers.mesh, 7, 5
    for axis in mesh.names:
        if workers.is_apart(axis):
            continue  # a kernel can't read a neighbour's slab there; test_mpi.py has what a program can do
        n = mesh[axis]
        distance = int(np.prod(mesh.shape[mesh.names.index(axis) + 1 :]))
        mod = ring(axis, n, rows, columns, distance * slab_stride((rows, columns), "float32", workers.page))
        program = workers.load(mod, resolve_target(workers.target))
        a, b, total, gathered = (workers.mesh_tensor((rows, columns), "float32") for _ in range(4))
        block = workers.mesh_tensor((-(-rows // n), columns), "float32")
        for device in range(mesh.size):
            a.slab(device)[:] = np.random.default_rng(device).integers(-9, 9, (rows, columns))
            for poisoned in (b, total, gathered, block):
                poisoned.slab(device)[...] = np.nan
        views = [(a, axis), (b, "slab"), (b, axis), (total, axis), (block, "slab"), (gathered, axis), Coord(axis)]
        workers.call(program, views)
        for device in range(mesh.size):
            group = mesh.group(device, axis)
            neighbour = group[(group.index(device) + 1) % n]
            np.testing.assert_array_equal(b.slab(device), a.slab(neighbour) + 1)
            expected = sum(a.slab(peer) + 1 for peer in group)
            np.testing.assert_array_equal(total.slab(device), expected)
            np.testing.assert_array_equal(gathered.slab(device), expected)
        seconds = workers.time(program, views, repeat=5, warmup=2)
        assert len(seconds) == 5 and min(seconds) > 0
        workers.free(program)
        with pytest.raises(InputError, match=r"LoadedProgram\(main\) is not a program of these workers"):
            workers.call(program, views)


def test_shared_data_is_stored_once(pair: Workers) -> None:
    table = pair.mesh_tensor((4,), "float32", shared=True)
    table.slab(0)[:] = [1, 2, 3, 4]
    assert table.slab(1).tolist() == [1, 2, 3, 4]
    target = pair.mesh_tensor((4,), "float32")
    pair.all_reduce(table, target, "tp")
    assert target.slab(0).tolist() == target.slab(1).tolist() == [2, 4, 6, 8]
    with pytest.raises(InputError, match="all_reduce: target is shared"):
        pair.all_reduce(target, table, "tp")


def test_freed_memory_comes_back_as_zeros(pair: Workers) -> None:
    before = pair.mesh_tensor((1000,), "int32")
    before.slab(1)[:] = 7
    pair.free(before)
    with pytest.raises(WorkerError, match=r"of shape \(1000,\) was freed"):
        before.slab(0)
    with pytest.raises(InputError, match="not a mesh tensor of these workers"):
        pair.free(before)
    after = pair.mesh_tensor((1000,), "int32")
    assert not after.slab(1).any()


def test_two_launches_at_once(engine: str, pair: Workers) -> None:
    with launch(Mesh({"tp": 3}), engine=engine) as others:
        x, y = pair.mesh_tensor((2,), "float32"), others.mesh_tensor((2,), "float32")
        x.slab(0)[:], y.slab(0)[:] = 5, 6
        pair.all_reduce(x, x, "tp")
        others.all_reduce(y, y, "tp")
        assert x.slab(1).tolist() == [5, 5] and y.slab(2).tolist() == [6, 6]
        with pytest.raises(InputError, match="not a mesh tensor of these workers"):
            others.all_reduce(x, y, "tp")


def test_a_program_that_does_not_compile_is_reported(pair: Workers) -> None:
    @I.ir_module
    class Unknown:
        @R.function(pure=False)
        def main(x: R.Tensor((2,), "float32")):
            R.func_attr({"relax.force_pure": False})
            _: R.Tuple() = R.call_packed("axe.no_such_function", x, sinfo_args=(R.Tuple(),))
            return R.tuple()

    with pytest.raises(WorkerError, match=r"(?s)worker 0 \(tp=0; .*worker 1 \(tp=1; .*failed:.*axe.no_such_function"):
        pair.load(Unknown, resolve_target(pair.target))
    x = pair.mesh_tensor((2,), "float32")
    pair.all_reduce(x, x, "tp")


def test_a_program_may_have_several_functions(pair: Workers) -> None:
    main = ring("tp", 2, 3, 3, slab_stride((3, 3), "float32", pair.page))
    program = pair.load(main, resolve_target(pair.target))
    assert program.functions == ("main",)
    with pytest.raises(InputError, match="no function 'other'; it has main"):
        pair.call(program, [], function="other")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (lambda x: [x], InputError, r"args[0]: must be (mesh tensor, view), Inside(...), Coord(axis) or an int"),
        (lambda x: [1, (x, "dp")], InputError, "args[1]: unknown view 'dp'; valid: slab, tp"),
        (lambda x: [Coord("dp")], LayoutError, "unknown mesh axis 'dp'"),
        (lambda x: [2.5], InputError, "args[0]: must be"),
        (lambda x: [True], InputError, "args[0]: must be"),
        (lambda x: [(np.zeros(3), "tp")], InputError, "is not a mesh tensor of these workers"),
    ],
)
def test_bad_arguments_are_refused(pair: Workers, arguments: object, error: type[AxeError], message: str) -> None:
    main = ring("tp", 2, 3, 3, slab_stride((3, 3), "float32", pair.page))
    program = pair.load(main, resolve_target(pair.target))
    with pytest.raises(error) as caught:
        pair.call(program, arguments(pair.mesh_tensor((3,), "float32")))  # type: ignore[operator]
    assert message in str(caught.value)


def test_collectives_that_do_not_fit_are_refused(pair: Workers) -> None:
    x, y, z = (pair.mesh_tensor(shape, "float32") for shape in [(5, 2), (3, 2), (5, 2)])
    with pytest.raises(InputError, match=r"all_reduce: target has shape \(3, 2\), not the source's \(5, 2\)"):
        pair.all_reduce(x, y, "tp")
    with pytest.raises(InputError, match=r"target has dtype int8, not the source's float32"):
        pair.all_reduce(x, pair.mesh_tensor((5, 2), "int8"), "tp")
    with pytest.raises(InputError, match=r"reduce_scatter: target has shape \(5, 2\); a block of \(5, 2\) is \(3, 2\)"):
        pair.reduce_scatter(x, z, "tp", 0)
    with pytest.raises(InputError, match=r"all_gather: source has shape \(5, 2\); a block of \(5, 2\) is \(5, 1\)"):
        pair.all_gather(x, z, "tp", 1)
    with pytest.raises(InputError, match=r"dim must be in \[0, 2\), not 2"):
        pair.reduce_scatter(x, y, "tp", 2)
    with pytest.raises(InputError, match=r"all_gather: dim must be in \[0, 2\), not 2"):
        pair.all_gather(x, x, "tp", 2)
    with pytest.raises(LayoutError, match="unknown mesh axis 'pp'"):
        pair.all_reduce(x, x, "pp")
    with pytest.raises(InputError, match=r"send: target has shape \(3, 2\), not the source's \(5, 2\)"):
        pair.send(x, y, "tp", 1)
    with pytest.raises(InputError, match="send: target is the source"):
        pair.send(x, x, "tp", 1)
    with pytest.raises(InputError, match=r"reduce: root must be in \[0, 2\), a coordinate on 'tp', not 2"):
        pair.reduce(x, z, "tp", 2)
    with pytest.raises(InputError, match=r"broadcast: root must be in \[0, 2\), a coordinate on 'tp', not -1"):
        pair.broadcast(x, z, "tp", -1)
    with pytest.raises(
        InputError, match=r"all_to_all: target has shape \(5, 2\); a block of \(5, 2\) along 1 is \(5, 1\)"
    ):
        pair.all_to_all(y, z, "tp", 0, 1)
    with pytest.raises(
        InputError, match=r"all_to_all: source has shape \(5, 2\); a block of \(5, 2\) along 0 is \(3, 2\)"
    ):
        pair.all_to_all(x, pair.mesh_tensor((5, 1), "float32"), "tp", 0, 1)
    with pytest.raises(InputError, match="gathered and scattered must be two dims, not 1 both"):
        pair.all_to_all(x, z, "tp", 1, 1)
    with pytest.raises(InputError, match=r"scattered must be in \[0, 2\), not 2"):
        pair.all_to_all(x, z, "tp", 0, 2)
    with pytest.raises(InputError, match=r"target has shape \(5,\), of other dims than the source's \(5, 2\)"):
        pair.all_to_all(x, pair.mesh_tensor((5,), "float32"), "tp", 0, 1)


def test_bad_launches_are_refused() -> None:
    with pytest.raises(InputError, match="unknown engine 'gloo'; valid: processes, threads, mpi, ranks, cuda"):
        launch(Mesh({"tp": 2}), engine="gloo")
    with pytest.raises(InputError, match=r"numbered row-major; leave the order of mesh tp=2@1\.0 out"):
        launch(Mesh({"tp": 2}, order=(1, 0)))
    with pytest.raises(InputError, match="timeout must be a positive number of seconds, not 0"):
        launch(Mesh({"tp": 2}), timeout=0)
    with pytest.raises(InputError, match="mesh must be a Mesh"):
        launch("tp=2")  # type: ignore[arg-type]


def test_closed_workers_are_refused(two: Mesh, engine: str) -> None:
    with launch(two, engine=engine) as workers:
        x = workers.mesh_tensor((3,), "float32")
        view = x.slab(1)
        view[:] = 4
    for use in (lambda: workers.mesh_tensor((3,), "float32"), lambda: workers.all_reduce(x, x, "tp")):
        with pytest.raises(WorkerError, match="the workers are closed; launch new ones"):
            use()
    with pytest.raises(WorkerError, match="closed"):
        x.slab(0)
    assert view.tolist() == [4, 4, 4]
    workers.close()


def test_no_worker_is_bound_to_fewer_cores(engine: str) -> None:
    """Upstream binds a thread that runs kernels to the first cores, the same ones for every worker."""

    @I.ir_module
    class Parallel:
        @T.prim_func(s_tir=True)
        def kernel(out: T.Buffer((64,), "int32")):
            for i in T.parallel(64):
                with T.sblock("count"):
                    vi = T.axis.spatial(64, i)
                    out[vi] = T.Cast("int32", vi)

        @R.function(pure=False)
        def main(out: R.Tensor((64,), "int32")):
            R.func_attr({"relax.force_pure": False})
            cls = Parallel
            _: R.Tuple() = cls.kernel(out)
            return R.tuple()

    before = set(os.listdir("/proc/self/task"))
    others = set(psutil.Process().children(recursive=True))
    caller = os.sched_getaffinity(0)
    with launch(Mesh({"tp": 2}), engine=engine) as workers:
        out = workers.mesh_tensor((64,), "int32")
        workers.call(workers.load(Parallel, "llvm"), [(out, "slab")])
        assert out.slab(1).tolist() == list(range(64))
        threads = set(os.listdir("/proc/self/task")) - before
        assert len(threads) == (1 if engine == "processes" else 2) * max(1, len(CORES) // 2)
        processes = {str(child.pid) for child in set(psutil.Process().children(recursive=True)) - others}
        for task in threads | processes:
            assert os.sched_getaffinity(int(task)) == set(CORES)
    assert os.sched_getaffinity(0) == caller


def summing(foreign: str = "") -> tvm.IRModule:
    """Sums slabs of a source into a target, behind a part of a workspace that is only looked at."""
    builder = relax.BlockBuilder()
    source, target = (relax.Var(name, relax.TensorType([2, 3], "float32")) for name in ("source", "target"))
    part = relax.Var("part", relax.TensorType([2, 2], "int32"))
    with builder.function("main", [source, part, target], pure=False):
        arguments = [source, target, tvm.ir.StringImm("tp")]
        builder.emit(relax.Call(relax.ExternFunc("axe.all_reduce"), arguments, ty_args=[relax.TupleType([])]))
        if foreign:
            builder.emit(relax.Call(relax.ExternFunc(foreign), [target], ty_args=[relax.TupleType([])]))
        builder.emit_func_output(relax.Tuple([]))
    return builder.finalize()


def test_bound_calls(pair: Workers) -> None:
    """Arguments that are always the same are said once, the others in each call; tensors may lie within others."""
    program = pair.load(summing(), resolve_target(pair.target))
    x, space = pair.mesh_tensor((3,), "float32"), pair.mesh_tensor((512,), "uint8")
    bound = pair.bind(program, [(x, "tp"), Inside(space, 256, (2, 2), "int32"), None])
    for device in range(2):
        x.slab(device)[:] = device + 1
    for _ in range(2):
        for target in (pair.mesh_tensor((3,), "float32"), pair.mesh_tensor((3,), "float32")):
            pair.invoke(bound, [(target, "tp")])
            assert target.slab(0).tolist() == target.slab(1).tolist() == [3, 3, 3]
            pair.free(target)
    with pytest.raises(InputError, match=r"invoke: BoundCall\(main, 1 arguments left\); got 2"):
        pair.invoke(bound, [(x, "tp"), (x, "tp")])
    with pytest.raises(WorkerError, match="was freed"):
        pair.invoke(bound, [(target, "tp")])
    pair.free(bound)
    with pytest.raises(InputError, match="is not a call of these workers"):
        pair.invoke(bound, [(x, "tp")])


def test_what_tells_devices_the_same_each_time() -> None:
    assert repeats(summing()) and not repeats(summing("vm.builtin.anything"))
