"""Programs on a mesh, tuned on a fleet: each machine is a whole mesh, and judges schedules as this one does."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.records.trials import read_trials

TRIALS = 2


@T.prim_func(s_tir=True)
def block(A: T.Buffer((16, 24), "float32"), W: T.Buffer((24, 12), "float32"), out: T.Buffer((16, 12), "float32")):
    C = T.sblock_alloc_buffer((16, 12), "float32")
    for i, j, k in T.grid(16, 12, 24):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(16, 12):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, servers, board):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a machine of two devices needs two cores")
    target = {"kind": "llvm", "num-cores": 1}
    return axe.tune(
        block,
        mesh={"tp": 2},
        target=target,
        trials=TRIALS,
        work_dir=tmp_path_factory.mktemp("mesh"),
        seed=1,
        progress=False,
        fleet=servers.fleet("board"),
    )


def test_the_best_schedule_is_right(tuned):
    rng = np.random.default_rng(0)
    a, w = rng.standard_normal((16, 24), "float32"), rng.standard_normal((24, 12), "float32")
    with axe.compile(tuned.schedule, target=tuned.target, work_dir=None) as exe:
        got = exe(a, w)
    np.testing.assert_allclose(got, np.maximum(a.astype("float64") @ w, 0), rtol=1e-4, atol=1e-5)


def test_schedules_and_kernels_are_measured_there(tuned):
    program, *kernels = tuned.tasks
    assert program.trials == TRIALS and not program.failures and kernels
    for task in tuned.tasks:
        assert {trial.machine for trial in read_trials(task.folder)} <= {"first", "second"}
        (run,) = json.loads((task.folder / "provenance.json").read_text())["runs"]
        assert run["machines"].keys() <= {"first", "second"}
    assert sum(machine.measured for machine in tuned.machines) >= sum(task.trials for task in tuned.tasks)
    (run,) = json.loads((program.folder / "provenance.json").read_text())["runs"]
    (about,) = run["tasks"].values()
    assert about["conditions"]["fleet"] == "board" and about["conditions"]["devices"] == "processes"
