"""axe.compile and what it returns: every schedule on every mesh computes what numpy does, and says what it moves.

Each program runs on NaNs first, so that a value left over in a slab or in the padding of an uneven one would show.
"""

import gc
import os
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule


@pytest.fixture(scope="module")
def launched() -> Iterator[Callable[..., Workers]]:
    """Workers on a mesh, launched at the first use and shared by the module's tests."""
    started: dict[tuple[str, str], Workers] = {}

    def get(mesh: Mesh, engine: str = "threads") -> Workers:
        key = (str(mesh), engine)
        if key not in started:
            started[key] = axe.launch(mesh, engine=engine)
        return started[key]

    yield get
    for workers in started.values():
        workers.close()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., axe.Executable]:
    """axe.compile without the tuning results that a checkout may hold."""
    untuned = tmp_path_factory.mktemp("untuned")
    return lambda program, **options: axe.compile(program, work_dir=untuned, **options)


# ---- The programs ------------------------------------------------------------------------------------------------


def block(m: int, n: int, k: int, dtype: str = "float32") -> tirx.PrimFunc:
    """out = relu(A W + bias) + residual."""
    zero = tirx.const(0, dtype)

    @T.prim_func(s_tir=True)
    def program(
        A: T.Buffer((m, k), dtype),
        W: T.Buffer((k, n), dtype),
        bias: T.Buffer((n,), dtype),
        residual: T.Buffer((m, n), dtype),
        out: T.Buffer((m, n), dtype),
    ):
        C = T.sblock_alloc_buffer((m, n), dtype)
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = zero
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for i, j in T.grid(m, n):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.max(C[vi, vj] + bias[vj], zero) + residual[vi, vj]

    return program


def block_in_numpy(A, W, bias, residual):
    return (np.maximum(A @ W + bias, 0) + residual,)


def chain(m: int, n: int, k: int) -> tirx.PrimFunc:
    """Consumers that read each other: `first` is a result and read on, D is read on and backwards by `flip`."""

    @T.prim_func(s_tir=True)
    def program(
        A: T.Buffer((m, k), "float32"),
        W: T.Buffer((k, n), "float32"),
        first: T.Buffer((m, n), "float32"),
        second: T.Buffer((m, n), "float32"),
        third: T.Buffer((m, n), "float32"),
    ):
        C = T.sblock_alloc_buffer((m, n))
        D = T.sblock_alloc_buffer((m, n))
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for i, j in T.grid(m, n):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                D[vi, vj] = C[vi, vj] * T.float32(2)
        for i, j in T.grid(m, n):
            with T.sblock("first"):
                vi, vj = T.axis.remap("SS", [i, j])
                first[vi, vj] = T.max(D[vi, vj], T.float32(0)) + C[vi, vj]
        for i, j in T.grid(m, n):
            with T.sblock("second"):
                vi, vj = T.axis.remap("SS", [i, j])
                second[vi, vj] = first[vi, vj] * C[vi, vj]
        for i, j in T.grid(m, n):
            with T.sblock("flip"):
                vi, vj = T.axis.remap("SS", [i, j])
                third[vi, vj] = D[m - 1 - vi, n - 1 - vj] + first[vi, vj]

    return program


def chain_in_numpy(A, W):
    c = A @ W
    first = np.maximum(2 * c, 0) + c
    return first, first * c, 2 * c[::-1, ::-1] + first


# ---- The schedules: each returns how many halves of an all-reduce it moves ----------------------------------------


def replicated(sch: Schedule, dim: int) -> int:
    return 0


def mm_ar_c(sch: Schedule, dim: int) -> int:
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    return 2


def scattered(sch: Schedule, dim: int):
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    return sch.split_collective(reduce, dim)


def mm_rs_ag_c(sch: Schedule, dim: int) -> int:
    scattered(sch, dim)
    return 2


def mm_fuse_rs_ag_c(sch: Schedule, dim: int) -> int:
    sch.fuse_collective(scattered(sch, dim))
    return 2


