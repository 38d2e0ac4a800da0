"""Products with weights of few bits: of many rows weights are decoded once."""

import numpy as np
import pytest
from tvm import tirx
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.check import TOLERANCE, executed, judged
from tvm_axe.tile.kernels.tiling import matmul_knobs

CPU = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
HOPPER, AMPERE = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_90a", "sm_80"))
W4A16, W8A16 = (KERNELS[name] for name in ("w4a16_matmul", "w8a16_matmul"))
PROBLEM = {"m": 2048, "n": 512, "k": 1024, "group": 128, "dtype": "bfloat16"}


def decoded_once(kernel, problem):
    tiles = {name: values[0] for name, values in matmul_knobs(CPU, problem).items()}
    return kernel.make(**problem, **tiles, once=1)


@pytest.mark.parametrize(
    "kernel, problem",
    [(kernel, case) for kernel in (W4A16, W8A16) for case in kernel.cases],
    ids=lambda value: getattr(value, "name", None),
)
def test_weights_that_are_decoded_once(kernel, problem):
    recipe = decoded_once(kernel, problem)
    assert [program.name for program in recipe.programs] == ["decode_weights", kernel.name]
    assert recipe.scratch == {"decoded": ((problem["n"], problem["k"]), problem["dtype"])}
    arrays = kernel.inputs(np.random.default_rng(11), problem)
    outputs = executed(recipe, CPU, arrays)
    assert not judged(outputs, kernel.reference(problem, arrays), TOLERANCE[problem["dtype"]])[1]


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
def test_weights_of_many_rows_are_decoded_once_by_default(target):
    def once(kernel, m, **more):
        return kernel.parameters(target, {**PROBLEM, "m": m, **more}).get("once", (0,))[0]

    assert [once(W4A16, m) for m in (1, 64, 2048, 4096, 4097)] == [0, 0, 0, 0, 1]
    assert [once(W4A16, m, zeros=True) for m in (1024, 2048, 2049)] == [0, 0, 1]
    assert [once(W4A16, m, weights="float4_e2m1fn", scale_dtype="uint8") for m in (2048, 2049)] == [0, 1]
    assert [once(W8A16, m, weights="int8") for m in (1, 64, 1024, 1025, 8192)] == [0, 0, 0, 1, 1]
    assert not once(W4A16, tirx.Var("m", "int32"))
    problem = {**PROBLEM, "weights": "int8"}
    assert "once" not in W8A16.parameters(CPU, problem)
    first, product = W8A16.recipe(target, problem).programs
    assert ([param.name for param in first.params], [param.name for param in product.params]) == (
        ["B", "scales", "decoded"],
        ["A", "decoded", "C"],
    )


def test_groups_that_divide_no_row_are_refused():
    with pytest.raises(TileError, match="group=96 divides k=1024"):
        W4A16.recipe(HOPPER, {**PROBLEM, "group": 96})
