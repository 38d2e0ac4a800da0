"""What a schedule is expected to take, well enough to tell which ones are not worth measuring.

Of each stage: the bytes that a device moves to or from its peers, and those of its own that it touches, over the
bandwidth; and a latency for each time that it must wait for others. Arithmetic is left out: schedules of one program do
the same amount of it. (The alpha-beta model of `tvm_axe.layout.redistribute`.)
"""

from __future__ import annotations

from ..layout import Link
from ..lower import Lowered

SHARED_MEMORY = Link(latency=10e-6, bandwidth=10e9)
"""Worker processes of one machine: what waking a sleeper takes, and the memory bandwidth that a core sees."""

_WAITS = {"local": 0, "all-reduce": 2}  # of any other kind: 1


def estimate(lowered: Lowered, link: Link = SHARED_MEMORY) -> float:
    """Seconds of one run, arithmetic left out."""
    moved = sum(stage.bytes + stage.memory for stage in lowered.stages)
    waits = sum(_WAITS.get(stage.kind, 1) for stage in lowered.stages)
    return float(moved) / link.bandwidth + waits * link.latency
