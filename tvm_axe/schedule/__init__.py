"""Who does what: schedule primitives for work and communication, and the rules under which each is valid."""

from tvm_axe.analysis.annotations import BESIDE, BIND, LAYOUTS, OVERLAP, RING, ROOT, TILE, layouts_of, with_layouts
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule.besides import beside
from tvm_axe.schedule.fusing import fuse_collective
from tvm_axe.schedule.memory import set_layout
from tvm_axe.schedule.overlapping import overlap
from tvm_axe.schedule.redistributing import redistribute
from tvm_axe.schedule.reordering import reorder_collective
from tvm_axe.schedule.schedule import Schedule
from tvm_axe.schedule.sending import send
from tvm_axe.schedule.sharding import all_reduce, shard
from tvm_axe.schedule.slicing import as_slice
from tvm_axe.schedule.splitting import split_collective
from tvm_axe.schedule.tiles import tile_kernel

__all__ = [
    "BESIDE",
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
    "beside",
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