def behind(sch: Schedule, dim: int, names: tuple[str, ...], fuse: bool) -> int:
    scatter, gather = scattered(sch, dim)
    consumers = [sch.get_sblock(name) for name in names]
    gathers = sch.reorder_collective(gather, consumers)
    if fuse:
        sch.fuse_collective([scatter, *consumers, *gathers])
    return 1 + len(gathers)


def mm_rs_c_ag(sch: Schedule, dim: int) -> int:
    return behind(sch, dim, ("epi",), fuse=False)


def mm_fuse(sch: Schedule, dim: int) -> int:
    return behind(sch, dim, ("epi",), fuse=True)


SCHEDULES = (replicated, mm_ar_c, mm_rs_ag_c, mm_fuse_rs_ag_c, mm_rs_c_ag, mm_fuse)
ON_BLOCK = [(schedule, dim) for schedule in SCHEDULES for dim in (0, 1) if dim == 0 or schedule not in SCHEDULES[:2]]


# ---- How they are judged -----------------------------------------------------------------------------------------


def fresh(func: tirx.PrimFunc, names: tuple[str, ...], rng: np.random.Generator) -> list[np.ndarray]:
    shapes = {param.name: [int(extent) for extent in param.shape] for param in func.params}
    dtypes = {param.name: str(param.dtype) for param in func.params}
    return [rng.standard_normal(shapes[name]).astype(dtypes[name]) for name in names]


