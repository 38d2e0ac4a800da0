"""Who does what: schedule primitives for work and communication, and the rules under which each is valid."""

from tvm_axe.analysis.annotations import BIND, LAYOUTS, OVERLAP, RING, ROOT, TILE, layouts_of, with_layouts
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule.fuse import fuse_collective
from tvm_axe.schedule.memory import set_layout
from tvm_axe.schedule.overlap import overlap
from tvm_axe.schedule.redistribute import redistribute
from tvm_axe.schedule.reorder import reorder_collective
from tvm_axe.schedule.schedule import Schedule
from tvm_axe.schedule.send import send
from tvm_axe.schedule.shard import all_reduce, shard
from tvm_axe.schedule.slice import as_slice
from tvm_axe.schedule.split import split_collective
from tvm_axe.schedule.tiles import tile_kernel

__all__ = [
    "BIND",
    "LAYOUTS",
    "OVERLAP",
    "RING",
    "ROOT",
    "TILE",
    "Schedule",
    "ScheduleError",
    "all_reduce",
    "as_slice",
    "fuse_collective",
    "layouts_of",
    "overlap",
    "redistribute",
    "reorder_collective",
    "send",
    "set_layout",
    "shard",
    "split_collective",
    "tile_kernel",
    "with_layouts",
]
