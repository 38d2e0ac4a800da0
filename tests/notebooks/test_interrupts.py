"""Ctrl-C in a cell ends what the cell does and nothing else: the kernel goes on, and the same call works again."""

import pytest

SETUP = """
import numpy as np
import tvm_axe as axe
from tvm.script import tirx as T

@T.prim_func(s_tir=True)
def block(A: T.Buffer((16, 32), "float32"), W: T.Buffer((32, 8), "float32"), out: T.Buffer((16, 8), "float32")):
    C = T.sblock_alloc_buffer((16, 8), "float32")
    for i, j, k in T.grid(16, 8, 32):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(16, 8):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0))

mesh, runs = axe.Mesh({"tp": 2}), 0

def schedule():
    sch = axe.Schedule(block, mesh=mesh)
    sch.shard("mm", "k", "tp")
    return sch

rng = np.random.default_rng(0)
arrays = [rng.standard_normal(shape, dtype="float32") for shape in [(16, 32), (32, 8)]]
exe, one = axe.compile(schedule(), work_dir=None), axe.compile(block, work_dir=None)

def works(call):
    a, w = (array.astype("float64") for array in arrays)
    np.testing.assert_allclose(call(*arrays), np.maximum(a @ w, 0), rtol=1e-4, atol=1e-4)

def folder():
    global runs
    runs += 1
    return f"logs/{runs}"

works(exe), works(one)
"""

LONG = {
    "calls on a mesh": ("while True: exe(*arrays)", "works(exe)"),
    "calls that launch workers": ("while True: exe(*arrays), exe.close()", "works(exe)"),
    "run on workers": (
        "with axe.launch(mesh, engine='threads') as workers:\n    while True: exe.run(workers, *arrays)",
        "with axe.launch(mesh, engine='threads') as workers: works(lambda *given: exe.run(workers, *given))",
    ),
    "time on a mesh": ("exe.time(*arrays, repeat=10**7)", "assert len(exe.time(*arrays, repeat=3)) == 3"),
    "time on one device": ("one.time(*arrays, repeat=10**9)", "assert len(one.time(*arrays, repeat=3)) == 3"),
    "schedules and compilations": ("while True: axe.compile(schedule())", "works(axe.compile(schedule()))"),
    "check": ("while True: axe.check(schedule())", "assert axe.check(schedule(), seeds=1).ok"),
    "search": (
        "while True: axe.search(block, mesh, work_dir=folder(), progress=False)",
        "found = axe.search(block, mesh, work_dir=folder(), measure=1, repeat=1, progress=False)\n"
        "assert found.best.median_ms > 0",
    ),
    "tuning": (
        "axe.tune(block, trials=10**5, work_dir='logs/kernel', progress=False)",
        "result = axe.tune(block, trials=2, work_dir=folder(), progress=False)\nassert result.tasks[0].best_ms > 0",
    ),
    "tuning on a mesh": (
        "axe.tune(block, mesh=mesh, trials=10**5, work_dir='logs/mesh', progress=False)",
        "works(axe.compile(schedule(), work_dir='logs/mesh'))",
    ),
}
"""What goes on until it is interrupted, and what must work then."""


@pytest.fixture(scope="module")
def ready(kernel):
    kernel.works(SETUP)
    return kernel


@pytest.mark.parametrize("name", LONG)
def test_an_interrupted_cell_ends_and_the_next_one_works(ready, name):
    long, after = LONG[name]
    outcome = ready.run(f"print('begins', flush=True)\n{long}", interrupt_after=0.6)
    assert outcome.error == "KeyboardInterrupt", outcome.text
    ready.works(after)
    ready.works("works(exe), works(one)")


def test_what_was_launched_and_interrupted_says_that_it_is_closed(ready):
    """The workers that a user launched are the user's to launch again; those of an executable are its own."""
    ready.works("workers = axe.launch(mesh)\nexe.run(workers, *arrays)")
    long = "exe.time(workers, *arrays, repeat=10**7)"
    outcome = ready.run(f"print('begins', flush=True)\n{long}", interrupt_after=0.6)
    assert outcome.error == "KeyboardInterrupt", outcome.text
    outcome = ready.run("exe.run(workers, *arrays)")
    assert outcome.error == "WorkerError"
    assert "the workers are closed; launch new ones" in outcome.text
    ready.works("workers = axe.launch(mesh)\nworks(lambda *given: exe.run(workers, *given))\nworkers.close()")