def as_tuple(outputs: np.ndarray | tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def error(outputs, expected) -> float:
    """The largest relative error of any output; NaN if there is a NaN."""
    return max(float(np.abs(o - e).max() / np.abs(e).max()) for o, e in zip(outputs, expected, strict=True))


def ignoring_annotations(func: tirx.PrimFunc, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All the parameters after a run of the function as it is, on one device."""
    arrays = {
        param.name: inputs[param.name].copy()
        if param.name in inputs
        else np.full([int(extent) for extent in param.shape], np.nan, str(param.dtype))
        for param in func.params
    }
    tensors = {name: tvm.runtime.tensor(array) for name, array in arrays.items()}
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    tvm.compile(module, target="llvm")["main"](*tensors.values())
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def judge(exe: axe.Executable, func: tirx.PrimFunc, workers: Workers, reference: Callable, bound: float = 1e-5) -> None:
    """NaNs, then twice new data: each time what numpy has in float64, and what one device has."""
    rng = np.random.default_rng(len(func.script()))
    inputs = fresh(func, exe.inputs, rng)
    exe.run(workers, *(np.full_like(array, np.nan) for array in inputs))
    for _ in range(2):
        inputs = fresh(func, exe.inputs, rng)
        outputs = as_tuple(exe.run(workers, *inputs))
        expected = reference(*(array.astype("float64") for array in inputs))
        assert error(outputs, expected) < bound
    alone = ignoring_annotations(func, dict(zip(exe.inputs, inputs)))
    assert error([alone[name] for name in exe.outputs], expected) < bound


def halves(count: int, m: int, n: int, tp: int, itemsize: int = 4) -> float:
    """Bytes of `count` reduce-scatters or all-gathers of an m x n tensor, for each device."""
    return float(count * Fraction(tp - 1, tp) * m * n * itemsize)


# ---- Every schedule on every mesh --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 24, 36), (7, 5, 11)], ids=["divides", "does not"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize(("schedule", "dim"), ON_BLOCK, ids=[f"{s.__name__}-{d}" for s, d in ON_BLOCK])
def test_schedule(launched, compiled, schedule, dim, tp, shape):
    sch = Schedule(block(*shape), mesh=Mesh({"tp": tp}))
    count = schedule(sch, dim)
    exe = compiled(sch)
    assert exe.bytes == pytest.approx(halves(count, *shape[:2], tp))
    judge(exe, sch.mod["main"], launched(sch.mesh), block_in_numpy)


@pytest.mark.parametrize(("m", "tp"), [(4, 2), (7, 3)])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fuse", [False, True])
def test_chain_with_live_outs(launched, compiled, m, tp, dim, fuse):
    sch = Schedule(chain(m, 5, 9), mesh=Mesh({"tp": tp}))
    count = behind(sch, dim, ("double", "first", "second"), fuse)
    assert count == 4  # the reduce-scatter, and gathers of D, first and second
    exe = compiled(sch)
    assert exe.outputs == ("first", "second", "third")
    assert exe.bytes == pytest.approx(halves(count, m, 5, tp))
    judge(exe, sch.mod["main"], launched(sch.mesh), chain_in_numpy)


@pytest.mark.parametrize("schedule", [mm_ar_c, mm_rs_c_ag, mm_fuse])
def test_processes(launched, compiled, schedule):
    for shape in ((12, 24, 36), (7, 5, 11)):
        sch = Schedule(block(*shape), mesh=Mesh({"tp": 2}))
        schedule(sch, 0)
        judge(compiled(sch), sch.mod["main"], launched(sch.mesh, "processes"), block_in_numpy)


def test_chain_on_processes(launched, compiled):
    sch = Schedule(chain(7, 5, 9), mesh=Mesh({"tp": 2}))
    behind(sch, 0, ("double", "first", "second"), fuse=True)
    judge(compiled(sch), sch.mod["main"], launched(sch.mesh, "processes"), chain_in_numpy)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    m=st.integers(1, 17),
    n=st.integers(1, 17),
    k=st.integers(1, 24),
    tp=st.integers(1, 4),
    on_block=st.sampled_from(ON_BLOCK),
)
def test_any_shape_and_mesh(launched, compiled, m, n, k, tp, on_block):
    schedule, dim = on_block
    sch = Schedule(block(m, n, k), mesh=Mesh({"tp": tp}))
    try:
        count = schedule(sch, dim)
    except axe.ScheduleError as refusal:
        assert "without a partial" in str(refusal) and -(-k // tp) * (tp - 1) >= k
        return
    exe = compiled(sch)
    assert exe.bytes == pytest.approx(halves(count, m, n, tp))
    judge(exe, sch.mod["main"], launched(sch.mesh), block_in_numpy)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-14), ("float16", 2e-2)])
@pytest.mark.parametrize("schedule", [mm_ar_c, mm_fuse])
def test_dtype(launched, compiled, schedule, dtype, bound):
    sch = Schedule(block(7, 5, 11, dtype), mesh=Mesh({"tp": 2}))
    count = schedule(sch, 0)
    exe = compiled(sch)
    assert exe.bytes == halves(count, 7, 5, 2, np.dtype(dtype).itemsize)
    judge(exe, sch.mod["main"], launched(sch.mesh), block_in_numpy, bound)


# ---- Two axes, maxima, layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 2, "dp": 2})], ids=str)
def test_rows_over_one_axis_and_the_reduction_over_the_other(launched, compiled, mesh):
    sch = Schedule(block(7, 5, 11), mesh=mesh)
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    partial, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    for stage in (partial, reduce, epi):
        sch.shard(sch.get_loops(stage)[0], "dp")
    sch.cache_write(epi, 0, "global")
    judge(compiled(sch), sch.mod["main"], launched(mesh), block_in_numpy)


@pytest.mark.parametrize("schedule", [mm_ar_c, mm_rs_c_ag, mm_fuse])
def test_one_axis_of_two(launched, compiled, schedule):
    """Each group of the other axis does it all."""
    sch = Schedule(block(7, 5, 11), mesh=Mesh({"tp": 2, "dp": 2}))
    count = schedule(sch, 0)
    exe = compiled(sch)
    assert exe.bytes == halves(count, 7, 5, 2)
    judge(exe, sch.mod["main"], launched(sch.mesh), block_in_numpy)


def test_reduction_over_two_axes(launched, compiled):
    sch = Schedule(block(7, 5, 12), mesh=Mesh({"dp": 2, "tp": 3}))
    partial, _ = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    sch.shard(sch.get_loops(partial)[3], "dp")
    judge(compiled(sch), sch.mod["main"], launched(sch.mesh), block_in_numpy)


def test_both_dimensions_at_once_are_refused(compiled):
    sch = Schedule(block(4, 4, 4), mesh=Mesh({"dp": 2, "tp": 2}))
    epi = sch.get_sblock("epi")
    sch.shard(sch.get_loops(epi)[0], "dp")
    sch.shard(sch.get_loops(epi)[2], "tp")
    sch.cache_write(epi, 0, "global")
    with pytest.raises(axe.LowerError, match="2 dimensions"):
        compiled(sch)


@pytest.mark.parametrize("tp", [2, 3])
def test_maximum(launched, compiled, tp):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((5, 8), "float32"), out: T.Buffer((5,), "float32")):
        for i, k in T.grid(5, 8):
            with T.sblock("max"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    out[vi] = T.min_value("float32")
                out[vi] = T.max(out[vi], A[vi, vk])

    sch = Schedule(program, mesh=Mesh({"tp": tp}))
    sch.shard(sch.get_loops(sch.get_sblock("max"))[1], "tp")
    exe = compiled(sch)
    a = np.random.default_rng(tp).standard_normal((5, 8), dtype="float32")
    np.testing.assert_array_equal(exe.run(launched(sch.mesh), a), a.max(axis=1))


def test_sum_to_a_scalar(launched, compiled):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((8,), "float32"), out: T.Buffer((), "float32")):
        for k in range(8):
            with T.sblock("sum"):
                vk = T.axis.reduce(8, k)
                with T.init():
                    out[()] = T.float32(0)
                out[()] = out[()] + A[vk]

    sch = Schedule(program, mesh=Mesh({"tp": 3}))
    sch.shard(sch.get_loops(sch.get_sblock("sum"))[0], "tp")
    judge(compiled(sch), sch.mod["main"], launched(sch.mesh), lambda a: (a.sum(),))


@pytest.mark.parametrize("tp", [2, 3])
def test_two_layers_with_the_weights_by_column_and_by_row(launched, compiled, tp):
    """The hidden layer is never gathered: the one all-reduce is at the end."""

    @T.prim_func(s_tir=True)
    def program(
        X: T.Buffer((5, 6), "float32"),
        W1: T.Buffer((6, 11), "float32"),
        W2: T.Buffer((11, 4), "float32"),
        out: T.Buffer((5, 4), "float32"),
    ):
        H = T.sblock_alloc_buffer((5, 11))
        R = T.sblock_alloc_buffer((5, 11))
        for i, j, k in T.grid(5, 11, 6):
            with T.sblock("mm1"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    H[vi, vj] = T.float32(0)
                H[vi, vj] = H[vi, vj] + X[vi, vk] * W1[vk, vj]
        for i, j in T.grid(5, 11):
            with T.sblock("relu"):
                vi, vj = T.axis.remap("SS", [i, j])
                R[vi, vj] = T.max(H[vi, vj], T.float32(0))
        for i, j, k in T.grid(5, 4, 11):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    out[vi, vj] = T.float32(0)
                out[vi, vj] = out[vi, vj] + R[vi, vk] * W2[vk, vj]

    sch = Schedule(program, mesh=Mesh({"tp": tp}))
    for name in ("mm1", "relu"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[1], "tp")
    mm_ar_c(sch, 0)
    exe = compiled(sch)
    assert [stage.kind for stage in exe.stages] == ["local", "local", "local", "all-reduce"]
    assert exe.bytes == pytest.approx(halves(2, 5, 4, tp))
    judge(exe, sch.mod["main"], launched(sch.mesh), lambda x, v, w: (np.maximum(x @ v, 0) @ w,))


# ---- Declared layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("declared", [{"residual": {}}, {"bias": {0: "tp"}}, {"out": {0: "tp"}}, {"out": {}}], ids=str)
def test_declared_layouts(launched, compiled, declared, tp):
    """They are kept or refused, and what is kept gives the same result."""
    mesh, shapes = Mesh({"tp": tp}), {"residual": (7, 5), "bias": (5,), "out": (7, 5)}
    layouts = {name: Layout.sharded(shapes[name], mesh, dims) for name, dims in declared.items()}
    sch = Schedule(axe.with_layouts(block(7, 5, 11), layouts), mesh=mesh)
    mm_fuse(sch, 0)
    if "bias" in declared:
        with pytest.raises(axe.LowerError, match="'epi' reads 'bias' across 'tp'"):
            compiled(sch)
        return
    exe = compiled(sch)
    assert {name: exe.layouts[name] for name in layouts} == layouts
    gathers = 0 if declared == {"out": {0: "tp"}} else 1
    assert exe.bytes == pytest.approx(halves(1 + gathers, 7, 5, tp))
    judge(exe, sch.mod["main"], launched(mesh), block_in_numpy)


def test_declared_output_without_fusion_is_refused(compiled):
    """The gather still stands there and would write what each device doesn't hold."""
    mesh = Mesh({"tp": 2})
    sch = Schedule(axe.with_layouts(block(4, 4, 4), {"out": Layout.sharded((4, 4), mesh, {0: "tp"})}), mesh=mesh)
    mm_rs_c_ag(sch, 0)
    with pytest.raises(axe.LowerError, match="writes more of 'out' than its device holds"):
        compiled(sch)


def test_declared_output_whose_copy_is_sharded_too(launched, compiled):
    mesh = Mesh({"tp": 2})
    sch = Schedule(axe.with_layouts(block(7, 5, 11), {"out": Layout.sharded((7, 5), mesh, {0: "tp"})}), mesh=mesh)
    mm_rs_c_ag(sch, 0)
    sch.shard(sch.get_loops(sch.get_sblock("out_global"))[0], "tp")
    exe = compiled(sch)
    assert [stage.kind for stage in exe.stages] == ["local", "reduce-scatter", "local", "local"]
    judge(exe, sch.mod["main"], launched(mesh), block_in_numpy)


# ---- In place ----------------------------------------------------------------------------------------------------


@T.prim_func(s_tir=True)
def update(X: T.Buffer((7, 3), "float32"), G: T.Buffer((7, 3), "float32")):
    for i, j in T.grid(7, 3):
        with T.sblock("update"):
            vi, vj = T.axis.remap("SS", [i, j])
            X[vi, vj] = X[vi, vj] - T.float32(0.5) * G[vi, vj]


@pytest.mark.parametrize("sharded", [False, True])
def test_parameter_that_is_read_and_written(launched, compiled, sharded):
    """It goes in and comes out; the caller's array stays as it was."""
    mesh = Mesh({"tp": 3})
    layouts = {"X": Layout.sharded((7, 3), mesh, {0: "tp"})} if sharded else {}
    sch = Schedule(axe.with_layouts(update, layouts), mesh=mesh)
    if sharded:
        sch.shard(sch.get_loops(sch.get_sblock("update"))[0], "tp")
    exe = compiled(sch)
    assert (exe.inputs, exe.outputs) == (("X", "G"), ("X",))
    x, g = (np.random.default_rng(seed).standard_normal((7, 3), dtype="float32") for seed in (1, 2))
    before = x.copy()
    for _ in range(2):
        np.testing.assert_allclose(exe.run(launched(mesh), x, g), before - 0.5 * g, rtol=1e-6)
        np.testing.assert_array_equal(x, before)


def test_sharded_update_of_a_replicated_parameter_is_refused(compiled):
    sch = Schedule(update, mesh=Mesh({"tp": 2}))
    sch.shard(sch.get_loops(sch.get_sblock("update"))[0], "tp")
    with pytest.raises(axe.LowerError, match="'update' computes a slice over 'tp' of 'X'"):
        compiled(sch)


# ---- axe.compile and Executable.run: arguments --------------------------------------------------------------------


def test_what_can_be_compiled(launched, compiled):
    """A schedule, its module, its function; all the same."""
    sch = Schedule(block(4, 3, 6), mesh=Mesh({"tp": 2}))
    mm_fuse(sch, 0)
    for program, options in ((sch, {}), (sch.mod, {"mesh": sch.mesh}), (sch.mod["main"], {"mesh": sch.mesh})):
        judge(compiled(program, **options), sch.mod["main"], launched(sch.mesh), block_in_numpy)


def test_unscheduled_function_runs_on_every_device(launched, compiled):
    exe = compiled(block(4, 3, 6), mesh=Mesh({"tp": 2}))
    assert exe.bytes == 0 and {stage.kind for stage in exe.stages} == {"local"}


def test_compile_without_a_mesh(compiled):
    with pytest.raises(axe.LowerError, match=r'name the mesh, for example mesh=axe.Mesh\(\{"tp": 2\}\)'):
        compiled(block(4, 3, 6))


def test_compile_for_another_mesh_than_the_schedule(compiled):
    sch = Schedule(block(4, 3, 6), mesh=Mesh({"tp": 2}))
    with pytest.raises(axe.LowerError, match="the schedule is for the mesh tp=2, not tp=3; leave mesh out"):
        compiled(sch, mesh=Mesh({"tp": 3}))


def test_compile_something_else(compiled):
    with pytest.raises(axe.LowerError, match="is compiled, not a str"):
        compiled("block", mesh=Mesh({"tp": 2}))


def test_compile_two_functions(compiled):
    module = tvm.IRModule({"f": block(4, 3, 6), "g": block(4, 3, 6)})
    with pytest.raises(axe.LowerError, match="the module has 2 functions; compile one"):
        compiled(module, mesh=Mesh({"tp": 2}))


@pytest.fixture
def exe(compiled) -> axe.Executable:
    sch = Schedule(block(4, 3, 6), mesh=Mesh({"tp": 2}))
    mm_fuse(sch, 0)
    return compiled(sch)


GOOD = [np.ones(shape, "float32") for shape in ((4, 6), (6, 3), (3,), (4, 3))]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (GOOD[:3], r"takes 4 arrays \(A, W, bias, residual\); got 3"),
        ([*GOOD, GOOD[0]], r"takes 4 arrays \(A, W, bias, residual\); got 5"),
        ([GOOD[0].T, *GOOD[1:]], r"A has the shape \(4, 6\); got an array of \(6, 4\)"),
        ([*GOOD[:2], np.ones((1, 3), "float32"), GOOD[3]], r"bias has the shape \(3,\); got an array of \(1, 3\)"),
        ([*GOOD[:3], GOOD[3].astype("float64")], r"residual is float32; got an array of float64"),
        ([*GOOD[:3], GOOD[3].astype(">f4")], r"residual is float32; got an array of >f4"),
        ([GOOD[0].tolist(), *GOOD[1:]], r"A must be a numpy array; got list"),
    ],
    ids=["too few", "too many", "shape", "rank", "dtype", "byte order", "no array"],
)
def test_run_with_wrong_arrays(launched, exe, arrays, message):
    for call in (exe.run, exe.time):
        with pytest.raises(axe.LowerError, match=message):
            call(launched(exe.mesh), *arrays)


