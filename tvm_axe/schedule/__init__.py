"""Who does what: schedule primitives for work and communication, and the rules under which each is valid."""

from ..errors import ScheduleError
from .annotations import BIND, LAYOUTS, layouts_of, with_layouts
from .fuse import fuse_collective
from .memory import set_layout
from .reorder import reorder_collective
from .schedule import Schedule
from .shard import shard
from .split import split_collective

__all__ = [
    "BIND",
    "LAYOUTS",
    "Schedule",
    "ScheduleError",
    "fuse_collective",
    "layouts_of",
    "reorder_collective",
    "set_layout",
    "shard",
    "split_collective",
    "with_layouts",
]
