"""Every program under every schedule: right on every mesh, in the bytes of its closed form, and a trace that replays.

Each runs on NaNs first, so that a value left over in a slab or in the padding of an uneven one would show.
"""

import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tvm
from tvm import s_tir

import tvm_axe as axe
from tvm_axe import InputError
from tvm_axe.collective import Workers
from tvm_axe.layout import Mesh
from tvm_axe.machines.builder import build_program
from tvm_axe.programs import PROGRAMS, SIZES, DistributedProgram

NAMES = {
    "sgd": ["AR-C", "RS-C-AG", "fuse(RS-C-AG)"],
    "adam": ["AR-C", "RS-C-AG", "fuse(RS-C-AG)"],
    "adam_f16": ["AR-C", "RS-C-AG", "fuse(RS-C-AG)"],
    "lamb": ["AR-C", "RS-C-AG", "fuse(RS-C-AG)"],
    "mlp": ["MM-AR-C", "MM-RS-C-AG", "MM-fuse(RS-C-AG)", "ol(MM, fuse(RS-C-AG))"],
    "attention": ["MM-AR-C", "MM-RS-C-AG", "MM-fuse(RS-C-AG)", "ol(MM, fuse(RS-C-AG))"],
    "norm": ["MM-AR-Norm", "MM-RS-Norm-AG", "MM-fuse(RS-Norm-AG)", "ol(MM, fuse(RS-Norm-AG))"],
    "ag_mm": ["AG-MM", "ol(AG, MM)"],
    "pipeline": ["AR-P2P-C", "RS-P2P-C-AG", "ol(RS, fuse(P2P-C), AG)"],
    "moe": ["AG-MM-AG", "A2A-MM-A2A"],
    "moe_ragged": ["AG-MM-AG", "A2A-MM-A2A", "A2A-fuse(MM-C)-MM-A2A"],
    "layers": ["MM-AR-C", "MM-beside(AR)-C"],
}
CASES = [(name, schedule) for name, schedules in NAMES.items() for schedule in schedules]


def mesh_of(name: str, sizes: tuple[int, ...]) -> Mesh:
    """A mesh of the axes of a program; of two where it has one of them, the other is one that it doesn't know."""
    axes = PROGRAMS[name].axes
    if len(sizes) == 1 and len(axes) == 2:
        sizes = (1, *sizes) if sizes[0] % 2 else (*sizes, 1)
    return Mesh(dict(zip((*axes, "other"), sizes)))


@pytest.fixture(scope="module")
def launched() -> Iterator[Callable[..., Workers]]:
    """Workers on a mesh, launched at the first use and shared by the module's tests."""
    started: dict[tuple[str, str], Workers] = {}

    def get(mesh: Mesh, engine: str = "threads", **options: object) -> Workers:
        key = (str(mesh), f"{engine} {options}")
        if key not in started:
            started[key] = axe.launch(mesh, engine=engine, **options)
        return started[key]

    yield get
    for workers in started.values():
        workers.close()


@functools.cache
def program_of(name: str, size: str, sizes: tuple[int, ...]) -> DistributedProgram:
    """Made once, for all its schedules."""
    return PROGRAMS[name](mesh_of(name, sizes), size)


