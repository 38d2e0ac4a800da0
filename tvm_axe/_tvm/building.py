"""Building: pipelines with more passes, CUDA modules of our own cubins, nvrtc."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, relax, runtime, tirx
from tvm.ir import IRModule
from tvm.relax import _ffi_api as _relax
from tvm.relax.vm_build import _filter_tir, _vmcodegen
from tvm.support import nvcc as _nvcc
from tvm.target import Target
from tvm.tirx import TensorMapType
from tvm.tirx.build import codegen_build, split_host_device_mods

from tvm_axe._tvm.simplifying import in_bits, kept_values, unequal
from tvm_axe._tvm.structural import body_pass, structural_map

_CREATE_CUDA = "ffi.Module.create.cuda"  # (code, its format, functions, sources) -> module; only where a driver is
_OVERLAP = "tirx.use_programtic_dependent_launch"  # the runtime's spelling


def register_pipeline(name: str, base: str, first_pass: ir.transform.Pass, host_pass: ir.transform.Pass) -> None:
    """Make a pipeline for ``tvm.compile(..., tir_pipeline=name)``: upstream's `base`, with two passes more.

    All functions pass through the one before anything else. Host functions pass through the other when intrinsics have
    become LLVM's; those that it brings in are lowered after it. The names that lowering gives to remainders are left
    out before: upstream fails where one such name is in two places, whose values it simplifies to different ones, when
    it lowers again and when it makes LLVM's code. And what is loaded in the second part of an `and` or an `or` is
    loaded only if the first asks for it: upstream makes one `and` of a choice in a choice, whose LLVM code evaluates
    both parts. A NaN is equal to nothing, and unequal to all (IEEE 754, 5.11), itself too.
    """

    def pipeline() -> tuple[Any, Any, Any]:
        lower, finish_host, finish_device = tirx.get_tir_pipeline(base)
        lowered = ir.transform.Sequential([first_pass, prepared(), lower])
        return lowered, lambda: ir.transform.Sequential([finish_host(), _and_lowered(host_pass)]), finish_device

    tirx.register_tir_pipeline(name, pipeline)


def _and_lowered(host_pass: ir.transform.Pass) -> ir.transform.Pass:
    """A pass, and the lowering of intrinsics in those functions that it changes."""

    def run(mod: IRModule, _context: ir.transform.PassContext) -> IRModule:
        named = mod.functions.items()
        mod = IRModule(
            {var: func.with_body(structural_map(func.body, _REWRITTEN)) for var, func in named},
            attrs=mod.attrs,
        )
        done = host_pass(mod)
        changed = {var: func for var, func in done.functions.items() if not func.body.same_as(mod[var].body)}
        if changed:
            done.update(tirx.transform.LowerIntrin()(IRModule(changed)))
        return done

    return ir.transform.module_pass(run, opt_level=0, name="AndLowered")


def prepared() -> ir.transform.Pass:
    """What all functions pass through before they are lowered, whatever they are lowered for."""
    return ir.transform.Sequential([without_names(), kept_values(), in_bits()])


def without_names() -> ir.transform.Pass:
    """A pass that leaves out names of values within expressions (`tirx.Let`), as they come.

    Upstream's elimination of common subexpressions doesn't count what is in such an expression, but replaces it there,
    too: by a variable that it defines where it has counted the first, which may be later. Then it fails.
    """
    return body_pass("WithoutNames", lambda body: structural_map(body, (tirx.Let, _without_name)))


def _without_name(let: tirx.Let) -> tirx.Expr:
    calls: list[ir.Call] = []
    tvm_ffi.structural_walk(let.value, (ir.Call, calls.append))
    if not all(_only_reads(call) for call in calls):
        return let
    return structural_map(let.body, (tirx.Var, lambda var: let.value if var.same_as(let.var) else var))


def _in_order(both: tirx.And | tirx.Or) -> tirx.Expr:
    loads: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(both.b, (ir.TensorLoad, loads.append))
    if not loads or str(both.ty) != "bool":
        return both
    if isinstance(both, tirx.And):
        return tirx.if_then_else(both.a, both.b, tirx.const(False, "bool"))
    return tirx.if_then_else(both.a, tirx.const(True, "bool"), both.b)


_REWRITTEN = ((tirx.Let, _without_name), (tirx.And, _in_order), (tirx.Or, _in_order), (tirx.NE, unequal))


def _only_reads(call: ir.Call) -> bool:
    effect = call.op.get_attr("TCallEffectKind") if isinstance(call.op, ir.Op) else None
    return effect is not None and int(effect) <= int(tirx.CallEffectKind.ReadState.value)


_COMPILE = "tvm_callback_cuda_compile"  # what upstream's code generator calls with CUDA source, where a driver is
_generating = threading.Lock()


def _generated(device: IRModule, target: Target) -> runtime.Module:
    """The device's module, of nothing but source; upstream would compile it too, which takes as long as ours."""
    here = threading.get_ident()
    with _generating:
        own = tvm_ffi.get_global_func(_COMPILE)
        tvm_ffi.register_global_func(
            _COMPILE, lambda code: b"" if threading.get_ident() == here else own(code), override=True
        )
        try:
            return codegen_build(device, target)
        finally:
            tvm_ffi.register_global_func(_COMPILE, own, override=True)


