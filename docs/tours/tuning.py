"""
Tuning, from one function to a model
====================================

Run it by ``python docs/tours/tuning.py [DIR]``: it prints what follows, and every statement is checked when it runs.

Records go to DIR, or to a folder that is removed at the end. A real job has 64 trials for each kernel or more; here it
is a few, so that the tour takes seconds.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.machines import resolve_target
from tvm_axe.pipeline import build
from tvm_axe.records import apply_best, split_packing

rng = np.random.default_rng(0)


def check(found: np.ndarray, expected: np.ndarray) -> None:
    """Compare with numpy's result in float64."""
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < 1e-5, error
    print(f"relative error {error:.1e}")


def empty(param: tvm.tirx.Var) -> tvm.runtime.Tensor:
    """A tensor for a parameter of a function."""
    return tvm.runtime.empty([int(extent) for extent in param.ty.shape], str(param.ty.dtype))


if len(sys.argv) > 1:
    work_dir = Path(sys.argv[1])
else:
    folder = tempfile.TemporaryDirectory()
    work_dir = Path(folder.name)

# %%
# 1. A function
# -------------
#
# Nothing in it says how it is to be computed.


@T.prim_func(s_tir=True)
def dense(
    A: T.Buffer((128, 192), "float32"),
    W: T.Buffer((192, 160), "float32"),
    bias: T.Buffer((160,), "float32"),
    out: T.Buffer((128, 160), "float32"),
):
    C = T.sblock_alloc_buffer((128, 160), "float32")
    for i, j, k in T.grid(128, 160, 192):
        with T.sblock("product"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(128, 160):
        with T.sblock("relu"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0))


target = resolve_target("llvm", threads=1)  # records hold for this CPU and number of threads
result = axe.tune(dense, target=target, trials=12, work_dir=work_dir, seed=0, progress=False)
(task,) = result.tasks
print(f"{task.name}: {task.before_ms:.3f} ms untuned, {task.best_ms:.3f} ms tuned, {task.trials} trials")
assert task.trials == 12 and not task.failures

# %%
# The best is a schedule of the same function, and goes wherever the function went: `apply_best` puts it into a
# module, and `axe.compile` finds it too.

module, seconds = apply_best(tvm.IRModule({"main": dense}), target, work_dir)
assert seconds["main"] * 1e3 == task.best_ms
exe = axe.compile(dense, target=target, work_dir=work_dir)
assert exe.tuned == seconds
arrays = [rng.standard_normal(shape, dtype="float32") for shape in ((128, 192), (192, 160), (160,))]
a, w, bias = (array.astype("float64") for array in arrays)
check(exe(*arrays), np.maximum(a @ w + bias, 0))

# %%
# What was compiled can be saved; a process without the sources, or the records, loads it.

exe.save(work_dir / "dense.axe")
check(axe.Executable.load(work_dir / "dense.axe")(*arrays), np.maximum(a @ w + bias, 0))

# %%
# 2. What is on disk
# ------------------
#
# A folder for each target and function, in the format of stock MetaSchedule, and beside it a line for each trial.
# They are written trial by trial, so a job may be killed at any moment.

records = ms.database.JSONDatabase(work_dir=str(task.folder)).get_all_tuning_records()
trials = [json.loads(line) for line in (task.folder / "trials.jsonl").read_text().splitlines()]
assert len(trials) == task.trials == len(records) - 1  # one record is of the function as it was
best = min(trials, key=lambda trial: trial["seconds"])
print(f"{task.folder.relative_to(work_dir)}: the best after {best['elapsed']:.1f} s")

# %%
# The next call counts what is there, and learns from it: four trials are new.

(more,) = axe.tune(dense, target=target, trials=16, work_dir=work_dir, seed=0, progress=False).tasks
later = [json.loads(line) for line in (more.folder / "trials.jsonl").read_text().splitlines()]
assert more.trials == len(later) == 16
assert [trial["elapsed"] for trial in later[:12]] == [trial["elapsed"] for trial in trials]
print(f"the page on it: {result.report.relative_to(work_dir)}")

# %%
# 3. A model
# ----------
#
# Its operators become kernels, each with the pointwise operators behind it; trials go to those from which the model
# gains most.


class MLP(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 32)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.relu(self.up(x)))


model, _ = MLP().export_tvm({"forward": {"x": nn.spec.Tensor([16, 64], "float32")}})
for task in axe.tune(model, target=target, trials=4, work_dir=work_dir, seed=0, progress=False).tasks:
    print(f"{task.name}: {task.before_ms:.3f} ms untuned, {task.best_ms:.3f} ms tuned, {task.trials} trials")
