"""Chunks of every type: their kernels take rows of tensors as arguments, where code for a host can say of what type."""

from __future__ import annotations

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import with_layouts

ROWS, WIDTH, INNER = 32, 64, 8
MESH = Mesh({"tp": 2})


@pytest.mark.parametrize(("dtype", "windows"), [("float32", True), ("float16", True), ("bfloat16", False)])
def test_chunks_of_every_type_run(dtype: str, windows: bool) -> None:
    """Whole numbers, which all of these types hold, so that the order of sums is no matter."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((ROWS, INNER), dtype), B: T.Buffer((INNER, WIDTH), dtype), C: T.Buffer((ROWS, WIDTH), dtype)):
        for i, l, j in T.grid(ROWS, INNER, WIDTH):
            with T.sblock("mm"):
                vi, vl, vj = T.axis.remap("SRS", [i, l, j])
                with T.init():
                    C[vi, vj] = T.cast(0, dtype)
                C[vi, vj] = C[vi, vj] + A[vi, vl] * B[vl, vj]

    sch = axe.Schedule(with_layouts(func, {"C": Layout.sharded((ROWS, WIDTH), MESH, {0: "tp"})}), mesh=MESH)
    partial, reduce = sch.shard("mm", "l", "tp")
    sch.shard(reduce, "i", "tp")
    sch.overlap([partial, reduce], "tp", 2)
    exe = axe.compile(sch, work_dir=None)
    assert isinstance(exe, axe.executable.mesh.MeshExecutable)
    assert any(call.windows for call in exe.lowered.calls) == windows
    rng = np.random.default_rng()
    a, b = (rng.integers(-2, 3, shape).astype(check_dtype(dtype)) for shape in ((ROWS, INNER), (INNER, WIDTH)))
    with axe.launch(MESH, engine="threads") as workers:
        exe.fill(workers, lambda buffer: np.nan)
        found = exe.run(workers, a, b)
    np.testing.assert_array_equal(found.astype("float64"), a.astype("float64") @ b.astype("float64"))