def build_cuda(
    mod: IRModule,
    target: Target,
    to_cubin: Callable[[str], bytes],
    overlap: bool = False,
    pipeline: str = "tirx",
    aligned: str = "",
    finished: Callable[[IRModule], tuple[IRModule, str]] = lambda device: (device, ""),
) -> tuple[runtime.Module, str]:
    """Build a module of CUDA functions by one of upstream's pipelines; returns what can be run, and the CUDA source.

    The steps are those of `tvm.tirx.build`, but for the device's module, which is made of what `to_cubin` compiles. On
    a machine without a CUDA driver the result's functions can't be called. With `overlap` a kernel is launched while
    the one before it still runs; each must wait for that one (``griddepcontrol.wait``) before it touches global memory.
    An attribute of a function that is `aligned`, a point and the name of a parameter says of how many bytes a tensor's
    address must be a multiple; another one is refused when the function is called. What `finished` makes of the
    device's lowered functions is compiled, behind the source that it gives.
    """
    lower, finish_host, finish_device = tirx.get_tir_pipeline(pipeline)
    host_target = Target("llvm") if target.host is None else target.host
    mod = tirx.transform.BindTarget(target.with_host(host_target))(prepared()(mod))
    host, devices = split_host_device_mods(lower(mod))
    host = IRModule(
        {var: _with_alignment(func, aligned) for var, func in host.functions_items()},
        attrs=host.attrs,
        global_infos=host.global_infos,
    )
    if not devices:
        return codegen_build(finish_host()(host), host_target), ""
    ((device_target, device),) = devices.items()
    device, defined = finished(finish_device()(device))
    generated = _generated(device, device_target)
    source = defined + str(generated.inspect_source())
    cubin = to_cubin(source)
    create = tvm_ffi.get_global_func(_CREATE_CUDA, allow_missing=True)
    if create is not None:
        tags = [_OVERLAP] if overlap else []
        infos = [_function_info(func, tags) for func in device.functions.values()]
        generated = create(cubin, "cubin", {info.name: info for info in infos}, {"cuda": source})
    built = codegen_build(finish_host()(host), host_target)
    built.import_module(generated)
    return built, source


_FIELD = "tirx.tvm_struct_get"
_BYTE_OFFSET, _NUMBER = 8, 17  # upstream's numbers of a tensor's field, and of a 64-bit number at an address


