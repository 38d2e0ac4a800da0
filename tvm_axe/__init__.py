"""TVM, distributed: one layout and schedule language for computation and communication.

The public names, each loaded from its home when it is first used, so that ``tvm_axe.layout`` and the command line do
without the compiler until they need it. ``import tvm_axe.relax`` registers the Relax pipeline ``"axe"``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from tvm_axe._versions import check_versions

if TYPE_CHECKING:
    from tvm_axe.checking import CheckReport, check
    from tvm_axe.collective import launch
    from tvm_axe.compiler import compile
    from tvm_axe.errors import (
        AxeError,
        CheckError,
        InputError,
        LayoutError,
        LowerError,
        ScheduleError,
        StreamError,
        TileError,
        TuneError,
        WorkerError,
    )
    from tvm_axe.executable import Executable
    from tvm_axe.executable.moving import redistribute
    from tvm_axe.layout import ComposeLayout, Layout, Mesh, pack, unpack
    from tvm_axe.meta import tune
    from tvm_axe.meta.fleet.fleet import Fleet
    from tvm_axe.schedule import Schedule, with_layouts

check_versions()

__version__ = "0.1.0"

__all__ = [
    "AxeError",
    "CheckError",
    "CheckReport",
    "ComposeLayout",
    "Executable",
    "Fleet",
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
    "check",
    "compile",
    "launch",
    "pack",
    "redistribute",
    "search",
    "tune",
    "unpack",
    "with_layouts",
]

_HOMES = {
    "checking": ["CheckReport", "check"],
    "compiler": ["compile"],
    "collective": ["launch"],
    "errors": [
        "AxeError",
        "CheckError",
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
    "executable": ["Executable"],
    "executable.moving": ["redistribute"],
    "meta": ["tune"],
    "meta.fleet.fleet": ["Fleet"],
    "schedule": ["Schedule", "with_layouts"],
    "meta.mesh.exhaustive": ["search"],
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
            return value
    # With both, Python says of a misspelt name what may have been meant.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
