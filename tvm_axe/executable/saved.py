"""Executables as files: a zip archive of JSON, which holds no code that Python would run.

======================= =============================================================================================
``manifest.json``       the format, the versions that wrote it, the kind of the executable, its target and what is
                        known of it
``modules.json``        the modules by their roles, as upstream's compiler writes them, what they share once
======================= =============================================================================================

A file is for the versions that wrote it: what a lowered module means is no promise between them.
"""

from __future__ import annotations

import json
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import tvm
from tvm import relax
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import InputError
from tvm_axe.executable.alone import FunctionExecutable, ModelExecutable
from tvm_axe.executable.base import Executable
from tvm_axe.executable.coding import decoded, encoded
from tvm_axe.executable.mesh import MeshExecutable
from tvm_axe.executable.model import MeshModelExecutable, Told
from tvm_axe.executable.signatures import Signature
from tvm_axe.layout import Layout, Mesh
from tvm_axe.layout.holding import Holding
from tvm_axe.lower import Lowered, MeshBuffer, Stage
from tvm_axe.lower.calls import Argument, Call, Tensor
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.window import Window
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.keeping import store
from tvm_axe.pipeline import BUILD, Work
from tvm_axe.relax.alone import BUILD_MODEL
from tvm_axe.relax.device import DeviceFunction, DeviceModule
from tvm_axe.relax.packing import attached, with_weights, without_weights
from tvm_axe.relax.workspace import Part, Workspace

__all__ = ["read", "read_archive", "write", "write_archive"]

FORMAT, LAYOUT = "tvm_axe executable", 10
_MANIFEST, _MODULES = "manifest.json", "modules.json"
# What reading a damaged archive, or one that somebody else wrote, comes to; upstream's reader of modules raises its own
# errors as the last.
_MALFORMED = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, KeyError, TypeError, ValueError, IndexError,
    AttributeError, RuntimeError,
)  # fmt: skip


def versions() -> dict[str, str]:
    """What a file is for."""
    import tvm_axe

    names = ("apache-tvm", "apache-tvm-ffi")
    return {"tvm_axe": tvm_axe.__version__, **{name: metadata.version(name) for name in names}}


