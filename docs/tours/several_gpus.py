"""
From one GPU to several, and what communication costs there
===========================================================

Run it by ``python docs/tours/several_gpus.py [folder]``: it prints what follows, and writes timelines into the folder
for https://ui.perfetto.dev.

The program stays as it is for one device. A mesh says how many there are; a schedule says what they share. Where this
machine has two GPUs or more, it runs on them, and elsewhere on CPU workers: nothing but the engine differs.
"""

import sys
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective.cuda import driver
from tvm_axe.layout import Layout
from tvm_axe.programs import PROGRAMS
from tvm_axe.schedule import with_layouts

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp())
DEVICES = 2
mesh = axe.Mesh({"tp": DEVICES})


def gpus() -> int:
    """How many GPUs this process may use."""
    try:
        return driver.gpus()
    except axe.InputError:  # there is no driver, or no bindings of it
        return 0


engine = "cuda" if gpus() >= DEVICES else "threads"
target = "cuda" if engine == "cuda" else "llvm"
print(f"{gpus()} GPUs: engine {engine}")

# %%
# 1. One device
# -------------
#
# A product of the last layer of an MLP, of 16-bit numbers. Alone it needs neither a mesh nor a schedule.


def product(m: int, n: int, k: int):
    @T.prim_func(s_tir=True)
    def product(A: T.Buffer((m, k), "float16"), B: T.Buffer((k, n), "float16"), C: T.Buffer((m, n), "float16")):
        for i, l, j in T.grid(m, k, n):
            with T.sblock("mm"):
                vi, vk, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    C[vi, vj] = T.float16(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]

    # Each device ends with its rows, as the sequence-parallel layer behind wants them.
    return with_layouts(product, {"C": Layout.sharded((m, n), mesh, {0: "tp"})})


M, N, K = 64, 64, 128
rng = np.random.default_rng(0)
A, B = (rng.standard_normal(shape).astype("float16") for shape in ((M, K), (K, N)))
expected = A.astype("float64") @ B.astype("float64")

# %%
# 2. Several, one stage after the other
# -------------------------------------
#
# Each device multiplies its columns of A with its rows of B; the terms are added where their rows belong. That is a
# product and a reduce-scatter, as a framework would call cuBLAS and then NCCL.


def sequential(m: int, n: int, k: int) -> axe.Schedule:
    sch = axe.Schedule(product(m, n, k), mesh=mesh)
    _, reduce = sch.shard("mm", "l", "tp")
    sch.shard(reduce, "i", "tp")
    return sch


def fused(m: int, n: int, k: int, chunks: int = 4) -> axe.Schedule:
    sch = axe.Schedule(product(m, n, k), mesh=mesh)
    partial, reduce = sch.shard("mm", "l", "tp")
    sch.shard(reduce, "i", "tp")
    sch.overlap([partial, reduce], "tp", chunks)
    return sch


errors = {}
with axe.launch(mesh, engine=engine) as workers:
    for name, schedule in (("sequential", sequential), ("fused", fused)):
        exe = axe.compile(schedule(M, N, K), target=target, work_dir=None)
        found = exe.run(workers, A, B).astype("float64")
        errors[name] = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert errors[name] < 5e-3, errors
        timeline = exe.trace(workers, A, B)
        timeline.save(FOLDER / f"{name}.json")
        print(f"{name}: {exe.notation}, {exe.bytes:,} bytes a device, error {errors[name]:.1e}")
        print(timeline.text(100))

# %%
# 3. What becomes of it on Hopper's GPUs
# --------------------------------------
#
# The same schedules at the size of Llama's 70B, compiled for H100s and H200s; that needs no GPU. What overlaps in
# chunks on cores is one kernel there, beside which copy engines carry what it makes: the lowered program lists a copy
# for each group of columns, behind a wait for the kernel's count of its tiles. `show()` says which form a stage has, or
# why another, and which algorithm each collective takes at its size.

SIZE = (8192, 8192, 28672)
programs = {
    name: axe.compile(schedule(*SIZE), target="cuda:sm_90a", work_dir=None)
    for name, schedule in (("sequential", sequential), ("fused", fused))
}
for exe in programs.values():
    print("\n".join(line for line in exe.show().split("\n\n") if line.startswith(("forms", "collectives"))))
print("\n".join(call.function for call in programs["fused"].lowered.calls))

# %%
# 4. The two side by side
# -----------------------
#
# What a run is expected to look like, by the model that searches rank by: this one hasn't run. On GPUs `exe.trace` says
# what happened. The fused product sends its peer's rows while it computes its own, so the collective's time is gone but
# for the end.

timelines = {name: exe.expected() for name, exe in programs.items()}
for name, timeline in timelines.items():
    print(timeline.text(100))
    timeline.save(FOLDER / f"expected_{name}.json")
shorter = 1 - timelines["fused"].duration / timelines["sequential"].duration
print(f"expected: {shorter:.1%} less with the product beside copies; timelines in {FOLDER}")
assert 0 < shorter < 0.5

# %%
# 5. Beside what has nothing to do with it
# ----------------------------------------
#
# Where two products don't fill the time of each other's communication, or are too small for it, a collective can run
# beside other stages: `beside` marks it, and the lowering has it begin as soon as it can, and joins it where its result
# is first needed. The program "layers" goes back through two layers, whose gradients are summed over data-parallel
# devices.

layers = PROGRAMS["layers"](axe.Mesh({"dp": DEVICES}), "bench")
for name in layers.schedules:
    exe = axe.compile(layers.schedule(name), target="cuda:sm_90a", work_dir=None)
    print("\n".join(exe.lowered.forms))
    print(exe.expected().text(100))
