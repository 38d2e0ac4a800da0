"""A Relax model on one device, its kernels as they were tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.defaults import WORK_DIR
from tvm_axe.machines import backend_of, builder, resolve_target
from tvm_axe.nests import Values
from tvm_axe.pipeline import APPLY_RECORDS, RANGES, SCHEDULES, TILE_KERNELS, Pass, Work, run
from tvm_axe.records.packing import has_packing
from tvm_axe.relax.bounded import without_large_bounds
from tvm_axe.relax.constants import with_constants_packed
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.packing import with_packers
from tvm_axe.relax.sizes import check_known
from tvm_axe.relax.solving import with_solved_sizes

__all__ = ["BUILD_MODEL", "compile_model", "lowered_model", "model_passes"]


def model_passes(pack_weights: bool = False) -> tuple[Pass, ...]:
    """The way of a model for one device: `tvm_axe.pipeline.PASSES` with what is a model's own.

    >>> for each in model_passes():
    ...     print(each)
    fuse           operators become kernels, each with the pointwise operators behind it
    apply records  functions that were tuned become as the best record says
    ranges         functions of unknown extents have a schedule for each range of their values
    schedules      functions that nobody scheduled take the schedule that suits the target
    pack weights   what packs weights is split off, and done at once where they are constants
    tile kernels   nests that chose a tile kernel become its programs, lowered for the target
    build          the model becomes a program of upstream's virtual machine

    Parameters
    ----------
    pack_weights : bool
        As `compile_model` takes it.
    """

    def fused(work: Work) -> Work:
        model = with_solved_sizes(work.module)
        check_known(model)
        return replace(work, module=fuse(model, work.target, pack_weights))

    def packed(work: Work) -> Work:
        before = [work.module, *([] if work.scheduled is None else [work.scheduled])]
        # Its functions are others then.
        return replace(work, module=_packed(before, pack_weights, work.target), scheduled=None)

    return (
        Pass("fuse", "operators become kernels, each with the pointwise operators behind it", fused),
        APPLY_RECORDS,
        RANGES,
        SCHEDULES,
        Pass("pack weights", "what packs weights is split off, and done at once where they are constants", packed),
        TILE_KERNELS,
        BUILD_MODEL,
    )


def _packed(modules: Sequence[IRModule], pack_weights: bool, target: Target) -> IRModule:
    """The first of modules with the same constants, which are on their way here alone, packed."""
    model = modules[0].clone() if pack_weights else modules[0]  # whose functions are asked for once more
    split = with_constants_packed(_split(modules[0]), target, modules)
    if pack_weights:
        split = with_packers(relax.transform.LiftTransformParams()(split), model)
    return relax.transform.FoldConstant()(split)


def _split(model: IRModule) -> IRModule:
    """The model with functions of their own for what packs weights.

    Upstream's pass fails at functions that aren't made of blocks in the usual way, such as calls of a library or
    lowered tile programs; while it runs, those that pack nothing are others that do nothing.
    """
    kernels = {v: func for v, func in model.functions_items() if isinstance(func, tirx.PrimFunc)}
    others = {v: func for v, func in kernels.items() if not has_packing(func)}
    if len(others) == len(kernels):
        return model
    model = model.clone()
    for variable, func in others.items():
        model[variable] = tirx.PrimFunc(func.params, _nothing(), func.ret_type).with_attrs(dict(func.attrs.items()))
    model = relax.transform.SplitLayoutRewritePreproc()(model).clone()
    for variable, func in others.items():
        model[str(variable.name_hint)] = func
    return model


def _nothing() -> tirx.Stmt:
    inner = s_tir.SBlock([], [], [], "nothing", tirx.Evaluate(0))
    return s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", s_tir.SBlockRealize([], True, inner)))


def _lowering(target: Target) -> tvm.transform.Pass:
    # Upstream's whole pipeline would take the scheduled kernels for operators that it may fuse again.
    @tvm.transform.module_pass(opt_level=0, name="bounds")
    def bounds(model: IRModule, _context: tvm.transform.PassContext) -> IRModule:
        return without_large_bounds(model)

    return tvm.transform.Sequential([bounds, *_tvm.relax_lowering(target, backend_of(target).device)])


def _build_model(work: Work) -> Work:
    lowering = _lowering(work.target)
    return replace(work, built=builder.build_program(work.module, work.target, lowering, work.store))


BUILD_MODEL = Pass("build", "the model becomes a program of upstream's virtual machine", _build_model)


def lowered_model(
    model: IRModule, target: Target, work_dir: str | Path | None, pack_weights: bool, values: Values | None = None
) -> IRModule:
    """A model with its kernels compiled, its functions lowered for upstream's virtual machine: the pipeline ``"axe"``.

    Parameters
    ----------
    model
        The model; it isn't changed.
    target
        Resolved.
    work_dir, pack_weights, values
        As `compile_model` takes them.
    """
    work = run(Work(model, target, work_dir=work_dir, values=values), model_passes(pack_weights)[:-1])
    with target:
        lowered = _lowering(target)(builder.with_a_kernel(work.module))
    return _tvm.with_kernels_built(lowered, lambda kernels: builder.build_kernels(kernels, target))


def compile_model(
    model: tvm.IRModule,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = WORK_DIR,
    pack_weights: bool = False,
    values: Values | None = None,
) -> relax.VMExecutable:
    """Compile a Relax model for one device; `tvm_axe.compile` gives what this returns as ``.vm``. ::

        tvm_axe.tune(model, target=target)
        vm = tvm.relax.VirtualMachine(tvm_axe.compile(model, target=target).vm, tvm.cpu())
        vm["main"](x, *weights)

    Its operators become the kernels that `tvm_axe.tune` made of them: a matmul with the pointwise operators behind it
    is one, and reads weights that a layer transposes as they lie. Weights that are constants of the model
    (`relax.transform.BindParams`) are packed for the kernels while it is compiled. ::

        vm = tvm.relax.VirtualMachine(tvm_axe.compile(model, target=target, pack_weights=True).vm, tvm.cpu())
        packed = vm["main_transform_params"](weights)     # once
        vm["main"](x, *packed)

    Parameters
    ----------
    model
        The model; it isn't changed.
    target
        As `tvm_axe.tune` was given it.
    work_dir
        Where tuning results lie; a kernel with a record there is compiled as it was tuned. None leaves all untuned.
    pack_weights
        Whether weights that are parameters, those behind the first ``num_input``, are packed too, on a CPU: each
        function of the model then takes what a function beside it, with ``_transform_params`` behind its name, makes of
        their list. Kernels that pack are found if `tvm_axe.tune` was told the same.
    values
        Representatives of extents that aren't known until a function is called, as `tvm_axe.tune` takes them: a kernel
        has a variant for the values up to each of them.

    Raises
    ------
    TuneError
        If `target` is none, or weights cannot be packed (`tvm_axe.relax.fuse`).
    LowerError
        If a tile kernel that a record chose can't be compiled.
    """
    work = Work(model, resolve_target(target), work_dir=work_dir, values=values)
    built = run(work, model_passes(pack_weights)).built
    assert isinstance(built, relax.VMExecutable)
    return built
