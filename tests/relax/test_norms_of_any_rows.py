"""Norms and softmax of as many rows as a call brings: a GPU's tile kernels, as of known rows, alone and on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import IRModule, relax, tirx
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.relax import sharing
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.kernels import with_kernels
from tvm_axe.tile import lowering
from tvm_axe.tile.kernels import KERNELS

GPU, CPU = resolve_target("cuda:sm_90a"), resolve_target("llvm")
ROWS = (1, 3, 128, 1000)
EPSILON = 1e-5
BOUND = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
SHAPES: dict[str, tuple[str | int, ...]] = {"rows": ("n",), "two unknown": ("b", "n"), "around": (2, "n", 3)}


class Norms(nn.Module):
    """Both norms of sums with a residual, a root mean square norm that is written out, and a softmax."""

    def __init__(self, columns: int, dtype: str) -> None:
        self.root, self.layer = nn.RMSNorm(columns, -1, EPSILON, bias=False), nn.LayerNorm(columns, EPSILON)
        self.weight = nn.Parameter((columns,))
        self.to(dtype)

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> tuple[nn.Tensor, ...]:
        y = x + residual
        wide = y.astype("float32")
        mean = nn.op.wrap_nested(relax.op.mean((wide * wide)._expr, -1, keepdims=True), "mean")
        root = nn.op.wrap_nested(relax.op.rsqrt((mean + EPSILON)._expr), "root")
        return self.root(y), self.layer(y), self.weight * (wide * root).astype(x.dtype), nn.op.softmax(y, -1)


def model(lead: tuple[str | int, ...], columns: int, dtype: str) -> IRModule:
    given = nn.spec.Tensor([*lead, columns], dtype)
    return Norms(columns, dtype).export_tvm({"forward": {"x": given, "residual": given}})[0]


def arrays(lead: tuple[str | int, ...], columns: int, dtype: str, rows: int) -> list[np.ndarray]:
    rng = np.random.default_rng()
    shape = [{"n": rows, "b": 2}[each] if isinstance(each, str) else each for each in lead]
    shapes = [[*shape, columns]] * 2 + [[columns]] * 4
    return [(1 + 2 * rng.standard_normal(each)).astype(np.dtype(dtype)) for each in shapes]


def exact(x: np.ndarray, residual: np.ndarray, *weights: np.ndarray) -> list[np.ndarray]:
    y = (x + residual).astype("float64")
    root, layer, bias, own = (each.astype("float64") for each in weights)
    far = y - y.mean(-1, keepdims=True)
    over_root, over_deviation = (each / np.sqrt(np.square(each).mean(-1, keepdims=True) + EPSILON) for each in (y, far))
    weights = np.exp(y - y.max(-1, keepdims=True))
    return [over_root * root, over_deviation * layer + bias, over_root * own, weights / weights.sum(-1, keepdims=True)]


def error(found: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found).astype("float64") - want) / np.linalg.norm(want))


def norms(mod: IRModule) -> list[str]:
    """What kernels compute of it, and where each has its rows from."""
    functions = [func for _, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]
    said = [func.attrs for func in functions if KERNEL in (func.attrs or {})]
    return sorted(f"{attrs[KERNEL]} {[*map(int, attrs[f'{KERNEL}.rows'])]}" for attrs in said)


@pytest.mark.parametrize(
    ("name", "columns", "dtype"),
    [("rows", 200, "float32"), ("two unknown", 64, "float16"), ("around", 130, "float16")],
)
def test_one_kernel_is_right_of_any_rows(name: str, columns: int, dtype: str) -> None:
    """That of a GPU, in code for a CPU; what is around it is fused as of known rows."""
    lead = SHAPES[name]
    mod = fuse(model(lead, columns, dtype), GPU)
    places = [0, *range(len(lead))]
    assert norms(mod) == [f"{each} {places}" for each in ("layer_norm", "rms_norm", "rms_norm", "softmax")]
    known = fuse(model(tuple({"n": 5, "b": 2}.get(each, each) for each in lead), columns, dtype), GPU)
    assert len([*mod.functions_items()]) == len([*known.functions_items()])
    rest = tvm.transform.Sequential(_tvm.relax_lowering(CPU, "cpu"))
    machine = relax.VirtualMachine(builder.build_program(with_tile_kernels(mod, CPU), CPU, rest), tvm.cpu())
    for rows in ROWS:
        given = arrays(lead, columns, dtype, rows)
        for found, want in zip(machine["forward"](*map(tvm.runtime.tensor, given)), exact(*given), strict=True):
            assert error(found.numpy(), want) < BOUND[dtype]


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_it_compiles_without_a_gpu(target: str) -> None:
    exe = axe.compile(model(("b", "n"), 200, "bfloat16"), target=target, work_dir=None, keep=False)
    assert len(norms(exe.module)) == 4


def test_gpus_of_a_mesh_have_one_kernel_each() -> None:
    """Of their part of the batch, of which it says how many rows it has."""
    given = {"mesh": {"tp": 2}, "pins": {"x": 0, "residual": 0}, "work_dir": None, "keep": False}
    exe = axe.compile(model(("b", "n"), 64, "float16"), target=GPU, **given)
    assert len(norms(exe.module)) == 3
    kernels = {v: func for v, func in exe.runnable.functions_items() if "norm" in str(v.name_hint)}
    builder.build_kernels(IRModule(kernels), GPU)  # cubins


def test_what_gpus_of_a_mesh_do_is_right(monkeypatch: pytest.MonkeyPatch, workers: Any) -> None:
    """By the same kernels in code for CPUs; two devices of three compute the same batch of two."""
    monkeypatch.setattr(sharing, "with_attention", lambda model, target, in_blocks: with_kernels(model, GPU))
    pins = {"x": 0, "residual": 0}
    exe = axe.compile(model(("b", "n"), 64, "float32"), mesh={"tp": 3}, pins=pins, work_dir=None, keep=False)
    assert len(norms(exe.module)) == 3
    for rows in ROWS:
        given = arrays(("b", "n"), 64, "float32", rows)
        for found, want in zip(exe.run(workers(3), *given), exact(*given), strict=True):
            assert error(found, want) < BOUND["float32"]


def ending(read_by: Callable[[relax.Expr], relax.Expr]) -> IRModule:
    x = relax.Var("x", relax.TensorType((tirx.Var("n", "int64"), 100), "float32"))
    block = relax.BlockBuilder()
    with block.function("main", [x]):
        block.emit_func_output(block.emit(read_by(block.emit(relax.op.nn.softmax(x)))))
    return block.get()


def test_a_softmax_that_ends_in_other_elements_is_blocks() -> None:
    """Which are fused behind it, and would be a kernel of their own."""
    assert not norms(fuse(ending(lambda soft: relax.op.astype(soft, "float16")), GPU))
    assert norms(fuse(ending(lambda soft: relax.op.sum(soft, 0)), GPU)) == ["softmax [0, 0]"]


def test_a_row_of_the_least_float_weighs_all_alike() -> None:
    """Beside the columns that only fill a tile up, which weigh nothing then either."""
    x = np.full((3, 100), np.finfo("float32").min, "float32")
    x[1, 7:], x[2] = -np.inf, np.arange(100)
    target = resolve_target("llvm")
    (program,) = KERNELS["softmax"].recipe(target, {"rows": 3, "columns": 100, "dtype": "float32"}).programs
    mod = IRModule({"main": lowering.lower(program, target).with_attr("global_symbol", "main")})
    found = tvm.runtime.tensor(np.full_like(x, np.nan))
    builder.build_kernels(mod, target)["main"](tvm.runtime.tensor(x), found)
    weights = np.exp(x.astype("float64") - x.max(1, keepdims=True))
    np.testing.assert_allclose(found.numpy(), weights / weights.sum(1, keepdims=True), atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("name", "columns"), [("rows", 200), ("two unknown", 4096), ("around", 64)])
def test_on_a_gpu(name: str, columns: int, dtype: str, cuda: None) -> None:
    lead = SHAPES[name]
    exe = axe.compile(model(lead, columns, dtype), target="cuda", work_dir=None, keep=False)
    for rows in ROWS:
        given = arrays(lead, columns, dtype, rows)
        for found, want in zip(exe(*given), exact(*given), strict=True):
            assert error(found, want) < BOUND[dtype]
