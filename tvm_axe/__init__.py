"""TVM, distributed: one layout and schedule language for computation and communication."""

from ._versions import check_versions

check_versions()  # before anything imports the compiler

from .collective import launch  # noqa: E402
from .compile import compile  # noqa: E402
from .errors import AxeError, InputError, LayoutError, LowerError, ScheduleError, WorkerError  # noqa: E402
from .layout import ComposeLayout, Layout, Mesh, pack, unpack  # noqa: E402
from .lower import Executable  # noqa: E402
from .meta import tune  # noqa: E402
from .schedule import Schedule, with_layouts  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "AxeError",
    "ComposeLayout",
    "Executable",
    "InputError",
    "Layout",
    "LayoutError",
    "LowerError",
    "Mesh",
    "Schedule",
    "ScheduleError",
    "WorkerError",
    "compile",
    "launch",
    "pack",
    "tune",
    "unpack",
    "with_layouts",
]
