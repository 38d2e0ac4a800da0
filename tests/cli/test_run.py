"""axe.compile and what it returns: what may be compiled and run, what is refused, and whose memory it is."""

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import tvm

import tvm_axe as axe
from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


def mm_fuse(sch: Schedule) -> None:
    """MM-fuse(RS-C-AG)."""
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce)
    epi = sch.get_sblock("epi")
    sch.fuse_collective([scatter, epi, *sch.reorder_collective(gather, [epi])])


# ---- Arguments ---------------------------------------------------------------------------------------------------


def test_what_can_be_compiled(compiled, programs, judge):
    """A schedule, its module, its function; all the same."""
    program = programs.block(4, 3, 6)
    sch = Schedule(program.func, mesh=Mesh({"tp": 2}))
    mm_fuse(sch)
    for what, options in ((sch, {}), (sch.mod, {"mesh": sch.mesh}), (sch.mod["main"], {"mesh": sch.mesh})):
        judge(compiled(what, **options), sch.mod["main"], program.reference)


def test_unscheduled_function_runs_on_every_device(compiled, programs):
    exe = compiled(programs.block(4, 3, 6).func, mesh=Mesh({"tp": 2}))
    assert exe.bytes == 0 and {stage.kind for stage in exe.stages} == {"local"}


def test_compile_without_a_mesh(compiled, programs):
    """A function that is scheduled for a mesh isn't compiled for one device by oversight."""
    sch = Schedule(programs.block(4, 3, 6).func, mesh=Mesh({"tp": 2}))
    mm_fuse(sch)
    with pytest.raises(axe.LowerError, match=r'name the mesh, for example mesh=axe.Mesh\(\{"tp": 2\}\)'):
        compiled(sch.mod["main"])


def test_compile_for_another_mesh_than_the_schedule(compiled, programs):
    sch = Schedule(programs.block(4, 3, 6).func, mesh=Mesh({"tp": 2}))
    with pytest.raises(axe.LowerError, match="the schedule is for the mesh tp=2, not tp=3; leave mesh out"):
        compiled(sch, mesh=Mesh({"tp": 3}))


def test_compile_something_else(compiled):
    with pytest.raises(axe.LowerError, match="is no program; valid are a schedule, a function of TensorIR"):
        compiled("block", mesh=Mesh({"tp": 2}))


def test_compile_two_functions(compiled, programs):
    module = tvm.IRModule({"f": programs.block(4, 3, 6).func, "g": programs.block(4, 3, 6).func})
    with pytest.raises(axe.LowerError, match="the module has 2 functions; compile one"):
        compiled(module, mesh=Mesh({"tp": 2}))


@pytest.fixture
def exe(compiled, programs) -> axe.Executable:
    sch = Schedule(programs.block(4, 3, 6).func, mesh=Mesh({"tp": 2}))
    mm_fuse(sch)
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
        with pytest.raises(axe.InputError, match=message):
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


def test_two_launches(programs, exe):
    """One executable on two sets of workers, also in turn; closed workers are refused, others don't mind."""
    (expected,) = programs.block(4, 3, 6).reference(*(array.astype("float64") for array in GOOD))
    with axe.launch(exe.mesh, engine="threads") as first:
        with axe.launch(exe.mesh, engine="threads") as second:
            for workers in (first, second, first):
                np.testing.assert_allclose(exe.run(workers, *GOOD), expected, rtol=1e-5)
        with pytest.raises(axe.WorkerError):
            exe.run(second, *GOOD)
        np.testing.assert_allclose(exe.run(first, *GOOD), expected, rtol=1e-5)


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


def test_memory_comes_back_with_the_executable(launched, compiled, programs):
    sch = Schedule(programs.block(256, 256, 8).func, mesh=Mesh({"tp": 2}))
    mm_fuse(sch)
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


def test_collected_in_the_middle_of_a_command(launched, compiled, programs):
    """Python may run an executable's finalizer anywhere, here as if while its workers are busy and in one of them."""
    sch = Schedule(programs.block(4, 3, 6).func, mesh=Mesh({"tp": 2}))
    workers, exe, other = launched(sch.mesh), compiled(sch), compiled(sch)
    exe.run(workers, *GOOD)
    held = [exe]
    del exe
    collected = threading.Thread(target=held.clear)
    with workers._session._busy:
        collected.start()
        collected.join(timeout=10)
        assert not collected.is_alive()
    other.run(workers, *GOOD)


def test_executable_may_outlive_its_workers(compiled, programs):
    sch = Schedule(programs.block(4, 3, 6).func, mesh=Mesh({"tp": 2}))
    mm_fuse(sch)
    exe = compiled(sch)
    with axe.launch(sch.mesh, engine="threads") as workers:
        exe.run(workers, *GOOD)
    del exe
    gc.collect()
