"""Building for AMD's GPUs by upstream's LLVM code generator, on machines with and without ROCm.

Upstream's TIRx pipeline knows blocks and threads of CUDA's targets alone, though what it makes of them is what every
GPU's code generator takes. So they are made for CUDA's, and all that follows for AMD's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import runtime, tirx
from tvm.ir import IRModule
from tvm.support import rocm as _rocm
from tvm.target import Target, codegen
from tvm.tirx.build import codegen_build, split_host_device_mods

from tvm_axe._tvm.building import prepared
from tvm_axe._tvm.simplifying import unequal
from tvm_axe._tvm.structural import body_pass, structural_map

_LINK, _LIBRARY = "tvm_callback_rocm_link", "tvm_callback_rocm_bitcode_path"  # what upstream's code generator calls
_generating = threading.Lock()


def build_rocm(
    mod: IRModule, target: Target, pipeline: str, finished: Callable[[IRModule], IRModule]
) -> tuple[runtime.Module, str]:
    """Build a module of functions for an AMD GPU; returns it, and the device's assembly.

    Parameters
    ----------
    mod : IRModule
        Functions with the attribute ``global_symbol``.
    target : Target
        Of the kind ``rocm``, with ``mcpu``.
    pipeline : str
        Upstream's, ``"tirx"`` or ``"s_tir"``.
    finished : callable
        What becomes of the device's functions before LLVM's code is made of them, when intrinsics are lowered.

    Notes
    -----
    Without ``ld.lld`` the device's code is an object that is not linked, which no runtime loads. Upstream's wheel has
    no runtime for these GPUs either.
    """
    lower, finish_host, finish_device = tirx.get_tir_pipeline(pipeline)
    mod = prepared()(mod)
    host_target = Target("llvm") if target.host is None else target.host
    if pipeline == "tirx":
        stand_in = Target({"kind": "cuda", "arch": "sm_80"}).with_host(host_target)
        mod = tirx.transform.LowerTIRx()(tirx.transform.BindTarget(stand_in)(mod))
        mod = IRModule({var: func.without_attr("target") for var, func in mod.functions_items()}, attrs=mod.attrs)
    host, devices = split_host_device_mods(lower(tirx.transform.BindTarget(target.with_host(host_target))(mod)))
    built = codegen_build(finish_host()(host), host_target)
    if not devices:
        return built, ""
    ((device_target, device),) = devices.items()
    device = body_pass("Unequal", lambda body: structural_map(body, (tirx.NE, unequal)))(finish_device()(device))
    generated = _generated(finished(device), device_target)
    built.import_module(generated)
    return built, str(generated.inspect_source("asm"))


def intrinsic_name(number: int) -> str:
    """LLVM's name of one of its intrinsics, such as ``"llvm.exp2"``."""
    return str(codegen.llvm_get_intrinsic_name(number))


def _generated(device: IRModule, target: Target) -> runtime.Module:
    """The device's module, linked where there is a linker; without AMD's device library."""
    here = threading.get_ident()
    own = {name: tvm_ffi.get_global_func(name) for name in (_LINK, _LIBRARY)}
    linker = bool(_rocm.find_lld(required=False))
    ours: dict[str, Callable[..., Any]] = {
        _LINK: lambda code: own[_LINK](code) if linker or threading.get_ident() != here else code,
        _LIBRARY: lambda: own[_LIBRARY]() if threading.get_ident() != here else runtime.convert([]),
    }
    with _generating:
        try:
            for name, function in ours.items():
                tvm_ffi.register_global_func(name, function, override=True)
            return codegen_build(device, target)
        finally:
            for name, function in own.items():
                tvm_ffi.register_global_func(name, function, override=True)
