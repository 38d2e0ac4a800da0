"""The norm of a sum over devices: by the interpreter of all of them, by workers, and as a binary for GPUs."""

import numpy as np
import pytest
from interpreter_mesh import interpret_mesh
from tvm.target import Target

from tvm_axe.collective import MeshKernel, Workers, launch
from tvm_axe.errors import TileError
from tvm_axe.layout import Mesh
from tvm_axe.machines import nvcc, resolve_target
from tvm_axe.tile import compile_all
from tvm_axe.tile.kernels import REDUCE_NORM
from tvm_axe.tile.kernels.check import judged
from tvm_axe.tile.kernels.kernel import TOLERANCE

CASES = [
    (index, share)
    for index, case in enumerate(REDUCE_NORM.cases)
    for share in dict.fromkeys(REDUCE_NORM.parameters(resolve_target("llvm"), case)["share"])
]
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def drawn(index: int) -> tuple[dict, dict[str, np.ndarray]]:
    problem = REDUCE_NORM.cases[index]
    return problem, REDUCE_NORM.inputs(np.random.default_rng([3, index]), problem)


def small(problem: dict) -> dict:
    """The problem with as few rows and columns as leave its shares what they are: an order has a step a block."""
    devices, rows = problem["devices"], problem["rows"]
    few = 2 * devices if rows % devices == 0 else min(rows, devices + 1)
    return {**problem, "rows": few, "columns": min(problem["columns"], 33)}


@pytest.mark.parametrize("index", range(len(REDUCE_NORM.cases)))
def test_in_many_orders(index):
    problem = small(REDUCE_NORM.cases[index])
    arrays = REDUCE_NORM.inputs(np.random.default_rng([3, index]), problem)
    devices, rows, columns = problem["devices"], problem["rows"], problem["columns"]
    want = REDUCE_NORM.reference(problem, arrays)["out"].value
    for share in REDUCE_NORM.parameters(HOPPER, problem)["share"]:
        (program,) = REDUCE_NORM.recipe(HOPPER, problem, share=share).programs
        same = (np.broadcast_to(arrays[name], (devices, *arrays[name].shape)) for name in ("residual", "weight"))
        given = arrays["x"], *same, None, arrays["flags"], np.full((devices, rows, columns), np.nan)
        for seed, running in ((0, 1), (1, 2), (2, None), (3, None)):
            found = interpret_mesh(program, *given, rng=np.random.default_rng(seed), running=running)
            np.testing.assert_allclose(
                found[-1], np.broadcast_to(want, found[-1].shape), rtol=1e-5
            )  # of epsilon as float32
            assert not found[-2].any()


def check(workers: Workers, index: int, share: int) -> None:
    """Run it by workers twice, on poisoned outputs."""
    problem, arrays = drawn(index)
    expected = REDUCE_NORM.reference(problem, arrays)
    target = resolve_target(workers.target)
    (program,) = REDUCE_NORM.recipe(target, problem, share=share).programs
    kernel = MeshKernel(workers, program)
    tensors = {}
    for param in program.params:
        slab = param.shape[1:] if param.is_mesh else param.shape
        tensors[param.name] = workers.mesh_tensor(slab, param.dtype)
    for _ in range(2):
        for name, tensor in tensors.items():
            for device in range(problem["devices"]):
                each = name in ("x", "flags")
                array = np.nan if name == "out" else arrays[name][device] if each else arrays[name]
                tensor.slab(device)[...] = array
        kernel(*tensors.values())
        for device in range(problem["devices"]):
            _, fault = judged({"out": tensors["out"].slab(device)}, expected, TOLERANCE[problem["dtype"]])
            assert not fault
            assert not tensors["flags"].slab(device).any()


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("index, share", CASES)
def test_on_cpu_workers(index, share, engine):
    with launch(Mesh({"tp": REDUCE_NORM.cases[index]["devices"]}), engine=engine) as workers:
        check(workers, index, share)


@pytest.mark.gpu
@pytest.mark.parametrize("index, share", CASES)
def test_on_gpus(index, share, on_gpus):
    devices = REDUCE_NORM.cases[index]["devices"]
    with launch(Mesh({"tp": devices}), engine="cuda", **on_gpus(devices)) as workers:
        check(workers, index, share)


def test_it_compiles_without_a_gpu():
    try:
        nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))
    for index, share in ((1, 0), (1, 4)):
        programs = REDUCE_NORM.recipe(HOPPER, REDUCE_NORM.cases[index], share=share).programs
        assert "axe_wait" in compile_all(programs, HOPPER)[0].source


@pytest.mark.parametrize("columns, threads", [(8192, 1024), (1024, None)])
def test_long_rows_have_more_threads(columns, threads):
    problem = {"devices": 2, "rows": 2, "columns": columns, "dtype": "bfloat16"}
    (program,) = REDUCE_NORM.recipe(HOPPER, problem, share=0).programs
    assert program.options.get("threads") == threads


def test_many_rows_are_shared():
    shares = [REDUCE_NORM.parameters(HOPPER, case)["share"] for case in REDUCE_NORM.cases]
    assert shares == [(0,), (0, 4), (16, 0), (16, 0), (0,)]
    two = {"devices": 2, "rows": 64, "columns": 8192, "dtype": "bfloat16"}
    assert REDUCE_NORM.parameters(HOPPER, two)["share"] == (0, 32)  # as many bytes, and a meeting less
    with pytest.raises(
        TileError, match="reduce_norm: shares of 3 rows of 2 devices are not 8 rows; valid is 0, or 8 / 2"
    ):
        REDUCE_NORM.recipe(HOPPER, REDUCE_NORM.cases[1], share=3)