@pytest.mark.parametrize("mesh", [Mesh({"tp": 3}), Mesh({"tp": 1}), Mesh({"dp": 2})], ids=str)
def test_run_on_workers_of_another_mesh(launched, exe, mesh):
    words = rf"was compiled for the mesh tp=2 \(2 devices\); the workers are {mesh} \({mesh.size}\)"
    with pytest.raises(axe.LowerError, match=words):
        exe.run(launched(mesh), *GOOD)


def test_run_takes_arrays_that_are_not_dense(launched, exe):
    rng = np.random.default_rng(0)
    dense = [rng.standard_normal(array.shape, dtype="float32") for array in GOOD]
    strided = [np.repeat(array, 2, axis=-1)[..., ::2] for array in dense]
    np.testing.assert_array_equal(exe.run(launched(exe.mesh), *strided), exe.run(launched(exe.mesh), *dense))


def test_outputs_are_the_callers_own(launched, exe):
    workers = launched(exe.mesh)
    first = exe.run(workers, *GOOD)
    kept = first.copy()
    exe.run(workers, *(2 * array for array in GOOD))
    np.testing.assert_array_equal(first, kept)


def test_time(launched, exe):
    seconds = exe.time(launched(exe.mesh), *GOOD, repeat=3, warmup=1)
    assert len(seconds) == 3 and min(seconds) > 0