def judge(program: DistributedProgram, exe: axe.Executable, workers: Workers) -> None:
    arrays = program.inputs(np.random.default_rng())
    exe.run(workers, *(np.full_like(array, np.nan) if array.dtype.kind == "f" else array for array in arrays))
    outputs = exe.run(workers, *arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert program.error(outputs, program.reference(*arrays)) <= program.tolerance


def test_there_are_no_others():
    assert {name: list(builder(mesh_of(name, (2,))).schedules) for name, builder in PROGRAMS.items()} == NAMES


@pytest.mark.parametrize(
    ("size", "sizes"),
    [("test", (1,)), ("uneven", (3,)), ("uneven", (4,)), ("test", (2, 2))],
    ids=str,
)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_schedule(launched, name, schedule, size, sizes):
    program = program_of(name, size, sizes)
    sch = program.schedule(schedule)
    stock = s_tir.Schedule(program.func)
    sch.trace.apply_to_schedule(stock, remove_postproc=False)
    tvm.ir.assert_structural_equal(stock.mod, sch.mod)
    exe = axe.compile(sch, work_dir=None)
    assert exe.bytes == program.bytes[schedule]
    judge(program, exe, launched(program.mesh))


@pytest.mark.parametrize("name", NAMES)
def test_last_schedule_on_processes(launched, name):
    program = program_of(name, "uneven", (2,))
    exe = axe.compile(program.schedule(NAMES[name][-1]), work_dir=None)
    judge(program, exe, launched(program.mesh, "processes"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "sizes"), [("uneven", (2,)), ("uneven", (3,)), ("uneven", (4,)), ("test", (2, 2))], ids=str
)
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_schedule_on_gpus(on_gpus, launched, name, schedule, size, sizes):
    """Each device is a process."""
    program = program_of(name, size, sizes)
    exe = axe.compile(program.schedule(schedule), target="cuda", work_dir=None)
    assert exe.bytes == program.bytes[schedule]
    barriers = "device" if sizes == (2,) else "host"
    judge(program, exe, launched(program.mesh, "cuda", **on_gpus(program.mesh.size, barriers)))


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_schedule_compiles_for_gpus(name, schedule):
    """Where none is, too."""
    program = program_of(name, "uneven", (2,))
    exe = axe.compile(program.schedule(schedule), target="cuda:sm_90a", work_dir=None)
    assert exe.bytes == program.bytes[schedule]
    build_program(exe.runnable, exe.target)


@pytest.mark.parametrize("name", NAMES)
def test_function_alone_on_one_device(launched, name):
    """Unscheduled, on a mesh of one device that it has nothing to do with."""
    program = program_of(name, "uneven", (3,))
    one = Mesh({"device": 1})
    func = program.func.without_attr("axe.layouts") if program.func.attrs else program.func
    exe = axe.compile(func, mesh=one, work_dir=None)
    assert exe.bytes == 0
    judge(program, exe, launched(one))


@pytest.mark.parametrize(
    ("name", "states"),
    [("sgd", {"m"}), ("adam", {"m", "v"}), ("adam_f16", {"p", "m", "v"}), ("lamb", {"m", "v"})],
)
@pytest.mark.parametrize("schedule", ["RS-C-AG", "fuse(RS-C-AG)"])
def test_states_come_and_go_as_slices(name, states, schedule):
    exe = axe.compile(program_of(name, "uneven", (2,)).schedule(schedule), work_dir=None)
    sharded = {buffer for buffer, layout in exe.layouts.items() if any(it.axis == "dp" for it in layout.D)}
    parameters = {*exe.inputs, *exe.outputs}
    # Parameters are read on slices too; each device has the gradients of its own, and LAMB's rows have owners.
    assert sharded & parameters - {"p", "g", "owner"} == {*states - {"p"}, *(f"{state}_out" for state in states)}


@pytest.mark.parametrize(
    ("name", "schedule", "kinds"),
    [
        ("adam", "AR-C", ["all-reduce", "local"]),
        ("adam", "RS-C-AG", ["reduce-scatter", "local", "all-gather"]),
        ("adam", "fuse(RS-C-AG)", ["mesh kernel"]),
        # Norms are summed between the two kernels of LAMB.
        ("lamb", "fuse(RS-C-AG)", ["mesh kernel", "local", "all-reduce", "local", "mesh kernel"]),
        ("norm", "MM-RS-Norm-AG", ["local", "reduce-scatter", "local", "all-gather"]),
        ("norm", "MM-fuse(RS-Norm-AG)", ["local", "mesh kernel"]),
        ("ag_mm", "AG-MM", ["all-gather", "local"]),
        ("moe", "A2A-MM-A2A", ["local", "all-to-all", "local", "local", "local", "all-to-all", "local"]),
    ],
)
def test_stages(name, schedule, kinds):
    exe = axe.compile(program_of(name, "uneven", (2,)).schedule(schedule), work_dir=None)
    assert [stage.kind for stage in exe.stages] == kinds


def test_slices_are_what_a_pipeline_sends():
    """Of each device's bytes, those sent become a half on two tensor-parallel devices."""
    program = PROGRAMS["pipeline"](Mesh({"pp": 2, "tp": 2}), "test")
    whole, product = program.bytes["AR-P2P-C"], 4 * 12 * 8
    assert whole == product + product
    assert program.bytes["RS-P2P-C-AG"] == product + product // 2


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_what_they_are_called(size):
    for name, builder in PROGRAMS.items():
        program = builder(mesh_of(name, (2,)), size)
        if name in ("layers", "moe_ragged"):
            continue  # their leading extents are the devices'
        # What is shared out: the bucket's rows, experts, tokens.
        at, dim = {"dp": (1, 0), "ep": (2, 0), "tp": (-1, -2)}[program.axis]
        extent = int(program.func.params[at].shape[dim])
        divides = [extent % devices == 0 for devices in (2, 3, 4)]
        assert size == "bench" or divides == [size == "test"] * 3, (name, extent)
    adam = PROGRAMS["adam"](Mesh({"dp": 2}), "bench")
    assert np.prod([int(extent) for extent in adam.func.params[1].shape]) == 1 << 24


def test_mesh_without_the_axis():
    with pytest.raises(InputError, match="shared over pp and tp, and mesh tp=2 has no pp; an axis of size 1 will do"):
        PROGRAMS["pipeline"](Mesh({"tp": 2}))


def test_unknown_size():
    with pytest.raises(InputError, match="size must be one of test, uneven, bench, not 'huge'"):
        PROGRAMS["adam"](Mesh({"dp": 2}), "huge")


def test_unknown_schedule():
    with pytest.raises(InputError, match=r"adam has no schedule 'RS'; it has AR-C, RS-C-AG, fuse\(RS-C-AG\)"):
        PROGRAMS["adam"](Mesh({"dp": 2})).schedule("RS")


def test_error_is_that_of_the_worst_output():
    program = PROGRAMS["adam"](Mesh({"dp": 2}))
    one, far = np.ones((2, 2)), np.array([[1, 1], [1, 1.5]])
    assert program.error((one, far), (one, one)) == 0.5
    assert np.isnan(program.error((one, one * np.nan), (one, one)))
