"""Models without records on a GPU: nothing of them is left to the host. Needs the extra `models`."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_axe as axe
from tvm_axe.analysis.tree import has_threads
from tvm_axe.machines import resolve_target
from tvm_axe.machines.threads import with_threads
from tvm_axe.pipeline import Work, run
from tvm_axe.relax import torch_converters
from tvm_axe.relax.alone import model_passes

torch = pytest.importorskip("torch", reason="torch is in the extra `models`")
models, checked = (
    pytest.importorskip(name, reason="torch is in the extra `models`") for name in ("models_torch", "check_models")
)


def imported(name: str, dtype: str = "float32", layers: int | None = None) -> tuple[tvm.IRModule, object, tuple]:
    """A model in Relax, as a torch module, and its inputs."""
    from tvm.relax.frontend.torch import from_exported_program

    module, inputs = models.made(name, layers)
    kind = getattr(torch, dtype)
    module, inputs = module.to(kind), tuple(x.to(kind) if x.is_floating_point() else x for x in inputs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(module, inputs)
        return from_exported_program(program, custom_convert_map=torch_converters()), module, inputs


@pytest.mark.parametrize("name", ["minilm", "resnet18", "llama prefill", "llama decode", "moe prefill"])
def test_every_function_runs_on_the_gpu(name):
    mod, _, _ = imported(name)
    work = run(Work(mod, resolve_target("cuda:sm_90a"), work_dir=None), model_passes()[:-1])
    kernels = {v: func for v, func in with_threads(work.module).functions_items() if isinstance(func, tirx.PrimFunc)}
    of_tiles = {str(v.name_hint) for v, func in kernels.items() if "s_tir" not in (func.attrs or {})}
    on_host = {str(v.name_hint) for v, func in kernels.items() if not has_threads(func)} - of_tiles
    assert not on_host
    products = {str(v.name_hint) for v in kernels if "matmul" in str(v.name_hint)}
    if "decode" not in name and "moe" not in name:
        assert products <= of_tiles


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["minilm", "llama prefill", "llama decode"])
def test_results_are_torchs(name, cuda):
    mod, module, inputs = imported(name)
    exe = axe.compile(mod, target=resolve_target("cuda"), work_dir=None)
    vm = relax.VirtualMachine(exe.vm, tvm.cuda())
    got = vm["main"](*(tvm.runtime.tensor(each.numpy(), tvm.cuda()) for each in inputs))
    with torch.no_grad():
        want = module(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    for one, other in zip(got, want):
        error = np.abs(one.numpy().astype("float64") - other.numpy()).max()
        assert error < 2e-3 * float(other.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("float16", 5e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("name", ["minilm", "vit", "whisper", "resnet18", "llama prefill", "llama decode"])
def test_results_in_types_of_half_the_width_are_torchs(name, dtype, bound, cuda):
    mod, module, inputs = imported(name, dtype, layers=1)
    vm = relax.VirtualMachine(axe.compile(mod, target=resolve_target("cuda"), work_dir=None).vm, tvm.cuda())
    got = vm["main"](*(tvm.runtime.tensor(checked.as_array(each), tvm.cuda()) for each in inputs))
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    assert checked.error([each.numpy() for each in got], checked.called(copy.deepcopy(module).double(), wide)) < bound
