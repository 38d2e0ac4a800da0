"""What the devices are on which schedules of a mesh are tried: an engine, its options, the pages of their memory."""

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective import registry
from tvm_axe.collective.engine import HOST
from tvm_axe.errors import InputError, TuneError
from tvm_axe.layout import Mesh
from tvm_axe.lower.cost import estimate
from tvm_axe.machines import backend_of, resolve_target
from tvm_axe.meta import tune
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.devices import Devices
from tvm_axe.meta.mesh.job import best_schedule
from tvm_axe.meta.mesh.space import first_schedules, program_workload
from tvm_axe.programs import PROGRAMS

TP = Mesh({"tp": 2})
HOPPER = resolve_target({"kind": "cuda", "arch": "sm_90a"})
LLVM = resolve_target("llvm", threads=1)
SHARED = {"gpus": (0, 0)}


def test_the_first_engine_for_a_target():
    assert Devices.of(LLVM, None).engine == "processes"
    found = Devices.of(HOPPER, None, {"gpus": [0, 0]})
    assert (found.engine, found.page) == ("cuda", backend_of(HOPPER).page)
    assert found.rates is registry.find("cuda").rates and Devices().rates is HOST


@pytest.mark.parametrize("text", ["threads", "processes"])
def test_a_text_without_options_is_the_name(text):
    assert str(Devices.parse(text, LLVM)) == text


def test_a_text_with_options():
    found = Devices.of(HOPPER, "cuda", {"processes": False, "gpus": (0, 0)})
    assert str(found) == 'cuda {"gpus": [0, 0], "processes": false}'
    assert str(Devices.parse(str(found), HOPPER)) == str(found)


def test_devices_that_dont_run_the_code(tmp_path):
    message = "engine: the devices of 'threads' are cpu, which doesn't run code for cuda; leave engine out, or target"
    program = PROGRAMS["mlp"](TP, "test")
    with pytest.raises(TuneError, match=message):
        axe.search(program.func, TP, target=HOPPER, engine="threads", work_dir=tmp_path)
    with pytest.raises(TuneError, match=message):
        tune(program.func, mesh=TP, target=HOPPER, engine="threads", work_dir=tmp_path)
    with pytest.raises(InputError, match="unknown engine 'gpu'; valid: processes, threads, mpi, ranks, cuda"):
        axe.search(program.func, TP, engine="gpu", work_dir=tmp_path)


def test_candidates_lie_in_the_devices_pages():
    devices = Devices.of(HOPPER, None)
    known = Candidates(None, devices)
    mod = program_workload(PROGRAMS["mlp"](TP, "test").func, TP, devices)
    lowered = [candidate.lowered for candidate in first_schedules(mod, (2,), known)]
    assert len(lowered) > 2 and {each.page for each in lowered} == {devices.page}
    assert all(estimate(each, devices.rates) < estimate(each) for each in lowered)


@pytest.mark.usefixtures("pairs_at_any_size")
def test_candidates_are_what_is_compiled_for_the_devices():
    """Of 16-bit floats, overlapped products are pairs on Hopper (`tvm_axe.lower.pairs`)."""

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((256, 256), "float16"), W: T.Buffer((128, 256), "float16"), out: T.Buffer((256, 128), "float16")
    ):
        for i, j, k in T.grid(256, 128, 256):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    out[vi, vj] = T.float16(0)
                out[vi, vj] = out[vi, vj] + X[vi, vk] * W[vj, vk]

    devices = Devices.of(HOPPER, None)
    known = Candidates(None, devices)
    lowered = [candidate.lowered for candidate in first_schedules(program_workload(func, TP, devices), (2,), known)]
    forms = [form for each in lowered for form in each.forms]
    assert forms and any("one kernel, matmul_scatter" in form for form in forms), forms


@pytest.mark.gpu
def test_searching_on_a_gpu(cuda, tmp_path):
    program = PROGRAMS["mlp"](TP, "test")
    settings = {"work_dir": tmp_path, "options": SHARED, "progress": False}
    result = axe.search(program.func, TP, target="cuda", measure=3, repeat=2, **settings)
    measured = [found for found in result.schedules if found.median_ms is not None]
    assert len(measured) == 3, [found.why_not for found in result.schedules]
    arrays = program.inputs(np.random.default_rng(2))
    with axe.launch(TP, engine="cuda", **SHARED) as workers:
        outputs = axe.compile(result.best.sch, target="cuda", work_dir=None).run(workers, *arrays)
    assert program.error((outputs,), program.reference(*arrays)) <= program.tolerance


@pytest.mark.gpu
def test_tuning_on_a_gpu(cuda, tmp_path):
    """Schedules and the kernels of each, and what compiling finds of both."""
    program = PROGRAMS["mlp"](TP, "test")
    result = tune(
        program.func, mesh=TP, target="cuda", trials=2, work_dir=tmp_path, options=SHARED, seed=0, progress=False
    )
    assert result.best.median_ms is not None and len(result.tasks) > 1
    found = best_schedule(program.func, TP, target="cuda", work_dir=tmp_path, options=SHARED)
    assert str(found.trace) == str(result.best.sch.trace)
    exe = axe.compile(found, target="cuda", work_dir=tmp_path)
    assert exe.tuned
    arrays = program.inputs(np.random.default_rng(2))
    with axe.launch(TP, engine="cuda", **SHARED) as workers:
        outputs = exe.run(workers, *arrays)
    assert program.error((outputs,), program.reference(*arrays)) <= program.tolerance
