"""Streaming tensor programs: streams of tiles between operators, run for their results, for their time, or both.

`StreamProgram` builds a dataflow graph for a spatial accelerator, where shapes, lengths and routing may be known only
when it runs. `StreamProgram.run` computes it, simulates it on an `Accelerator`, or does both from the same operators.
`functions` has what is applied to tiles. `from_tile` makes such a program of a tile program. Source: Streaming Tensor
Programs (arXiv 2511.07776).
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("sympy") is None:
    raise ImportError("tvm_axe.stream needs sympy, which comes with an extra: pip install tvm-axe[stream]")

from tvm_axe.errors import StreamError
from tvm_axe.stream.memory import Accelerator, OffChip
from tvm_axe.stream.program import Feedback, Loop, Stream, StreamProgram, Tensor
from tvm_axe.stream.report import Activity, Report
from tvm_axe.stream.types import Buffer, Dim, Scalar, Selector, StreamType, Tile, Tuple, ragged, symbol
from tvm_axe.stream.views import View

if TYPE_CHECKING:
    from tvm_axe.stream.tiled.translating import TileStreams, from_tile

__all__ = [
    "Accelerator",
    "Activity",
    "Buffer",
    "Dim",
    "Feedback",
    "Loop",
    "OffChip",
    "Report",
    "Scalar",
    "Selector",
    "Stream",
    "StreamError",
    "StreamProgram",
    "StreamType",
    "Tensor",
    "Tile",
    "TileStreams",
    "Tuple",
    "View",
    "from_tile",
    "ragged",
    "symbol",
]


def __getattr__(name: str) -> object:
    # What reads tile programs needs the compiler, which streams do without.
    if name in ("TileStreams", "from_tile"):
        from tvm_axe.stream.tiled import translating

        value = globals()[name] = getattr(translating, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
