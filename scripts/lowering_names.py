"""The names by which `record_lowering` reaches into the package: where its modules move, this alone is edited."""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.target import Target

import tvm_axe as axe
import tvm_axe.relax  # registers the pipeline
from tvm_axe import _tvm, tile
from tvm_axe.demo.block import SCHEDULES, block
from tvm_axe.layout import Layout
from tvm_axe.lower import lower
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import resolve_target
from tvm_axe.meta.mesh.moves import schedules
from tvm_axe.meta.mesh.seeds import seed_schedule, sharings
from tvm_axe.meta.mesh.space import first_schedules, program_workload
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.programs import PROGRAMS
from tvm_axe.records import apply_best, split_packing
from tvm_axe.records.database import normalize
from tvm_axe.records.packing import LAYOUT_FREE
from tvm_axe.records.shipped import SHIPPED
from tvm_axe.relax import compile_model
from tvm_axe.relax.fuse import fuse
from tvm_axe.schedule import with_layouts
from tvm_axe.stream import metrics
from tvm_axe.stream.programs import samples
from tvm_axe.tile.kernels import KERNELS

__all__ = [
    "KERNELS",
    "LAYOUT_FREE",
    "PROGRAMS",
    "SCHEDULES",
    "SHIPPED",
    "Layout",
    "_tvm",
    "apply_best",
    "block",
    "compile_model",
    "first_schedules",
    "fuse",
    "lower",
    "metrics",
    "normalize",
    "overlaps",
    "program_workload",
    "resolve_target",
    "runnable",
    "samples",
    "schedules",
    "seed_schedule",
    "sharings",
    "space_for",
    "split_packing",
    "tile",
    "with_layouts",
    "with_tile_kernels",
]


def runnable(exe: axe.Executable) -> tvm.IRModule:
    """What an executable's workers compile: its module with tile kernels for the blocks that chose one."""
    return exe.runnable


def overlaps(func: tirx.PrimFunc, target: Target) -> bool:
    """Whether a tile program waits for what was launched before it."""
    return tile.plan(func, target).overlaps
