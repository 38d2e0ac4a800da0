"""Functions with nothing to store store nothing."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tvm_axe import _tvm
from tvm_axe.machines.emptiness import nothing_to_store
from tvm_axe.machines.vector_math import PIPELINE


def running_sum(rows: int | None) -> tvm.IRModule:
    """The function of upstream's operator, of a row of n numbers or of some."""
    n = tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n,) if rows is None else (rows, n), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.cumsum(x, axis=-1)))
    with tvm.target.Target("llvm"):
        module = relax.backend.DispatchSortScan()(builder.get())
    (func,) = (func for func in module.functions.values() if isinstance(func, tirx.PrimFunc))
    return tvm.IRModule({"cumsum": func.with_attr("global_symbol", "cumsum")})


@pytest.mark.parametrize("rows", [None, 4])
def test_a_running_sum_of_no_elements(rows: int | None) -> None:
    built = tvm.compile(running_sum(rows), target="llvm", tir_pipeline=PIPELINE)
    x = np.random.default_rng(0).standard_normal((rows or 1, 5), dtype="float32")
    for n in (1, 5):
        given = x[:, :n] if rows else x[0, :n]
        out = tvm.runtime.tensor(np.full(given.shape, np.nan, "float32"))
        built["cumsum"](tvm.runtime.tensor(given), out)
        np.testing.assert_allclose(out.numpy(), given.cumsum(-1), rtol=1e-6)
    beyond = np.full(64, 7, "float32")
    beyond = beyond[-beyond.ctypes.data // 4 % 16 :]  # from a multiple of 64 bytes on
    none = tvm.runtime.empty((rows, 0), "float32") if rows else tvm.runtime.from_dlpack(beyond[:0])
    built["cumsum"](none, none)
    assert (beyond == 7).all()


def test_nests_of_loops_stay_as_they_are() -> None:
    module = running_sum(None)
    assert not nothing_to_store(module)["cumsum"].body.same_as(module["cumsum"].body)
    loops = tvm.IRModule({"main": _relu()})
    assert nothing_to_store(loops)["main"].body.same_as(loops["main"].body)


def _relu() -> tirx.PrimFunc:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 4), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.nn.relu(x)))
    return _tvm.legalize_ops()(builder.get())["relu"]
