"""Functions of flattened tensors have one variable for their rows, and are scheduled for as many as there may be."""

from __future__ import annotations

import pytest
import tvm
from tvm import tirx
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_axe.machines import resolve_target
from tvm_axe.nests.representatives import representatives
from tvm_axe.relax.flattened import with_rows_as_one_number
from tvm_axe.relax.fuse import fuse

TARGET = resolve_target("llvm", threads=1)


@I.ir_module
class Rows:
    """Tokens of a batch in front of a layer, flattened."""

    @R.function
    def main(x: R.Tensor(("batch * n", 64), "float32"), s: R.Shape(["batch", "n"]), w: R.Tensor((64, 32), "float32")):
        with R.dataflow():
            y = R.matmul(x, w)
            R.output(y)
        return y


def product(mod: tvm.IRModule) -> tirx.PrimFunc:
    (found,) = [func for var, func in fuse(mod, TARGET).functions_items() if "matmul" in str(var.name_hint)]
    return found


def test_rows_are_one_variable():
    func = product(Rows)
    (rows,) = representatives(func, {}, (1, 16))
    assert str(rows.name) == "rows" and len(func.params) == 3
    assert all(buffer.shape[0].same_as(rows) for buffer in (func.params[0], func.params[2]))


def test_a_function_that_asks_for_a_factor_stays():
    batch, n = tirx.Var("batch", "int64"), tirx.Var("n", "int64")
    x, p, y = (
        tirx.decl_buffer((extent,), name=name) for extent, name in ((batch * n, "x"), (n, "p"), (batch * n, "y"))
    )
    i = tirx.Var("i", "int64")
    body = tirx.BufferStore(y, x[i] + p[tirx.floormod(i, n)], [i])
    func = tirx.PrimFunc([x, p, batch, n, y], tirx.For(i, 0, batch * n, tirx.ForKind.SERIAL, body))
    mod = tvm.IRModule({"main": func})
    assert with_rows_as_one_number(mod) is mod


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, (1, 16)),
        ({"rows": (8,)}, (8,)),
        ({"n": (64, 128)}, (64, 128)),
        ({"n": (64, 128), "batch": (1, 2)}, (64, 128, 256)),
    ],
)
def test_they_stand_for_what_their_factors_do(values, expected):
    assert [*representatives(product(Rows), values, (16, 1)).values()] == [expected]
