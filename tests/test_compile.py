"""axe.compile: every schedule on every mesh computes what numpy does, and says what it moves.

What its primitives do to communication beside is in `test_primitives`, what `run` takes and refuses in `test_run`.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule

# ---- The schedules: each returns its stages that communicate, as `moved` takes them --------------------------------


def replicated(sch: Schedule, dim: int) -> list[str]:
    return []


def mm_ar_c(sch: Schedule, dim: int) -> list[str]:
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    return ["AR"]


def scattered(sch: Schedule, dim: int):
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    return sch.split_collective(reduce, dim)


def mm_rs_ag_c(sch: Schedule, dim: int) -> list[str]:
    scattered(sch, dim)
    return ["RS", "AG"]


def mm_fuse_rs_ag_c(sch: Schedule, dim: int) -> list[str]:
    sch.fuse_collective(scattered(sch, dim))
    return ["RS+AG"]


def behind(sch: Schedule, dim: int, names: tuple[str, ...], fuse: bool) -> list[str]:
    scatter, gather = scattered(sch, dim)
    consumers = [sch.get_sblock(name) for name in names]
    gathers = sch.reorder_collective(gather, consumers)
    if fuse:
        sch.fuse_collective([scatter, *consumers, *gathers])
    stages = ["RS", *["AG"] * len(gathers)]
    return ["+".join(stages)] if fuse else stages


def mm_rs_c_ag(sch: Schedule, dim: int) -> list[str]:
    return behind(sch, dim, ("epi",), fuse=False)


def mm_fuse(sch: Schedule, dim: int) -> list[str]:
    return behind(sch, dim, ("epi",), fuse=True)


SCHEDULES = (replicated, mm_ar_c, mm_rs_ag_c, mm_fuse_rs_ag_c, mm_rs_c_ag, mm_fuse)
ON_BLOCK = [(schedule, dim) for schedule in SCHEDULES for dim in (0, 1) if dim == 0 or schedule not in SCHEDULES[:2]]


def sides(m: int, n: int, dim: int) -> tuple[int, int]:
    """The extent that is scattered, and the other."""
    return (m, n) if dim == 0 else (n, m)


# ---- Every schedule on every mesh --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(12, 24, 36), (7, 5, 11)], ids=["divides", "does not"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize(("schedule", "dim"), ON_BLOCK, ids=[f"{s.__name__}-{d}" for s, d in ON_BLOCK])
def test_schedule(compiled, schedule, dim, tp, shape, programs, judge, moved):
    program = programs.block(*shape)
    sch = Schedule(program.func, mesh=Mesh({"tp": tp}))
    stages = schedule(sch, dim)
    exe = compiled(sch)
    assert exe.bytes == moved(stages, *sides(*shape[:2], dim), tp)
    judge(exe, sch.mod["main"], program.reference)


@pytest.mark.parametrize(("m", "tp"), [(4, 2), (7, 3)])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("fuse", [False, True])
def test_chain_with_live_outs(compiled, m, tp, dim, fuse, programs, judge, moved):
    program = programs.chain(m, 5, 9)
    sch = Schedule(program.func, mesh=Mesh({"tp": tp}))
    stages = behind(sch, dim, ("double", "first", "second"), fuse)
    assert "+".join(stages) == "RS+AG+AG+AG"  # the reduce-scatter, and gathers of D, first and second
    exe = compiled(sch)
    assert exe.outputs == ("first", "second", "third")
    assert exe.bytes == moved(stages, *sides(m, 5, dim), tp)
    judge(exe, sch.mod["main"], program.reference)


@pytest.mark.parametrize("schedule", [mm_ar_c, mm_rs_c_ag, mm_fuse])
def test_processes(compiled, schedule, programs, judge):
    for shape in ((12, 24, 36), (7, 5, 11)):
        program = programs.block(*shape)
        sch = Schedule(program.func, mesh=Mesh({"tp": 2}))
        schedule(sch, 0)
        judge(compiled(sch), sch.mod["main"], program.reference, engine="processes")


def test_chain_on_processes(compiled, programs, judge):
    program = programs.chain(7, 5, 9)
    sch = Schedule(program.func, mesh=Mesh({"tp": 2}))
    behind(sch, 0, ("double", "first", "second"), fuse=True)
    judge(compiled(sch), sch.mod["main"], program.reference, engine="processes")


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    m=st.integers(1, 17),
    n=st.integers(1, 17),
    k=st.integers(1, 24),
    tp=st.integers(1, 4),
    on_block=st.sampled_from(ON_BLOCK),
)
def test_any_shape_and_mesh(compiled, m, n, k, tp, on_block, programs, judge, moved):
    schedule, dim = on_block
    program = programs.block(m, n, k)
    sch = Schedule(program.func, mesh=Mesh({"tp": tp}))
    try:
        stages = schedule(sch, dim)
    except axe.ScheduleError as refusal:
        assert "without a partial" in str(refusal) and -(-k // tp) * (tp - 1) >= k
        return
    exe = compiled(sch)
    assert exe.bytes == moved(stages, *sides(m, n, dim), tp)
    judge(exe, sch.mod["main"], program.reference)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-14), ("float16", 2e-2)])
@pytest.mark.parametrize("schedule", [mm_ar_c, mm_fuse])
def test_dtype(compiled, schedule, dtype, bound, programs, judge, moved):
    program = programs.block(7, 5, 11, dtype)
    sch = Schedule(program.func, mesh=Mesh({"tp": 2}))
    stages = schedule(sch, 0)
    exe = compiled(sch)
    assert exe.bytes == moved(stages, 7, 5, 2, np.dtype(dtype).itemsize)
    judge(exe, sch.mod["main"], program.reference, bound)


# ---- Two axes, maxima, layers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 2, "dp": 2})], ids=str)
def test_rows_over_one_axis_and_the_reduction_over_the_other(compiled, mesh, programs, judge):
    program = programs.block(7, 5, 11)
    sch = Schedule(program.func, mesh=mesh)
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    partial, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    for stage in (partial, reduce, epi):
        sch.shard(sch.get_loops(stage)[0], "dp")
    sch.cache_write(epi, 0, "global")
    judge(compiled(sch), sch.mod["main"], program.reference)


@pytest.mark.parametrize("schedule", [mm_ar_c, mm_rs_c_ag, mm_fuse])
def test_one_axis_of_two(compiled, schedule, programs, judge, moved):
    """Each group of the other axis does it all."""
    program = programs.block(7, 5, 11)
    sch = Schedule(program.func, mesh=Mesh({"tp": 2, "dp": 2}))
    stages = schedule(sch, 0)
    exe = compiled(sch)
    assert exe.bytes == moved(stages, 7, 5, 2)
    judge(exe, sch.mod["main"], program.reference)


def test_reduction_over_two_axes(compiled, programs, judge):
    program = programs.block(7, 5, 12)
    sch = Schedule(program.func, mesh=Mesh({"dp": 2, "tp": 3}))
    partial, _ = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    sch.shard(sch.get_loops(partial)[3], "dp")
    judge(compiled(sch), sch.mod["main"], program.reference)


def test_both_dimensions_at_once_are_refused(compiled, programs):
    sch = Schedule(programs.block(4, 4, 4).func, mesh=Mesh({"dp": 2, "tp": 2}))
    epi = sch.get_sblock("epi")
    sch.shard(sch.get_loops(epi)[0], "dp")
    sch.shard(sch.get_loops(epi)[2], "tp")
    sch.cache_write(epi, 0, "global")
    with pytest.raises(axe.LowerError, match="2 dimensions"):
        compiled(sch, redistribute="refuse")


def test_storing_both_dimensions_at_once_is_refused(compiled, programs):
    """Every device holds all of the result, and computes rows over one axis of columns over the other."""
    sch = Schedule(programs.block(4, 4, 4).func, mesh=Mesh({"dp": 2, "tp": 2}))
    epi = sch.get_sblock("epi")
    copy = sch.cache_write(epi, 0, "global")
    for block in (epi, copy):
        sch.shard(sch.get_loops(block)[0], "dp")
        sch.shard(sch.get_loops(block)[2], "tp")
    with pytest.raises(axe.LowerError, match="a store to 'out' is of its device's piece of 2 dimensions"):
        compiled(sch, redistribute="refuse")


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


def test_sum_to_a_scalar(compiled, judge):
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
    judge(compiled(sch), sch.mod["main"], lambda a: (a.sum(),))


@pytest.mark.parametrize("tp", [2, 3])
def test_two_layers_with_the_weights_by_column_and_by_row(compiled, tp, judge, moved):
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
    assert exe.bytes == moved(["AR"], 5, 4, tp)
    judge(exe, sch.mod["main"], lambda x, v, w: (np.maximum(x @ v, 0) @ w,))


# ---- Declared layouts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("declared", [{"residual": {}}, {"bias": {0: "tp"}}, {"out": {0: "tp"}}, {"out": {}}], ids=str)
def test_declared_layouts(compiled, declared, tp, programs, judge, moved):
    """They are kept or refused, and what is kept gives the same result."""
    mesh, shapes = Mesh({"tp": tp}), {"residual": (7, 5), "bias": (5,), "out": (7, 5)}
    layouts = {name: Layout.sharded(shapes[name], mesh, dims) for name, dims in declared.items()}
    program = programs.block(7, 5, 11)
    sch = Schedule(axe.with_layouts(program.func, layouts), mesh=mesh)
    mm_fuse(sch, 0)
    if "bias" in declared:
        with pytest.raises(axe.LowerError, match="'epi' reads 'bias' across 'tp'"):
            compiled(sch, redistribute="refuse")
        return
    exe = compiled(sch)
    assert {name: exe.layouts[name] for name in layouts} == layouts
    stage = "RS" if declared == {"out": {0: "tp"}} else "RS+AG"
    assert exe.bytes == moved([stage], 7, 5, tp)
    judge(exe, sch.mod["main"], program.reference)


def test_declared_output_without_fusion_is_refused(compiled, programs):
    """The gather still stands there and would write what each device doesn't hold."""
    mesh = Mesh({"tp": 2})
    sch = Schedule(
        axe.with_layouts(programs.block(4, 4, 4).func, {"out": Layout.sharded((4, 4), mesh, {0: "tp"})}), mesh=mesh
    )
    mm_rs_c_ag(sch, 0)
    with pytest.raises(axe.LowerError, match="writes more of 'out' than its device holds"):
        compiled(sch, redistribute="refuse")


def test_declared_output_whose_copy_is_sharded_too(compiled, programs, judge):
    mesh = Mesh({"tp": 2})
    program = programs.block(7, 5, 11)
    sch = Schedule(axe.with_layouts(program.func, {"out": Layout.sharded((7, 5), mesh, {0: "tp"})}), mesh=mesh)
    mm_rs_c_ag(sch, 0)
    sch.shard(sch.get_loops(sch.get_sblock("out_global"))[0], "tp")
    exe = compiled(sch)
    assert [stage.kind for stage in exe.stages] == ["local", "reduce-scatter", "local", "local"]
    judge(exe, sch.mod["main"], program.reference)


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
        compiled(sch, redistribute="refuse")
