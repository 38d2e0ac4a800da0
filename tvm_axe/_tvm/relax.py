"""Relax: the passes of upstream's pipelines."""

from __future__ import annotations

from tvm import ir, relax, tirx
from tvm.relax.backend.cpu_generic import pipeline as _cpu_pipeline
from tvm.relax.backend.cuda import pipeline as _cuda_pipeline
from tvm.target import Target


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
    return parts["split_weight_prepack"], parts["split_prepacked"]


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
    return [*pipeline.dataflow_lower_passes(target), *pipeline.finalize_passes(target)]
