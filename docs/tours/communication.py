"""
Communication schedules, from an all-reduce to overlapped kernels
=================================================================

Run it by ``python docs/tours/communication.py``: it prints what follows.

A program says what is computed, as if there were one device. A schedule says who computes what; which data travels, and
when, follows from that.
"""

import tempfile

import numpy as np
from tvm.script import tirx as T

import tvm_axe as axe

M, N, K = 64, 48, 96


@T.prim_func(s_tir=True)
def block(
    X: T.Buffer((M, K), "float32"),
    W: T.Buffer((K, N), "float32"),
    residual: T.Buffer((M, N), "float32"),
    out: T.Buffer((M, N), "float32"),
):
    C = T.sblock_alloc_buffer((M, N), "float32")
    for i, j, k in T.grid(M, N, K):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vk, vj]
    for i, j in T.grid(M, N):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0)) + residual[vi, vj]


rng = np.random.default_rng(0)
arrays = [rng.standard_normal(shape, dtype="float32") for shape in [(M, K), (K, N), (M, N)]]
expected = np.maximum(arrays[0].astype("float64") @ arrays[1], 0) + arrays[2]
mesh = axe.Mesh({"tp": 2})
workers = axe.launch(mesh, engine="threads")


def check(sch: axe.Schedule, notation: str) -> axe.Executable:
    """Run a schedule and compare it with numpy; print its stages."""
    exe = axe.compile(sch, work_dir=None)
    np.testing.assert_allclose(exe.run(workers, *arrays), expected, rtol=1e-4, atol=1e-4)
    assert exe.notation == notation, exe.notation
    print(f"{notation}: {exe.bytes:,} bytes a device")
    for stage in exe.stages:
        print(f"    {stage.name:<24} {stage.kind}")
    return exe


# %%
# 1. Share a reduction
# --------------------
#
# Each device multiplies its columns of X with its rows of W. What it gets is a partial sum, and the block that is left
# sums the partials: an all-reduce. Nobody wrote that word; it is what reading all devices' terms into a tensor that all
# of them need amounts to.


def shared() -> tuple:
    sch = axe.Schedule(block, mesh=mesh)
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    return sch, partial, reduce


sch, partial, reduce = shared()
check(sch, "MM-AR-C")

# %%
# 2. Split it, and compute on slices
# ----------------------------------
#
# An all-reduce is a reduce-scatter and an all-gather (or, with root=0, a reduce and a broadcast). The gather can then
# move behind what is computed of it: each device computes on its own rows, and their results are gathered.

scatter, gather = sch.split_collective(reduce)
(gather,) = sch.reorder_collective(gather, [sch.get_sblock("epi")])
check(sch, "MM-RS-C-AG")

# %%
# 3. Fuse
# -------
#
# Three stages, each of which writes to memory what the next one reads. One kernel does the same a row at a time: it
# reads the peers' partial sums, adds them, computes, and writes the row to all devices. It is a plain loop nest, as a
# mesh tensor is one tensor whose leading dimension is the device.

epi = sch.get_sblock("epi")
sch.fuse_collective([scatter, epi, gather])
exe = check(sch, "MM-fuse(RS-C-AG)")

# %%
# 4. Overlap
# ----------
#
# The matmul and that kernel are cut into chunks of rows, and run chunk by chunk. A device begins with the rows that its
# neighbour will want and ends with its own; it announces a chunk that others want (axe.arrive), goes on, and waits only
# when it wants theirs (axe.wait), some chunks later. The matmul's chunks are calls of one ordinary kernel on windows of
# its arguments, so tuning finds it as it finds any other.

sch.overlap([partial, scatter], "tp", chunks=4)
exe = check(sch, "ol(MM, fuse(RS-C-AG))")
print(exe.module["main"].script())

# %%
# 5. Gradients, state, norms
# --------------------------
#
# Where devices hold the terms of a sum already, `all_reduce` says so: dimension 0 of g counts the devices. The momentum
# may stay on the device that computed it (`as_slice`); the next step takes it from there.

ROWS, WIDTH, n = 32, 16, mesh["tp"]


@T.prim_func(s_tir=True)
def sgd(
    g: T.Buffer((n, ROWS, WIDTH), "float32"),
    p: T.Buffer((ROWS, WIDTH), "float32"),
    m: T.Buffer((ROWS, WIDTH), "float32"),
    p_out: T.Buffer((ROWS, WIDTH), "float32"),
    m_out: T.Buffer((ROWS, WIDTH), "float32"),
):
    total = T.sblock_alloc_buffer((ROWS, WIDTH), "float32")
    for i, j, k in T.grid(ROWS, WIDTH, n):
        with T.sblock("sum"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                total[vi, vj] = T.float32(0)
            total[vi, vj] = total[vi, vj] + g[vk, vi, vj]
    for i, j in T.grid(ROWS, WIDTH):
        with T.sblock("momentum"):
            vi, vj = T.axis.remap("SS", [i, j])
            m_out[vi, vj] = T.float32(0.9) * m[vi, vj] + total[vi, vj]
    for i, j in T.grid(ROWS, WIDTH):
        with T.sblock("step"):
            vi, vj = T.axis.remap("SS", [i, j])
            p_out[vi, vj] = p[vi, vj] - T.float32(0.1) * m_out[vi, vj]


sch = axe.Schedule(sgd, mesh=mesh)
total, momentum, step = (sch.get_sblock(name) for name in ("sum", "momentum", "step"))
scatter, gather = sch.split_collective(sch.all_reduce(sch.get_loops(total)[2], "tp"))
of_momentum, of_step = sch.reorder_collective(gather, [momentum, step])
kept = sch.as_slice(of_momentum)
sch.fuse_collective([scatter, momentum, step, kept, of_step])
g, p, m = (rng.standard_normal(shape, dtype="float32") for shape in [(n, ROWS, WIDTH), (ROWS, WIDTH), (ROWS, WIDTH)])
arrays, momentum_out = [g, p, m], 0.9 * m.astype("float64") + g.sum(0)
exe = axe.compile(sch, work_dir=None)
new_p, new_m = exe.run(workers, *arrays)
np.testing.assert_allclose(new_m, momentum_out, rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(new_p, p - 0.1 * momentum_out, rtol=1e-5, atol=1e-5)
assert exe.notation == "fuse(RS-C-AG)"
print(f"{exe.notation}: m_out lies as {exe.layouts['m_out']}")

# %%
# 6. Or let it be found
# ---------------------
#
# `axe.search` enumerates every schedule that the primitives' rules allow, leaves out what the link model rules out, and
# measures the rest. What it measured stays in a MetaSchedule database below `work_dir`.

with tempfile.TemporaryDirectory() as work_dir:
    found = axe.search(
        sgd, mesh, keep=("m_out",), inputs=arrays, engine="threads", measure=3, chunks=(2,), repeat=3,
        work_dir=work_dir, progress=False,
    )  # fmt: skip
assert found.best.median_ms is not None
print(f"{len(found.schedules)} schedules, the best measured: {found.best.notation}, by")
print("\n".join(f"    {step}" for step in found.best.steps))
workers.close()
