"""Products of as many rows as a call brings: a GPU's tile kernels, one for each range of rows, with what is behind."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import IRModule, relax, s_tir, tirx
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.nests.kernel_ranges import kernels_by_rows
from tvm_axe.nests.ranges import ranges_of, with_ranges
from tvm_axe.relax.fuse import fuse
from tvm_axe.schedule import tile_kernel

GPU, CPU = resolve_target("cuda:sm_90a"), resolve_target("llvm")
ROWS = (1, 2, 16, 17, 150)
BOUND = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
SHAPES: dict[str, tuple[str | int, ...]] = {"rows": ("n",), "two unknown": ("b", 1, "n"), "around": (2, "n", 3)}


class Layers(nn.Module):
    """A product with what is pointwise behind it, of its shape and of its columns, and a plain one."""

    def __init__(self, k: int, n: int, dtype: str) -> None:
        self.up, self.down = nn.Linear(k, n), nn.Linear(n, k, bias=False)
        self.to(dtype)

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.silu(self.up(x)) + residual)


def model(lead: tuple[str | int, ...], k: int, n: int, dtype: str) -> IRModule:
    given = {"x": nn.spec.Tensor([*lead, k], dtype), "residual": nn.spec.Tensor([*lead, n], dtype)}
    return Layers(k, n, dtype).export_tvm({"forward": given})[0]


def arrays(lead: tuple[str | int, ...], k: int, n: int, dtype: str, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng()
    shape = [{"n": rows, "b": 2}[each] if isinstance(each, str) else each for each in lead]
    shapes = [[*shape, k], [*shape, n], [n, k], [n], [k, n]]
    return [(rng.standard_normal(each) / (8 if len(each) == 2 else 1)).astype(np.dtype(dtype)) for each in shapes]


def exact(*given: np.ndarray) -> np.ndarray:
    x, residual, up, bias, down = (each.astype("float64") for each in given)
    y = x @ up.T + bias
    return (y / (1 + np.exp(-y)) + residual) @ down.T


def error(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(found.astype("float64") - want) / np.linalg.norm(want))


def products(mod: IRModule) -> dict[str, tirx.PrimFunc]:
    return {str(v.name_hint): func for v, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}


def test_ranges_take_kernels_for_as_many_rows() -> None:
    """Those of known rows; where kernels of two are one, they are one range."""
    mod = fuse(model(("n",), 64, 4096, "float16"), GPU)
    up, down = "fused_NT_matmul_add_silu_add1", "NT_matmul1"

    def kernels(name: str, **values: tuple[int, ...]) -> list[str]:
        return [line.partition("(")[0] for line in ranges_of(products(with_ranges(mod, GPU, values)[0])[name])]

    few = ["n <= 16: skinny_matmul", "n <= 32: skinny_matmul", "n <= 64: skinny_matmul"]
    assert kernels(up) == [*few, *(f"n <= {n}: matmul" for n in (128, 256, 512)), "n > 512: matmul"]
    assert kernels(down) == [*few, "n > 64: matmul"]
    assert kernels(up, n=(64,)) == ["any n: skinny_matmul"]
    with pytest.raises(axe.InputError, match="no shape has the variable 'm'"):
        kernels(up, m=(64,))


@pytest.mark.parametrize(
    ("name", "k", "n", "dtype"),
    [("two unknown", 64, 96, "float16"), ("around", 33, 65, "float32")],
)
def test_kernels_are_right_of_any_rows(name: str, k: int, n: int, dtype: str) -> None:
    """Those that a CPU is offered, in the branches of a GPU's."""
    lead = SHAPES[name]
    mod = fuse(model(lead, k, n, dtype), GPU)
    made = {v: kernels_by_rows(func, CPU, (2, 16, 128)) for v, func in products(mod).items()}
    assert len(made) == 2 and all(func is not None and len(ranges_of(func)) == 3 for func in made.values())
    lowered = with_tile_kernels(replaced(mod, made), CPU)
    rest = tvm.transform.Sequential(_tvm.relax_lowering(CPU, "cpu"))
    machine = relax.VirtualMachine(builder.build_program(lowered, CPU, rest), tvm.cpu())
    for rows in ROWS:
        given = arrays(lead, k, n, dtype, rows)
        found = machine["forward"](*map(tvm.runtime.tensor, given))
        assert error(found.numpy(), exact(*given)) < BOUND[dtype]


def replaced(mod: IRModule, functions: dict[str, tirx.PrimFunc]) -> IRModule:
    mod = mod.clone()
    for name, func in functions.items():
        mod[name] = func
    return mod


@pytest.mark.parametrize("rows", [1, 16, 40])
def test_a_kernel_for_few_rows_is_right_of_many(rows: int) -> None:
    """Of more than a block has room for there are more blocks."""
    func = products(fuse(model(("n",), 40, 72, "float32"), GPU))["fused_NT_matmul_add_silu_add1"]
    sch = s_tir.Schedule(func)
    product, *others = sch.get_child_blocks(sch.get_sblock("root"))
    for block in others[:-1]:
        sch.compute_inline(block)
    tile_kernel(sch, product, "skinny_matmul", others[-1], width=16)
    lowered = with_tile_kernels(sch.mod, CPU)["main"].with_attr("global_symbol", "main")
    kernel = builder.build_kernels(IRModule({"main": lowered}), CPU)["main"]
    x, residual, up, bias, _ = arrays(("n",), 40, 72, "float32", rows)
    found = tvm.runtime.tensor(np.full((rows, 72), np.nan, "float32"))
    kernel(*map(tvm.runtime.tensor, (x, up, bias, residual)), found)
    assert error(found.numpy(), exact(x, residual, up, bias, np.eye(72))) < 1e-6


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_they_compile_without_a_gpu(target: str) -> None:
    exe = axe.compile(model(("b", "n"), 72, 136, "bfloat16"), target=target, work_dir=None, keep=False)
    assert all(ranges_of(func) for func in products(exe.module).values())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("name", "k", "n"), [("rows", 1024, 2048), ("two unknown", 96, 200), ("around", 40, 72)])
def test_on_a_gpu(name: str, k: int, n: int, dtype: str, cuda: None) -> None:
    lead = SHAPES[name]
    exe = axe.compile(model(lead, k, n, dtype), target="cuda", work_dir=None, keep=False)
    assert all(ranges_of(func) for func in products(exe.module).values())
    for rows in (*ROWS, 1000, 3000):
        given = arrays(lead, k, n, dtype, rows)
        assert error(np.asarray(exe(*given)), exact(*given)) < BOUND[dtype]
