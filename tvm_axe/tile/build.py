"""Tile programs compiled: `compile` gives something that is called with arrays or tensors.

Compiling needs no GPU. For one, the device code is compiled at once, by nvcc or nvrtc, and kept on disk with all other
compiled kernels (`tvm_axe.machines.cache`); of a kernel for a CPU the optimised LLVM code is kept, which needs no
linker.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import tirx
from tvm.target import Target

from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines import cache, resolve_target
from tvm_axe.machines.builder import builder_named
from tvm_axe.tile import lowering
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.executables import TileExecutable, executable
from tvm_axe.tile.knobs import declared
from tvm_axe.tile.lowering import Written
from tvm_axe.tile.plans import Plan, SequencePlan
from tvm_axe.tile.program import TileProgram, TileSequence, name_of
from tvm_axe.tile.reading import check_function
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.sequencing import in_sequence, kernels_of, takes_scratch

_RECORDS = "tvm_axe.records.knobs:recorded_knobs"
"""The name of what knows records, which lie above tile programs."""


def compile(
    program: Written,
    target: str | Mapping[str, Any] | Target = "llvm",
    store: cache.Cache | None = None,
    *,
    knobs: Mapping[str, int] | None = None,
    work_dir: str | Path | None = WORK_DIR,
) -> TileExecutable:
    """Compile a tile program.

    Parameters
    ----------
    program : PrimFunc, TileProgram or TileSequence
        A tile program (`tvm_axe.tile.kernel`), of one kernel or several, as written or as read.
    target : str | dict | Target
        As `tvm_axe.machines.resolve_target` takes it: ``"llvm"`` for this machine's CPU, ``"cuda"`` for its GPU, or
        for Hopper where there is none.
    store : Cache, optional
        Where compiled code is kept, instead of the user's cache folder.
    knobs : mapping from str to int, optional
        What the program's knobs are (`tvm_axe.tile.knobs`); those that are left out have their defaults then.
    work_dir : path, optional
        Where records of `tvm_axe.tune` lie. Without `knobs`, a program with knobs has those of its fastest record for
        the target, or its defaults if there is none; None leaves all untuned.

    Raises
    ------
    InputError
        There is no such knob or value, or the program doesn't allow them together.
    TileError
        The program is malformed, the target cannot run it, or there is no compiler for CUDA source.
    """
    if isinstance(program, TileProgram | TileSequence):
        name, why = program.name, "it was read, which is where they are set"
    else:
        check_function(program)
        name, why = name_of(program), "it declares none"
        if declared(program):
            program, knobs = _chosen(program, _resolved(target), knobs, work_dir), None
    if knobs:
        raise InputError(f"{name}: no knobs can be set, {', '.join(knobs)} neither: {why}")
    return compile_all([program], target, store)[0]


def _chosen(
    program: tirx.PrimFunc, target: Target, knobs: Mapping[str, int] | None, work_dir: str | Path | None
) -> TileProgram | TileSequence:
    """A program with its knobs as they are given, recorded, or by default."""
    if knobs is not None or work_dir is None:
        return read_function(program, knobs)
    found = builder_named(_RECORDS)(program, target, work_dir)
    if found is None:
        return read_function(program)
    values, seconds = found
    own = {knob.name: values.get(knob.name, knob.default) for knob in declared(program)}
    return read_function(program, own, f"the fastest recorded, {1e3 * seconds:.3g} ms")


def _resolved(target: str | Mapping[str, Any] | Target) -> Target:
    return resolve_target(dict(target) if isinstance(target, Mapping) else target)


def compile_all(
    programs: Sequence[Written],
    target: str | Mapping[str, Any] | Target = "llvm",
    store: cache.Cache | None = None,
) -> list[TileExecutable]:
    """Compile tile programs together: one compilation for the GPU instead of one each.

    Knobs are as a program was read with, or as their defaults have them.

    Raises
    ------
    TileError
        As `compile`, or two of them have one name.
    """
    resolved = _resolved(target)
    plans = [lowering.plan(program, resolved) for program in programs]
    names = [decided.program.name for decided in plans]
    if len(set(names)) < len(names):
        raise TileError(f"compile: programs have names of their own, got {', '.join(names)}")
    functions = [_function(decided) for decided in plans]
    mod = tvm.IRModule({name: f.with_attr("global_symbol", name) for name, f in zip(names, functions)})
    store = cache.Cache() if store is None else store
    overlap = all(decided.overlaps for decided in plans)
    backend = tile_backend_of(resolved)
    built = backend.build(mod, resolved, store, overlap)
    for decided in plans:
        for plan, own in kernels_of(decided, built):
            for what in backend.slow(plan, own):
                warnings.warn(f"{plan.program.name}: slower than it need be: {what}", stacklevel=3)
    return [executable(decided, built) for decided in plans]


def _function(decided: Plan | SequencePlan) -> tirx.PrimFunc:
    """What is compiled of a plan, to be called by an executable."""
    if isinstance(decided, SequencePlan):
        return in_sequence(decided, given=takes_scratch(decided))
    return lowering.emit(decided)
