"""Models for one GPU: who computes their kernels, and what these compute, here thread by thread and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.analysis.tree import has_threads
from tvm_axe.lower.defaults import with_default_kernels
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.machines.threads import with_threads
from tvm_axe.nests.default import with_default_schedules
from tvm_axe.relax import sharing
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.kernels import with_kernels
from tvm_axe.schedule.tiles import choices_in, has_choice

torch = pytest.importorskip("torch")
models = pytest.importorskip("models_gpu")

GPU, CPU = resolve_target("cuda:sm_90a"), resolve_target("llvm")
TOLERANCE = {"float16": 4e-3, "bfloat16": 2e-2}
NAMES = ("minilm", "prefill", "decode 1", "decode 3")


class Small:
    """A small model with its arguments, and what torch makes of it in float32: the result, and the caches."""

    def __init__(self, name: str, dtype: str) -> None:
        torch.manual_seed(0)
        kind, (word, *number) = getattr(torch, dtype), name.split()
        sizes = models.Llama(width=256, heads=4, kv_heads=2, hidden=384, dim=64, dtype=dtype)
        with torch.no_grad():
            if word == "minilm":
                module = models.MiniLM(2, 100, 128, 4).eval().to(kind)
                inputs = (torch.randint(0, 100, (3, 40)),)
            elif word == "prefill":
                module = models.Prefill(sizes).eval().to(kind)
                inputs = (torch.randn(1, 150, 256).to(kind), *sizes.angles(150))
            else:
                batch, cached = int(number[0]), 200
                module = models.Decode(sizes).eval().to(kind)
                caches = (torch.randn(batch, 2, cached, 64).to(kind) for _ in range(2))
                turn = (each[-1:].clone() for each in sizes.angles(cached))
                inputs = (torch.randn(batch, 1, 256).to(kind), *turn, *caches, torch.tensor([cached - 1]))
            self.arguments = [each.clone() for each in inputs]
            if word == "decode":
                self.model, names = models.decoder(sizes, int(number[0]), 200)
                self.arguments += [module.state_dict()[each].clone() for each in names]
            else:
                self.model = models.imported(module, inputs)
            wide = [each.float() if each.is_floating_point() else each for each in inputs]
            expected = module.float()(*wide)
        self.expected = expected if isinstance(expected, torch.Tensor) else expected[0]
        self.caches = wide[3:5] if word == "decode" else []


def run(built: relax.VMExecutable, small: Small, device: Any, instrument: Any = None) -> tuple[float, list[float]]:
    """The relative errors of the result and of the caches."""
    machine = relax.VirtualMachine(built, device)
    if instrument is not None:
        machine.set_instrument(instrument)
    tensors = [tvm.runtime.from_dlpack(each) for each in small.arguments]
    tensors = [each if device == tvm.cpu() else each.copyto(device) for each in tensors]
    result: Any = machine["main"](*tensors)
    while not isinstance(result, tvm.runtime.Tensor):
        result = result[0]
    return error(result, small.expected), [error(*pair) for pair in zip(tensors[3:], small.caches)]


def error(got: tvm.runtime.Tensor, expected: Any) -> float:
    exact = expected.double()
    off = (torch.from_dlpack(got.copyto(tvm.cpu())).double() - exact).norm()
    return float(off / exact.norm()) if exact.norm() else float(off)


def one_by_one(mod: tvm.IRModule) -> tvm.IRModule:
    """Threads one after the other."""

    def on_loop(loop: tirx.For) -> tirx.Stmt:
        if loop.kind != tirx.ForKind.THREAD_BINDING:
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    named = mod.functions_items()
    return tvm.IRModule({v: f.with_body(_tvm.structural_map(f.body, (tirx.For, on_loop))) for v, f in named})


def is_tiled(func: tirx.PrimFunc) -> bool:
    return KERNEL in (func.attrs or {}) or has_choice(func)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_for_a_gpu_is_right_thread_by_thread(name: str) -> None:
    """Tile kernels are those of the CPU here."""
    small = Small(name, "bfloat16")
    mod = with_default_kernels(fuse(small.model, GPU), GPU)
    functions = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    plain = tvm.IRModule({var: func for var, func in functions.items() if not is_tiled(func)})
    both = {
        **dict(with_tile_kernels(mod, CPU).functions_items()),
        **dict(one_by_one(with_threads(plain)).functions_items()),
    }
    whole = tvm.IRModule(both, attrs=mod.attrs, global_infos=mod.global_infos)
    rest = tvm.transform.Sequential(_tvm.relax_lowering(CPU, "cpu"))
    off, caches = run(builder.build_program(whole, CPU, rest), small, tvm.cpu())
    assert off <= TOLERANCE["bfloat16"]
    assert all(each <= TOLERANCE["bfloat16"] for each in caches)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("minilm", {"attention": 1, "layer_norm": 1, "matmul": 4}),
        ("prefill", {"attention": 1, "rms_norm": 1, "matmul": 6}),
        ("decode 3", {"decode_attention": 1, "rms_norm": 1, "skinny_matmul": 6}),
    ],
)
def test_who_computes_a_model_on_a_gpu(name: str, kernels: dict[str, int]) -> None:
    mod = with_default_kernels(fuse(Small(name, "bfloat16").model, GPU), GPU)
    found: dict[str, int] = {}
    for _, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            whole = (func.attrs or {}).get(KERNEL)
            for kernel in [str(whole)] if whole is not None else [choice.kernel for choice in choices_in(func)]:
                found[kernel] = found.get(kernel, 0) + 1
    assert found == kernels
    rest = with_threads(tvm.IRModule({v: f for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}))
    assert all(has_threads(func) for _, func in rest.functions_items() if not is_tiled(func))


def test_norms_of_an_unknown_number_of_columns_are_blocks() -> None:
    """As no kernel has so many; upstream's rules schedule them."""
    columns = tirx.Var("n", "int64")
    x, *weights = (
        relax.Var(name, relax.TensorType(shape, "float16"))
        for name, shape in (("x", (4, columns)), ("w", (columns,)), ("b", (columns,)))
    )
    block = relax.BlockBuilder()
    with block.function("main", [x, *weights]):
        root = block.emit(relax.op.nn.rms_norm(x, weights[0], [-1], 1e-5))
        block.emit_func_output(block.emit(relax.op.nn.layer_norm(root, *weights, [-1])))
    mod = with_default_schedules(with_default_kernels(fuse(block.get(), GPU), GPU), GPU)
    functions = [func for _, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)]
    assert functions and all(has_threads(func) and not is_tiled(func) for func in functions)