def test_show_names_layouts_stages_and_bytes(exe):
    text = exe.show()
    for words in ("mesh tp=2", "C_global", "S[(2, 2, 3) : (1@tp, 3, 1)]", "mesh kernel over tp", "in all", "def main"):
        assert words in text


# ---- Launches and memory -----------------------------------------------------------------------------------------


def test_two_launches(exe):
    """One executable on two sets of workers, also in turn; closed workers are refused, others don't mind."""
    expected = block_in_numpy(*(array.astype("float64") for array in GOOD))
    with axe.launch(exe.mesh, engine="threads") as first:
        with axe.launch(exe.mesh, engine="threads") as second:
            for workers in (first, second, first):
                assert error([exe.run(workers, *GOOD)], expected) < 1e-5
        with pytest.raises(axe.WorkerError):
            exe.run(second, *GOOD)
        assert error([exe.run(first, *GOOD)], expected) < 1e-5


def arena_bytes() -> int:
    """Memory that the launches of this process hold, as the system counts it."""
    held = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry).startswith("/memfd:tvm_axe"):
                held += os.stat(entry).st_blocks * 512
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return held


def test_memory_comes_back_with_the_executable(launched, compiled):
    sch = Schedule(block(256, 256, 8), mesh=Mesh({"tp": 2}))
    mm_fuse(sch, 0)
    workers = launched(sch.mesh)
    arrays = [np.ones(shape, "float32") for shape in ((256, 8), (8, 256), (256,), (256, 256))]
    gc.collect()
    workers.free(workers.mesh_tensor((1,), "float32"))  # what was let go of is freed before new memory is taken
    before = arena_bytes()
    exe = compiled(sch)
    exe.run(workers, *arrays)
    assert arena_bytes() >= before + 4 * 256 * 256 * 4  # partials and results of two devices
    del exe
    gc.collect()
    workers.free(workers.mesh_tensor((1,), "float32"))
    assert arena_bytes() == before


def test_collected_in_the_middle_of_a_command(launched, compiled):
    """Python may run an executable's finalizer anywhere, here as if while its workers are busy and in one of them."""
    sch = Schedule(block(4, 3, 6), mesh=Mesh({"tp": 2}))
    workers, exe, other = launched(sch.mesh), compiled(sch), compiled(sch)
    exe.run(workers, *GOOD)
    held = [exe]
    del exe
    collected = threading.Thread(target=held.clear)
    with workers._engine._busy:
        collected.start()
        collected.join(timeout=10)
        assert not collected.is_alive()
    other.run(workers, *GOOD)


def test_executable_may_outlive_its_workers(compiled):
    sch = Schedule(block(4, 3, 6), mesh=Mesh({"tp": 2}))
    mm_fuse(sch, 0)
    exe = compiled(sch)
    with axe.launch(sch.mesh, engine="threads") as workers:
        exe.run(workers, *GOOD)
    del exe
    gc.collect()