def write(exe: Executable, path: Path) -> None:
    """See `Executable.save`; what was there before is replaced at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            write_archive(exe, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # of a write that failed
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def write_archive(exe: Executable, file: Path | BinaryIO, has_weights: bool = True) -> None:
    """Write an executable's archive to a file; without the weights that a model has brought along unless told so."""
    kind, details, modules = _parts(exe, has_weights)
    manifest = {
        "format": FORMAT,
        "layout": LAYOUT,
        "versions": versions(),
        "kind": kind,
        "target": json.loads(str(exe.target)),
        "tuned": dict(exe.tuned),
        "details": details,
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(_MANIFEST, json.dumps(manifest, indent=1))
        archive.writestr(_MODULES, str(tvm.ir.save_json(modules)))  # what they share, constants above all, once


def read(path: Path) -> Executable:
    """See `Executable.load`."""
    return read_archive(path, path, None, store())


def read_archive(file: Path | BinaryIO, path: Path, model: tvm.IRModule | None, kept: Cache | None) -> Executable:
    """What was written to an archive, called `path` in messages.

    A model has again what `model` brought along, and code that is compiled for what was read is kept where that is
    asked for.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            manifest = json.loads(archive.read(_MANIFEST))
            if not isinstance(manifest, dict) or manifest["format"] != FORMAT:
                raise ValueError("it says that it is something else")
            _check_versions(path, manifest)
            target = Target(dict(manifest["target"]))
            tuned = {str(name): float(seconds) for name, seconds in manifest["tuned"].items()}
            modules = {str(role): each for role, each in _tvm.load_json(archive.read(_MODULES).decode()).items()}
            if not all(isinstance(module, tvm.IRModule) for module in modules.values()):
                raise ValueError("a part of it is no module")
            if model is not None:
                modules = {role: with_weights(module, model) for role, module in modules.items()}
            restore = _KINDS[manifest["kind"]](manifest["details"], modules)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _MALFORMED as error:
        raise InputError(
            f"{path}: no executable that Executable.save wrote, or a damaged one ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'nothing more is known'})"
        ) from error
    exe = restore(target, tuned, kept)
    if model is not None and isinstance(exe, MeshModelExecutable):
        exe.attached = attached(model)
    return exe


def _check_versions(path: Path, manifest: Mapping[str, Any]) -> None:
    if manifest["layout"] != LAYOUT:
        raise InputError(f"{path}: has the layout {manifest['layout']}; this version reads {LAYOUT}: compile it again")
    made, own = dict(manifest["versions"]), versions()
    wrong = [name for name in own if made.get(name) != own[name]]
    if wrong:
        said = "; ".join(f"{name} {made.get(name)}, and this is {own[name]}" for name in wrong)
        raise InputError(f"{path}: was saved with {said}: compile it again")


# ---- The kinds -------------------------------------------------------------------------------------------------------

Modules = Mapping[str, tvm.IRModule]
Restore = Callable[[Target, Mapping[str, float], Cache | None], Executable]
"""What makes the executable of what was read; it builds, and its faults are none of the file's."""


def _parts(exe: Executable, has_weights: bool) -> tuple[str, dict[str, Any], dict[str, tvm.IRModule]]:
    """The kind of an executable, what the manifest says of it, and its modules by their roles."""
    if isinstance(exe, MeshExecutable):
        roles = {"lowered": exe.lowered.module, "module": exe.module, "runnable": exe.runnable}
        return "mesh", _from_lowered(exe.lowered), roles
    if isinstance(exe, FunctionExecutable):
        return "function", {"name": exe.name}, {"module": exe.module, "runnable": exe.runnable}
    assert isinstance(exe, MeshModelExecutable | ModelExecutable)  # there are no other kinds
    roles = {"module": exe.module, "runnable": exe.runnable}
    if not has_weights:
        roles = {role: without_weights(module) for role, module in roles.items()}
    if isinstance(exe, MeshModelExecutable):
        weights = exe.attached if has_weights else {}
        return "mesh model", _from_shared(exe, weights), roles | {"arrays": _arrays(exe, weights)}
    functions = [each.saved() for each in exe.functions]
    return "model", {"functions": functions, "packed": exe.packed}, roles


def _mesh(details: Mapping[str, Any], modules: Modules) -> Restore:
    lowered = _to_lowered(details, modules["lowered"])
    module, runnable = modules["module"], modules["runnable"]
    return lambda target, tuned, kept: MeshExecutable(lowered, module, runnable, target, tuned)


def _function(details: Mapping[str, Any], modules: Modules) -> Restore:
    name, module, runnable = str(details["name"]), modules["module"], modules["runnable"]

    def restored(target: Target, tuned: Mapping[str, float], kept: Cache | None) -> Executable:
        built = BUILD(Work(runnable, target, store=kept)).built
        assert isinstance(built, Module)
        return FunctionExecutable(name, module, runnable, built, target, tuned)

    return restored


def _model(details: Mapping[str, Any], modules: Modules) -> Restore:
    functions = [Signature.parse(each) for each in details["functions"]]
    packed, module, runnable = bool(details["packed"]), modules["module"], modules["runnable"]

    def restored(target: Target, tuned: Mapping[str, float], kept: Cache | None) -> Executable:
        built = BUILD_MODEL(Work(runnable, target, store=kept)).built
        assert isinstance(built, relax.VMExecutable)
        return ModelExecutable(functions, packed, module, runnable, built, target, tuned)

    return restored


def _mesh_model(details: Mapping[str, Any], modules: Modules) -> Restore:
    functions = [Signature.parse(each) for each in details["functions"]]
    module, runnable, arrays = modules["module"], modules["runnable"], modules["arrays"].attrs
    tensors = {str(name): decoded(each) for name, each in details["tensors"].items()}
    shared = DeviceModule(
        module=module,
        mesh=Mesh.parse(details["mesh"]),
        coordinates=tuple(map(str, details["coordinates"])),
        functions={
            str(name): DeviceFunction(
                name=str(name),
                inputs=decoded(each["inputs"]),
                results=decoded(each["results"]),
                sizes=decoded(each["sizes"]),
                most={str(size): int(most) for size, most in each["most"].items()},
                arguments=decoded(each["arguments"]),
                levels=(),  # what was chosen is told
                checks=decoded(each["checks"]),
                overwritten=decoded(each["overwritten"]),
                objects=decoded(each["objects"]),
                left=decoded(each["left"]),
            )
            for name, each in details["device"].items()
        },
        tensors=tensors,
        constants=tuple((tensors[name], array) for name, array in zip(details["constants"], arrays["constants"])),
        packs=decoded(details["packs"]),
    )  # fmt: skip
    spaces = {
        str(name): Workspace(
            int(nbytes), tuple(Part(int(at), tuple(map(int, shape)), str(t)) for at, shape, t in parts)
        )
        for name, (nbytes, parts) in details["workspaces"].items()
    }
    told = Told(int(details["bytes"]), *(tuple(map(str, details[part])) for part in ("lines", "peers")))
    weights, packed = dict(zip(map(str, details["attached"]), arrays["attached"])), bool(details["packed"])
    return lambda target, tuned, kept: MeshModelExecutable(
        functions, shared, told, module, runnable, spaces, target, tuned, weights, packed
    )


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Modules], Restore]] = {
    "mesh": _mesh,
    "function": _function,
    "model": _model,
    "mesh model": _mesh_model,
}


# ---- What is known of a shared model ---------------------------------------------------------------------------------


_PARTS = ("inputs", "results", "sizes", "arguments", "checks", "overwritten", "objects", "left")
"""What is kept of a device's function, beside the most of its sizes."""


