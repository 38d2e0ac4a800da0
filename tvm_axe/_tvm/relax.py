"""Relax: the passes of upstream's pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import tvm_ffi
from tvm import ir, relax, runtime, s_tir, tirx
from tvm.ir import IRModule
from tvm.relax.backend.cpu_generic import pipeline as _cpu_pipeline
from tvm.relax.backend.cuda import pipeline as _cuda_pipeline
from tvm.target import Target

from tvm_axe._tvm.structural import structural_map

PREPACK = "_weight_prepack"
"""What upstream's `SplitLayoutRewritePreproc` writes behind the name of a function for the one that packs for it."""


def split_preproc(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, tirx.PrimFunc]:
    """The blocks of a function that upstream's `SplitLayoutRewritePreproc` splits off, and the function without them.

    The pass acts on functions that Relax calls, so one is made that calls this; it takes every parameter there for an
    argument, as an output need not be the last.
    """
    params = [
        relax.Var(f"p{n}", relax.TensorType(param.ty.shape, param.ty.dtype)) for n, param in enumerate(func.params)
    ]
    builder = relax.BlockBuilder()
    callee = builder.add_func(func.with_attr("global_symbol", "main"), "split")
    with builder.function("caller", params):
        builder.emit_func_output(builder.emit(relax.call_tir(callee, params, out_ty=params[-1].ty)))
    parts = relax.transform.SplitLayoutRewritePreproc()(builder.get())
    return parts[f"split{PREPACK}"], parts["split_prepacked"]


def with_attributes(call: relax.Call, **changed: object) -> relax.Call:
    """A call of an operator with some attributes changed; upstream builds them from all of their fields."""
    info = type(call.attrs).__tvm_ffi_type_info__
    kept = {field.name: getattr(call.attrs, field.name) for field in info.fields}
    return relax.Call(call.op, call.args, ir.make_node(info.type_key, **{**kept, **changed}))


_PIPELINES = {"cpu": _cpu_pipeline, "cuda": _cuda_pipeline}


def relax_dispatching(target: Target, device: str) -> list[ir.transform.Pass]:
    """The passes of upstream's pipeline for a device that give sorting, scans and sampling to what computes them."""
    if device == "cpu":
        return list(_cpu_pipeline.library_dispatch_passes(target))
    return [relax.backend.DispatchSampling(), relax.backend.DispatchSortScan()]


def relax_lowering(target: Target, device: str) -> list[ir.transform.Pass]:
    """The passes of upstream's pipeline for a device that come after operators have become kernels.

    Only the pipelines' modules export them.
    """
    pipeline = _PIPELINES[device]
    first = [
        _on_blocks(each) if each.info.name == "RewriteDataflowReshape" else each
        for each in pipeline.dataflow_lower_passes(target)
    ]
    return [*first, *pipeline.finalize_passes(target)]


def _on_blocks(asking: ir.transform.Pass) -> ir.transform.Pass:
    """A pass that asks of functions of one input what their blocks are, and fails where these are a kernel's code."""

    def run(mod: IRModule, _context: ir.transform.PassContext) -> IRModule:
        others = {
            var: func
            for var, func in mod.functions_items()
            if isinstance(func, tirx.PrimFunc) and not isinstance(func.body, s_tir.SBlockRealize)
        }
        if not others:
            return asking(mod)
        nothing = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", tirx.Evaluate(0)))
        hidden = mod.clone()
        hidden.update(IRModule({var: func.with_body(nothing) for var, func in others.items()}))
        done = asking(hidden)
        done.update(IRModule(others))
        return done

    return ir.transform.module_pass(run, opt_level=0, name=asking.info.name)


def without_layouts_of_unknown_extents(mod: IRModule) -> IRModule:
    """The module with no layout of a parameter that says no more than its extents, where these aren't known.

    Upstream's copies of a function, as `AttachAttrLayoutFreeBuffers` makes them, have extents of their own, but such a
    layout keeps the old ones, and no code can be made of it. Scans are written with them.
    """
    found = mod.clone()
    for variable, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            plain = {param: other for param in func.params if (other := _without_layout(param)) is not None}
            if plain:
                body = structural_map(func.body, (tirx.Var, lambda var, plain=plain: plain.get(var, var)))
                params = [plain.get(param, param) for param in func.params]
                found[variable] = tirx.PrimFunc(params, body, func.ret_type, func.attrs)
    return found


def _without_layout(param: tirx.Var) -> tirx.Var | None:
    layout, shape = getattr(param.ty, "layout", None), getattr(param.ty, "shape", ())
    if layout is None or all(isinstance(extent, tirx.IntImm) for extent in shape):
        return None
    default = tirx.decl_buffer(shape, str(param.ty.dtype), param.name)
    if not tvm_ffi.structural_equal(default.ty, param.ty, map_free_vars=False):
        return None
    return tirx.decl_buffer(shape, str(param.ty.dtype), param.name, layout=None)


def is_building() -> bool:
    """Whether ``tvm.compile`` of a Relax module is what calls, however far above, as it calls a pipeline's passes."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not relax.build.__code__:
        frame = frame.f_back
    return frame is not None


def with_kernels_built(mod: IRModule, build: Callable[[IRModule], runtime.Module]) -> IRModule:
    """A lowered Relax module whose functions of TensorIR `build` has compiled: ``tvm.compile`` links what it gets.

    They are called by their names in a module beside it, of the attribute ``external_mods``.
    """
    kernels = {var: func for var, func in mod.functions_items() if isinstance(func, tirx.PrimFunc)}
    names = {var: str((func.attrs or {}).get("global_symbol", var.name_hint)) for var, func in kernels.items()}

    def by_name(call: relax.Call) -> relax.Expr:
        if not isinstance(call.op, ir.GlobalVar) or call.op not in names:
            return call
        return relax.Call(relax.ExternFunc(names[call.op]), call.args, call.attrs, call.ty_args)

    functions = {
        var: structural_map(func, (relax.Call, by_name)) for var, func in mod.functions_items() if var not in kernels
    }
    built = build(IRModule({var: func.with_attr("global_symbol", names[var]) for var, func in kernels.items()}))
    attrs = dict(mod.attrs.items()) if mod.attrs else {}
    attrs["external_mods"] = [*attrs.get("external_mods", []), built]
    return IRModule(functions, attrs=attrs, global_infos=mod.global_infos)