SHARED = {
    ("prefill", 2): {"attention": {(1, 2, 1)}, "rms_norm": {75, 150}},  # batch, heads and heads of keys; rows
    ("decode 3", 2): {"decode_attention": {(3, 2, 1)}, "rms_norm": {2, 3}},
    ("prefill", 4): {"rms_norm": {38, 150}},  # two devices have one head of keys: attention is as blocks have it
}


@pytest.mark.parametrize(("name", "devices"), SHARED)
def test_who_computes_what_a_gpu_of_a_mesh_does(name: str, devices: int) -> None:
    exe = axe.compile(Small(name, "bfloat16").model, mesh=axe.Mesh({"tp": devices}), target=GPU, work_dir=None)
    found: dict[str, set[Any]] = {}
    for _, func in exe.module.functions_items():
        if isinstance(func, tirx.PrimFunc) and KERNEL in (func.attrs or {}):
            names = ("rows",) if "norm" in str(func.attrs[KERNEL]) else ("batch", "heads", "kv_heads")
            told = tuple(int(func.attrs[f"{KERNEL}.{each}"]) for each in names)
            found.setdefault(str(func.attrs[KERNEL]), set()).add(told if len(told) > 1 else told[0])
    assert found == SHARED[name, devices]


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", ["prefill", "decode 3"])
def test_what_gpus_of_a_mesh_do_is_right(name: str, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same kernels in code for CPUs."""
    monkeypatch.setattr(sharing, "with_attention", lambda model, target, in_blocks: with_kernels(model, GPU))
    small, mesh = Small(name, "float16"), axe.Mesh({"tp": devices})
    exe = axe.compile(small.model, mesh=mesh, work_dir=None)
    with axe.launch(mesh, engine="threads") as workers:
        found = exe.run(workers, *(each.detach().numpy() for each in small.arguments))
    off = error(tvm.runtime.tensor(found[0] if isinstance(found, tuple) else found), small.expected)
    assert off <= TOLERANCE["float16"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_on_a_gpu(name: str, dtype: str, cuda: None) -> None:
    """Each kernel beside its blocks on the CPU, on the same data; then the result."""
    small = Small(name, dtype)
    exe = axe.compile(small.model, target="cuda", work_dir=None)
    blocks = fuse(small.model, resolve_target("cuda"))
    faults: list[str] = []
    given: list[np.ndarray] = []

    def instrument(_func: Any, symbol: str, before: bool, _result: Any, *args: Any) -> int:
        func = next((f for v, f in blocks.functions_items() if v.name_hint == symbol), None)
        if isinstance(func, tirx.PrimFunc):
            arrays = [arg.copyto(tvm.cpu()) for arg in args]
            if before:
                given[:] = arrays
            else:
                own = tvm.IRModule({"main": func.without_attr("global_symbol").with_attr("global_symbol", "main")})
                tvm.compile(own, target="llvm")["main"](*given)
                off = max(error(got, torch.from_dlpack(expected)) for got, expected in zip(arrays, given))
                if not off <= TOLERANCE[dtype]:
                    faults.append(f"{symbol}: relative error {off:.1e}")
        return 0

    off, caches = run(exe.vm, small, tvm.cuda(), instrument)
    assert not faults
    assert off <= TOLERANCE[dtype]
    assert all(each <= TOLERANCE[dtype] for each in caches)