exe = axe.compile(model, target=target, work_dir=work_dir)
shapes = [[int(extent) for extent in param.ty.shape] for param in model["forward"].params]
weights = [rng.standard_normal(shape, dtype="float32") for shape in shapes]
x, w1, b1, w2, b2 = (array.astype("float64") for array in weights)
check(exe(*weights), np.maximum(x @ w1.T + b1, 0) @ w2.T + b2)  # `exe.vm` is upstream's executable

# %%
# 4. Weights that are packed once
# -------------------------------
#
# A function says which of its parameters are the same in every call. Its best schedule may then begin with blocks
# that pack them, and their time doesn't count. Whoever calls the function splits these off.

layer = dense.with_attr("layout_free_buffers", [1])
(task,) = axe.tune(layer, target=target, trials=12, work_dir=work_dir, seed=0, progress=False).tasks
print(f"weights packed once: {task.best_ms:.3f} ms")
module, _ = apply_best(tvm.IRModule({"main": layer}), target, work_dir)
pack, main_part, places = split_packing(module["main"])
tensors = [tvm.runtime.tensor(array) for array in (*arrays, np.full((128, 160), np.nan, "float32"))]
if pack is not None:  # it isn't where the best schedule reads the weights as they are
    packed = [empty(main_part.params[place]) for place in places]
    build(tvm.IRModule({"main": pack.with_attr("global_symbol", "main")}), target)["main"](
        *(tensors[place] for place in places), *packed
    )
    for place, tensor in zip(places, packed):
        tensors[place] = tensor
tensors[-1] = empty(dense.params[-1])
build(tvm.IRModule({"main": main_part}), target)["main"](*tensors)
check(tensors[-1].numpy(), np.maximum(a @ w + bias, 0))

# %%
# Of a model's weights, constants are packed while it is compiled, and parameters by a function beside the model's.

axe.tune(model, target=target, trials=4, work_dir=work_dir, seed=0, progress=False, pack_weights=True)
packing = axe.compile(model, target=target, work_dir=work_dir, pack_weights=True)
machine = relax.VirtualMachine(packing.vm, tvm.cpu())
packed = machine["forward_transform_params"]([tvm.runtime.tensor(array) for array in weights[1:]])
out = machine["forward"](tvm.runtime.tensor(weights[0]), *packed).numpy()
check(out, np.maximum(x @ w1.T + b1, 0) @ w2.T + b2)

# %%
# 5. A tile program of one's own
# ------------------------------
#
# Its author says which numbers are worth trying, and which of them go together. Results are compared with those of the
# program as it is without a search, with the first value of each knob.


@T.prim_func
def linear(A: T.Buffer((96, 192), "float32"), W: T.Buffer((192, 160), "float32"), out: T.Buffer((96, 160), "float32")):
    rows, columns = tile.knob("rows", (16, 32, 96)), tile.knob("columns", (32, 160))
    depth = tile.knob("depth", (64, 192))
    tile.require(rows * columns <= 8192)
    with tile.kernel(tile.cdiv(96, rows), tile.cdiv(160, columns)) as (i, j):
        x = tile.shared((rows, depth), "float32")
        w = tile.shared((depth, columns), "float32")
        y = tile.fragment((rows, columns), "float32")
        tile.fill(y, 0)
        for k in tile.pipelined(tile.cdiv(192, depth)):
            tile.copy(A[i * rows, k * depth], x)
            tile.copy(W[k * depth, j * columns], w)
            tile.gemm(x, w, y)
        tile.copy(y, out[i * rows, j * columns])


(task,) = axe.tune(linear, target=target, trials=8, work_dir=work_dir, seed=0, progress=False).tasks
print(f"{task.name}: {task.before_ms:.3f} ms untuned, {task.best_ms:.3f} ms by its knobs, {task.trials} trials")
kernel = tile.compile(linear, target, work_dir=work_dir)
print(*kernel.explain().splitlines()[:4], sep="\n")
y = np.empty((96, 160), "float32")
kernel(arrays[0][:96].copy(), arrays[1], y)
check(y, a[:96] @ w)

# %%
# A program on a mesh is tuned the same way, `axe.tune(func, mesh=mesh)`: how it is shared, communicates and
# overlaps, and the kernels of its devices (docs/tours/communication.py has the schedules that are tried).
