"""Who does what: schedule primitives for work and communication, and the rules under which each is valid."""

from ..errors import ScheduleError
from .annotations import BIND, LAYOUTS, OVERLAP, RING, ROOT, TILE, layouts_of, with_layouts
from .fuse import fuse_collective
from .memory import set_layout
from .overlap import overlap
from .redistribute import redistribute
from .reorder import reorder_collective
from .schedule import Schedule
from .send import send
from .shard import all_reduce, shard
from .slice import as_slice
from .split import split_collective
from .tiles import tile_kernel

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