def _from_shared(exe: MeshModelExecutable, weights: Mapping[str, Any]) -> dict[str, Any]:
    shared = exe.shared
    return {
        "functions": [each.saved() for each in exe.functions],
        "mesh": str(shared.mesh),
        "coordinates": shared.coordinates,
        "device": {
            name: {part: encoded(getattr(each, part)) for part in _PARTS} | {"most": dict(each.most)}
            for name, each in shared.functions.items()
        },
        "tensors": {name: encoded(each) for name, each in shared.tensors.items()},
        "constants": [each.name for each, _ in shared.constants],
        "packs": encoded(shared.packs),
        "packed": exe.packed,
        "attached": list(weights),
        "workspaces": exe.workspaces,
        "bytes": exe.told.bytes,
        "lines": exe.told.lines,
        "peers": exe.told.peers,
    }


def _arrays(exe: MeshModelExecutable, weights: Mapping[str, Any]) -> tvm.IRModule:
    """The constants and weights that a model has brought along, as a module has them."""
    constants, brought = [array for _, array in exe.shared.constants], list(weights.values())
    return tvm.IRModule({}, attrs=tvm.ir.make_node("ir.DictAttrs", constants=constants, attached=brought))


# ---- What is known of a lowered function -----------------------------------------------------------------------------


def _from_lowered(lowered: Lowered) -> dict[str, Any]:
    return {
        "name": lowered.name,
        "mesh": str(lowered.mesh),
        "notation": lowered.notation,
        "stages": [asdict(stage) for stage in lowered.stages],
        "buffers": [
            {
                "name": buffer.name,
                "dtype": buffer.dtype,
                "is_input": buffer.is_input,
                "is_output": buffer.is_output,
                "is_flags": buffer.is_flags,
                "shape": buffer.sharding.shape,
                "cuts": buffer.sharding.cuts,
                "partial": sorted(buffer.sharding.partial),
                "memory": None if buffer.sharding.memory is None else str(buffer.sharding.memory),
                "root": buffer.sharding.root,
                "foreign": None if buffer.sharding.in_pieces else str(buffer.layout),
            }
            for buffer in lowered.buffers.values()
        ],
        "layouts": {name: str(layout) for name, layout in lowered.layouts.items()},
        "arguments": lowered.arguments,
        "coordinates": lowered.coordinates,
        "calls": [{**vars(call), "arguments": [_from_argument(a) for a in call.arguments], "windows": [
            None if window is None else [window.slice_rows, window.chunk_rows] for window in call.windows
        ]} for call in lowered.calls],
        "page": lowered.page,
        "forms": lowered.forms,
    }  # fmt: skip


def _from_argument(argument: Argument) -> Any:
    return [argument.buffer, argument.view, argument.shape] if isinstance(argument, Tensor) else argument


def _to_lowered(data: Mapping[str, Any], module: tvm.IRModule) -> Lowered:
    mesh = Mesh.parse(data["mesh"])
    buffers = {}
    for each in data["buffers"]:
        memory = None if each["memory"] is None else Layout.parse(each["memory"])
        root = None if each["root"] is None else (str(each["root"][0]), int(each["root"][1]))
        cuts = tuple(tuple(map(str, cut)) for cut in each["cuts"])
        shape, text = tuple(each["shape"]), each["foreign"]
        sharding = (
            Sharding.blocks(shape, mesh, cuts, frozenset(each["partial"]), memory, root)
            if text is None
            else Sharding.other(Holding.of(Layout.parse(text), shape, mesh, sums=False))
        )
        flags = [each["is_input"], each["is_output"], each["is_flags"]]
        buffers[each["name"]] = MeshBuffer(each["name"], each["dtype"], sharding, *flags)
    return Lowered(
        name=str(data["name"]),
        mesh=mesh,
        module=module,
        calls=tuple(_to_call(call) for call in data["calls"]),
        notation=str(data["notation"]),
        stages=tuple(Stage(**{**stage, "received": tuple(stage["received"])}) for stage in data["stages"]),
        buffers=buffers,
        layouts={name: Layout.parse(text) for name, text in data["layouts"].items()},
        arguments=tuple((str(name), str(view)) for name, view in data["arguments"]),
        coordinates=tuple(map(str, data["coordinates"])),
        page=int(data["page"]),
        forms=tuple(map(str, data["forms"])),
    )


def _to_call(data: Mapping[str, Any]) -> Call:
    arguments: list[Argument] = []
    for each in data["arguments"]:
        arguments.append(Tensor(each[0], each[1], tuple(each[2])) if isinstance(each, list) else each)
    windows = tuple(None if window is None else Window(*window) for window in data["windows"])
    touched = tuple((int(number), bool(is_write)) for number, is_write in data["touched"])
    return Call(**{**data, "arguments": tuple(arguments), "windows": windows, "touched": touched})
