"""axe.compile: from a function, a schedule or a Relax model to something that runs, on one device or on a mesh."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.relax.frontend import nn
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe.analysis.sharing import bound_axis
from tvm_axe.analysis.tree import why_unschedulable
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import LowerError
from tvm_axe.executable import Executable
from tvm_axe.executable.alone import FunctionExecutable, ModelExecutable
from tvm_axe.executable.kept import get_or_compile, name_of
from tvm_axe.executable.mesh import MeshExecutable
from tvm_axe.executable.model import MeshModelExecutable, Told
from tvm_axe.executable.signatures import signatures
from tvm_axe.layout import Mesh
from tvm_axe.lower import Lowered
from tvm_axe.machines import backend_of
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.keeping import store
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.nests import Values
from tvm_axe.pipeline import DEVICE_PASSES, PASSES, Work, run
from tvm_axe.records.packing import LAYOUT_FREE
from tvm_axe.relax.alone import model_passes
from tvm_axe.relax.device import DeviceModule
from tvm_axe.relax.fuse import check_packing, is_model
from tvm_axe.relax.packing import attached
from tvm_axe.relax.prepacked import with_free_weights, with_made_once, with_packs
from tvm_axe.relax.sharing import Pin, share_for
from tvm_axe.relax.workspace import with_workspaces
from tvm_axe.schedule import Schedule

_LOG = logging.getLogger("tvm_axe")


def compile(
    program: Schedule | tirx.PrimFunc | IRModule | Lowered,
    mesh: Mesh | Mapping[str, int] | None = None,
    target: str | dict[str, Any] | Target = "llvm",
    work_dir: str | Path | None = WORK_DIR,
    *,
    pack_weights: bool = False,
    values: Values | None = None,
    redistribute: Literal["insert", "refuse"] = "insert",
    axis: str | None = None,
    memory: float | None = None,
    pins: Mapping[str, Pin] | None = None,
    keep: bool = True,
) -> Executable:
    """Compile a program for a mesh, or for one device.

    It goes through the passes that `tvm_axe.pipeline.PASSES` lists, a model for one device through
    `tvm_axe.relax.alone.model_passes`.

    Parameters
    ----------
    program : Schedule | PrimFunc | IRModule | Lowered
        A schedule; a function over whole tensors, scheduled or not; a module that holds one such function; a Relax
        model, which `tvm_axe.relax.share_model` shares over a mesh; or what `tvm_axe.lower.lower` made of a function,
        if that is there already.
    mesh : Mesh or mapping, optional
        The devices, such as ``{"tp": 2}``; taken from the schedule, or from what was lowered, where one is given.
        Without a mesh a function or a model is compiled for one device.
    target : str | dict | Target
        What to compile each device's kernels for; a plain ``"llvm"`` means this machine's CPU, its cores shared by the
        devices.
    work_dir : path, optional
        Where tuning results lie; a kernel with a record there is compiled as it was tuned. None leaves all untuned.
    pack_weights : bool
        Whether the weights of a Relax model, its parameters behind the first ``num_input``, are packed for the
        kernels when a session loads them: see `tvm_axe.relax.compile_model`. Functions are then called in sessions.
    values : mapping, optional
        Of a Relax model: representatives of its unknown extents, as `tvm_axe.tune` takes them.
    redistribute : "insert" or "refuse"
        On a mesh, what becomes of a stage that touches, outside a collective, what its device doesn't own: copies
        between the stages that move it there (`tvm_axe.lower.inserting`), which a line of the log ``tvm_axe`` says with
        their bytes, and ``exe.show()`` lists; or an error that names the stage, for who schedules every byte by hand.
        Into a `Lowered` nothing is inserted any more; ``"refuse"`` refuses one into which copies were.
    axis, memory, pins
        Of a Relax model on a mesh: the mesh axis along which it is shared, what a device may hold of its weights, and
        parameters that are to be shared in a way of one's own; see `tvm_axe.relax.share_model`.
    keep : bool
        Whether what is compiled is kept on disk, and taken from there if the same was compiled before
        (`tvm_axe.executable.kept`, `tvm_axe.machines.keeping`). ``TVM_AXE_KEEP=0`` does the same as False everywhere.

    Returns
    -------
    exe : Executable
        On a mesh, workers run it: ``exe.run(workers, *arrays)``. On one device it runs in this process:
        ``exe(*arrays)``; of a model, ``exe.vm`` is upstream's executable.

    Raises
    ------
    LowerError
        If `program` cannot be lowered: see `tvm_axe.lower.lower` and, for a Relax model, `tvm_axe.relax.share_model`;
        if its loops are bound to mesh axes and there is no mesh; if a tile kernel that was chosen can't be compiled; or
        if `redistribute` is ``"refuse"`` and `program` a `Lowered` with copies.
    LayoutError
        If a declared layout doesn't fit.
    InputError
        If a function for one device takes what is no array of constant shape.
    TuneError
        If `target` is none, or weights can't be packed.
    """
    if redistribute not in ("refuse", "insert"):
        raise LowerError(f'compile: redistribute is {redistribute!r}; valid are "insert" and "refuse"')
    devices = None if mesh is None else Mesh.of(mesh)
    shares = devices is not None and isinstance(program, IRModule) and is_model(program)
    if not shares and any(given is not None for given in (axis, memory, pins)):
        raise LowerError("compile: axis, memory and pins are for a Relax model on a mesh; leave them out")
    if isinstance(program, Schedule | Lowered):
        if devices is not None and devices != program.mesh:
            kind = "schedule" if isinstance(program, Schedule) else "program"
            raise LowerError(f"compile: the {kind} is for the mesh {program.mesh}, not {devices}; leave mesh out")
        devices = program.mesh
    resolved = resolve_target(target, threads=None if devices is None else cores_per_device(devices))
    place, insert = store() if keep else None, redistribute == "insert"
    if devices is None and isinstance(program, IRModule) and is_model(program):
        given = [program]
        del program  # which is let go of on the way, if the caller doesn't have it either
        return _model_here(given, resolved, work_dir, pack_weights, values, place)

    def shared(meets: bool | None) -> MeshModelExecutable:
        assert isinstance(program, IRModule) and devices is not None
        share = functools.partial(share_for, program, devices, resolved, axis, memory, pins, values, meets)
        return _model_on_mesh(program, share, resolved, work_dir, values, pack_weights)

    def made() -> Executable:
        if shares:
            return shared(None)
        return _compiled(program, devices, resolved, work_dir, pack_weights, values, insert, place)

    name = None
    if place is not None and not isinstance(program, Lowered):
        asked = {"axis": axis, "insert": insert, "memory": memory, "pack": pack_weights, "pins": pins, "values": values}
        name = name_of(program, devices, resolved, work_dir, asked)
    exe = made() if place is None or name is None else get_or_compile(place, name, program, made)
    exe.kept = place is not None
    if isinstance(exe, MeshModelExecutable):
        exe.apart = functools.partial(shared, False)
        _LOG.warning("%s", exe.told.lines[0])
    elif isinstance(exe, MeshExecutable) and not isinstance(program, Lowered):
        exe.begun = _begun(_function(program, devices), devices, resolved, work_dir, insert)
        if insert and exe.lowered.inserted:
            _LOG.warning("%s: redistributed, %s", exe.name, "; ".join(exe.lowered.inserted))
    if isinstance(program, Schedule):
        exe.source = program.copy()  # as it is now
    elif not isinstance(program, Lowered) and not isinstance(exe, ModelExecutable | MeshModelExecutable):
        exe.source = _function(program)
    return exe


def _compiled(
    program: Schedule | tirx.PrimFunc | IRModule | Lowered,
    mesh: Mesh | None,
    target: Target,
    work_dir: str | Path | None,
    pack_weights: bool,
    values: Values | None,
    insert: bool,
    place: Cache | None,
) -> Executable:
    if values is not None:
        raise LowerError("compile: values are for a Relax model, whose extents may be unknown; leave them out")
    if pack_weights:
        raise LowerError("compile: pack_weights is for a Relax model; leave it out")
    if mesh is None:
        assert not isinstance(program, Lowered)  # it has a mesh
        return _on_one_device(_function(program), target, work_dir, place)
    if isinstance(program, Lowered):
        backend = backend_of(target)
        if program.page != backend.page:
            raise LowerError(
                f"compile: {program.name} was lowered for memory in pages of {program.page} bytes, and on "
                f"{backend.device} they have {backend.page}: lower(func, mesh, page={backend.page}), or compile the "
                "function"
            )
        if program.inserted and not insert:
            raise LowerError(
                f"compile: copies were inserted into {program.name}, {'; '.join(program.inserted)}; compile it without "
                'redistribute="refuse", or lower a schedule that needs none'
            )
        return MeshExecutable.of(Work.from_lowered(program, target, work_dir))
    return MeshExecutable.of(_begun(_function(program, mesh), mesh, target, work_dir, insert))


def _begun(func: tirx.PrimFunc, mesh: Mesh | None, target: Target, work_dir: str | Path | None, insert: bool) -> Work:
    return replace(Work.of(func, target, mesh, work_dir), redistribute=insert)


def _on_one_device(func: tirx.PrimFunc, target: Target, work_dir: str | Path | None, place: Cache | None) -> Executable:
    axes: list[str] = []

    def on_loop(loop: tirx.For) -> None:
        axis = bound_axis(loop)
        axes.extend([] if axis is None else [axis])

    tvm_ffi.structural_walk(func.body, (tirx.For, on_loop))
    if axes:
        raise LowerError(
            f"compile: loops of the function are bound to the mesh axes {', '.join(dict.fromkeys(axes))}; name the "
            f'mesh, for example mesh=axe.Mesh({{"{axes[0]}": 2}})'
        )
    name = str(func.attrs["global_symbol"]) if "global_symbol" in (func.attrs or {}) else "main"
    # Nobody splits packing off here, so no weights are packed.
    func = func.without_attr(LAYOUT_FREE).with_attr("global_symbol", "main")
    work = run(replace(Work.of(func, target, None, work_dir), store=place), PASSES)
    assert work.scheduled is not None and isinstance(work.built, Module)
    return FunctionExecutable(name, work.scheduled, work.module, work.built, target, work.tuned)


def _model_here(
    given: list[IRModule],
    target: Target,
    work_dir: str | Path | None,
    pack_weights: bool,
    values: Values | None,
    place: Cache | None,
) -> Executable:
    """A model for one device, which is taken out of a list of one, so that nobody has it while it is packed."""
    name = None
    if place is not None:
        name = name_of(given[0], None, target, work_dir, {"pack": pack_weights, "values": values})
    if place is None or name is None:
        exe = _model(given, target, work_dir, pack_weights, values, place)
    else:
        (model,) = given
        exe = get_or_compile(place, name, model, lambda: _model([model], target, work_dir, pack_weights, values, place))
    exe.kept = place is not None
    return exe


def _model(
    given: list[IRModule],
    target: Target,
    work_dir: str | Path | None,
    pack_weights: bool,
    values: Values | None,
    place: Cache | None,
) -> Executable:
    functions = signatures(given[0])
    work = run(Work(given.pop(), target, work_dir=work_dir, values=values, store=place), model_passes(pack_weights))
    assert work.scheduled is not None and isinstance(work.built, tvm.relax.VMExecutable)
    return ModelExecutable(functions, pack_weights, work.scheduled, work.module, work.built, target, work.tuned)


def _model_on_mesh(
    model: IRModule,
    share: Callable[[], DeviceModule],
    target: Target,
    work_dir: str | Path | None,
    values: Values | None,
    pack_weights: bool,
) -> MeshModelExecutable:
    on_host = backend_of(target).on_host
    if pack_weights:
        check_packing(model)
    prepared = with_free_weights if on_host else with_made_once
    shared = prepared(share(), pack_weights)
    work = run(Work(shared.module, target, None, work_dir, values=values), DEVICE_PASSES)
    assert work.scheduled is not None
    shared, packed = with_packs(shared, work.module)
    runnable, workspaces = with_workspaces(packed)
    return MeshModelExecutable(
        signatures(model), shared, Told.of(shared), work.scheduled, runnable, workspaces, target, work.tuned,
        attached(model), pack_weights,
    )  # fmt: skip


def _function(program: Schedule | tirx.PrimFunc | IRModule, mesh: Mesh | None = None) -> tirx.PrimFunc:
    if isinstance(program, tirx.PrimFunc):
        return _schedulable(program)
    module = program.mod if isinstance(program, s_tir.Schedule) else program
    if not isinstance(module, IRModule):
        raise LowerError(f"compile: {_uncompilable(module)}")
    functions = [func for _, func in module.functions_items() if isinstance(func, tirx.PrimFunc)]
    if len(functions) != 1:
        raise LowerError(f"compile: the module has {len(functions)} functions; compile one function over whole tensors")
    return _schedulable(functions[0])


def _uncompilable(given: object) -> str:
    """Why what was given is no program, and what it has to become."""
    if isinstance(given, nn.Module):
        return f"{type(given).__name__} is a module of Relax's frontend; compile what export_tvm(...) gives first"
    if isinstance(given, tuple) and given and isinstance(given[0], IRModule):
        return "a tuple with a module first, as export_tvm gives it, is no program; compile its first element"
    return (
        f"{given!r}, a {type(given).__name__}, is no program; valid are a schedule, a function of TensorIR, "
        "@T.prim_func(s_tir=True), and a module with such a function or with a Relax model"
    )


def _schedulable(func: tirx.PrimFunc) -> tirx.PrimFunc:
    why = why_unschedulable(func)
    if why is not None:
        raise LowerError(f"compile: {why}")
    return func
