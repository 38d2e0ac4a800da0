"""What else runs in the process sees nothing of the package: no hook, lowering or function of upstream's changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tvm_axe import TileError
from tvm_axe.machines import nvcc

# A process of its own: state of it, as upstream leaves it, beside the same after every use of the package.
_PROGRAM = """
import hashlib, json, pathlib, sys, threading
import numpy as np
import tvm, tvm_ffi
import tvm.relax, tvm.runtime.disco, tvm.s_tir.meta_schedule  # which register functions of their own
from tvm import s_tir
from tvm.script import tirx as T
from tvm_ffi.registry import list_global_func_names

@T.prim_func(s_tir=True)
def exps(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in range(64):
        with T.sblock("y"):
            vi = T.axis.spatial(64, i)
            y[vi] = T.exp(x[vi]) + T.tanh(x[vi])

vectors = s_tir.Schedule(exps)
vectors.vectorize(vectors.split(vectors.get_loops(vectors.get_sblock("y"))[0], [None, 16])[1])

def state():
    code = tvm.compile(vectors.mod, target="llvm").mod.inspect_source("ll")
    return {
        "excepthooks": [id(sys.excepthook), id(threading.excepthook)],
        "code": hashlib.sha256(code.encode()).hexdigest(),
        "calls libm": "llvm.exp" in code,
    }

def functions():
    # every global function, and every rule by which an operator is lowered
    found = {name: tvm_ffi.get_global_func(name) for name in list_global_func_names()}
    for attribute in ("llvm.FLowerIntrinsic", "llvm.FLegalize", "cuda.FLowerIntrinsic", "default.FLowerIntrinsic"):
        for name in tvm.ir.Op.list_op_names():
            if (rule := tvm.ir.Op.get(name).get_attr(attribute)) is not None:
                found[f"{attribute} of {name}"] = rule
    return found

before, known = state(), functions()
assert "llvm.FLegalize of tirx.exp" in known or "llvm.FLowerIntrinsic of tirx.exp" in known

import tvm_axe as axe
import tvm_axe.relax, tvm_axe.cli, tvm_axe.meta
from tvm_axe import tile
from tvm_axe.demo import block
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.build import compile_all
from tvm_axe.tile.kernels.registry import KERNELS
from tvm_axe.machines.target import resolve_target

mesh = axe.Mesh({"tp": 2})
sch = axe.Schedule(exps, mesh=mesh)
sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, 16])[1])
exe = axe.compile(sch, work_dir=None)
x = np.linspace(-1, 1, 64).astype("float32")
with axe.launch(mesh, engine="threads") as workers:
    got = exe.run(workers, x)
    np.testing.assert_allclose(np.asarray(got), np.exp(x) + np.tanh(x), atol=1e-6)

store = Cache(pathlib.Path(sys.argv[1]))
for text in json.loads(sys.argv[2]):
    target = resolve_target(text)
    matmul = KERNELS["matmul"]
    compile_all(matmul.recipe(target, matmul.cases[0]).programs, target, store)

after, now = state(), functions()
print(json.dumps({
    "before": before,
    "after": after,
    "changed": [name for name in known if name not in now or not now[name].same_as(known[name])],
    "new": [name for name in now if name not in known],
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the process says of itself."""
    folder = tmp_path_factory.mktemp("neighbours")
    targets = ["llvm"]
    try:
        nvcc.find_compiler()
        targets.append(json.dumps({"kind": "cuda", "arch": "sm_90a"}))
    except TileError:
        pass  # nothing compiles for a GPU here, and so nothing can be changed by it
    file = folder / "program.py"
    file.write_text(_PROGRAM)
    done = subprocess.run(
        [sys.executable, file, folder / "cache", json.dumps(targets)],
        capture_output=True,
        text=True,
        env={**os.environ, "TVM_BACKTRACE": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hooks_and_lowerings_are_those_of_upstream(found):
    assert found["after"] == found["before"]
    assert found["before"]["calls libm"], "upstream's own lowering calls libm for each lane"


def test_global_functions_are_those_of_upstream_and_our_own(found):
    assert found["changed"] == []
    assert all(name.startswith(("axe.", "tvm_axe.")) for name in found["new"]), found["new"]