def _with_alignment(func: ir.BaseFunc, aligned: str) -> ir.BaseFunc:
    """The host's function with checks of tensors' addresses, beside those that upstream makes of their offsets."""
    names = {
        str(key).removeprefix(f"{aligned}."): int(value)
        for key, value in dict(func.attrs or {}).items()
        if str(key).startswith(f"{aligned}.")
    }
    if not names:
        return func

    def on_assert(made: tirx.AssertStmt) -> tirx.Stmt:
        field = made.condition.b if isinstance(made.condition, tirx.EQ) else None
        if not isinstance(field, ir.Call) or not isinstance(field.op, ir.Op) or field.op.name != _FIELD:
            return made
        if int(field.args[2]) != _BYTE_OFFSET:
            return made
        _, name, *where, _ = made.message_parts
        name = str(name.value).removesuffix(".byte_offset")
        if name not in names:
            return made
        # A tensor begins with the address of its elements.
        address = tirx.call_intrin("int64", _FIELD, field.args[0], 0, _NUMBER)
        fits = tirx.EQ(tirx.floormod(address, tirx.const(names[name], "int64")), tirx.const(0, "int64"))
        wanted = ir.StringImm(f"an address that is a multiple of {names[name]} bytes; copy it")
        said = [ir.StringImm("Misaligned "), ir.StringImm(name), *where, wanted]
        # In this order upstream's constructor takes them, whatever it calls them.
        return tirx.SeqStmt([made, tirx.AssertStmt(fits, made.error_kind, said)])

    return func.with_body(structural_map(func.body, (tirx.AssertStmt, on_assert)))


def _function_info(func: tirx.PrimFunc, tags: Sequence[str]) -> Any:
    """What the runtime has to know of a kernel to launch it, with launch parameters beside those of the compiler.

    Upstream makes it in its code generator, and has no constructor of it in Python.
    """
    nodes: list[dict[str, Any]] = []

    def add(type: str, data: Any) -> int:
        nodes.append({"type": type, "data": data})
        return len(nodes) - 1

    def array(type: str, items: Sequence[Any]) -> int:
        return add("ffi.Array", [add(type, item) for item in items])

    kinds = [param.ty for param in func.params]
    pointers = [isinstance(kind, ir.PointerType) for kind in kinds]
    types = ["handle" if pointer else str(kind) for kind, pointer in zip(kinds, pointers)]
    maps = [pointer and isinstance(kind.element_type, TensorMapType) for kind, pointer in zip(kinds, pointers)]
    launch = [*tags, *(str(tag) for tag in func.attrs["tirx.kernel_launch_params"])]
    data = {
        "name": add("ffi.String", str(func.attrs["global_symbol"])),
        "arg_types": array("DataType", types),
        "launch_param_tags": array("ffi.String", launch),
        "arg_extra_tags": array("int", [int(is_map) for is_map in maps]),
    }
    root = add("runtime.FunctionInfo", data)
    return ir.load_json(json.dumps({"root_index": root, "nodes": nodes, "metadata": {}}))


def build_relax(
    mod: IRModule,
    target: Target,
    pipeline: ir.transform.Pass | str,
    build: Callable[[IRModule], runtime.Module],
) -> relax.VMExecutable:
    """Build a Relax program whose functions of TensorIR are compiled by `build`, for ``relax.VirtualMachine``.

    The steps are those of `tvm.relax.build`, but for these functions.
    """
    with target:
        mod = (relax.get_pipeline(pipeline) if isinstance(pipeline, str) else pipeline)(mod)
    attributes = mod.attrs or {}
    params, libraries = dict(attributes.get("const_name_to_constant", {})), list(attributes.get("external_mods", []))
    executable = relax.ExecBuilder()
    functions = _filter_tir(_vmcodegen(executable, mod, "bytecode"))
    return relax.VMExecutable(_relax.VMLink(executable, target, build(functions), libraries, params))


def nvrtc_version() -> str | None:
    """The version of nvrtc, or None where its library or its bindings aren't installed."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError):  # the bindings raise the latter where the library is missing
        return None
    return f"{major}.{minor}"


def nvrtc_cubin(source: str, arch: str) -> bytes:
    """CUDA source compiled by nvrtc, with upstream's flags."""
    return bytes(_nvcc.compile_cuda(source, target_format="cubin", arch=arch, compiler="nvrtc"))
