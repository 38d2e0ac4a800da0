"""TVM, distributed: one layout and schedule language for computation and communication.

The public names, each loaded from its home when it is first used, so that ``tvm_axe.layout`` and the command line do
without the compiler until they need it. ``import tvm_axe.relax`` registers the Relax pipeline ``"axe"``.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ._versions import check_versions

if TYPE_CHECKING:
    from .build import compile
    from .collective import launch
    from .errors import (
        AxeError,
        InputError,
        LayoutError,
        LowerError,
        ScheduleError,
        StreamError,
        TileError,
        TuneError,
        WorkerError,
    )
    from .layout import ComposeLayout, Layout, Mesh, pack, unpack
    from .lower import Executable
    from .meta import tune
    from .schedule import Schedule, with_layouts

check_versions()

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
    "StreamError",
    "TileError",
    "TuneError",
    "WorkerError",
    "compile",
    "launch",
    "pack",
    "search",
    "tune",
    "unpack",
    "with_layouts",
]

_HOMES = {
    "build": ["compile"],
    "collective": ["launch"],
    "errors": [
        "AxeError",
        "InputError",
        "LayoutError",
        "LowerError",
        "ScheduleError",
        "StreamError",
        "TileError",
        "TuneError",
        "WorkerError",
    ],
    "layout": ["ComposeLayout", "Layout", "Mesh", "pack", "unpack"],
    "lower": ["Executable"],
    "meta": ["tune"],
    "schedule": ["Schedule", "with_layouts"],
    "searching.job": ["search"],
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
